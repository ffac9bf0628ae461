"""What the certificate finds out about a plan's bundles, without a look at their rows one by one.

Why that is enough. A bundle says the same of all its members, and by its definition (`plan.Bundle`) row j of cell c of
member m is one index along one dim of one box of t, read and written where the map has that t: so what is read is what
belongs where it is written, whatever the rows. Of each bundle is shown

(a) its cells are boxes of t within the runs of every member, and no two that anybody gets have an element in common;
(b) the lanes of a cell carry each of its rows (over all members) exactly once, and all of them to the same devices;
    whoever copies a cell from itself does so once, and is not among those;
(c) for every class of members that lie alike (`alike`) and every destination device, the cells that it gets are within
    its part, and have as many elements as its part has of the piece; those that it copies itself, as many as it holds;
(d) whoever sends a cell, or copies it, holds all of it at the source, of a member of every class.

By (b) a device gets all rows of a cell or none; by (a) and (c) those it gets are disjoint boxes within its part that
fill it: every element once. By (c), too, what comes over links is exactly what it does not hold. Every piece of every
leaf that is written is a member of one bundle, and the pieces of a leaf are disjoint (`mapping.check_total`): so the
leaf is written once, everywhere. A relay is among the receivers of its lane, so that what it passes on, in the round
after it came, is in its part. Shares no code with the planner.

A plan that is right in a way that cannot be shown like this (lanes of one cell to different devices, say) is refused
here; `certificate` then looks at its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.sync.alike import Alike
from lockstep.sync.columns import Fail
from lockstep.sync.plan import PHASE_BITS, Bundle
from lockstep.sync.regions import Lines, held, inside, rows_of, sums

TOGETHER = 1 << 20  # lanes times rounds at a time
MOST_PARTS = 1 << 20
MOST_CELLS = 1 << 25  # rounds times devices


@dataclass(frozen=True)
class Shape:
    """A bundle of which (b) is known. groups: its lists of receivers, each once; group [lanes]: of these.

    order [lanes]: by cell and first row; group_of [cells]: who gets it over links, -1 for nobody.
    row_elements [cells]: of one row.
    """

    groups: tuple[tuple[int, ...], ...]
    group: np.ndarray
    order: np.ndarray
    group_of: np.ndarray
    row_elements: np.ndarray


@dataclass(frozen=True)
class Flow:
    """Bytes over links: links [devices, devices]; sent, received [rounds, devices]. Devices: the plan's."""

    links: np.ndarray
    sent: np.ndarray
    received: np.ndarray


def shape_of(bundle: Bundle, alikes: list[Alike], fail: Fail) -> Shape | None:
    """(b), and that all columns mean something. alikes: the classes of the members. None, and `fail` told, if not."""
    found = _shaped(bundle, alikes)
    if isinstance(found, Shape):
        return found
    name, words = found
    fail(name, f"the bundle of {bundle.members[0][0] if bundle.members else 'nothing'}: {words}")
    return None


