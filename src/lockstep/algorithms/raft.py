"""Reward-ranked fine-tuning, best of n (Dong et al. 2023, arXiv:2304.06767).

    L = -1/N sum over the best `best_of` completions of each group of log pi(y_t)

Of equally good completions the first drawn are taken. A group whose rewards are all equal has no best one and is not
trained on. Ratios play no part, so a batch may be used several times without a clip.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.algorithms.advantages import per_group
from lockstep.algorithms.base import Advantages, Algorithm, Samples
from lockstep.algorithms.losses import Tokens


class RAFT(Algorithm):
    def advantages(self, samples: Samples) -> Advantages:
        def best(outcomes: np.ndarray) -> np.ndarray:
            chosen = np.zeros(len(outcomes))
            chosen[np.argsort(-outcomes, kind="stable")[: self.settings.best_of]] = 1.0
            return chosen

        found = per_group(samples, best)
        return replace(found, used=found.per_sample > 0)

    def objective(self, logp: jax.Array, ratio: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return tokens.advantage * logp, jnp.zeros_like(logp, bool)
