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
    bounds       the receive and bisection bounds are as recomputed; the send bound is no more than its prices prove
                 (`send_floor`); no bound is above what was planned; ratio and seconds follow from them
    bundles      the tables are those of the bundles, row for row
    hash         it is that of the leaves, layouts, map and bundles that were examined
    listing      transfers listed one by one are those of the tables (small plans, or on request)

A large plan has millions of transfers, in a few bundles. So transfers are proved by bundles (`bundle_proof` says why
that is enough), and by rows (`leaf_proof`) where that does not do; either way the other form is shown to be the same,
so that whichever is carried out is the one that was proved.

Whether a send bound could be higher is not examined; nor is, of a plan without relays, whether one with relays could do
with less: its send bound is that of plans without. Imports no jax.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from lockstep.errors import SyncError
from lockstep.sync.alike import Alike, Classes, demands, form, prove_entry
from lockstep.sync.bundle_proof import Shape, flow_of, prove_bundle, shape_of
from lockstep.sync.bundle_tables import Rows
from lockstep.sync.columns import Fail
from lockstep.sync.leaf_proof import Batch, prove_in_place, prove_written
from lockstep.sync.mapping import Target, check_total
from lockstep.sync.plan import Bundle, LeafPlan, SyncPlan, Transfer, TransferTable
from lockstep.sync.plan_hash import plan_hash
from lockstep.sync.totals import Totals

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
    "bundles",
    "hash",
)
LISTED_BY_DEFAULT = 2_000  # transfers; beyond, listing them one by one takes longer than proving the plan
TOGETHER = 1 << 19  # transfers that are examined at a time: enough to keep numpy busy, few enough to keep memory small
_SHOWN = 3  # failures per check that are spelled out


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


def check(
    plan: SyncPlan, *, listing: bool | None = None, form: Literal["either", "bundles", "rows"] = "either"
) -> Certificate:
    """Examine all of `plan`. listing: whether transfers are also listed one by one and compared with the tables
    (None: when there are few). form: by what the transfers are proved: `bundles`; `rows`, the tables row by row, which
    takes longer the more there are; `either`: rows only where the bundles do not do, which then also say better what is
    wrong. Never raises for what is wrong with the plan."""
    if form != "rows":
        found = _examined(plan, listing, rows=False)
        if form == "bundles" or found.ok or "mapping" in found.failed:
            return found
    return _examined(plan, listing, rows=True)


