"""Passes of fewer rows than a tile, where they come out as a whole tile would.

A tile's height is what makes a row's bits its own (`ops.tiled`), but a tile of 32 rows for the last three samples of a
batch is mostly padding. XLA:CPU happens to compute a row of 8 or of 16 rows as it computes one of 32. Nobody promises
that, for another processor or model, so it is tried, once for each height and before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import NamedSharding

from lockstep.models.decoder import Rows

if TYPE_CHECKING:
    from lockstep.cluster.programs import Programs

HEIGHTS = (2, 8, 16)  # XLA:CPU multiplies a single row by another kernel


def comes_out_as_a_tile(programs: Programs, height: int, width: int) -> bool:
    """Whether layers give the same bits on passes of `height` rows as on one of a whole tile, on random weights and
    states: one layer of each kind, since those with an adapter (`lora.last_layers`) have products of their own. width:
    of the index that rows read by; attention has a tile of its own, so any will do."""
    return all(_layer_comes_out_as_a_tile(programs, layer, height, width) for layer in _kinds(programs))


def _kinds(programs: Programs) -> list[int]:
    """The first layer of each set of leaves."""
    leaves: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for path, leaf in programs.leaves.items():
        if path.startswith("layers."):
            _, layer, name = path.split(".", 2)
            leaves.setdefault(int(layer), set()).add((name, leaf.shape))
    first: dict[frozenset[tuple[str, tuple[int, ...]]], int] = {}
    for number in sorted(leaves):
        first.setdefault(frozenset(leaves[number]), number)
    return list(first.values())


def _layer_comes_out_as_a_tile(programs: Programs, layer: int, height: int, width: int) -> bool:
    tile, shards = programs.num.tile_rows, programs.row_shards
    rng = np.random.default_rng(height)
    weights = _random_layer(programs, layer, rng)
    x = _random(rng, (shards, tile, programs.spec.dim), programs)
    empty = programs.new_pool(width + tile)
    content = jax.tree.map(lambda a: _random(rng, a.shape, programs), empty)
    rows = Rows(
        tokens=np.zeros((shards, tile), np.int32),
        pos=rng.integers(0, width, (shards, tile), np.int32),
        write=np.broadcast_to(width + np.arange(tile, dtype=np.int32), (shards, tile)),
        read=np.broadcast_to(np.arange(width, dtype=np.int32), (shards, tile, width)),
        length=rng.integers(1, width + 1, (shards, tile), np.int32),
    )

    def run(first: int, count: int) -> np.ndarray:
        def flat(a: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(a).reshape(-1, *a.shape[2:])

        part = jax.tree.map(lambda a: flat(a[:, first : first + count]), (x, rows))
        state, own = programs.put_rows(part)
        pool = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), content, empty)
        return np.asarray(programs.layer_of(weights, layer, state, own, pool)[0]).reshape(shards, count, -1)

    whole = run(0, tile)
    short = np.concatenate([run(first, height) for first in range(0, tile, height)], 1)
    return whole.tobytes() == short.tobytes()


def _random(rng: np.random.Generator, shape: tuple[int, ...], programs: Programs) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape, np.float32)).astype(programs.num.dtype)


def _random_layer(programs: Programs, layer: int, rng: np.random.Generator) -> dict[str, jax.Array]:
    """Weights of a layer, adapter included, of the size that keeps states about as large as they are."""
    out = {}
    for path, leaf in programs.leaves.items():
        if path.startswith(f"layers.{layer}."):
            name = path.split(".", 2)[2]
            values = rng.standard_normal(leaf.shape, np.float32) / np.sqrt(leaf.shape[0] if len(leaf.shape) > 1 else 1)
            out[name] = jax.device_put(values, NamedSharding(programs.mesh, programs.place_of(name)))
    return out
