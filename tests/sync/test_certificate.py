"""The certificate can fail: every corruption of a valid plan is refused, by the check that is meant for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest

from lockstep.errors import SyncError
from lockstep.sync import operations as op
from lockstep.sync.certificate import CHECKS, Certificate, check
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.mapping import FormatMap, Target, whole
from lockstep.sync.plan import Bundle, Placed, SyncPlan, Transfer, TransferTable
from lockstep.sync.planner import make_plan

FORMS: tuple[Literal["bundles", "rows"], ...] = ("bundles", "rows")
Change = Callable[[list[Transfer]], list[Transfer]]


@dataclass(frozen=True)
class Listed:
    """`plan.Transfers` of a plain list. tabled: what the tables say; bundled: the bundles; where those are something
    else."""

    listed: list[Transfer]
    tabled: list[Transfer]
    bundled: list[Bundle]

    def bundles(self) -> Iterator[Bundle]:
        return iter(self.bundled)

    def __call__(self, target: str | None = None) -> Iterator[Transfer]:
        return (transfer for transfer in self.listed if target in (None, transfer.target))

    def tables(self, target: str | None = None) -> Iterator[TransferTable]:
        for one in self.tabled:
            if target in (None, one.target):
                source, goal = (
                    np.array(region, np.int64).reshape(1, -1, 3) for region in (one.source_region, one.target_region)
                )
                yield TransferTable(
                    one.target, one.piece, one.source,
                    source[..., 0], source[..., 1], tuple(source[0, :, 2].tolist()),
                    goal[..., 0], goal[..., 1], tuple(goal[0, :, 2].tolist()),
                    np.array([one.sender]), np.array([0]), (one.receivers,),
                    np.array([one.bytes]), np.array([one.round]), np.array([one.relay]),
                )  # fmt: skip


def edited(plan: SyncPlan, change: Change) -> SyncPlan:
    transfers = change(list(plan.transfers()))
    return replace(plan, transfers=Listed(transfers, transfers, list(plan.transfers.bundles())))


def forms() -> dict[str, tuple[tuple[int, ...], str]]:
    shapes = {"embed": (10, 6), "q": (6, 8), "k": (6, 4), "gate": (6, 10), "norm": (6,), "same": (8, 3)}
    return {path: (shape, "float32") for path, shape in shapes.items()}


def mapping() -> FormatMap:
    """A padded and a tied embedding, a fused leaf, an interleaved transposed one, a cast and one that may stay."""
    leaf = {path: whole(path, *form) for path, form in forms().items()}
    halves = op.split(leaf["gate"], 1, [5, 5])
    return op.format_map(
        "test",
        [
            op.pad(leaf["embed"], 0, 12, "vocab"),
            op.tie(leaf["embed"], "head"),
            op.rename(op.fuse([leaf["q"], op.repeat_kv(leaf["k"], 1, 2, 2)], 1, ranks=4), "qk"),
            op.rename(op.transpose(op.interleave(halves, 1)), "gate"),
            op.cast(leaf["norm"], "bfloat16"),
            leaf["same"],
        ],
    )


def the_plan() -> SyncPlan:
    """From eight devices to a 3 x 2 mesh over three of them and three others; `same` stays where it is."""
    source_mesh = MeshShape((("fsdp", 4), ("tensor", 2)), tuple(range(8)))
    mesh = MeshShape((("tensor", 3), ("data", 2)), (5, 6, 7, 8, 9, 10))
    specs = {"norm": ((),), "same": ((), ())}
    source = {
        path: Placed(shape, dtype, Layout(source_mesh, specs.get(path, (("fsdp",), ("tensor",)))))
        for path, (shape, dtype) in forms().items()
    }
    cuts = {"norm": (("tensor", "data"),), "same": ((), ())}
    small = MeshShape((("data", 2),), (6, 3))
    destination = {
        path: Placed(
            target.shape, target.dtype, Layout(small if path == "same" else mesh, cuts.get(path, ((), ("tensor",))))
        )
        for path, target in mapping().targets.items()
    }
    return make_plan(source, destination, mapping(), staging_bytes=300)


@pytest.fixture(scope="module")
def plan() -> SyncPlan:
    return the_plan()


def test_a_valid_plan_passes(plan: SyncPlan) -> None:
    certificate = check(plan)
    certificate.require()
    assert certificate.ok and not certificate.failed
    for form in FORMS:
        again = check(plan, form=form)
        again.require()
        assert again.transfers == certificate.transfers
    assert [c.name for c in certificate.checks] == [*CHECKS, "listing"]
    assert certificate.transfers == sum(1 for _ in plan.transfers())
    assert plan.leaves["same"].in_place and not plan.leaves["norm"].in_place
    assert check(edited(plan, list)).ok, "the same transfers, one table each"
    shown = json.loads(json.dumps(certificate.to_json()))
    assert shown["ok"] is True and shown["leaves"] == 6 and len(shown["checks"]) == len(CHECKS) + 1


def first(transfers: list[Transfer], **wanted: object) -> int:
    """The first transfer with these attributes that goes over a link."""
    for at, one in enumerate(transfers):
        if one.receivers != (one.sender,) and all(getattr(one, name) == value for name, value in wanted.items()):
            return at
    raise AssertionError(f"no transfer with {wanted}")


def changed(target: str, change: Callable[[Transfer], Transfer], **wanted: object) -> Change:
    def edit(transfers: list[Transfer]) -> list[Transfer]:
        at = first(transfers, target=target, **wanted)
        return [*transfers[:at], change(transfers[at]), *transfers[at + 1 :]]

    return edit


def moved(region: tuple[tuple[int, int, int], ...], dim: int, by: int) -> tuple[tuple[int, int, int], ...]:
    start, stop, step = region[dim]
    return (*region[:dim], (start + by, stop + by, step), *region[dim + 1 :])


def shift_both(one: Transfer) -> Transfer:
    """One row further on both sides: what is read is still what belongs where it is written."""
    by = 1 if one.target_region[0][0] == 0 else -1
    return replace(one, source_region=moved(one.source_region, 0, by), target_region=moved(one.target_region, 0, by))


def localless(transfers: list[Transfer]) -> list[Transfer]:
    """A part that its receiver has is fetched from somebody else who has it."""
    at = next(i for i, t in enumerate(transfers) if t.target == "norm" and t.receivers == (t.sender,))
    one = transfers[at]
    size = one.bytes  # at the destination's type, which is also the one that crosses here
    return [*transfers[:at], replace(one, sender=0, bytes=size), *transfers[at + 1 :]]


def drop(transfers: list[Transfer]) -> list[Transfer]:
    at = first(transfers, target="head")
    return transfers[:at] + transfers[at + 1 :]


def repeat(transfers: list[Transfer]) -> list[Transfer]:
    return [*transfers, transfers[first(transfers, target="head")]]


def exchange(transfers: list[Transfer]) -> list[Transfer]:
    """Two devices get each other's parts; every total stays as it is."""
    a = first(transfers, target="qk")
    b = next(
        i
        for i, t in enumerate(transfers)
        if t.target == "qk"
        and t.bytes == transfers[a].bytes
        and not set(t.receivers) & set(transfers[a].receivers)
        and t.receivers != (t.sender,)
        and t.sender not in transfers[a].receivers
        and transfers[a].sender not in t.receivers
    )
    swapped = list(transfers)
    swapped[a] = replace(transfers[a], receivers=transfers[b].receivers)
    swapped[b] = replace(transfers[b], receivers=transfers[a].receivers)
    return swapped


