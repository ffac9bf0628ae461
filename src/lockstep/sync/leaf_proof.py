"""What the certificate finds out about one destination leaf of a plan, transfer by transfer, on columns.

Shares no code with the planner: meshes, parts and cells are computed here from the layouts' fields (`regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (teaches numpy the names `bfloat16` and `float8_*`)
import numpy as np

from lockstep.sync.columns import Columns, columns
from lockstep.sync.mapping import Target
from lockstep.sync.plan import LeafPlan, Placed, TransferTable
from lockstep.sync.regions import Lines, Pieces, held, inside, rows_of, sums, volumes

Fail = Callable[[str, str], None]
"""(check, what is wrong)."""


@dataclass(frozen=True)
class Traffic:
    """What one leaf puts on links, summed up. links: (sender, receiver, bytes) columns, device numbers; sent, received:
    (round, device, bytes) columns."""

    links: tuple[np.ndarray, np.ndarray, np.ndarray]
    sent: tuple[np.ndarray, np.ndarray, np.ndarray]
    received: tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class LeafProof:
    """needed: destination device -> bytes that it must get over links whatever the plan. new_bytes: likewise, of new
    buffers. transfers: how many were examined. intervals: of elements, how many were laid beside one another."""

    needed: Mapping[int, int]
    new_bytes: Mapping[int, int]
    traffic: Traffic | None
    transfers: int
    intervals: int


def itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _wire(source: str, target: str) -> str:
    """The type that crosses: the smaller one; the destination's where both are of one size."""
    return source if itemsize(source) < itemsize(target) else target


def prove_leaf(
    target: Target,
    leaf: LeafPlan,
    destination: Placed,
    source: Mapping[str, Placed],
    tables: list[TransferTable],
    fail: Fail,
) -> LeafProof:
    """Examine one leaf whose map is total; `fail` is told of everything that is wrong with it."""
    devices = destination.layout.mesh.devices
    places = [source[piece.source] for piece in target.pieces]
    wires = [_wire(place.dtype, target.dtype) for place in places] or [target.dtype]
    if leaf.wire_dtype != wires[0]:
        fail("leaves", f"{target.path} is said to cross as {leaf.wire_dtype}; the smaller type is {wires[0]}")
    wire = np.array([itemsize(dtype) for dtype in wires], np.int64)
    pieces = Pieces.of(target, [len(place.shape) for place in places])
    boxes = held(destination.layout, target.shape)
    mapped = _meet(pieces, boxes)
    local = _available(pieces, boxes, devices, places)
    reuses = _stays(target, places, destination, boxes)
    if leaf.in_place:
        if not reuses:
            fail("in_place", f"{target.path} is said to be in place; its buffers cannot be the source's")
        if tables:
            fail("in_place", f"{target.path} is said to be in place, yet the plan moves parts of it")
        _claims(leaf, {"written": 0, "local": 0, "filled": 0, "crossing": 0}, target, fail)
        return LeafProof({}, {}, None, 0, 0)
    if reuses:
        fail("in_place", f"{target.path} is where it should be on every device, yet the plan writes it anew")
    size, volume = itemsize(target.dtype), volumes(boxes)
    needed = ((mapped - local) * wire[: len(places), None]).sum(axis=0)
    filled = volume - mapped.sum(axis=0)
    claims = {"written": volume.sum() * size, "local": local.sum() * size, "filled": filled.sum() * size}
    _claims(leaf, {name: int(n) for name, n in claims.items()} | {"crossing": int(needed.sum())}, target, fail)
    by_device = dict(zip(devices, needed.tolist(), strict=True))
    new = dict(zip(devices, (volume * size).tolist(), strict=True))
    moves, wrong = columns(target, tables, [len(place.shape) for place in places], devices)
    if moves is None:
        fail("pieces", wrong)
        return LeafProof(by_device, new, None, 0, 0)
    intervals = _prove_transfers(target, moves, pieces, boxes, mapped.sum(axis=0), places, wire, fail)
    traffic = _traffic(moves)
    got = sums(rows_of(devices, traffic.received[1]), traffic.received[2], len(devices))
    if (got != needed).any():
        at = int(np.argmax(got != needed))
        fail("crossing", f"{target.path}: device {devices[at]} gets {got[at]} bytes over links; it lacks {needed[at]}")
    return LeafProof(by_device, new, traffic, len(moves.piece), intervals)


def _stays(target: Target, places: list[Placed], destination: Placed, boxes: np.ndarray) -> bool:
    """Whether every destination device holds exactly its part already, in the destination's form."""
    if len(places) != 1:
        return False
    (piece,), (place,) = target.pieces, places
    whole = all(
        (run.source, run.target, run.count) == (0, 0, n) for run, n in zip(piece.runs, target.shape, strict=True)
    )
    straight = piece.dims == tuple(range(len(target.shape))) and not piece.fixed and place.shape == target.shape
    if not (
        whole and straight and all(run.source_step == run.target_step == 1 or run.count == 1 for run in piece.runs)
    ):
        return False
    if place.dtype != target.dtype or place.layout.memory != destination.layout.memory:
        return False
    rows = rows_of(place.layout.mesh.devices, np.array(destination.layout.mesh.devices))
    return bool((rows >= 0).all() and (held(place.layout, place.shape)[rows] == boxes).all())


def _claims(leaf: LeafPlan, true: Mapping[str, int], target: Target, fail: Fail) -> None:
    claimed = {name: getattr(leaf, f"bytes_{name}") for name in true}
    if claimed != true:
        fail("bytes", f"{target.path} claims bytes {claimed}; they are {dict(true)}")
    total = int(np.prod(target.shape, dtype=np.int64)) * itemsize(target.dtype)
    if leaf.bytes != total:
        fail("bytes", f"{target.path} claims {leaf.bytes} bytes; it has {total}")


