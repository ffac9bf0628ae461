"""Carrying out a plan with device code alone: cut on the sender, `jax.device_put` in buckets, put in on the receiver.

Works on every kind of device. A round is a bucket: what it stages is freed before the next one starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from lockstep.cluster.devices import default_memory
from lockstep.sync.arrays import in_default_memory
from lockstep.sync.moves import Move, Prepared, Shape, Span, covers
from lockstep.sync.plan import SyncPlan

OnDevices = dict[int, jax.Array]


def carry_out(
    plan: SyncPlan,
    prepared: Prepared,
    source: Mapping[str, jax.Array],
    destination: Mapping[str, Sharding],
    numbers: Mapping[int, jax.Device],
    moved: Callable[[Move, int], None],
    check: Callable[[], None],
) -> dict[str, jax.Array]:
    """Every leaf that the plan writes, in buffers of its own; arguments as `local_host.carry_out`."""
    read = {name for path in prepared.parts for name in plan.leaves[path].sources}
    shards = {path: {s.device.id: s.data for s in in_default_memory(source[path]).addressable_shards} for path in read}
    parts: dict[str, OnDevices] = {path: {} for path in prepared.parts}
    for moves in prepared.rounds:
        check()
        blocks = []
        for move in moves:
            held = (parts[move.target] if move.relay else shards[move.source])[move.sender]
            blocks.append(cut(held, move, plan.leaves[move.target].wire_dtype))
        arrived = jax.device_put(blocks, [numbers[move.receiver] for move in moves])
        for move, block in zip(moves, arrived, strict=True):
            moved(move, block.nbytes)
            shape, dtype = prepared.parts[move.target][move.receiver], plan.leaves[move.target].dtype
            put_in(parts[move.target], move, block, shape, dtype)
        del blocks, arrived
        jax.block_until_ready([parts[move.target][move.receiver] for move in moves])
    return {
        path: assemble(parts[path], plan.leaves[path].dtype, prepared.parts[path], shape, destination[path], numbers)
        for path, shape in ((path, plan.leaves[path].shape) for path in parts)
    }


def to_wire(array: jax.Array, dtype: str) -> jax.Array:
    """`array` in the type that crosses, cast where it is; itself where it has that type."""
    return array if array.dtype.name == dtype else _cast(array, dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(array: jax.Array, dtype: str) -> jax.Array:
    return array.astype(dtype)


def cut(held: jax.Array, move: Move, wire: str) -> jax.Array:
    """What moves, on the sender, in the type that crosses; on buffers that nobody else has unless it is sent away."""
    if covers(move.read, held.shape) and move.aligned:
        if held.dtype.name != wire:
            return _cast(held, wire)
        # device_put would hand back the very shard.
        return held.copy() if move.sender == move.receiver else held
    starts, sizes, steps = _columns(move.read)
    return _slice(held, starts, sizes, steps, move.drop, move.order, move.shape, wire)


def _columns(span: Span) -> tuple[np.ndarray, Shape, Shape]:
    """Starts (values, so that the boxes of a leaf share a program), sizes, steps."""
    starts = np.array([start for start, _, _ in span], np.int32)
    return starts, tuple(size for _, size, _ in span), tuple(step for _, _, step in span)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6, 7))
def _slice(
    held: jax.Array,
    starts: jax.Array,
    sizes: Shape,
    steps: Shape,
    drop: tuple[int, ...],
    order: tuple[int, ...],
    shape: Shape,
    dtype: str,
) -> jax.Array:
    extents = [(size - 1) * step + 1 for size, step in zip(sizes, steps, strict=True)]
    block = lax.dynamic_slice(held, list(starts), extents)
    block = block[tuple(slice(None, None, step) for step in steps)]
    return lax.squeeze(block, drop).transpose(order).reshape(shape).astype(dtype)


def put_in(parts: OnDevices, move: Move, block: jax.Array, shape: Shape, dtype: str) -> None:
    """Write an arrived block into the receiver's part."""
    if covers(move.write, shape):
        parts[move.receiver] = to_wire(block, dtype)
        return
    if move.receiver not in parts:
        (device,) = block.devices()
        parts[move.receiver] = jnp.zeros(shape, dtype, device=device)
    starts, sizes, steps = _columns(move.write)
    parts[move.receiver] = _write(parts[move.receiver], block, starts, sizes, steps)


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _write(part: jax.Array, block: jax.Array, starts: jax.Array, sizes: Shape, steps: Shape) -> jax.Array:
    block = block.astype(part.dtype)
    if any(step > 1 for step in steps):
        extents = [(size - 1) * step + 1 for size, step in zip(sizes, steps, strict=True)]
        around = lax.dynamic_slice(part, list(starts), extents)
        block = around.at[tuple(slice(None, None, step) for step in steps)].set(block)
    return lax.dynamic_update_slice(part, block, list(starts))


def assemble(
    parts: OnDevices,
    dtype: str,
    shapes: Mapping[int, Shape],
    shape: Shape,
    sharding: Sharding,
    numbers: Mapping[int, jax.Device],
) -> jax.Array:
    """The whole leaf from its parts; a part that nothing was moved into is all fill (or empty)."""
    here = {
        numbers[number]: parts[number] if number in parts else jnp.zeros(shapes[number], dtype, device=numbers[number])
        for number in shapes
    }
    kind = default_memory(next(iter(here)))
    home = sharding if sharding.memory_kind in (None, kind) else sharding.with_memory_kind(kind)
    shards = [here[device] for device in home.addressable_devices_indices_map(shape)]
    array = jax.make_array_from_single_device_arrays(shape, home, shards)
    return array if home is sharding else jax.device_put(array, sharding)
