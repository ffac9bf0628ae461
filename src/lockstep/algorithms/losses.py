"""The loss core: masked sums, ratio, aggregation, KL estimators. An algorithm is its difference from this.

Everything is per token over a flat axis [M] of completion tokens, padding included and masked. Sums are divided by
*global* counts (`Totals`), fixed before the batch is cut into micro-batches, so every cut gives the same loss and
gradient; a sequence is never cut. Masked slots may hold anything, NaN included: they are replaced before any
arithmetic.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lockstep.algorithm_section import Aggregate, KLEstimator, RatioLevel


class Tokens(NamedTuple):
    """Completion tokens of one micro-batch, each field [M].

    mask: True for a real token. old_logp: the record. ref_logp: the reference's, or zeros where no term uses it.
    advantage: the token's, times `weight`. sequence: its sample's number within the micro-batch, < M. weight: the
    token's probability under the policy over that under the distribution it was drawn from: the mass kept where ids
    were cut off, times the importance correction; else 1."""

    mask: Any
    old_logp: Any
    ref_logp: Any
    advantage: Any
    sequence: Any
    weight: Any


class Totals(NamedTuple):
    """Global counts of the whole batch, the denominators of every mean. Scalars, float32. sequences: those with
    tokens."""

    tokens: Any
    sequences: Any


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x with masked slots set to 0. Applied to inputs, not to results: 0 * NaN would poison the gradient."""
    return jnp.where(mask, x, 0.0)


def sequence_sums(x: jax.Array, tokens: Tokens) -> jax.Array:
    """[M] for each token, the sum of x [M] over its sequence. x is 0 where masked."""
    m = x.shape[0]
    return jax.ops.segment_sum(x, tokens.sequence, m)[tokens.sequence]


def sequence_lengths(tokens: Tokens) -> jax.Array:
    """[M] float32, at least 1."""
    return jnp.maximum(sequence_sums(tokens.mask.astype(jnp.float32), tokens), 1.0)


def policy_ratio(level: RatioLevel, logp: jax.Array, tokens: Tokens) -> jax.Array:
    """[M] pi(token) / pi_old(token), for token; for sequence its geometric mean over the completion, s_i of GSPO
    (arXiv:2507.18071, equation 7); for trajectory its product, pi(y | x) / pi_old(y | x)."""
    d = logp - tokens.old_logp
    if level == "token":
        return jnp.exp(d)
    total = sequence_sums(d, tokens)
    return jnp.exp(total if level == "trajectory" else total / sequence_lengths(tokens))


def clipped_surrogate(
    ratio: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """(min(r A, clip(r, 1 - low, 1 + high) A) per token, whether a clip was active).

    PPO, arXiv:1707.06347, equation 7; unequal bounds: DAPO, arXiv:2503.14476, section 3.1; with dual_clip c > 1, where
    A < 0, no less than c A: Ye et al. 2020, arXiv:1912.09729, equation 5.
    """
    free = ratio * advantage
    held = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    found, clipped = jnp.minimum(free, held), held < free
    if dual_clip:
        least = dual_clip * advantage
        below = (advantage < 0) & (found < least)
        found, clipped = jnp.where(below, least, found), clipped | below
    return found, clipped


def aggregated(name: Aggregate, x: jax.Array, *, tokens: Tokens, totals: Totals, length: float) -> jax.Array:
    """This micro-batch's share of a mean of x [M].

    token_mean: sum / tokens. sequence_mean: mean over sequences of each one's token mean. constant: sum / (sequences
    * length), which weights a token alike however long its sequence is (Dr. GRPO, arXiv:2503.20783, section 3.2).
    """
    x = jnp.where(tokens.mask, x, 0.0)
    if name == "token_mean":
        return x.sum() / totals.tokens
    if name == "constant":
        return x.sum() / (totals.sequences * length)
    return (x / sequence_lengths(tokens)).sum() / totals.sequences


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
