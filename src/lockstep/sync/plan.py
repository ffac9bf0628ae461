"""The plan of a weight sync, as a value: printed, proved and priced without a device or a weight.

`planner.make_plan` makes it, `certificate.check` proves it by code of its own, the transports carry it out.
Imports no jax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lockstep.sync.layout import Layout
from lockstep.sync.mapping import FormatMap

Region = tuple[tuple[int, int, int], ...]
"""A strided part of an array: (start, stop, step) per dim, as `slice` reads them."""


@dataclass(frozen=True)
class Placed:
    """What one side holds of one leaf: shape, dtype (a name that jax knows, such as `bfloat16`) and layout."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout


@dataclass(frozen=True)
class LinkModel:
    """What moving bytes costs. Every device sends at `link_gbps` and receives at `link_gbps` at the same time (Gbit/s,
    10^9 bits). bisection_gbps: what all devices together can move (None: no limit besides the links). latency_s: added
    per round. memory_gbps: reading plus writing of local copies."""

    link_gbps: float = 400.0
    bisection_gbps: float | None = None
    latency_s: float = 20e-6
    memory_gbps: float = 8000.0


@dataclass(frozen=True)
class Transfer:
    """One message, or one local copy (sender == the only receiver: the device has it already, in this leaf's source
    layout; between a device and its own host memory this too is a local copy, no link between devices carries it).

    target, piece: which piece of which destination leaf. source, source_region: what is read, of which source leaf
    (indices into the whole leaf). target_region: where it goes in the whole destination leaf; dims in the destination's
    order. bytes: per receiver, in the type that crosses (`LeafPlan.wire_dtype`; so for local copies too). relay: the
    sender holds it as a receiver of an earlier round, in the destination's form. round: from 0.
    """

    target: str
    piece: int
    source: str
    source_region: Region
    target_region: Region
    sender: int
    receivers: tuple[int, ...]
    bytes: int
    round: int
    relay: bool = False


