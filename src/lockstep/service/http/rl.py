"""The verbs under /v1/rl/: tokens in, tokens out, with everything that was recorded; versions; pauses; status."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from lockstep.service import record
from lockstep.service.controls import Source
from lockstep.service.http import wire
from lockstep.service.http.errors import HttpError, bad
from lockstep.service.http.exchange import Exchange, policy_headers
from lockstep.service.http.fields import (
    AbortRequest,
    CancelRequest,
    CommitRequest,
    GenerateRequest,
    NothingRequest,
    ScoreRequest,
    StageRequest,
)
from lockstep.service.http.jobs import Job
from lockstep.service.http.sampling import check_count, check_ids, check_prompt, check_temperature, rl_params
from lockstep.service.http.surface import Surface
from lockstep.service.requests import Ended, RolloutRequest, Started
from lockstep.text import did_you_mean
from lockstep.types import Prompt

LINES = "application/x-ndjson"


def prepare(surface: Surface, body: GenerateRequest, exchange: Exchange) -> RolloutRequest:
    limits = surface.limits
    check_prompt(len(body.prompt_ids), surface.served, limits, "prompt_ids")
    check_count("samples in one call", len(body.seeds), limits.samples, "seeds")
    check_ids(body.prompt_ids, surface.served, "prompt_ids")
    return RolloutRequest(
        Prompt(f"rl-{exchange.id}", "", tuple(body.prompt_ids)),
        tuple(body.seeds),
        rl_params(body, surface.served, limits),
        group=body.group,
        min_version=body.min_version,
        stream=body.stream,
        key=exchange.key,
        queue_s=float("inf") if body.queue_s is None else body.queue_s,
    )


async def generate(surface: Surface, body: GenerateRequest, exchange: Exchange) -> None:
    request = await surface.workers.start(prepare, surface, body, exchange)
    job = Job([request])
    try:
        await job.admit(surface.workers)
        surface.metrics.admitted(1)
        said: dict[str, Any] = {"request_id": request.id, "id": body.id}
        if body.stream:
            await _lines(surface, request, job, exchange, said)
        else:
            await _whole(surface, request, job, exchange, said)
    finally:
        surface.workers.aside(job.close(surface.workers, "its client has left"))


async def _whole(surface: Surface, request: RolloutRequest, job: Job, exchange: Exchange, said: dict[str, Any]) -> None:
    replica = None
    while True:
        for _, event in await job.take():
            if isinstance(event, Started):
                replica = event.replica
            elif isinstance(event, Ended):
                if event.outcome == "failed":
                    raise HttpError(503, "service_error", event.reason)
                if event.outcome == "aborted":
                    exchange.forget()
                answer = wire.event(event)
                del answer["event"]
                _count(surface, request, event)
                headers = {} if event.policy is None else policy_headers(event.policy)
                await exchange.json(said | {"replica": replica} | answer, headers=headers)
                return


async def _lines(surface: Surface, request: RolloutRequest, job: Job, exchange: Exchange, said: dict[str, Any]) -> None:
    """One event per line, in order; the first says that it was admitted, the last how it ended."""
    await exchange.start(200, LINES, {})
    await exchange.write(to_json({"event": "admitted"} | said) + b"\n")
    while True:
        events = [event for _, event in await job.take(surface.limits.beat_s)]
        data = b"".join(to_json(wire.event(e)) + b"\n" for e in events) or b'{"event":"waiting"}\n'
        if events and isinstance(ended := events[-1], Ended):
            if ended.outcome != "finished":
                exchange.forget()
            _count(surface, request, ended)
            await exchange.end(data)
            return
        await exchange.write(data)


def _count(surface: Surface, request: RolloutRequest, ended: Ended) -> None:
    tokens = sum(len(t.completion_ids) for t in ended.trajectories)
    surface.metrics.sampled({"prompt_tokens": len(request.prompt.ids), "completion_tokens": tokens})


async def cancel(surface: Surface, body: CancelRequest, exchange: Exchange) -> None:
    await surface.workers.start(surface.service.cancel, body.request_id, body.reason)
    await exchange.json({"request_id": body.request_id})


async def score(surface: Surface, body: ScoreRequest, exchange: Exchange) -> None:
    limits = surface.limits
    check_temperature(body.temperature)
    check_count("sequences in one call", len(body.sequences), limits.samples, "sequences")
    for sequence in body.sequences:
        check_prompt(len(sequence), surface.served, limits, "sequences")
        check_ids(sequence, surface.served, "sequences")
    scored = await surface.workers.start_slow(surface.service.score, body.sequences, body.temperature)
    results = [{"policy": wire.policy(version), "logprobs": record.numbers(values)} for version, values in scored]
    await exchange.json({"results": results})


# -- versions, pauses --------------------------------------------------------------------------------------------------


def _source(surface: Surface, body: StageRequest) -> Source:
    kind, place, token, digest = body.source.kind, body.source.place, body.source.token, body.source.digest
    for name, value in (("token", token), ("digest", digest)):
        if (value is not None) != (kind == "transfer"):
            needed = f"a transfer needs the {name} of the offer" if value is None else f"{kind} has no {name}"
            raise bad(f"source.{name}: {needed}", f"source.{name}")
    if kind == "files":
        return Source(kind, str(_inside(surface.served.weights_dir, place)))
    pattern = (
        r"[A-Za-z0-9._-]{1,200}"
        if kind == "shared_memory"
        else r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"
    )
    if not re.fullmatch(pattern, place) or place.startswith("."):
        expected = "the name of a segment" if kind == "shared_memory" else "host:port"
        raise bad(f"source.place: expected {expected}, got {place!r:.100}", "source.place")
    return Source(kind, place, token or "", digest or "")


def _inside(folder: Path | None, place: str) -> Path:
    """The folder meant, links followed; HttpError unless it is a folder inside `folder`. Nothing is said of what is
    outside, not even whether it is there."""
    if folder is None:
        raise HttpError(403, "no_weights_dir", "this server stages no files; it was started without --weights-dir")
    outside = HttpError(403, "outside_weights_dir", "source.place is not a folder inside the server's --weights-dir")
    if "\0" in place:
        raise outside
    try:
        root = folder.resolve(strict=True)
        path = (root / place).resolve()
    except (OSError, RuntimeError):  # links in a circle, say
        raise outside from None
    if not path.is_relative_to(root) or path == root:
        raise outside
    if path.is_dir():
        return path
    shown = repr(path.relative_to(root).as_posix()[:200])
    if path.exists():
        raise bad(
            f"source.place: {shown} of the server's --weights-dir is a file; name the folder that it is in",
            "source.place",
        )
    near = did_you_mean(path.name, (p.name for p in path.parent.glob("*") if p.is_dir()), show=repr)
    raise HttpError(
        404,
        "no_such_folder",
        f"source.place: there is no folder {shown} in the server's --weights-dir; write the version there first{near}",
        "source.place",
    )


async def stage(surface: Surface, body: StageRequest, exchange: Exchange) -> None:
    source = await surface.workers.start(_source, surface, body)
    await exchange.json(await surface.workers.start_slow(surface.controls.stage, source, body.number))


async def commit(surface: Surface, body: CommitRequest, exchange: Exchange) -> None:
    await exchange.json(await surface.workers.start_slow(surface.controls.commit, body.number, body.policy))


async def abort_version(surface: Surface, body: AbortRequest, exchange: Exchange) -> None:
    await exchange.json(await surface.workers.start_slow(surface.controls.abort_version, body.number))


async def pause(surface: Surface, body: NothingRequest, exchange: Exchange) -> None:
    await surface.workers.start_slow(surface.controls.pause)
    await exchange.json({"paused": True})


async def resume(surface: Surface, body: NothingRequest, exchange: Exchange) -> None:
    await surface.workers.start_slow(surface.controls.resume)
    await exchange.json({"paused": False})


async def status(surface: Surface, body: None, exchange: Exchange) -> None:
    now = await surface.workers.start(surface.service.status)
    await exchange.json(wire.STATUS.dump_python(now, mode="json"))
