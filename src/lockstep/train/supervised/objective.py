"""What a kind of supervised training is, and the step that all kinds share.

A kind gives every sequence a score, read from the numbers of its tokens, and makes a loss of all scores of an update.
The loss sees them all before any gradient is taken, so that loss and gradients are the same however the sequences are
cut into micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np

from lockstep.errors import NumericsError
from lockstep.models.catalog import LoadedModel
from lockstep.models.fetch import Say
from lockstep.models.spec import ModelSpec
from lockstep.train.batching import Geometry, MicroBatch
from lockstep.train.supervised.examples import Columns, Examples, Row
from lockstep.train.trained_model import Forward, TrainedModel

T = TypeVar("T")


class Objective(ABC, Generic[T]):
    """One kind of training, as its recipe says. NAME: of what is trained, for messages. LINEAR: the loss is linear in
    the scores, so that its gradient needs none of them."""

    NAME: ClassVar[str]
    LINEAR: ClassVar[bool] = False
    _wanted: Any  # the recipe's own table, an `ExamplesConfig`
    _seed: int
    _columns: Columns

    @classmethod
    @abstractmethod
    def spec(cls, found: ModelSpec, name: str) -> ModelSpec:
        """Of the model that trains, from that of `model.name`. Raises ModelError for one that cannot."""

    @classmethod
    @abstractmethod
    def load(cls, recipe: Any, say: Say | None) -> LoadedModel:
        """The model to start from."""

    @abstractmethod
    def __init__(self, recipe: Any, model: LoadedModel) -> None:
        """Raises ConfigError where the two do not fit each other."""

    @abstractmethod
    def example(self, row: Row, where: str) -> T:
        """Of a row of the data. Raises DataError, naming `where`, for one that will not do."""

    def read(self) -> Examples[T]:
        """The data. Raises DataError, naming the row, for one that will not do."""
        return Examples.read(self._wanted, self._columns.table, self.example, self._seed)

    def prepared(self, examples: Examples[T], trainer: SupervisedTrainer[T], say: Say | None) -> Examples[T]:
        """With what the start weights have to say about them. Called once, before the first update."""
        return examples

    @abstractmethod
    def lay_out(self, items: Sequence[T], geometry: Geometry) -> list[MicroBatch]:
        """All sequences of the items, in turn; sample i of a span is the i-th."""

    @abstractmethod
    def collect(self, batch: MicroBatch, flat: np.ndarray, into: np.ndarray) -> None:
        """Put the scores of the batch's sequences, read from flat [row shards * M], into `into` [B] float64."""

    @abstractmethod
    def spread(self, batch: MicroBatch, slopes: np.ndarray) -> np.ndarray:
        """[row shards * M] float32: the gradient of each number, from those of the scores [B]."""

    @abstractmethod
    def judge(self, items: Sequence[T], scores: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        """(metrics, the loss's gradient [B] with respect to each score)."""

    @abstractmethod
    def counts(self, items: Sequence[T]) -> dict[str, int]:
        """What an update's record says of its size; the last is what its means are over."""

    @abstractmethod
    def num_sequences(self, items: Sequence[T]) -> int:
        """B."""


class SupervisedTrainer(Generic[T]):
    """A model and its training by an objective. size: items of a batch at most, which the loss is compiled for."""

    def __init__(self, model: TrainedModel, objective: Objective[T], geometry: Geometry, size: int) -> None:
        self.model, self.objective, self.geometry, self.size = model, objective, geometry, size

    def step(self, items: Sequence[T], number: int) -> dict[str, float]:
        """One update. number: how many came before. Metrics are of the weights that it started from.

        Raises NumericsError, before anything is changed, where a score or the gradient is not finite.
        """
        objective, weights = self.objective, self.model.weights
        batches, scores = objective.lay_out(items, self.geometry), self._blank(items)
        kept: list[Forward] = []
        if not objective.LINEAR:
            # One pass is kept for its backward; of several, the states of all at once would not fit.
            kept = [self.model.forward(weights, batch) for batch in batches] if len(batches) == 1 else []
            for i, batch in enumerate(batches):
                flat = np.asarray(kept[i].outputs) if kept else self.model.outputs(weights, batch)
                objective.collect(batch, flat, scores)
        found, slopes = self._judged(items, scores)
        grads: dict[str, jax.Array] | None = None
        for i, batch in enumerate(batches):
            forward = kept[i] if kept else self.model.forward(weights, batch)
            if objective.LINEAR:
                objective.collect(batch, np.asarray(forward.outputs), scores)
            dflat = self.model.programs.put_rows(objective.spread(batch, slopes))
            grads = self.model.gradients(weights, forward, dflat, grads)
        assert grads is not None, "a step needs at least one example"
        if objective.LINEAR:
            found, _ = self._judged(items, scores)
        return found | self.model.update(grads, number, objective.NAME)

    def measure(self, items: Sequence[T]) -> dict[str, float]:
        """The metrics of any number of items; nothing is trained."""
        sums: dict[str, float] = {}
        for chunk in self._chunks(items):
            found, _ = self._judged(chunk, self._scores(chunk))
            share = self._weight(chunk) / self._weight(items)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value * share
        return sums

    def scores(self, items: Sequence[T]) -> np.ndarray:
        """[B] float64, under the weights as they are."""
        return np.concatenate([np.zeros(0), *(self._scores(chunk) for chunk in self._chunks(items))])

    def _scores(self, items: Sequence[T]) -> np.ndarray:
        scores, weights = self._blank(items), self.model.weights
        for batch in self.objective.lay_out(items, self.geometry):
            self.objective.collect(batch, self.model.outputs(weights, batch), scores)
        return scores

    def _blank(self, items: Sequence[T]) -> np.ndarray:
        return np.zeros(self.objective.num_sequences(items))

    def _chunks(self, items: Sequence[T]) -> list[Sequence[T]]:
        return [items[start : start + self.size] for start in range(0, len(items), self.size)]

    def _weight(self, items: Sequence[T]) -> int:
        return list(self.objective.counts(items).values())[-1]

    def _judged(self, items: Sequence[T], scores: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        if not np.isfinite(scores).all():
            raise NumericsError(
                f"a score is {scores[~np.isfinite(scores)][0]}; the {self.objective.NAME}'s weights hold NaN or "
                "infinity, or overflowed. Resume from the newest checkpoint, with a lower optim.lr"
            )
        return self.objective.judge(items, scores)
