"""What the trainer and the loop ask of an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import jax

from lockstep.algorithms.advantages import GroupAdvantages
from lockstep.algorithms.losses import Tokens, Totals
from lockstep.config import AlgorithmConfig


class Algorithm(Protocol):
    """One rule for advantages and loss. Stateless: what a step needs comes in as arguments."""

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> Self:
        """With the settings of a recipe's [algorithm] table."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads `Tokens.ref_logp`."""
        ...

    def advantages(self, rewards: Sequence[float], group_ids: Sequence[str]) -> GroupAdvantages:
        """One advantage per sample. rewards [B] finite; group_ids [B]."""
        ...

    def loss(self, logp: jax.Array, tokens: Tokens, totals: Totals) -> tuple[jax.Array, dict[str, jax.Array]]:
        """This micro-batch's share of the loss (a scalar, differentiated in logp [M] only) and of the metrics.

        Shares add up over micro-batches: sums are divided by `totals`, which counts the whole batch. Runs under jit.
        """
        ...
