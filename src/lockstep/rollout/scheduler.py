"""Who runs next: groups wait, are prefilled once, and their samples decode side by side. Pure Python and numpy.

A sequence's cache is two runs of pages: its group's prompt, shared by all samples, and its own completion. Because
attention reads pool rows by name, position by position, a prompt need not end on a page boundary to be shared, and
nothing is ever copied. All pages a sequence can need are reserved when it is admitted, so a running sequence never
stalls. Groups are admitted in order, and the next only when every sample of the one before it has been: the last one
admitted can then always get what the earlier ones give back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from lockstep.errors import CapacityError
from lockstep.rollout.pages import PagePool
from lockstep.types import FinishReason, Prompt, SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt and a seed per wanted sample. Sample i is drawn from (seeds[i], tokens so far) alone."""

    prompt: Prompt
    seeds: tuple[int, ...]
    params: SamplingParams


@dataclass(eq=False)
class Sequence:
    """One sample on its way. read: pool row of every position it can reach; own: its completion pages."""

    group: GroupWork
    index: int
    own: list[int] = field(default_factory=list)
    read: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass(eq=False)
class GroupWork:
    """A request being worked on. prefilled: prompt positions whose keys and values are in the pool."""

    request: Request
    since: float
    pages: list[int] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    prefilled: int = 0
    waiting: deque[int] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt.ids)


@dataclass(frozen=True)
class Work:
    """One row of the next forward pass. `samples` are the sequences whose next token is drawn from this row.
    write None: the row's key and value are in the pool already and must not be written again."""

    token: int
    pos: int
    write: int | None
    read: np.ndarray
    samples: tuple[Sequence, ...]


