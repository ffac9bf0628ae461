"""The loop's rollout role: batches are asked for ahead, and collected in order.

    batches = Batches(service, sampling, seed=run.seed, samples=8)
    batches.ask([Batch(4, prompts, min_version=2)])
    batch = batches.collect(4, deadline_s=3600)           # waits until every group of it has ended

The same code whether the service is in this process or behind HTTP. What it says arrives in its threads; everything
else here is called from the loop's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from lockstep.errors import FingerprintError, LockstepError, QueueFullError, ServiceError
from lockstep.rollout.engine import request_seed
from lockstep.service.requests import ClientEvent, Ended, RolloutRequest, Rollouts, Started
from lockstep.types import Fingerprint, Prompt, SamplingParams, Trajectory

FULL_S = 0.25  # how long to wait before a request is sent again that a full queue refused


@dataclass
class Batch:
    """The rollouts of one step. number: the step's. prompts: one group each. min_version: oldest version that may
    sample them. ends: by group, what came of it. asked, first, last: seconds (`time.perf_counter`) at which it was
    asked for, a request was sent to a replica for the first time, and the last group so far ended. served_by: group ->
    replica that has, or had, it."""

    number: int
    prompts: list[Prompt]
    min_version: int
    ends: dict[str, Ended] = field(default_factory=dict)
    served_by: dict[str, str] = field(default_factory=dict)
    asked: float = 0.0
    first: float | None = None
    last: float = 0.0

    @property
    def done(self) -> bool:
        return len(self.ends) == len(self.prompts)

    def busy(self, now: float) -> tuple[float, float] | None:
        """From when to when some replica worked on it, until now; None before any does."""
        return None if self.first is None else (self.first, self.last if self.done else now)

    def missing(self) -> str:
        """In words, what is not there yet."""
        waits = [p.id for p in self.prompts if p.id not in self.ends]
        at = self.served_by.get(waits[0])
        where = f"at replica {at}" if at is not None else "at no replica yet"
        return (
            f"step {self.number} waits for its rollouts: {len(self.ends)} of {len(self.prompts)} groups are here, the "
            f"first that is missing is {waits[0]!r}, {where}"
        )


class Batches:
    """Batches under way, by step.

    params: of every request. seed: the run's; a sample's own follows from it, the step, prompt and index
    (`engine.request_seed`). samples: per group. together: what is submitted inside it starts at once, so that passes
    are made of the same rows on every run.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        *,
        seed: int,
        samples: int,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._rollouts, self._params, self._seed, self._samples = rollouts, params, seed, samples
        self._together = together
        self._under_way: dict[int, Batch] = {}
        self._unsent: deque[tuple[Batch, Prompt]] = deque()
        self._changed = threading.Condition()

    def __contains__(self, number: int) -> bool:
        return number in self._under_way

    def ask(self, batches: Sequence[Batch]) -> None:
        """Submit them, in order. What a full queue refuses is sent again later, while a batch is collected. Raises as
        `Rollouts.submit` does."""
        for batch in batches:
            assert batch.number not in self._under_way, f"step {batch.number} was asked for before"
            batch.asked = time.perf_counter()
            self._under_way[batch.number] = batch
            self._unsent += [(batch, prompt) for prompt in batch.prompts]
        with self._together():
            self._send()

    def collect(self, number: int, deadline_s: float) -> Batch:
        """The batch, once all of it has ended; it is under way no more. Raises ServiceError, naming what is missing,
        when that takes longer than the deadline."""
        batch, until = self._under_way[number], time.monotonic() + deadline_s
        while True:
            self._send()
            with self._changed:
                if batch.done:
                    del self._under_way[number]
                    return batch
                left = until - time.monotonic()
                if left <= 0:
                    raise ServiceError(
                        f"{batch.missing()}, after {deadline_s:g} s (rollout.deadline_s); {self.service_says()}"
                    )
                self._changed.wait(min(left, FULL_S if self._unsent else 1.0))

    def waits_for(self, number: int) -> str:
        """In words, what collecting a batch waits for."""
        batch = self._under_way.get(number)
        if batch is None or batch.done:
            return f"step {number} goes on"
        return f"{batch.missing()}; {self.service_says()}"

    def service_says(self) -> str:
        """The service's state in words."""
        try:
            status = self._rollouts.status()
        except LockstepError as error:
            return f"the service does not say what it does: {error}"
        replicas = ", ".join(
            f"{r.name} {'serves ' + str(r.active) if r.alive else 'is lost'} ({r.requests} requests)"
            for r in status.replicas
        )
        waits = f"; the oldest that waits does so for {status.waiting_for}" if status.waiting_for else ""
        return f"service: {status.running} requests run, {status.waiting} wait{waits}; replicas: {replicas or 'none'}"

    def busy(self, also: Sequence[Batch] = ()) -> dict[int, tuple[float, float]]:
        """Step -> from when to when a replica worked on its batch, of those under way and of `also`."""
        with self._changed:
            now = time.perf_counter()
            found = {b.number: b.busy(now) for b in (*also, *self._under_way.values())}
        return {number: interval for number, interval in found.items() if interval is not None}

    @property
    def open(self) -> int:
        """Groups that have been sent and have not ended."""
        with self._changed:
            asked = sum(len(b.prompts) - len(b.ends) for b in self._under_way.values())
            return asked - len(self._unsent)

    def close(self) -> None:
        """Cancel what is under way; nobody will collect it."""
        self._unsent.clear()
        with self._changed:
            ids = [p.id for b in self._under_way.values() for p in b.prompts if p.id not in b.ends]
            self._under_way.clear()
        for request_id in ids:
            self._rollouts.cancel(request_id, "the run stopped")

    def _send(self) -> None:
        while self._unsent:
            batch, prompt = self._unsent[0]
            seeds = tuple(request_seed(self._seed, batch.number, prompt.id, i) for i in range(self._samples))
            request = RolloutRequest(prompt, seeds, self._params, min_version=batch.min_version)
            try:
                self._rollouts.submit(request, partial(self._hear, batch, prompt.id))
            except QueueFullError:
                return
            self._unsent.popleft()

    def _hear(self, batch: Batch, group: str, event: ClientEvent) -> None:
        now = time.perf_counter()
        with self._changed:
            if isinstance(event, Started):
                batch.first = now if batch.first is None else batch.first
                batch.served_by[group] = event.replica
            elif isinstance(event, Ended):
                batch.ends[group], batch.last = event, now
                self._changed.notify_all()


