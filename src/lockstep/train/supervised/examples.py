"""Examples: the rows of a file in the order of an epoch, and what is held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from lockstep.envs.sources import FileRows, derive_seed
from lockstep.errors import ConfigError, DataError
from lockstep.loading import nearest
from lockstep.supervised_recipe import ExamplesConfig

T = TypeVar("T")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Examples(Generic[T]):
    """train, held_out: what `make` made of the rows. identity: names the data by content, for a resume."""

    train: Sequence[T]
    held_out: Sequence[T]
    identity: str

    @staticmethod
    def read(config: ExamplesConfig, table: str, make: Callable[[Row, str], T], seed: int) -> Examples[T]:
        """table: the recipe's, for errors. make: from a row and how errors name it. Raises what `make` raises;
        ConfigError where nothing is left to train on."""
        rows = FileRows(Path(config.data), f"{table}.data")
        made = [make(rows.row(i), rows.where(i)) for i in range(rows.size)]
        if config.eval_data is not None:
            others = FileRows(Path(config.eval_data), f"{table}.eval_data")
            held_out = [make(others.row(i), others.where(i)) for i in range(others.size)]
            return Examples(made, held_out, f"{rows.describe()}; {others.describe()}")
        held = set(_order(seed, "held out", len(made))[: math.floor(config.eval_fraction * len(made))].tolist())
        train = [example for i, example in enumerate(made) if i not in held]
        if not train:
            raise ConfigError(f"{table}.eval_fraction leaves nothing to train on; use a smaller one, or more examples")
        return Examples(train, [made[i] for i in sorted(held)], f"{rows.describe()}, {len(held)} held out")

    def batches_per_epoch(self, size: int) -> int:
        return -(-len(self.train) // size)

    def batch(self, step: int, size: int, seed: int) -> list[T]:
        """The examples of update `step` (from 0): each once per epoch, in an order of the epoch's own; the last batch
        of an epoch may be smaller."""
        epoch, number = divmod(step, self.batches_per_epoch(size))
        order = _order(seed, f"epoch {epoch}", len(self.train))
        return [self.train[i] for i in order[number * size : (number + 1) * size]]

    def mapped(self, change: Callable[[Sequence[T]], Sequence[T]]) -> Examples[T]:
        """With other examples in the same places."""
        return replace(self, train=change(self.train), held_out=change(self.held_out))


@lru_cache(maxsize=1)
def _order(seed: int, what: str, count: int) -> np.ndarray:
    """A permutation by raw PCG64 words, a stream that NumPy keeps across versions. An epoch asks for its own at every
    update."""
    words = np.random.PCG64(derive_seed(seed, "examples", what)).random_raw(count)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True)
class Columns:
    """Reads fields of rows. table: the recipe's. Raises DataError naming the row and the column."""

    table: str

    def field(self, row: Row, key: str, column: str, where: str) -> Any:
        if column not in row:
            raise DataError(f"{where}: there is no column {column!r} ({self.table}.{key}); {nearest(column, row)}")
        return row[column]

    def text(self, row: Row, key: str, column: str, where: str) -> str:
        value = self.field(row, key, column, where)
        if not isinstance(value, str):
            raise DataError(f"{where}: {column!r} must be text, got {type(value).__name__} {value!r:.80}")
        return value

    def prompt(self, row: Row, column: str, where: str) -> str | list[Any]:
        value = self.field(row, "prompt_column", column, where)
        if not isinstance(value, str | list):
            raise DataError(f"{where}: the prompt must be text or a list of messages, got {value!r:.80}")
        return value

    def pair(self, row: Row, chosen: str, rejected: str, where: str) -> tuple[str, str]:
        """Two completions. Refuses two that are the same."""
        better = self.text(row, "chosen_column", chosen, where)
        worse = self.text(row, "rejected_column", rejected, where)
        if better == worse:
            raise DataError(f"{where}: the two completions are the same, so neither is better: {better!r:.80}")
        return better, worse


def require_different(chosen: np.ndarray, rejected: np.ndarray, where: str) -> None:
    """Raise DataError for two texts of a pair that are the same tokens: nothing could be learned from them, and they
    would count."""
    if np.array_equal(chosen, rejected):
        raise DataError(
            f"{where}: the two completions are the same {len(chosen)} tokens to this model's tokenizer (or template), "
            "so neither is better; leave the row out"
        )