class Scheduler:
    """Slots and pages of one device: `slots` sequences at a time, at most `max_rows` rows per forward pass."""

    def __init__(self, slots: int, num_pages: int, page_size: int, max_rows: int) -> None:
        assert max_rows >= slots, "every running sequence must fit in one pass"
        self.slots, self.page_size, self.max_rows = slots, page_size, max_rows
        self.pages = PagePool(num_pages)
        self.queue: deque[GroupWork] = deque()
        self.groups: list[GroupWork] = []
        self.load = 0  # samples waiting or running; the engine sends the next group to the least loaded device
        self._prefilled_now: list[tuple[GroupWork, int]] = []

    # -- admission ---------------------------------------------------------------------------------------------------

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def check(self, request: Request) -> None:
        """CapacityError if the request could never run, however long it waited."""
        assert request.seeds and request.params.max_new_tokens > 0, "nothing to draw: it would never finish"
        if not request.prompt.ids:
            raise CapacityError(f"prompt {request.prompt.id!r} has no tokens; a completion needs at least one to start")
        need = self.pages_for(len(request.prompt.ids)) + self.pages_for(request.params.max_new_tokens)
        if need > self.pages.num_pages:
            raise CapacityError(
                f"prompt {request.prompt.id!r}: {len(request.prompt.ids)} prompt tokens and up to "
                f"{request.params.max_new_tokens} new ones need {need} pages of {self.page_size} tokens, the pool has "
                f"{self.pages.num_pages}; raise rollout.num_pages or shorten the prompt"
            )

    def submit(self, request: Request) -> None:
        self.check(request)
        self.queue.append(GroupWork(request, time.perf_counter(), waiting=deque(range(len(request.seeds)))))
        self.load += len(request.seeds)

    @property
    def num_running(self) -> int:
        return sum(len(g.running) for g in self.groups)

    @property
    def busy(self) -> bool:
        return bool(self.groups or self.queue)

    def holds(self, prompt_id: str) -> bool:
        """Whether a prompt of this id is waiting or under way."""
        return any(g.request.prompt.id == prompt_id for g in (*self.groups, *self.queue))

    def _rows_of(self, pages: Iterable[int]) -> np.ndarray:
        starts = np.asarray(list(pages), np.int32) * self.page_size
        return (starts[:, None] + np.arange(self.page_size, dtype=np.int32)).reshape(-1)

    def _admit(self) -> None:
        while True:
            newest = self.groups[-1] if self.groups else None
            if newest is not None and newest.waiting:
                if not self._admit_sample(newest):
                    return
            elif not self.queue or not self._admit_group(self.queue[0]):
                return

    def _admit_group(self, group: GroupWork) -> bool:
        prompt, own = self.pages_for(group.prompt_length), self.pages_for(group.request.params.max_new_tokens)
        if self.num_running >= self.slots or self.pages.num_free < prompt + own:
            return False
        self.queue.popleft()
        group.pages = self.pages.take(prompt)
        group.rows = self._rows_of(group.pages)[: group.prompt_length]
        self.groups.append(group)
        return True

    def _admit_sample(self, group: GroupWork) -> bool:
        own = self.pages_for(group.request.params.max_new_tokens)
        if self.num_running >= self.slots or self.pages.num_free < own:
            return False
        seq = Sequence(group, group.waiting.popleft(), self.pages.take(own))
        self.pages.hold(group.pages)
        seq.read = np.concatenate([group.rows, self._rows_of(seq.own)])
        group.running.append(seq)
        return True

    # -- one pass ----------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        """The rows of the next pass: one per decoding sequence, then prompt chunks while there is room."""
        self._admit()
        work: list[Work] = []
        self._prefilled_now = []
        for group in self.groups:
            work += self._decode_rows(group)
        for group in self.groups:
            room = self.max_rows - len(work)
            if group.prefilled < group.prompt_length and room > 0:
                work += self._prefill_rows(group, room)
        return work

    def _decode_rows(self, group: GroupWork) -> list[Work]:
        rows = []
        for seq in group.running:
            if seq.tokens:
                pos = group.prompt_length + len(seq.tokens) - 1
                rows.append(Work(seq.tokens[-1], pos, int(seq.read[pos]), seq.read, (seq,)))
        fresh = tuple(s for s in group.running if not s.tokens)
        if fresh and group.prefilled == group.prompt_length:
            # Admitted after their prompt's pass: run its last row again, for its hidden state only.
            last = group.prompt_length - 1
            rows.append(Work(group.request.prompt.ids[last], last, None, group.rows, fresh))
        return rows

    def _prefill_rows(self, group: GroupWork, room: int) -> list[Work]:
        first, stop = group.prefilled, min(group.prompt_length, group.prefilled + room)
        self._prefilled_now.append((group, stop))
        done = tuple(s for s in group.running if not s.tokens) if stop == group.prompt_length else ()
        ids = group.request.prompt.ids
        return [
            Work(ids[p], p, int(group.rows[p]), group.rows, done if p == group.prompt_length - 1 else ())
            for p in range(first, stop)
        ]

    def record(self, drawn: Iterable[tuple[Sequence, int, float]]) -> list[Sequence]:
        """Take in what was sampled; returns the sequences that this finishes, their pages given back."""
        for group, stop in self._prefilled_now:
            group.prefilled = stop
        finished = []
        for seq, token, logprob in drawn:
            seq.tokens.append(token)
            seq.logprobs.append(logprob)
            params = seq.group.request.params
            if token in params.stop_ids:
                seq.finish = "stop"
            elif len(seq.tokens) >= params.max_new_tokens:
                seq.finish = "length"
            if seq.finish:
                finished.append(seq)
        for seq in finished:
            self._retire(seq)
        return finished

    def _retire(self, seq: Sequence) -> None:
        group = seq.group
        group.running.remove(seq)
        self.load -= 1
        self.pages.release(seq.own)
        self.pages.release(group.pages)
        if not group.running and not group.waiting:
            self.pages.release(group.pages)
            self.groups.remove(group)

    def abort(self, prompt_id: str) -> list[Sequence]:
        """Cancel a prompt's samples, between passes. Returns them with what they had so far, reason `abort`; their
        pages are free again."""
        cancelled: list[Sequence] = []
        for group in [g for g in (*self.groups, *self.queue) if g.request.prompt.id == prompt_id]:
            cancelled += [Sequence(group, i, finish="abort") for i in group.waiting]
            self.load -= len(group.waiting)
            group.waiting.clear()
            if group in self.queue:
                self.queue.remove(group)
                continue
            for seq in list(group.running):
                seq.finish = "abort"
                cancelled.append(seq)
                self._retire(seq)
            if group in self.groups:  # admitted, but none of its samples were running
                self.pages.release(group.pages)
                self.groups.remove(group)
        return cancelled
