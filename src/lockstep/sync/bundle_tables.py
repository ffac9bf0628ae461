"""Whether a plan's tables are its bundles, row for row: what was proved of one is then true of the other.

Rows are made here from the definition in `plan.Bundle` by code of the certificate's own, in the order that tables have:
local copies, then by round; within a round, what goes straight, what goes to relays, what relays pass on, each lane by
lane. A table of anything else, or in another order, is not the bundle's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.sync.bundle_proof import Shape, first_rows
from lockstep.sync.mapping import Piece
from lockstep.sync.plan import PHASE_BITS, Bundle, TransferTable


class Rows:
    """The rows of the members of one bundle whose lanes carry every row once (`bundle_proof.shape_of`)."""

    def __init__(self, bundle: Bundle, shape: Shape) -> None:
        self._bundle, self._shape = bundle, shape
        self._numbers = {group: at for at, group in enumerate(shape.groups)}
        self._start, self._stop = bundle.start[shape.order], bundle.stop[shape.order]
        self._rows = bundle.rows[bundle.cell[shape.order]]
        self._boxes: tuple[object, tuple[np.ndarray, ...]] = (None, ())
        by = np.flatnonzero(bundle.relay >= 0)
        count = len(bundle.cell)
        self._to_relay, self._passed = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._to_relay[by] = [self._number((device,)) for device in bundle.relay[by].tolist()]
        pairs, inverse = np.unique(np.stack([shape.group[by], bundle.relay[by]], axis=1), axis=0, return_inverse=True)
        others = [self._number(tuple(d for d in shape.groups[group] if d != relay)) for group, relay in pairs.tolist()]
        self._passed[by] = np.array(others, np.int64)[inverse.reshape(-1)] if len(by) else 0
        self._selves = np.array([self._number((device,)) for device in bundle.local[:, 1].tolist()], np.int64)

    def _number(self, group: tuple[int, ...]) -> int:
        return self._numbers.setdefault(group, len(self._numbers))

    def differ(self, piece: Piece, member: int, tables: Sequence[TransferTable]) -> str:
        """How the tables of one piece, which is that member, differ from its rows; empty if they do not."""
        rank = len(piece.fixed) + sum(along is not None for along in piece.dims)
        for table in tables:
            shapes = {table.source_start.shape[1:], table.source_stop.shape[1:], (len(table.source_step),)}
            goals = {table.target_start.shape[1:], table.target_stop.shape[1:], (len(table.target_step),)}
            if shapes != {(rank,)} or goals != {(len(piece.dims),)} or table.source != piece.source:
                return "the regions are not of its leaves"
            if len(table.receivers) and not 0 <= table.receivers.min() <= table.receivers.max() < len(table.groups):
                return "receivers are not listed"
        expected = self._expected(piece, member)
        count = len(expected["sender"])
        if sum(len(table.sender) for table in tables) != count:
            return f"it has {sum(len(table.sender) for table in tables)} rows; expected {count}"
        found = {name: [getattr(table, name) for table in tables] for name in expected}
        found["receivers"] = [self._receivers(table) for table in tables]
        for name in ("source_step", "target_step"):
            if any(getattr(table, name) != expected[name] for table in tables):
                return f"{name} is not {expected[name]}"
            del expected[name]
        for name, wanted in expected.items():
            if count and not np.array_equal(
                found[name][0] if len(tables) == 1 else np.concatenate(found[name]), wanted
            ):
                return f"{name} is not as the bundle has it"
        return ""

    def _receivers(self, table: TransferTable) -> np.ndarray:
        numbers = np.array([self._numbers.get(tuple(group), -1) for group in table.groups], np.int64)
        return numbers[table.receivers] if len(table.receivers) else np.zeros(0, np.int64)

    def _expected(self, piece: Piece, member: int) -> dict[str, np.ndarray | tuple[int, ...]]:
        """The columns of a `TransferTable`, receivers as numbers."""
        bundle = self._bundle
        lane, low, high, number = self._stretches(member)
        sender, group = bundle.sender[lane], self._shape.group[lane]
        relay = np.zeros(len(lane), bool)
        by = np.flatnonzero(bundle.relay[lane] >= 0)
        if len(by):
            takes = np.concatenate([np.flatnonzero(bundle.relay[lane] < 0), by, by])
            straight, passed = len(lane) - len(by), len(lane)
            lane, low, high, number = lane[takes], low[takes], high[takes], number[takes]
            sender, group, relay = sender[takes], group[takes], np.arange(len(takes)) >= passed
            group[straight:passed] = self._to_relay[lane[straight:passed]]
            group[passed:] = self._passed[lane[passed:]]
            sender[passed:] = bundle.relay[lane[passed:]]
            number = number + relay
        order = np.argsort(number.astype(np.uint16) if bundle.parts < 1 << 16 else number, kind="stable")
        copied, device = bundle.local.T
        cell = np.r_[copied, bundle.cell[lane[order]]]
        low = np.r_[np.zeros_like(copied), low[order]]
        high = np.r_[bundle.rows[copied], high[order]]
        return self._columns(
            piece,
            cell,
            low,
            high,
            sender=np.r_[device, sender[order]],
            receivers=np.r_[self._selves, group[order]],
            round=np.r_[np.zeros_like(copied), number[order]],
            relay=np.r_[np.zeros(len(copied), bool), relay[order]],
        )

    def _columns(
        self, piece: Piece, cell: np.ndarray, first: np.ndarray, end: np.ndarray, **columns: np.ndarray
    ) -> dict[str, np.ndarray | tuple[int, ...]]:
        bundle, dim = self._bundle, self._bundle.cut_dim
        start, stop, goal, until = (box[cell] for box in self._boxes_of(piece))
        if dim >= 0:
            run, along, t = piece.runs[dim], piece.dims[dim], bundle.low[cell, dim]
            goal[:, dim] = run.target + (t + first) * run.target_step
            until[:, dim] = run.target + (t + end - 1) * run.target_step + 1
            if along is not None:
                start[:, along] = run.source + (t + first) * run.source_step
                stop[:, along] = run.source + (t + end - 1) * run.source_step + 1
        step = dict.fromkeys(range(start.shape[1]), 1)
        step |= {along: run.source_step for along, run in zip(piece.dims, piece.runs, strict=True) if along is not None}
        return {
            "source_start": start,
            "source_stop": stop,
            "source_step": tuple(step.values()),
            "target_start": goal,
            "target_stop": until,
            "target_step": tuple(run.target_step for run in piece.runs),
            "bytes": self._shape.row_elements[cell] * (end - first) * bundle.wire_bytes,
        } | columns

    def _boxes_of(self, piece: Piece) -> tuple[np.ndarray, ...]:
        """Where whole cells begin and end in the source and in the target, [cells, dims] each; of pieces that run alike
        found once."""
        key = piece.dims, piece.runs, piece.fixed
        if self._boxes[0] != key:
            low, high = self._bundle.low, self._bundle.high
            rank = len(piece.fixed) + sum(along is not None for along in piece.dims)
            start, stop = (np.zeros((len(low), rank), np.int64) for _ in range(2))
            goal, until = np.empty_like(low), np.empty_like(low)
            for dim, index in piece.fixed:
                start[:, dim], stop[:, dim] = index, index + 1
            for at, (along, run) in enumerate(zip(piece.dims, piece.runs, strict=True)):
                goal[:, at] = run.target + low[:, at] * run.target_step
                until[:, at] = run.target + (high[:, at] - 1) * run.target_step + 1
                if along is not None:
                    start[:, along] = run.source + low[:, at] * run.source_step
                    stop[:, along] = run.source + (high[:, at] - 1) * run.source_step + 1
            self._boxes = key, (start, stop, goal, until)
        return self._boxes[1]

    def _stretches(self, member: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rows of one member that leave together, by cell and row: their lane, the first and the last + 1 within their
        cell, their round."""
        bundle = self._bundle
        ours = member * self._rows
        low, high = np.maximum(self._start, ours), np.minimum(self._stop, ours + self._rows)
        hit = np.flatnonzero(low < high)
        lane, begin = self._shape.order[hit], self._start[hit]
        low, high, ours = low[hit] - begin, high[hit] - begin, ours[hit] - begin  # from the lane's first row on
        rows, phase = self._stop[hit] - begin, bundle.phase[lane]
        number, last = (((row << PHASE_BITS) + phase) * bundle.parts // (rows << PHASE_BITS) for row in (low, high - 1))
        if (last > number).any():
            each = last - number + 1
            again = np.repeat(np.arange(len(lane)), each)
            nth = np.arange(len(again)) - np.repeat(np.cumsum(each) - each, each)
            number, rows, phase = number[again] + nth, rows[again], phase[again]
            low = np.maximum(low[again], first_rows(rows, phase, bundle.parts, number))
            high = np.minimum(high[again], first_rows(rows, phase, bundle.parts, number + 1))
            some = np.flatnonzero(low < high)  # in some rounds short lanes send nothing
            again = again[some]
            lane, low, high, number, ours = lane[again], low[some], high[some], number[some], ours[again]
        return lane, low - ours, high - ours, number
