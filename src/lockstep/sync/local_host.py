"""Carrying out a plan where devices are memory of this process: each region is copied once, by the host.

Regions are read from zero-copy views of the source's shards and written into memory of our own, which jax then adopts.
Nothing is staged in between. `local_device` is the way that works everywhere and this one's slow twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.cluster.devices import HostMemory, host_view
from lockstep.sync.foreign import threads_here
from lockstep.sync.local_device import to_wire
from lockstep.sync.moves import Move, Prepared
from lockstep.sync.parts import adopted, copy, fresh
from lockstep.sync.plan import SyncPlan

THREADED_BYTES = 1 << 20  # less is done sooner by one thread
EVENNESS = 8  # no copy is more than this fraction of a thread's share

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
    memory: HostMemory,
) -> dict[str, jax.Array]:
    """Every leaf that the plan writes, in buffers of its own. moved: told of each move, and the bytes it had. check:
    called between rounds; raises when there is no time left. memory: where the buffers come from."""
    parts = {path: fresh(plan, prepared, path, memory) for path in prepared.parts}
    threads = threads_here()
    with ThreadPoolExecutor(threads) as pool:
        for moves in prepared.rounds:
            check()
            wires = _Wires(plan, source)
            copies: list[Copy] = []
            for move in moves:
                block = move.turn(_relayed(plan, parts, move) if move.relay else wires.read(move))
                copies.append((parts[move.target][move.receiver][move.write_at], block))
                moved(move, block.nbytes)
            # Not before all of them are listed: the interpreter's lock would keep lister and copiers waiting in turn.
            _copy_all(pool, threads, copies)
    return {
        path: adopted(plan.leaves[path].shape, destination[path], {numbers[n]: part for n, part in buffers.items()})
        for path, buffers in parts.items()
    }


class _Wires:
    """Views of source shards in the type that crosses; what had to be cast lives as long as this does."""

    def __init__(self, plan: SyncPlan, source: Mapping[str, jax.Array]) -> None:
        self._plan, self._source = plan, source
        self._shards: dict[tuple[str, str], dict[int, tuple[jax.Array, np.ndarray]]] = {}

    def read(self, move: Move) -> np.ndarray:
        key = (move.source, self._plan.leaves[move.target].wire_dtype)
        if key not in self._shards:
            array = jax.block_until_ready(to_wire(self._source[move.source], key[1]))
            self._shards[key] = {s.device.id: (s.data, host_view(s.data)) for s in array.addressable_shards}
        return self._shards[key][move.sender][1][move.read_at]


def _relayed(plan: SyncPlan, parts: Mapping[str, Mapping[int, np.ndarray]], move: Move) -> np.ndarray:
    """What the sender got in an earlier round, in the type that crosses."""
    return parts[move.target][move.sender][move.read_at].astype(plan.leaves[move.target].wire_dtype, copy=False)


def _copy_all(pool: ThreadPoolExecutor, threads: int, copies: list[Copy]) -> None:
    """Every copy; among threads in runs of equal bytes, so that neighbours, which read the same, stay together."""
    total = sum(into.nbytes for into, _ in copies)
    if threads == 1 or total < THREADED_BYTES:
        _copy_some(copies)
        return
    share = -(-total // threads)
    shares: list[list[Copy]] = [[] for _ in range(threads)]
    done = 0
    for pair in copies:
        for chunk in _chunks(*pair, max(1, share // EVENNESS)):
            shares[min(done // share, threads - 1)].append(chunk)
            done += chunk[0].nbytes
    for _ in pool.map(_copy_some, shares):
        pass


def _copy_some(copies: list[Copy]) -> None:
    for into, source in copies:
        copy(into, source)


def _chunks(into: np.ndarray, source: np.ndarray, most: int) -> Iterator[Copy]:
    """The copy in pieces of at most about `most` bytes, cut along the first dim."""
    rows = into.shape[0] if into.ndim else 1
    count = min(rows, -(-into.nbytes // most))
    if count <= 1:
        yield into, source
        return
    edges = [rows * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        yield into[start:stop], source[start:stop]
