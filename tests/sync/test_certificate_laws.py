"""Of any plan that `make_plan` makes: the certificate holds, and carrying it out gives what the map says. Of one that
was tampered with: either the certificate refuses it or carrying it out still does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  (teaches numpy the name `bfloat16`)
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.sync import operations as op
from lockstep.sync.certificate import check
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.mapping import FormatMap, Target, materialise, whole
from lockstep.sync.plan import Bundle, LinkModel, Placed, Region, SyncPlan, Transfer, TransferTable
from lockstep.sync.planner import make_plan

Change = Callable[[list[Transfer]], list[Transfer]]
AXES = ("a", "b", "c")
FREE = LinkModel(latency_s=0.0)  # else few bytes would go straight to all who need them, in one round


@dataclass(frozen=True)
class Sides:
    source: Mapping[str, Placed]
    destination: Mapping[str, Placed]
    mapping: FormatMap


@st.composite
def meshes(draw: st.DrawFn, devices: int = 10) -> MeshShape:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: int(np.prod(s)) <= devices))
    count = int(np.prod(sizes))
    numbers = draw(st.permutations(range(devices)))[:count]
    return MeshShape(tuple(zip(AXES, sizes, strict=False)), tuple(numbers))


def layouts(draw: st.DrawFn, mesh: MeshShape, dims: int) -> Layout:
    spec: list[list[str]] = [[] for _ in range(dims)]
    if dims:
        for axis in draw(st.permutations([name for name, _ in mesh.axes])):
            at = draw(st.integers(0, dims))  # dims: it cuts nothing
            if at < dims:
                spec[at].append(axis)
    memory = draw(st.sampled_from(["device"] * 5 + ["host"]))
    return Layout(mesh, tuple(tuple(axes) for axes in spec), memory)


def targets(draw: st.DrawFn, leaves: dict[str, Target]) -> list[Target]:
    """Destination leaves that use up all of the source's."""
    made: list[Target] = []
    for path, leaf in leaves.items():
        kind = draw(
            st.sampled_from(["same", "transpose", "pad", "split", "unstack", "mix", "repeat", "tie", "cast", "fuse"])
        )
        dim = draw(st.integers(0, max(0, len(leaf.shape) - 1)))
        size = leaf.shape[dim] if leaf.shape else 0
        if not leaf.shape or kind == "same":
            made.append(leaf)
        elif kind == "transpose":
            made.append(op.transpose(leaf, draw(st.permutations(range(len(leaf.shape))))))
        elif kind == "pad":
            made.append(op.pad(leaf, dim, size + draw(st.integers(1, 5)), "rows"))
        elif kind == "split" and size > 1:
            cut = draw(st.integers(1, size - 1))
            made += [op.rename(part, f"{path}.{i}") for i, part in enumerate(op.split(leaf, dim, [cut, size - cut]))]
        elif kind == "unstack" and size:
            made += [op.rename(part, f"{path}.{i}") for i, part in enumerate(op.unstack(leaf, dim))]
        elif kind == "mix":
            count = draw(st.sampled_from([n for n in (2, 3, 1) if size % n == 0]))
            made.append(op.interleave(op.deinterleave(leaf, dim, count)[::-1], dim))
        elif kind == "repeat" and size:
            heads = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            made.append(op.repeat_kv(leaf, dim, heads, draw(st.integers(1, 3))))
        elif kind == "tie":
            made += [leaf, op.tie(leaf, f"{path}.copy")]
        elif kind == "fuse":
            ranks = draw(st.sampled_from([n for n in (2, 4, 1) if size % n == 0]))
            made.append(op.fuse([leaf, leaf], dim, ranks=ranks))
        else:
            made.append(op.cast(leaf, draw(st.sampled_from(["bfloat16", "float32", "float16"]))))
    return made


