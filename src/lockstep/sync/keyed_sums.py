"""The sums of `digest`, on the devices that hold the leaf: one pass over every shard, replicas included.

Devices get the numbers K as small arrays, so that a compiled program depends on shapes only: a leaf, a piece of a fused
leaf and a transposed one are the same program with other K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lockstep.cluster.sharding import describe_layout
from lockstep.errors import SyncError
from lockstep.sync.arrays import in_default_memory
from lockstep.sync.digest import FOLD, LANES, keys, word_bytes

# On XLA:CPU a sum over rows that are taken eight at a time is vectorised, with an eighth of the additions at full
# width; sixteen is where its fusion gives up.
_ROWS = 8
_SMALL = 1 << 16  # elements; below, rows are taken one at a time, which compiles in a third of the time
_ZERO = np.uint64(0)


class Along(NamedTuple):
    """How one dim of an array runs along a dim of the digested leaf: for t in 0..size-1, index `source + t *
    source_step` is index `target + t * target_step` of dim `dim` there. dim None: it counts with K = 1."""

    dim: int | None
    source: int
    target: int
    size: int
    source_step: int = 1
    target_step: int = 1


def start_sums(
    path: str, leaf: jax.Array, dtype: np.dtype, along: tuple[Along, ...], words_dim: int, keep: bool = False
) -> jax.Array:
    """Start the sums over the elements that `along` (one per dim of `leaf`) reaches, cast to `dtype`. Call it under
    `jax.enable_x64(True)`.

    words_dim: which dim of the digested leaf the words of 64-bit elements are. keep: leave the first of three or more
    dims unsummed. Returns, not waited for, [devices in mesh order, LANES] uint64, or [devices, n, LANES] with n the
    elements of a shard along the first dim. Raises SyncError naming the leaf where it has no digest.
    """
    if leaf.is_deleted():
        raise SyncError(f"digest: {path} was deleted or donated; a donated tree must not be used again")
    if not leaf.is_fully_addressable:
        raise SyncError(f"digest: other processes hold parts of {path} ({describe_layout(leaf.sharding)})")
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        raise SyncError(
            f"digest: {path} is laid out by a {type(sharding).__name__} over {len(sharding.device_set)} devices; "
            f"place it with a NamedSharding"
        )
    assert not keep or leaf.ndim > 2, (path, leaf.shape)
    word_bytes(leaf.dtype, path)  # for what it raises
    words = (words_dim,) if word_bytes(dtype, path) == 8 else ()
    leaf = in_default_memory(leaf)
    program, numbers, starts = _prepared(leaf.sharding, leaf.shape, along, words, dtype, keep)
    return program(leaf, numbers, starts)


@lru_cache(maxsize=4096)
def _prepared(
    sharding: Sharding,
    shape: tuple[int, ...],
    along: tuple[Along, ...],
    words: tuple[int, ...],
    dtype: np.dtype,
    keep: bool,
) -> tuple[Callable[..., jax.Array], list[jax.Array], list[jax.Array]]:
    """The program, the numbers K per dim ([LANES, shards * length] uint32, cut as the leaf is), and per dim where
    each shard's part begins ([shards] int32; none where all of every shard counts)."""
    mesh, spec = (sharding.mesh, sharding.spec) if isinstance(sharding, NamedSharding) else (None, PartitionSpec())
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    parts = [math.prod(mesh.shape[axis] for axis in _axes(entry)) if mesh else 1 for entry in entries]
    cuts = [_cut(run, size, n) for run, size, n in zip(along, shape, parts, strict=True)]
    lengths = tuple(length for length, _, _ in cuts)
    if lengths == tuple(size // n for size, n in zip(shape, parts, strict=True)):
        lengths = ()
    numbers = [found for _, _, found in cuts] + [keys(dim, 0, 1, 2) for dim in words]
    starts = [np.array(begins, np.int32) for _, begins, _ in cuts if lengths]
    program = _program(mesh, tuple(entries), len(words), dtype, lengths, keep)
    if mesh is None:
        (device,) = sharding.device_set
        return program, jax.device_put(numbers, device), jax.device_put(starts, device)
    on = [NamedSharding(mesh, PartitionSpec(None, entry)) for entry in (*entries, *[None] * len(words))]
    at = [NamedSharding(mesh, PartitionSpec(entry)) for entry in entries if lengths]
    return program, jax.device_put(numbers, on), jax.device_put(starts, at)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _cut(run: Along, size: int, parts: int) -> tuple[int, list[int], np.ndarray]:
    """One dim over its shards: elements to look at in each, where they begin in each, and their K, 0 for those that
    are not meant. Every shard looks at equally many, so that one program serves all."""
    if not run.size or not size:
        return 0, [0] * parts, np.zeros((LANES, 0), np.uint32)
    held, stop = size // parts, run.source + (run.size - 1) * run.source_step + 1
    inside = [(max(run.source, i * held) - i * held, min(stop, (i + 1) * held) - i * held) for i in range(parts)]
    length = max(1, *(last - first for first, last in inside)) if parts > 1 else stop - run.source
    starts = [min(max(0, first), held - length) for first, _ in inside]
    index = np.concatenate([np.arange(length) + i * held + start for i, start in enumerate(starts)]) - run.source
    t, meant = index // run.source_step, index % run.source_step == 0
    meant &= (t >= 0) & (t < run.size)
    if run.dim is None:
        return length, starts, np.where(meant, np.uint32(1), np.uint32(0))[None].repeat(LANES, 0)
    drawn = keys(run.dim, run.target, run.target_step, run.size)
    return length, starts, np.where(meant, drawn[:, np.clip(t, 0, run.size - 1)], np.uint32(0))


@lru_cache(maxsize=1024)
def _program(
    mesh: Mesh | None, spec: tuple[Any, ...], words: int, dtype: np.dtype, lengths: tuple[int, ...], keep: bool
) -> Callable[..., jax.Array]:
    """Compiled once per shape and type. lengths: of what is taken out of each shard; empty: all of it."""

    def shard(leaf: jax.Array, numbers: list[jax.Array], starts: list[jax.Array]) -> jax.Array:
        if lengths:
            leaf = lax.dynamic_slice(leaf, [start[0] for start in starts], lengths)
        return _sums(leaf.astype(dtype), numbers, keep)[None]

    if mesh is None:
        return jax.jit(shard)
    cut = [PartitionSpec(None, entry) for entry in (*spec, *[None] * words)]
    begins = [PartitionSpec(entry) for entry in spec] if lengths else []
    everywhere = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            shard, mesh=mesh, in_specs=(PartitionSpec(*spec), cut, begins), out_specs=everywhere, check_vma=False
        )
    )


