"""Pieces that lie alike: examined once, for all of them.

A piece meets shards of its source and of its target. Two pieces with the same places on both sides, the same dims and
runs meet the same ones in the same elements; so do two that differ only in where a dim of one index lies, as long as
that index is in the same shard. What is found out here for one is therefore true of all pieces of its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.sync.columns import Fail
from lockstep.sync.layout import Layout
from lockstep.sync.leaf_claims import available, check_claims, itemsize, meet, stays, turns, wire_dtype
from lockstep.sync.mapping import Piece, Target
from lockstep.sync.plan import LeafPlan, Placed, SyncPlan
from lockstep.sync.regions import Pieces, held, volumes


@dataclass(frozen=True, eq=False)
class Alike:
    """A class of pieces. place, goal: where its source and its target lie. wire: bytes of an element on links.

    low, high [destination devices, dims]: the t that each device's part has of the piece. mapped, local [devices]:
    elements of it in that part, and such of them as the device itself holds at the source.
    """

    piece: Piece
    place: Placed
    goal: Placed
    wire: int
    wire_dtype: str
    low: np.ndarray
    high: np.ndarray
    mapped: np.ndarray
    local: np.ndarray

    @property
    def devices(self) -> tuple[int, ...]:
        return self.goal.layout.mesh.devices

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(run.count for run in self.piece.runs)

    def source_regions(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """[n, source dims, 3] regions that are read for t = low..high - 1, as the map defines them."""
        found = np.ones((len(low), len(self.place.shape), 3), np.int64)
        for dim, index in self.piece.fixed:
            found[:, dim, 0], found[:, dim, 1] = index, index + 1
        for at, (along, run) in enumerate(zip(self.piece.dims, self.piece.runs, strict=True)):
            if along is not None:
                found[:, along, 0] = run.source + low[:, at] * run.source_step
                found[:, along, 1] = run.source + (high[:, at] - 1) * run.source_step + 1
                found[:, along, 2] = run.source_step
        return found


class Classes:
    """The classes of all pieces of a plan's targets that are not in place. of: (target path, piece) -> its class."""

    def __init__(self, source: Mapping[str, Placed]) -> None:
        self.source = source
        self.of: dict[tuple[str, int], Alike] = {}
        self.counts: dict[int, int] = {}  # by id of the class
        self._known: dict[object, Alike] = {}
        self._widths: dict[int, tuple[Placed, tuple[int, ...]]] = {}

    def add(self, target: Target, goal: Placed) -> list[Alike]:
        """The classes of a target's pieces."""
        found = []
        for number, piece in enumerate(target.pieces):
            place = self.source[piece.source]
            key = self._key(piece, place, goal)
            alike = self._known.get(key)
            if alike is None:
                alike = self._known[key] = _alike(piece, place, goal)
            self.of[target.path, number] = alike
            self.counts[id(alike)] = self.counts.get(id(alike), 0) + 1
            found.append(alike)
        return found

    def all(self) -> list[tuple[Alike, int]]:
        """Each class, and how many pieces are of it."""
        return [(alike, self.counts[id(alike)]) for alike in self._known.values()]

    def _key(self, piece: Piece, place: Placed, goal: Placed) -> object:
        here, there = self._width(place), self._width(goal)
        runs: list[object] = []
        for at, (along, run) in enumerate(zip(piece.dims, piece.runs, strict=True)):
            if run.count == 1:
                runs.append((None if along is None else run.source // here[along], run.target // there[at]))
            else:
                runs.append(run)
        fixed = tuple((dim, index // here[dim]) for dim, index in piece.fixed)
        return form(place), form(goal), piece.dims, tuple(runs), fixed

    def _width(self, placed: Placed) -> tuple[int, ...]:
        if id(placed) not in self._widths:  # the value kept beside it, so that the id stays its own
            self._widths[id(placed)] = placed, widths(placed)
        return self._widths[id(placed)][1]


def prove_entry(target: Target, leaf: LeafPlan, goal: Placed, alikes: list[Alike], fail: Fail) -> None:
    """What a leaf that is written says of itself. alikes: the classes of its pieces."""
    boxes = held(goal.layout, target.shape)
    size, volume = itemsize(target.dtype), int(volumes(boxes).sum())
    mapped, local = (sum(int(getattr(one, name).sum()) for one in alikes) for name in ("mapped", "local"))
    crossing = sum(int((one.mapped - one.local).sum()) * one.wire for one in alikes)
    true = {"written": volume * size, "local": local * size, "filled": (volume - mapped) * size, "crossing": crossing}
    check_claims(leaf, true, target, fail)
    wire = alikes[0].wire_dtype if alikes else target.dtype
    if leaf.wire_dtype != wire:
        fail("leaves", f"{target.path} is said to cross as {leaf.wire_dtype}; the smaller type is {wire}")
    if stays(target, [one.place for one in alikes], goal, boxes):
        fail("in_place", f"{target.path} is where it should be on every device, yet the plan writes it anew")


def demands(classes: Classes, plan: SyncPlan) -> Iterator[tuple[str, Mapping[int, int], Mapping[int, int]]]:
    """For classes of pieces, and of leaves that are written: a name, what destination devices must get over links, and
    the bytes of their new buffers."""
    for alike, count in classes.all():
        needed = (alike.mapped - alike.local) * (alike.wire * count)
        yield alike.piece.source, dict(zip(alike.devices, needed.tolist(), strict=True)), {}
    written: dict[object, tuple[str, int]] = {}
    for path, leaf in plan.leaves.items():
        if not leaf.in_place and path in plan.mapping.targets:
            key = form(plan.destination[path])
            written[key] = path, written.get(key, (path, 0))[1] + 1
    for path, count in written.values():
        goal = plan.destination[path]
        size = volumes(held(goal.layout, goal.shape)) * (itemsize(goal.dtype) * count)
        yield path, {}, dict(zip(goal.layout.mesh.devices, size.tolist(), strict=True))


def form(placed: Placed) -> tuple[object, ...]:
    """Equal for what is laid out alike. Layouts by identity: a mesh of thousands of devices is slow to compare."""
    return placed.shape, placed.dtype, id(placed.layout)


def shards(layout: Layout) -> tuple[int, ...]:
    """Number of shards per dim."""
    size = dict(layout.mesh.axes)
    return tuple(int(np.prod([size[axis] for axis in axes], dtype=np.int64)) for axes in layout.spec)


def widths(placed: Placed) -> tuple[int, ...]:
    """Indices of a full shard, per dim (1 where the dim is empty)."""
    return tuple(max(1, -(-n // k)) for n, k in zip(placed.shape, shards(placed.layout), strict=True))


def _alike(piece: Piece, place: Placed, goal: Placed) -> Alike:
    boxes = held(goal.layout, goal.shape)
    columns = Pieces.of([piece], len(goal.shape), [len(place.shape)])
    low, high = turns(columns.run[0, :, 1], columns.run[0, :, 4], columns.run[0, :, 2], boxes)
    wire = wire_dtype(place.dtype, goal.dtype)
    return Alike(
        piece,
        place,
        goal,
        itemsize(wire),
        wire,
        low,
        high,
        meet(columns, boxes)[0],
        available(columns, boxes, goal.layout.mesh.devices, [place])[0],
    )
