"""Plans proved by their bundles and by their rows: both forms refuse what is wrong, and what bundles are found to be
right for is right row by row."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.sync.certificate import Certificate, check
from lockstep.sync.plan import PHASE_BITS, Bundle, Region, SyncPlan, Transfer, TransferTable
from lockstep.sync.plan_hash import plan_hash


def sibling(name: str) -> ModuleType:
    """A test module beside this one, for its plans."""
    spec = importlib.util.spec_from_file_location(f"plans_of_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


the_plan = sibling("test_certificate").the_plan
four_layers = sibling("test_certificate_regions").four_layers
laws = sibling("test_certificate_laws")
MOVES = frozenset({"pieces", "provenance", "relays", "coverage", "crossing", "bytes", "rounds", "bundles", "in_place"})
SUMS = frozenset({"links", "staging", "bounds", "new_bytes", "leaves"})


def listed(bundle: Bundle, plan: SyncPlan) -> Iterator[Transfer]:
    """What `Bundle` says of itself, row by row in plain Python; rows that leave together are one transfer."""
    order = sorted(range(len(bundle.cell)), key=lambda i: (bundle.cell[i], bundle.start[i]))
    found: dict[tuple[int, int, int, int], list[int]] = {}  # member, round, lane's place, lane -> first and last row
    for at, i in enumerate(order):
        rows, first = int(bundle.rows[bundle.cell[i]]), int(bundle.start[i])
        length = (int(bundle.stop[i]) - first) << PHASE_BITS
        for q in range(first, int(bundle.stop[i])):
            number = (((q - first) << PHASE_BITS) + int(bundle.phase[i])) * bundle.parts // length
            found.setdefault((q // rows, number, at, i), []).append(q % rows)
    made: list[tuple[tuple[int, int, int, int], Transfer]] = []
    for (member, number, at, i), rows_ in found.items():
        if member >= len(bundle.members):
            continue  # rows of nobody cannot be listed
        path, piece = bundle.members[member]
        group, sender, relay = bundle.groups[bundle.receivers[i]], int(bundle.sender[i]), int(bundle.relay[i])

        one = transfer(plan, bundle, path, piece, int(bundle.cell[i]), rows_[0], rows_[-1] + 1)
        hops = [(sender, group, number, 0)]
        if relay >= 0:
            others = tuple(device for device in group if device != relay)
            hops = [(sender, (relay,), number, 1), (relay, others, number + 1, 2)]
        for sender, to, when, how in hops:
            hop = replace(one, sender=sender, receivers=to, round=when, relay=how == 2)
            made.append(((member, when, how, at), hop))
    for member, (path, piece) in enumerate(bundle.members):
        for cell, device in bundle.local.tolist():
            one = transfer(plan, bundle, path, piece, cell, 0, int(bundle.rows[cell]))
            yield replace(one, sender=device, receivers=(device,))
        yield from (one for key, one in sorted(made, key=lambda entry: entry[0]) if key[0] == member)


def transfer(plan: SyncPlan, bundle: Bundle, path: str, piece: int, cell: int, first: int, stop: int) -> Transfer:
    part = plan.mapping.targets[path].pieces[piece]
    low, high = bundle.low[cell].tolist(), bundle.high[cell].tolist()
    if bundle.cut_dim >= 0:
        at = bundle.cut_dim
        low[at], high[at] = low[at] + first, low[at] + stop
    read = {dim: (index, index + 1, 1) for dim, index in part.fixed}
    write = []
    for along, run, a, b in zip(part.dims, part.runs, low, high, strict=True):
        write.append((run.target + a * run.target_step, run.target + (b - 1) * run.target_step + 1, run.target_step))
        if along is not None:
            read[along] = (
                run.source + a * run.source_step, run.source + (b - 1) * run.source_step + 1, run.source_step
            )  # fmt: skip
    size = int(np.prod([b - a for a, b in zip(low, high, strict=True)], dtype=np.int64)) * bundle.wire_bytes
    return Transfer(path, piece, part.source, tuple(read[d] for d in range(len(read))), tuple(write), 0, (), size, 0)


@dataclass(frozen=True)
class Bundled:
    """`plan.Transfers` of bundles, listed by the definition."""

    bundled: Sequence[Bundle]
    listed: Sequence[Transfer]

    def __call__(self, target: str | None = None) -> Iterator[Transfer]:
        return (one for one in self.listed if target in (None, one.target))

    def bundles(self) -> Iterator[Bundle]:
        return iter(self.bundled)

    def tables(self, target: str | None = None) -> Iterator[TransferTable]:
        pieces: dict[tuple[str, int], list[Transfer]] = defaultdict(list)
        for one in self(target):
            pieces[one.target, one.piece].append(one)
        for (path, piece), ours in pieces.items():
            source, goal = regions([one.source_region for one in ours]), regions([one.target_region for one in ours])
            groups = tuple(dict.fromkeys(one.receivers for one in ours))
            yield TransferTable(
                path, piece, ours[0].source,
                source[..., 0], source[..., 1], tuple(source[0, :, 2].tolist()),
                goal[..., 0], goal[..., 1], tuple(goal[0, :, 2].tolist()),
                np.array([one.sender for one in ours]), np.array([groups.index(one.receivers) for one in ours]), groups,
                np.array([one.bytes for one in ours]), np.array([one.round for one in ours]),
                np.array([one.relay for one in ours]),
            )  # fmt: skip


def regions(of: list[Region]) -> np.ndarray:
    return np.array(of, np.int64).reshape(len(of), -1, 3)


def with_bundles(plan: SyncPlan, bundles: Sequence[Bundle]) -> SyncPlan:
    """The plan with other bundles, its tables, list and hash following them."""
    transfers = [one for bundle in bundles for one in listed(bundle, plan)]
    stay = [path for path, leaf in plan.leaves.items() if leaf.in_place]
    name = plan_hash(plan.source, plan.destination, plan.mapping, stay, bundles)
    return replace(plan, transfers=Bundled(bundles, transfers), hash=name)


def both(plan: SyncPlan) -> tuple[Certificate, Certificate]:
    return check(plan, form="bundles", listing=True), check(plan, form="rows", listing=True)


PLANS: dict[str, Callable[[], SyncPlan]] = {"mixed": the_plan, "relayed": laws.relayed_plan, "layers": four_layers}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_listed_by_the_definition_is_the_plan(name: str) -> None:
    plan = PLANS[name]()
    again = with_bundles(plan, list(plan.transfers.bundles()))
    for certificate in both(again):
        assert certificate.ok, certificate.to_json()
    assert again.hash == plan.hash
    assert sorted(map(repr, again.transfers())) == sorted(map(repr, plan.transfers()))


Change = Callable[[Bundle], Bundle]


def column(name: str, change: Callable[[np.ndarray], None]) -> Change:
    def edit(bundle: Bundle) -> Bundle:
        value = getattr(bundle, name).copy()
        change(value)
        return replace(bundle, **{name: value})

    return edit


def put(value: int, at: int = 0) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[at] = value

    return change


def plus(by: int, at: int = 0) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[at] += by

    return change


def without_lane(bundle: Bundle, twice: bool = False) -> Bundle:
    names = ("cell", "start", "stop", "sender", "relay", "receivers", "phase")
    kept = np.r_[0, np.arange(len(bundle.cell))] if twice else np.arange(1, len(bundle.cell))
    return replace(bundle, **{name: getattr(bundle, name)[kept] for name in names})


def of_nobody(bundle: Bundle) -> Bundle:
    return replace(bundle, groups=((), *bundle.groups), receivers=bundle.receivers * 0)


def to(*devices: int) -> Change:
    return lambda b: replace(b, groups=(*b.groups, devices), receivers=np.r_[len(b.groups), b.receivers[1:]])


def same_box(bundle: Bundle) -> Bundle:
    """Two cells of one size change places for one of them: one part twice, the other not."""
    low, high = bundle.low.copy(), bundle.high.copy()
    low[1], high[1] = low[0], high[0]
    return replace(bundle, low=low, high=high)


# plan, the path that names the bundle, the change, checks of which rows fail one
CORRUPTIONS: dict[str, tuple[str, str, Change, set[str]]] = {
    "a lane dropped": ("mixed", "head", without_lane, {"coverage"}),
    "a lane twice": ("mixed", "head", lambda b: without_lane(b, twice=True), {"coverage"}),
    "a lane shorter": ("layers", "layers.0.up.0", column("stop", plus(-1)), {"coverage"}),
    "a lane longer": ("mixed", "head", column("stop", plus(1)), {"coverage", "bundles"}),
    "a lane from its second row": ("layers", "layers.0.up.0", column("start", plus(1)), {"coverage"}),
    "a lane of another cell": ("mixed", "head", column("cell", plus(1)), {"coverage", "provenance"}),
    "another sender": ("mixed", "head", column("sender", put(7)), {"provenance"}),
    "a sender that is a stranger": ("mixed", "head", column("sender", put(77)), {"provenance"}),
    "a sender without it, of the destination": ("layers", "layers.0.up.0", column("sender", put(5)), {"provenance"}),
    "nobody gets it": ("mixed", "head", of_nobody, {"provenance"}),
    "others get it": ("mixed", "head", to(7, 8), {"coverage"}),
    "fewer get it": ("mixed", "head", to(5), {"coverage"}),
    "one who has no part gets it": ("mixed", "head", to(0), {"coverage"}),
    "a stranger gets it": ("mixed", "head", to(77), {"coverage"}),
    "one cell twice, another not": ("mixed", "head", same_box, {"coverage"}),
    "a local copy dropped": ("mixed", "norm", lambda b: replace(b, local=b.local[1:]), {"coverage"}),
    "a local copy twice": ("mixed", "norm", lambda b: replace(b, local=np.r_[b.local, b.local[:1]]), {"coverage"}),
    "a local copy by another": ("mixed", "norm", column("local", put(10, (0, 1))), {"coverage", "provenance"}),  # type: ignore[arg-type]
    "fewer bytes": ("mixed", "norm", lambda b: replace(b, wire_bytes=1), {"bytes"}),
    "a relay that gets nothing": ("relayed", "w", column("relay", put(0)), {"coverage", "relays"}),
    "a relay that is a stranger": ("relayed", "w", column("relay", put(77)), {"coverage", "relays"}),
    "all in one part": ("relayed", "w", lambda b: replace(b, parts=1), {"staging"}),
    "more parts than rounds": ("relayed", "w", lambda b: replace(b, parts=b.parts + 1), {"rounds"}),
    "a member dropped": (
        "layers", "layers.0.up.0", lambda b: replace(b, members=b.members[1:]), {"coverage", "bundles"}
    ),
    "a member twice": (
        "layers", "layers.0.up.0", lambda b: replace(b, members=(b.members[1], *b.members[1:])), {"coverage"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_bundles_are_refused_in_both_forms(name: str) -> None:
    which, path, change, expected = CORRUPTIONS[name]
    plan = PLANS[which]()
    bundles = [change(b) if any(member[0] == path for member in b.members) else b for b in plan.transfers.bundles()]
    wrong = with_bundles(plan, bundles)
    compact, rows = both(wrong)
    assert set(rows.failed) & expected, rows.to_json()
    assert set(compact.failed) & (MOVES | SUMS), compact.to_json()
    assert not check(wrong).ok
    # And where the tables stay as they were, they are not those of the bundles.
    assert not check(replace(plan, transfers=replace(wrong.transfers, listed=list(plan.transfers())))).ok  # type: ignore[type-var]


MALFORMED: dict[str, Change] = {
    "a cell beyond the leaf": column("high", lambda high: np.add(high, 1000, out=high)),
    "a cell of nothing": column("low", lambda low: np.add(low, 1000, out=low)),
    "rows that are not there": column("rows", plus(1)),
    "no such cell": column("cell", put(1 << 40)),
    "no such receivers": column("receivers", put(-1)),
    "a phase beyond all": column("phase", put(1 << 16)),
    "more rows than can be counted": lambda b: replace(b, parts=1 << 60),
    "no parts": lambda b: replace(b, parts=0),
    "cut along another dim": lambda b: replace(b, cut_dim=7),
    "receivers out of order": lambda b: replace(b, groups=tuple(group[::-1] for group in b.groups)),
    "no members": lambda b: replace(b, members=()),
    "members that are none": lambda b: replace(b, members=(("nothing", 0),)),
    "a member of a leaf that stays": lambda b: replace(b, members=(("same", 0),)),
    "a column of fractions": lambda b: replace(b, start=b.start.astype(float)),
    "a column too short": lambda b: replace(b, sender=b.sender[1:]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_bundles_that_mean_nothing_are_refused(name: str) -> None:
    plan = the_plan()
    bundles = [
        MALFORMED[name](b) if b.members[0][0] == "head" or i == 0 else b for i, b in enumerate(plan.transfers.bundles())
    ]
    certificate = check(replace(plan, transfers=Bundled(bundles, list(plan.transfers()))))
    assert "bundles" in certificate.failed, certificate.to_json()


def test_lanes_of_one_cell_to_different_devices_are_proved_by_rows() -> None:
    """Right, but not in a way that bundles are proved by."""
    plan = laws.relayed_plan()
    (bundle,) = plan.transfers.bundles()
    straight = replace(bundle, relay=np.full_like(bundle.relay, -1))
    names = ("cell", "start", "stop", "sender", "relay", "receivers", "phase")
    halves = {name: np.r_[getattr(straight, name), getattr(straight, name)] for name in names}
    halves["receivers"] = np.r_[straight.receivers * 0, straight.receivers * 0 + 1]
    split = replace(straight, groups=((1, 2, 3, 4), (5, 6, 7, 8)), **halves)  # type: ignore[arg-type]
    apart = with_bundles(plan, [split])
    assert "coverage" in check(apart, form="bundles").failed
    rows = check(apart, form="rows")
    assert not set(rows.failed) & (MOVES - {"bundles", "relays"}) and "bundles" in rows.failed


@st.composite
def tampered(draw: st.DrawFn, bundles: list[Bundle]) -> list[Bundle]:
    """One or two numbers changed."""
    changed = list(bundles)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(changed) - 1))
        bundle = changed[at]
        name = draw(st.sampled_from(["start", "stop", "sender", "relay", "receivers", "low", "high", "cell", "local"]))
        value = getattr(bundle, name).copy()
        assume(value.size)
        where = draw(st.integers(0, value.size - 1))
        by = draw(st.sampled_from([-1, 1]))
        flat = value.reshape(-1)
        flat[where] = draw(st.sampled_from([int(flat[where]) + by, int(draw(st.sampled_from(flat.tolist())))]))
        most = {"receivers": len(bundle.groups), "cell": len(bundle.rows)}.get(name, 1 << 20)
        low = -1 if name == "relay" else 0
        assume(low <= flat[where] < most and (name != "local" or value[:, 0].max() < len(bundle.rows)))
        changed[at] = replace(bundle, **{name: value})
    return changed


def lists(bundles: Sequence[Bundle]) -> bool:
    """Whether every lane's rows are of members that there are, so that they can be listed."""
    return all(
        (b.start < b.stop).all() and (b.stop <= b.rows[b.cell] * len(b.members)).all() and (b.low < b.high).all()
        for b in bundles
    )


@settings(max_examples=100)
@given(laws.sides(), st.data())
def test_what_bundles_prove_rows_prove_too_and_is_right(made: Any, data: st.DataObject) -> None:
    plan = laws.planned(made)
    bundles = list(plan.transfers.bundles())
    assume(bundles)
    changed = data.draw(tampered(bundles))
    assume(lists(changed))
    compact, rows = both(with_bundles(plan, changed))
    if not set(compact.failed) & MOVES:
        assert not set(rows.failed) & MOVES
        assert set(compact.failed) == set(rows.failed)
        assert laws.gives_what_the_map_says(with_bundles(plan, changed))
