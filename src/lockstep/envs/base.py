"""What tasks and rewards share: the nouns `Task` and `Score`.

A task turns a position (the cursor) into prompts and keeps no other state, so a run resumes by remembering one
integer. A reward turns completions into `Score`s and never invents a value: a sample without a reward says why.

Imports no jax.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.types import Prompt


@dataclass(frozen=True)
class Score:
    """What one completion earned.

    value: the weighted sum over the reward functions; NaN when `failed` is set.
    parts: the unweighted value of each function under its name in the recipe; NaN for a function that failed here.
    failed: why there is no reward (function, exception), or None. A failed sample is left out of training and counted.
    replaced: what failed and counts as the recipe's `error_score`, in `parts` and `value`; None where nothing did.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None
    replaced: str | None = None


class Task(ABC):
    """An endless supply of prompts, addressed by position."""

    @abstractmethod
    def prompts(self, cursor: int, n: int) -> list[Prompt]:
        """The `n` prompts after the first `cursor` of the run.

        A pure function of its arguments: `prompts(0, a + b) == prompts(0, a) + prompts(a, b)`, in any order of calls
        and in any process. The cursor is all that a checkpoint has to hold.

        Raises: DataError when a row cannot become a prompt.
        """

    @property
    @abstractmethod
    def skipped(self) -> int:
        """Rows left out so far: not what `task.keep` wants, or too long where `task.too_long = "skip"`."""

    @abstractmethod
    def describe(self) -> str:
        """One line: the data and its digest or version, the order, the limit, what was skipped."""


class PromptTokenizer(Protocol):
    """The part of `lockstep.models.tokenizer.Tokenizer` that a task needs."""

    @property
    def has_template(self) -> bool: ...

    bos_id: int | None
    adds_bos: bool

    def encode_filled(self, template: str, fields: Mapping[str, str]) -> list[int]: ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str: ...

    def apply_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...
