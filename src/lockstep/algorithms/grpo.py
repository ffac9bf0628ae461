"""Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300).

    A_i = (r_i - mean_g) / (std_g + eps)
    L   = -1/N sum_t [ min(r_t A, clip(r_t, 1 - low, 1 + high) A) - beta KL_t ],     r_t = exp(logp_t - old_logp_t)

N counts the completion tokens of the whole batch ("token mean", as DAPO and TRL's default aggregate; the paper averages
per sequence first, which weights a token by the inverse of its completion's length). Where ids were cut off when
sampling, A and KL_t are weighted with the mass that was kept (`losses.kl_estimate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from lockstep.algorithms.advantages import GroupAdvantages, group_z_scores
from lockstep.algorithms.losses import KLEstimator, Tokens, Totals, clipped_surrogate, kl_estimate, masked
from lockstep.config import AlgorithmConfig


@dataclass(frozen=True)
class GRPO:
    """clip_low, clip_high: the ratio stays within [1 - low, 1 + high]. kl_coef: beta; kl_estimator: see `losses`.
    std_epsilon: added to a group's standard deviation."""

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: KLEstimator
    std_epsilon: float

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> Self:
        return cls(config.clip_low, config.clip_high, config.kl_coef, config.kl_estimator, config.std_epsilon)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def advantages(self, rewards: Sequence[float], group_ids: Sequence[str]) -> GroupAdvantages:
        return group_z_scores(rewards, group_ids, self.std_epsilon)

    def loss(self, logp: jax.Array, tokens: Tokens, totals: Totals) -> tuple[jax.Array, dict[str, jax.Array]]:
        """This micro-batch's share of the loss, and of the metrics (each a sum over tokens / totals.tokens).

        logp [M] float32: the policy's log-probabilities, the only thing differentiated.
        """
        logp, old, ref, adv = (masked(x, tokens.mask) for x in (logp, *tokens[1:4]))
        surrogate, ratio, clipped = clipped_surrogate(logp, old, adv, self.clip_low, self.clip_high)
        kl = masked(tokens.weight, tokens.mask) * kl_estimate(self.kl_estimator, logp, ref)

        def mean(x: jax.Array) -> jax.Array:
            return jnp.where(tokens.mask, x, 0.0).sum() / totals.tokens

        loss = mean(-surrogate) + (self.kl_coef * mean(kl) if self.kl_coef else 0.0)
        return loss, {"loss": loss, "clip_fraction": mean(clipped.astype(jnp.float32)), "ratio": mean(ratio)}
