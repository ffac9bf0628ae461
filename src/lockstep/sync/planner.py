"""The planner: two layouts and a format map become a `SyncPlan`. Pure; nothing here knows a device or a weight.

    plan = make_plan(source, destination)                 # path -> Placed on both sides, equal names
    plan.seconds, plan.load_over_bound, plan.rounds

In order: what is in place is set aside; the rest is cut into cells (`cells`); senders are balanced, with relays where
those help (`balance`); shares become rows (`lanes`), rows are put into rounds (`rounds`). Where relays lower the load,
plans with and without are both timed and the one predicted to be sooner is taken: with few bytes the further round that
relays need can cost more than they save.

A device that holds a cell copies it itself, whichever of its memories it is in: a device's number stands for the device
and its host memory, and links are between devices. What crosses does so in the smaller of the two sides' types, rounded
once, before it is sent; in the destination's where both are of one size, so that a relay can pass on what it has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from lockstep.errors import SyncError
from lockstep.sync import balance, lanes, rounds
from lockstep.sync.cells import Geometry, Kind
from lockstep.sync.listing import Listing, Member
from lockstep.sync.mapping import FormatMap, Target
from lockstep.sync.plan import Bounds, LeafPlan, LinkModel, Placed, SyncPlan
from lockstep.sync.plan_hash import plan_hash
from lockstep.sync.sides import check_sides, in_place, total_map

DEFAULT_STAGING_BYTES = 1 << 30
NEAR_ENOUGH = 1.02  # direct sends this close to what relays would allow are kept: simpler, and no pipeline to fill


def make_plan(
    source: Mapping[str, Placed],
    destination: Mapping[str, Placed],
    mapping: FormatMap | None = None,
    link: LinkModel = LinkModel(),  # noqa: B008  (frozen)
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    relay: bool = True,
    cast: bool = False,
) -> SyncPlan:
    """Plan a sync. source, destination: path -> what that side holds. mapping: None for equal names and shapes; then
    cast says whether dtypes may differ. staging_bytes: most that a device sends or receives in one round. relay:
    whether receivers may pass on what they got.

    Raises SyncError, before anything is planned, for sides that do not fit: naming leaf, shapes and layouts.
    """
    check_sides(source, destination, link, staging_bytes)
    mapping = total_map(source, destination, mapping, cast)
    work = _Work(source, destination, mapping)
    cells = lanes.gather(work.geometry.kinds, work.geometry.sets, len(work.devices))
    candidates, send_bytes, price = _balanced(cells.groups, relay)
    ways, timed = _soonest(work.geometry.kinds, cells, candidates, staging_bytes, link)
    listing = work.listing(cells, ways, timed)
    links = _links(cells, ways)
    receive_bytes = float(cells.groups.received().max(initial=0))
    sent, received = links.sum(axis=1), links.sum(axis=0)
    busiest = int(max(sent.max(initial=0), received.max(initial=0)))
    local_s = work.local_seconds(link)
    total = float(links.sum()) * 8e-9
    return SyncPlan(
        source=source,
        destination=destination,
        mapping=mapping,
        link=link,
        staging_bytes=staging_bytes,
        leaves={path: work.leaf(target) for path, target in mapping.targets.items()},
        devices=work.devices,
        sent=sent,
        received=received,
        links=links,
        new_bytes=work.new_bytes(),
        rounds=timed.rounds or int(any(len(kind.local) for kind in work.geometry.kinds)),
        peak_staging_bytes=timed.peak_bytes,
        relayed=bool((ways.relay >= 0).any()),
        bounds=Bounds(
            receive_bytes * 8e-9 / link.link_gbps,
            send_bytes * 8e-9 / link.link_gbps,
            0.0 if link.bisection_gbps is None else total / link.bisection_gbps,
            tuple(price.tolist()) if send_bytes else (),
        ),
        load_over_bound=max(1.0, busiest / max(receive_bytes, send_bytes)) if busiest else 1.0,
        seconds=max(timed.seconds(link), local_s),
        hash=plan_hash(source, destination, mapping, mapping.targets.keys() - work.members.keys(), listing.bundles()),
        transfers=listing,
    )


def _balanced(groups: balance.Groups, relay: bool) -> tuple[list[balance.Shares], float, np.ndarray]:
    """Shares worth a try, simpler ones first; the bytes that the busiest sender must give out under any plan, with
    relays if those may be; the prices of devices that show it."""
    straight = balance.direct(groups)
    assert straight.price is not None
    if not relay or not (groups.copies > 1).any():
        return [straight], groups.floor(straight.price, relays=False), straight.price
    receive = float(groups.received().max(initial=0))
    bound, price = balance.first_copies(groups)
    if straight.load <= receive * (1 + balance.SLACK):
        return [straight], bound, price
    relayed = balance.joint(groups, receive)
    # Where the busiest receiver is the bound, how far below it senders could come was not asked.
    if relayed.price is not None:
        bound, price = balance.best_floor(groups, [price, relayed.price])
    return [straight, relayed] if straight.load > NEAR_ENOUGH * relayed.load else [straight], bound, price


def _soonest(
    kinds: list[Kind], cells: lanes.Cells, candidates: list[balance.Shares], staging_bytes: int, link: LinkModel
) -> tuple[lanes.Lanes, rounds.Schedule]:
    """The shares that are predicted to be carried out soonest: with few bytes, one round straight from the holders can
    beat relays, which take two. Raises SyncError if none keeps within the staging budget."""
    found, refused = [], []
    for shares in candidates:
        ways = lanes.make(cells, shares)
        try:
            found.append((ways, rounds.schedule(kinds, cells, ways, staging_bytes, link)))
        except SyncError as error:  # a row for all that need it may be too much for a holder, and not for a relay
            refused.append(error)
    if not found:
        raise refused[-1]
    return min(found, key=lambda made: made[1].seconds(link))


class _Work:
    """What is planned: the pieces of all targets that are not in place, as members of kinds."""

    def __init__(self, source: Mapping[str, Placed], destination: Mapping[str, Placed], mapping: FormatMap) -> None:
        self.source, self.destination, self.mapping = source, destination, mapping
        layouts = {p.layout for p in (*source.values(), *destination.values())}
        self.devices = tuple(sorted({device for layout in layouts for device in layout.mesh.devices}))
        self.geometry = Geometry(self.devices)
        self.members: dict[str, tuple[Member, ...]] = {}
        for path, target in mapping.targets.items():
            if in_place(target, source, destination[path]):
                continue
            found = []
            for piece, part in enumerate(target.pieces):
                number = self.geometry.add(target, piece, source[part.source], destination[path])
                found.append(Member(number, len(self.geometry.kinds[number].members) - 1))
            self.members[path] = tuple(found)
        self._counts = [
            (kind.local_elements(), kind.crossing_elements(self.geometry.sets)) for kind in self.geometry.kinds
        ]

    def leaf(self, target: Target) -> LeafPlan:
        """The summary of one destination leaf."""
        placed = self.destination[target.path]
        sources = tuple(dict.fromkeys(piece.source for piece in target.pieces))
        stays = target.path not in self.members
        members = self.members.get(target.path, ())
        item = np.dtype(target.dtype).itemsize
        size = math.prod(target.shape)
        written = 0 if stays else size * self.geometry.place(placed.layout).devices.shape[1]
        local = sum(self._counts[m.kind][0] for m in members)
        crossing = sum(self._counts[m.kind][1] for m in members)
        kinds = [self.geometry.kinds[m.kind] for m in members]
        return LeafPlan(
            path=target.path,
            shape=target.shape,
            dtype=target.dtype,
            wire_dtype=kinds[0].wire_dtype if kinds else target.dtype,
            sources=sources,
            operations=target.operations,
            source_layout=self.source[sources[0]].layout if sources else placed.layout,
            target_layout=placed.layout,
            in_place=stays,
            bytes=size * item,
            bytes_written=written * item,
            bytes_local=local * item,
            bytes_filled=0 if stays else (written - local - crossing) * item,
            bytes_crossing=sum(
                self._counts[m.kind][1] * kind.wire_bytes for m, kind in zip(members, kinds, strict=True)
            ),
        )

    def listing(self, cells: lanes.Cells, ways: lanes.Lanes, timed: rounds.Schedule) -> Listing:
        """What lists the transfers."""
        kinds, sets = self.geometry.kinds, self.geometry.sets.members
        return Listing(self.mapping.targets, self.members, kinds, cells, ways, timed, self.devices, sets)

    def new_bytes(self) -> int:
        """Most bytes of new buffers on one device."""
        alike = Counter((p.layout, p.shape, p.dtype) for p in (self.destination[path] for path in self.members))
        total = dict.fromkeys(self.devices, 0)
        for (layout, shape, dtype), count in alike.items():
            size = np.ones(len(layout.mesh.devices), np.int64)
            for edges, at in zip(layout.edges(shape), layout.coordinates().T, strict=True):
                size *= np.diff(np.array(edges, np.int64))[at]
            for device, elements in zip(layout.mesh.devices, size.tolist(), strict=True):
                total[device] += elements * count * np.dtype(dtype).itemsize
        return max(total.values(), default=0)

    def local_seconds(self, link: LinkModel) -> float:
        """Of the device with most to copy from itself. Between its host memory and its own at the rate of a link."""
        seconds = np.zeros(len(self.devices))
        for kind in self.geometry.kinds:
            cell, device = kind.local.T
            size = np.bincount(device, kind.elements[cell], len(seconds)) * kind.target_bytes * len(kind.members)
            seconds += size * 8e-9 * (2 / link.memory_gbps if kind.same_memory else 1 / link.link_gbps)
        return float(seconds.max(initial=0))


def _links(cells: lanes.Cells, ways: lanes.Lanes) -> np.ndarray:
    """[devices, devices] int64: bytes from row to column."""
    groups = cells.groups
    count, sets = groups.devices, max(1, len(groups.sizes))
    size = (ways.stop - ways.start) * cells.row_bytes[ways.cell]
    needers = cells.needers[ways.cell]
    links = np.zeros(count * count)
    by = ways.relay >= 0
    # To all of a set: straight from the holder, or from a relay (itself included, taken off again below).
    giver = np.where(by, ways.relay, ways.sender)
    pairs, inverse = np.unique(giver * sets + needers, return_inverse=True)
    total = np.bincount(inverse, size, len(pairs))
    giver, to = pairs // sets, pairs % sets
    sizes = groups.sizes[to]
    offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    receiver = groups.members[np.repeat(groups.start[to], sizes) + offset]
    links += np.bincount(np.repeat(giver, sizes) * count + receiver, np.repeat(total, sizes), count * count)
    links += np.bincount(ways.sender[by] * count + ways.relay[by], size[by], count * count)
    table = links.reshape(count, count).astype(np.int64)
    np.fill_diagonal(table, 0)
    return table
