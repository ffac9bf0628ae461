"""A plan's transfers as index arithmetic: which part of which shard becomes which part of which buffer.

Pure; `local` carries it out, `local_host` and `local_device` are its two ways of doing so. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType

import numpy as np

from lockstep.errors import SyncError
from lockstep.sync.layout import Box
from lockstep.sync.mapping import Piece
from lockstep.sync.plan import Placed, Region, SyncPlan, Transfer

Shape = tuple[int, ...]
Index = tuple[slice | EllipsisType, ...]
Span = tuple[tuple[int, int, int], ...]
"""A strided part of a part: (start, size, step) per dim."""


@dataclass(frozen=True)
class Move:
    """One transfer to one receiver. Numbers are the plan's.

    source: path of what is read: a source leaf, or under `relay` the target itself, as the sender holds it by now.
    read: of the sender's part. drop: dims of it that the target lacks (of size 1 here). order: its other dims as the
    target orders them. expand: per target dim, whether it is one of those (else it is new, of size 1). write: of the
    receiver's part.
    """

    target: str
    source: str
    sender: int
    receiver: int
    read: Span
    drop: tuple[int, ...]
    order: tuple[int, ...]
    expand: tuple[bool, ...]
    write: Span
    relay: bool

    @property
    def shape(self) -> Shape:
        """Shape of what moves, dims as in the target."""
        return tuple(size for _, size, _ in self.write)

    @cached_property
    def aligned(self) -> bool:
        """Whether the target's dims are the source's."""
        return not self.drop and all(self.expand) and self.order == tuple(range(len(self.order)))

    @cached_property
    def read_at(self) -> Index:
        """To index the sender's part with."""
        return slices(self.read)

    @cached_property
    def write_at(self) -> Index:
        """To index the receiver's part with."""
        return slices(self.write)

    def turn(self, block: np.ndarray) -> np.ndarray:
        """What was read, with the target's dims: a view."""
        if self.aligned:
            return block
        kept = block[(*(0 if dim in self.drop else slice(None) for dim in range(block.ndim)), ...)]
        return kept.transpose(self.order)[(*(slice(None) if old else None for old in self.expand), ...)]


@dataclass(frozen=True)
class Prepared:
    """What one plan makes this process do. rounds: the moves, in order. parts: target path -> device number -> shape of
    its part, for every leaf that is written. fills: those whose buffers start as zeros. in_place: target path -> source
    path, of leaves that stay on the source's buffers."""

    rounds: tuple[tuple[Move, ...], ...]
    parts: Mapping[str, Mapping[int, Shape]]
    fills: frozenset[str]
    in_place: Mapping[str, str]


def prepare(plan: SyncPlan) -> Prepared:
    """Every transfer of `plan` as moves between parts. Raises SyncError where a transfer names what its sender or
    receiver does not hold."""
    parts: dict[str, dict[int, Shape]] = {}
    fills, in_place = set(), {}
    rounds: dict[int, list[Move]] = {}
    sources: dict[str, dict[int, Box]] = {}
    for path, leaf in plan.leaves.items():
        if leaf.in_place:
            (in_place[path],) = leaf.sources
            continue
        held = held_boxes(plan.destination[path])
        parts[path] = {device: tuple(stop - start for start, stop in box) for device, box in held.items()}
        if leaf.bytes_filled:
            fills.add(path)
        for name in leaf.sources:
            if name not in sources:
                sources[name] = held_boxes(plan.source[name])
        for transfer in plan.transfers(path):
            piece = plan.mapping.targets[path].pieces[transfer.piece]
            rounds.setdefault(transfer.round, []).extend(_moves(transfer, piece, sources, held))
    # What is read for several receivers is read for them one after the other, while it is near.
    ordered = (
        sorted(rounds[at], key=lambda move: (move.target, move.source, move.sender, move.read)) for at in sorted(rounds)
    )
    return Prepared(tuple(tuple(moves) for moves in ordered), parts, frozenset(fills), in_place)


def held_boxes(place: Placed) -> dict[int, Box]:
    """Device number -> what it holds of the leaf."""
    edges = place.layout.edges(place.shape)
    return {
        device: tuple((edge[i], edge[i + 1]) for edge, i in zip(edges, where, strict=True))
        for device, where in zip(place.layout.mesh.devices, place.layout.coordinates().tolist(), strict=True)
    }


def _moves(
    transfer: Transfer, piece: Piece, sources: Mapping[str, Mapping[int, Box]], held: Mapping[int, Box]
) -> list[Move]:
    drop: tuple[int, ...] = ()
    if transfer.relay:
        source, region, box = transfer.target, transfer.target_region, held[transfer.sender]
        dims = tuple(range(len(region)))
        order, expand = dims, (True,) * len(dims)
    else:
        source, region, box = transfer.source, transfer.source_region, sources[transfer.source][transfer.sender]
        drop = tuple(sorted(dim for dim, _ in piece.fixed))
        used = [dim for dim in piece.dims if dim is not None]
        order = tuple(sorted(used).index(dim) for dim in used)
        expand = tuple(dim is not None for dim in piece.dims)
    read = _within(region, box, transfer, transfer.sender)
    return [
        Move(
            transfer.target, source, transfer.sender, receiver, read, drop, order, expand,
            _within(transfer.target_region, held[receiver], transfer, receiver), transfer.relay,
        )
        for receiver in transfer.receivers
    ]  # fmt: skip


def _within(region: Region, box: Box, transfer: Transfer, device: int) -> Span:
    """`region` of the whole leaf, as a part of `box`."""
    span = []
    for (start, stop, step), (low, high) in zip(region, box, strict=True):
        size = len(range(start, stop, step))
        if not (low <= start and start + (size - 1) * step < high and size > 0 and step > 0):
            raise SyncError(
                f"sync: the plan moves {list(region)} of {transfer.target} (from {transfer.source}) from device "
                f"{transfer.sender} to {list(transfer.receivers)}, but device {device} holds {list(box)}; the plan is "
                f"not for these layouts"
            )
        span.append((start - low, size, step))
    return tuple(span)


def is_box(span: Span) -> bool:
    """Whether no dim is strided."""
    return all(step == 1 or size == 1 for _, size, step in span)


def slices(span: Span) -> Index:
    """To index an array with; the ellipsis keeps a scalar's view a view."""
    return (*(slice(start, start + (size - 1) * step + 1, step) for start, size, step in span), ...)


def covers(span: Span, shape: Shape) -> bool:
    """Whether it is the whole of a part of `shape`."""
    return is_box(span) and all(start == 0 and size == n for (start, size, _), n in zip(span, shape, strict=True))
