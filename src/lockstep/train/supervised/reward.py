"""Reward models: pairs of whole sequences, the score of each at its last token, the Bradley-Terry loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.algorithms.bradley_terry import bradley_terry
from lockstep.errors import DataError
from lockstep.models.catalog import LoadedModel, load_value_model
from lockstep.models.fetch import Say
from lockstep.models.spec import ModelSpec, require_decoder
from lockstep.supervised_recipe import RewardRecipe
from lockstep.train.batching import Geometry, MicroBatch
from lockstep.train.scored_text import ScoredText
from lockstep.train.sequences import at_last, last_of, sequence_batches
from lockstep.train.supervised.examples import Columns, Row, require_different
from lockstep.train.supervised.objective import Objective

LARGEST_MARGIN = 1e6  # far beyond any difference of scores; float32 holds losses of this size


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt as whole sequences [S] int32, and by how much the first should score higher."""

    chosen: np.ndarray
    rejected: np.ndarray
    margin: float


class PairObjective(Objective[Pair]):
    NAME: ClassVar[str] = "reward model"

    @classmethod
    def spec(cls, found: ModelSpec, name: str) -> ModelSpec:
        require_decoder(found, name)
        return replace(found, scalar_head=True)

    @classmethod
    def load(cls, recipe: RewardRecipe, say: Say | None) -> LoadedModel:
        std, seed = recipe.reward_model.head_std, recipe.run.seed
        return load_value_model(recipe.model.name, recipe.model.dtype, std=std, seed=seed, say=say)

    def __init__(self, recipe: RewardRecipe, model: LoadedModel) -> None:
        wanted = self._wanted = recipe.reward_model
        self._seed, self._columns = recipe.run.seed, Columns(recipe.TABLE)
        self._text = ScoredText(model.tokenizer, wanted.template, wanted.end, wanted.max_tokens)
        self._loss = jax.jit(jax.value_and_grad(bradley_terry, has_aux=True))

    def example(self, row: Row, where: str) -> Pair:
        wanted, columns = self._wanted, self._columns
        prompt = columns.prompt(row, wanted.prompt_column, where)
        texts = columns.pair(row, wanted.chosen_column, wanted.rejected_column, where)
        margin = 0.0
        if wanted.margin_column is not None:
            found = columns.field(row, "margin_column", wanted.margin_column, where)
            number = isinstance(found, int | float) and not isinstance(found, bool)
            if not number or not abs(found) <= LARGEST_MARGIN:
                raise DataError(
                    f"{where}: {wanted.margin_column!r} must be a difference of scores, a number of at most "
                    f"{LARGEST_MARGIN:g}, got {found!r:.80}"
                )
            margin = float(found)
        chosen, rejected = (self._text.ids(prompt, text, where) for text in texts)
        require_different(chosen, rejected, where)
        return Pair(chosen, rejected, margin)

    def lay_out(self, items: Sequence[Pair], geometry: Geometry) -> list[MicroBatch]:
        sequences = [side for pair in items for side in (pair.chosen, pair.rejected)]
        return sequence_batches(sequences, [f"pair/{i // 2}" for i in range(len(sequences))], geometry)

    def collect(self, batch: MicroBatch, flat: np.ndarray, into: np.ndarray) -> None:
        last_of(batch, flat, into)

    def spread(self, batch: MicroBatch, slopes: np.ndarray) -> np.ndarray:
        return at_last(batch, slopes)

    def judge(self, items: Sequence[Pair], scores: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        table, mask = by_pair(scores, self._wanted.batch)
        margins = np.zeros(len(mask))
        margins[: len(items)] = [pair.margin for pair in items]
        (_, found), slopes = self._loss(table, jnp.float32(margins), mask)
        return {k: float(v) for k, v in found.items()}, np.asarray(slopes).reshape(-1)[: len(scores)]

    def counts(self, items: Sequence[Pair]) -> dict[str, int]:
        return {"pairs": len(items)}

    def num_sequences(self, items: Sequence[Pair]) -> int:
        return 2 * len(items)


def by_pair(scores: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores [P, 2] float32, mask [P] bool) of chosen and rejected in turn, padded to P = size pairs."""
    table, count = np.zeros((size, 2), np.float32), len(scores) // 2
    table[:count] = scores.reshape(-1, 2)
    return table, np.arange(size) < count
