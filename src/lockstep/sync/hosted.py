"""Weights by way of host memory, for the transports that leave them somewhere: out of the source's shards into whole
destination leaves, and out of a store into the destination's shards."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import EllipsisType

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.cluster.devices import HostMemory
from lockstep.cluster.sharding import describe_layout
from lockstep.errors import SyncError
from lockstep.sync.ends import check_destination
from lockstep.sync.foreign import WeightsError
from lockstep.sync.mapping import FormatMap, Target, materialise
from lockstep.sync.mapping import whole as whole_leaf
from lockstep.sync.moves import Move, Prepared, Span, held_boxes, prepare
from lockstep.sync.parts import adopted, copy, fresh
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline

Region = tuple[slice | EllipsisType, ...]
"""To index a leaf with; the ellipsis at its end keeps what is read of a scalar an array."""


@contextlib.contextmanager
def said_as_sync_error(what: str) -> Iterator[None]:
    """WeightsError and OSError as SyncError."""
    try:
        yield
    except WeightsError as error:
        raise SyncError(f"sync: {what}: {error}. Nothing of it is used") from error
    except OSError as error:
        raise SyncError(f"sync: {what}: {error}") from error


def gather(path: str, leaf: jax.Array) -> np.ndarray:
    """The whole leaf on the host; the shard's own memory where one shard is all of it. (`np.asarray` of a sharded array
    would keep its copy for as long as the array lives.)"""
    if not leaf.is_fully_addressable:
        raise SyncError(f"sync: other processes hold parts of {path} ({describe_layout(leaf.sharding)})")
    if leaf.sharding.is_fully_replicated:
        return np.asarray(leaf.addressable_shards[0].data)
    out = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            copy(out[(*shard.index, ...)], np.asarray(shard.data))
    return out


def host_targets(
    mapping: FormatMap, source: Mapping[str, jax.Array], check: Callable[[], None]
) -> Iterator[tuple[Target, np.ndarray]]:
    """Every destination leaf, whole, in the map's order; read-only where it is the source's memory. check: called
    between leaves; raises when there is no time left. A source leaf is on the host until its last use."""
    uses = Counter(piece.source for target in mapping.targets.values() for piece in target.pieces)
    held: dict[str, np.ndarray] = {}
    for target in mapping.targets.values():
        check()
        for piece in target.pieces:
            if piece.source not in held:
                held[piece.source] = gather(piece.source, source[piece.source])
        yield target, _made(target, held)
        for piece in target.pieces:
            uses[piece.source] -= 1
            if not uses[piece.source]:
                held.pop(piece.source, None)


def _made(target: Target, held: Mapping[str, np.ndarray]) -> np.ndarray:
    if len(target.pieces) == 1:
        (piece,) = target.pieces
        leaf = held[piece.source]
        as_it_is = whole_leaf(piece.source, leaf.shape, target.dtype).pieces == target.pieces
        if as_it_is and leaf.shape == target.shape and leaf.dtype.name == target.dtype:
            return leaf
    return materialise(target, held)


def place(
    plan: SyncPlan,
    destination: Mapping[str, Sharding],
    numbers: Mapping[int, jax.Device],
    read: Callable[[str, Region], np.ndarray],
    name: str,
    deadline: Deadline,
    version: int,
    memory: HostMemory,
) -> tuple[dict[str, jax.Array], dict[tuple[int, int], int]]:
    """(the tree, bytes per link), each device reading only what the plan brings to it.

    read: a region of a whole destination leaf, as stored. A store stands between the plan's senders and receivers: what
    is read for a transfer counts as having come over its link, in the type that the plan sends it in; relays are read
    from the store like the rest. memory: where the parts are put together.
    """
    check_destination(plan, destination, numbers, name)
    prepared = _prepared(plan)
    boxes = {path: held_boxes(plan.destination[path]) for path in prepared.parts}
    by_leaf: dict[str, list[Move]] = {path: [] for path in prepared.parts}
    for moves in prepared.rounds:
        for move in moves:
            by_leaf[move.target].append(move)
    tree, links = {}, Counter[tuple[int, int]]()
    for path, own in by_leaf.items():
        if not deadline.remaining():
            raise deadline.missed("the receiver", f"what was left in {name}", f"{path} to be read", version)
        leaf, parts = plan.leaves[path], fresh(plan, prepared, path, memory)
        for move in own:
            low = [start for start, _ in boxes[path][move.receiver]]
            whole = tuple((at + start, size, step) for (at, size, step), start in zip(move.write, low, strict=True))
            block = read(path, _region(whole))
            copy(parts[move.receiver][_region(move.write)], block)
            links[move.sender, move.receiver] += block.size * np.dtype(leaf.wire_dtype).itemsize
        tree[path] = adopted(leaf.shape, destination[path], {numbers[n]: part for n, part in parts.items()})
    jax.block_until_ready(tree)
    return {path: tree[path] for path in plan.leaves}, dict(links)


def _region(span: Span) -> Region:
    return (*(slice(start, start + (size - 1) * step + 1, step) for start, size, step in span), ...)


@lru_cache(maxsize=4)
def _prepared(plan: SyncPlan) -> Prepared:
    return prepare(plan)
