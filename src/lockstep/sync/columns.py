"""All transfers of some leaves as columns, for the certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lockstep.sync.mapping import Target
from lockstep.sync.plan import TransferTable
from lockstep.sync.regions import rows_of

Fail = Callable[[str, str], None]
"""(check, what is wrong)."""


@dataclass(frozen=True)
class Columns:
    """leaf [n]: number among `paths`; piece [n]: leaf * pieces per leaf + piece number. source [n, most source dims, 3]
    and target [n, dims, 3]: regions. group [n]: rows of `size` and of
    `member` [groups, destination devices]; `strangers` [groups]: receivers that are no devices of the destination, or
    listed twice. local [n]: whether the sender is among the receivers."""

    leaf: np.ndarray
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
    paths: list[str]

    def show(self, at: int) -> str:
        """One transfer in words, after its leaf's name."""

        def box(regions: np.ndarray) -> str:
            shown = [f"{a}:{b}" if s == 1 else f"{a}:{b}:{s}" for a, b, s in regions[at].tolist()]
            return f"[{', '.join(shown)}]"

        to = [device for device, among in zip(self.devices, self.member[self.group[at]], strict=True) if among]
        path, sender, number = self.paths[self.leaf[at]], self.sender[at], self.round[at]
        return f"{path}: {box(self.source)} -> {box(self.target)} from device {sender} to {to} in round {number}"


def columns(
    targets: list[Target], tables: list[list[TransferTable]], ranks: list[int], devices: tuple[int, ...], fail: Fail
) -> Columns | None:
    """The tables of leaves that have pieces alike as one; None, and `fail` told, if one is no table of its leaf.

    ranks: dims of every piece's source, of one leaf. devices: of the destination.
    """
    most, dims = max(ranks, default=0), len(targets[0].shape)
    none = np.zeros(0, np.int64)
    empty = np.zeros((0, most, 3), np.int64), np.zeros((0, dims, 3), np.int64)
    made: list[tuple[np.ndarray, ...]] = [(none, none, *empty, none, none, none, none.astype(bool), none)]
    groups: dict[tuple[int, ...], int] = {}
    for leaf, (target, ours) in enumerate(zip(targets, tables, strict=True)):
        for table in ours:
            if wrong := _malformed(target, table, ranks):
                fail("pieces", f"{target.path}: {wrong}")
                return None
            count, rank = len(table.sender), len(table.source_step)
            source = np.zeros((count, most, 3), np.int64)
            source[..., 2] = 1  # beyond the rank: empty
            source[:, :rank] = _regions(table.source_start, table.source_stop, table.source_step)
            goal = _regions(table.target_start, table.target_stop, table.target_step)
            number = np.array([groups.setdefault(tuple(group), len(groups)) for group in table.groups], np.int64)
            which, piece = np.full(count, leaf), np.full(count, leaf * len(ranks) + table.piece)
            group = number[table.receivers] if count else none
            made.append((which, piece, source, goal, table.sender, table.bytes, table.round, table.relay, group))
    which, piece, source, goal, sender, size, number, relay, group = (
        np.concatenate(column) for column in zip(*made, strict=True)
    )
    each = np.array([len(among) for among in groups], np.int64)
    row = rows_of(devices, np.array([device for among in groups for device in among], np.int64))
    of = np.repeat(np.arange(len(groups)), each)
    member = np.zeros((len(groups), len(devices)), bool)
    member[of[row >= 0], row[row >= 0]] = True
    at = rows_of(devices, sender)
    local = (at >= 0) & member[group, at] if len(groups) else none.astype(bool)
    paths = [target.path for target in targets]
    strangers = each - member.sum(axis=1)
    return Columns(
        which, piece, source, goal, sender, size, number, relay, group, each, member, strangers, local, devices, paths
    )


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