@st.composite
def sides(draw: st.DrawFn) -> Sides:
    """A few leaves of any shape, cut in any way, on overlapping or disjoint meshes; one mesh at times."""
    forms = {}
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 12), min_size=0, max_size=3)))
        forms[f"w{i}"] = whole(f"w{i}", shape, draw(st.sampled_from(["float32", "bfloat16", "int8"])))
    source_mesh = draw(meshes())
    target_mesh = draw(st.one_of(meshes(), st.just(source_mesh)))
    source = {p: Placed(t.shape, t.dtype, layouts(draw, source_mesh, len(t.shape))) for p, t in forms.items()}
    mapping = op.format_map("random", targets(draw, forms))
    destination = {}
    for path, target in mapping.targets.items():
        layout = layouts(draw, target_mesh, len(target.shape))
        if path in source and len(source[path].shape) == len(target.shape) and draw(st.booleans()):
            layout = source[path].layout
        destination[path] = Placed(target.shape, target.dtype, layout)
    return Sides(source, destination, mapping)


def values(placed: Mapping[str, Placed]) -> dict[str, np.ndarray]:
    """Source leaves of random bits' worth of numbers that every dtype here can hold."""
    random = np.random.default_rng(0)
    return {p: random.integers(-100, 100, x.shape).astype(x.dtype) for p, x in placed.items()}


def carried_out(plan: SyncPlan, source: Mapping[str, np.ndarray]) -> dict[str, dict[int, np.ndarray]]:
    """target path -> device -> its part of the leaf: the plan done transfer by transfer, round by round. What a device
    does not hold is not there to be sent; what nothing writes keeps its noise, but for padding."""
    done: dict[str, dict[int, np.ndarray]] = {}
    for path, target in plan.mapping.targets.items():
        placed = plan.destination[path]
        full = {device: np.full(target.shape, 77).astype(target.dtype) for device in placed.layout.mesh.devices}
        if target.filled:
            for array in full.values():
                array[...] = 0
        if plan.leaves[path].in_place:
            (name,) = plan.leaves[path].sources
            full = dict.fromkeys(full, source[name])
        else:
            for transfer in sorted(plan.transfers(path), key=lambda t: t.round):
                block = _read(plan, transfer, source, full)
                for device in transfer.receivers:
                    full[device][_slices(transfer.target_region)] = block
        done[path] = {
            device: array[tuple(slice(*span) for span in placed.layout.box(device, placed.shape))]
            for device, array in full.items()
        }
    return done


def _read(
    plan: SyncPlan, transfer: Transfer, source: Mapping[str, np.ndarray], full: Mapping[int, np.ndarray]
) -> np.ndarray:
    if transfer.relay:
        return full[transfer.sender][_slices(transfer.target_region)].copy()
    piece = plan.mapping.targets[transfer.target].pieces[transfer.piece]
    placed = plan.source[transfer.source]
    box = placed.layout.box(transfer.sender, placed.shape)
    held = np.full(placed.shape, 55).astype(placed.dtype)
    mine = tuple(slice(*span) for span in box)
    held[mine] = source[transfer.source][mine]
    block = held[_slices(transfer.source_region)]
    fixed = [dim for dim, _ in piece.fixed]
    kept = [dim for dim in range(block.ndim) if dim not in fixed]
    block = block.reshape([block.shape[dim] for dim in kept])
    along = [dim for dim in piece.dims if dim is not None]
    block = block.transpose([kept.index(dim) for dim in along])
    return block.reshape([len(range(*span)) for span in transfer.target_region])