def _meet(pieces: Pieces, boxes: np.ndarray) -> np.ndarray:
    """[pieces, devices] elements that each piece has in every part."""
    low, high = _turns(pieces.run[:, None, :, 1], pieces.run[:, None, :, 4], pieces.run[:, None, :, 2], boxes[None])
    return np.maximum(0, high - low).prod(axis=-1)


def _available(pieces: Pieces, boxes: np.ndarray, devices: tuple[int, ...], places: list[Placed]) -> np.ndarray:
    """[pieces, devices] of those, elements that the device itself holds at the source."""
    found = np.zeros((len(places), len(devices)), np.int64)
    groups: dict[Placed, list[int]] = {}
    for at, place in enumerate(places):
        groups.setdefault(place, []).append(at)
    for place, members in groups.items():
        rows = rows_of(place.layout.mesh.devices, np.array(devices))
        both = np.flatnonzero(rows >= 0)
        if not len(both):
            continue
        parts = held(place.layout, place.shape)[rows[both]]
        run, along, fixed = pieces.run[members], pieces.source_dim[members], pieces.fixed[members, : len(place.shape)]
        low, high = _turns(run[:, None, :, 1], run[:, None, :, 4], run[:, None, :, 2], boxes[both][None])
        for dim in range(run.shape[1]):
            if not place.shape:
                break
            # Of each piece the part along the source dim that this dim runs along, if any.
            side = parts[:, np.maximum(along[:, dim], 0)].transpose(1, 0, 2)
            first, end = _turns(run[:, None, dim, 0], run[:, None, dim, 3], run[:, None, dim, 2], side)
            has = (along[:, dim] >= 0)[:, None]
            low[..., dim] = np.where(has, np.maximum(low[..., dim], first), low[..., dim])
            high[..., dim] = np.where(has, np.minimum(high[..., dim], end), high[..., dim])
        elements = np.maximum(0, high - low).prod(axis=-1)
        taken = (fixed[:, None] >= parts[None, :, :, 0]) & (fixed[:, None] < parts[None, :, :, 1])
        found[np.ix_(np.array(members), both)] = elements * (taken | (fixed < 0)[:, None]).all(axis=-1)
    return found


def _turns(start: np.ndarray, step: np.ndarray, count: np.ndarray, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of t = 0..count-1 with index start + t * step, the range [low, high) whose indices are in the box."""
    low = np.maximum(0, -((start - box[..., 0]) // step))
    return low, np.minimum(count, (box[..., 1] - 1 - start) // step + 1)


def _prove_transfers(
    target: Target,
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
        shown = moves.show(int(np.argmin(good)))
        fail(check, f"{target.path}: {shown} {words} ({int((~good).sum())} such)")
        return False

    volume, size = volumes(moves.target), moves.size[moves.group]
    sound = expect("pieces", pieces.agree(moves.piece, moves.source, moves.target), "is not what the map says")
    expect("bytes", moves.bytes == volume * wire[moves.piece], "does not claim the bytes of its elements")
    expect("rounds", moves.round >= 0, "has no round")
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
    written = moves.member.T.astype(np.int64) @ sums(moves.group, volume, len(moves.size))
    if (written != mapped).any():
        at = int(np.argmax(written != mapped))
        fail(
            "coverage",
            f"{target.path}: {written[at]} elements are written on device {moves.devices[at]}, whose part "
            f"{boxes[at, :, :2].tolist()} has {mapped[at]} to write",
        )
        return 0
    return _once(target, moves, boxes, expect, fail)


def _once(
    target: Target, moves: Columns, boxes: np.ndarray, expect: Callable[[str, np.ndarray, str], bool], fail: Fail
) -> int:
    """No element is written twice on a device, nor relayed before it is there.

    With as many elements written as there are to write, each in its place, none twice means each once. Devices that are
    in the same groups get the same transfers, so one stands for all of them.
    """
    alike: dict[bytes, int] = {}
    standing = np.array([alike.setdefault(column.tobytes(), len(alike)) for column in moves.member.T])
    first = np.unique(standing, return_index=True)[1]
    lines = Lines(target.shape, moves.target)
    of, line, low, high = lines.intervals(moves.target)
    where, device = _spread(moves.member[:, first], moves.group[of])
    of, line, low, high = of[where], line[where], low[where], high[where]
    begin = (device * lines.count + line) * lines.length + low
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], (begin + (high - low))[order]
    twice = np.flatnonzero(end[:-1] > begin[1:])
    if len(twice):
        pair = [moves.show(int(of[order[at]])) for at in (twice[0], twice[0] + 1)]
        to = moves.devices[first[device[order[twice[0]]]]]
        fail(
            "coverage", f"{target.path}: device {to} gets elements twice: {pair[0]}, and {pair[1]} ({len(twice)} such)"
        )
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
    base = (standing[sender[of_relay]] * lines.count + line) * lines.length
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
        mine = np.flatnonzero(np.isin(moves.piece, members)) if len(groups) > 1 else np.arange(len(good))
        rows = rows_of(place.layout.mesh.devices, moves.sender[mine])
        parts = held(place.layout, place.shape)[np.maximum(rows, 0)]
        good[mine] = (rows >= 0) & inside(moves.source[mine, : len(place.shape)], parts)
    return good


def _traffic(moves: Columns) -> Traffic:
    """Everything but local copies."""
    over = np.flatnonzero(~moves.local | (moves.size[moves.group] != 1))
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
