"""The certificate's own arithmetic of meshes and strided boxes; shares no code with the planner.

Regions are columns here: [n, dims, 3] int64, (start, stop, step) per dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lockstep.sync.layout import Layout
from lockstep.sync.mapping import Piece


@lru_cache(maxsize=4096)
def held(layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """[devices in mesh order, dims, 3] int64: the part of a leaf of `shape` that each device holds, as regions.

    From the definition: a device's coordinate along a mesh axis is a digit of its place in row-major order; the shard
    number along a dim has the digits of the axes that cut it, slowest first; a shard has ceil(size / shards) indices,
    the last ones what is left.
    """
    count = len(layout.mesh.devices)
    place = np.arange(count)
    digit: dict[str, tuple[np.ndarray, int]] = {}
    below = 1
    for axis, size in reversed(layout.mesh.axes):
        digit[axis] = (place // below % size, size)
        below *= size
    parts = np.ones((count, len(shape), 3), np.int64)
    for dim, size in enumerate(shape):
        shard, shards = np.zeros(count, np.int64), 1
        for axis in layout.spec[dim]:
            shard = shard * digit[axis][1] + digit[axis][0]
            shards *= digit[axis][1]
        width = (size + shards - 1) // shards
        parts[:, dim, 0] = np.minimum(shard * width, size)
        parts[:, dim, 1] = np.minimum(shard * width + width, size)
    parts.flags.writeable = False
    return parts


def rows_of(devices: tuple[int, ...], wanted: np.ndarray) -> np.ndarray:
    """Row of each wanted device number in `devices`; -1 for one that is not among them."""
    if not devices:
        return np.full(len(wanted), -1, np.int64)
    order, numbers = _sorted(devices)
    at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.where(numbers[at] == wanted, order[at], -1)


@lru_cache(maxsize=256)
def _sorted(devices: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.array(devices, np.int64), kind="stable")
    return order, np.array(devices, np.int64)[order]


def counts(regions: np.ndarray) -> np.ndarray:
    """[n, dims] indices per dim."""
    return np.maximum(0, -_over(regions[..., 0] - regions[..., 1], regions[..., 2]))


def _over(number: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Floor of the quotient; division is what costs, and most steps are 1."""
    return number if (step == 1).all() else number // step


def volumes(regions: np.ndarray) -> np.ndarray:
    """[n] elements."""
    return counts(regions).prod(axis=-1)


def lasts(regions: np.ndarray) -> np.ndarray:
    """[n, dims] the last index per dim, of regions that are not empty."""
    return regions[..., 0] + (counts(regions) - 1) * regions[..., 2]


