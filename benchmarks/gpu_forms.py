"""The decoder's blocks by themselves, and the ways in which a row's bits can come to depend on other rows.

Used by `benchmarks/gpu_exact.py`, whose docstring says what is looked at and why.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.models import decoder
from lockstep.models.attention import NO_WINDOW, attend
from lockstep.models.decoder import Numerics, linear
from lockstep.models.init import init_params
from lockstep.models.spec import ModelSpec
from lockstep.ops import rms_norm, rotate, tiled

PAGE = 16
BLOCK = 16, 64, 32  # rows, columns and depth of the Pallas product


# ---------------------------------------------------------------- the blocks


@dataclass(frozen=True)
class Block:
    """run(shared, *rows) -> [N, ...]; rows: arrays of as many rows as the largest height."""

    name: str
    run: Callable[..., jax.Array]
    shared: Any
    rows: tuple[jax.Array, ...]

    def at(self, height: int) -> tuple[jax.Array, ...]:
        return tuple(r[:height] for r in self.rows)


def blocks(spec: ModelSpec, dtype: str, rows: int) -> list[Block]:
    """The decoder's blocks on random weights and rows, and a product by itself in two forms."""
    # One layer is enough, and so is its share of the weights.
    leaves = init_params(ModelSpec(**{**vars(spec), "layers": spec.layers[:1]}), 5)
    layer = {k: jnp.asarray(v, dtype) for k, v in decoder.layer_weights(leaves, 0).items()}
    head = {k: jnp.asarray(v, dtype) for k, v in decoder.head_weights(leaves).items()}
    inv_freq = jnp.asarray(spec.layers[0].rope.inv_freq(spec.head_dim))
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    x, pos = normal(rows, spec.dim), jnp.asarray(rng.integers(0, 256, rows), jnp.int32)
    width = spec.num_heads * spec.head_dim
    pool = tuple(normal(1024, spec.num_kv_heads, spec.head_dim) for _ in range(2))
    read = jnp.asarray(rng.integers(0, 1024, (rows, 256)), jnp.int32)
    target = jnp.asarray(rng.integers(0, spec.vocab_size, rows), jnp.int32)
    plain = Numerics(dtype, 0, PAGE)

    def qkv(shared: Any, x: jax.Array, pos: jax.Array) -> jax.Array:
        w, freq = shared
        h = rms_norm(x, w["attn_norm"], spec.norm_eps, spec.norm_offset)
        q, k, v = (linear(w, n, h, 0.0).reshape(x.shape[0], -1, spec.head_dim) for n in "qkv")
        return jnp.concatenate([rotate(q, pos, freq), rotate(k, pos, freq), v], 1)

    def attention(shared: Any, q: jax.Array, read: jax.Array, length: jax.Array) -> jax.Array:
        window = jnp.int32(NO_WINDOW)
        return attend(shared, q, read, length, window, page_size=PAGE, scale=spec.query_scale, cap=None)

    def out_mlp(w: Any, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + linear(w, "o", attended, 0.0)
        h = rms_norm(x, w["mlp_norm"], spec.norm_eps, spec.norm_offset)
        return x + linear(w, "down", jax.nn.silu(linear(w, "gate", h, 0.0)) * linear(w, "up", h, 0.0), 0.0)

    def head_block(w: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        return decoder.logprobs(spec, plain, w, x, target, jnp.ones(x.shape[0], jnp.float32))

    return [
        Block("qkv", qkv, (layer, inv_freq), (x, pos)),
        Block("attention", attention, pool, (normal(rows, spec.num_heads, spec.head_dim), read, pos + 1)),
        Block("out + mlp", out_mlp, layer, (x, normal(rows, width))),
        Block("head", head_block, head, (x, target)),
        Block("gemm xla", lambda w, x: x @ w, layer["gate"], (x,)),
        Block("gemm pallas", pallas_product, layer["gate"], (x,)),
    ]


def pallas_product(w: jax.Array, x: jax.Array) -> jax.Array:
    """x [M, K] @ w [K, N]: every block of the result adds its K/32 partial products in the same order."""
    from jax.experimental import pallas as pl

    bm, bn, bk = BLOCK
    m, k = x.shape
    n = w.shape[1]
    assert k % bk == 0 and n % bn == 0, (k, n, BLOCK)
    padded = jnp.pad(x, ((0, -m % bm), (0, 0)))

    def kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            a, b = x_ref[:, pl.ds(i * bk, bk)], w_ref[pl.ds(i * bk, bk), :]
            return total + jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

        out_ref[...] = jax.lax.fori_loop(0, k // bk, add, jnp.zeros((bm, bn), jnp.float32)).astype(out_ref.dtype)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], n), x.dtype),
        grid=(padded.shape[0] // bm, n // bn),
        in_specs=[pl.BlockSpec((bm, k), lambda i, j: (i, 0)), pl.BlockSpec((k, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
        interpret=jax.default_backend() == "cpu",
    )
    return call(padded, w)[:m]


# ---------------------------------------------------------------- the checks


def bits(x: jax.Array) -> np.ndarray:
    """Bytes of every row [N, bytes]."""
    host = np.ascontiguousarray(np.asarray(x))
    return host.reshape(len(host), -1).view(np.uint8)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the rows that both have are equal, bit for bit."""
    n = min(len(a), len(b))
    return a[:n].tobytes() == b[:n].tobytes()


def compiled(block: Block, dtype: str) -> Callable[..., jax.Array]:
    """The block as it is run in the programs: float32 means float32."""
    with_precision = jax.default_matmul_precision("highest" if dtype == "float32" else "default")
    return jax.jit(with_precision(block.run))


def height_classes(outputs: dict[int, np.ndarray]) -> list[list[int]]:
    """Heights with the same bits, ascending; the first of a class represents it."""
    classes: list[list[int]] = []
    for height in sorted(outputs):
        # Compared with the largest member: it has the most rows in common.
        home = next((c for c in classes if same(outputs[c[-1]], outputs[height])), None)
        classes.append([height]) if home is None else home.append(height)
    return classes


def check_heights(block: Block, dtype: str, heights: Sequence[int]) -> dict[str, Any]:
    """Classes of heights; heights at which neighbours or a repetition change bits."""
    run = compiled(block, dtype)
    outputs, neighbours, repeats = {}, [], []
    for height in heights:
        rows = block.at(height)
        outputs[height] = first = bits(run(block.shared, *rows))
        if any(not same(first, bits(run(block.shared, *rows))) for _ in range(3)):
            repeats.append(height)
        rolled = bits(run(block.shared, *(jnp.roll(r, 1, 0) for r in rows)))
        # All rows but the middle one become the last row of all: other neighbours, the same place.
        middle = height // 2
        others = (jnp.repeat(r[-1:], height, 0).at[middle].set(r[middle]) for r in block.rows)
        alone = bits(run(block.shared, *others))
        if not same(np.roll(rolled, -1, 0), first) or alone[middle].tobytes() != first[middle].tobytes():
            neighbours.append(height)
    return {"classes": height_classes(outputs), "neighbours_matter_at": neighbours, "repeats_differ_at": repeats}


def check_tiles(block: Block, dtype: str, tile: int, counts: Sequence[int]) -> dict[str, Any]:
    """The block in tiles: whether its rows have the same bits for every number of tiles, which also is what they are by
    themselves, and a digest for other processes. live: all but the last tile."""

    def run(n: int, live: int) -> np.ndarray:
        form = Block(block.name, lambda s, *r: tiled(block.run, tile, jnp.arange(n) < live, s, *r), block.shared, ())
        return bits(compiled(form, dtype)(block.shared, *block.at(n)))

    outputs = [run(tile * count, tile * count) for count in counts]
    fewer = run(tile * counts[-1], tile)
    alone = bits(compiled(block, dtype)(block.shared, *block.at(tile)))
    return {
        "holds": all(same(outputs[0], o) for o in outputs) and same(fewer[:tile], outputs[0]),
        "equals_block_alone": same(alone, outputs[0]),
        "digest": hashlib.sha256(outputs[0].tobytes()).hexdigest()[:16],
    }


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Least of some calls, after two that do not count."""
    found = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        if i > 1:
            found.append(time.perf_counter() - start)
    return min(found)


def tile_cost(block: Block, dtype: str, tile: int, rows: int, repeats: int) -> float:
    """Time of `rows` rows in tiles over that of all at once."""
    live = jnp.ones(rows, bool)
    exact = Block(block.name, lambda s, *r: tiled(block.run, tile, live, s, *r), block.shared, ())
    a, b = compiled(exact, dtype), compiled(block, dtype)
    given = block.at(rows)
    return seconds(lambda: a(block.shared, *given), repeats) / seconds(lambda: b(block.shared, *given), repeats)
