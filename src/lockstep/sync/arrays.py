"""Between jax's arrays and the planner's numbers: layouts of shardings, and which buffers two arrays share.

A plan's device numbers are jax's device ids within one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from lockstep.cluster.devices import PINNED_HOST, default_memory
from lockstep.cluster.sharding import describe_layout, mesh_order
from lockstep.errors import SyncError
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.plan import Placed


@lru_cache(maxsize=16384)
def _layout(sharding: Sharding, dims: int) -> Layout:
    memory = _memory(sharding)
    if isinstance(sharding, NamedSharding):
        axes = tuple((str(name), size) for name, size in sharding.mesh.shape.items())
        mesh = MeshShape(axes, tuple(device.id for device in sharding.mesh.devices.flat))
        entries = [*sharding.spec, *[None] * (dims - len(sharding.spec))]
        cuts = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
        return Layout(mesh, tuple(tuple(str(axis) for axis in axes) for axes in cuts), memory)
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = mesh_order(sharding)
        return Layout(MeshShape((), (device.id,)), ((),) * dims, memory)
    raise SyncError(
        f"sync: a {type(sharding).__name__} over {len(sharding.device_set)} devices has no axes to plan with; place "
        f"the weights with a NamedSharding"
    )


def layout_of(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """The layout of an array of `shape` under `sharding`; device numbers are jax's ids.

    Raises SyncError for shardings without named axes over several devices, and for memories besides the device's
    default one and pinned host memory.
    """
    return _layout(sharding, len(shape))


def _memory(sharding: Sharding) -> str:
    kind = sharding.memory_kind
    if kind is None or kind == default_memory(next(iter(sharding.device_set))):
        return "device"
    if kind == PINNED_HOST:
        return "host"
    raise SyncError(
        f"sync: weights in memory {kind!r} cannot be planned for; use the device's memory or {PINNED_HOST!r} "
        f"({describe_layout(sharding)})"
    )


def placed(leaf: jax.Array) -> Placed:
    """What the planner has to know of an array."""
    return Placed(leaf.shape, leaf.dtype.name, layout_of(leaf.sharding, leaf.shape))


def device_numbers(shardings: Iterable[Sharding]) -> dict[int, jax.Device]:
    """Plan number -> device, of all devices that the shardings use."""
    distinct = {id(sharding): sharding for sharding in shardings}  # leaves share few, and comparing them is slow
    return {device.id: device for sharding in distinct.values() for device in mesh_order(sharding)}


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


def in_default_memory(array: jax.Array) -> jax.Array:
    """`array` where its devices compute: itself unless it was put into host memory."""
    kind = default_memory(next(iter(array.sharding.device_set)))
    if array.sharding.memory_kind in (None, kind):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(kind))


def copy(leaf: jax.Array, destination: Sharding) -> jax.Array:
    """`leaf` placed as `destination` says, on buffers that it shares with nothing."""
    return detached(jax.device_put(leaf, destination), leaf)


def require_live(tree: Mapping[str, jax.Array], role: str, shown: str) -> None:
    """Raise SyncError when a leaf was deleted or donated. shown: what to do about it."""
    gone = [path for path, leaf in tree.items() if leaf.is_deleted()]
    if gone:
        more = f" and {len(gone) - 5} more" if len(gone) > 5 else ""
        raise SyncError(f"sync: {role}'s {', '.join(gone[:5])}{more} deleted or donated; {shown}")