def _shaped(bundle: Bundle, alikes: list[Alike]) -> Shape | tuple[str, str]:
    if words := _malformed(bundle, alikes):
        return ("pieces", words)
    numbers: dict[tuple[int, ...], int] = {}
    number = np.array([numbers.setdefault(tuple(group), len(numbers)) for group in bundle.groups], np.int64)
    groups = tuple(numbers)
    if any(not among or list(among) != sorted(set(among)) for among in groups):
        return ("provenance", "receivers are none, or not increasing")
    group = number[bundle.receivers] if len(bundle.receivers) else np.zeros(0, np.int64)
    order = np.lexsort((bundle.start, bundle.cell))
    cell, start, stop = bundle.cell[order], bundle.start[order], bundle.stop[order]
    fresh = np.r_[True, cell[1:] != cell[:-1]] if len(cell) else np.zeros(0, bool)
    last = np.r_[fresh[1:], True] if len(cell) else fresh
    before = np.r_[0, stop[:-1]] if len(cell) else stop
    good = start == np.where(fresh, 0, before)
    good &= ~last | (stop == bundle.rows[cell] * len(bundle.members))
    group_of = np.full(len(bundle.rows), -1, np.int64)
    group_of[cell[fresh]] = group[order][fresh]
    if not good.all():
        at = int(cell[np.argmin(good)])
        return ("coverage", f"its lanes do not carry every row of cell {at} once")
    if (group_of[cell] != group[order]).any():
        return ("coverage", "lanes of one cell go to different devices")
    spans = bundle.high - bundle.low
    return Shape(groups, group, order, group_of, spans.prod(axis=1) // bundle.rows)


def _malformed(bundle: Bundle, alikes: list[Alike]) -> str:
    cells, lanes, dims = len(bundle.rows), len(bundle.cell), len(alikes[0].counts) if alikes else 0
    per_lane = (bundle.start, bundle.stop, bundle.sender, bundle.relay, bundle.receivers, bundle.phase)
    columns = (bundle.low, bundle.high, bundle.rows, bundle.cell, bundle.local, *per_lane)
    if not alikes or any(one.counts != alikes[0].counts or one.devices != alikes[0].devices for one in alikes):
        return "its members do not run alike"
    if any(not np.issubdtype(column.dtype, np.integer) for column in columns):
        return "a column has no whole numbers"
    fits = bundle.low.shape == bundle.high.shape == (cells, dims) and bundle.rows.shape == (cells,)
    fits &= all(column.shape == (lanes,) for column in (bundle.cell, *per_lane))
    if not fits or bundle.local.ndim != 2 or bundle.local.shape[1] != 2:
        return "its columns have not the shapes of their cells and lanes"
    if (bundle.low < 0).any() or (bundle.low >= bundle.high).any() or (bundle.high > alikes[0].counts).any():
        return f"a cell is empty, or beyond the {alikes[0].counts} indices of the piece"
    if not (-1 <= bundle.cut_dim < dims) or (bundle.cut_dim == -1) != (dims == 0):
        return f"dim {bundle.cut_dim} of {dims} is cut into rows"
    rows = (bundle.high - bundle.low)[:, bundle.cut_dim] if dims else np.ones(cells, np.int64)
    if (bundle.rows != rows).any():
        return "a cell has not as many rows as indices"
    for column, most in ((bundle.cell, cells), (bundle.receivers, len(bundle.groups)), (bundle.local[:, 0], cells)):
        if len(column) and not 0 <= column.min() <= column.max() < most:
            return "a lane or a copy is of no cell, or to no receivers"
    if lanes and not (1 <= bundle.parts <= MOST_PARTS and 0 <= bundle.phase.min() <= bundle.phase.max() < 1 << 16):
        return "its parts or phases are out of range"
    if (bundle.start >= bundle.stop).any() or (bundle.start < 0).any():
        return "a lane has no rows"
    if float(bundle.rows.max(initial=0)) * len(bundle.members) * max(1, bundle.parts) * 2**PHASE_BITS >= 2**62:
        return "it has more rows than can be counted"
    return ""


def prove_bundle(bundle: Bundle, shape: Shape, alikes: list[Alike], fail: Fail) -> int:
    """(a), (c), (d), and the bytes of an element, of a bundle of which (b) is known. Returns the intervals examined."""
    named = f"the bundle of {bundle.members[0][0]}"
    devices = alikes[0].devices
    cells, count = _disjoint(bundle, shape, named, fail)
    member = np.zeros((len(shape.groups), len(devices)), bool)
    for at, among in enumerate(shape.groups):
        row = rows_of(devices, np.array(among, np.int64))
        if (row < 0).any():
            fail("coverage", f"{named}: {list(among)} has a device that the destination has not")
            return count
        member[at, row] = True
    local = rows_of(devices, bundle.local[:, 1])
    if (local < 0).any():
        fail("coverage", f"{named}: a copy is made by a device that the destination has not")
        return count
    sender = rows_of(devices, bundle.sender)
    if (member[shape.group, np.maximum(sender, 0)] & (sender >= 0)).any():
        fail("provenance", f"{named}: a sender is among its receivers")
    _prove_relays(bundle, shape, named, fail)
    group = shape.group_of[bundle.local[:, 0]]
    pairs = bundle.local[:, 0] * len(devices) + local
    if (
        len(np.unique(pairs)) != len(pairs)
        or ((group >= 0) & member[group, local] if len(shape.groups) else pairs < 0).any()
    ):
        fail("coverage", f"{named}: a device copies a cell twice, or gets it besides")
    for alike in alikes:
        if bundle.wire_bytes != alike.wire:
            fail("bytes", f"{named}: elements of {bundle.wire_bytes} bytes; they have {alike.wire}")
        _prove_class(bundle, shape, alike, cells, member, local, named, fail)
    return count


def _disjoint(bundle: Bundle, shape: Shape, named: str, fail: Fail) -> tuple[np.ndarray, int]:
    """The cells that go over links; how many intervals the cells that anybody gets were cut into for (a)."""
    over = np.flatnonzero(shape.group_of >= 0)
    used = np.union1d(over, bundle.local[:, 0])
    regions = np.stack([bundle.low[used], bundle.high[used], np.ones_like(bundle.low[used])], axis=-1)
    lines = Lines(tuple(bundle.high.max(axis=0, initial=1).tolist()), regions)
    _, line, low, high = lines.intervals(regions)
    begin = line * lines.length + low
    order = np.argsort(begin)
    if (begin[order][1:] < (begin + (high - low))[order][:-1]).any():
        fail("coverage", f"{named}: cells have elements in common")
    return over, len(line)


def _prove_relays(bundle: Bundle, shape: Shape, named: str, fail: Fail) -> None:
    by = np.flatnonzero(bundle.relay >= 0)
    for group, relay in np.unique(np.stack([shape.group[by], bundle.relay[by]], axis=1), axis=0).tolist():
        if relay not in shape.groups[group]:
            fail("relays", f"{named}: {relay} passes on what {list(shape.groups[group])} get, and gets it not")
        elif len(shape.groups[group]) == 1:
            fail("provenance", f"{named}: {relay} passes on to nobody")
    if (bundle.relay < -1).any():
        fail("relays", f"{named}: a relay is no device")


def _prove_class(
    bundle: Bundle,
    shape: Shape,
    alike: Alike,
    cells: np.ndarray,
    member: np.ndarray,
    local: np.ndarray,
    named: str,
    fail: Fail,
) -> None:
    """(c) and (d) for one class. cells: that go over links; member [groups, devices]; local: rows of who copies."""
    copied, devices = bundle.local[:, 0], alike.devices
    low = np.zeros((len(member), len(alike.counts)), np.int64)  # per group: what lies in every receiver's part
    high = np.zeros_like(low)
    for group, among in enumerate(member):
        low[group], high[group] = alike.low[among].max(axis=0), alike.high[among].min(axis=0)
    to = shape.group_of[cells]
    good = (bundle.low[cells] >= low[to]).all() and (bundle.high[cells] <= high[to]).all()
    good &= (bundle.low[copied] >= alike.low[local]).all() and (bundle.high[copied] <= alike.high[local]).all()
    if not good:
        return fail("coverage", f"{named}: a cell goes to a device of whose part it is not")
    size = shape.row_elements * bundle.rows
    here = sums(local, size[copied], len(devices))
    there = member.T.astype(np.int64) @ sums(to, size[cells], len(member))
    for name, found, true in (("coverage", here + there, alike.mapped), ("crossing", here, alike.local)):
        if (found != true).any():
            at = int(np.argmax(found != true))
            words = "gets" if name == "coverage" else "copies from itself"
            fail(
                name, f"{named}: device {devices[at]} {words} {found[at]} elements of each member; expected {true[at]}"
            )
    cell = np.r_[bundle.cell, copied]
    rows = rows_of(alike.place.layout.mesh.devices, np.r_[bundle.sender, bundle.local[:, 1]])
    parts = held(alike.place.layout, alike.place.shape)[np.maximum(rows, 0)]
    has = (rows >= 0) & inside(alike.source_regions(bundle.low, bundle.high)[cell], parts)
    if not has.all():
        at = int(np.argmin(has))
        device = int(np.r_[bundle.sender, bundle.local[:, 1]][at])
        fail("provenance", f"{named}: cell {cell[at]} is sent by device {device}, which does not hold it")


def first_rows(rows: np.ndarray, phase: np.ndarray, parts: int, part: np.ndarray) -> np.ndarray:
    """How many rows of lanes with so many rows leave before a part: by the definition of a row's round, the least k for
    which (k 2^16 + phase) parts >= part rows 2^16."""
    least = (part * rows << PHASE_BITS) - phase * parts
    return np.clip(-(-least // (parts << PHASE_BITS)), 0, rows)


def flow_of(bundle: Bundle, shape: Shape, devices: tuple[int, ...], fail: Fail) -> Flow | None:
    """The traffic of a bundle of which (b) is known. devices: the plan's."""
    count, lanes, parts = len(devices), len(bundle.cell), bundle.parts if len(bundle.cell) else 0
    member = np.zeros((len(shape.groups), count))
    everybody = [bundle.sender, bundle.relay[bundle.relay >= 0], *(np.array(g, np.int64) for g in shape.groups)]
    if any((rows_of(devices, some) < 0).any() for some in everybody):
        fail("links", f"the bundle of {bundle.members[0][0]} is between devices that the plan does not list")
        return None
    if parts * count > MOST_CELLS:
        fail("rounds", f"the bundle of {bundle.members[0][0]} is in {parts} parts, more than are looked at together")
        return None
    for at, among in enumerate(shape.groups):
        member[at, rows_of(devices, np.array(among, np.int64))] = 1
    by = np.flatnonzero(bundle.relay >= 0)
    sender, relay = rows_of(devices, bundle.sender), rows_of(devices, bundle.relay[by])
    copies = np.array([len(among) for among in shape.groups], np.int64)[shape.group]
    rows = bundle.stop - bundle.start
    row = (shape.row_elements * bundle.wire_bytes)[bundle.cell]
    links = np.zeros((count, count), np.int64)
    _to_groups(links, sender, shape.group, rows * row * (bundle.relay < 0), member)
    if len(by):
        size = (rows * row)[by]
        _to_groups(links, relay, shape.group[by], size, member)
        links += sums(sender[by] * count + relay, size, count * count).reshape(count, count)
        links[np.arange(count), np.arange(count)] -= sums(relay, size, count)  # a relay passes on to the others
    sent, received = (np.zeros((parts + 1, count), np.int64) for _ in range(2))
    step = max(1, TOGETHER // max(1, lanes))
    for low in range(0, parts, step):
        number = np.arange(low, min(low + step, parts) + 1)[:, None]
        size = np.diff(first_rows(rows, bundle.phase, parts, number), axis=0) * row
        now = slice(low, low + len(size))
        after = slice(low + 1, low + 1 + len(size))
        sent[now] += _by_round(sender, size * np.where(bundle.relay < 0, copies, 1), count)
        received[now] += _times(_by_round(shape.group, size * (bundle.relay < 0), len(member)), member)
        if len(by):
            came = _by_round(relay, size[:, by], count)
            received[now] += came
            sent[after] += _by_round(relay, size[:, by] * (copies[by] - 1), count)
            received[after] += _times(_by_round(shape.group[by], size[:, by], len(member)), member) - came
    return Flow(links, sent, received)


def _by_round(where: np.ndarray, size: np.ndarray, count: int) -> np.ndarray:
    """[rounds, count] sums of size [rounds, lanes] by the lanes' place."""
    rounds = len(size)
    at = (np.arange(rounds)[:, None] * count + where).reshape(-1)
    return sums(at, size.reshape(-1), rounds * count).reshape(rounds, count)


def _to_groups(links: np.ndarray, giver: np.ndarray, group: np.ndarray, size: np.ndarray, member: np.ndarray) -> None:
    """Add to links what givers give, so many bytes each, to all of a group."""
    groups = len(member)
    givers, at = np.unique(giver, return_inverse=True)
    total = sums(at * groups + group, size, len(givers) * groups).reshape(len(givers), groups)
    links[givers] += _times(total, member)


def _times(left: np.ndarray, member: np.ndarray) -> np.ndarray:
    """The matrix product of whole numbers and of zeros and ones, exactly: as floats where none can be rounded."""
    if left.sum(dtype=np.float64) < 2**53:
        return (left.astype(np.float64) @ member).astype(np.int64)
    return left @ member.astype(np.int64)
