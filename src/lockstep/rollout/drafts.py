"""Guesses at the tokens that come next, from text that has been seen: the prompt, and completions of the same prompt.

A draft costs a row and can save a pass. It decides nothing else: a token is kept only if it is the one that the target
draws at that place, from the same uniforms as ever, so a completion is token for token and bit for bit what it is
without drafts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as List
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from lockstep.rollout.warm_up import WarmUp
from lockstep.rollout.work import Row, Sequence
from lockstep.types import SamplingParams

if TYPE_CHECKING:
    from lockstep.rollout.scheduler import Scheduler

LONGEST, SHORTEST = 4, 2  # ids of context that are looked up
PROMPTS = 1024  # whose completions are remembered


class Seen:
    """What followed each short run of ids, in one prompt and its completions: the newest occurrence of each."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._prompt = prompt
        self._after: dict[tuple[int, ...], tuple[List[int], int]] = {}
        for i in range(SHORTEST, len(prompt)):
            self._note(prompt[max(0, i - LONGEST) : i], prompt, i)

    def _note(self, before: tuple[int, ...], where: List[int], i: int) -> None:
        for n in range(SHORTEST, len(before) + 1):
            self._after[before[-n:]] = (where, i)

    def _end(self, tokens: List[int], stop: int) -> tuple[int, ...]:
        """The last ids before token `stop`, prompt included."""
        own = tokens[max(0, stop - LONGEST) : stop]
        more = LONGEST - len(own)
        return (*(self._prompt[-more:] if more else ()), *own)

    def add(self, tokens: List[int], first: int) -> None:
        """Tokens from number `first` on were drawn. The list is kept: what it grows by later can be drafted too."""
        for i in range(first, len(tokens)):
            self._note(self._end(tokens, i), tokens, i)

    def next(self, tokens: List[int], count: int) -> list[int]:
        """What followed when the longest known run of ids at the end was last seen, `count` ids at most."""
        end = self._end(tokens, len(tokens))
        for n in range(len(end), SHORTEST - 1, -1):
            if found := self._after.get(end[-n:]):
                where, i = found
                return list(where[i : i + count])
        return []


class Drafts(Protocol):
    """Where guesses come from."""

    def propose(self, sequences: List[Sequence], counts: List[int]) -> list[list[int]]:
        """For each sequence at most so many ids that may come next."""

    def drawn(self, seq: Sequence, first: int) -> None:
        """A sequence has tokens from number `first` on that it did not have."""

    def warm_up(self, params: SamplingParams) -> WarmUp:
        """Compile what drafts for such requests need."""


class SeenDrafts:
    """Drafts by suffix, across the samples of a prompt and across its requests."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, ...], Seen] = OrderedDict()

    def _of(self, seq: Sequence) -> Seen:
        group, ids = seq.group, seq.group.request.prompt.ids
        if group.seen is None:
            group.seen = self._seen.setdefault(ids, Seen(ids))
            self._seen.move_to_end(ids)
            if len(self._seen) > PROMPTS:
                self._seen.popitem(last=False)
        return group.seen

    def propose(self, sequences: List[Sequence], counts: List[int]) -> list[list[int]]:
        """For each sequence at most so many ids that may come next."""
        return [self._of(s).next(s.tokens, n) if n else [] for s, n in zip(sequences, counts, strict=True)]

    def drawn(self, seq: Sequence, first: int) -> None:
        """A sequence has tokens from number `first` on that it did not have."""
        self._of(seq).add(seq.tokens, first)

    def warm_up(self, params: SamplingParams) -> WarmUp:
        """Nothing is compiled."""
        return WarmUp(0.0, 0)


class Payoff:
    """How many drafts per sequence pay, from measured passes and measured acceptance.

    With acceptance a per draft (each counts if all before it did) a sequence gets on by E(k) = 1 + a + .. + a^k tokens
    in a pass with k drafts. A pass of n rows takes time t(ceil(n / unit)): the fastest of the last 8 of that size; of a
    size never run, in proportion to the nearest smaller one. `best` is the k of largest E(k) / t, the smallest of
    equals: rows that would be padding are used whenever anything is accepted at all, others when they are worth their
    time. At 0, every `PROBE`th pass drafts one token, so that a text that becomes predictable is noticed.
    """

    PROBE = 32

    def __init__(self, most: int, unit: int) -> None:
        self.most, self._unit = most, unit
        self._times: dict[int, deque[float]] = {}
        self.acceptance = 0.5  # to begin with
        self._idle = 0

    def passed(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        self._times.setdefault(-(-rows // self._unit), deque(maxlen=8)).append(seconds)

    def judged(self, drafted: int, accepted: int) -> None:
        """Of so many drafts that were reached (all before them accepted) so many were accepted. Old ones fade."""
        if drafted:
            fade = 0.98**drafted
            self.acceptance = fade * self.acceptance + (1 - fade) * accepted / drafted

    def seconds(self, rows: int) -> float:
        size = -(-rows // self._unit)
        if size in self._times:
            return min(self._times[size])
        smaller = max((s for s in self._times if s < size), default=None)
        return size / smaller * min(self._times[smaller]) if smaller else float(size)

    def best(self, sequences: int, rows: int, room: int) -> int:
        """Drafts per sequence, for so many sequences in a pass of `rows` rows (theirs included) with `room` for
        more."""
        if not sequences:
            return 0
        a, found, rate = self.acceptance, 0, 0.0
        expected = 0.0
        for k in range(min(self.most, room // sequences) + 1):
            expected += a**k
            if expected / self.seconds(rows + k * sequences) > rate * (1 + 1e-9):
                found, rate = k, expected / self.seconds(rows + k * sequences)
        self._idle = 0 if found else self._idle + 1
        if self._idle >= self.PROBE and room >= sequences and self.most:
            self._idle = 0
            return 1
        return found


def draft_rows(scheduler: Scheduler, decoding: List[Sequence], rows: int) -> list[Row]:
    """Rows for drafts of decoding sequences, as many as pay. They take no page that a running sequence may need, and
    nothing after the place of the last token that may be drawn. rows: those that the pass has already."""
    drafts, payoff, memory = scheduler.drafts, scheduler.payoff, scheduler.memory
    assert drafts is not None and payoff is not None
    each = payoff.best(len(decoding), rows, scheduler.max_rows - rows)
    counts = [min(each, s.group.request.params.max_new_tokens - 1 - len(s.tokens)) for s in decoding]
    if not any(counts):
        return []
    made: list[Row] = []
    for seq, guesses in zip(decoding, drafts.propose(decoding, counts), strict=True):
        pos = seq.group.prompt_length + len(seq.tokens)
        for i, token in enumerate(guesses, 1):
            if pos >= len(seq.rows):
                if memory.pages.num_available <= scheduler.growth():
                    break
                memory.extend(seq)
            made.append(Row(token, pos, int(seq.rows[pos]), seq.rows, (seq,), "draft", None, tuple(guesses[:i])))
            pos += 1
    # Every row of a sequence reads the rows as they are after the last page was added.
    return [replace(r, read=r.samples[0].rows) for r in made]