TRANSFERS: dict[str, tuple[Change, str]] = {
    "one dropped": (drop, "coverage"),
    "all dropped": (lambda transfers: [], "coverage"),
    "one repeated": (repeat, "coverage"),
    "two receivers exchanged": (exchange, "coverage"),
    "written one column on": (
        changed("qk", lambda t: replace(t, target_region=moved(t.target_region, 1, 1))),
        "pieces",
    ),
    "read one row on": (changed("qk", lambda t: replace(t, source_region=moved(t.source_region, 0, 1))), "pieces"),
    "read before the start": (
        changed("qk", lambda t: replace(t, source_region=moved(t.source_region, 0, -40))),
        "pieces",
    ),
    "both moved by a row": (changed("head", shift_both), "coverage"),
    "read without the stride": (
        changed("gate", lambda t: replace(t, target_region=tuple((a, b, 1) for a, b, _ in t.target_region))),
        "pieces",
    ),
    "a region of nothing": (
        changed("head", lambda t: replace(t, target_region=((0, 0, 1), t.target_region[1]))),
        "pieces",
    ),
    "sent by one who lacks it": (
        changed("head", lambda t: replace(t, sender=next(d for d in range(8) if d != t.sender))),
        "provenance",
    ),
    "sent by a stranger": (changed("head", lambda t: replace(t, sender=77)), "provenance"),
    "sent by a receiver's device that never had it": (changed("head", lambda t: replace(t, sender=9)), "provenance"),
    "fewer bytes claimed": (changed("head", lambda t: replace(t, bytes=t.bytes - 4)), "bytes"),
    "a replica forgotten": (
        changed("qk", lambda t: replace(t, receivers=t.receivers[:-1])),
        "coverage",
    ),
    "no receiver": (changed("qk", lambda t: replace(t, receivers=())), "provenance"),
    "a receiver too many": (changed("head", lambda t: replace(t, receivers=(*t.receivers, 0))), "coverage"),
    "a receiver of another part": (
        changed("head", lambda t: replace(t, receivers=tuple(d for d in (5, 7, 9) if d not in t.receivers))),
        "coverage",
    ),
    "a receiver twice": (changed("qk", lambda t: replace(t, receivers=t.receivers * 2)), "coverage"),
    "the sender as one of several": (
        changed("qk", lambda t: replace(t, receivers=(*t.receivers, t.sender)), sender=5),
        "provenance",
    ),
    "fetched although it is there": (localless, "crossing"),
    "a round beyond all numbers": (changed("head", lambda t: replace(t, round=2**62)), "rounds"),
    "a region of another rank": (
        changed("head", lambda t: replace(t, source_region=(*t.source_region, (0, 1, 1)))),
        "pieces",
    ),
    "a step of nothing": (
        changed("head", lambda t: replace(t, source_region=((0, 1, 0), t.source_region[1]))),
        "pieces",
    ),
    "far outside": (
        changed("head", lambda t: replace(t, target_region=moved(t.target_region, 0, 2**40))),
        "pieces",
    ),
    "after the last round": (changed("head", lambda t: replace(t, round=99)), "rounds"),
    "before the first round": (changed("head", lambda t: replace(t, round=-1)), "rounds"),
    "everything in one round": (lambda transfers: [replace(t, round=0) for t in transfers], "staging"),
    "a relay out of nowhere": (changed("head", lambda t: replace(t, relay=True)), "relays"),
    "another piece": (changed("qk", lambda t: replace(t, piece=t.piece + 1)), "pieces"),
    "no such piece": (changed("qk", lambda t: replace(t, piece=99)), "pieces"),
    "a wrong tie": (changed("head", lambda t: replace(t, source="gate")), "pieces"),
    "a leaf that is in place moves": (
        lambda transfers: [*transfers, replace(transfers[first(transfers, target="head")], target="same")],
        "in_place",
    ),
}


