"""The proof of a plan: every claim of a `SyncPlan` examined by code that shares only the nouns with the planner.

    certificate = check(plan)
    certificate.require()          # SyncError listing what failed
    print(certificate.to_json())

What is proved, each a `Check` by this name:

    mapping      the format map is total on both sides (`mapping.check_total`)
    leaves       every target has one entry, with its shape, dtype, type on the wire, sources and layouts
    pieces       what each transfer reads is what the map puts where it writes
    provenance   the sender holds it, at the source; a local copy has one receiver, which is the sender
    relays       a relayed transfer repeats what its sender got in an earlier round
    coverage     every element of every destination device's part is written once, or is padding and not written
    crossing     every device gets over links exactly what it does not hold already, not a byte more
    in_place     leaves are said to stay exactly where they can
    bytes        per leaf and transfer: written, copied locally, filled, crossing
    links        per link and per device, summed over all transfers
    new_bytes    the new buffers of the destination device that has most
    rounds       rounds are numbered from 0 and below the plan's number of them
    staging      nobody sends or receives more than the budget in a round; the peak is as claimed
    bounds       the receive and bisection bounds are as recomputed; no bound is above what was planned; ratio and
                 seconds follow from them
    listing      transfers listed one by one are those of the tables (small plans, or on request)

The send bound is a minimum over all plans; of it only that it does not exceed what this plan does is checked here.
The hash is the planner's own and is not examined. Imports no jax.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lockstep.errors import SyncError
from lockstep.sync.leaf_proof import Batch, LeafProof, prove_in_place, prove_written
from lockstep.sync.mapping import Target, check_total
from lockstep.sync.plan import LeafPlan, Placed, SyncPlan, Transfer, TransferTable
from lockstep.sync.regions import Tally, rows_of, sums

CHECKS = (
    "mapping",
    "leaves",
    "pieces",
    "provenance",
    "relays",
    "coverage",
    "crossing",
    "in_place",
    "bytes",
    "links",
    "new_bytes",
    "rounds",
    "staging",
    "bounds",
)
LISTED_BY_DEFAULT = 2_000  # transfers; beyond, listing them one by one takes longer than proving the plan
TOGETHER = 1 << 19  # transfers that are examined at a time: enough to keep numpy busy, few enough to keep memory small
_SHOWN = 3  # failures per check that are spelled out
_CLOSE = 1e-6  # relative; what floats of seconds may be apart


class Check(NamedTuple):
    """detail: what was examined, or what is wrong."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Certificate:
    """checks: by name, in the order of `CHECKS`. leaves, transfers: how many were examined. intervals: of elements, how
    many were laid beside one another."""

    checks: tuple[Check, ...]
    leaves: int
    transfers: int
    intervals: int

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if not check.ok)

    def require(self) -> None:
        """Raise SyncError listing the failed checks, if any."""
        wrong = [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]
        if wrong:
            raise SyncError(
                f"sync: the plan does not hold up in {len(wrong)} checks and was not used. {'; '.join(wrong)}"
            )

    def to_json(self) -> dict[str, Any]:
        """`ok`, `leaves`, `transfers`, `intervals` and `checks`, a list of `name`, `ok`, `detail`."""
        counts = {"ok": self.ok, "leaves": self.leaves, "transfers": self.transfers, "intervals": self.intervals}
        return counts | {"checks": [check._asdict() for check in self.checks]}


def check(plan: SyncPlan, *, listing: bool | None = None) -> Certificate:
    """Examine all of `plan`. listing: whether transfers are also listed one by one and compared with the tables, by
    which all else is proved (None: when there are few). Never raises for what is wrong with the plan."""
    proof = _Proof(plan)
    if proof.mapping():
        proof.leaves()
        proof.totals()
        proof.bounds()
        few = proof.transfers <= LISTED_BY_DEFAULT if listing is None else listing
        if few:
            proof.listing()
    names = (*CHECKS, "listing") if "listing" in proof.examined else CHECKS
    return Certificate(tuple(proof.result(name) for name in names), proof.count, proof.transfers, proof.intervals)


