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
    feeds = [feed for table in _by_source(tables) for feed in _feeds(plan, leaf, table)]
    many = len(feeds) > MAX_FEEDS
    return {
        "name": found.name,
        "path": leaf.path,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "operations": leaf.operations,
        "fate": found.fate,
        "bytes": leaf.bytes,
        "crossing": leaf.bytes_crossing,
        "target": layouts.number(leaf.target_layout, leaf.shape),
        "sources": [
            {
                "path": path,
                "shape": plan.source[path].shape,
                "layout": layouts.number(plan.source[path].layout, plan.source[path].shape),
            }
            for path in leaf.sources
        ],
        "feeds": [] if many else [feed.listed() for feed in sorted(feeds, key=lambda feed: feed.key)],
        "totals": _totals(feeds) if many else [],
    }


@dataclass(frozen=True)
class _Feed:
    """All messages from one shard of a source leaf to one shard of the destination leaf. key: target shard, source
    leaf, source shard. rounds: first and last of those that cross, or none."""

    key: tuple[int, int, int]
    crossing: int
    local: int
    relayed: int
    senders: list[int]
    receivers: int
    rounds: list[int]
    target: list[list[int]]
    source: list[list[int]]

    def listed(self) -> list[Any]:
        return [
            *self.key, self.crossing, self.local, self.relayed, self.senders[:MAX_SENDERS], len(self.senders),
            self.receivers, self.rounds, self.target, self.source,
        ]  # fmt: skip


def _by_source(tables: Sequence[TransferTable]) -> list[list[TransferTable]]:
    """Tables of one source leaf together: several pieces may lie between the same two shards."""
    grouped: dict[str, list[TransferTable]] = {}
    for table in tables:
        grouped.setdefault(table.source, []).append(table)
    return list(grouped.values())


def _feeds(plan: SyncPlan, leaf: LeafPlan, tables: list[TransferTable]) -> Iterator[_Feed]:
    """The messages of one source leaf, gathered by pairs of shards."""
    held = plan.source[tables[0].source]
    columns = [_columns(leaf, held, table) for table in tables]
    rows = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    groups = [group for table in tables for group in table.groups]
    offsets = np.cumsum([0, *(len(table.groups) for table in tables[:-1])])
    rows["group"] = rows["group"] + np.repeat(offsets, [len(table.sender) for table in tables])
    keys, first, which = np.unique(
        np.stack([rows["target_shard"], rows["source_shard"]]), axis=1, return_index=True, return_inverse=True
    )
    order = np.argsort(which.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(which.reshape(-1), minlength=len(first)))
    number = leaf.sources.index(tables[0].source)
    for at, (target, source) in enumerate(keys.T.tolist()):
        own = order[ends[at - 1] if at else 0 : ends[at]]
        links = own[~rows["local"][own]]
        size, rounds = rows["bytes"], rows["round"][links]
        receivers = {device for group in set(rows["group"][links].tolist()) for device in groups[group]}
        yield _Feed(
            (target, number, source),
            crossing=int(size[links].sum()),
            local=int(size[own].sum() - size[links].sum()),
            relayed=int(size[links][rows["relay"][links]].sum()),
            senders=list(dict.fromkeys(rows["sender"][links].tolist())),
            receivers=len(receivers),
            rounds=[int(rounds.min()), int(rounds.max())] if len(links) else [],
            target=_hull(rows["target_start"][own], rows["target_stop"][own]),
            source=_hull(rows["source_start"][own], rows["source_stop"][own]),
        )


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


def _totals(feeds: list[_Feed]) -> list[list[Any]]:
    by_target: dict[int, list[_Feed]] = {}
    for feed in feeds:
        by_target.setdefault(feed.key[0], []).append(feed)
    return [
        [
            target,
            sum(feed.crossing for feed in found),
            sum(feed.local for feed in found),
            len({feed.key[1:] for feed in found}),
            [min(spans)[0], max(span[1] for span in spans)] if (spans := [f.rounds for f in found if f.rounds]) else [],
        ]
        for target, found in sorted(by_target.items())
    ]


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
