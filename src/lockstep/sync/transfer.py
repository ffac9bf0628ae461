"""Moving leaves: what a placement costs (`plan_leaf`, pure), doing it (`LocalTransport`), and what was really done
(`written_bytes`, read off the buffers).

A leaf is either *in place* - every destination shard is a shard that the source holds on that very device, so the
destination uses the source's buffers and nothing runs - or it is written whole into buffers of its own. There is
nothing in between: a leaf that shares only some of its shards with the trainer would be half gone after a donation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import jax
from jax.sharding import Sharding

from lockstep.cluster.sharding import describe_layout
from lockstep.errors import SyncError

Box = tuple[tuple[int, int], ...]
"""A shard's place in its leaf: (start, stop) per dim."""


@dataclass(frozen=True)
class LeafMove:
    """What placing one leaf means. in_place: the destination uses the source's buffers.

    bytes_planned: written into new destination buffers, replicas and local copies included (0 when in place).
    bytes_crossing: those of them that their device did not hold before, so that must come over a link.
    """

    path: str
    in_place: bool
    bytes_planned: int
    bytes_crossing: int


class Transport(Protocol):
    """How leaves get from the trainer to the sampler. A transport carries out moves; it decides nothing."""

    def stage(
        self, leaves: Mapping[str, jax.Array], destination: Mapping[str, Sharding], moves: Mapping[str, LeafMove]
    ) -> dict[str, jax.Array]:
        """Place every leaf on its destination, beside what is installed there, and return when all have arrived.

        A leaf whose move is in place comes back on the source's buffers, any other on buffers of its own. Raises
        SyncError, naming the leaf, when one cannot be placed.
        """
        ...


class LocalTransport:
    """Within one process: `jax.device_put`."""

    def stage(
        self, leaves: Mapping[str, jax.Array], destination: Mapping[str, Sharding], moves: Mapping[str, LeafMove]
    ) -> dict[str, jax.Array]:
        """As `Transport.stage`. Copies of different leaves overlap; the return waits for all of them."""
        placed = {}
        for path, leaf in leaves.items():
            try:
                place = reuse if moves[path].in_place else jax.device_put
                placed[path] = place(leaf, destination[path])
            # jax reports what does not fit as any of these, depending on the backend.
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise SyncError(
                    f"sync: {path} {leaf.dtype.name}{list(leaf.shape)} could not be placed: {error}; "
                    f"source: {describe_layout(leaf.sharding)}; destination: {describe_layout(destination[path])}"
                ) from error
        # In a second pass: looking at a buffer waits for its copy.
        staged = {path: x if moves[path].in_place else detached(x, leaves[path]) for path, x in placed.items()}
        return jax.block_until_ready(staged)


def reuse(leaf: jax.Array, destination: Sharding) -> jax.Array:
    """`leaf` as an array with sharding `destination`, on the same buffers (of the devices that `destination` has)."""
    if leaf.sharding == destination:
        return leaf
    held = {shard.device: shard.data for shard in leaf.addressable_shards}
    wanted = destination.addressable_devices_indices_map(leaf.shape)
    return jax.make_array_from_single_device_arrays(leaf.shape, destination, [held[device] for device in wanted])


def detached(placed: jax.Array, source: jax.Array) -> jax.Array:
    """`placed` without any buffer of `source`. device_put reuses a shard that is already right, whatever `may_alias`
    says; those shards are copied on their devices."""
    shared = shared_devices(source, placed)
    if not shared:
        return placed
    shards = [s.data.copy() if s.device in shared else s.data for s in placed.addressable_shards]
    return jax.make_array_from_single_device_arrays(placed.shape, placed.sharding, shards)


def copy(leaf: jax.Array, destination: Sharding) -> jax.Array:
    """`leaf` placed as `destination` says, on buffers that it shares with nothing."""
    return detached(jax.device_put(leaf, destination), leaf)


def shared_devices(a: jax.Array, b: jax.Array) -> set[jax.Device]:
    """Devices on which the two arrays are one buffer."""
    held = {shard.device: shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards}
    return {
        s.device for s in b.addressable_shards if held.get(s.device) == s.data.unsafe_buffer_pointer() and s.data.size
    }


def written_bytes(source: jax.Array, installed: jax.Array) -> int:
    """Bytes of `installed` that are not on a buffer of `source`: what really was written, replicas included."""
    shared = shared_devices(source, installed)
    return sum(shard.data.nbytes for shard in installed.addressable_shards if shard.device not in shared)


@lru_cache(maxsize=4096)
def plan_leaf(path: str, source: Sharding, destination: Sharding, shape: tuple[int, ...], itemsize: int) -> LeafMove:
    """What it takes to place one leaf. Reads layouts only, never data.

    Asked on every sync, not once: an array that came back from a checkpoint, from host memory or on another mesh has
    another layout than the one before it.
    """
    held, wanted = boxes(source, shape), boxes(destination, shape)
    same_memory = source.memory_kind == destination.memory_kind
    if same_memory and all(held.get(device) == box for device, box in wanted.items()):
        return LeafMove(path, True, 0, 0)
    planned = crossing = 0
    for device, box in wanted.items():
        size = _volume(box)
        planned += size
        local = _volume(_intersection(box, held[device])) if same_memory and device in held else 0
        crossing += size - local
    return LeafMove(path, False, planned * itemsize, crossing * itemsize)


def boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
    """device -> the box of the leaf that it holds."""
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _volume(box: Box) -> int:
    return math.prod(max(0, stop - start) for start, stop in box)


def _intersection(a: Box, b: Box) -> Box:
    return tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
