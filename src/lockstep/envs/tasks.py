"""Tasks: where prompts come from, as a pure function of how many were handed out.

    reasoning_gym   an endless stream of generated problems
    file            JSONL or Parquet; every row once per epoch, in an order drawn from (run seed, epoch)
    function        the user's `module:function`; `rows(index, seed) -> dict`, endless

A source gives rows by index; a task gives the order and turns rows into prompts. All rows of a file are read, rendered
and measured before the first step, so that bad data stops a run at its start and not after a night.

Imports no jax; pyarrow and reasoning_gym are imported when a recipe asks for them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.envs.base import PromptTokenizer, Task
from lockstep.envs.sources import FileSource, FunctionSource, ReasoningGymSource, Source, derive_seed
from lockstep.envs.template import Rendered, Template
from lockstep.errors import ConfigError, DataError
from lockstep.loading import nearest
from lockstep.types import Prompt

if TYPE_CHECKING:
    from lockstep.config import TaskConfig

MAX_CONSECUTIVE_SKIPS = 1000


def make_task(config: TaskConfig, tokenizer: PromptTokenizer, seed: int) -> Task:
    """The task that a recipe's `[task]` table asks for.

    seed: the run's; it decides the order of a file's rows and the problems of a generated stream.
    Raises: ConfigError when the recipe names something that is not there; DataError when the data cannot be used.
    """
    template = Template(config, tokenizer)
    if config.kind == "file":
        return _Epochs(FileSource(config), template, config, seed)
    if config.kind == "function":
        return _Stream(FunctionSource(config, seed), template, config)
    return _Stream(ReasoningGymSource(config, seed), template, config)


class _Rows:
    """Picks rows by `task.keep`, renders them and applies `max_prompt_tokens`."""

    def __init__(self, source: Source, template: Template, config: TaskConfig):
        self._source, self._template = source, template
        self._max_tokens = config.max_prompt_tokens
        self._skip = config.too_long == "skip"
        self._keep = {name: re.compile(pattern) for name, pattern in config.keep.items()}

    def __call__(self, index: int) -> tuple[dict[str, Any], Rendered] | None:
        """Row `index` and its prompt; None when `task.keep` leaves it out, or when it is over the limit and the recipe
        says to skip such rows."""
        row, where = self._source.row(index), self._source.where(index)
        fields = self._source.fields(row, where)
        if not all(pattern.fullmatch(self._field(fields, name, where)) for name, pattern in self._keep.items()):
            return None
        rendered = self._template.render(self._source.question(row, where), fields, where)
        if len(rendered.ids) <= self._max_tokens:
            return row, rendered
        if self._skip:
            return None
        raise DataError(
            f"{where}: the prompt has {len(rendered.ids)} tokens, task.max_prompt_tokens is {self._max_tokens}. "
            'Raise the limit, shorten the data, or set task.too_long = "skip" to leave such rows out, counted; '
            f"prompts are never cut. It begins {rendered.text[:80]!r}"
        )

    @staticmethod
    def _field(fields: Mapping[str, Any], name: str, where: str) -> str:
        if name not in fields:
            raise ConfigError(f"task.keep names {name!r}, which {where} does not have; {nearest(name, list(fields))}")
        return str(fields[name])

    def describe(self, skipped: int) -> str:
        kept = "".join(f", {name} like {pattern.pattern!r}" for name, pattern in self._keep.items())
        dropped = f", {skipped} left out so far" if self._skip or self._keep else ""
        return f"{self._template.describe()} of at most {self._max_tokens} tokens{kept}{dropped}"


class _Epochs(Task):
    """A finite source, over and over: each epoch holds every usable row exactly once.

    Prompt number c is row order(epoch)[c mod N] of epoch c div N, with N the number of usable rows. The order of an
    epoch is the argsort of N raw PCG64 words seeded by (seed, epoch): a stream that NumPy keeps across versions.
    """

    def __init__(self, source: Source, template: Template, config: TaskConfig, seed: int):
        assert source.size is not None
        self._source, self._rows = source, _Rows(source, template, config)
        self._seed, self._shuffle = seed, config.shuffle
        self._usable = [index for index in range(source.size) if self._rows(index) is not None]
        self._order: tuple[int, np.ndarray] | None = None
        if not self._usable:
            raise DataError(
                f"{source.name}: each of the {source.size} rows is over task.max_prompt_tokens = "
                f"{config.max_prompt_tokens} or not one that task.keep = {dict(config.keep)} wants, so none is left"
            )

    def prompts(self, cursor: int, n: int) -> list[Prompt]:
        assert cursor >= 0 and n >= 0, (cursor, n)
        return [self._prompt(*divmod(position, len(self._usable))) for position in range(cursor, cursor + n)]

    def _prompt(self, epoch: int, position: int) -> Prompt:
        index = self._usable[int(self._epoch_order(epoch)[position])]
        made = self._rows(index)
        assert made is not None, "the row fitted when the file was read"
        row, rendered = made
        return Prompt(f"{self._source.name}/{epoch}/{index}", rendered.text, rendered.ids, row, rendered.messages)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Positions into the usable rows, [N]; the latest epoch's is kept."""
        if self._order is None or self._order[0] != epoch:
            count = len(self._usable)
            words = np.random.PCG64(derive_seed(self._seed, "epoch", epoch)).random_raw(count)
            self._order = (epoch, np.argsort(words, kind="stable") if self._shuffle else np.arange(count))
        return self._order[1]

    @property
    def skipped(self) -> int:
        assert self._source.size is not None
        return self._source.size - len(self._usable)

    def describe(self) -> str:
        order = "shuffled in every epoch" if self._shuffle else "in the file's order"
        return f"{self._source.describe()}, {order}; {self._rows.describe(self.skipped)}"


