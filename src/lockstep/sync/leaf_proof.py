"""What the certificate finds out about one destination leaf of a plan, transfer by transfer, on columns.

Shares no code with the planner: meshes, parts and cells are computed here from the layouts' fields (`regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (teaches numpy the names `bfloat16` and `float8_*`)
import numpy as np

from lockstep.sync.mapping import Target
from lockstep.sync.plan import LeafPlan, Placed, TransferTable
from lockstep.sync.regions import Grid, Parts, Pieces, held, inside, rows_of, volumes

Fail = Callable[[str, str], None]
"""(check, what is wrong)."""


@dataclass(frozen=True)
class Columns:
    """All transfers of a leaf. source [n, most source dims, 3] and target [n, dims, 3]: regions. pair, receiver
    [pairs]: one entry per transfer and receiver."""

    piece: np.ndarray
    source: np.ndarray
    target: np.ndarray
    sender: np.ndarray
    bytes: np.ndarray
    round: np.ndarray
    relay: np.ndarray
    pair: np.ndarray
    receiver: np.ndarray


@dataclass(frozen=True)
class Traffic:
    """What one leaf puts on links: one entry per transfer and receiver that are not one device. Device numbers."""

    sender: np.ndarray
    receiver: np.ndarray
    bytes: np.ndarray
    round: np.ndarray


@dataclass(frozen=True)
class LeafProof:
    """needed: destination device -> bytes that it must get over links whatever the plan. new_bytes: likewise, of new
    buffers. transfers, cells: how many were examined."""

    needed: Mapping[int, int]
    new_bytes: Mapping[int, int]
    traffic: Traffic | None
    transfers: int
    cells: int


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
    columns = _columns(target, tables, pieces, fail)
    if columns is None:
        return LeafProof(by_device, new, None, 0, 0)
    cells = _prove_transfers(target, columns, pieces, boxes, devices, places, wire, fail)
    crosses = columns.sender[columns.pair] != columns.receiver
    pair = columns.pair[crosses]
    traffic = Traffic(columns.sender[pair], columns.receiver[crosses], columns.bytes[pair], columns.round[pair])
    got = np.bincount(np.maximum(rows_of(devices, traffic.receiver), 0), traffic.bytes, len(devices)).astype(np.int64)
    if (got != needed).any():
        at = int(np.argmax(got != needed))
        fail("crossing", f"{target.path}: device {devices[at]} gets {got[at]} bytes over links; it lacks {needed[at]}")
    return LeafProof(by_device, new, traffic, len(columns.piece), cells)


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


def _columns(target: Target, tables: list[TransferTable], pieces: Pieces, fail: Fail) -> Columns | None:
    """The tables as one; None (and `fail` told) for what is no table of this leaf."""
    dims, most = len(target.shape), pieces.fixed.shape[1]
    made: list[tuple[np.ndarray, ...]] = []
    offset = 0
    for table in tables:
        count = len(table.sender)
        known = 0 <= table.piece < len(target.pieces) and table.target == target.path
        if not known or table.source != target.pieces[table.piece].source:
            fail(
                "pieces", f"{target.path}: piece {table.piece} of {table.target} from {table.source} is not in the map"
            )
            return None
        source = np.zeros((count, most, 3), np.int64)
        source[..., 2] = 1
        rank = len(table.source_step)
        sizes = np.array([len(group) for group in table.groups], np.int64)
        shapes = {table.source_start.shape, table.source_stop.shape} | {(count, rank)}
        shapes_target = {table.target_start.shape, table.target_stop.shape, (count, dims)}
        lengths = {len(column) for column in (table.receivers, table.bytes, table.round, table.relay)} | {count}
        steps = (*table.source_step, *table.target_step)
        rows = table.receivers
        if (
            len(shapes) + len(shapes_target) + len(lengths) != 3
            or rank != int((pieces.fixed[table.piece] > -2).sum())
            or len(table.target_step) != dims
            or min(steps, default=1) < 1
            or (count and not (rows.min() >= 0 and rows.max() < len(sizes)))
        ):
            fail("pieces", f"{target.path}: the table of piece {table.piece} is malformed")
            return None
        if not count:
            continue
        source[:, :rank] = _regions(table.source_start, table.source_stop, table.source_step)
        goal = _regions(table.target_start, table.target_stop, table.target_step)
        each = sizes[rows]
        flat = np.array([number for group in table.groups for number in group], np.int64)
        pair = np.repeat(np.arange(count), each)
        begin = (np.cumsum(sizes) - sizes)[rows]
        receiver = flat[begin[pair] + np.arange(len(pair)) - np.repeat(np.cumsum(each) - each, each)]
        piece = np.full(count, table.piece)
        made.append((piece, source, goal, table.sender, table.bytes, table.round, table.relay, pair + offset, receiver))
        offset += count
    if not made:
        none = np.zeros(0, np.int64)
        empty = np.zeros((0, most, 3), np.int64), np.zeros((0, dims, 3), np.int64)
        return Columns(none, *empty, none, none, none, none.astype(bool), none, none)
    return Columns(*(np.concatenate(column) for column in zip(*made, strict=True)))


def _regions(start: np.ndarray, stop: np.ndarray, step: tuple[int, ...]) -> np.ndarray:
    return np.stack([start, stop, np.broadcast_to(np.array(step, np.int64), start.shape)], axis=-1)


def _prove_transfers(
    target: Target,
    columns: Columns,
    pieces: Pieces,
    boxes: np.ndarray,
    devices: tuple[int, ...],
    places: list[Placed],
    wire: np.ndarray,
    fail: Fail,
) -> int:
    """Returns the number of cells examined."""

    def expect(check: str, good: np.ndarray, words: str) -> bool:
        if good.all():
            return True
        at = int(np.argmin(good))
        at = at if len(good) == len(columns.sender) else int(columns.pair[at])
        fail(check, f"{target.path}: {_show(columns, at)} {words} ({int((~good).sum())} such)")
        return False

    sound = expect("pieces", pieces.agree(columns.piece, columns.source, columns.target), "is not what the map says")
    row = rows_of(devices, columns.receiver)
    arrives = expect("coverage", row >= 0, "goes to a device that the destination has not")
    goal = columns.target[columns.pair]
    arrives = arrives and expect("coverage", inside(goal, boxes[row]), "lies outside the receiver's part")
    alone = np.bincount(columns.pair, minlength=len(columns.sender)) == 1
    local = columns.sender[columns.pair] == columns.receiver
    copied = np.zeros(len(alone), bool)
    copied[columns.pair[local]] = True
    item = np.where(copied, itemsize(target.dtype), wire[columns.piece])
    expect("bytes", columns.bytes == volumes(columns.target) * item, "does not claim the bytes of its elements")
    expect("provenance", ~local | (alone & ~columns.relay)[columns.pair], "has its sender among the receivers")
    expect("provenance", np.bincount(columns.pair, minlength=len(columns.sender)) > 0, "has no receiver")
    expect("rounds", columns.round >= 0, "has no round")
    expect("provenance", columns.relay | _holds(columns, places), "is sent by a device that does not hold it")
    if not (sound and arrives):
        return 0
    sender = rows_of(devices, columns.sender)
    here = (sender >= 0) & inside(columns.target, boxes[np.maximum(sender, 0)])
    passed_on = expect("relays", ~columns.relay | here, "is relayed by a device whose part it is not")
    grid = Grid(target.shape, boxes, pieces.target_regions(), columns.target)
    parts = Parts(grid, boxes)
    of, number = parts.number(row, goal)
    if not _covered(target, grid, parts, pieces, number, devices, fail) or not passed_on:
        return parts.count
    if columns.relay.any():
        arrival = np.full(parts.count, np.iinfo(np.int64).max)
        arrival[number] = columns.round[columns.pair][of]
        relayed = np.flatnonzero(columns.relay)
        of, number = parts.number(sender[relayed], columns.target[relayed])
        late = (arrival[number] >= columns.round[relayed][of]) & (parts.elements[number] > 0)
        good = np.ones(len(columns.sender), bool)
        good[relayed[of[late]]] = False
        expect("relays", good, "is relayed before it has arrived at its sender")
    return parts.count


def _holds(columns: Columns, places: list[Placed]) -> np.ndarray:
    """[n] whether the sender holds, at the source, what is read."""
    good = np.zeros(len(columns.sender), bool)
    groups: dict[Placed, list[int]] = {}
    for at, place in enumerate(places):
        groups.setdefault(place, []).append(at)
    for place, members in groups.items():
        mine = np.flatnonzero(np.isin(columns.piece, members)) if len(groups) > 1 else np.arange(len(good))
        rows = rows_of(place.layout.mesh.devices, columns.sender[mine])
        parts = held(place.layout, place.shape)[np.maximum(rows, 0)]
        good[mine] = (rows >= 0) & inside(columns.source[mine, : len(place.shape)], parts)
    return good


def _covered(
    target: Target, grid: Grid, parts: Parts, pieces: Pieces, number: np.ndarray, devices: tuple[int, ...], fail: Fail
) -> bool:
    """Whether every device's part is written once where the map has a piece, and nowhere else."""
    of, found = grid.cells(pieces.target_regions())
    mapped = np.zeros(int(np.prod(grid.shape, dtype=np.int64)), bool)
    mapped[grid.flat(found, len(of))] = True
    wanted = mapped[parts.flat]
    times = np.bincount(number, minlength=parts.count)
    wrong = (times != wanted) & (parts.elements > 0)
    if not wrong.any():
        return True
    at = int(np.argmax(wrong))
    index = grid.first(int(parts.flat[at]))
    fail(
        "coverage",
        f"{target.path}: element {index} is written {times[at]} times on device {devices[parts.device[at]]}; expected "
        f"{int(wanted[at])} ({int(parts.elements[wrong].sum())} elements are wrong)",
    )
    return False


def _show(columns: Columns, at: int) -> str:
    def box(regions: np.ndarray) -> str:
        shown = [f"{a}:{b}" if s == 1 else f"{a}:{b}:{s}" for a, b, s in regions[at].tolist()]
        return f"[{', '.join(shown)}]"

    to = columns.receiver[columns.pair == at].tolist()
    return (
        f"{box(columns.source)} -> {box(columns.target)} from device {columns.sender[at]} to {to} in round "
        f"{columns.round[at]}"
    )
