"""From shares to whole rows: which rows of which cell which device sends, and through whom.

The rows of a cell, over all members of its kind, are one interval 0..members * rows. The cells that a set of holders
has to give follow one another on a line, and each holder takes the next stretch of it, as long as its share: whole
cells, cut only where a share ends, to the nearest row. The same for relays, over what each set of needers gets by
relay. A lane is a stretch of one cell with one sender and one way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.sync.balance import Groups, Shares
from lockstep.sync.cells import Kind, Sets


@dataclass(frozen=True)
class Cells:
    """The cells of all kinds that somebody still has to get, as [cells] columns, kind after kind.

    kind: its number; cell: its number there. rows: over all members. row_bytes: one row of one copy, on the wire.
    group: row of `groups`; copies: needers. groups: the same, summed.
    """

    kind: np.ndarray
    cell: np.ndarray
    rows: np.ndarray
    row_bytes: np.ndarray
    holders: np.ndarray
    needers: np.ndarray
    copies: np.ndarray
    group: np.ndarray
    groups: Groups


@dataclass(frozen=True)
class Lanes:
    """[lanes] columns, by increasing cell: cell (row of `Cells`), start, stop (rows, over all members), sender, relay
    (device indices; relay -1: the sender sends to all needers)."""

    cell: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    sender: np.ndarray
    relay: np.ndarray


def gather(kinds: list[Kind], sets: Sets, devices: int) -> Cells:
    """All cells with somebody left to get them."""
    sizes = sets.sizes
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("kind", "cell", "rows", "bytes", "holders", "needers")
    }
    for number, kind in enumerate(kinds):
        cell = np.flatnonzero(sizes[kind.needers]) if len(kind.needers) else np.zeros(0, np.int64)
        columns["kind"].append(np.full(len(cell), number, np.int64))
        columns["cell"].append(cell)
        columns["rows"].append(kind.rows[cell] * len(kind.members))
        columns["bytes"].append(kind.row_bytes[cell])
        columns["holders"].append(kind.holders[cell])
        columns["needers"].append(kind.needers[cell])
    none = [np.zeros(0, np.int64)]
    kind_, cell, rows, row_bytes, holders, needers = (np.concatenate(none + column) for column in columns.values())
    pairs, group = np.unique(holders * max(1, len(sizes)) + needers, return_inverse=True)
    members, start = sets.flat()
    groups = Groups(
        pairs // max(1, len(sizes)),
        pairs % max(1, len(sizes)),
        np.bincount(group, rows * row_bytes, len(pairs)),
        sizes,
        members,
        start,
        devices,
    )
    return Cells(kind_, cell, rows, row_bytes, holders, needers, sizes[needers], group, groups)


@dataclass(frozen=True)
class _Line:
    """Stretches of cells one after another. order: of the stretches; first: [stretches] where each begins, in rows."""

    order: np.ndarray
    first: np.ndarray
    ends: np.ndarray
    owner: np.ndarray

    def device(self, at: np.ndarray) -> np.ndarray:
        return self.owner[np.searchsorted(self.ends, at, side="right")]


def make(cells: Cells, shares: Shares) -> Lanes:
    """Cut every cell at the ends of shares."""
    cell, start, stop, relayed = _ways(cells, shares)
    weight = cells.row_bytes[cell] * np.where(relayed, 1, cells.copies[cell])
    senders = _line(cells.groups, cells.holders[cell], stop - start, weight, shares.send)
    cuts = [_cuts(senders, start, stop)]
    chosen = np.flatnonzero(relayed)
    if len(chosen):
        relays = _line(
            cells.groups,
            cells.needers[cell][chosen],
            (stop - start)[chosen],
            cells.row_bytes[cell][chosen],
            shares.relay,
        )
        stretch, at = _cuts(relays, start[chosen], stop[chosen])
        cuts.append((chosen[stretch], at))
    stretch = np.concatenate([np.arange(len(cell)), *(s for s, _ in cuts)])
    at = np.concatenate([start, *(a for _, a in cuts)])
    order = np.lexsort((at, stretch))
    stretch, at = stretch[order], at[order]
    fresh = np.r_[True, (np.diff(stretch) > 0) | (np.diff(at) > 0)] if len(at) else np.zeros(0, bool)
    stretch, at = stretch[fresh], at[fresh]
    end = np.where(np.r_[np.diff(stretch) == 0, False], np.r_[at[1:], 0], stop[stretch]) if len(at) else at
    relay = np.full(len(at), -1, np.int64)
    if len(chosen):
        by = np.flatnonzero(relayed[stretch])
        within = np.searchsorted(chosen, stretch[by])
        relay[by] = relays.device(relays.first[within] + at[by] - start[stretch[by]])
    return Lanes(cell[stretch], at, end, senders.device(senders.first[stretch] + at - start[stretch]), relay)


def _ways(cells: Cells, shares: Shares) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Stretches of cells that go direct, and by relay: cell, start, stop, whether by relay. Within a group of cells
    with equal owners, first those that go direct, then those by relay; one cell at most is cut."""
    count = len(cells.rows)
    order = np.argsort(cells.group, kind="stable")
    size = (cells.rows * cells.row_bytes)[order].astype(np.float64)
    before = np.cumsum(size) - size
    group = cells.group[order]
    begins = np.searchsorted(group, np.arange(len(cells.groups.volume)))
    straight = (cells.groups.volume - shares.relayed)[group] + before[begins][group] - before
    direct_rows = np.zeros(count, np.int64)
    direct_rows[order] = np.clip(np.rint(straight / cells.row_bytes[order]), 0, cells.rows[order]).astype(np.int64)
    number = np.arange(count)
    cell = np.r_[number, number]
    start = np.r_[np.zeros(count, np.int64), direct_rows]
    stop = np.r_[direct_rows, cells.rows]
    relayed = np.r_[np.zeros(count, bool), np.ones(count, bool)]
    kept = np.flatnonzero(stop > start)
    kept = kept[np.lexsort((start[kept], cell[kept]))]
    return cell[kept], start[kept], stop[kept], relayed[kept]


