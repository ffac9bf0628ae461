"""Requests and events as JSON, for another process. What is read back is what was written, to the bit: samples and
tokens as `record` writes them. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lockstep.errors import ServiceError
from lockstep.service import record
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
from lockstep.types import Trajectory

_REQUEST, _STATUS = TypeAdapter(RolloutRequest), TypeAdapter(EngineStatus)
_EVENTS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in (Refused, Retired, Lost)}
_DONE = {kind.__name__: kind for kind in (Finished, Cancelled)}


def request_to_json(request: RolloutRequest) -> dict[str, Any]:
    """Without the data row and the messages of its prompt, which only the loop needs; an endless wait is null."""
    made = _REQUEST.dump_python(request, mode="json", exclude={"prompt": {"row", "messages"}})
    return {**made, "queue_s": None if request.queue_s == float("inf") else request.queue_s}


def request_from_json(value: object) -> RolloutRequest:
    """Raises ServiceError for anything else."""
    if isinstance(value, dict) and value.get("queue_s") is None:
        value = {k: v for k, v in value.items() if k != "queue_s"}
    return _read(_REQUEST, value, "a request")


def event_to_json(event: WorkerEvent) -> dict[str, Any]:
    kind = type(event).__name__
    if isinstance(event, Finished | Cancelled):
        samples = [
            record.sample(t) | {"group_id": t.group_id, "prompt_ids": t.prompt_ids.tolist()} for t in event.trajectories
        ]
        return {"kind": kind, "request_id": event.request_id, "trajectories": samples}
    if isinstance(event, Progress):
        return {"kind": kind, "request_id": event.request_id, "tokens": record.tokens(event.tokens)}
    return {"kind": kind, **_EVENTS[kind].dump_python(event, mode="json")}


def event_from_json(value: dict[str, Any]) -> WorkerEvent:
    """Raises ServiceError for anything else."""
    rest = {k: v for k, v in value.items() if k != "kind"}
    kind = value.get("kind")
    if kind in _DONE:
        samples = tuple(_trajectory(t) for t in rest.get("trajectories", ()))
        return _DONE[kind](str(rest.get("request_id")), samples)
    if kind == Progress.__name__:
        return Progress(str(rest.get("request_id")), record.tokens_from(rest.get("tokens", {})))
    if kind not in _EVENTS:
        known = ", ".join([*_EVENTS, *_DONE, Progress.__name__])
        raise ServiceError(f"a replica sent an event of kind {kind!r}; expected {known}")
    return _read(_EVENTS[kind], rest, f"a {kind} event")


def _trajectory(value: Mapping[str, Any]) -> Trajectory:
    try:
        prompt_ids, group_id = value["prompt_ids"], value["group_id"]
    except (KeyError, TypeError) as error:
        raise ServiceError(f"a sample cannot be read: {error!r}") from error
    return record.trajectory(value, prompt_ids, group_id)


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
