"""A bound on what the busiest sender gives out, by prices: of linear programs, what their duals prove.

Let every device d have a price p[d] >= 0, and all prices add up to 1. Whatever a plan does, its busiest sender gives
out at least sum_d p[d] sent[d] bytes; so what all copies cost at least, when each is sent by the cheapest device that
could, is a bound. Of an element that devices H hold at the source and r others, N, need, each of w bytes, that is

    w r min p[H]                                           if receivers pass nothing on,
    w (min p[H] + (r - 1) min(min p[H], min p[N]))         if they may: the first copy comes from one who holds it.

Any prices will do: bad ones only give a weak bound. The planner says by which prices it found its own (the duals of its
linear program), and whoever doubts it does this sum. Elements are grouped by the shards that they are in on both sides,
from the map and the layouts alone; shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lockstep.sync.alike import Alike, shards, widths
from lockstep.sync.mapping import Run
from lockstep.sync.plan import Placed
from lockstep.sync.regions import held, rows_of


def floor_bytes(
    classes: Iterable[tuple[Alike, int]], price: np.ndarray, devices: tuple[int, ...], relays: bool
) -> float:
    """The bound for pieces of these classes, so many of each. price: [devices], of the devices in that order."""
    return sum(count * _floor(alike, price, devices, relays) for alike, count in classes if alike.mapped.any())


def _floor(alike: Alike, price: np.ndarray, devices: tuple[int, ...], relays: bool) -> float:
    source, target, size = _met(alike)
    ours, theirs = _owners(alike.place, devices), _owners(alike.goal, devices)
    least = price[ours].min(axis=1)
    if not set(alike.place.layout.mesh.devices) & set(alike.devices):
        lacking = np.full(len(target), theirs.shape[1])
        passing = price[theirs].min(axis=1)[target]
    else:
        shard = np.full(len(devices), -1)
        at, copy = np.nonzero(ours >= 0)
        shard[ours[at, copy]] = at
        lacks = shard[theirs[target]] != source[:, None]
        lacking = lacks.sum(axis=1)
        passing = np.where(lacks, price[theirs[target]], np.inf).min(axis=1)
    least = least[source]
    each = lacking * least
    if relays:
        each = np.where(lacking > 0, least + (lacking - 1) * np.minimum(least, passing), 0.0)
    return float((size * each).sum()) * alike.wire


def _met(alike: Alike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of shards that have elements of the piece in common: source shard, target shard (row-major), elements."""
    place, goal, piece = alike.place, alike.goal, alike.piece
    here, there = widths(place), widths(goal)
    strides, goals = _strides(place), _strides(goal)
    source = np.array([sum(index // here[dim] * strides[dim] for dim, index in piece.fixed)], np.int64)
    target, size = np.zeros(1, np.int64), np.ones(1, np.int64)
    for at, (along, run) in enumerate(zip(piece.dims, piece.runs, strict=True)):
        ends = _ends(run, there[at], None if along is None else here[along])
        t = ends[:-1]
        goal_shard = (run.target + t * run.target_step) // there[at] * goals[at]
        from_shard = 0 * t if along is None else (run.source + t * run.source_step) // here[along] * strides[along]
        source = (source[:, None] + from_shard).reshape(-1)
        target = (target[:, None] + goal_shard).reshape(-1)
        size = (size[:, None] * np.diff(ends)).reshape(-1)
    return source, target, size


def _ends(run: Run, goal: int, place: int | None) -> np.ndarray:
    """0..count cut wherever t leaves a shard of either side. goal, place: indices of a shard."""
    ends = [np.array([0, run.count])]
    for first, step, width in ((run.target, run.target_step, goal), (run.source, run.source_step, place or 0)):
        if width:
            edges = np.arange(first // width + 1, (first + (run.count - 1) * step) // width + 1) * width
            ends.append(-((first - edges) // step))
    return np.unique(np.concatenate(ends))


def _strides(placed: Placed) -> list[int]:
    counts = shards(placed.layout)
    return [int(np.prod(counts[dim + 1 :], dtype=np.int64)) for dim in range(len(counts))]


def _owners(placed: Placed, devices: tuple[int, ...]) -> np.ndarray:
    """[shards, copies] rows of the devices that hold each shard, row-major; -1 for shards that have no indices. The
    others are known by where they begin."""
    counts, width = shards(placed.layout), widths(placed)
    parts = held(placed.layout, placed.shape)
    number = np.zeros(len(parts), np.int64)
    for dim, stride in enumerate(_strides(placed)):
        number += parts[:, dim, 0] // width[dim] * stride
    some = (parts[..., 1] > parts[..., 0]).all(axis=1)
    rows, number = rows_of(devices, np.array(placed.layout.mesh.devices, np.int64))[some], number[some]
    count = int(np.prod(counts, dtype=np.int64))
    order = np.argsort(number, kind="stable")
    table = np.full((count, len(parts) // max(1, count)), -1, np.int64)
    table[number[order], np.arange(len(order)) - np.searchsorted(number[order], number[order])] = rows[order]
    return table
