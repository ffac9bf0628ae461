"""Attention of single rows over cached keys and values, the one form that sampler and trainer share.

The cache is a pool of rows; a query row names, position by position, which pool rows it may read. For the sampler the
pool is its page pool and the names come from page tables; for the trainer the pool is the keys and values of the same
micro-batch and the names say "the group's prompt rows, then this sample's own rows", which is how a prompt that eight
samples share is computed once. Positions are visited in blocks of fixed size with a running maximum and sum
(Milakov & Gimelshein 2018, arXiv:1805.02867), so a row's result does not depend on how far the index is padded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lockstep.models.quantise import Held, Quantised, dequantise
from lockstep.ops import fence

NO_WINDOW = 1 << 30
State = tuple[jax.Array, jax.Array, jax.Array]
_LOW = -1e30  # a finite stand-in for -inf: exp(_LOW - anything finite) is exactly 0 and never NaN

# Positions at a time, rounded up to whole pages. Fewer would come out otherwise: XLA:CPU sums shorter blocks in another
# order. Within a block, what is not seen adds exact zeros at the end of sums that run in order.
BLOCK = 64


def attend(
    pool: tuple[Held, Held],
    q: jax.Array,
    read: jax.Array,
    length: jax.Array,
    window: jax.Array,
    *,
    page_size: int,
    scale: float,
    cap: float | None,
    remat: bool = False,
) -> jax.Array:
    """Attention output [N, Q*H] of N query rows.

    pool: keys and values, each [R, K, H], quantised or not. q [N, Q, H]. read [N, S] int32: pool row that holds
    position s of the row's sequence, S a multiple of page_size. length [N] int32: the row sees positions 0..length-1
    (itself included), >= 1. window: int32 scalar, only the last `window` of those positions count. Scores and sums are
    float32.
    remat: the form that can be differentiated: it visits all S positions, where the other stops at the longest row's
    end, and a block's keys and values are gathered again on the way back rather than kept.
    Pool rows outside what a row sees never reach it, whatever they hold: garbage left over, NaN, positions ahead.
    """
    keys, values = pool
    n, num_heads, head_dim = q.shape
    num_kv = jax.tree.leaves(keys)[0].shape[1]
    qg = q.reshape(n, num_kv, num_heads // num_kv, head_dim)
    size = -(-BLOCK // page_size) * page_size
    read = jnp.pad(read, ((0, 0), (0, -read.shape[1] % size)))
    own = jnp.take_along_axis(read, length[:, None] - 1, 1)

    def block(carry: State, start: jax.Array) -> State:
        peak, total, acc = carry
        rows = jax.lax.dynamic_slice_in_dim(read, start, size, 1)
        at = start + jnp.arange(size)
        seen = (at[None] < length[:, None]) & (at[None] >= length[:, None] - window)
        # A weight of zero does not hide a NaN or an infinity: instead of what it may not see a row reads itself. That
        # costs a choice of indices, not of keys and values.
        rows = jnp.where(seen, rows, own)
        k, v = fence(tuple(_read(y, rows, q.dtype) for y in (keys, values)))
        # Products and sums, here in order of position, rather than many small matrix products: faster on the CPU, and
        # the order does not change with the number of rows.
        s = scale * jnp.moveaxis(_products(qg[:, None], k).sum(-1), 1, -1)
        if cap is not None:
            s = cap * jnp.tanh(s / cap)
        s = jnp.where(seen[:, None, None], s, _LOW)
        # The maximum only keeps exp in range: the result does not depend on it, so no gradient flows through it.
        new_peak = jax.lax.stop_gradient(jnp.maximum(peak, s.max(-1)))
        p = fence(jnp.where(seen[:, None, None], jnp.exp(s - new_peak[..., None]), 0.0))
        shrink = jnp.exp(peak - new_peak)
        sums = p.reshape(*p.shape[:3], size // page_size, page_size).sum(-1).sum(-1)
        weights = jnp.moveaxis(p.astype(q.dtype), -1, 1)[..., None]
        mixed = _products(weights, v).sum(1)
        live = seen.any(-1)[:, None, None]
        return (
            jnp.where(live, new_peak, peak),
            jnp.where(live, total * shrink + sums, total),
            jnp.where(live[..., None], acc * shrink[..., None] + mixed, acc),
        )

    shape = (n, num_kv, num_heads // num_kv)
    state = (jnp.full(shape, _LOW), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    if remat:
        step = jax.checkpoint(lambda carry, start: (block(carry, start), None))
        state, _ = jax.lax.scan(step, state, jnp.arange(0, read.shape[1], size))
    else:
        # What lies behind every row's end changes nothing, so it is left out.
        state = jax.lax.fori_loop(0, (length.max() + size - 1) // size, lambda i, carry: block(carry, i * size), state)
    _, total, acc = state
    return (acc / total[..., None]).astype(q.dtype).reshape(n, num_heads * head_dim)


def _read(side: Held, rows: jax.Array, dtype: Any) -> jax.Array:
    """[N, P, K, H] of keys or values, in `dtype` where they are quantised."""
    if isinstance(side, Quantised):
        return dequantise(Quantised(*(_rows_of(y, rows) for y in side)), dtype)
    return _rows_of(side, rows)


def _rows_of(pool: jax.Array, rows: jax.Array) -> jax.Array:
    """[N, P, K, H] of a pool [R, K, H] (or [N, P, K] of [R, K]) and rows [N, P]. Flat: XLA:CPU copies long
    rows faster than short ones."""
    flat = pool.reshape(pool.shape[0], -1).at[rows].get(mode="promise_in_bounds")
    return flat.reshape(*rows.shape, *pool.shape[1:])


def _products(a: jax.Array, kv: jax.Array) -> jax.Array:
    """float32 products, along H, of a [N, P or 1, K, G, H or 1] with keys or values [N, P, K, H]."""
    return a.astype(jnp.float32) * kv.astype(jnp.float32)[:, :, :, None]