def _slices(region: tuple[tuple[int, int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in region)


def planned(made: Sides, staging_bytes: int = 1 << 30, relay: bool = True) -> SyncPlan:
    return make_plan(made.source, made.destination, made.mapping, FREE, staging_bytes, relay)


def gives_what_the_map_says(plan: SyncPlan) -> bool:
    source = values(plan.source)
    for path, parts in carried_out(plan, source).items():
        placed, whole_leaf = plan.destination[path], materialise(plan.mapping.targets[path], source)
        for device, part in parts.items():
            box = placed.layout.box(device, placed.shape)
            if not np.array_equal(part, whole_leaf[tuple(slice(*span) for span in box)]):
                return False
    return True


@settings(max_examples=120)
@given(sides(), st.sampled_from([1 << 30, 2000]), st.booleans())
def test_every_plan_is_certified_and_right(made: Sides, staging_bytes: int, relay: bool) -> None:
    plan = planned(made, staging_bytes, relay)
    forms = [check(plan, listing=True, form=form) for form in ("bundles", "rows")]
    for certificate in forms:
        assert certificate.ok, certificate.to_json()
    assert forms[0].transfers == forms[1].transfers
    assert gives_what_the_map_says(plan)


@dataclass(frozen=True)
class Listed:
    """`plan.Transfers` of a plain list."""

    transfers: list[Transfer]
    bundled: list[Bundle]

    def bundles(self) -> Iterator[Bundle]:
        return iter(self.bundled)

    def __call__(self, target: str | None = None) -> Iterator[Transfer]:
        return (transfer for transfer in self.transfers if target in (None, transfer.target))

    def tables(self, target: str | None = None) -> Iterator[TransferTable]:
        for one in self(target):
            source, goal = (np.array(r, np.int64).reshape(1, -1, 3) for r in (one.source_region, one.target_region))
            steps = tuple(source[0, :, 2].tolist()), tuple(goal[0, :, 2].tolist())
            yield TransferTable(
                one.target, one.piece, one.source,
                source[..., 0], source[..., 1], steps[0], goal[..., 0], goal[..., 1], steps[1],
                np.array([one.sender]), np.array([0]), (one.receivers,),
                np.array([one.bytes]), np.array([one.round]), np.array([one.relay]),
            )  # fmt: skip


@st.composite
def tampered(draw: st.DrawFn, transfers: list[Transfer]) -> list[Transfer]:
    """One to three small changes, each of a kind that keeps the list well formed, if not right."""
    changed = list(transfers)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(changed) - 1))
        other = draw(st.sampled_from(transfers))
        one = changed[at]
        kind = draw(st.sampled_from(["drop", "repeat", "sender", "receivers", "source", "target", "round", "relay"]))
        if kind == "drop" and len(changed) > 1:
            del changed[at]
        elif kind == "repeat":
            changed.append(one)
        elif kind == "sender":
            changed[at] = replace(one, sender=other.sender)
        elif kind == "receivers":
            changed[at] = replace(one, receivers=other.receivers)
        elif kind in ("source", "target") and len(getattr(one, f"{kind}_region")):
            region: Region = getattr(one, f"{kind}_region")
            dim, by = draw(st.integers(0, len(region) - 1)), draw(st.sampled_from([-1, 1]))
            start, stop, step = region[dim]
            span = draw(st.sampled_from([(start + by, stop + by, step), (start, stop + by, step)]))
            changed[at] = replace(one, **{f"{kind}_region": (*region[:dim], span, *region[dim + 1 :])})  # type: ignore[arg-type]
        elif kind == "round":
            changed[at] = replace(one, round=draw(st.integers(0, 3)))
        elif kind == "relay":
            changed[at] = replace(one, relay=not one.relay)
    return changed


@settings(max_examples=150)
@given(sides(), st.data())
def test_what_is_certified_is_right(made: Sides, data: st.DataObject) -> None:
    """The four checks by which an element gets where it belongs, of plans that anybody might have made."""
    plan = planned(made)
    transfers = list(plan.transfers())
    assume(transfers)
    changed = data.draw(tampered(transfers))
    wrong = listed(plan, changed)
    failed = set(check(wrong, listing=True).failed)
    if not failed & {"pieces", "provenance", "relays", "coverage", "rounds", "in_place"}:
        assert gives_what_the_map_says(wrong)
    if sorted(map(repr, changed)) == sorted(map(repr, transfers)):
        # Rows of a piece in another order do the same, but are not, row for row, what its bundle lists.
        assert failed == (set() if by_piece(changed) == by_piece(transfers) else {"bundles"})


