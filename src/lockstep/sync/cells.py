"""What has to move, grouped: pieces that are cut alike are one kind, and a kind's cells are listed once.

A piece runs over t = (t_0, t_1, ...), one number per target dim. Along each dim, the edges of the source's shards (seen
through the piece's run) and those of the target's cut 0..count into intervals; a cell is a product of intervals. As
runs only go up, a pair of a source shard and a target shard has at most one cell in common: a cell is known by the two.

A model of 60 equal layers has the same cells 60 times over. Only their sizes and owners are stored, once per kind, with
the list of members; `listing` makes the regions of any member on demand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (teaches numpy the names `bfloat16` and `float8_*`)
import numpy as np

from lockstep.sync.layout import Layout
from lockstep.sync.mapping import Piece, Run, Target
from lockstep.sync.plan import Placed

ENOUGH_ROWS = 64  # a dim this long is fine enough to cut cells along; earlier dims make messages of longer runs
SMALL_ROW = 1 << 18  # elements; unless the rows of it are larger than this


@dataclass(frozen=True)
class Cuts:
    """One dim of a kind: interval i is t in edges[i]..edges[i + 1] - 1, of source shard source[i], target shard
    target[i] along this dim."""

    edges: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(np.array(self.edges, np.int64))


@lru_cache(maxsize=65536)
def cuts_of(run: Run, source_size: int, source_parts: int, target_size: int, target_parts: int) -> Cuts:
    """The common refinement of both sides' shard edges along one dim, in the run's own count."""
    source_shard, target_shard = -(-source_size // source_parts), -(-target_size // target_parts)
    t = {0, run.count}
    for start, step, shard, parts in (
        (run.source, run.source_step, source_shard, source_parts),
        (run.target, run.target_step, target_shard, target_parts),
    ):
        t |= {-(-(part * shard - start) // step) for part in range(1, parts)}
    edges = tuple(sorted(x for x in t if 0 <= x <= run.count))
    low = np.array(edges[:-1], np.int64)
    source = (run.source + low * run.source_step) // source_shard
    target = (run.target + low * run.target_step) // target_shard
    return Cuts(edges, tuple(source.tolist()), tuple(target.tolist()))


@dataclass
class Sets:
    """Sets of devices (by index into the plan's devices), each known by a number. `members[number]`: increasing."""

    members: list[np.ndarray] = field(default_factory=list)
    _numbers: dict[bytes, int] = field(default_factory=dict)

    def number(self, members: np.ndarray) -> int:
        """The number of a set, a new one for a new set."""
        members = np.ascontiguousarray(members, np.int64)
        key = members.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.members)
            self.members.append(members)
        return self._numbers[key]

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(m) for m in self.members], np.int64)

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """All members one after another, and where each set starts ([sets + 1])."""
        start = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        return (np.concatenate(self.members) if self.members else np.zeros(0, np.int64)), start


@dataclass
class Kind:
    """Pieces that are cut alike, and their cells in row-major order of intervals ([cells] arrays).

    dims: as the piece's. cut_dim: along which cells are cut further into rows (-1: a cell is one row). elements, rows:
    of a cell. holders, needers: numbers of the set that has it and of the set that still has to get it (the devices
    that have it already are left out). local: [k, 2] (cell, device) that have it. members: (target path, piece number).
    """

    source_layout: Layout
    target_layout: Layout
    target_dtype: str
    wire_dtype: str
    cuts: tuple[Cuts, ...]
    cut_dim: int
    elements: np.ndarray
    rows: np.ndarray
    holders: np.ndarray
    needers: np.ndarray
    local: np.ndarray
    members: list[tuple[str, int]] = field(default_factory=list)

    @property
    def wire_bytes(self) -> int:
        return np.dtype(self.wire_dtype).itemsize

    @property
    def target_bytes(self) -> int:
        return np.dtype(self.target_dtype).itemsize

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """[cells] of one row, on the wire."""
        return self.elements // self.rows * self.wire_bytes

    @cached_property
    def boxes(self) -> tuple[np.ndarray, np.ndarray]:
        """Two of [cells, target dims]: t where each cell begins and ends."""
        shape = [len(cuts.edges) - 1 for cuts in self.cuts]
        at = np.unravel_index(np.arange(len(self.elements)), shape) if shape else ()
        edges = [np.array(cuts.edges, np.int64) for cuts in self.cuts]
        low = [edge[where] for edge, where in zip(edges, at, strict=True)]
        high = [edge[where + 1] for edge, where in zip(edges, at, strict=True)]
        nothing = np.zeros((len(self.elements), 0), np.int64)
        return (np.stack(low, axis=1), np.stack(high, axis=1)) if shape else (nothing, nothing)

    @property
    def same_memory(self) -> bool:
        return self.source_layout.memory == self.target_layout.memory

    def local_elements(self) -> int:
        """Per member, what destination devices hold already."""
        return int(self.elements[self.local[:, 0]].sum())

    def crossing_elements(self, sets: Sets) -> int:
        """Per member, what crosses links, replicas counted."""
        return int((self.elements * sets.sizes[self.needers]).sum())


class Place(NamedTuple):
    """A layout in numbers. number: of equal layouts the same. parts: per dim. devices: [shards, copies] indices. sets:
    [shards] set numbers. holds: [devices] the shard that each device holds, -1 for none."""

    number: int
    parts: tuple[int, ...]
    devices: np.ndarray
    sets: np.ndarray
    holds: np.ndarray


