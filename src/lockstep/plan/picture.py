"""What the page draws, as plain values: layouts, leaves with what feeds each of their shards, the links.

Everything is sized for a page of a few megabytes: shards by layout, not by leaf; leaves by class; links by blocks of
devices where there are many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.plan.folding import LeafClass
from lockstep.plan.words import cuts
from lockstep.sync.layout import Layout
from lockstep.sync.plan import LeafPlan, Placed, SyncPlan, TransferTable

MAX_FEEDS = 600  # of one leaf that are listed one by one; a leaf with more has a total per shard
MAX_SENDERS = 8  # named in a feed; the rest are counted
HEAT_SIDE = 64  # rows and columns of the heat map at most


@dataclass
class Layouts:
    """Layouts with a shape, each once: parts and edges per dim, and which shard every device holds."""

    listed: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[tuple[Layout, tuple[int, ...]], int] = field(default_factory=dict)

    def number(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Its place in `listed`."""
        key = layout, shape
        if key not in self.numbers:
            self.numbers[key] = len(self.listed)
            parts = layout.parts()
            cells = np.zeros(len(layout.mesh.devices), np.int64)
            for dim, count in enumerate(parts):
                cells = cells * count + layout.coordinates()[:, dim]
            self.listed.append(
                {
                    "cuts": cuts(layout),
                    "parts": parts,
                    "edges": layout.edges(shape),
                    "devices": layout.mesh.devices,
                    "cells": cells.tolist(),
                }
            )
        return self.numbers[key]


def picture_of(plan: SyncPlan, found: LeafClass, layouts: Layouts) -> dict[str, Any]:
    """One class, drawn as its first leaf.

    feeds: [target shard, source leaf, source shard, bytes over links, local bytes, relayed bytes, senders, how many,
    how many receivers, rounds, box in the target, box in the source], one per pair of shards; boxes are [start, stop]
    per dim and hold all that goes from the one to the other. totals, instead, where there are too many: [target shard,
    bytes over links, local bytes, source shards, rounds].
    """
    leaf = found.first
    tables = [] if leaf.in_place else list(plan.transfers.tables(leaf.path))
    pairs = [_pairs(plan, leaf, group) for group in _by_source(tables)]
    many = sum(len(pair.shards) for pair in pairs) > MAX_FEEDS
    feeds = [] if many else sorted((feed for pair in pairs for feed in pair.feeds()), key=lambda feed: feed[:3])
    return {
        "name": found.name,
        "path": leaf.path,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "operations": leaf.operations,
        "fate": found.fate,
        "bytes": leaf.bytes,
        "crossing": leaf.bytes_crossing,
        "all": found.bytes_crossing,
        "target": layouts.number(leaf.target_layout, leaf.shape),
        "sources": [
            {
                "path": path,
                "shape": plan.source[path].shape,
                "layout": layouts.number(plan.source[path].layout, plan.source[path].shape),
            }
            for path in leaf.sources
        ],
        "feeds": feeds,
        "totals": _totals(pairs) if many else [],
    }


@dataclass(frozen=True)
class _Pairs:
    """The messages of one source leaf of a leaf, by the pairs of shards between which they go.

    number: of the source leaf. shards [pairs, 2]: target shard, source shard. rows: the messages' columns, in the order
    of their pairs. ends [pairs]: where each pair's rows end. groups: receivers.
    """

    number: int
    shards: np.ndarray
    rows: dict[str, np.ndarray]
    ends: np.ndarray
    groups: list[tuple[int, ...]]

    def feeds(self) -> Iterator[list[Any]]:
        """One entry per pair, as `picture_of` says."""
        for at, (target, source) in enumerate(self.shards.tolist()):
            own = slice(self.ends[at - 1] if at else 0, self.ends[at])
            row = {name: column[own] for name, column in self.rows.items()}
            links = ~row["local"]
            rounds, size = row["round"][links], row["bytes"]
            senders = list(dict.fromkeys(row["sender"][links].tolist()))
            receivers = {device for group in set(row["group"][links].tolist()) for device in self.groups[group]}
            yield [
                target, self.number, source, int(size[links].sum()), int(size[row["local"]].sum()),
                int(size[links & row["relay"]].sum()), senders[:MAX_SENDERS], len(senders), len(receivers),
                [int(rounds.min()), int(rounds.max())] if len(rounds) else [],
                _hull(row["target_start"], row["target_stop"]), _hull(row["source_start"], row["source_stop"]),
            ]  # fmt: skip


def _by_source(tables: Sequence[TransferTable]) -> list[list[TransferTable]]:
    """Tables of one source leaf together: several pieces may lie between the same two shards."""
    grouped: dict[str, list[TransferTable]] = {}
    for table in tables:
        grouped.setdefault(table.source, []).append(table)
    return list(grouped.values())


