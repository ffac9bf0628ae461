"""Dr. GRPO: GRPO done right (Liu et al. 2025, arXiv:2503.20783).

    A_i = r_i - mean_g
    L   = -1/(N C) sum_i sum_t min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)

N completions, C a constant number of tokens: neither the spread of a group's rewards nor the length of a completion
changes what a token weighs.
"""

from __future__ import annotations

from lockstep.algorithms.advantages import group_scores
from lockstep.algorithms.base import Advantages, Clipped, Samples


class DrGRPO(Clipped):
    def advantages(self, samples: Samples) -> Advantages:
        return group_scores(samples, "none", 0.0)
