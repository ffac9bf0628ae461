"""The loss core: masked sums, ratio, clip, KL estimators. An algorithm is its difference from this.

Everything is per token over a flat axis [M] of completion tokens, padding included and masked. Sums are divided by
*global* counts (`Totals`), fixed before the batch is cut into micro-batches, so every cut gives the same loss and
gradient. Masked slots may hold anything, NaN included: they are replaced before any arithmetic.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

KLEstimator = Literal["k1", "k2", "k3"]


class Tokens(NamedTuple):
    """Completion tokens of one micro-batch, each field [M].

    mask: True for a real token. old_logp: the record. ref_logp: the reference's, or zeros where no term uses it.
    advantage: the sample's, times `weight`. sequence: the sample's number, for losses that first sum over a sequence
    (GSPO, Dr. GRPO); GRPO reads none. weight: the token's probability under the policy over that under the
    distribution it was drawn from: the mass kept where ids were cut off, else 1."""

    mask: Any
    old_logp: Any
    ref_logp: Any
    advantage: Any
    sequence: Any
    weight: Any


class Totals(NamedTuple):
    """Global counts of the whole batch, the denominators of every mean. Scalars, float32. sequences: those with tokens,
    for losses that average per sequence; GRPO averages over tokens."""

    tokens: Any
    sequences: Any


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x with masked slots set to 0. Applied to inputs, not to results: 0 * NaN would poison the gradient."""
    return jnp.where(mask, x, 0.0)


def clipped_surrogate(
    logp: jax.Array, old_logp: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """min(r A, clip(r, 1 - low, 1 + high) A) per token, r = exp(logp - old_logp) (PPO, arXiv:1707.06347, equation 7;
    unequal bounds: DAPO, arXiv:2503.14476, section 3.1). Returns (surrogate, ratio, whether the clip was active)."""
    ratio = jnp.exp(logp - old_logp)
    free = ratio * advantage
    held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    return jnp.minimum(free, held), ratio, held < free


def kl_estimate(name: KLEstimator, logp: Any, ref_logp: Any, xp: ModuleType = jnp) -> Any:
    """Per-token estimate of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL
    Divergence", 2020). With d = ref_logp - logp:

    k1 = -d: unbiased, high variance; as a loss its expected gradient is zero.
    k2 = d^2 / 2: biased value; its gradient is the reverse KL's.
    k3 = exp(d) - 1 - d: unbiased, never negative; as a loss its expected gradient is the *forward* KL's.

    Where ids were cut off when sampling, tokens come from q = p / m on the ids kept, m being the policy's mass of them,
    and each estimate is to be multiplied by m (`Tokens.weight`; a constant, like the draw). Then, at each place,
    E_q[m k] = sum over the kept ids of p k: what the kept ids contribute to the whole softmax's value, and m times the
    gradient is what they contribute to its gradient. No sample speaks for the ids cut off. k2 and k3 are nowhere
    negative, so theirs is a lower bound of what all ids would give (of KL itself for k3); k1's is not. Unweighted, the
    expectation is larger by 1 / m, and compares p with the reference under a distribution that is not the policy's.
    Which places are visited is the truncated distribution's either way.

    xp: the arrays' namespace: jax.numpy to differentiate; numpy (for metrics, of any length, without compiling).
    """
    d = ref_logp - logp
    if name == "k1":
        return -d
    return 0.5 * d * d if name == "k2" else xp.expm1(d) - d
