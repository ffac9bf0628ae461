"""An OpenAI call carried out: admitted, listened to, answered whole or as server-sent events.

Which policy made it is said in every answer: `system_fingerprint`, headers, and an object `lockstep`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from lockstep.errors import LockstepError, ServiceError
from lockstep.service import record
from lockstep.service.http.choices import Choice, Entry
from lockstep.service.http.errors import HttpError, http_error
from lockstep.service.http.exchange import Exchange, policy_headers
from lockstep.service.http.jobs import Job
from lockstep.service.http.surface import Surface
from lockstep.service.requests import ClientEvent, Ended, RolloutRequest, Started, Tokens
from lockstep.types import PolicyVersion

EVENTS = "text/event-stream"


# Characters at which some readers of lines break one (Python's `splitlines`, and clients built on it).
_BREAKS = {c.encode(): f"\\u{ord(c):04x}".encode() for c in "\x85\u2028\u2029"}


def one_line(value: Any) -> bytes:
    """JSON that is one line to every reader."""
    data = to_json(value)
    for raw, escaped in _BREAKS.items():
        data = data.replace(raw, escaped)
    return data


class Shape(Protocol):
    """How a verb writes its choices. prefix: of ids."""

    prefix: str
    whole: str
    chunk: str

    def complete(self, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]: ...

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a choice, where it has one of its own."""
        ...

    def delta(self, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]: ...

    def closing(self, choice: Choice, reason: str) -> dict[str, Any]: ...


@dataclass
class Call:
    """requests: one per prompt; choices[r]: its samples. seed: of the call. wanted: completions are (not only the
    prompt's scores). deferred: what is asked for is known at the end only, so that nothing is streamed before; tops:
    also where a service tells the likeliest tokens at the end only. records: entries are written with the text."""

    requests: list[RolloutRequest]
    choices: list[list[Choice]]
    shape: Shape
    seed: int
    stream: bool
    usage: bool
    wanted: bool = True
    deferred: bool = False
    tops: bool = False
    records: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    version: PolicyVersion | None = None
    versions: dict[int, PolicyVersion] = field(default_factory=dict)

    @property
    def every(self) -> list[Choice]:
        return [choice for own in self.choices for choice in own]

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self.every)

    def take_in(self, number: int, event: ClientEvent) -> list[Choice]:
        """What an event means; returns the choices it has something new for. Raises HttpError where there will be no
        answer."""
        if isinstance(event, Started):
            self._started(number, event.version)
            return []
        if isinstance(event, Tokens):
            choice = self.choices[number][event.index]
            choice.deferred |= self.deferred or (self.tops and not event.top)
            if choice.deferred:
                return []
            choice.push(event.ids, event.logprobs, event.top or None)
            return [choice]
        return self._ended(number, event)

    def _started(self, number: int, version: PolicyVersion) -> None:
        before = self.versions.get(number)
        self.versions[number] = version
        if before is not None and before != version:
            if any(choice.sent for choice in self.choices[number]):
                raise HttpError(
                    503, "version_replaced",
                    f"{before} was replaced by {version} while this was streamed; what was sent is of {before}. Ask "
                    f"again: with the same seed, the answer is that of the new version",
                )  # fmt: skip
            for choice in self.choices[number]:
                choice.restart()
        self.version = version

    def _ended(self, number: int, event: Ended) -> list[Choice]:
        if event.outcome != "finished":
            raise HttpError(503, "aborted" if event.outcome == "aborted" else "service_error", event.reason)
        own = self.choices[number]
        if number not in self.versions or len(event.trajectories) != len(own):
            raise http_error(ServiceError(f"request {self.requests[number].id} ended without its samples"))
        for choice, trajectory in zip(own, event.trajectories, strict=True):
            choice.finish(trajectory, self.wanted)
        return own

    # -- what is said of all of it ------------------------------------------------------------------------------------

    def head(self, surface: Surface, kind: str, request_id: str) -> dict[str, Any]:
        assert self.version is not None
        return {
            "id": f"{self.shape.prefix}-{request_id}",
            "object": kind,
            "created": self.created,
            "model": surface.served.name,
            "system_fingerprint": f"lockstep-{self.version.number}-{self.version.digest[:16]}",
        }

    def identity(self, request_id: str, choices: Sequence[Choice] = ()) -> dict[str, Any]:
        """The object `lockstep`. choices: those of which it tells the seeds and the fingerprint."""
        assert self.version is not None
        found: dict[str, Any] = {
            "version": self.version.number,
            "digest": self.version.digest,
            "request_id": request_id,
            "seed": self.seed,
        }
        made = [c.trajectory for c in choices if c.trajectory is not None]
        if made:
            found["fingerprint"] = record.fingerprint(made[0].fingerprint)
            found["seeds"] = [t.seed for t in made]
        return found

    def used(self) -> dict[str, Any]:
        made = [c.trajectory for c in self.every if c.trajectory is not None]
        prompt = sum(len(r.prompt.ids) for r in self.requests)
        completion = sum(len(t.completion_ids) for t in made) if self.wanted else 0
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def check_one_version(self) -> None:
        if len(set(self.versions.values())) > 1:
            said = ", ".join(sorted(map(str, set(self.versions.values()))))
            raise http_error(ServiceError(f"the prompts of this call were completed under several versions: {said}"))