@dataclass(frozen=True)
class LeafPlan:
    """One destination leaf. Bytes count replicas, except `bytes`.

    in_place: every destination device holds exactly its part already, in the right form: buffers are reused, all
    byte counts below are 0. Else the leaf is written whole into new buffers: bytes_written = bytes_local (from the very
    device, at the destination's type) + bytes_filled (zeros) + what comes over links; bytes_crossing is what crosses
    links, in the type that crosses (wire_dtype: the smaller of the two sides' types).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    wire_dtype: str
    sources: tuple[str, ...]
    operations: tuple[str, ...]
    source_layout: Layout
    target_layout: Layout
    in_place: bool
    bytes: int
    bytes_written: int
    bytes_local: int
    bytes_filled: int
    bytes_crossing: int

    @property
    def crosses(self) -> bool:
        return self.bytes_crossing > 0


@dataclass(frozen=True)
class Bounds:
    """Seconds that no plan can beat under the link model, as long as devices take in only what they need: what the
    busiest receiver must take in, what the best balanced senders must give out (with or without relays, as was asked),
    what the bisection lets through.

    send_prices: a price for every device, in the plan's order, by which the send bound is proved (`send_floor`; they
    are the duals of the senders' linear program); empty where it is 0. Of a plan without relays, `send_s` is a bound of
    plans without.
    """

    receive_s: float
    send_s: float
    bisection_s: float
    send_prices: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        return max(self.receive_s, self.send_s, self.bisection_s)


@dataclass(frozen=True)
class TransferTable:
    """The transfers of one piece of one destination leaf as columns, k rows: what `Transfer` says, without an object
    for each. First local copies, then by increasing round; within a round what goes straight, what goes to relays, what
    relays pass on, each by cell and row of its `Bundle`.

    source_start, source_stop [k, source dims], target_start, target_stop [k, target dims]: int64, of the whole leaves;
    source_step, target_step: per dim. sender, bytes, round: [k] int64; relay: [k] bool. receivers: [k] int64, rows of
    `groups`, whose entries are device numbers, increasing.
    """

    target: str
    piece: int
    source: str
    source_start: np.ndarray
    source_stop: np.ndarray
    source_step: tuple[int, ...]
    target_start: np.ndarray
    target_stop: np.ndarray
    target_step: tuple[int, ...]
    sender: np.ndarray
    receivers: np.ndarray
    groups: tuple[tuple[int, ...], ...]
    bytes: np.ndarray
    round: np.ndarray
    relay: np.ndarray


PHASE_BITS = 16  # of `Bundle.phase`


@dataclass(frozen=True)
class Bundle:
    """All transfers of pieces that are cut alike (say, one matrix in all layers), without an entry for each: `tables`
    and `Transfer`s are these, listed.

    members: (target path, piece number). Every member has the same cells. Cell c is t = low[c]..high[c] - 1 of the
    piece's runs, low and high [cells, target dims]; its rows are its indices along dim `cut_dim`, rows[c] of them
    (cut_dim -1: the leaf has no dims, a cell is one row). Row j of cell c of member m has the number m * rows[c] + j.

    Lane i carries rows start[i]..stop[i] - 1 of cell[i] from sender[i] to groups[receivers[i]]: straight where relay[i]
    is -1, else to relay[i], which is one of them and passes it on to the others in the next round. The row numbered q
    leaves the sender in round ((q - start[i]) * 2^16 + phase[i]) * parts // ((stop[i] - start[i]) * 2^16).
    local: [k, 2] int64, (cell, device): what a device copies from itself, of every member.
    Senders, relays, groups and local hold device numbers. wire_bytes: of an element.
    """

    members: tuple[tuple[str, int], ...]
    low: np.ndarray
    high: np.ndarray
    cut_dim: int
    rows: np.ndarray
    cell: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    sender: np.ndarray
    relay: np.ndarray
    receivers: np.ndarray
    groups: tuple[tuple[int, ...], ...]
    phase: np.ndarray
    parts: int
    local: np.ndarray
    wire_bytes: int


class Transfers(Protocol):
    """Lists the transfers of one destination leaf, or of all; made on demand, because a large plan has millions.

    Of one leaf they come piece by piece, by increasing round. Local copies are in round 0.
    """

    def __call__(self, target: str | None = None) -> Iterator[Transfer]: ...

    def tables(self, target: str | None = None) -> Iterator[TransferTable]:
        """The same as columns, one table per piece that has any transfer."""
        ...

    def bundles(self) -> Iterator[Bundle]:
        """All of them in the form in which they are kept: every piece that is not in place is a member of one."""
        ...


@dataclass(frozen=True, eq=False)
class SyncPlan:
    """What crosses, how, from whom to whom, when, and what it costs. Make it with `planner.make_plan`.

    devices: numbers of all devices of both sides, increasing; `sent`, `received` [devices] int64 bytes over links in
    that order; `links` [devices, devices] int64: bytes from row to column. new_bytes: most bytes of new buffers on one
    destination device. rounds: number of them. peak_staging_bytes: most bytes that one device sends or receives in one
    round, at most staging_bytes. relayed: whether receivers pass on what they got. load_over_bound: the busiest link
    end's bytes over what the bounds allow (1.0: optimal); 1.0 when nothing crosses. seconds: predicted, rounds and
    latency included. hash: of everything that decides what is carried out (`plan_hash`: leaves, layouts, map, bundles).
    """

    source: Mapping[str, Placed]
    destination: Mapping[str, Placed]
    mapping: FormatMap
    link: LinkModel
    staging_bytes: int
    leaves: Mapping[str, LeafPlan]
    devices: tuple[int, ...]
    sent: np.ndarray
    received: np.ndarray
    links: np.ndarray
    new_bytes: int
    rounds: int
    peak_staging_bytes: int
    relayed: bool
    bounds: Bounds
    load_over_bound: float
    seconds: float
    hash: str
    transfers: Transfers

    @property
    def bytes_crossing(self) -> int:
        return sum(leaf.bytes_crossing for leaf in self.leaves.values())

    @property
    def bytes_written(self) -> int:
        return sum(leaf.bytes_written for leaf in self.leaves.values())
