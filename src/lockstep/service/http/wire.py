"""Requests, events and status as JSON values, and back to the very same values. Both ends use it; imports no jax.

A float32 is written as the double that it is: 17 digits at most, read back to the same bits. NaN is null, the
infinities are the texts "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from lockstep.service.requests import ClientEvent, Ended, RolloutRequest, ServiceStatus, Started, Tokens
from lockstep.types import Details, Fingerprint, PolicyVersion, SamplingParams, Trajectory

STATUS: TypeAdapter[ServiceStatus] = TypeAdapter(ServiceStatus)


def number(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def numbers(values: Iterable[float]) -> list[float | str | None]:
    return [number(float(v)) for v in values]


def floats(values: Sequence[float | str | None]) -> np.ndarray:
    """[n] float32."""
    return np.asarray([math.nan if v is None else float(v) for v in values], np.float32)


def policy(version: PolicyVersion) -> dict[str, Any]:
    return {"number": version.number, "digest": version.digest}


def fingerprint(value: Fingerprint) -> dict[str, str]:
    return {k: getattr(value, k) for k in ("tokenizer", "template", "decoding", "numerics")}


def sample(t: Trajectory) -> dict[str, Any]:
    """A trajectory without its prompt."""
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


def trajectory(value: Mapping[str, Any], request: RolloutRequest) -> Trajectory:
    """The inverse of `sample`."""
    kept, details = value["kept_logmass"], value.get("details")
    return Trajectory(
        prompt_ids=np.asarray(request.prompt.ids, np.int32),
        completion_ids=np.asarray(value["ids"], np.int32),
        logprobs=floats(value["logprobs"]),
        versions=np.asarray(value["versions"], np.int32),
        finish_reason=value["finish_reason"],
        seed=value["seed"],
        group_id=request.id,
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
        None if ids is None else np.asarray(ids, np.int32).reshape(-1, width),
        None if logprobs is None else np.asarray([floats(row) for row in logprobs], np.float32).reshape(-1, width),
    )


def event(value: ClientEvent) -> dict[str, Any]:
    if isinstance(value, Started):
        return {"event": "started", "policy": policy(value.version), "replica": value.replica}
    if isinstance(value, Tokens):
        found = {
            "event": "tokens", "index": value.index, "ids": list(value.ids), "logprobs": numbers(value.logprobs),
        }  # fmt: skip
        if value.top:
            found["top"] = [[[i, number(p)] for i, p in row] for row in value.top]
        return found
    return {
        "event": "ended",
        "policy": None if value.policy is None else policy(value.policy),
        "outcome": value.outcome,
        "reason": value.reason,
        "samples": [sample(t) for t in value.trajectories],
    }


def client_event(value: Mapping[str, Any], request: RolloutRequest) -> ClientEvent:
    """The inverse of `event`."""
    kind = value["event"]
    if kind == "started":
        return Started(PolicyVersion(**value["policy"]), value["replica"])
    if kind == "tokens":
        top = tuple(tuple((i, _float(p)) for i, p in row) for row in value.get("top", ()))
        return Tokens(value["index"], tuple(value["ids"]), tuple(map(_float, value["logprobs"])), top)
    assert kind == "ended", kind
    ran = value["policy"]
    return Ended(
        value["outcome"],
        tuple(trajectory(s, request) for s in value["samples"]),
        value["reason"],
        None if ran is None else PolicyVersion(**ran),
    )


def _float(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def sampling(params: SamplingParams) -> dict[str, Any]:
    """Fields of `GenerateRequest`."""
    return {
        "temperature": params.temperature,
        "max_new_tokens": params.max_new_tokens,
        "stop_ids": sorted(params.stop_ids),
        "stop_strings": list(params.stop_strings),
        "min_new_tokens": params.min_new_tokens,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": [list(pair) for pair in params.logit_bias],
        "allowed_ids": None if params.allowed_ids is None else sorted(params.allowed_ids),
        "forbidden_ids": sorted(params.forbidden_ids),
        "top_logprobs": params.top_logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }
