"""The critic's loss: squared error of the value, clipped around the recorded one as PPO clips the ratio.

    loss_t = max((V_t - R_t)^2, (clip(V_t, V_old,t - c, V_old,t + c) - R_t)^2) / 2

V_old are the values that the advantages were computed with; R the returns. Source: PPO's reference implementation
(Dhariwal et al. 2017, OpenAI Baselines `ppo2/model.py`), kept by the RLHF systems that followed it. Where the clipped
term is the larger one it does not depend on V_t, so such a token has no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lockstep.algorithms.losses import masked


class ValueTokens(NamedTuple):
    """Completion tokens of one micro-batch, each field [M] float32 but for mask [M] bool: True for a real token."""

    mask: Any
    old_value: Any
    ret: Any


def value_loss(
    values: jax.Array, tokens: ValueTokens, num_tokens: jax.Array, clip: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This micro-batch's share of the loss, and of the metrics: sums over its tokens / num_tokens, the whole batch's.

    values [M] float32: the only thing differentiated. clip: c above, > 0; inf: no clip. Masked slots may hold anything.
    """
    v, old, ret = (masked(x, tokens.mask) for x in (values, tokens.old_value, tokens.ret))
    free = jnp.square(v - ret)
    held = jnp.square(jnp.clip(v, old - clip, old + clip) - ret)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(tokens.mask, x, 0.0).sum() / num_tokens

    loss = 0.5 * mean(jnp.maximum(free, held))
    return loss, {"loss": loss, "clip_fraction": mean((held > free).astype(jnp.float32))}
