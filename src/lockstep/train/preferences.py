"""Preference pairs: from the rows of a file to token ids, in the order of an epoch, and what is held out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.envs.sources import FileRows, derive_seed
from lockstep.errors import ConfigError, DataError
from lockstep.loading import nearest
from lockstep.reward_recipe import PreferencesConfig
from lockstep.train.scored_text import ScoredText


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt as whole sequences [S] int32, and by how much the first should score higher."""

    chosen: np.ndarray
    rejected: np.ndarray
    margin: float


@dataclass(frozen=True)
class Preferences:
    """train, held_out: pairs. identity: names the data by content, for a resume."""

    train: list[Pair]
    held_out: list[Pair]
    identity: str

    @staticmethod
    def read(config: PreferencesConfig, text: ScoredText, seed: int) -> Preferences:
        """Raises DataError naming the row: no such column, a value that is not text, a sequence that is too long, two
        completions that are the same; ConfigError where nothing is left to train on."""
        rows = FileRows(Path(config.data), "reward_model.data")
        pairs = _pairs(rows, config, text)
        if config.eval_data is not None:
            others = FileRows(Path(config.eval_data), "reward_model.eval_data")
            return Preferences(pairs, _pairs(others, config, text), f"{rows.describe()}; {others.describe()}")
        held = set(_order(seed, "held out", len(pairs))[: math.floor(config.eval_fraction * len(pairs))].tolist())
        train = [pair for i, pair in enumerate(pairs) if i not in held]
        return Preferences(train, [pairs[i] for i in sorted(held)], f"{rows.describe()}, {len(held)} held out")

    def batches_per_epoch(self, size: int) -> int:
        return -(-len(self.train) // size)

    def batch(self, step: int, size: int, seed: int) -> list[Pair]:
        """The pairs of update `step` (from 0): every pair once per epoch, in an order of the epoch's own; the last
        batch of an epoch may be smaller."""
        epoch, number = divmod(step, self.batches_per_epoch(size))
        order = _order(seed, f"epoch {epoch}", len(self.train))
        return [self.train[i] for i in order[number * size : (number + 1) * size]]


def _order(seed: int, what: str, count: int) -> np.ndarray:
    """A permutation by raw PCG64 words, a stream that NumPy keeps across versions."""
    words = np.random.PCG64(derive_seed(seed, "preferences", what)).random_raw(count)
    return np.argsort(words, kind="stable")


def _pairs(rows: FileRows, config: PreferencesConfig, text: ScoredText) -> list[Pair]:
    return [_pair(rows.row(i), config, text, rows.where(i)) for i in range(rows.size)]


def _pair(row: Mapping[str, Any], config: PreferencesConfig, text: ScoredText, where: str) -> Pair:
    prompt = _field(row, "prompt_column", config.prompt_column, where)
    if not isinstance(prompt, str | list):
        raise DataError(f"{where}: the prompt must be text or a list of messages, got {prompt!r:.80}")
    chosen, rejected = (
        _text(row, key, column, where)
        for key, column in (("chosen_column", config.chosen_column), ("rejected_column", config.rejected_column))
    )
    if chosen == rejected:
        raise DataError(f"{where}: the two completions are the same, so neither is better: {chosen!r:.80}")
    margin = 0.0
    if config.margin_column is not None:
        found = _field(row, "margin_column", config.margin_column, where)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise DataError(f"{where}: {config.margin_column!r} must be a finite number, got {found!r:.80}")
        margin = float(found)
    sides = [text.ids(prompt, completion, where) for completion in (chosen, rejected)]
    return Pair(sides[0], sides[1], margin)


def _text(row: Mapping[str, Any], key: str, column: str, where: str) -> str:
    value = _field(row, key, column, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} must be text, got {type(value).__name__} {value!r:.80}")
    return value


def _field(row: Mapping[str, Any], key: str, column: str, where: str) -> Any:
    if column not in row:
        raise DataError(f"{where}: there is no column {column!r} (reward_model.{key}); {nearest(column, row)}")
    return row[column]


def require_trainable(preferences: Preferences) -> None:
    """Raise ConfigError where everything is held out."""
    if not preferences.train:
        raise ConfigError("reward_model.eval_fraction leaves no pair to train on; use a smaller one, or more pairs")


def sequences_of(pairs: Sequence[Pair]) -> tuple[list[np.ndarray], list[str]]:
    """Chosen and rejected of each pair in turn, and the group of each: its pair."""
    sequences = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    return sequences, [f"pair/{i // 2}" for i in range(len(sequences))]