def refused(certificate: Certificate, name: str) -> None:
    assert name in certificate.failed, certificate.to_json()
    with pytest.raises(SyncError, match=f"{name}: "):
        certificate.require()


@pytest.mark.parametrize("name", TRANSFERS)
def test_a_corrupted_transfer_is_refused(plan: SyncPlan, name: str) -> None:
    change, expected = TRANSFERS[name]
    wrong = edited(plan, change)
    refused(check(wrong), expected)
    refused(check(wrong, form="rows"), expected)
    refused(check(wrong, form="bundles"), "bundles")  # the bundles are as they were: the tables are not theirs


def with_leaf(plan: SyncPlan, path: str, **changes: object) -> SyncPlan:
    return replace(plan, leaves={**plan.leaves, path: replace(plan.leaves[path], **changes)})  # type: ignore[arg-type]


def with_map(plan: SyncPlan, *targets: Target, without: str = "", **changes: object) -> SyncPlan:
    table = {path: t for path, t in plan.mapping.targets.items() if path != without} | {t.path: t for t in targets}
    return replace(plan, mapping=replace(plan.mapping, targets=table, **changes))  # type: ignore[arg-type]


def with_bounds(plan: SyncPlan, **changes: float | tuple[float, ...]) -> SyncPlan:
    return replace(plan, bounds=replace(plan.bounds, **changes))  # type: ignore[arg-type]