def inside(regions: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """[n] whether each region lies within its box (regions of step 1); an empty region lies anywhere."""
    fits = (regions[..., 0] >= boxes[..., 0]) & (lasts(regions) < boxes[..., 1])
    return fits.all(axis=-1) | (volumes(regions) == 0)


def sums(where: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """[count] int64: whole numbers summed by place, exactly."""
    if np.abs(values).sum(dtype=np.float64) < 2**53:  # then no partial sum is rounded
        return np.bincount(where, values, count).astype(np.int64)
    total = np.zeros(count, np.int64)
    np.add.at(total, where, values)
    return total


class Tally:
    """Whole numbers summed by key. What was added is merged now and then, so that it takes little room."""

    MOST = 1 << 20  # numbers kept apart

    def __init__(self) -> None:
        self._columns: list[tuple[np.ndarray, np.ndarray]] = []
        self._apart = 0

    def add(self, key: np.ndarray, number: np.ndarray) -> None:
        self._columns.append((key, number))
        self._apart += len(key)
        if self._apart > self.MOST:
            self._columns, self._apart = [self.total()], 0

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """Each key once, increasing, and its sum."""
        none = np.zeros(0, np.int64)
        every = np.concatenate([none, *(key for key, _ in self._columns)])
        key, inverse = np.unique(every, return_inverse=True)
        return key, sums(inverse, np.concatenate([none, *(number for _, number in self._columns)]), len(key))


@dataclass(frozen=True)
class Pieces:
    """Pieces of targets of one rank as columns. source_dim [pieces, dims]: -1 for none. run [pieces, dims, 5]: source,
    target, count, source step, target step. fixed [pieces, most source dims]: the index taken, -1 where a target dim
    runs, -2 beyond the source's rank."""

    source_dim: np.ndarray
    run: np.ndarray
    fixed: np.ndarray

    @classmethod
    def of(cls, pieces: list[Piece], dims: int, ranks: list[int]) -> Pieces:
        """dims: of the targets. ranks: of each piece's source."""
        count, most = len(pieces), max(ranks, default=0)
        source_dim = np.full((count, dims), -1, np.int64)
        run = np.zeros((count, dims, 5), np.int64)
        fixed = np.full((count, most), -2, np.int64)
        for at, (piece, rank) in enumerate(zip(pieces, ranks, strict=True)):
            fixed[at, :rank] = -1
            for dim, index in piece.fixed:
                fixed[at, dim] = index
            for dim, (along, r) in enumerate(zip(piece.dims, piece.runs, strict=True)):
                source_dim[at, dim] = -1 if along is None else along
                run[at, dim] = (r.source, r.target, r.count, r.source_step, r.target_step)
        return cls(source_dim, run, fixed)

    def first(self, count: int) -> Pieces:
        return Pieces(self.source_dim[:count], self.run[:count], self.fixed[:count])

    def agree(self, piece: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """[n] whether what a transfer reads (source regions, padded to the most dims) is what the map puts where it
        writes (target regions)."""
        run, along = self.run[piece], self.source_dim[piece]
        count = counts(target)
        step = np.where(count > 1, target[..., 2], run[..., 4])
        offset = target[..., 0] - run[..., 1]
        first, every = _over(offset, run[..., 4]), _over(step, run[..., 4])
        good = (offset >= 0) & (first * run[..., 4] == offset) & (every * run[..., 4] == step)
        good &= first + (count - 1) * every < run[..., 2]
        if source.shape[1]:
            read = np.take_along_axis(source, np.maximum(along, 0)[..., None], axis=1)
            same = (read[..., 0] == run[..., 0] + first * run[..., 3]) & (counts(read) == count)
            same &= (count == 1) | (read[..., 2] == every * run[..., 3])
            good &= same | (along < 0)
        fixed = self.fixed[piece]
        taken = (source[..., 0] == fixed) & (counts(source) == 1)
        return good.all(axis=-1) & (taken | (fixed < 0)).all(axis=-1) & (volumes(target) > 0)


class Lines:
    """A leaf as lines along one dim, on which regions are intervals: what shows whether they overlap.

    Across that dim, indices are cut wherever a region begins or ends (segments) and, like those along it, told apart
    by their residue modulo the common multiple of all steps. So a strided region, too, is whole intervals of whole
    lines. The dim is the one that leaves fewest: about as many as regions, however ragged their cuts.
    """

    def __init__(self, shape: tuple[int, ...], regions: np.ndarray):
        ends = [np.unique(np.r_[0, size, regions[:, d, 0], lasts(regions)[:, d] + 1]) for d, size in enumerate(shape)]
        spans = [
            np.searchsorted(ends[d], lasts(regions)[:, d] + 1) - np.searchsorted(ends[d], regions[:, d, 0])
            for d in range(len(shape))
        ]  # segments of every region, were a dim cut into them

        def pieces(dim: int) -> int:
            others = [span for d, span in enumerate(spans) if d != dim]
            return int(np.prod(others, axis=0).sum()) if others else len(regions)

        self.along = min(range(len(shape)), key=pieces) if shape else -1
        self.edges = [
            np.array([0, size]) if dim == self.along else ends[dim] for dim, size in enumerate(shape)
        ]  # per dim: segments, between 0 and the size
        many = counts(regions) > 1
        self.modulus = [math.lcm(*np.unique(regions[many[:, d], d, 2]).tolist()) for d in range(len(shape))]
        self.count = math.prod(len(edges) - 1 for edges in self.edges) * math.prod(self.modulus)
        self.length = shape[self.along] + 1 if shape else 2  # more than any place on a line

    def intervals(self, regions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Every interval of every region, region after region: which region it is of, its line (0..count-1), first
        place and last place + 1 on it. The regions' ends must be among those that the lines were made from."""
        spans = [self._span(dim, regions) for dim in range(len(self.edges))]
        total = np.ones(len(regions), np.int64)
        for residues, low, high in spans:
            total *= residues * (high - low)
        of = np.repeat(np.arange(len(regions)), total)
        rest = np.arange(len(of)) - np.repeat(np.cumsum(total) - total, total)
        line, first, stop = np.zeros(len(of), np.int64), np.zeros(len(of), np.int64), np.ones(len(of), np.int64)
        some = np.ones(len(of), bool)  # whether there is an element: short segments lack residues
        for dim, (residues, low, high) in enumerate(spans):
            width, modulus = (high - low)[of], self.modulus[dim]
            segment, rest = low[of] + rest % width, rest // width
            residue = (regions[of, dim, 0] + rest % residues[of] * (modulus // residues[of])) % modulus
            rest = rest // residues[of]
            line = (line * (len(self.edges[dim]) - 1) + segment) * modulus + residue
            if dim == self.along:
                first = -((residue - regions[of, dim, 0]) // modulus)
                stop = (lasts(regions)[of, dim] - residue) // modulus + 1
                some &= stop > first
            elif modulus > 1:
                begin = self.edges[dim][segment]
                some &= begin + (residue - begin) % modulus < self.edges[dim][segment + 1]
        return of[some], line[some], first[some], stop[some]

    def _span(self, dim: int, regions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per region: number of residues, first segment, last segment + 1."""
        step = np.where(counts(regions)[:, dim] > 1, regions[:, dim, 2], self.modulus[dim])
        if dim == self.along:
            return self.modulus[dim] // step, np.zeros_like(step), np.ones_like(step)
        low = np.searchsorted(self.edges[dim], regions[:, dim, 0])
        high = np.searchsorted(self.edges[dim], lasts(regions)[:, dim] + 1)
        return self.modulus[dim] // step, low, high
