"""What the scheduler moves about: requests, groups, sequences, and the rows of one forward pass. Pure Python and
numpy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lockstep.types import FinishReason, Prompt, SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt and a seed per wanted sample. Sample i is drawn from (seeds[i], tokens so far) alone. first: number of
    the first token that is drawn, where the prompt ends in tokens of the completion (a draft model's requests)."""

    prompt: Prompt
    seeds: tuple[int, ...]
    params: SamplingParams
    first: int = 0


Likeliest = tuple[np.ndarray, np.ndarray]  # ids [n] int32, their log-probabilities [n] float32


def no_rows() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(eq=False)
class GroupWork:
    """A request being worked on.

    lane: the installed policy that it stays on (`lanes`). rows [P]: pool row of every prompt position, held: the pages
    that they lie in; both empty while no sample of the group runs. prefilled: prompt positions whose keys and values
    are in the pool. waiting: samples that have not been started; open: those that are not finished. scores [P]:
    log-probabilities of the prompt's ids, where they are asked for. seen: what `drafts.SeenDrafts` knows of the prompt.
    """

    request: Request
    since: float
    waiting: deque[int]
    open: int
    lane: int = 0
    rows: np.ndarray = field(default_factory=no_rows)
    held: list[int] = field(default_factory=list)
    prefilled: int = 0
    running: list[Sequence] = field(default_factory=list)
    scores: np.ndarray | None = None
    seen: Any = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt.ids)

    @property
    def ready(self) -> bool:
        """Whether samples can go on from the prompt."""
        return self.prefilled == self.prompt_length


@dataclass(eq=False)
class Sequence:
    """One sample on its way, tokens t_0.. at positions P.. after its prompt's P.

    order: when it was started; the smaller, the older. rows: pool row of every position that has one, the prompt's
    included (empty until the first own position needs one); own: the pages it holds. computed: how many of its tokens
    have keys and values in the pool. saved: the own rows' content in the host's memory, put there by the engine when
    the sequence was swapped out.
    """

    group: GroupWork
    index: int
    order: int = -1
    own: list[int] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=no_rows)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    top: list[Likeliest] = field(default_factory=list)
    computed: int = 0
    finish: FinishReason | None = None
    saved: Any = None

    @property
    def draws(self) -> bool:
        """Whether tokens are wanted, not only the prompt's scores."""
        return self.group.request.params.max_new_tokens > 0

    @property
    def pending(self) -> int:
        """Tokens that still have to run; the last one's row is where the next token is drawn."""
        return len(self.tokens) - self.computed

    def take(self, drawn: Drawn) -> None:
        """One more token, with its record."""
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        self.kept.append(drawn.kept)
        if drawn.top is not None:
            self.top.append(drawn.top)

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.group.request.prompt.ids, *self.tokens)


RowKind = Literal["prompt", "decode", "again", "draft"]


@dataclass(eq=False, slots=True)  # not frozen: that makes them several times slower, and there are many
class Row:
    """One row of the next forward pass. `samples` are the sequences whose next token is drawn from this row.

    write None: the row's key and value are in the pool already and must not be written again. kind: a prompt's token, a
    completion's newest, or a token that is run again (after a preemption, or for its hidden state). score: the group
    whose prompt's next id is to be scored from this row. drafts: guesses at the sequence's next tokens, up to this
    row's own.
    """

    token: int
    pos: int
    write: int | None
    read: np.ndarray
    samples: tuple[Sequence, ...]
    kind: RowKind
    score: GroupWork | None = None
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Swap:
    """Own rows of a sequence to copy to the host, or back."""

    sequence: Sequence
    rows: np.ndarray


@dataclass
class Pass:
    """One forward pass. First everything in `save` is copied out, then everything in `load` in, then the rows run."""

    rows: list[Row] = field(default_factory=list)
    save: list[Swap] = field(default_factory=list)
    load: list[Swap] = field(default_factory=list)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(eq=False, slots=True)
class Drawn:
    """A token that was sampled for a sequence; its log-probability under the whole softmax at the temperature (nats);
    by how much that is less under the distribution drawn from; the likeliest ids, where they are asked for; the drafts
    after which it was drawn."""

    sequence: Sequence
    token: int
    logprob: float
    kept: float = 0.0
    top: Likeliest | None = None
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class OpenSample:
    """A sample that is not finished; what was drawn so far, to be read before the next step: the lists go on."""

    index: int
    tokens: List[int]
    logprobs: List[float]
    top: List[Likeliest]
