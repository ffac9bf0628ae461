"""What the certificate finds out about destination leaves of a plan, transfer by transfer, on columns.

Shares no code with the planner: meshes, parts and overlaps are computed here from the layouts' fields (`regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.sync.columns import Columns, Fail, columns
from lockstep.sync.leaf_claims import available, check_claims, itemsize, meet, stays, wire_dtype
from lockstep.sync.mapping import Target
from lockstep.sync.plan import LeafPlan, Placed, TransferTable
from lockstep.sync.regions import Lines, Pieces, held, inside, rows_of, sums, volumes


@dataclass(frozen=True)
class Batch:
    """Leaves that are alike but for names, fixed indices and transfers, so that they can be examined as one column.

    destination: of the first. places: what the source holds for each piece of the first; of the others it has the same
    shape, dtype and layout. rounds: of the plan."""

    targets: list[Target]
    leaves: list[LeafPlan]
    tables: list[list[TransferTable]]
    destination: Placed
    places: list[Placed]
    rounds: int


@dataclass(frozen=True)
class Traffic:
    """What one leaf puts on links, summed up. links: (sender, receiver, bytes) columns, device numbers; sent, received:
    (round, device, bytes) columns."""

    links: tuple[np.ndarray, np.ndarray, np.ndarray]
    sent: tuple[np.ndarray, np.ndarray, np.ndarray]
    received: tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class LeafProof:
    """Of all leaves that were examined together. needed: destination device -> bytes that it must get over links
    whatever the plan. new_bytes: likewise, of new buffers. transfers: how many were examined. intervals: of elements,
    how many were laid beside one another."""

    needed: Mapping[int, int]
    new_bytes: Mapping[int, int]
    traffic: Traffic | None
    transfers: int
    intervals: int


def prove_in_place(target: Target, leaf: LeafPlan, destination: Placed, places: list[Placed], fail: Fail) -> None:
    """Examine a leaf that is said to stay where it is."""
    if not stays(target, places, destination, held(destination.layout, target.shape)):
        fail("in_place", f"{target.path} is said to be in place; its buffers cannot be the source's")
    check_claims(leaf, {"written": 0, "local": 0, "filled": 0, "crossing": 0}, target, fail)


def prove_written(batch: Batch, fail: Fail) -> LeafProof:
    """Examine leaves that are written and whose map is total; `fail` is told of everything that is wrong with them."""
    target, places, count = batch.targets[0], batch.places, len(batch.targets)
    devices = batch.destination.layout.mesh.devices
    wires = [wire_dtype(place.dtype, target.dtype) for place in places]
    wire = np.array([itemsize(dtype) for dtype in wires], np.int64)
    ranks = [len(place.shape) for place in places]
    pieces = Pieces.of([piece for one in batch.targets for piece in one.pieces], len(target.shape), ranks * count)
    boxes = held(batch.destination.layout, target.shape)
    mapped = meet(pieces.first(len(places)), boxes)
    local = available(pieces, boxes, devices, places * count).reshape(count, len(places), len(devices))
    needed = ((mapped - local) * wire[:, None]).sum(axis=1)
    size, volume, whole = itemsize(target.dtype), volumes(boxes), mapped.sum(axis=0)
    written, filled = int(volume.sum()) * size, int((volume - whole).sum()) * size
    copied, crossing = local.sum(axis=(1, 2)) * size, needed.sum(axis=1)
    for at, (one, leaf) in enumerate(zip(batch.targets, batch.leaves, strict=True)):
        true = {"written": written, "local": int(copied[at]), "filled": filled, "crossing": int(crossing[at])}
        check_claims(leaf, true, one, fail)
        if leaf.wire_dtype != (wires or [target.dtype])[0]:
            fail("leaves", f"{one.path} is said to cross as {leaf.wire_dtype}; the smaller type is {wires[:1]}")
        if stays(one, places, batch.destination, boxes):
            fail("in_place", f"{one.path} is where it should be on every device, yet the plan writes it anew")
    by_device = dict(zip(devices, needed.sum(axis=0).tolist(), strict=True))
    new = dict(zip(devices, (volume * size * count).tolist(), strict=True))
    moves = columns(batch.targets, batch.tables, ranks, devices, fail)
    if moves is None:
        return LeafProof(by_device, new, None, 0, 0)
    late = (moves.round < 0) | (moves.round >= batch.rounds)
    if late.any():
        fail("rounds", f"{moves.show(int(np.argmax(late)))} is in none of the plan's {batch.rounds} rounds")
    intervals = _prove_transfers(target.shape, moves, pieces, boxes, whole, places, wire, fail)
    over = ~moves.local | (moves.size[moves.group] != 1)
    got = _per_leaf(moves, np.where(over, moves.bytes, 0))
    if (got != needed).any():
        leaf_at, at = np.argwhere(got != needed)[0]
        fail(
            "crossing",
            f"{moves.paths[leaf_at]}: device {devices[at]} gets {got[leaf_at, at]} bytes over links; it lacks "
            f"{needed[leaf_at, at]}",
        )
    return LeafProof(by_device, new, _traffic(moves, np.flatnonzero(over)), len(moves.piece), intervals)


def _per_leaf(moves: Columns, values: np.ndarray) -> np.ndarray:
    """[leaves, destination devices] sums of what every transfer brings to each of its receivers."""
    groups = len(moves.size)
    total = sums(moves.leaf * groups + moves.group, values, len(moves.paths) * groups)
    return total.reshape(len(moves.paths), groups) @ moves.member.astype(np.int64)


def _prove_transfers(
    shape: tuple[int, ...],
    moves: Columns,
    pieces: Pieces,
    boxes: np.ndarray,
    mapped: np.ndarray,
    places: list[Placed],
    wire: np.ndarray,
    fail: Fail,
) -> int:
    """mapped: [devices] elements of every part that the map has. Returns the number of intervals examined."""

    def expect(check: str, good: np.ndarray, words: str) -> bool:
        if good.all():
            return True
        fail(check, f"{moves.show(int(np.argmin(good)))} {words} ({int((~good).sum())} such)")
        return False

    volume, size = volumes(moves.target), moves.size[moves.group]
    sound = expect("pieces", pieces.agree(moves.piece, moves.source, moves.target), "is not what the map says")
    expect(
        "bytes",
        moves.bytes == volume * wire[moves.piece % max(1, len(wire))],
        "does not claim the bytes of its elements",
    )
    expect("provenance", ~moves.local | ((size == 1) & ~moves.relay), "has its sender among several receivers")
    expect("provenance", size > 0, "has no receiver")
    expect("provenance", moves.relay | _holds(moves, places), "is sent by a device that does not hold it")
    arrives = expect("coverage", moves.strangers[moves.group] == 0, "goes to a device that the destination has not")
    common = np.zeros((len(moves.size), *boxes.shape[1:]), np.int64)  # per group: what lies in every receiver's part
    for group, among in enumerate(moves.member):
        common[group] = boxes[among].min(axis=0, initial=np.iinfo(np.int64).max)
        common[group, :, 0] = boxes[among, :, 0].max(axis=0, initial=0)
    arrives &= expect("coverage", inside(moves.target, common[moves.group]), "lies outside a receiver's part")
    if not (sound and arrives):
        return 0
    written = _per_leaf(moves, volume)
    if (written != mapped).any():
        leaf, at = np.argwhere(written != mapped)[0]
        fail(
            "coverage",
            f"{moves.paths[leaf]}: {written[leaf, at]} elements are written on device {moves.devices[at]}, whose part "
            f"{boxes[at, :, :2].tolist()} has {mapped[at]} to write",
        )
        return 0
    return _once(shape, moves, boxes, expect, fail)


def _once(
    shape: tuple[int, ...],
    moves: Columns,
    boxes: np.ndarray,
    expect: Callable[[str, np.ndarray, str], bool],
    fail: Fail,
) -> int:
    """No element is written twice on a device, nor relayed before it is there.

    With as many elements written as there are to write, each in its place, none twice means each once. Devices that are
    in the same groups get the same transfers, so one stands for all of them.
    """
    alike: dict[bytes, int] = {}
    standing = np.array([alike.setdefault(column.tobytes(), len(alike)) for column in moves.member.T])
    first = np.unique(standing, return_index=True)[1]
    lines = Lines(shape, moves.target)
    of, line, low, high = lines.intervals(moves.target)
    where, device = _spread(moves.member[:, first], moves.group[of])
    of, line, low, high = of[where], line[where], low[where], high[where]
    place = moves.leaf[of] * len(first) + device
    begin = (place * lines.count + line) * lines.length + low
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], (begin + (high - low))[order]
    twice = np.flatnonzero(end[:-1] > begin[1:])
    if len(twice):
        pair = [moves.show(int(of[order[at]])) for at in (twice[0], twice[0] + 1)]
        to = moves.devices[first[device[order[twice[0]]]]]
        fail("coverage", f"device {to} gets elements twice: {pair[0]}, and {pair[1]} ({len(twice)} such)")
        return len(begin)
    relayed = np.flatnonzero(moves.relay)
    if not len(relayed):
        return len(begin)
    sender = rows_of(moves.devices, moves.sender[relayed])
    good = np.ones(len(moves.piece), bool)
    good[relayed] = (sender >= 0) & inside(moves.target[relayed], boxes[sender])
    if not expect("relays", good, "is relayed by a device whose part it is not"):
        return len(begin)
    of_relay, line, low, high = lines.intervals(moves.target[relayed])
    place = moves.leaf[relayed][of_relay] * len(first) + standing[sender[of_relay]]
    base = (place * lines.count + line) * lines.length
    at, upto = np.searchsorted(begin, base + low, "right") - 1, np.searchsorted(begin, base + high)
    which = np.repeat(np.arange(len(at)), upto - at)
    at = np.arange(len(which)) - np.repeat(np.cumsum(upto - at) - upto, upto - at)
    late = moves.round[of[order[at]]] >= moves.round[relayed][of_relay[which]]
    good[relayed[of_relay[which[late]]]] = False
    expect("relays", good, "is relayed before it has arrived at its sender")
    return len(begin)


def _spread(among: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """among: [groups, n] bool. For every entry of `group`, once per member: its place, and the member."""
    sizes = among.sum(axis=1)
    flat = np.nonzero(among)[1]
    each = sizes[group]
    where = np.repeat(np.arange(len(group)), each)
    offset = np.arange(len(where)) - np.repeat(np.cumsum(each) - each, each)
    return where, flat[(np.cumsum(sizes) - sizes)[group[where]] + offset]


def _holds(moves: Columns, places: list[Placed]) -> np.ndarray:
    """[n] whether the sender holds, at the source, what is read."""
    good = np.zeros(len(moves.sender), bool)
    groups: dict[Placed, list[int]] = {}
    for at, place in enumerate(places):
        groups.setdefault(place, []).append(at)
    for place, members in groups.items():
        mine = np.arange(len(good))
        if len(groups) > 1:
            mine = np.flatnonzero(np.isin(moves.piece % len(places), members))
        rows = rows_of(place.layout.mesh.devices, moves.sender[mine])
        parts = held(place.layout, place.shape)[np.maximum(rows, 0)]
        good[mine] = (rows >= 0) & inside(moves.source[mine, : len(place.shape)], parts)
    return good


def _traffic(moves: Columns, over: np.ndarray) -> Traffic:
    """over: the transfers that are no local copies."""
    group, size, number = moves.group[over], moves.bytes[over], moves.round[over]
    senders, sender = np.unique(moves.sender[over], return_inverse=True)
    devices = np.array(moves.devices)
    groups = len(moves.size)
    pairs, at = np.unique(sender * groups + group, return_inverse=True)
    total = sums(at, size, len(pairs))
    where, to = _spread(moves.member, pairs % max(1, groups))
    links = senders[pairs[where] // max(1, groups)], devices[to], total[where]
    keys, at = np.unique(number * len(senders) + sender, return_inverse=True)
    count = max(1, len(senders))
    sent = keys // count, senders[keys % count], sums(at, size * moves.size[group], len(keys))
    keys, at = np.unique(number * groups + group, return_inverse=True)
    total = sums(at, size, len(keys))
    where, to = _spread(moves.member, keys % max(1, groups))
    return Traffic(links, sent, (keys[where] // max(1, groups), devices[to], total[where]))