def _examined(plan: SyncPlan, listing: bool | None, *, rows: bool) -> Certificate:
    proof = _Proof(plan)
    if proof.mapping():
        proof.leaves(rows)
        if not rows:
            proof.carried()
        proof.same()
        proof.totals.totals()
        proof.totals.bounds(proof.classes.all())
        proof.words()
        proof.hash()
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
        self.totals = Totals(plan, self.fail)
        self.classes = Classes(plan.source)
        self.bundles = list(plan.transfers.bundles())
        self.shapes: list[Shape | None] = []
        self.batches: dict[object, Batch] = {}
        self.waiting = 0  # transfers in them, and pieces times devices

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

    def leaves(self, rows: bool) -> None:
        """All entries of leaves; with rows, also their transfers."""
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
            placed = plan.destination[path]
            if leaf.in_place:
                places = [plan.source[piece.source] for piece in target.pieces]
                prove_in_place(target, leaf, placed, places, self.fail)
                continue
            alikes = self.classes.add(target, placed)
            if rows:
                self._gather(target, leaf)
            else:
                prove_entry(target, leaf, placed, alikes, self.fail)
        self._flush()

    def carried(self) -> None:
        """What the bundles say, without their rows."""
        plan = self.plan
        for bundle, shape, alikes in self._whole(self.fail):
            if shape is None:
                continue
            self.intervals += prove_bundle(bundle, shape, alikes, self.fail)
            if (flow := flow_of(bundle, shape, plan.devices, self.fail)) is not None:
                self.totals.flow(flow)
                used = np.flatnonzero(flow.sent.any(axis=1))
                late = max(int(used.max(initial=-1)), 0 if len(bundle.local) else -1)
                if late >= plan.rounds:
                    self.fail("rounds", f"{bundle.members[0][0]} moves in round {late}, of {plan.rounds}")
        seen = Counter(member for bundle in self.bundles for member in bundle.members)
        for member, alike in self.classes.of.items():
            if seen[member] != 1 and (seen[member] or alike.mapped.any()):
                self.fail("coverage", f"piece {member[1]} of {member[0]} is in {seen[member]} bundles; expected 1")
        for path, needed, new in demands(self.classes, plan):
            self.totals.demand(path, needed, new)

    def _whole(self, fail: Fail) -> Iterator[tuple[Bundle, Shape | None, list[Alike]]]:
        """Every bundle, whether its lanes carry every row once, and the classes of its members."""
        for bundle in self.bundles:
            if unknown := [member for member in bundle.members if member not in self.classes.of]:
                fail("pieces", f"a bundle moves piece {unknown[0][1]} of {unknown[0][0]}, which nobody is to write")
                yield bundle, None, []
                continue
            alikes = list({id(one): one for one in (self.classes.of[member] for member in bundle.members)}.values())
            yield bundle, shape_of(bundle, alikes, fail), alikes

    def same(self) -> None:
        """The tables are those of the bundles."""
        plan = self.plan

        def fail(name: str, words: str) -> None:
            self.fail("bundles", words)

        rows: dict[tuple[str, int], tuple[Rows, int]] = {}
        for bundle, shape, _ in self._whole(fail):
            if shape is not None:
                made = Rows(bundle, shape)
                if twice := rows.keys() & set(bundle.members):
                    self.fail("bundles", f"{sorted(twice)[0]} is a member of two bundles")
                rows |= {member: (made, at) for at, member in enumerate(bundle.members)}
        for path, target in plan.mapping.targets.items():
            tables: dict[int, list[TransferTable]] = defaultdict(list)
            for table in plan.transfers.tables(path):
                tables[table.piece].append(table)
                self.transfers += len(table.sender)
                if table.target != path or not 0 <= table.piece < len(target.pieces):
                    self.fail("bundles", f"{path}: a table is of piece {table.piece} of {table.target}")
                if path in plan.leaves and plan.leaves[path].in_place:
                    self.fail("in_place", f"{path} is said to be in place, yet the plan moves parts of it")
                if (path, table.piece) not in rows and len(table.sender):
                    self.fail("bundles", f"piece {table.piece} of {path} has a table, and no bundle")
            for at, piece in enumerate(target.pieces):
                if (path, at) in rows:
                    made, member = rows[path, at]
                    if words := made.differ(piece, member, tables[at]):
                        self.fail("bundles", f"the table of piece {at} of {path} is not its bundle's: {words}")
        relayed = any((bundle.relay >= 0).any() for bundle in self.bundles)
        if relayed != plan.relayed:
            self.fail("relays", f"the plan is said to {'have' if plan.relayed else 'have no'} relays")

    def words(self) -> None:
        """Say what was examined."""
        words = f"{self.transfers} transfers of {self.count} leaves"
        for name in ("pieces", "provenance", "relays", "crossing", "bytes", "rounds"):
            self.examined[name] = words
        self.examined["coverage"] = f"{self.intervals} intervals on the lines of {self.count} leaves"
        self.examined["bundles"] = f"{len(self.bundles)} bundles list {self.transfers} transfers"
        stay = sum(leaf.in_place for leaf in self.plan.leaves.values())
        self.examined |= {"leaves": f"{self.count} leaves", "in_place": f"{stay} of {self.count} leaves stay"}
        self.examined |= self.totals.examined

    def _gather(self, target: Target, leaf: LeafPlan) -> None:
        """Leaves that are alike are examined together, as soon as they have enough transfers."""
        plan, placed = self.plan, self.plan.destination[target.path]
        places = [plan.source[piece.source] for piece in target.pieces]
        tables = list(plan.transfers.tables(target.path))
        alike = tuple((p.dims, p.runs, form(place)) for p, place in zip(target.pieces, places, strict=True))
        batch = self.batches.setdefault((form(placed), alike), Batch([], [], [], placed, places, plan.rounds))
        batch.targets.append(target)
        batch.leaves.append(leaf)
        batch.tables.append(tables)
        self.waiting += sum(len(table.sender) for table in tables) + len(places) * len(placed.layout.mesh.devices)
        if self.waiting > TOGETHER:
            self._flush()

    def _flush(self) -> None:
        for batch in self.batches.values():
            proof = prove_written(batch, self.fail)
            self.intervals += proof.intervals
            self.totals.add(batch.targets[0].path, proof)
        self.batches, self.waiting = {}, 0

    def hash(self) -> None:
        plan = self.plan
        stay = {path for path, leaf in plan.leaves.items() if leaf.in_place}
        found = plan_hash(plan.source, plan.destination, plan.mapping, stay, self.bundles)
        if plan.hash != found:
            self.fail("hash", f"{plan.hash} in the plan; it is {found}")
        self.examined["hash"] = "of what was examined"

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
