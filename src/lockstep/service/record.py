"""Trajectories and tokens as JSON values, and back to the very same: between the processes of a server (`codec`) and
over HTTP (`http.wire`). Imports no jax.

A float32 is written as the double that it is: 17 digits at most, read back to the same bits. NaN is null, the
infinities are the texts "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from lockstep.errors import ServiceError
from lockstep.service.requests import Tokens
from lockstep.types import Details, Fingerprint, FinishReason, Trajectory

Real = float | str | None


def number(value: float) -> Real:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def numbers(values: Iterable[float]) -> list[Real]:
    return [number(float(v)) for v in values]


def real(value: Real) -> float:
    """The inverse of `number`."""
    return math.nan if value is None else float(value)


def floats(values: Sequence[Real]) -> np.ndarray:
    """[n] float32; the inverse of `numbers`."""
    return np.asarray([real(v) for v in values], np.float32)


def fingerprint(value: Fingerprint) -> dict[str, str]:
    return {k: getattr(value, k) for k in ("tokenizer", "template", "decoding", "numerics")}


def tokens(value: Tokens) -> dict[str, Any]:
    found: dict[str, Any] = {"index": value.index, "ids": list(value.ids), "logprobs": numbers(value.logprobs)}
    if value.top:
        found["top"] = [[[i, number(p)] for i, p in row] for row in value.top]
    return found


def tokens_from(value: Mapping[str, Any]) -> Tokens:
    """The inverse of `tokens`. Raises ServiceError for anything else."""
    try:
        top = tuple(tuple((int(i), real(p)) for i, p in row) for row in value.get("top", ()))
        return Tokens(value["index"], tuple(map(int, value["ids"])), tuple(map(real, value["logprobs"])), top)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ServiceError(f"tokens cannot be read: {error!r}") from error


def sample(t: Trajectory) -> dict[str, Any]:
    """A trajectory without its prompt and its group."""
    found: dict[str, Any] = {
        "index": t.index,
        "ids": t.completion_ids.tolist(),
        "logprobs": numbers(t.logprobs),
        "kept_logmass": None if t.kept_logmass is None else numbers(t.kept_logmass),
        "versions": t.versions.tolist(),
        "finish_reason": t.finish_reason,
        "seed": t.seed,
        "fingerprint": fingerprint(t.fingerprint),
        "generate_s": t.generate_s,
    }
    if (d := t.details) is not None:
        found["details"] = {
            "prompt_logprobs": None if d.prompt_logprobs is None else numbers(d.prompt_logprobs),
            "top_ids": None if d.top_ids is None else d.top_ids.tolist(),
            "top_logprobs": None if d.top_logprobs is None else [numbers(row) for row in d.top_logprobs],
        }
    return found


def trajectory(value: Mapping[str, Any], prompt_ids: Sequence[int], group_id: str) -> Trajectory:
    """The inverse of `sample`, for a sample of this prompt. Raises ServiceError for anything else."""
    try:
        made = _trajectory(value, prompt_ids, group_id)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ServiceError(f"a sample of {group_id!r} cannot be read: {error!r}") from error
    if not len(made.completion_ids) == len(made.logprobs) == len(made.versions):
        raise ServiceError(f"sample {made.index} of {group_id!r} has lists of several lengths; the answer is damaged")
    return made


def _trajectory(value: Mapping[str, Any], prompt_ids: Sequence[int], group_id: str) -> Trajectory:
    kept, details, reason = value["kept_logmass"], value.get("details"), value["finish_reason"]
    if reason not in get_args(FinishReason):
        raise ValueError(f"finish_reason {reason!r}")
    return Trajectory(
        prompt_ids=np.asarray(prompt_ids, np.int32),
        completion_ids=np.asarray(value["ids"], np.int32),
        logprobs=floats(value["logprobs"]),
        versions=np.asarray(value["versions"], np.int32),
        finish_reason=reason,
        seed=value["seed"],
        group_id=group_id,
        index=value["index"],
        fingerprint=Fingerprint(**value["fingerprint"]),
        generate_s=value["generate_s"],
        kept_logmass=None if kept is None else floats(kept),
        details=None if details is None else _details(details),
    )


def _details(value: Mapping[str, Any]) -> Details:
    scores, ids, logprobs = value["prompt_logprobs"], value["top_ids"], value["top_logprobs"]
    width = len(ids[0]) if ids else 0
    return Details(
        None if scores is None else floats(scores),
        None if ids is None else np.asarray(ids, np.int32).reshape(len(ids), width),
        None
        if logprobs is None
        else np.asarray([floats(row) for row in logprobs], np.float32).reshape(-1, width)
        if width
        else np.zeros((len(logprobs), 0), np.float32),
    )