class Geometry:
    """Builds kinds and sets. devices: numbers of all devices of both sides, increasing."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.sets = Sets()
        self.kinds: list[Kind] = []
        self._index = {device: i for i, device in enumerate(devices)}
        self._kinds: dict[object, int] = {}
        self._places: dict[Layout, Place] = {}
        self._seen: dict[int, tuple[Layout, Place]] = {}

    def add(self, target: Target, number: int, source: Placed, destination: Placed) -> int:
        """The number of the kind of one piece; the piece becomes its last member."""
        piece = target.pieces[number]
        here, there = self.place(source.layout), self.place(destination.layout)
        cuts = tuple(
            cuts_of(run, 1, 1, destination.shape[at], there.parts[at])
            if dim is None
            else cuts_of(run, source.shape[dim], here.parts[dim], destination.shape[at], there.parts[at])
            for at, (dim, run) in enumerate(zip(piece.dims, piece.runs, strict=True))
        )
        fixed = tuple((dim, index // -(-source.shape[dim] // here.parts[dim])) for dim, index in piece.fixed)
        key = (here.number, there.number, source.dtype, target.dtype, piece.dims, fixed, cuts)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = len(self.kinds)
            self.kinds.append(self._kind(piece, fixed, cuts, source, destination))
        self.kinds[kind].members.append((target.path, number))
        return kind

    def place(self, layout: Layout) -> Place:
        """A layout in numbers; found by identity where it can be, since hashing a large mesh takes long."""
        seen = self._seen.get(id(layout))
        if seen is None:
            if layout not in self._places:
                self._places[layout] = self._place(layout)
            seen = self._seen[id(layout)] = (
                layout,
                self._places[layout],
            )  # the layout kept, so that its id stays its own
        return seen[1]

    def _place(self, layout: Layout) -> Place:
        numbers = layout.shards()
        devices = np.array([self._index[d] for d in numbers.reshape(-1).tolist()], np.int64).reshape(numbers.shape)
        holds = np.full(len(self._index), -1, np.int64)
        holds[devices] = np.arange(len(devices))[:, None]
        sets = np.array([self.sets.number(row) for row in devices], np.int64)
        return Place(len(self._places), layout.parts(), devices, sets, holds)

    def _kind(
        self,
        piece: Piece,
        fixed: Iterable[tuple[int, int]],
        cuts: tuple[Cuts, ...],
        source: Placed,
        destination: Placed,
    ) -> Kind:
        here, there = self.place(source.layout), self.place(destination.layout)
        from_shard = _shard_numbers(piece.dims, [c.source for c in cuts], here.parts, fixed)
        to_shard = _shard_numbers(tuple(range(len(cuts))), [c.target for c in cuts], there.parts, ())
        lengths = [c.lengths for c in cuts]
        cut_dim = _cut_dim(lengths)
        holders, needers, local = self._owners(here, there, from_shard, to_shard)
        return Kind(
            source.layout,
            destination.layout,
            destination.dtype,
            min((destination.dtype, source.dtype), key=lambda name: np.dtype(name).itemsize),
            cuts,
            cut_dim,
            _grid(lengths, np.multiply, 1),
            _grid([n if dim == cut_dim else np.ones_like(n) for dim, n in enumerate(lengths)], np.multiply, 1),
            holders,
            needers,
            local,
        )

    def _owners(
        self, here: Place, there: Place, from_shard: np.ndarray, to_shard: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """holders, needers, local of `Kind`, for cells of these shards."""
        holders, needers = here.sets[from_shard], there.sets[to_shard]
        if not (here.holds[there.devices] >= 0).any():
            return holders, needers, np.zeros((0, 2), np.int64)
        wanted = there.devices[to_shard]
        has = here.holds[wanted] == from_shard[:, None]
        for some in np.flatnonzero(has.any(axis=1)):
            needers[some] = self.sets.number(wanted[some][~has[some]])
        cell, column = np.nonzero(has)
        return holders, needers, np.stack([cell, wanted[cell, column]], axis=1)


def _grid(values: list[np.ndarray], operation: np.ufunc, start: int) -> np.ndarray:
    """[product of lengths] of `operation` over one value per dim, row-major."""
    out: np.ndarray = np.full(1, start, np.int64)
    for value in values:
        out = np.asarray(operation.outer(out, value)).reshape(-1)
    return out


def _cut_dim(lengths: list[np.ndarray]) -> int:
    """The first dim whose intervals are long enough to cut, in small rows, else the longest; -1 for a scalar."""
    longest = [int(n.max()) for n in lengths]
    if not longest:
        return -1
    fine = (dim for dim, n in enumerate(longest) if n >= ENOUGH_ROWS and math.prod(longest) // n <= SMALL_ROW)
    return next(fine, longest.index(max(longest)))


def _shard_numbers(
    dims: tuple[int | None, ...],
    along: list[tuple[int, ...]],
    parts: tuple[int, ...],
    fixed: Iterable[tuple[int, int]],
) -> np.ndarray:
    """[cells] row of `Layout.shards` that each cell is in."""
    stride = [math.prod(parts[dim + 1 :]) for dim in range(len(parts))]
    values = [
        np.array(shards, np.int64) * (0 if dim is None else stride[dim])
        for dim, shards in zip(dims, along, strict=True)
    ]
    return _grid(values, np.add, sum(stride[dim] * shard for dim, shard in fixed))
