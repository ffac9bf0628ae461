"""Entropy of the policy's distribution at a token: the sum over the vocabulary, not an estimate from the sample."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from lockstep.models.decoder import Numerics, Weights, _logits, head_inputs
from lockstep.models.spec import ModelSpec
from lockstep.ops import temperature_scaled, tiled


def _block(spec: ModelSpec, w: Weights, x: jax.Array, temperature: jax.Array) -> jax.Array:
    z = temperature_scaled(_logits(spec, w, x), temperature)
    logp = jax.nn.log_softmax(z, axis=0)
    return -(jnp.exp(logp) * logp).sum(0)


def entropies(
    spec: ModelSpec, num: Numerics, w: Weights, x: jax.Array, live: jax.Array, temperature: jax.Array, tile: int | None
) -> jax.Array:
    """[N] float32 nats: H of softmax(logits / temperature) at each row of x. live [N] bool: False for padding, whose
    result means nothing. Other arguments as `decoder.logprobs`."""
    w, x = head_inputs(spec, num, w, x)
    return tiled(functools.partial(_block, spec), num.head_rows if tile is None else tile, live, w, x, temperature)
