"""Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300).

    A_i = (r_i - mean_g) / (std_g + eps)
    L   = -mean_t [ min(r_t A, clip(r_t, 1 - low, 1 + high) A) - beta KL_t ],     r_t = exp(logp_t - old_logp_t)

The mean is over the completion tokens of the whole batch ("token_mean", as DAPO and TRL's default aggregate; the paper
averages per sequence first, `aggregate = "sequence_mean"`, which weights a token by the inverse of its completion's
length). Where ids were cut off when sampling, A and KL_t are weighted with the mass that was kept
(`losses.kl_estimate`).
"""

from __future__ import annotations

from lockstep.algorithms.advantages import group_scores
from lockstep.algorithms.base import Advantages, Clipped, Samples


class GRPO(Clipped):
    @property
    def by_group(self) -> bool:  # type: ignore[override]
        return self.settings.scale_rewards != "batch"

    def advantages(self, samples: Samples) -> Advantages:
        return group_scores(samples, self.settings.scale_rewards, self.settings.std_epsilon)