class _Stream(Task):
    """An endless source: prompt number c is item c, or the (c+1)-th item that fits when others are left out.

    Which items are skipped is found by going through the stream from its start, once per process (a resumed run repeats
    that, in order to continue at the same item).
    """

    def __init__(self, source: Source, template: Template, config: TaskConfig):
        self._source, self._rows = source, _Rows(source, template, config)
        self._scanned = 0  # items looked at, from 0
        self._left_out: list[int] = []  # those of them that were skipped, ascending
        self.prompts(0, 1)  # a recipe that does not fit the rows is found out now

    def prompts(self, cursor: int, n: int) -> list[Prompt]:
        assert cursor >= 0 and n >= 0, (cursor, n)
        while self._scanned - len(self._left_out) < cursor:
            self._prompt(self._scanned)
        index = self._index(cursor)
        found: list[Prompt] = []
        while len(found) < n:
            prompt = self._prompt(index)
            found += [prompt] if prompt is not None else []
            index += 1
        return found

    def _index(self, position: int) -> int:
        """Index of item number `position` among those that fit; at least that many have been scanned."""
        index = position
        while (shifted := position + bisect_right(self._left_out, index)) != index:
            index = shifted
        return index

    def _prompt(self, index: int) -> Prompt | None:
        made = self._rows(index)
        if index == self._scanned:
            self._scanned += 1
            if made is None:
                self._left_out.append(index)
                self._refuse_endless_skips()
        if made is None:
            return None
        row, rendered = made
        return Prompt(f"{self._source.name}/0/{index}", rendered.text, rendered.ids, row, rendered.messages)

    def _refuse_endless_skips(self) -> None:
        recent = self._left_out[-MAX_CONSECUTIVE_SKIPS:]
        if len(recent) == MAX_CONSECUTIVE_SKIPS and recent[-1] - recent[0] == MAX_CONSECUTIVE_SKIPS - 1:
            raise DataError(
                f"{self._source.name}: items {recent[0]} to {recent[-1]} are all over task.max_prompt_tokens or not "
                "what task.keep wants; raise the limit, ask for shorter problems, or widen the pattern"
            )

    @property
    def skipped(self) -> int:
        return len(self._left_out)

    def describe(self) -> str:
        return f"{self._source.describe()}, endless; {self._rows.describe(self.skipped)}"
