"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    A_t = sum over k >= t of gamma^(k - t) r_k,       r_t = [t is last] r - beta KL_t
    then shifted and scaled over all tokens of the batch to mean 0 and deviation 1; PPO's clip

No critic, and no baseline but the batch's mean. `group_baseline` first subtracts the mean reward of the group
(REINFORCE++-baseline, section 3.3).
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.algorithms.advantages import by_token, per_group, returns_to_go, whitened
from lockstep.algorithms.base import Advantages, Clipped, Samples


class ReinforcePP(Clipped):
    by_group = False

    def advantages(self, samples: Samples) -> Advantages:
        s = self.settings
        scored = samples
        if s.group_baseline:
            centred = per_group(replace(samples, penalties=None), lambda r: r - r.mean())
            scored = replace(samples, rewards=centred.per_sample)
        to_go = [returns_to_go(r, s.gamma) for r in scored.token_rewards()]
        return by_token(samples, whitened(to_go, s.std_epsilon), None)
