"""All transfers of one leaf as columns, for the certificate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.sync.mapping import Target
from lockstep.sync.plan import TransferTable
from lockstep.sync.regions import rows_of


@dataclass(frozen=True)
class Columns:
    """source [n, most source dims, 3] and target [n, dims, 3]: regions. group [n]: rows of `size` and of
    `member` [groups, destination devices]; `strangers` [groups]: receivers that are no devices of the destination, or
    listed twice. local [n]: whether the sender is among the receivers."""

    piece: np.ndarray
    source: np.ndarray
    target: np.ndarray
    sender: np.ndarray
    bytes: np.ndarray
    round: np.ndarray
    relay: np.ndarray
    group: np.ndarray
    size: np.ndarray
    member: np.ndarray
    strangers: np.ndarray
    local: np.ndarray
    devices: tuple[int, ...]

    def show(self, at: int) -> str:
        """One transfer in words."""

        def box(regions: np.ndarray) -> str:
            shown = [f"{a}:{b}" if s == 1 else f"{a}:{b}:{s}" for a, b, s in regions[at].tolist()]
            return f"[{', '.join(shown)}]"

        to = [device for device, among in zip(self.devices, self.member[self.group[at]], strict=True) if among]
        return (
            f"{box(self.source)} -> {box(self.target)} from device {self.sender[at]} to {to} in round {self.round[at]}"
        )


def columns(
    target: Target, tables: list[TransferTable], ranks: list[int], devices: tuple[int, ...]
) -> tuple[Columns | None, str]:
    """The tables as one, or what makes one of them no table of this leaf. ranks: dims of every piece's source.
    devices: of the destination."""
    most = max(ranks, default=0)
    made: list[tuple[np.ndarray, ...]] = []
    groups: dict[tuple[int, ...], int] = {}
    for table in tables:
        if wrong := _malformed(target, table, ranks):
            return None, f"{target.path}: {wrong}"
        count, rank = len(table.sender), len(table.source_step)
        source = np.zeros((count, most, 3), np.int64)
        source[..., 2] = 1  # beyond the rank: empty
        source[:, :rank] = _regions(table.source_start, table.source_stop, table.source_step)
        goal = _regions(table.target_start, table.target_stop, table.target_step)
        number = np.array([groups.setdefault(tuple(group), len(groups)) for group in table.groups], np.int64)
        piece = np.full(count, table.piece)
        group = number[table.receivers] if count else np.zeros(0, np.int64)
        made.append((piece, source, goal, table.sender, table.bytes, table.round, table.relay, group))
    if not made:
        none = np.zeros(0, np.int64)
        source, goal = np.zeros((0, most, 3), np.int64), np.zeros((0, len(target.shape), 3), np.int64)
        made.append((none, source, goal, none, none, none, none.astype(bool), none))
    joined = [np.concatenate(column) for column in zip(*made, strict=True)]
    size = np.array([len(group) for group in groups], np.int64)
    flat = np.array([device for group in groups for device in group], np.int64)
    row, of = rows_of(devices, flat), np.repeat(np.arange(len(groups)), size)
    member = np.zeros((len(groups), len(devices)), bool)
    member[of[row >= 0], row[row >= 0]] = True
    piece, source, goal, sender, bytes_, number, relay, group = joined
    at = rows_of(devices, sender)
    local = (at >= 0) & member[group, at] if len(groups) else np.zeros(0, bool)
    strangers = size - member.sum(axis=1)
    return Columns(
        piece, source, goal, sender, bytes_, number, relay, group, size, member, strangers, local, devices
    ), ""


def _malformed(target: Target, table: TransferTable, ranks: list[int]) -> str:
    known = 0 <= table.piece < len(target.pieces) and table.target == target.path
    if not known or table.source != target.pieces[table.piece].source:
        return f"piece {table.piece} of {table.target} from {table.source} is not in the map"
    count, rank, dims = len(table.sender), len(table.source_step), len(target.shape)
    fits = table.source_start.shape == table.source_stop.shape == (count, rank) and rank == ranks[table.piece]
    fits &= table.target_start.shape == table.target_stop.shape == (count, dims) and len(table.target_step) == dims
    fits &= all(len(column) == count for column in (table.receivers, table.bytes, table.round, table.relay))
    if not fits:
        return f"the columns of piece {table.piece} have not the shapes of its leaves"
    if min((*table.source_step, *table.target_step), default=1) < 1:
        return f"piece {table.piece} moves in steps {table.source_step} and {table.target_step}"
    if count and not 0 <= table.receivers.min() <= table.receivers.max() < len(table.groups):
        return f"piece {table.piece} has receivers that are not listed"
    return ""


def _regions(start: np.ndarray, stop: np.ndarray, step: tuple[int, ...]) -> np.ndarray:
    return np.stack([start, stop, np.broadcast_to(np.array(step, np.int64), start.shape)], axis=-1)