@settings(max_examples=60)
@given(sides(), st.data())
def test_nothing_can_be_left_out_or_done_twice(made: Sides, data: st.DataObject) -> None:
    plan = planned(made)
    transfers = list(plan.transfers())
    assume(transfers)
    at = data.draw(st.integers(0, len(transfers) - 1))
    for changed in (transfers[:at] + transfers[at + 1 :], [*transfers, transfers[at]]):
        assert "coverage" in check(listed(plan, changed)).failed


def by_piece(transfers: list[Transfer]) -> dict[tuple[str, int], list[Transfer]]:
    rows: dict[tuple[str, int], list[Transfer]] = {}
    for one in transfers:
        rows.setdefault((one.target, one.piece), []).append(one)
    return rows


def listed(plan: SyncPlan, transfers: list[Transfer]) -> SyncPlan:
    return replace(plan, transfers=Listed(transfers, list(plan.transfers.bundles())))


def edited(plan: SyncPlan, change: Change) -> SyncPlan:
    return listed(plan, change(list(plan.transfers())))


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


def relayed_plan() -> SyncPlan:
    """One source, eight copies: passed on from receiver to receiver."""
    source = {"w": Placed((64, 4), "float32", Layout(MeshShape((("x", 1),), (0,)), ((), ())))}
    mesh = MeshShape((("data", 8),), tuple(range(1, 9)))
    return make_plan(source, {"w": Placed((64, 4), "float32", Layout(mesh, ((), ())))}, link=FREE, staging_bytes=512)


def test_a_relayed_plan_passes() -> None:
    plan = relayed_plan()
    assert plan.relayed and any(transfer.relay for transfer in plan.transfers())
    check(plan).require()


def relays_first(transfers: list[Transfer]) -> list[Transfer]:
    return [replace(t, round=0) if t.relay else t for t in transfers]


def swap_relay(one: Transfer) -> Transfer:
    """One of the receivers passes it on, to the relay among others; but it has not got it."""
    return replace(one, sender=one.receivers[0], receivers=(one.sender, *one.receivers[1:]))


RELAYED: dict[str, tuple[Change, str]] = {
    "relayed before it arrived": (relays_first, "relays"),
    "relayed by another receiver": (changed("w", swap_relay, relay=True), "coverage"),
    "relayed by the source": (changed("w", lambda t: replace(t, sender=0), relay=True), "relays"),
    "a relayed copy twice": (lambda ts: [*ts, ts[first(ts, relay=True)]], "coverage"),
    "said not to be a relay": (changed("w", lambda t: replace(t, relay=False), relay=True), "provenance"),
    "never sent to the relay": (lambda ts: [t for t in ts if t is not ts[first(ts, relay=False)]], "coverage"),
}


@pytest.mark.parametrize("name", RELAYED)
def test_a_corrupted_relay_is_refused(name: str) -> None:
    change, expected = RELAYED[name]
    assert expected in check(edited(relayed_plan(), change)).failed


def hops(*rounds: int) -> Change:
    """Device 0 to 1, 1 to 2, ... 7 to 8, all of it, in these rounds."""
    whole_leaf = ((0, 64, 1), (0, 4, 1))
    return lambda _: [
        Transfer("w", 0, "w", whole_leaf, whole_leaf, at, (at + 1,), 1024, number, relay=at > 0)
        for at, number in enumerate(rounds)
    ]


def test_a_relay_may_pass_on_what_was_relayed_but_not_before() -> None:
    plan = relayed_plan()
    assert not {"relays", "coverage", "provenance"} & set(check(edited(plan, hops(*range(8)))).failed)
    assert "relays" in check(edited(plan, hops(0, 1, 2, 3, 3, 4, 5, 6))).failed
    assert "relays" in check(edited(plan, hops(0, 1, 2, 4, 3, 5, 6, 7))).failed
