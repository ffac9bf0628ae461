"""Proximal policy optimization with a critic (Schulman et al. 2017, arXiv:1707.06347; for language models Ouyang et al.
2022, arXiv:2203.02155).

    A_t, R_t by GAE over r_t = [t is last] r - beta KL_t and the critic's values (`advantages.gae`)
    L = -mean_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

The critic is trained on R_t by itself (docs/critic.md). `whiten` shifts and scales A over the batch's tokens; the
returns are made before that.
"""

from __future__ import annotations

from lockstep.algorithms.advantages import by_token, gae, whitened
from lockstep.algorithms.base import Advantages, Clipped, Samples


class PPO(Clipped):
    by_group = False
    needs_values = True

    def advantages(self, samples: Samples) -> Advantages:
        s = self.settings
        assert samples.values is not None, "PPO's advantages need the critic's values"
        pairs = [gae(r, v, s.gamma, s.lam) for r, v in zip(samples.token_rewards(), samples.values, strict=True)]
        advantages = [a for a, _ in pairs]
        if s.whiten:
            advantages = whitened(advantages, s.std_epsilon)
        return by_token(samples, advantages, [r for _, r in pairs])
