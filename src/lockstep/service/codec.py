"""Requests and events as JSON, for another process. What is read back is what was written: log-probabilities are
float32, which Python's shortest decimals keep to the bit. Imports no jax."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from lockstep.errors import ServiceError
from lockstep.service.requests import (
    Cancelled,
    EngineStatus,
    Finished,
    Lost,
    Progress,
    Refused,
    Retired,
    RolloutRequest,
    WorkerEvent,
)
from lockstep.types import Details, Fingerprint, FinishReason, Trajectory


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Sample:
    """A trajectory as the engine makes it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    seed: int
    group_id: str
    index: int
    fingerprint: Fingerprint
    generate_s: float
    kept_logmass: list[float] | None
    prompt_logprobs: list[float] | None  # the first, which nothing predicts, is left out
    top_ids: list[list[int]] | None
    top_logprobs: list[list[float]] | None


_REQUEST, _SAMPLE, _STATUS = TypeAdapter(RolloutRequest), TypeAdapter(Sample), TypeAdapter(EngineStatus)
_EVENTS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in (Progress, Refused, Retired, Lost)}
_DONE = {kind.__name__: kind for kind in (Finished, Cancelled)}


def request_to_json(request: RolloutRequest) -> dict[str, Any]:
    """Without the data row of its prompt, which only rewards need; an endless wait is null."""
    made = _REQUEST.dump_python(request, mode="json", exclude={"prompt": {"row"}})
    return {**made, "queue_s": None if request.queue_s == float("inf") else request.queue_s}


def request_from_json(value: object) -> RolloutRequest:
    """Raises ServiceError for anything else."""
    if isinstance(value, dict) and value.get("queue_s") is None:
        value = {k: v for k, v in value.items() if k != "queue_s"}
    return _read(_REQUEST, value, "a request")


def trajectory_to_json(t: Trajectory) -> dict[str, Any]:
    details = t.details or Details(None, None, None)
    sample = Sample(
        prompt_ids=t.prompt_ids.tolist(),
        completion_ids=t.completion_ids.tolist(),
        logprobs=t.logprobs.tolist(),
        versions=t.versions.tolist(),
        finish_reason=t.finish_reason,
        seed=t.seed,
        group_id=t.group_id,
        index=t.index,
        fingerprint=t.fingerprint,
        generate_s=t.generate_s,
        kept_logmass=None if t.kept_logmass is None else t.kept_logmass.tolist(),
        prompt_logprobs=None if details.prompt_logprobs is None else details.prompt_logprobs[1:].tolist(),
        top_ids=None if details.top_ids is None else details.top_ids.tolist(),
        top_logprobs=None if details.top_logprobs is None else details.top_logprobs.tolist(),
    )
    return _SAMPLE.dump_python(sample, mode="json")


def trajectory_from_json(value: object) -> Trajectory:
    """Raises ServiceError for anything else."""
    s: Sample = _read(_SAMPLE, value, "a sample")
    if not len(s.completion_ids) == len(s.logprobs) == len(s.versions):
        raise ServiceError(f"sample {s.index} of {s.group_id!r} has lists of several lengths; the answer is damaged")
    asked = s.prompt_logprobs is not None or s.top_ids is not None
    details = Details(
        None if s.prompt_logprobs is None else np.asarray([np.nan, *s.prompt_logprobs], np.float32),
        None if s.top_ids is None else np.asarray(s.top_ids, np.int32),
        None if s.top_logprobs is None else np.asarray(s.top_logprobs, np.float32),
    )
    return Trajectory(
        prompt_ids=np.asarray(s.prompt_ids, np.int32),
        completion_ids=np.asarray(s.completion_ids, np.int32),
        logprobs=np.asarray(s.logprobs, np.float32),
        versions=np.asarray(s.versions, np.int32),
        finish_reason=s.finish_reason,
        seed=s.seed,
        group_id=s.group_id,
        index=s.index,
        fingerprint=s.fingerprint,
        generate_s=s.generate_s,
        kept_logmass=None if s.kept_logmass is None else np.asarray(s.kept_logmass, np.float32),
        details=details if asked else None,
    )


def event_to_json(event: WorkerEvent) -> dict[str, Any]:
    kind = type(event).__name__
    if isinstance(event, Finished | Cancelled):
        samples = [trajectory_to_json(t) for t in event.trajectories]
        return {"kind": kind, "request_id": event.request_id, "trajectories": samples}
    return {"kind": kind, **_EVENTS[kind].dump_python(event, mode="json")}


def event_from_json(value: dict[str, Any]) -> WorkerEvent:
    """Raises ServiceError for anything else."""
    rest = {k: v for k, v in value.items() if k != "kind"}
    kind = value.get("kind")
    if kind in _DONE:
        samples = tuple(trajectory_from_json(t) for t in rest.get("trajectories", ()))
        return _DONE[kind](str(rest.get("request_id")), samples)
    if kind not in _EVENTS:
        raise ServiceError(f"a replica sent an event of kind {kind!r}; expected {', '.join([*_EVENTS, *_DONE])}")
    return _read(_EVENTS[kind], rest, f"a {kind} event")


def status_to_json(status: EngineStatus) -> dict[str, Any]:
    return _STATUS.dump_python(status, mode="json")


def status_from_json(value: object) -> EngineStatus:
    return _read(_STATUS, value, "an engine's status")


def _read(adapter: TypeAdapter[Any], value: object, what: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ServiceError(f"{what} cannot be read: {where}: {first['msg']}") from error
