"""What a transport between processes does on its own devices: cut boxes at the sender, put them into place at the
receiver. By the host where devices are its own memory, by device code everywhere else; both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lockstep.cluster.devices import HostMemory, adopt, default_memory, host_view, in_host_memory
from lockstep.sync import local_device
from lockstep.sync.moves import Move, Prepared, covers
from lockstep.sync.plan import SyncPlan

Numbers = Mapping[int, jax.Device]


class Parts(Protocol):
    """The receiver's parts of every leaf, while they are being put together."""

    def take(self, move: Move, block: jax.Array) -> None:
        """Put what arrived (and is there) into place; it is not needed afterwards."""
        ...

    def relay(self, move: Move) -> int:
        """Pass on what an earlier round brought, between two devices of this process. Returns its bytes."""
        ...

    def pending(self) -> list[jax.Array]:
        """What has been put under way since the last call, to be waited for."""
        ...

    def assembled(self, destination: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        """The whole leaves, in the plan's order; not waited for."""
        ...


def parts_of(plan: SyncPlan, prepared: Prepared, numbers: Numbers, memory: HostMemory) -> Parts:
    """The parts that `plan` writes here. memory: where buffers come from, when the host makes them."""
    if in_host_memory(list(numbers.values())):
        return HostParts(plan, prepared, numbers, memory)
    return DeviceParts(plan, prepared, numbers)


def cut(shard: jax.Array, move: Move, wire: str, memory: HostMemory) -> jax.Array:
    """What moves, on the sender, in the type that crosses; the shard itself when it is just that."""
    (device,) = shard.devices()
    if (covers(move.read, shard.shape) and move.aligned) or not in_host_memory([device]):
        return local_device.cut(shard, move, wire)
    block = move.turn(host_view(jax.block_until_ready(shard))[move.read_at])
    if block.dtype.name != wire:
        return local_device.cut(shard, move, wire)  # jax's rounding, as everywhere
    buffer = memory.empty(move.shape, block.dtype)
    copy(buffer, block)
    return adopt(move.shape, SingleDeviceSharding(device), {device: buffer})


def copy(into: np.ndarray, block: np.ndarray) -> None:
    """Fill `into` with `block`, which may be of a narrower type."""
    if into.dtype == block.dtype:
        # As integers: numpy copies types that it does not know element by element, holding the interpreter.
        bits = f"u{into.dtype.itemsize}"
        into, block = into.view(bits), block.view(bits)
    np.copyto(into, block, casting="unsafe")


def adopted(shape: tuple[int, ...], sharding: Sharding, parts: Mapping[jax.Device, np.ndarray]) -> jax.Array:
    """The array whose shards are these buffers, in whatever memory `sharding` says."""
    kind = default_memory(next(iter(parts)))
    if sharding.memory_kind in (None, kind):
        return adopt(shape, sharding, parts)
    return jax.device_put(adopt(shape, sharding.with_memory_kind(kind), parts), sharding)


def fresh(plan: SyncPlan, prepared: Prepared, path: str, memory: HostMemory) -> dict[int, np.ndarray]:
    """Device number -> buffer for its part of a leaf; zeros where the map fills."""
    dtype = np.dtype(plan.leaves[path].dtype)
    found = {number: memory.empty(shape, dtype) for number, shape in prepared.parts[path].items()}
    if path in prepared.fills:
        for part in found.values():
            part.fill(0)
    return found


class HostParts:
    """By the host: buffers that jax adopts."""

    def __init__(self, plan: SyncPlan, prepared: Prepared, numbers: Numbers, memory: HostMemory) -> None:
        self._plan, self._numbers = plan, numbers
        self._buffers = {path: fresh(plan, prepared, path, memory) for path in prepared.parts}

    def take(self, move: Move, block: jax.Array) -> None:
        copy(self._buffers[move.target][move.receiver][move.write_at], host_view(block))

    def relay(self, move: Move) -> int:
        held = self._buffers[move.target]
        block = held[move.sender][move.read_at]
        copy(held[move.receiver][move.write_at], block)
        return block.size * np.dtype(self._plan.leaves[move.target].wire_dtype).itemsize

    def pending(self) -> list[jax.Array]:
        return []

    def assembled(self, destination: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        return {
            path: adopted(
                leaf.shape, destination[path], {self._numbers[n]: part for n, part in self._buffers[path].items()}
            )
            for path, leaf in self._plan.leaves.items()
        }


class DeviceParts:
    """By device code."""

    def __init__(self, plan: SyncPlan, prepared: Prepared, numbers: Numbers) -> None:
        self._plan, self._prepared, self._numbers = plan, prepared, dict(numbers)
        self._parts: dict[str, dict[int, jax.Array]] = {path: {} for path in prepared.parts}
        self._touched: set[tuple[str, int]] = set()

    def take(self, move: Move, block: jax.Array) -> None:
        shape, dtype = self._prepared.parts[move.target][move.receiver], self._plan.leaves[move.target].dtype
        local_device.put_in(self._parts[move.target], move, block, shape, dtype)
        self._touched.add((move.target, move.receiver))

    def relay(self, move: Move) -> int:
        held = self._parts[move.target][move.sender]
        block = local_device.cut(held, move, self._plan.leaves[move.target].wire_dtype)
        self.take(move, jax.device_put(block, self._numbers[move.receiver]))
        return block.nbytes

    def pending(self) -> list[jax.Array]:
        arrays = [self._parts[path][number] for path, number in self._touched]
        self._touched.clear()
        return arrays

    def assembled(self, destination: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        return {
            path: local_device.assemble(
                self._parts[path], leaf.dtype, self._prepared.parts[path], leaf.shape, destination[path], self._numbers
            )
            for path, leaf in self._plan.leaves.items()
        }
