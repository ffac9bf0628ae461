"""A rollout service without a model: real threads, queues, versions, ends; what it "samples" follows from the prompt.

Token t of a sample is the prompt's token (t + seed) mod P, its log-probability follows from (version, token, t).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.errors import CapacityError, ConfigError, DataError, QueueFullError, ServiceError, SyncError
from lockstep.service.controls import Source
from lockstep.service.requests import (
    Ended,
    EngineStatus,
    OnEvent,
    Outcome,
    ReplicaStatus,
    RolloutRequest,
    ServiceStatus,
    Started,
    Tokens,
    UpdatePolicy,
)
from lockstep.types import Details, Fingerprint, FinishReason, PolicyVersion, Trajectory

FINGERPRINT = Fingerprint("t" * 8, "c" * 8, "d" * 8, "n" * 8)


def version_of(number: int) -> PolicyVersion:
    return PolicyVersion(number, f"{number:02x}" * 16)


def logprob(version: int, token: int, at: int) -> float:
    return float(np.float32(-((version * 31 + token * 7 + at) % 97 + 1) / 41))


@dataclass
class Under:
    """A request under way."""

    request: RolloutRequest
    on_event: OnEvent
    cancelled: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)


class FakeService:
    """script: ids every sample gives instead of the echo. step_s: time of a token. decode: for stop texts.
    before_token: called with (request, sample, position), to hold a request there."""

    def __init__(
        self,
        *,
        vocab: int = 262,
        max_positions: int = 4096,
        max_waiting: int = 10_000,
        step_s: float = 0.0,
        threads: int = 16,
        eos: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
        script: Callable[[RolloutRequest, int], Sequence[int]] | None = None,
        tops: bool = True,
    ):
        self.vocab, self.max_positions, self.max_waiting, self.step_s = vocab, max_positions, max_waiting, step_s
        self.decode, self.script, self.tops = decode, script, tops
        self.version = version_of(1)
        self.staged: int | None = None
        self.sources: list[Source] = []
        self.paused = threading.Event()
        self.closing = False
        self.lock = threading.RLock()
        self.under_way: dict[str, Under] = {}
        self.seen: list[RolloutRequest] = []
        self.ended: dict[Outcome, int] = {"finished": 0, "aborted": 0, "failed": 0}
        self.ends: dict[Outcome, list[str]] = {}
        self.reasons: dict[str, int] = {}
        self.fail_with: str | None = None
        self.lost: PolicyVersion | None = None
        self.before_token: Callable[[RolloutRequest, int, int], None] | None = None
        self._pool = ThreadPoolExecutor(threads, "fake")

    # -- Rollouts

    def submit(self, request: RolloutRequest, on_event: OnEvent) -> None:
        with self.lock:
            if self.closing:
                raise ServiceError("the service is closing")
            if request.id in self.under_way:
                raise DataError(f"{request.id!r} is under way already")
            if len(self.under_way) >= self.max_waiting:
                raise QueueFullError(f"{self.max_waiting} requests wait already")
            if problems := request.params.problems(self.vocab):
                raise ConfigError("; ".join(problems))
            need = len(request.prompt.ids) + request.params.max_new_tokens
            if need > self.max_positions:
                raise CapacityError(f"{need} positions are needed, there are {self.max_positions}")
            under = Under(request, on_event)
            self.under_way[request.id] = under
            self.seen.append(request)
        self._pool.submit(self._run, under)

    def cancel(self, request_id: str, reason: str) -> None:
        with self.lock:
            under = self.under_way.get(request_id)
        if under is not None and under.cancelled is None:
            under.cancelled = reason

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[tuple[PolicyVersion, list[float]]]:
        return [
            (self.version, [float("nan"), *(logprob(self.version.number, t, i) for i, t in enumerate(s[1:], 1))])
            for s in sequences
        ]

    def status(self) -> ServiceStatus:
        with self.lock:
            running = len(self.under_way)
            engine = EngineStatus((self.version,), running, 0, (10, 2, 3, 15), 100, 5.0)
            staged = None if self.staged is None else version_of(self.staged)
            replica = ReplicaStatus("replica/0", True, self.version, staged, None, True, running, engine)
            return ServiceStatus(
                self.version, self.paused.is_set(), self.closing, 0, running, dict(self.ended), dict(self.reasons), 0,
                "", (replica,), freed={"versions": 2, "weight_bytes": 4096, "pages": 5}, lost=self.lost,
            )  # fmt: skip

    # -- Controls

    def pause(self) -> None:
        self.paused.set()

    def resume(self) -> None:
        self.paused.clear()

    def stage(self, source: Source, number: int) -> dict[str, Any]:
        if number <= self.version.number:
            raise SyncError(f"version {number} is not newer than {self.version}")
        self.staged, self.sources = number, [*self.sources, source]
        return {"version": number, "replicas": ["replica/0"]}

    def commit(self, number: int, policy: UpdatePolicy | None = None) -> dict[str, Any]:
        if self.staged != number:
            raise SyncError(f"version {number} is not staged")
        self.version, self.staged = version_of(number), None
        return {"version": number}

    def abort_version(self, number: int) -> dict[str, Any]:
        if self.staged != number:
            raise SyncError(f"version {number} is not staged")
        self.staged = None
        return {"version": number}

    def close(self, deadline_s: float) -> dict[Outcome, list[str]]:
        with self.lock:
            self.closing, self.ends = True, {"finished": [], "aborted": [], "failed": []}
        until = time.monotonic() + deadline_s
        while self.under_way and time.monotonic() < until:
            time.sleep(0.005)
        for under in list(self.under_way.values()):
            under.cancelled = "the service is closing"
        while self.under_way:
            time.sleep(0.005)
        self._pool.shutdown()
        return self.ends

    # -- the "engine"

    def _run(self, under: Under) -> None:
        request = under.request
        waited_until = time.monotonic() + request.queue_s
        while self.paused.is_set() and under.cancelled is None:
            if time.monotonic() > waited_until:
                return self._end(under, Ended("failed", (), f"waited {request.queue_s} s for a replica"))
            time.sleep(0.005)
        if self.fail_with is not None:
            return self._end(under, Ended("failed", (), self.fail_with))
        while True:
            version = self.version
            under.on_event(Started(version, "replica/0"))
            made = [self._sample(under, version, i) for i in range(len(request.seeds))]
            if under.cancelled is not None:
                return self._end(under, Ended("aborted", tuple(made), under.cancelled, version))
            if None not in made:
                return self._end(under, Ended("finished", tuple(made), policy=version))

    def _end(self, under: Under, ended: Ended) -> None:
        with self.lock:
            del self.under_way[under.request.id]
            self.ended[ended.outcome] += 1
            if self.closing:
                self.ends[ended.outcome].append(under.request.id)
            if ended.outcome != "finished":
                self.reasons[ended.reason] = self.reasons.get(ended.reason, 0) + 1
        under.on_event(ended)

    def _sample(self, under: Under, version: PolicyVersion, index: int) -> Any:
        """None: the policy was replaced, it is made anew."""
        request, params = under.request, under.request.params
        prompt, seed = request.prompt.ids, request.seeds[index]
        script = None if self.script is None else self.script(request, index)
        ids: list[int] = []
        scores: list[float] = []
        reason: FinishReason = "abort"
        while under.cancelled is None:
            at = len(ids)
            if at >= params.max_new_tokens:
                reason = "length"
                break
            if self.before_token is not None:
                self.before_token(request, index, at)
            if self.version != version:
                return None
            if self.step_s:
                time.sleep(self.step_s)
            if script is not None and at >= len(script):
                token = min(params.stop_ids, default=0)
            else:
                token = script[at] if script is not None else prompt[(at + seed) % len(prompt)]
            ids.append(token)
            scores.append(logprob(version.number, token, at))
            if request.stream:
                top = (tuple(self._top(version, token, at, params.top_logprobs)),) if params.top_logprobs else ()
                under.on_event(Tokens(index, (token,), (scores[-1],), top if self.tops else ()))
            text = self.decode(ids) if self.decode and params.stop_strings else ""
            if token in params.stop_ids or any(s in text for s in params.stop_strings):
                reason = "stop"
                break
        return self._trajectory(request, version, index, ids, scores, reason)

    def _top(self, version: PolicyVersion, token: int, at: int, count: int) -> list[tuple[int, float]]:
        return [
            ((token + k) % self.vocab, float(np.float32(logprob(version.number, token, at) - k))) for k in range(count)
        ]

    def _trajectory(
        self, request: RolloutRequest, version: PolicyVersion, index: int, ids: list[int], scores: list[float],
        reason: FinishReason,
    ) -> Trajectory:  # fmt: skip
        params, prompt, details = request.params, request.prompt.ids, None
        if params.top_logprobs or params.prompt_logprobs:
            tops = [self._top(version, t, i, params.top_logprobs) for i, t in enumerate(ids)]
            scored = [float("nan"), *(logprob(version.number, t, i) for i, t in enumerate(prompt[1:], 1))]
            details = Details(
                np.asarray(scored, np.float32) if params.prompt_logprobs else None,
                np.asarray([[i for i, _ in t] for t in tops], np.int32) if params.top_logprobs else None,
                np.asarray([[p for _, p in t] for t in tops], np.float32) if params.top_logprobs else None,
            )
        return Trajectory(
            prompt_ids=np.asarray(prompt, np.int32),
            completion_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(scores, np.float32),
            versions=np.full(len(ids), version.number, np.int32),
            finish_reason=reason,
            seed=request.seeds[index],
            group_id=request.id,
            index=index,
            fingerprint=FINGERPRINT,
            kept_logmass=np.asarray(scores, np.float32) / 3 if params.truncates else None,
            generate_s=0.25,
            details=details,
        )
