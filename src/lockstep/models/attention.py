"""Attention of single rows over cached keys and values, the one form that sampler and trainer share.

The cache is a pool of rows; a query row names, position by position, which pool rows it may read. For the sampler the
pool is its page pool and the names come from page tables; for the trainer the pool is the keys and values of the same
micro-batch and the names say "the group's prompt rows, then this sample's own rows", which is how a prompt that eight
samples share is computed once. Positions are visited in blocks of fixed size with a running maximum and sum
(Milakov & Gimelshein 2018, arXiv:1805.02867), so a row's result does not depend on how far the index is padded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lockstep.ops import fence

NO_WINDOW = 1 << 30
State = tuple[jax.Array, jax.Array, jax.Array]
_LOW = -1e30  # a finite stand-in for -inf: exp(_LOW - anything finite) is exactly 0 and never NaN

# Positions at a time. Fewer than MIN_BLOCK are padded: XLA:CPU sums shorter blocks in another order. Within a block,
# what is not seen adds exact zeros at the end of sums that run in order, so all widths from there on give one result.
BLOCK = 128
MIN_BLOCK = 64


def block_size(width: int, page_size: int) -> int:
    """Positions that are visited together: a power-of-two number of pages, at most `width` and about BLOCK."""
    size = page_size
    while size * 2 <= min(width, BLOCK):
        size *= 2
    return size


def attend(
    pool: tuple[jax.Array, jax.Array],
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

    pool: keys and values, each [R, K, H]. q [N, Q, H]. read [N, S] int32: pool row that holds position s of the row's
    sequence, S a multiple of page_size. length [N] int32: the row sees positions 0..length-1 (itself included), >= 1.
    window: int32 scalar, only the last `window` of those positions count. Scores and sums are float32.
    remat: when differentiated, a block's keys and values are gathered again rather than kept.
    Pool rows outside what a row sees never reach it, whatever they hold: garbage left over, NaN, positions ahead.
    """
    keys, values = pool
    n, num_heads, head_dim = q.shape
    num_kv = keys.shape[1]
    qg = q.reshape(n, num_kv, num_heads // num_kv, head_dim)
    pages = -(-max(read.shape[1], MIN_BLOCK) // page_size)
    read = jnp.pad(read, ((0, 0), (0, pages * page_size - read.shape[1])))
    size = block_size(read.shape[1], page_size)
    read = jnp.pad(read, ((0, 0), (0, -read.shape[1] % size)))

    def block(carry: State, start: jax.Array) -> tuple[State, None]:
        peak, total, acc = carry
        rows = jax.lax.dynamic_slice_in_dim(read, start, size, 1)
        at = start + jnp.arange(size)
        seen = (at[None] < length[:, None]) & (at[None] >= length[:, None] - window)
        # A weight of zero does not hide a NaN or an infinity: what a row may not see is replaced, not just unweighted.
        k, v = (jnp.where(seen[..., None, None], y[rows], jnp.zeros((), y.dtype)) for y in (keys, values))
        s = jnp.einsum("nkgh,npkh->nkgp", qg, k, preferred_element_type=jnp.float32) * scale
        if cap is not None:
            s = cap * jnp.tanh(s / cap)
        s = jnp.where(seen[:, None, None], s, _LOW)
        # The maximum only keeps exp in range: the result does not depend on it, so no gradient flows through it.
        new_peak = jax.lax.stop_gradient(jnp.maximum(peak, s.max(-1)))
        p = fence(jnp.where(seen[:, None, None], jnp.exp(s - new_peak[..., None]), 0.0))
        shrink = jnp.exp(peak - new_peak)
        sums = p.reshape(*p.shape[:3], size // page_size, page_size).sum(-1).sum(-1)
        # Products and a sum over positions, in order, rather than many small matrix products: faster on the CPU, and
        # the order does not change with the number of rows.
        weights = jnp.moveaxis(p.astype(q.dtype).astype(jnp.float32), -1, 1)
        mixed = (weights[..., None] * v.astype(jnp.float32)[:, :, :, None]).sum(1)
        live = seen.any(-1)[:, None, None]
        return (
            jnp.where(live, new_peak, peak),
            jnp.where(live, total * shrink + sums, total),
            jnp.where(live[..., None], acc * shrink[..., None] + mixed, acc),
        ), None

    shape = (n, num_kv, num_heads // num_kv)
    start = (jnp.full(shape, _LOW), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    step = jax.checkpoint(block) if remat else block
    (_, total, acc), _ = jax.lax.scan(step, start, jnp.arange(0, read.shape[1], size))
    return (acc / total[..., None]).astype(q.dtype).reshape(n, num_heads * head_dim)
