"""The transfers of a plan, made when asked for: lanes and rounds as regions of leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.sync.cells import Kind
from lockstep.sync.lanes import Cells, Lanes
from lockstep.sync.mapping import Target
from lockstep.sync.plan import Transfer, TransferTable
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

    def _table(self, target: Target, piece: int, member: Member) -> TransferTable:
        kind, part = self._kinds[member.kind], target.pieces[piece]
        rows = self._rows(kind, member)
        low, high = self._box(kind, rows)
        start = np.zeros((len(low), len(part.dims) - part.dims.count(None) + len(part.fixed)), np.int64)
        stop = np.zeros_like(start)
        step = [1] * start.shape[1]
        for dim, index in part.fixed:
            start[:, dim], stop[:, dim] = index, index + 1
        for at, (along, run) in enumerate(zip(part.dims, part.runs, strict=True)):
            if along is not None:
                start[:, along] = run.source + low[:, at] * run.source_step
                stop[:, along] = run.source + (high[:, at] - 1) * run.source_step + 1
                step[along] = run.source_step
        first = np.array([run.target for run in part.runs], np.int64)
        by = np.array([run.target_step for run in part.runs], np.int64)
        groups, receivers = np.unique(rows.receivers, return_inverse=True)
        size = kind.elements[rows.cell] // kind.rows[rows.cell] * (rows.high - rows.low)
        copied = rows.round < 0
        return TransferTable(
            target.path,
            piece,
            part.source,
            start,
            stop,
            tuple(step),
            first + low * by,
            first + (high - 1) * by + 1,
            tuple(by.tolist()),
            self._devices[rows.sender],
            receivers,
            tuple(self._receivers(int(number)) for number in groups),
            size * kind.wire_bytes,
            np.where(copied, 0, rows.round),
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
        straight, by = np.flatnonzero(relay < 0), np.flatnonzero(relay >= 0)
        copied, device = kind.local[:, 0], kind.local[:, 1]
        takes = np.r_[straight, by, by]
        rows = _Rows(
            np.r_[copied, cell[takes]],
            np.r_[np.zeros(len(copied), np.int64), low[takes]],
            np.r_[kind.rows[copied], high[takes]],
            np.r_[device, sender[straight], sender[by], relay[by]],
            np.r_[-1 - device, needers[straight], -1 - relay[by], needers[by] + len(self._sets) * (1 + relay[by])],
            np.r_[np.full(len(copied), -1), part[straight], part[by], part[by] + 1],
            np.r_[np.zeros(len(copied) + len(straight) + len(by), bool), np.ones(len(by), bool)],
        )
        order = np.argsort(rows.round, kind="stable")
        return _Rows(*(getattr(rows, name)[order] for name in _Rows.__dataclass_fields__))

    def _parts(self, kind: Kind, member: Member) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Lane, cell of the kind, rows within the cell, part: of every part of a lane that this member has rows of."""
        lanes = np.arange(self._first[member.kind], self._first[member.kind + 1])
        cell = self._cells.cell[self._lanes.cell[lanes]]
        low, high = self._lanes.start[lanes], self._lanes.stop[lanes]
        begins = member.place * kind.rows[cell]
        hit = np.flatnonzero((low < begins + kind.rows[cell]) & (high > begins))
        lanes, cell, low, high, begins = (x[hit] for x in (lanes, cell, low, high, begins))
        parts = max(1, self._schedule.parts)
        rows, phase = (high - low)[:, None], self._schedule.phase[lanes][:, None]
        edges = low[:, None] + self._schedule.bound(rows, phase, np.arange(parts + 1))
        edges = np.clip(edges - begins[:, None], 0, kind.rows[cell][:, None])
        which, part = np.nonzero(edges[:, 1:] > edges[:, :-1])
        return lanes[which], cell[which], edges[which, part], edges[which, part + 1], part

    @staticmethod
    def _box(kind: Kind, rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
        """[k, target dims] t where each transfer begins and ends."""
        at = np.unravel_index(rows.cell, [len(cuts.lengths) for cuts in kind.cuts]) if kind.cuts else ()
        edges = [np.array(cuts.edges, np.int64) for cuts in kind.cuts]
        shape = len(rows.cell), len(kind.cuts)
        low, high = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for dim, where in enumerate(at):
            low[:, dim], high[:, dim] = edges[dim][where], edges[dim][where + 1]
        if kind.cut_dim >= 0:
            high[:, kind.cut_dim] = low[:, kind.cut_dim] + rows.high
            low[:, kind.cut_dim] += rows.low
        return low, high


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
