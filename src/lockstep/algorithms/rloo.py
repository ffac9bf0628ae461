"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    A_i = R_i - mean of the other R_j of the group,       R_i = r_i - beta sum_t KL_t
    L   = -1/N sum_i min(r_i A_i, clip(r_i, 1 - low, 1 + high) A_i),    r_i = pi(y_i | x) / pi_old(y_i | x)

A completion is one action (`ratio = "trajectory"`). On the first step after sampling the ratio is 1 and the gradient is
that of REINFORCE; the clip, as in TRL, matters when a batch is used more than once.
"""

from __future__ import annotations

from lockstep.algorithms.advantages import leave_one_out
from lockstep.algorithms.base import Advantages, Clipped, Samples


class RLOO(Clipped):
    def advantages(self, samples: Samples) -> Advantages:
        return leave_one_out(samples)