class _Proof:
    """What has been found so far. wrong: check -> failures. examined: checks that were carried out, with words."""

    def __init__(self, plan: SyncPlan) -> None:
        self.plan = plan
        self.wrong: dict[str, list[str]] = defaultdict(list)
        self.examined: dict[str, str] = {}
        self.count = self.transfers = self.intervals = 0
        self.tables: dict[str, list[TransferTable]] = {}
        devices = len(plan.devices)
        self.links = np.zeros((devices, devices), np.int64)
        self.batches: dict[object, Batch] = {}
        self.waiting = 0  # transfers in them, and pieces times devices
        self.pairs = Tally()  # bytes by sender * devices + receiver
        self.needed = np.zeros(devices, np.int64)
        self.new = np.zeros(devices, np.int64)
        self.out, self.into = Tally(), Tally()  # bytes by round * devices + device

    def fail(self, name: str, words: str) -> None:
        self.wrong[name].append(words)

    def result(self, name: str) -> Check:
        wrong = self.wrong.get(name, [])
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            return Check(name, False, "; ".join(wrong[:_SHOWN]) + more)
        if name in self.examined:
            return Check(name, True, self.examined[name])
        return Check(name, False, "not examined, because the format map does not hold")

    def mapping(self) -> bool:
        """Whether the map holds; nothing else can be examined where it does not."""
        plan = self.plan
        source = {path: (placed.shape, placed.dtype) for path, placed in plan.source.items()}
        destination = {path: (placed.shape, placed.dtype) for path, placed in plan.destination.items()}
        try:
            check_total(plan.mapping, source, destination)
        except SyncError as error:
            self.fail("mapping", str(error))
            return False
        targets, unchanged = len(plan.mapping.targets), len(plan.mapping.unchanged)
        self.examined["mapping"] = f"{len(source)} source leaves make {targets}; {unchanged} are unchanged"
        return True

    def leaves(self) -> None:
        plan = self.plan
        for path in plan.leaves.keys() ^ plan.mapping.targets.keys():
            self.fail("leaves", f"{path} is {'no target of the map' if path in plan.leaves else 'not in the plan'}")
        for path, target in plan.mapping.targets.items():
            if path not in plan.leaves:
                continue
            leaf = plan.leaves[path]
            if words := self._described(leaf):
                self.fail("leaves", words)
            self.count += 1
            self._gather(target, leaf)
        self._flush()
        words = f"{self.transfers} transfers of {self.count} leaves"
        for name in ("pieces", "provenance", "relays", "crossing", "bytes", "rounds"):
            self.examined[name] = words
        self.examined["coverage"] = f"{self.intervals} intervals on the lines of {self.count} leaves"
        stay = sum(leaf.in_place for leaf in plan.leaves.values())
        self.examined |= {"leaves": f"{self.count} leaves", "in_place": f"{stay} of {self.count} leaves stay"}

    def _gather(self, target: Target, leaf: LeafPlan) -> None:
        """Leaves that are alike are examined together, as soon as they have enough transfers."""
        plan, placed = self.plan, self.plan.destination[target.path]
        places = [plan.source[piece.source] for piece in target.pieces]
        tables = list(plan.transfers.tables(target.path))
        if leaf.in_place:
            prove_in_place(target, leaf, placed, places, self.fail)
            if tables:
                self.fail("in_place", f"{target.path} is said to be in place, yet the plan moves parts of it")
            return
        alike = tuple((p.dims, p.runs, _form(place)) for p, place in zip(target.pieces, places, strict=True))
        batch = self.batches.setdefault((_form(placed), alike), Batch([], [], [], placed, places, plan.rounds))
        batch.targets.append(target)
        batch.leaves.append(leaf)
        batch.tables.append(tables)
        self.waiting += sum(len(table.sender) for table in tables) + len(places) * len(placed.layout.mesh.devices)
        if self.waiting > TOGETHER:
            self._flush()

    def _flush(self) -> None:
        for batch in self.batches.values():
            proof = prove_written(batch, self.fail)
            self.transfers += proof.transfers
            self.intervals += proof.intervals
            self._add(batch.targets[0].path, proof)
        self.batches, self.waiting = {}, 0

    def _described(self, leaf: LeafPlan) -> str:
        """What an entry says wrongly about its leaf."""
        plan, target = self.plan, self.plan.mapping.targets.get(leaf.path)
        if target is None:
            return f"an entry is called {leaf.path}, which is no target"
        placed = plan.destination[leaf.path]
        sources = tuple(dict.fromkeys(piece.source for piece in target.pieces))
        layout = plan.source[sources[0]].layout if sources else placed.layout
        said = (leaf.shape, leaf.dtype, leaf.sources, leaf.operations, leaf.source_layout, leaf.target_layout)
        true = (target.shape, target.dtype, sources, target.operations, layout, placed.layout)
        names = ("shape", "dtype", "sources", "operations", "source_layout", "target_layout")
        wrong = [name for name, a, b in zip(names, said, true, strict=True) if a != b]
        return f"{leaf.path}: {', '.join(wrong)} are not the leaf's" if wrong else ""

    def _add(self, path: str, proof: LeafProof) -> None:
        devices = self.plan.devices
        for total, part in ((self.needed, proof.needed), (self.new, proof.new_bytes)):
            rows = rows_of(devices, np.array(list(part), np.int64))
            if (rows < 0).any():
                self.fail("links", f"{path}: the plan's devices lack {[d for d in part if d not in devices][:5]}")
                continue
            total[rows] += np.array(list(part.values()), np.int64)
        if proof.traffic is None or not len(proof.traffic.links[0]):
            return
        sender, receiver, size = proof.traffic.links
        sender, receiver = rows_of(devices, sender), rows_of(devices, receiver)
        known = (sender >= 0) & (receiver >= 0)
        if not known.all():
            self.fail("links", f"{path}: a transfer is between devices that the plan does not list")
        key = sender[known] * len(devices) + receiver[known]
        self.pairs.add(key, size[known])
        for busy, (number, device, size) in ((self.out, proof.traffic.sent), (self.into, proof.traffic.received)):
            row = rows_of(devices, device)
            busy.add((number * len(devices) + row)[row >= 0], size[row >= 0])

    def totals(self) -> None:
        plan, count = self.plan, len(self.plan.devices)
        if list(plan.devices) != sorted(set(plan.devices)):
            self.fail("links", "the plan's devices are not increasing numbers")
        key, size = self.pairs.total()
        self.links = links = sums(key, size, count * count).reshape(count, count)
        for name, claimed, true in (
            ("links", plan.links, links),
            ("sent", plan.sent, links.sum(axis=1)),
            ("received", plan.received, links.sum(axis=0)),
        ):
            if claimed.shape != true.shape:
                self.fail("links", f"{name} has shape {claimed.shape}; expected {true.shape}")
            elif (claimed != true).any():
                at = np.argwhere(claimed != true)[0].tolist()
                where = ", ".join(str(plan.devices[i]) for i in at)
                self.fail("links", f"{name} of {where} is {claimed[tuple(at)]} in the plan; it is {true[tuple(at)]}")
        self.examined["links"] = f"{int((links > 0).sum())} links, {int(links.sum())} bytes"
        if plan.new_bytes != self.new.max(initial=0):
            self.fail("new_bytes", f"{plan.new_bytes} in the plan; {self.new.max(initial=0)} on the fullest device")
        self.examined["new_bytes"] = f"{plan.new_bytes} bytes"
        self.rounds = [busy.total() for busy in (self.out, self.into)]
        peak = max((int(values.max(initial=0)) for _, values in self.rounds), default=0)
        if peak != plan.peak_staging_bytes:
            self.fail("staging", f"the peak is {plan.peak_staging_bytes} in the plan; it is {peak}")
        if peak > plan.staging_bytes:
            self.fail("staging", f"a device moves {peak} bytes in one round; the budget is {plan.staging_bytes}")
        self.examined["staging"] = f"at most {peak} of {plan.staging_bytes} bytes a round, in {plan.rounds} rounds"

    def bounds(self) -> None:
        plan, bounds = self.plan, self.plan.bounds
        rates = [plan.link.link_gbps, *([plan.link.bisection_gbps] if plan.link.bisection_gbps is not None else [])]
        if not all(rate > 0 and math.isfinite(rate) for rate in rates):
            return self.fail("bounds", f"links of {rates} Gbit/s carry nothing")
        per_byte = 8e-9 / plan.link.link_gbps
        links = self.links
        busiest = int(max(links.sum(axis=0).max(initial=0), links.sum(axis=1).max(initial=0)))
        receive = int(self.needed.max(initial=0)) * per_byte
        cross = 0.0 if plan.link.bisection_gbps is None else int(self.needed.sum()) * 8e-9 / plan.link.bisection_gbps
        for name, claimed, true in (("receive", bounds.receive_s, receive), ("bisection", bounds.bisection_s, cross)):
            if not math.isclose(claimed, true, rel_tol=_CLOSE, abs_tol=1e-15):
                self.fail("bounds", f"the {name} bound is {claimed} s in the plan; it is {true} s")
        sent = int(links.sum(axis=1).max(initial=0)) * per_byte
        if not 0 <= bounds.send_s <= sent * (1 + _CLOSE):
            self.fail("bounds", f"the send bound is {bounds.send_s} s, yet the busiest sender needs {sent} s")
        floor = max(bounds.receive_s, bounds.send_s)
        ratio = max(1.0, busiest * per_byte / floor) if busiest and floor > 0 else 1.0
        if not math.isclose(plan.load_over_bound, ratio, rel_tol=_CLOSE) or (busiest and floor <= 0):
            self.fail("bounds", f"load over bound is {plan.load_over_bound} in the plan; it is {ratio}")
        seconds = self._seconds(per_byte)
        if not plan.seconds >= max(seconds, bounds.seconds) * (1 - _CLOSE):
            self.fail(
                "bounds", f"{plan.seconds} s are predicted; the rounds take {seconds} s, bounds {bounds.seconds} s"
            )
        self.examined["bounds"] = f"the busiest link end carries {ratio:.4f} of what no plan can avoid"

    def _seconds(self, per_byte: float) -> float:
        """Of all rounds, each as long as its busiest link end, or the bisection, takes; latency included."""
        count, link = len(self.plan.devices), self.plan.link
        longest: dict[int, float] = defaultdict(float)
        for key, size in self.rounds:
            number = key // count
            for at, most in zip(*_grouped_max(number, size), strict=True):
                longest[int(at)] = max(longest[int(at)], int(most) * per_byte)
        if link.bisection_gbps is not None and len(self.rounds[0][0]):
            key, size = self.rounds[0]
            rounds, inverse = np.unique(key // count, return_inverse=True)
            for at, total in zip(rounds, sums(inverse, size, len(rounds)), strict=True):
                longest[int(at)] = max(longest[int(at)], int(total) * 8e-9 / link.bisection_gbps)
        return sum(longest.values()) + len(longest) * link.latency_s

    def listing(self) -> None:
        """Transfers one by one: of each leaf, and of all leaves, those of the tables."""
        plan, everything = self.plan, Counter[Transfer]()
        for path in plan.mapping.targets:
            listed = Counter(plan.transfers(path))
            expected = Counter(transfer for table in plan.transfers.tables(path) for transfer in _rows(table))
            everything += listed
            if listed != expected:
                count = (listed - expected).total() + (expected - listed).total()
                self.fail("listing", f"{path}: {count} transfers are in the list or in the tables, but not in both")
        if Counter(plan.transfers()) != everything:
            self.fail("listing", "the transfers of all leaves are not those of the leaves one by one")
        self.examined["listing"] = f"{everything.total()} transfers one by one"


def _form(placed: Placed) -> tuple[object, ...]:
    """Equal for what is laid out alike. Layouts by identity: a mesh of thousands of devices is slow to compare."""
    return placed.shape, placed.dtype, id(placed.layout)


def _rows(table: TransferTable) -> list[Transfer]:
    """The table, row by row, as the nouns define it."""
    made = []
    for at in range(len(table.sender)):
        spans = []
        for start, stop, step in (
            (table.source_start, table.source_stop, table.source_step),
            (table.target_start, table.target_stop, table.target_step),
        ):
            spans.append(tuple((int(start[at, d]), int(stop[at, d]), int(step[d])) for d in range(len(step))))
        made.append(
            Transfer(
                target=table.target,
                piece=table.piece,
                source=table.source,
                source_region=spans[0],
                target_region=spans[1],
                sender=int(table.sender[at]),
                receivers=tuple(int(device) for device in table.groups[int(table.receivers[at])]),
                bytes=int(table.bytes[at]),
                round=int(table.round[at]),
                relay=bool(table.relay[at]),
            )
        )
    return made


def _grouped_max(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each key once, and the greatest of its values; keys are increasing."""
    distinct, first = np.unique(keys, return_index=True)
    return distinct, np.maximum.reduceat(values, first) if len(first) else values