def _line(groups: Groups, owner: np.ndarray, rows: np.ndarray, weight: np.ndarray, share: np.ndarray) -> _Line:
    """Stretches of sets `owner` in line, and where the share of each member ends. weight: bytes of a row."""
    order = np.argsort(owner, kind="stable")
    rows, weight, owner = rows[order], weight[order], owner[order]
    row_end = np.cumsum(rows)
    size = (rows * weight).astype(np.float64)
    total = np.bincount(owner, size, len(groups.sizes))
    used = np.flatnonzero(np.repeat(total > 0, groups.sizes))  # entries of sets that give something
    of_set = np.repeat(np.arange(len(groups.sizes)), groups.sizes)[used]
    wanted = share[used]
    part = np.cumsum(wanted)
    sum_before = np.r_[0.0, part][np.searchsorted(of_set, of_set)]
    whole = np.bincount(of_set, wanted, len(groups.sizes))[of_set]
    share_end = (part - sum_before) / np.where(whole > 0, whole, 1) * total[of_set]
    set_first = np.searchsorted(owner, of_set)
    set_last = np.searchsorted(owner, of_set, side="right") - 1
    byte_end = np.cumsum(size)
    at = share_end + (byte_end - size)[set_first]
    stretch = np.clip(np.searchsorted(byte_end, at, side="right"), set_first, set_last)
    inside = np.rint((at - (byte_end - size)[stretch]) / weight[stretch])
    ends = (row_end - rows)[stretch] + np.clip(inside, 0, rows[stretch]).astype(np.int64)
    last = np.r_[of_set[1:] != of_set[:-1], True] if len(of_set) else np.zeros(0, bool)
    ends[last] = row_end[set_last[last]]
    first = np.zeros(len(order), np.int64)
    first[order] = row_end - rows
    return _Line(order, first, np.maximum.accumulate(ends), groups.members[used])


def _cuts(line: _Line, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(stretch, row) of every end of a share that is inside a stretch."""
    first = line.first[line.order]
    place = np.searchsorted(first, line.ends, side="right") - 1
    stretch = line.order[place]
    at = start[stretch] + line.ends - first[place]
    inside = (at > start[stretch]) & (at < stop[stretch])
    return stretch[inside], at[inside]
