"""Who runs next: groups wait, are prefilled once, and their samples decode side by side. Pure Python and numpy.

A sequence's cache is its group's prompt, shared by all samples, and its own pages. Attention reads pool rows by name,
position by position, so a prompt need not end on a page boundary to be shared, and nothing is ever copied. What is in
whole pages is remembered (`prefix`) and found again by later prompts that begin with the same ids, across requests and
turns.

Pages are taken when they are needed. When none can be had, the youngest sequence is preempted: its own rows are swapped
to the host, or forgotten and computed again later, whichever is cheaper. Its draws depend on (seed, index) and a row's
bits on the row alone, so it goes on as if nothing had happened.

A group belongs to a *lane*, the policy that was installed when it was submitted, and a pass is of one lane: only its
groups get rows. Slots, pages and turns are everybody's, whatever the lane.

Progress. Sequences are numbered as they are started; a running one is older than every preempted one, and that is older
than every one not started: preemption takes the youngest, and nothing is started while a preempted one waits. In every
pass of its lane the oldest running sequence gets a row: while it decodes it has one by right (`max_rows >= slots`);
while it or its prompt is being filled in, it has a slot that decodes nothing, so a row is left, and rows are given
oldest first. Lanes in which something runs take turns (`Lanes.next`), so its lane's pass comes. Pages it always
gets, in passes of other lanes too: it may preempt all others, an idle group gives its prompt back, every cached page
can be had, and `check` refuses what does not fit into the pool by itself. So the oldest finishes, then the next: no
request waits for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from lockstep.errors import CapacityError, QueueFullError
from lockstep.rollout.drafts import Drafts, Payoff, draft_rows
from lockstep.rollout.memory import Memory
from lockstep.rollout.stops import Decode, finish_reason
from lockstep.rollout.work import Drawn, GroupWork, Pass, Request, Row, RowKind, Sequence, Swap

MAX_WAITING = 4096


class Scheduler:
    """Slots and pages of one device: `slots` sequences at a time, at most `max_rows` rows per forward pass.

    max_waiting: samples that may wait to be started; a request beyond it is refused, unless nothing waits.
    swap_pays(n): whether copying n rows to the host and back is cheaper than computing them again; None: never swap.
    decode: text of ids, for requests with stop texts.
    """

    def __init__(
        self,
        slots: int,
        num_pages: int,
        page_size: int,
        max_rows: int,
        *,
        max_waiting: int = MAX_WAITING,
        swap_pays: Callable[[int], bool] | None = None,
        decode: Decode | None = None,
        drafts: Drafts | None = None,
        payoff: Payoff | None = None,
    ) -> None:
        assert max_rows >= slots, "every running sequence must fit in one pass"
        self.slots, self.max_rows, self.max_waiting = slots, max_rows, max_waiting
        self.memory = Memory(num_pages, page_size)
        self.lane = 0  # of what is submitted
        self.queue: deque[GroupWork] = deque()  # with samples that were never started
        self.running: list[Sequence] = []  # oldest first, as `preempted`
        self.preempted: list[Sequence] = []
        self.groups: dict[str, GroupWork] = {}  # every one that is not finished, by prompt id
        self.load = 0  # samples not finished; the engine sends the next group to the least loaded device
        self.num_preemptions = self.num_swaps = self.num_drafted = self.num_accepted = 0
        self.swap_pays, self._decode = swap_pays, decode
        assert (drafts is None) == (payoff is None)
        self.drafts, self.payoff = drafts, payoff
        self._started = 0
        self._save: list[Swap] = []
        self._computed_by_pass: list[tuple[GroupWork | Sequence, int]] = []

    # -- requests ----------------------------------------------------------------------------------------------------

    def retire(self, lane: int) -> int:
        """Forget a lane that has ended; returns how many pages that freed."""
        assert all(g.lane != lane for g in self.groups.values()), "samples of this policy are still under way"
        return self.memory.retire(lane)

    def known_positions(self, request: Request) -> int:
        """How many positions of its prompt are cached, were it submitted now."""
        return self.memory.known_positions(self.lane, request)

    def check(self, request: Request) -> None:
        """CapacityError if the request could never run, however long it waited."""
        length, new, memory = len(request.prompt.ids), request.params.max_new_tokens, self.memory
        assert request.seeds and (new or request.params.prompt_logprobs), "nothing to draw: it would never finish"
        if not length:
            raise CapacityError(f"prompt {request.prompt.id!r} has no tokens; a completion needs at least one to start")
        need = memory.prompt_pages(length) + memory.own_pages(length, new - 1)
        if need > memory.pages.num_pages:
            raise CapacityError(
                f"prompt {request.prompt.id!r}: {length} prompt tokens and up to {new} new ones need {need} pages of "
                f"{memory.page_size} tokens, the pool has {memory.pages.num_pages}; raise rollout.num_pages or shorten "
                "the prompt"
            )

    @property
    def num_waiting(self) -> int:
        """Samples not started yet."""
        return sum(len(g.waiting) for g in self.queue)

    def accepts(self, request: Request) -> bool:
        """Whether the queue has room for the request now."""
        return not self.queue or self.num_waiting + len(request.seeds) <= self.max_waiting

    def submit(self, request: Request) -> None:
        """Queue a request. Raises CapacityError if it can never run, QueueFullError if too many samples wait."""
        self.check(request)
        if not self.accepts(request):
            raise QueueFullError(
                f"prompt {request.prompt.id!r}: {self.num_waiting} samples wait to be started, {len(request.seeds)} "
                f"more exceed the bound of {self.max_waiting}; submit it again when some have finished"
            )
        samples = deque(range(len(request.seeds)))
        group = GroupWork(request, time.perf_counter(), samples, len(samples), self.lane)
        self.groups[request.prompt.id] = group
        self.queue.append(group)
        self.load += len(samples)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def busy(self) -> bool:
        return bool(self.groups)

    def holds(self, prompt_id: str) -> bool:
        return prompt_id in self.groups

    def open_samples(self, prompt_id: str) -> list[Sequence]:
        """Samples of a prompt that were started and are not finished."""
        return [s for s in (*self.running, *self.preempted) if s.group is self.groups.get(prompt_id)]

    # -- who runs ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before a pass, of whatever lane: who gets slots and pages."""
        self._save, self._computed_by_pass = [], []
        self._grow()
        self._admit()

    def growth(self) -> int:
        """Pages that the running sequences may need next, one each."""

        def may_grow(seq: Sequence) -> bool:
            length = seq.group.prompt_length
            return max(len(seq.rows), length) < length + seq.group.request.params.max_new_tokens - 1

        return sum(map(may_grow, self.running))

    def _grow(self) -> None:
        """A row for the newest token of every running sequence, oldest first; the youngest give way."""
        for seq in list(self.running):
            while seq in self.running and seq.tokens and len(seq.rows) < seq.group.prompt_length + len(seq.tokens):
                if self._can_have(1):
                    self.memory.extend(seq)
                else:
                    self._preempt(self.running[-1])

    def _can_have(self, pages: int, but: GroupWork | None = None) -> bool:
        """Whether so many pages can be had. Prompts that nobody reads just now, but for one, are given up for them."""
        if self.memory.pages.num_available < pages:
            for group in self.groups.values():
                if group.held and not group.running and group is not but:
                    self.memory.stop_group(group)
        return self.memory.pages.num_available >= pages

    def _preempt(self, seq: Sequence) -> None:
        """Stop a sequence for now and give its pages back."""
        self.num_preemptions += 1
        first = seq.group.prompt_length
        if seq.saved is None and seq.computed and self.swap_pays is not None and self.swap_pays(seq.computed):
            self._save.append(Swap(seq, seq.rows[first : first + seq.computed]))
            self.num_swaps += 1
        elif seq.saved is None:
            self.memory.remember(seq)
        self._stop(seq)
        self.preempted.insert(0, seq)

    def _stop(self, seq: Sequence) -> None:
        """Take a running sequence's slot and pages. Its prompt's stay while the group is not done and nobody needs
        them."""
        self.running.remove(seq)
        seq.group.running.remove(seq)
        self.memory.stop(seq)

    def _admit(self) -> None:
        """Start or resume sequences, oldest first, while slots and pages last."""
        while len(self.running) < self.slots:
            if self.preempted:
                if not self._start(self.preempted[0]):
                    return
                self.preempted.pop(0)
            elif self.queue:
                group = self.queue[0]
                if not self._start(Sequence(group, group.waiting[0], self._started)):
                    return
                self._started += 1
                group.waiting.popleft()
                if not group.waiting:
                    self.queue.popleft()
            else:
                return

    def _start(self, seq: Sequence) -> bool:
        """Give a sequence a slot, and its prompt and its tokens pages (one to begin with), if that leaves every running
        one the page that it may need next."""
        group = seq.group
        own = self.memory.own_pages(
            group.prompt_length, len(seq.tokens) or min(1, group.request.params.max_new_tokens - 1)
        )
        spare = own + self.growth()
        if group.held and not self._can_have(spare, but=group):
            if group.running:
                return False
            self.memory.stop_group(group)
        if not group.held:
            others = {id(s.group): s.group for s in self.running}.values()
            if self.memory.is_coming(group, others):
                return False
            self._can_have(self.memory.prompt_pages(group.prompt_length) + spare)
            if not self.memory.start_group(group, spare):
                return False
        self.running.append(seq)
        group.running.append(seq)
        if seq.tokens:
            self.memory.restore(seq)
        return True

    # -- one pass ----------------------------------------------------------------------------------------------------

    def schedule(self, lane: int) -> Pass:
        """The next pass of a lane, after `settle`: a row per decoding sequence, then chunks of prompts, and of tokens
        to run again, oldest first while there is room. A pass that failed is scheduled again as it was."""
        rows: list[Row] = []
        filling: dict[int, GroupWork | Sequence] = {}
        late: dict[int, GroupWork] = {}
        for seq in self.running:
            if seq.group.lane != lane:
                continue
            if not seq.group.ready:
                filling.setdefault(id(seq.group), seq.group)
            elif not seq.tokens:
                late.setdefault(id(seq.group), seq.group)
            elif seq.pending > 1:
                filling[id(seq)] = seq
            else:
                rows.append(self._row(seq, seq.computed, "decode"))
                self._computed_by_pass.append((seq, len(seq.tokens)))
        for group in late.values():
            # Started after their prompt's pass: run its last row again, for its hidden state only.
            last, fresh = group.prompt_length - 1, tuple(s for s in group.running if not s.tokens)
            rows.append(Row(group.request.prompt.ids[last], last, None, group.rows, fresh, "again"))
        for part in filling.values():
            rows += self._chunk(part, self.max_rows - len(rows))
        if self.drafts is not None:
            rows += draft_rows(self, [r.samples[0] for r in rows if r.kind == "decode"], len(rows))
        load = [Swap(s, s.rows[s.group.prompt_length :][: len(s.saved)]) for s in self.running if s.saved is not None]
        return Pass(rows, self._save, load)

    def _row(self, seq: Sequence, i: int, kind: RowKind) -> Row:
        """The row of a sequence's token i; the next token is drawn from that of the last."""
        pos, last = seq.group.prompt_length + i, i == len(seq.tokens) - 1
        return Row(seq.tokens[i], pos, int(seq.rows[pos]), seq.rows, (seq,) if last else (), kind)

    def _chunk(self, part: GroupWork | Sequence, room: int) -> list[Row]:
        """The next rows of a prompt, or of a resumed sequence, as many as there is room for. A chunk that is not the
        last ends on a page boundary where it can, so that its pages are whole."""
        if room <= 0:
            return []
        if isinstance(part, GroupWork):
            before, first, end = 0, part.prefilled, part.prompt_length
        else:
            before, first, end = part.group.prompt_length, part.computed, len(part.tokens)
        stop = min(end, first + room)
        boundary = (before + stop) // self.memory.page_size * self.memory.page_size - before
        if stop < end and boundary > first and room >= self.memory.page_size:
            stop = boundary
        self._computed_by_pass.append((part, stop))
        if isinstance(part, Sequence):
            return [self._row(part, i, "again") for i in range(first, stop)]
        ids, scored = part.request.prompt.ids, part if part.request.params.prompt_logprobs else None
        rows = [Row(ids[p], p, int(part.rows[p]), part.rows, (), "prompt", scored) for p in range(first, stop)]
        if stop == end:
            rows[-1] = replace(rows[-1], samples=tuple(s for s in part.running if not s.tokens), score=None)
        return rows

    def record(self, drawn: Iterable[Drawn]) -> list[Sequence]:
        """Take in what a pass computed and sampled; returns the sequences that this finishes, their pages given
        back."""
        for part, stop in self._computed_by_pass:
            if isinstance(part, Sequence):
                part.computed = stop
            else:
                self.memory.filled(part, stop)
        self._computed_by_pass = []
        finished = []
        new: dict[int, list[int]] = {}
        reached = accepted = 0
        for d in drawn:
            seq, got = d.sequence, new.setdefault(id(d.sequence), [])
            if not seq.draws:  # what its prompt's last row drew has shown that the output is finite, and is no token
                seq.finish = "length"
                finished.append(seq)
                continue
            if d.drafts:
                # Good if the target drew all the drafts that it comes after. What follows a wrong one was never run.
                self.num_drafted += 1
                if seq.finish or len(got) != len(d.drafts):
                    continue
                reached += 1
                if got[-1] != d.drafts[-1]:
                    continue
                accepted += 1
                seq.computed += 1
            got.append(d.token)
            seq.take(d)
            seq.finish = finish_reason(seq.tokens, seq.group.request.params, self._decode)
            if seq.finish:
                finished.append(seq)
        if self.drafts is not None and self.payoff is not None:
            self._learn(new, reached, accepted)
        for seq in finished:
            self.memory.remember(seq)
            self._stop(seq)
            self._close(seq.group, 1)
        return finished

    def go_on(self, sequences: Iterable[Sequence]) -> None:
        """Another pass ran the newest token of each of these, unscheduled."""
        self._computed_by_pass = [(seq, len(seq.tokens)) for seq in sequences]

    def _learn(self, new: dict[int, list[int]], reached: int, accepted: int) -> None:
        """Tell the drafts what was drawn, and give back what rejected ones held."""
        assert self.drafts is not None and self.payoff is not None
        self.num_accepted += accepted
        self.payoff.judged(reached, accepted)
        for seq in self.running:
            if new.get(id(seq)):
                self.drafts.drawn(seq, len(seq.tokens) - len(new[id(seq)]))
                self.memory.trim(seq)

    def _close(self, group: GroupWork, samples: int) -> None:
        self.load -= samples
        group.open -= samples
        if not group.open:
            if group.held:
                self.memory.stop_group(group)
            del self.groups[group.request.prompt.id]

    def abort(self, prompt_id: str) -> list[Sequence]:
        """Cancel a prompt's samples, between passes. Returns them with what they had so far, reason `abort`; nobody
        holds their pages any more."""
        group = self.groups.get(prompt_id)
        if group is None:
            return []
        cancelled = [Sequence(group, i) for i in group.waiting]
        if group.waiting:
            self.queue.remove(group)
            group.waiting.clear()
        cancelled += [s for s in self.preempted if s.group is group]
        self.preempted = [s for s in self.preempted if s.group is not group]
        for seq in list(group.running):
            if seq.saved is None:  # else its rows are not in the pool yet
                self.memory.remember(seq)
            self._stop(seq)
            cancelled.append(seq)
        for seq in cancelled:
            seq.finish, seq.saved = "abort", None
        self._close(group, group.open)
        return cancelled

    def take_counts(self) -> dict[str, int]:
        """What happened since this was last called, by name."""
        counts = {
            "preemptions": self.num_preemptions, "swaps": self.num_swaps, "drafted": self.num_drafted,
            "accepted": self.num_accepted, "cached_tokens": self.memory.cached_tokens,
        }  # fmt: skip
        self.num_preemptions = self.num_swaps = self.num_drafted = self.num_accepted = 0
        self.memory.cached_tokens = 0
        return counts

    def check_integrity(self) -> tuple[int, int, int, int]:
        """(free, cached, used, total) pages; asserts that pages, cache, sequences and counts agree."""
        counts = self.memory.check_integrity(self.groups.values(), self.running)
        orders = [s.order for s in (*self.running, *self.preempted)]
        assert orders == sorted(orders), "a preempted sequence is older than a running one"
        assert len(self.running) <= self.slots and not any(s.own for s in self.preempted)
        open_now = len(self.running) + len(self.preempted) + self.num_waiting
        assert open_now == self.load == sum(g.open for g in self.groups.values())
        return counts
