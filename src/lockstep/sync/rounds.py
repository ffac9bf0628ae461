"""When: every lane in n equal parts, so that every round carries about 1/n of what each device sends and receives.

Part i of a lane is sent in round i; what goes by relay is passed on in round i + 1, when it has arrived. Row j of a
lane of L rows is in part floor((j + phase) n / L): phases in [0, 1), spread evenly over the lanes (multiples of the
golden ratio), keep short lanes from all choosing the same round. n is the least that keeps every device within the
staging budget in every round; with relays more, while filling and draining the pipeline costs more than further rounds
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import SyncError
from lockstep.sync.cells import Kind
from lockstep.sync.lanes import Cells, Lanes
from lockstep.sync.plan import PHASE_BITS, LinkModel

_GOLDEN = 40503  # 2^16 / golden ratio, odd
MOST_PIPELINED = 32  # parts that a relayed plan is cut into at most, unless the budget wants more
PATIENCE = 32  # times the parts that would do if rows could be cut; more are not tried


@dataclass(frozen=True)
class Schedule:
    """parts: n. rounds: n, one more with relays. phase: [lanes], in 2^-PHASE_BITS. sent, received: [rounds, devices]
    bytes."""

    parts: int
    rounds: int
    phase: np.ndarray
    sent: np.ndarray
    received: np.ndarray

    def bound(self, rows: np.ndarray, phase: np.ndarray, part: np.ndarray) -> np.ndarray:
        """First row of `part` (0..parts) of lanes with so many rows, counted from the lane's first."""
        return _bound(rows, phase, part, self.parts)

    def part(self, rows: np.ndarray, phase: np.ndarray, row: np.ndarray) -> np.ndarray:
        """The part that a row is in, of lanes with so many rows."""
        return ((row << PHASE_BITS) + phase) * self.parts // (rows << PHASE_BITS)

    @property
    def peak_bytes(self) -> int:
        return int(max(self.sent.max(initial=0), self.received.max(initial=0)))

    def seconds(self, link: LinkModel) -> float:
        """Of all rounds, each as long as its busiest link end takes, or what all devices together can move."""
        busiest = np.maximum(self.sent, self.received).max(axis=1, initial=0) * 8e-9 / link.link_gbps
        if link.bisection_gbps is not None:
            busiest = np.maximum(busiest, self.sent.sum(axis=1) * 8e-9 / link.bisection_gbps)
        return float(busiest.sum()) + self.rounds * link.latency_s


def _bound(rows: np.ndarray, phase: np.ndarray, part: int | np.ndarray, parts: int) -> np.ndarray:
    # ceil(part * rows / parts - phase), in integers.
    return -((phase * parts - ((part * rows) << PHASE_BITS)) // (parts << PHASE_BITS))


def schedule(kinds: Sequence[Kind], cells: Cells, lanes: Lanes, staging_bytes: int, link: LinkModel) -> Schedule:
    """The rounds. Raises SyncError, naming a leaf, if its rows do not fit the budget."""
    phase = np.arange(len(lanes.cell), dtype=np.int64) * _GOLDEN % (1 << PHASE_BITS)
    if not len(lanes.cell):
        nothing = np.zeros((0, cells.groups.devices), np.int64)
        return Schedule(0, 0, phase, nothing, nothing)
    relayed = bool((lanes.relay >= 0).any())
    copies = cells.copies[lanes.cell]
    row = cells.row_bytes[lanes.cell] * np.where(lanes.relay < 0, copies, np.maximum(copies - 1, 1))
    at = int(row.argmax())
    widest, leaf = int(row[at]), kinds[cells.kind[lanes.cell[at]]].members[0][0]
    if widest > staging_bytes:
        raise SyncError(
            f"sync: one row of {leaf}, for all that need it, is {widest} bytes on its sender; the staging budget is "
            f"{staging_bytes} bytes a round. Give at least {4 * widest}"
        )
    whole = _timed(cells, lanes, phase, 1, relayed)
    load = max(int(whole.sent.sum(axis=0).max()), int(whole.received.sum(axis=0).max()))
    parts = -(-load // staging_bytes)
    most = PATIENCE * parts + PATIENCE
    found = _timed(cells, lanes, phase, parts, relayed)
    while found.peak_bytes > staging_bytes and parts < most:
        parts += max(1, parts // 16)
        found = _timed(cells, lanes, phase, parts, relayed)
    if found.peak_bytes > staging_bytes:
        raise SyncError(
            f"sync: {parts} rounds do not keep every device within a staging budget of {staging_bytes} bytes, because "
            f"rows of {leaf} have {widest}. Give at least {4 * widest}"
        )
    while relayed and 2 * found.parts <= MOST_PIPELINED:
        finer = _timed(cells, lanes, phase, 2 * found.parts, relayed)
        if finer.peak_bytes > staging_bytes or finer.seconds(link) >= found.seconds(link):
            break
        found = finer
    return found


def _timed(cells: Cells, lanes: Lanes, phase: np.ndarray, parts: int, relayed: bool) -> Schedule:
    """Bytes per round and device with so many parts."""
    groups = cells.groups
    rounds = parts + relayed
    sent, received = (np.zeros((rounds, groups.devices), np.int64) for _ in range(2))
    rows = lanes.stop - lanes.start
    copies, row_bytes, needers = (x[lanes.cell] for x in (cells.copies, cells.row_bytes, cells.needers))
    by = np.flatnonzero(lanes.relay >= 0)
    straight = np.flatnonzero(lanes.relay < 0)
    done = np.zeros(len(rows), np.int64)
    for part in range(parts):
        upto = _bound(rows, phase, part + 1, parts)
        size = (upto - done) * row_bytes
        done = upto
        sent[part] += _sums(lanes.sender, np.where(lanes.relay < 0, size * copies, size), groups.devices)
        received[part] += groups.spread(_sums(needers[straight], size[straight], len(groups.sizes))).astype(np.int64)
        if len(by):
            relay, size = lanes.relay[by], size[by]
            arrived = _sums(relay, size, groups.devices)
            received[part] += arrived
            sent[part + 1] += _sums(relay, size * (copies[by] - 1), groups.devices)
            received[part + 1] += groups.spread(_sums(needers[by], size, len(groups.sizes))).astype(np.int64) - arrived
    return Schedule(parts, rounds, phase, sent, received)


def _sums(where: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(where, values, count).astype(np.int64)