def _sums(leaf: jax.Array, numbers: list[jax.Array], keep: bool) -> jax.Array:
    """[LANES] uint64 of one shard (keep: [n, LANES]). numbers: per dim [LANES, n] uint32."""
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"u{min(leaf.dtype.itemsize, 4)}"))
    if bits.dtype.itemsize == 4:
        bits = bits ^ (bits >> FOLD)
    if not bits.ndim:
        return jnp.full(LANES, bits.astype(jnp.uint64))
    if not bits.size:
        return jnp.zeros((bits.shape[0], LANES) if keep else LANES, jnp.uint64)
    # A matrix, or a block [kept, others] of them: dims before the last two, with all products of their numbers.
    *before, rows, columns = [1, *bits.shape][-max(2, bits.ndim) :]
    row_numbers = numbers[-2] if bits.ndim > 1 else jnp.ones((LANES, 1), jnp.uint32)
    leading = jnp.ones((LANES, 1), jnp.uint64)
    for more in numbers[1 if keep else 0 : -2]:
        leading = (leading[:, :, None] * more.astype(jnp.uint64)[:, None, :]).reshape(LANES, -1)
    block = (before[0] if keep else 1, leading.shape[1]) if before else ()
    height = min(rows, _ROWS if bits.size >= _SMALL else 1)
    full = rows - rows % height
    total = jnp.zeros(LANES, jnp.uint64)
    for first, last, together in ((0, full, height), (full, rows, rows - full)):
        if first < last:
            part = bits.reshape(*block, rows, columns)[..., first:last, :]
            total = total + _matrix_sums(part, leading, row_numbers[:, first:last], numbers[-1], together)
    return total[0] if block and not keep else total


def _matrix_sums(blocks: jax.Array, leading: jax.Array, rows: jax.Array, columns: jax.Array, height: int) -> jax.Array:
    """[LANES] of [R, C], [kept, LANES] of [kept, M, R, C]. leading: [LANES, M] uint64. rows: [LANES, R]. columns:
    [LANES, C]. height: rows taken at a time; divides R."""
    *block, r, c = blocks.shape
    tall = blocks.reshape(*block, r // height, height, c)
    rows = rows.reshape(LANES, r // height, height, 1)
    wide = []
    for lane in range(LANES):
        # Widened where they are used: a compiler that sees 32 bits in both multiplies them in one instruction.
        parts = (tall[..., i, :].astype(jnp.uint64) * rows[lane, :, i].astype(jnp.uint64) for i in range(height))
        wide.append(sum(parts) * columns[lane].astype(jnp.uint64))
    lanes = _reduce((len(block) + 1,), *wide)
    if not block:
        return jnp.stack(_reduce((0,), *lanes))
    return jnp.stack(_reduce((1, 2), *(lanes[lane] * leading[lane][:, None] for lane in range(LANES))), axis=-1)


def _reduce(dims: tuple[int, ...], first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both summed over `dims`, in one loop: on the CPU two loops would widen every element twice, and run unvectorised;
    other compilers make one loop of two."""

    def together(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.reduce((a, b), (_ZERO, _ZERO), lambda x, y: (x[0] + y[0], x[1] + y[1]), dims)

    def apart(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.reduce(a, _ZERO, lax.add, dims), lax.reduce(b, _ZERO, lax.add, dims)

    result: tuple[jax.Array, jax.Array] = lax.platform_dependent(first, second, cpu=together, default=apart)
    return result