async def carry_out(surface: Surface, call: Call, exchange: Exchange) -> None:
    """Answer the call. Whatever comes of it, none of its requests is left behind."""
    job = Job(call.requests)
    try:
        await job.admit(surface.workers)
        surface.metrics.admitted(len(call.requests))
        if call.stream:
            await _stream(surface, call, job, exchange)
        else:
            await _whole(surface, call, job, exchange)
    finally:
        surface.workers.aside(job.close(surface.workers, "its client has left or had an error"))


async def _whole(surface: Surface, call: Call, job: Job, exchange: Exchange) -> None:
    def take_in(events: list[tuple[int, ClientEvent]]) -> None:
        for number, event in events:
            call.take_in(number, event)

    while not call.done:
        await surface.workers.start(take_in, await job.take())  # in a thread: it decodes whole completions
    call.check_one_version()
    assert call.version is not None
    answer = call.head(surface, call.shape.whole, exchange.id)
    answer["choices"] = [call.shape.complete(c, *c.take()) for c in call.every]
    answer["usage"] = call.used()
    answer["lockstep"] = call.identity(exchange.id, call.every)
    surface.metrics.sampled(call.used())
    await exchange.json(answer, headers=policy_headers(call.version))


async def _stream(surface: Surface, call: Call, job: Job, exchange: Exchange) -> None:
    fresh: dict[int, Choice] = {}
    while call.version is None:
        _take_in(call, await job.take(), fresh)
    await exchange.start(200, EVENTS, policy_headers(call.version))
    writer = _Writer(surface, call, exchange.id)
    try:
        await exchange.write(writer.openings())
        while True:
            if data := writer.news(fresh):
                await exchange.write(data)
            if call.done:
                break
            events = await job.take(surface.limits.beat_s)
            if not events:
                await exchange.write(b": waiting\n\n")
            _take_in(call, events, fresh)
        call.check_one_version()
    except (HttpError, LockstepError) as e:
        error = e if isinstance(e, HttpError) else http_error(e)
        surface.metrics.broke(error.code)
        exchange.forget()
        await exchange.end(writer.broken(error))
        return
    surface.metrics.sampled(call.used())
    await exchange.end(writer.end())


def _take_in(call: Call, events: list[tuple[int, ClientEvent]], fresh: dict[int, Choice]) -> None:
    for number, event in events:
        fresh.update((choice.index, choice) for choice in call.take_in(number, event))


class _Writer:
    """Chunks as server-sent events."""

    def __init__(self, surface: Surface, call: Call, request_id: str):
        self._call, self._id = call, request_id
        self._head = call.head(surface, call.shape.chunk, request_id)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = self._head | {"choices": choices}
        if self._call.usage:
            chunk["usage"] = None
        return b"data: " + one_line(chunk | more) + b"\n\n"

    def openings(self) -> bytes:
        identity = self._call.identity(self._id)
        opened = [self._call.shape.opening(c) for c in self._call.every]
        return b"".join(self._event([c], lockstep=identity) for c in opened if c is not None)

    def news(self, fresh: dict[int, Choice]) -> bytes:
        """What the choices have that was not sent; they are forgotten."""
        shape, out = self._call.shape, []
        for choice in fresh.values():
            text, entries = choice.take()
            if text or (entries and self._call.records):
                choice.sent = True
                out.append(self._event([shape.delta(choice, text, entries)]))
            if choice.done and not choice.announced:
                choice.announced = True
                identity = self._call.identity(self._id, [choice])
                out.append(self._event([shape.closing(choice, choice.finish_reason)], lockstep=identity))
        fresh.clear()
        return b"".join(out)

    def broken(self, error: HttpError) -> bytes:
        """The end of a stream that cannot go on: reason `abort` for every choice that is not done, then the error. No
        [DONE] follows."""
        left = [c for c in self._call.every if not c.announced]
        out = [self._event([self._call.shape.closing(c, "abort")]) for c in left]
        return b"".join(out) + b"data: " + one_line(error.body()) + b"\n\n"

    def end(self) -> bytes:
        usage = self._event([], usage=self._call.used()) if self._call.usage else b""
        return usage + b"data: [DONE]\n\n"