def consumable(batch: Batch, oldest: int, on_lost: str) -> tuple[list[Trajectory], dict[str, str]]:
    """(trajectories of the groups that may be trained on, in order; group -> why it may not), a group whole or not at
    all. oldest: the oldest version that a token may be of.

    Raises ServiceError for a group that did not finish, where on_lost is "fail".
    """
    kept: list[Trajectory] = []
    dropped: dict[str, str] = {}
    for prompt in batch.prompts:
        end = batch.ends[prompt.id]
        if end.outcome != "finished":
            if on_lost == "fail":
                raise ServiceError(
                    f"group {prompt.id!r} of step {batch.number} {end.outcome}: {end.reason}. Resume from the newest "
                    'checkpoint; `rollout.on_lost` = "drop" goes on without such groups'
                )
            dropped[prompt.id] = f"{end.outcome}: {end.reason}"
            continue
        found = min((int(t.versions.min()) for t in end.trajectories if len(t.versions)), default=oldest)
        if found < oldest:
            dropped[prompt.id] = f"stale: it holds tokens of policy version {found}, {oldest} is the oldest allowed"
            continue
        kept += sorted(end.trajectories, key=lambda t: t.index)
    return kept, dropped


def accepted(trajectories: list[Trajectory], trainer: Fingerprint, version: int, *, cut: bool) -> list[Trajectory]:
    """The trajectories, once each is known to come from a version that there was and from this numerical path (M13).

    version: of the weights that train. cut: whether samples from a part of the vocabulary may be trained on.
    """
    for t in trajectories:
        wrong = trainer.difference(t.fingerprint)
        if wrong:
            raise FingerprintError(
                f"sample {t.index} of {t.group_id!r} was made under another {', '.join(wrong)} than the trainer's; "
                f"trainer: {trainer}, sample: {t.fingerprint}"
            )
        if t.kept_logmass is not None and not cut:
            raise FingerprintError(
                f"sample {t.index} of {t.group_id!r} was drawn from a part of the vocabulary only; with "
                '`rollout.truncation` = "correct" it could be trained on'
            )
        unknown = t.versions > version
        if unknown.any():
            raise FingerprintError(
                f"sample {t.index} of {t.group_id!r} holds tokens of policy version {t.versions[unknown][0]}; this "
                f"step trains version {version}, and no later one is known"
            )
    return trajectories


def dropped_counts(dropped: Mapping[str, str]) -> dict[str, int]:
    """dropped/REASON: groups that were left out."""
    reasons = [why.partition(":")[0] for why in dropped.values()]
    return {f"dropped/{reason}": reasons.count(reason) for reason in ("stale", "aborted", "failed")}