def off_by_one(table: np.ndarray) -> np.ndarray:
    changed_table = table.copy()
    changed_table.reshape(-1)[int(np.argmax(table))] += 1
    return changed_table


PLANS: dict[str, tuple[Callable[[SyncPlan], SyncPlan], str]] = {
    "a target is missing": (lambda p: with_map(p, without="head"), "mapping"),
    "a source leaf is unused": (
        lambda p: replace(p, source={**p.source, "lost": p.source["q"]}),
        "mapping",
    ),
    "a target reads half of its leaf": (
        lambda p: with_map(p, op.pad(op.split(whole("same", (8, 3), "float32"), 0, [4, 4])[0], 0, 8, "rows")),
        "mapping",
    ),
    "padding without a rule": (lambda p: with_map(p, replace(p.mapping.targets["embed"], filled=False)), "mapping"),
    "another destination shape": (
        lambda p: replace(p, destination={**p.destination, "head": replace(p.destination["head"], shape=(10, 7))}),
        "mapping",
    ),
    "a leaf is missing": (
        lambda p: replace(p, leaves={path: leaf for path, leaf in p.leaves.items() if path != "head"}),
        "leaves",
    ),
    "a leaf too many": (lambda p: replace(p, leaves={**p.leaves, "extra": p.leaves["head"]}), "leaves"),
    "another shape": (lambda p: with_leaf(p, "head", shape=(6, 10)), "leaves"),
    "another layout": (lambda p: with_leaf(p, "head", target_layout=p.leaves["norm"].target_layout), "leaves"),
    "another type on the wire": (lambda p: with_leaf(p, "norm", wire_dtype="float32"), "leaves"),
    "in place, said wrongly": (lambda p: with_leaf(p, "head", in_place=True), "in_place"),
    "in place, not said": (lambda p: with_leaf(p, "same", in_place=False), "in_place"),
    "bytes": (lambda p: with_leaf(p, "head", bytes=239), "bytes"),
    "bytes written": (lambda p: with_leaf(p, "head", bytes_written=0), "bytes"),
    "bytes copied locally": (lambda p: with_leaf(p, "head", bytes_local=0), "bytes"),
    "bytes filled": (lambda p: with_leaf(p, "embed", bytes_filled=0), "bytes"),
    "bytes crossing": (lambda p: with_leaf(p, "head", bytes_crossing=p.leaves["head"].bytes_crossing - 1), "bytes"),
    "link bytes": (lambda p: replace(p, links=off_by_one(p.links)), "links"),
    "sent bytes": (lambda p: replace(p, sent=off_by_one(p.sent)), "links"),
    "received bytes": (lambda p: replace(p, received=p.received[:-1]), "links"),
    "a device is missing": (
        lambda p: replace(
            p, devices=p.devices[:-1], links=p.links[:-1, :-1], sent=p.sent[:-1], received=p.received[:-1]
        ),
        "links",
    ),
    "no devices": (
        lambda p: replace(p, devices=(), links=np.zeros((0, 0)), sent=np.zeros(0), received=np.zeros(0)),
        "links",
    ),
    "a link that carries nothing": (lambda p: replace(p, link=replace(p.link, link_gbps=0.0)), "bounds"),
    "no number of seconds": (lambda p: replace(p, seconds=float("nan")), "bounds"),
    "no number as a bound": (lambda p: with_bounds(p, send_s=float("nan")), "bounds"),
    "devices out of order": (lambda p: replace(p, devices=p.devices[::-1]), "links"),
    "new buffers": (lambda p: replace(p, new_bytes=p.new_bytes - 4), "new_bytes"),
    "peak": (lambda p: replace(p, peak_staging_bytes=p.peak_staging_bytes - 4), "staging"),
    "a round over the budget": (lambda p: replace(p, staging_bytes=p.peak_staging_bytes - 1), "staging"),
    "too few rounds": (lambda p: replace(p, rounds=p.rounds - 1), "rounds"),
    "receive bound too low": (lambda p: with_bounds(p, receive_s=p.bounds.receive_s / 2), "bounds"),
    "receive bound too high": (lambda p: with_bounds(p, receive_s=p.bounds.receive_s * 2), "bounds"),
    "send bound above what is sent": (lambda p: with_bounds(p, send_s=p.bounds.send_s * 3), "bounds"),
    "a send bound that its prices do not prove": (
        lambda p: with_bounds(p, send_s=p.bounds.send_s * 1.01, send_prices=p.bounds.send_prices),
        "bounds",
    ),
    "a send bound without prices": (lambda p: with_bounds(p, send_prices=()), "bounds"),
    "prices that add up to more": (
        lambda p: with_bounds(p, send_prices=tuple(2 * price for price in p.bounds.send_prices)),
        "bounds",
    ),
    "a price below nothing": (
        lambda p: with_bounds(p, send_prices=(-1.0, 2.0, *(0.0 for _ in p.devices[2:]))),
        "bounds",
    ),
    "relays that are not said": (lambda p: replace(p, relayed=not p.relayed), "relays"),
    "another hash": (lambda p: replace(p, hash=p.hash[::-1]), "hash"),
    "a bisection that is no limit": (lambda p: with_bounds(p, bisection_s=1.0), "bounds"),
    "a better ratio": (lambda p: replace(p, load_over_bound=0.5), "bounds"),
    "seconds below the bound": (lambda p: replace(p, seconds=p.bounds.seconds / 2), "bounds"),
    "seconds below what the rounds take": (lambda p: replace(p, seconds=p.bounds.seconds), "bounds"),
    "a slower link than planned for": (lambda p: replace(p, link=replace(p.link, link_gbps=1.0)), "bounds"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_wrong_claim_is_refused(plan: SyncPlan, name: str) -> None:
    change, expected = PLANS[name]
    for form in FORMS:
        refused(check(change(plan), form=form), expected)


def test_a_list_that_is_not_the_tables_is_refused(plan: SyncPlan) -> None:
    transfers = list(plan.transfers())
    short = replace(plan, transfers=Listed(transfers[:-1], transfers, list(plan.transfers.bundles())))
    refused(check(short), "listing")
    assert check(short, listing=False).ok, "all else is proved by the tables"


def test_without_a_map_nothing_counts_as_examined(plan: SyncPlan) -> None:
    certificate = check(with_map(plan, without="head"))
    assert certificate.failed == CHECKS
    assert "not examined" in certificate.checks[-1].detail


def test_nothing_to_do_is_a_plan_too() -> None:
    layout = Layout(MeshShape((("x", 2),), (0, 1)), (("x",),))
    same = {"w": Placed((8,), "float32", layout), "none": Placed((0,), "float32", layout)}
    check(make_plan(same, same)).require()
    check(make_plan({}, {})).require()
