"""The certificate's own arithmetic of meshes and strided boxes; shares no code with the planner.

A leaf is seen as a grid of cells that no region tells apart. Per dim, indices are cut at every place where a region, a
part or a piece begins or ends (segments), and within a segment by their residue modulo the common multiple of all
steps; so a strided region is a box of cells too. What takes a million elements takes a handful of cells, and which
cells a region consists of is arithmetic on whole columns of regions at once.

Regions are columns here: [n, dims, 3] int64, (start, stop, step) per dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lockstep.sync.layout import Layout
from lockstep.sync.mapping import Target


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
    return parts


def rows_of(devices: tuple[int, ...], wanted: np.ndarray) -> np.ndarray:
    """Row of each wanted device number in `devices`; -1 for one that is not among them."""
    order = np.argsort(np.array(devices), kind="stable")
    numbers = np.array(devices)[order]
    at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.where(numbers[at] == wanted, order[at], -1)


def counts(regions: np.ndarray) -> np.ndarray:
    """[n, dims] indices per dim."""
    return np.maximum(0, -((regions[..., 0] - regions[..., 1]) // regions[..., 2]))


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


@dataclass(frozen=True)
class Pieces:
    """A target's pieces as columns. source_dim [pieces, dims]: -1 for none. run [pieces, dims, 5]: source, target,
    count, source step, target step. fixed [pieces, most source dims]: the index taken, -1 where a target dim runs, -2
    beyond the source's rank."""

    source_dim: np.ndarray
    run: np.ndarray
    fixed: np.ndarray

    @classmethod
    def of(cls, target: Target, ranks: list[int]) -> Pieces:
        """ranks: of each piece's source."""
        count, dims, most = len(target.pieces), len(target.shape), max(ranks, default=0)
        source_dim = np.full((count, dims), -1, np.int64)
        run = np.zeros((count, dims, 5), np.int64)
        fixed = np.full((count, most), -2, np.int64)
        for at, (piece, rank) in enumerate(zip(target.pieces, ranks, strict=True)):
            fixed[at, :rank] = -1
            for dim, index in piece.fixed:
                fixed[at, dim] = index
            for dim, (along, r) in enumerate(zip(piece.dims, piece.runs, strict=True)):
                source_dim[at, dim] = -1 if along is None else along
                run[at, dim] = (r.source, r.target, r.count, r.source_step, r.target_step)
        return cls(source_dim, run, fixed)

    def target_regions(self) -> np.ndarray:
        """[pieces, dims, 3] where they are written."""
        start, step = self.run[..., 1], self.run[..., 4]
        return np.stack([start, start + (self.run[..., 2] - 1) * step + 1, step], axis=-1)

    def agree(self, piece: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """[n] whether what a transfer reads (source regions, padded to the most dims) is what the map puts where it
        writes (target regions)."""
        run, along = self.run[piece], self.source_dim[piece]
        count, step = counts(target), np.where(counts(target) > 1, target[..., 2], run[..., 4])
        offset = target[..., 0] - run[..., 1]
        first, every = offset // run[..., 4], step // run[..., 4]
        good = (offset >= 0) & (offset % run[..., 4] == 0) & (step % run[..., 4] == 0)
        good &= first + (count - 1) * every < run[..., 2]
        if source.shape[1]:
            read = np.take_along_axis(source, np.maximum(along, 0)[..., None], axis=1)
            same = (read[..., 0] == run[..., 0] + first * run[..., 3]) & (counts(read) == count)
            same &= (count == 1) | (read[..., 2] == every * run[..., 3])
            good &= same | (along < 0)
        fixed = self.fixed[piece]
        taken = (source[..., 0] == fixed) & (counts(source) == 1)
        return good.all(axis=-1) & (taken | (fixed < 0)).all(axis=-1) & (volumes(target) > 0)


class Grid:
    """The cells of one leaf, cut wherever any of `regions` begins or ends."""

    def __init__(self, shape: tuple[int, ...], *regions: np.ndarray):
        self.edges: list[np.ndarray] = []  # per dim: segments, between 0 and the size
        self.modulus: list[int] = []  # per dim
        self.sizes: list[np.ndarray] = []  # per dim: elements of [residue, segment]
        for dim, size in enumerate(shape):
            ends, steps = [np.array([0, size])], {1}
            for region in regions:
                ends += [region[:, dim, 0], lasts(region)[:, dim] + 1]
                steps |= set(np.unique(region[counts(region)[:, dim] > 1, dim, 2]).tolist())
            edges, modulus = np.unique(np.concatenate(ends)), math.lcm(*steps)
            residue = np.arange(modulus)[:, None]
            upto = (edges[None] - residue + modulus - 1) // modulus  # indices of this residue below each edge
            self.edges.append(edges)
            self.modulus.append(modulus)
            self.sizes.append(np.diff(upto, axis=1))

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells per dim: residue by residue, its segments in order."""
        return tuple(sizes.size for sizes in self.sizes)

    def cells(self, regions: np.ndarray) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Every cell of every region, region after region: which region it is of, and per dim residue and segment.

        Cells of one region come in row-major order of (residue, segment) per dim. Some may have no element.
        """
        spans = [self._span(dim, regions) for dim in range(len(self.edges))]
        total = np.ones(len(regions), np.int64)
        for residues, low, high in spans:
            total *= residues * (high - low)
        if (total == 1).all():
            of, rest = np.arange(len(regions)), np.zeros(len(regions), np.int64)
        else:
            of = np.repeat(np.arange(len(regions)), total)
            rest = np.arange(len(of)) - np.repeat(np.cumsum(total) - total, total)
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for dim in reversed(range(len(spans))):
            residues, low, high = (column[of] for column in spans[dim])
            width, modulus = high - low, self.modulus[dim]
            segment = low + rest % width
            rest = rest // width
            step = modulus // residues
            residue = (regions[of, dim, 0] + rest % residues * step) % modulus
            rest = rest // residues
            found.append((residue, segment))
        return of, found[::-1]

    def _span(self, dim: int, regions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per region: number of residues, first segment, last segment + 1; regions on the grid's cuts."""
        many = counts(regions)[:, dim] > 1
        step = np.where(many, regions[:, dim, 2], self.modulus[dim])
        low = np.searchsorted(self.edges[dim], regions[:, dim, 0])
        high = np.searchsorted(self.edges[dim], lasts(regions)[:, dim] + 1)
        return self.modulus[dim] // step, low, np.maximum(low, high)

    def flat(self, found: list[tuple[np.ndarray, np.ndarray]], count: int) -> np.ndarray:
        """Numbers of cells in the whole grid."""
        index = np.zeros(count, np.int64)
        for (residue, segment), sizes in zip(found, self.sizes, strict=True):
            index = index * sizes.size + residue * sizes.shape[1] + segment
        return index

    def elements(self, found: list[tuple[np.ndarray, np.ndarray]], count: int) -> np.ndarray:
        """Elements per cell."""
        size = np.ones(count, np.int64)
        for (residue, segment), sizes in zip(found, self.sizes, strict=True):
            size = size * sizes[residue, segment]
        return size

    def first(self, flat: int) -> tuple[int, ...]:
        """The first element's index of a cell, given by its number in the whole grid."""
        index = []
        for dim, at in enumerate(np.unravel_index(flat, self.shape)):
            residue, segment = divmod(int(at), self.sizes[dim].shape[1])
            edge = int(self.edges[dim][segment])
            index.append(edge + (residue - edge) % self.modulus[dim])
        return tuple(index)


class Parts:
    """Cells of every device's part, numbered one device after the other, without those of no element's."""

    def __init__(self, grid: Grid, boxes: np.ndarray):
        """boxes: [devices, dims, 3] of step 1, whose ends are cuts of the grid."""
        self.grid = grid
        spans = [grid._span(dim, boxes) for dim in range(boxes.shape[1])]
        self.low = np.stack([low for _, low, _ in spans], -1) if spans else np.zeros((len(boxes), 0), np.int64)
        high = np.stack([high for *_, high in spans], -1) if spans else self.low
        # A part of one index has one residue when seen as a region, but is numbered as parts are: by all of them.
        self.width = high - self.low
        per = np.prod(self.width * np.array(grid.modulus, np.int64), axis=1, dtype=np.int64)
        self.start = np.concatenate([[0], np.cumsum(per)])
        self.device = np.repeat(np.arange(len(boxes)), per)
        rest = np.arange(len(self.device)) - self.start[self.device]
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for dim in reversed(range(boxes.shape[1])):
            width = self.width[self.device, dim]
            segment = self.low[self.device, dim] + rest % width
            rest = rest // width
            found.append((rest % grid.modulus[dim], segment))
            rest = rest // grid.modulus[dim]
        self.elements = grid.elements(found[::-1], len(self.device))
        self.flat = grid.flat(found[::-1], len(self.device))

    @property
    def count(self) -> int:
        return int(self.start[-1])

    def number(self, device: np.ndarray, regions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cells of regions that lie in the parts of these devices (rows): which region each is of, and its number."""
        of, found = self.grid.cells(regions)
        where = device[of]
        index = np.zeros(len(of), np.int64)
        for dim, (residue, segment) in enumerate(found):
            width = self.width[where, dim]
            index = index * (width * self.grid.modulus[dim]) + residue * width + segment - self.low[where, dim]
        return of, self.start[where] + index
