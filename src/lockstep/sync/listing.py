"""The transfers of a plan, made when asked for: lanes and rounds as regions of leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.sync.cells import Kind
from lockstep.sync.lanes import Cells, Lanes
from lockstep.sync.mapping import Piece, Target
from lockstep.sync.plan import Bundle, Transfer, TransferTable
from lockstep.sync.rounds import Schedule


@dataclass(frozen=True)
class Member:
    """One piece as a member of its kind: number of the kind, place among its members."""

    kind: int
    place: int


@dataclass(frozen=True)
class _Rows:
    """Rows of cells of one kind, [k] columns. cell: of the kind; low, high: within the cell, along its cut dim."""

    cell: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sender: np.ndarray
    receivers: np.ndarray
    round: np.ndarray
    relay: np.ndarray


class Listing:
    """`plan.Transfers`. members: target path -> one `Member` per piece, for the targets that are not in place."""

    def __init__(
        self,
        targets: Mapping[str, Target],
        members: Mapping[str, tuple[Member, ...]],
        kinds: list[Kind],
        cells: Cells,
        lanes: Lanes,
        schedule: Schedule,
        devices: tuple[int, ...],
        sets: list[np.ndarray],
    ) -> None:
        self._targets, self._members, self._kinds = targets, members, kinds
        self._cells, self._lanes, self._schedule = cells, lanes, schedule
        self._devices = np.array(devices, np.int64)
        self._sets = sets
        self._first = np.searchsorted(cells.kind[lanes.cell], np.arange(len(kinds) + 1))

    def __call__(self, target: str | None = None) -> Iterator[Transfer]:
        for table in self.tables(target):
            yield from _rows_of(table)

    def tables(self, target: str | None = None) -> Iterator[TransferTable]:
        """Raises KeyError for a target that the plan does not have."""
        for path in self._targets if target is None else (self._targets[target].path,):
            for piece, member in enumerate(self._members.get(path, ())):
                table = self._table(self._targets[path], piece, member)
                if len(table.bytes):
                    yield table

    def bundles(self) -> Iterator[Bundle]:
        for number, kind in enumerate(self._kinds):
            lanes = slice(self._first[number], self._first[number + 1])
            cell, relay = self._lanes.cell[lanes], self._lanes.relay[lanes]
            used, receivers = _distinct(self._cells.needers[cell])
            yield Bundle(
                tuple(kind.members),
                *kind.boxes,
                kind.cut_dim,
                kind.rows,
                self._cells.cell[cell],
                self._lanes.start[lanes],
                self._lanes.stop[lanes],
                self._devices[self._lanes.sender[lanes]],
                np.where(relay < 0, -1, self._devices[relay]),
                receivers,
                tuple(self._receivers(code) for code in used.tolist()),
                self._schedule.phase[lanes],
                self._schedule.parts,
                np.stack([kind.local[:, 0], self._devices[kind.local[:, 1]]], axis=1),
                kind.wire_bytes,
            )

    def _table(self, target: Target, piece: int, member: Member) -> TransferTable:
        kind, part = self._kinds[member.kind], target.pieces[piece]
        rows = self._rows(kind, member)
        low, high = kind.boxes[0][rows.cell], kind.boxes[1][rows.cell]
        if kind.cut_dim >= 0:
            high[:, kind.cut_dim] = low[:, kind.cut_dim] + rows.high
            low[:, kind.cut_dim] += rows.low
        first, by = (
            np.array([getattr(run, name) for run in part.runs], np.int64) for name in ("target", "target_step")
        )
        start, stop, step = _source_columns(part, low, high)
        used, receivers = _distinct(rows.receivers)
        return TransferTable(
            target.path,
            piece,
            part.source,
            start,
            stop,
            step,
            first + low * by,
            first + (high - 1) * by + 1,
            tuple(by.tolist()),
            self._devices[rows.sender],
            receivers,
            tuple(self._receivers(code) for code in used.tolist()),
            kind.row_bytes[rows.cell] * (rows.high - rows.low),
            np.maximum(rows.round, 0),
            rows.relay,
        )

    def _receivers(self, code: int) -> tuple[int, ...]:
        """Device numbers of a set (code: its number), of a set without one member (its number + sets * (1 + member)),
        or of one device (-1 - device)."""
        if code < 0:
            return (int(self._devices[-1 - code]),)
        number, without = code % len(self._sets), code // len(self._sets) - 1
        members = self._sets[number]
        return tuple(self._devices[members[members != without]].tolist())

    def _rows(self, kind: Kind, member: Member) -> _Rows:
        """Everything that one member's lanes and local copies come down to, by increasing round."""
        picked, cell, low, high, part = self._parts(kind, member)
        needers = self._cells.needers[self._lanes.cell[picked]]
        sender, relay = self._lanes.sender[picked], self._lanes.relay[picked]
        by = np.flatnonzero(relay >= 0)
        if len(by):
            straight = np.flatnonzero(relay < 0)
            takes = np.concatenate([straight, by, by])
            passed = np.arange(len(takes)) >= len(straight) + len(by)
            without = needers[by] + len(self._sets) * (1 + relay[by])
            needers = np.concatenate([needers[straight], -1 - relay[by], without])
            sender = np.concatenate([sender[straight], sender[by], relay[by]])
            cell, low, high, part = cell[takes], low[takes], high[takes], part[takes] + passed
        else:
            passed = np.zeros(len(cell), bool)
        copied, device = kind.local[:, 0], kind.local[:, 1]
        order = np.argsort(part, kind="stable")
        # Local copies come first, as if in a round -1, so that they can be told apart.
        return _Rows(
            np.concatenate([copied, cell[order]]),
            np.concatenate([np.zeros_like(copied), low[order]]),
            np.concatenate([kind.rows[copied], high[order]]),
            np.concatenate([device, sender[order]]),
            np.concatenate([-1 - device, needers[order]]),
            np.concatenate([np.full_like(copied, -1), part[order]]),
            np.concatenate([np.zeros(len(copied), bool), passed[order]]),
        )

    def _parts(self, kind: Kind, member: Member) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Lane, cell of the kind, rows within the cell, part: of every part of a lane that this member has rows of."""
        lanes = slice(self._first[member.kind], self._first[member.kind + 1])
        cell = self._cells.cell[self._lanes.cell[lanes]]
        begin, end = self._lanes.start[lanes], self._lanes.stop[lanes]
        first = member.place * kind.rows[cell]
        low, high = np.maximum(begin, first), np.minimum(end, first + kind.rows[cell])
        hit = np.flatnonzero(low < high)
        cell, begin, end, first, low, high = (x[hit] for x in (cell, begin, end, first, low, high))
        rows, phase = end - begin, self._schedule.phase[lanes][hit]
        part = self._schedule.part(rows, phase, low - begin)
        more = self._schedule.part(rows, phase, high - 1 - begin) - part
        if more.any():
            again = np.repeat(np.arange(len(hit)), more + 1)
            nth = np.arange(len(again)) - np.repeat(np.cumsum(more + 1) - more - 1, more + 1)
            hit, cell, begin, first, low, high, rows, phase, part = (
                x[again] for x in (hit, cell, begin, first, low, high, rows, phase, part)
            )
            part = part + nth
            low = np.maximum(low, begin + self._schedule.bound(rows, phase, part))
            high = np.minimum(high, begin + self._schedule.bound(rows, phase, part + 1))
            kept = np.flatnonzero(low < high)  # short lanes have nothing in some rounds
            hit, cell, first, low, high, part = (x[kept] for x in (hit, cell, first, low, high, part))
        return lanes.start + hit, cell, low - first, high - first, part


def _source_columns(piece: Piece, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Start, stop and step, per source dim, of what lies at t = low..high - 1 of a piece."""
    dims = len(piece.dims) - piece.dims.count(None) + len(piece.fixed)
    start, stop, step = np.zeros((len(low), dims), np.int64), np.zeros((len(low), dims), np.int64), [1] * dims
    for dim, index in piece.fixed:
        start[:, dim], stop[:, dim] = index, index + 1
    for at, (along, run) in enumerate(zip(piece.dims, piece.runs, strict=True)):
        if along is not None:
            start[:, along] = run.source + low[:, at] * run.source_step
            stop[:, along] = run.source + (high[:, at] - 1) * run.source_step + 1
            step[along] = run.source_step
    return start, stop, tuple(step)


def _distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As np.unique with inverse, in a table where codes span little."""
    if not len(codes):
        return codes, codes
    low, span = int(codes.min()), int(codes.max() - codes.min()) + 1
    if span > 4 * len(codes) + 1024:
        return np.unique(codes, return_inverse=True)
    seen = np.zeros(span, bool)
    seen[codes - low] = True
    return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[codes - low]


def _rows_of(table: TransferTable) -> Iterator[Transfer]:
    """Every row of a table as a value of its own."""
    columns = (
        table.source_start,
        table.source_stop,
        table.target_start,
        table.target_stop,
        table.sender,
        table.receivers,
        table.bytes,
        table.round,
        table.relay,
    )
    for a, b, c, d, sender, receivers, size, number, relay in zip(*(x.tolist() for x in columns), strict=True):
        yield Transfer(
            table.target,
            table.piece,
            table.source,
            tuple(zip(a, b, table.source_step, strict=True)),
            tuple(zip(c, d, table.target_step, strict=True)),
            sender,
            table.groups[receivers],
            size,
            number,
            relay,
        )