def _pairs(plan: SyncPlan, leaf: LeafPlan, tables: list[TransferTable]) -> _Pairs:
    held = plan.source[tables[0].source]
    columns = [_columns(leaf, held, table) for table in tables]
    rows = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    offsets = np.cumsum([0, *(len(table.groups) for table in tables[:-1])])
    rows["group"] = rows["group"] + np.repeat(offsets, [len(table.sender) for table in tables])
    order = np.lexsort((rows["source_shard"], rows["target_shard"]))
    rows = {name: column[order] for name, column in rows.items()}
    both = np.stack([rows.pop("target_shard"), rows.pop("source_shard")], axis=1)
    last = np.append((both[1:] != both[:-1]).any(1), True)
    groups = [group for table in tables for group in table.groups]
    return _Pairs(leaf.sources.index(tables[0].source), both[last], rows, np.flatnonzero(last) + 1, groups)


def _columns(leaf: LeafPlan, held: Placed, table: TransferTable) -> dict[str, np.ndarray]:
    """A table's rows with the shards that they lie in and all their receivers' bytes. A row never spans two shards."""
    counts = np.array([len(group) for group in table.groups], np.int64)
    first = np.array([group[0] for group in table.groups], np.int64)
    return {
        "target_shard": _shard(leaf.target_layout, leaf.shape, table.target_start),
        "source_shard": _shard(held.layout, held.shape, table.source_start),
        "local": (counts[table.receivers] == 1) & (first[table.receivers] == table.sender),
        "bytes": table.bytes * counts[table.receivers],
        "round": table.round,
        "relay": table.relay,
        "sender": table.sender,
        "group": table.receivers,
        "target_start": table.target_start,
        "target_stop": table.target_stop,
        "source_start": table.source_start,
        "source_stop": table.source_stop,
    }


def _shard(layout: Layout, shape: tuple[int, ...], starts: np.ndarray) -> np.ndarray:
    """[k] the shard, row-major over the layout's parts, in which each of k boxes begins."""
    found = np.zeros(len(starts), np.int64)
    for dim, (size, parts) in enumerate(zip(shape, layout.parts(), strict=True)):
        found = found * parts + starts[:, dim] // max(1, -(-size // parts))
    return found


def _hull(starts: np.ndarray, stops: np.ndarray) -> list[list[int]]:
    """[start, stop] per dim of the smallest box around all."""
    return [list(span) for span in zip(starts.min(0).tolist(), stops.max(0).tolist(), strict=True)]


def _totals(pairs: list[_Pairs]) -> list[list[Any]]:
    """One entry per target shard, as `picture_of` says."""
    found: dict[int, list[Any]] = {}
    for pair in pairs:
        lengths = np.diff(pair.ends, prepend=0)
        shard = np.repeat(pair.shards[:, 0], lengths)
        links = ~pair.rows["local"]
        for target in np.unique(shard).tolist():
            own = shard == target
            size, rounds = pair.rows["bytes"][own], pair.rows["round"][own & links]
            entry = found.setdefault(target, [target, 0, 0, 0, []])
            entry[1] += int(size[links[own]].sum())
            entry[2] += int(size[~links[own]].sum())
            entry[3] += int((pair.shards[:, 0] == target).sum())
            if len(rounds):
                span = [int(rounds.min()), int(rounds.max())]
                entry[4] = [min(span[0], *entry[4][:1]), max(span[1], *entry[4][1:])] if entry[4] else span
    return [found[target] for target in sorted(found)]


@dataclass(frozen=True)
class Heat:
    """Bytes from row to column. rows, columns: devices of each; one per row unless there are many."""

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    bytes: np.ndarray


def heat_of(plan: SyncPlan, receivers: Sequence[int]) -> Heat:
    """The link loads, senders by receivers, summed over blocks of neighbours where there are more than `HEAT_SIDE`."""
    index = {device: at for at, device in enumerate(plan.devices)}
    senders = [device for device, sent in zip(plan.devices, plan.sent, strict=True) if sent]
    rows, columns = _blocks(senders or list(plan.devices)), _blocks(receivers)
    chosen = plan.links[np.ix_([index[d] for r in rows for d in r], [index[d] for c in columns for d in c])]
    sums = np.add.reduceat(chosen, np.cumsum([0, *(len(r) for r in rows[:-1])]), axis=0)
    sums = np.add.reduceat(sums, np.cumsum([0, *(len(c) for c in columns[:-1])]), axis=1)
    return Heat(rows, columns, sums)


def _blocks(devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    size = -(-len(devices) // HEAT_SIDE)
    return tuple(tuple(devices[at : at + size]) for at in range(0, len(devices), size))
