"""Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071).

    s_i = (pi(y_i | x) / pi_old(y_i | x))^(1 / |y_i|)
    L   = -1/N sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

One ratio per completion (`ratio = "sequence"`), clipped as a whole; the bounds are far narrower than a token's. With
completions of one token it is GRPO.
"""

from __future__ import annotations

from lockstep.algorithms.grpo import GRPO


class GSPO(GRPO):
    """GRPO with the ratio of sequences; `losses.policy_ratio` has it."""
