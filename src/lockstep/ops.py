"""Small numerical pieces shared by the sampler and the trainer, and the tile that makes the two agree bit for bit.

Shape letters, here and everywhere: `N` rows (one token of one sequence each), `B` sequences, `G` samples of a group,
`T` completion tokens, `S` cached positions a row may read, `R` rows of a KV pool, `D` model width, `Q` query heads,
`K` key/value heads, `H` head width, `F` MLP width, `V` vocabulary, `L` layers.

Why tiles. XLA picks a matrix-multiply kernel, and with it a summation order, from the shapes it sees, and vectorises
elementwise code with other instructions in the body of a loop than in its remainder. The same row among 128 others and
among 1024 others therefore gets different last bits. `tiled` runs a block on exactly `tile_rows` rows at a time, fenced
so that nothing outside can be fused in; the sampler and the trainer both go through it, so a row's bits depend on that
row alone. `tile_rows=0` switches this off (the `fast` mode). The backward pass, which nobody has to reproduce,
takes what is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

fence = jax.lax.optimization_barrier


def tiled(block: Callable[..., Any], tile_rows: int, live: jax.Array, shared: Any, *rows: jax.Array) -> Any:
    """`block(shared, *rows)` evaluated on tiles of `tile_rows` rows.

    rows: arrays with equal leading dimension N, a multiple of tile_rows (the callers pad), or one short tile of fewer
    rows (`Programs.rows_for`). live [N] bool: the rows that are not padding; a tile without any is skipped and comes
    back as zeros, so that padding to few shapes costs little. Returns what block returns, leading dimension N again.
    With tile_rows 0 the block sees all N rows at once.
    """
    if not tile_rows:
        return block(shared, *rows)
    num_rows = rows[0].shape[0]
    tile_rows = min(tile_rows, num_rows)
    assert num_rows % tile_rows == 0, (num_rows, tile_rows)
    split = tuple(r.reshape((num_rows // tile_rows, tile_rows, *r.shape[1:])) for r in rows)

    def run(tile: tuple[jax.Array, ...]) -> Any:
        return fence(block(shared, *fence(tile)))

    def skip(tile: tuple[jax.Array, ...]) -> Any:
        return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(run, tile))

    # One code path for one tile or many: a loop body and straight-line code may be compiled differently.
    used = live.reshape(-1, tile_rows).any(1)
    out = jax.lax.map(lambda a: jax.lax.cond(a[0], run, skip, a[1]), (used, split))
    return jax.tree.map(lambda y: y.reshape((num_rows, *y.shape[2:])), out)


MIN_ROWS = 8  # of fewer rows XLA:CPU sums each in another order


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    """Root-mean-square norm over the last dim, computed in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    y = x.astype(jnp.float32)
    squares, n = y * y, x.shape[0]
    if n < MIN_ROWS:
        squares = fence(jnp.concatenate([squares, jnp.zeros((MIN_ROWS - n, *x.shape[1:]), jnp.float32)]))
    y = y * jax.lax.rsqrt(jnp.mean(squares, -1, keepdims=True)[:n] + eps)
    if offset:
        # Gemma multiplies before rounding to the compute dtype; Llama and Qwen after.
        return (y * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * weight.astype(x.dtype)


def rotate(x: jax.Array, pos: jax.Array, inv_freq: jax.Array) -> jax.Array:
    """Rotary position embedding. x [N, heads, H], pos [N] int32, inv_freq [H/2] float32."""
    angle = pos.astype(jnp.float32)[:, None] * inv_freq
    # Fenced, or XLA:CPU computes them again for every head.
    cos, sin = fence((jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]))
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); x itself where cap is None (Gemma 2, arXiv:2408.00118, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


LANES = 128  # vocabulary entries summed together first; also the second level of the sampler's search


def log_normaliser(scaled_VN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of columns of logits: max [N], log-sum-exp above it [N], sums of exp(z - max) by chunk [N, ceil(V/128)].

    The chunk sums are what the sampler searches, so the probability it draws from and the log-probability it records
    come from the same numbers.
    """
    peak = scaled_VN.max(0)
    weight = jnp.exp(scaled_VN - peak)
    pad = -scaled_VN.shape[0] % LANES
    chunks = fence(jnp.pad(weight, ((0, pad), (0, 0))).reshape(-1, LANES, weight.shape[1]).sum(1)).T
    return peak, jnp.log(chunks.sum(-1)), chunks


def temperature_scaled(logits_VN: jax.Array, temperature_N: jax.Array) -> jax.Array:
    """logits / temperature; columns with temperature 0 (greedy) are left as they are: they score at temperature 1."""
    return logits_VN / jnp.where(temperature_N > 0, temperature_N, 1.0)
