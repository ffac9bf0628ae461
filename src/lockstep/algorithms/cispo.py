"""Clipped importance-sampling weight policy optimization (MiniMax-M1, 2025, arXiv:2506.13585, equation 4).

    L = -1/N sum_t sg[ clip(r_t, 1 - low, 1 + high) ] A_i log pi(y_t)

The clipped ratio weighs the gradient and is not differentiated (sg): no token's gradient is ever cut off. At ratio 1 it
is REINFORCE with GRPO's advantage.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lockstep.algorithms.grpo import GRPO
from lockstep.algorithms.losses import Tokens


class CISPO(GRPO):
    def objective(self, logp: jax.Array, ratio: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        s = self.settings
        held = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - s.clip_low, 1.0 + s.clip_high))
        return held * tokens.advantage * logp, held != jax.lax.stop_gradient(ratio)
