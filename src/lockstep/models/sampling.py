"""Draws from a changed distribution: penalties, biases, ids ruled out, top-k, top-p, min-p; and the likeliest ids.

A block of its own beside `decoder._head_block`, for the rows that ask for any of it. It decides tokens only: the
log-probability that is recorded comes from the trainer's own program afterwards (`decoder.logprobs` of the token
drawn), so that its bits are the trainer's by construction, and rows that ask for nothing never come here.

Thresholds are found without sorting: a float's bits, suitably flipped, order as unsigned integers, and a threshold is
built bit by bit, 32 sums over the vocabulary. Sums of probability are float32; where a sum falls within rounding of
`top_p`, the id on the edge may be in or out, always the same for the same row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lockstep.models.decoder import Numerics, Weights, _draw, _logits, head_inputs, uniforms
from lockstep.models.spec import ModelSpec
from lockstep.ops import log_normaliser, temperature_scaled, tiled


class Changes(NamedTuple):
    """What is asked for, per row. E: ids named for the row, padded with V.

    top_k [N] int32 (V keeps all); top_p, min_p [N] float32; repetition, presence, frequency [N] float32: penalties;
    only_listed [N] bool: other ids are ruled out. ids [N, E] int32, each once; of each, bias [N, E] float32: added
    (-inf rules it out), seen [N, E] bool: in prompt or completion, count [N, E] float32: occurrences in the completion.
    """

    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    only_listed: Any
    ids: Any
    bias: Any
    seen: Any
    count: Any


class Choice(NamedTuple):
    """token [N] int32. kept [N] float32: log-probability of the token under the whole softmax less that under the
    distribution drawn from; where ids were only cut off, the log of the mass that was kept, <= 0. top_ids [N, n]: the
    likeliest ids of the whole softmax."""

    token: Any
    kept: Any
    top_ids: Any


def _spread(c: Changes, values: jax.Array, other: Any, shape: tuple[int, ...]) -> jax.Array:
    """[N, V]: `values` where the ids are, `other` elsewhere."""
    full = jnp.broadcast_to(jnp.asarray(other, values.dtype).reshape(-1, 1), shape)
    return full.at[jnp.arange(shape[0])[:, None], c.ids].set(values, mode="drop")


def changed_logits(z_NV: jax.Array, c: Changes) -> jax.Array:
    """Penalties, then bias, then ids ruled out (-inf)."""
    seen, count = _spread(c, c.seen, False, z_NV.shape), _spread(c, c.count, 0.0, z_NV.shape)
    r = c.repetition[:, None]
    z = jnp.where(seen, jnp.where(z_NV > 0, z_NV / r, z_NV * r), z_NV)
    z = z - c.presence[:, None] * (count > 0) - c.frequency[:, None] * count
    return z + _spread(c, c.bias, jnp.where(c.only_listed, -jnp.inf, 0.0), z_NV.shape)


def _ordered(z: jax.Array) -> jax.Array:
    """uint32 that orders as the floats do (the two zeros being one)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(order_NV: jax.Array, reached: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """[N, 1] the largest threshold t for which reached(order >= t) [N] still holds, t = 0 if none does."""

    def step(i: Any, t: jax.Array) -> jax.Array:
        more = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(reached(order_NV >= more)[:, None], more, t)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros((order_NV.shape[0], 1), jnp.uint32))


def _ties_before(tied_NV: jax.Array) -> jax.Array:
    return jnp.cumsum(tied_NV, -1, dtype=jnp.int32) - tied_NV


def _top_k(order_NV: jax.Array, top_k: jax.Array) -> jax.Array:
    t = _largest(order_NV, lambda in_: in_.sum(-1, dtype=jnp.int32) >= top_k)
    above, tied = order_NV > t, order_NV == t
    room = top_k[:, None] - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | (tied & (_ties_before(tied) < room))


def _top_p(order_NV: jax.Array, weight_NV: jax.Array, top_p: jax.Array) -> jax.Array:
    def mass(in_: jax.Array) -> jax.Array:
        return jnp.where(in_, weight_NV, 0.0).sum(-1)

    wanted = top_p * weight_NV.sum(-1)
    t = _largest(order_NV, lambda in_: mass(in_) >= wanted)
    above, tied = order_NV > t, order_NV == t
    each = jnp.where(tied, weight_NV, 0.0).max(-1, keepdims=True)
    before = mass(above)[:, None] + each * _ties_before(tied)
    return above | (tied & (before < wanted[:, None])) | (top_p >= 1)[:, None]


def kept_logits(z_NV: jax.Array, c: Changes) -> jax.Array:
    """z with -inf wherever top-k, then top-p of what that leaves, then min-p cut an id off."""
    order, cut = _ordered(z_NV), jnp.full_like(z_NV, -jnp.inf)
    some_k, some_p = (c.top_k < z_NV.shape[1]).any(), (c.top_p < 1).any()
    z = jax.lax.cond(some_k, lambda: jnp.where(_top_k(order, c.top_k), z_NV, cut), lambda: z_NV)
    weight = jnp.exp(z - z.max(-1, keepdims=True))
    z = jax.lax.cond(some_p, lambda: jnp.where(_top_p(order, weight, c.top_p), z, cut), lambda: z)
    return jnp.where(weight >= c.min_p[:, None], z, cut)


def _block(
    spec: ModelSpec, likeliest: int, w: Weights, x: jax.Array, temperature: jax.Array, uniform: jax.Array, *c: jax.Array
) -> Choice:
    changes = Changes(*c)
    logits = _logits(spec, w, x)
    z = temperature_scaled(logits, temperature)
    kept = kept_logits(temperature_scaled(changed_logits(logits.T, changes).T, temperature).T, changes).T
    peak, log_sum, _ = log_normaliser(z)
    kept_peak, kept_log_sum, chunks = log_normaliser(kept)
    token = _draw(kept, kept_peak, chunks, temperature, uniform).astype(jnp.int32)
    whole, drawn = (a[token, jnp.arange(len(token))] - p for a, p in ((z, peak), (kept, kept_peak)))
    ratio = jnp.where(temperature > 0, (whole - drawn) + (kept_log_sum - log_sum), 0.0)
    ids = jax.lax.top_k(z.T, likeliest)[1] if likeliest else jnp.zeros((len(token), 0), jnp.int32)
    return Choice(token, ratio, ids.astype(jnp.int32))


def choose(
    spec: ModelSpec,
    num: Numerics,
    likeliest: int,
    w: Weights,
    x: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    index: jax.Array,
    changes: Changes,
) -> Choice:
    """One token per row from its changed distribution, by the same two uniforms of (seed, index) as `decoder.sample`.

    likeliest: how many of the likeliest ids to report. Other arguments as `decoder.sample`; index -1: padding.
    """
    block = functools.partial(_block, spec, likeliest)
    u = uniforms(seed, index)
    w, x = head_inputs(spec, num, w, x)
    return Choice(*tiled(block, num.head_rows, index >= 0, w, x, temperature, u, *changes))
