"""Laws of every plan, on random meshes and trees: what its transfers do equals gather-then-place, and its numbers are
those of its transfers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import SyncError
from lockstep.sync import operations as op
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.mapping import FormatMap, Target, materialise, whole
from lockstep.sync.plan import PHASE_BITS, Placed, SyncPlan
from lockstep.sync.planner import make_plan

AXES = ("a", "b", "c")
DTYPES = ("float32", "bfloat16", "float16")
MISSING = -1


@st.composite
def meshes(draw) -> MeshShape:
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=0, max_size=3).filter(lambda s: math.prod(s) <= 8))
    devices = draw(st.permutations(range(10)))[: math.prod(sizes)]
    return MeshShape(tuple(zip(AXES, sizes, strict=False)), tuple(devices))


@st.composite
def layouts(draw, mesh: MeshShape, dims: int) -> Layout:
    spec: list[tuple[str, ...]] = [()] * dims
    for axis, _ in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            spec[dim] = (*spec[dim], axis)
    return Layout(mesh, tuple(spec), draw(st.sampled_from(["device", "device", "host"])))


SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def targets(draw, name: str) -> tuple[list[Target], list[Target]]:
    """Some source leaves, whole, and what a random operation makes of them."""
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["same", "same", "cast", "transpose", "fuse", "interleave", "stack", "every", "pad"]))
    count = 1 if kind in ("same", "cast", "transpose", "every", "pad") else draw(st.integers(2, 3))
    leaves = [whole(f"{name}.{i}", shape, dtype) for i in range(count)]
    dim = draw(st.integers(0, max(0, len(shape) - 1)))
    made = leaves
    if kind == "cast":
        made = [op.cast(leaves[0], draw(st.sampled_from(DTYPES)))]
    elif kind == "transpose":
        made = [op.transpose(leaves[0], draw(st.permutations(range(len(shape)))))]
    elif kind == "stack":
        made = [op.stack(leaves, draw(st.integers(0, len(shape))))]
        if draw(st.booleans()):
            leaves, made = made_whole(made), list(op.unstack(made_whole(made)[0], 0)) if made[0].shape else made
    elif shape and kind == "fuse":
        made = [op.fuse(leaves, dim)]
    elif shape and kind == "interleave":
        made = [op.interleave(leaves, dim)]
    elif shape and kind == "every":
        step = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
        made = list(op.deinterleave(leaves[0], dim, step))
    elif shape and kind == "pad":
        made = [op.pad(leaves[0], dim, shape[dim] + draw(st.integers(0, 5)), "it")]
    return leaves, [op.rename(target, f"{name}.to.{i}") for i, target in enumerate(made)]


def made_whole(targets: list[Target]) -> list[Target]:
    """A made leaf as a source leaf of its own."""
    return [whole(t.path, t.shape, t.dtype) for t in targets]


@st.composite
def problems(draw) -> tuple[dict[str, Placed], dict[str, Placed], FormatMap]:
    """Both sides and the map; some leaves come twice, in layers that are laid out alike."""
    here = draw(st.lists(meshes(), min_size=1, max_size=2))
    there = draw(st.one_of(st.just(here[0]), meshes()))
    source: dict[str, Placed] = {}
    destination: dict[str, Placed] = {}
    table: dict[str, Target] = {}
    for number in range(draw(st.integers(1, 3))):
        leaves, made = draw(targets(f"leaf{number}"))
        mesh = draw(st.sampled_from(here))
        places = [draw(layouts(mesh, len(leaf.shape))) for leaf in leaves]
        goals = [draw(layouts(there, len(target.shape))) for target in made]
        for layer in range(draw(st.sampled_from([1, 1, 2, 3]))):
            for leaf, place in zip(leaves, places, strict=True):
                source[f"{layer}.{leaf.path}"] = Placed(leaf.shape, leaf.dtype, place)
            for target, goal in zip(made, goals, strict=True):
                path = f"{layer}.{target.path}"
                pieces = tuple(replace(piece, source=f"{layer}.{piece.source}") for piece in target.pieces)
                table[path] = replace(target, path=path, pieces=pieces)
                destination[path] = Placed(target.shape, target.dtype, goal)
    return source, destination, FormatMap("random", table, {}, {})


def numbered(leaves: Mapping[str, Placed]) -> dict[str, np.ndarray]:
    """Every element of every leaf its own number, from 1."""
    found, first = {}, 1
    for path, placed in leaves.items():
        size = math.prod(placed.shape)
        found[path] = np.arange(first, first + size).reshape(placed.shape)
        first += size
    return found


def carry_out(plan: SyncPlan) -> dict[str, dict[int, np.ndarray]]:
    """What the transfers leave on every device: target -> device -> whole-shaped array, MISSING where nothing came."""
    content = numbered(plan.source)
    here: dict[str, dict[int, np.ndarray]] = {
        path: {device: np.full(placed.shape, MISSING) for device in placed.layout.mesh.devices}
        for path, placed in plan.destination.items()
    }
    arrived: dict[str, dict[int, np.ndarray]] = {
        path: {device: np.full(array.shape, 1 << 30) for device, array in arrays.items()}
        for path, arrays in here.items()
    }
    for transfer in sorted(plan.transfers(), key=lambda t: t.round):
        piece = plan.mapping.targets[transfer.target].pieces[transfer.piece]
        read = tuple(slice(*part) for part in transfer.source_region)
        write = tuple(slice(*part) for part in transfer.target_region)
        assert transfer.source == piece.source
        order = [dim for dim in piece.dims if dim is not None]
        kept = content[transfer.source][read]
        kept = kept.squeeze(tuple(dim for dim, _ in piece.fixed)).transpose([sorted(order).index(d) for d in order])
        kept = kept.reshape(here[transfer.target][transfer.receivers[0]][write].shape)
        if transfer.relay:
            assert (arrived[transfer.target][transfer.sender][write] < transfer.round).all(), (
                "relayed before it arrived"
            )
            assert np.array_equal(here[transfer.target][transfer.sender][write], kept)
        else:
            placed = plan.source[transfer.source]
            box = placed.layout.box(transfer.sender, placed.shape)
            assert all(a <= x[0] and x[1] <= b for (a, b), x in zip(box, transfer.source_region, strict=True))
        assert kept.size, "an empty transfer"
        for receiver in transfer.receivers:
            where = here[transfer.target][receiver][write]
            assert (where == MISSING).all(), "an element twice"
            here[transfer.target][receiver][write] = kept
            arrived[transfer.target][receiver][write] = transfer.round
    return here


@settings(max_examples=100)
@given(problems(), st.booleans())
def test_the_transfers_are_gather_then_place(problem, relay):
    source, destination, mapping = problem
    plan = make_plan(source, destination, mapping, relay=relay)
    content = numbered(source)
    for path, devices in carry_out(plan).items():
        leaf = plan.leaves[path]
        wanted = materialise(replace(mapping.targets[path], dtype="int64"), content)
        for device, got in devices.items():
            box = tuple(slice(*part) for part in leaf.target_layout.box(device, leaf.shape))
            if leaf.in_place:
                held = leaf.source_layout.box(device, leaf.shape)
                assert held == leaf.target_layout.box(device, leaf.shape)
                assert (got == MISSING).all()
                continue
            inside = np.where(got[box] == MISSING, 0 if leaf.bytes_filled else MISSING, got[box])
            assert np.array_equal(inside, wanted[box])
            got[box] = MISSING
            assert (got == MISSING).all(), "written outside of the device's part"


@settings(max_examples=100)
@given(problems(), st.booleans(), st.sampled_from([1 << 30, 256, 64]))
def test_the_numbers_are_those_of_the_transfers(problem, relay, budget):
    source, destination, mapping = problem
    try:
        plan = make_plan(source, destination, mapping, relay=relay, staging_bytes=budget)
    except SyncError as error:
        # Refused only where rows are about as large as the budget.
        assert int(re.search(r"Give at least (\d+)", str(error))[1]) > budget
        return
    index = {device: i for i, device in enumerate(plan.devices)}
    links = np.zeros_like(plan.links)
    per_leaf: Counter[tuple[str, str]] = Counter()
    rounds = np.zeros((max(1, plan.rounds), 2, len(index)), np.int64)
    for t in plan.transfers():
        leaf = plan.leaves[t.target]
        size = math.prod(len(range(*part)) for part in t.target_region)
        assert size == math.prod(len(range(*part)) for part in t.source_region)
        assert t.bytes == size * np.dtype(leaf.wire_dtype).itemsize
        assert 0 <= t.round < plan.rounds
        assert list(t.receivers) == sorted(set(t.receivers))
        if t.receivers == (t.sender,):
            per_leaf[t.target, "local"] += size * np.dtype(leaf.dtype).itemsize
            continue
        assert t.sender not in t.receivers
        for receiver in t.receivers:
            links[index[t.sender], index[receiver]] += t.bytes
            per_leaf[t.target, "crossing"] += t.bytes
            per_leaf[t.target, "arrived"] += size * np.dtype(leaf.dtype).itemsize
            rounds[t.round, 0, index[t.sender]] += t.bytes
            rounds[t.round, 1, index[receiver]] += t.bytes
    assert np.array_equal(links, plan.links)
    assert np.array_equal(links.sum(axis=1), plan.sent) and np.array_equal(links.sum(axis=0), plan.received)
    assert plan.peak_staging_bytes == rounds.max() <= budget
    assert plan.bytes_crossing == links.sum()
    new = dict.fromkeys(plan.devices, 0)
    for path, leaf in plan.leaves.items():
        item = np.dtype(leaf.dtype).itemsize
        parts = [
            math.prod(b - a for a, b in leaf.target_layout.box(d, leaf.shape)) for d in leaf.target_layout.mesh.devices
        ]
        assert leaf.bytes == item * math.prod(leaf.shape)
        assert leaf.bytes_written == (0 if leaf.in_place else sum(parts) * item)
        assert leaf.bytes_local == per_leaf[path, "local"]
        assert leaf.bytes_crossing == per_leaf[path, "crossing"]
        assert leaf.bytes_filled == leaf.bytes_written - leaf.bytes_local - per_leaf[path, "arrived"]
        assert (
            np.dtype(leaf.wire_dtype).itemsize == min(np.dtype(plan.source[s].dtype).itemsize for s in (*leaf.sources,))
            or leaf.wire_dtype == leaf.dtype
        )
        if not leaf.in_place:
            for device, elements in zip(leaf.target_layout.mesh.devices, parts, strict=True):
                new[device] += elements * item
    assert plan.new_bytes == max(new.values())


@settings(max_examples=60)
@given(problems(), st.booleans(), st.sampled_from([1 << 30, 512]))
def test_bundles_list_as_transfers(problem, relay, budget):
    """What `Bundle` says of itself, row by row, is what `transfers` lists."""
    source, destination, mapping = problem
    try:
        plan = make_plan(source, destination, mapping, relay=relay, staging_bytes=budget)
    except SyncError:
        return
    listed: Counter[object] = Counter()
    for t in plan.transfers():
        for receiver in t.receivers:
            listed[t.target, t.piece, t.sender, receiver, t.round, t.relay] += t.bytes
    said: Counter[object] = Counter()
    for bundle in plan.transfers.bundles():
        size = (bundle.high - bundle.low).prod(axis=1) * bundle.wire_bytes
        for member in bundle.members:
            for cell, device in bundle.local.tolist():
                said[*member, device, device, 0, False] += size[cell]
        for i, cell in enumerate(bundle.cell):
            rows, length = int(bundle.rows[cell]), int(bundle.stop[i] - bundle.start[i]) << PHASE_BITS
            for q in range(int(bundle.start[i]), int(bundle.stop[i])):
                when = (((q - int(bundle.start[i])) << PHASE_BITS) + int(bundle.phase[i])) * bundle.parts // length
                sender, via, group = int(bundle.sender[i]), int(bundle.relay[i]), bundle.groups[bundle.receivers[i]]
                member, each = bundle.members[q // rows], size[cell] // rows
                for receiver in group if via < 0 else [via]:
                    said[*member, sender, receiver, when, False] += each
                for receiver in (set(group) - {via}) if via >= 0 else ():
                    said[*member, via, receiver, when + 1, True] += each
    assert said == listed
