"""Carrying out a plan where devices are memory of this process: each region is copied once, by the host.

Regions are read from zero-copy views of the source's shards and written into fresh aligned memory, which jax then
adopts. Nothing is staged in between. `local_device` is the way that works everywhere and this one's slow twin.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.cluster.devices import aligned_empty, default_memory, host_view
from lockstep.sync.local_device import to_wire
from lockstep.sync.moves import Move, Prepared, Shape, slices
from lockstep.sync.plan import SyncPlan

CHUNK_BYTES = 4 << 20  # per copy: small enough to share among threads evenly
THREADED_BYTES = 1 << 20  # less is done sooner by one thread

Copy = tuple[np.ndarray, np.ndarray]
"""(destination, source), views of equal shape."""


def carry_out(
    plan: SyncPlan,
    prepared: Prepared,
    source: Mapping[str, jax.Array],
    destination: Mapping[str, Sharding],
    numbers: Mapping[int, jax.Device],
    moved: Callable[[Move, int], None],
    check: Callable[[], None],
) -> dict[str, jax.Array]:
    """Every leaf that the plan writes, in buffers of its own. moved: told of each move, and the bytes it had. check:
    called between rounds; raises when there is no time left."""
    parts = {path: _fresh(plan, prepared, path) for path in prepared.parts}
    with ThreadPoolExecutor(_threads()) as pool:
        for moves in prepared.rounds:
            check()
            wires = _Wires(plan, source)
            copies: list[Copy] = []
            for move in moves:
                block = move.turn(wires.read(move) if not move.relay else _relayed(plan, parts, move))
                copies.append((parts[move.target][move.receiver][slices(move.write)], block))
                moved(move, block.nbytes)
            _copy_all(pool, copies)
    return {
        path: adopt(plan.leaves[path].shape, destination[path], buffers, numbers) for path, buffers in parts.items()
    }


class _Wires:
    """Views of source shards in the type that crosses; what had to be cast lives as long as this does."""

    def __init__(self, plan: SyncPlan, source: Mapping[str, jax.Array]) -> None:
        self._plan, self._source = plan, source
        self._shards: dict[tuple[str, str], dict[int, tuple[jax.Array, np.ndarray]]] = {}

    def read(self, move: Move) -> np.ndarray:
        key = (move.source, self._plan.leaves[move.target].wire_dtype)
        if key not in self._shards:
            array = to_wire(self._source[move.source], key[1])
            self._shards[key] = {s.device.id: (s.data, host_view(s.data)) for s in array.addressable_shards}
        return self._shards[key][move.sender][1][slices(move.read)]


def _relayed(plan: SyncPlan, parts: Mapping[str, Mapping[int, np.ndarray]], move: Move) -> np.ndarray:
    """What the sender got in an earlier round, in the type that crosses."""
    return parts[move.target][move.sender][slices(move.read)].astype(plan.leaves[move.target].wire_dtype, copy=False)


def _fresh(plan: SyncPlan, prepared: Prepared, path: str) -> dict[int, np.ndarray]:
    found = {}
    for number, shape in prepared.parts[path].items():
        found[number] = aligned_empty(shape, np.dtype(plan.leaves[path].dtype))
        if path in prepared.fills:
            found[number].fill(0)
    return found


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _copy_all(pool: ThreadPoolExecutor, copies: list[Copy]) -> None:
    if sum(into.nbytes for into, _ in copies) < THREADED_BYTES:
        for pair in copies:
            _copy(pair)
        return
    for _ in pool.map(_copy, (chunk for pair in copies for chunk in _chunks(*pair))):
        pass


def _copy(pair: Copy) -> None:
    into, source = pair
    if into.dtype == source.dtype:
        # As integers: numpy copies types that it does not know itself element by element, holding the interpreter.
        bits = f"u{into.dtype.itemsize}"
        into, source = into.view(bits), source.view(bits)
    np.copyto(into, source, casting="unsafe")


def _chunks(into: np.ndarray, source: np.ndarray) -> Iterator[Copy]:
    """The copy in pieces of about CHUNK_BYTES, cut along the first dim."""
    rows = into.shape[0] if into.ndim else 1
    count = min(rows, -(-into.nbytes // CHUNK_BYTES))
    if count <= 1:
        yield into, source
        return
    edges = [rows * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield into[start:stop], source[start:stop]


def adopt(
    shape: Shape, sharding: Sharding, parts: Mapping[int, np.ndarray], numbers: Mapping[int, jax.Device]
) -> jax.Array:
    """The array whose shards are these buffers (by device number), without copying where jax allows it."""
    buffers = {numbers[number]: buffer for number, buffer in parts.items()}
    kind = default_memory(next(iter(buffers)))
    if sharding.memory_kind not in (None, kind):
        at_home = adopt(shape, sharding.with_memory_kind(kind), parts, numbers)
        return jax.device_put(at_home, sharding)
    # By far the fastest way in, but it says neither in which order it asks nor that it asks for every replica.
    order, first = iter(sharding.addressable_devices_indices_map(shape)), next(iter(buffers))
    if not sharding.is_fully_replicated:
        array = jax.make_array_from_callback(shape, sharding, lambda _: buffers[next(order, first)])
        got = {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}
        if all(got[device] == buffer.ctypes.data for device, buffer in buffers.items() if buffer.size):
            return array
    devices = list(sharding.addressable_devices_indices_map(shape))
    shards = jax.device_put([buffers[device] for device in devices], devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
