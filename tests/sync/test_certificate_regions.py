"""The certificate's own arithmetic against counting on fingers."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.models.catalog import load_spec
from lockstep.models.spec import leaf_table
from lockstep.sync import operations as op
from lockstep.sync.certificate import check
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.mapping import whole
from lockstep.sync.placement import parse_axes, placed
from lockstep.sync.plan import Placed, SyncPlan
from lockstep.sync.planner import make_plan
from lockstep.sync.regions import Lines, Tally, counts, held, inside, lasts, rows_of, sums, volumes

spans = st.tuples(st.integers(0, 11), st.integers(1, 6), st.integers(1, 5)).map(
    lambda s: (s[0], min(12, s[0] + (s[1] - 1) * s[2] + 1), s[2])
)


def elements(region: np.ndarray) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(*span) for span in region.tolist())))


@settings(max_examples=120)
@given(st.integers(0, 3).flatmap(lambda dims: st.lists(st.tuples(*[spans] * dims), min_size=1, max_size=6)))
def test_lines_tell_elements_apart_and_nothing_else(listed: list[tuple[tuple[int, int, int], ...]]) -> None:
    regions = np.array(listed, np.int64).reshape(len(listed), -1, 3)
    dims = regions.shape[1]
    assert volumes(regions).tolist() == [len(elements(region)) for region in regions]
    assert counts(regions).shape == lasts(regions).shape == (len(listed), dims)
    lines = Lines((12,) * dims, regions)
    of, line, low, high = lines.intervals(regions)
    assert ((low >= 0) & (low < high) & (high < lines.length) & (line >= 0) & (line < lines.count)).all()
    places: list[set[tuple[int, int]]] = [set() for _ in listed]
    for at, number, first, stop in zip(of.tolist(), line.tolist(), low.tolist(), high.tolist(), strict=True):
        assert not places[at] & {(number, place) for place in range(first, stop)}
        places[at] |= {(number, place) for place in range(first, stop)}
    # Cells across the lines may hold many elements, but two regions share a cell exactly when they share elements.
    for a, b in itertools.combinations(range(len(listed)), 2):
        assert bool(places[a] & places[b]) == bool(elements(regions[a]) & elements(regions[b]))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = int(np.prod(sizes))
    mesh = MeshShape(tuple(zip("abc", sizes, strict=False)), tuple(draw(st.permutations(range(count + 3)))[:count]))
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    spec: list[list[str]] = [[] for _ in shape]
    for axis in draw(st.permutations([name for name, _ in mesh.axes])):
        at = draw(st.integers(0, len(shape)))
        if at < len(shape):
            spec[at].append(axis)
    return Layout(mesh, tuple(tuple(axes) for axes in spec)), shape


@settings(max_examples=80)
@given(layouts())
def test_parts_are_those_of_the_layout(made: tuple[Layout, tuple[int, ...]]) -> None:
    """Two independent readings of one definition."""
    layout, shape = made
    for device, part in zip(layout.mesh.devices, held(layout, shape).tolist(), strict=True):
        assert tuple((start, stop) for start, stop, _ in part) == layout.box(device, shape)
        assert all(step == 1 for *_, step in part)


def test_rows_sums_and_tallies() -> None:
    assert rows_of((7, 3, 5), np.array([3, 4, 7, 99, -1])).tolist() == [1, -1, 0, -1, -1]
    large = np.array([2**52, 2**52, 2**52, 3])  # beyond what floats add exactly
    assert sums(np.array([0, 0, 0, 0]), large, 2).tolist() == [3 * 2**52 + 3, 0]
    tally = Tally()
    for at in range(5):
        tally.add(np.arange(at, at + 300_000), np.ones(300_000, np.int64))
    keys, total = tally.total()
    assert (keys == np.arange(300_004)).all() and total[:6].tolist() == [1, 2, 3, 4, 5, 5] and total.sum() == 1_500_000


def test_what_is_empty_lies_anywhere() -> None:
    boxes = np.array([[[2, 4, 1]], [[2, 4, 1]], [[2, 4, 1]]])
    assert inside(np.array([[[2, 4, 1]], [[3, 5, 1]], [[9, 9, 1]]]), boxes).tolist() == [True, False, True]


def four_layers() -> SyncPlan:
    """Leaves that are alike, and so examined together; each layer's experts apart, so pieces differ in an index."""
    mesh, other = (MeshShape((("x", 4),), tuple(range(first, first + 4))) for first in (0, 2))
    source, destination, targets = {}, {}, []
    for i in range(4):
        name = f"layers.{i}.up"
        source[name] = Placed((4, 6, 8), "float32", Layout(mesh, (("x",), (), ())))
        for e, expert in enumerate(op.unstack(whole(name, (4, 6, 8), "float32"))):
            targets.append(op.rename(op.transpose(expert), f"{name}.{e}"))
            destination[f"{name}.{e}"] = Placed((8, 6), "float32", Layout(other, (("x",), ())))
    return make_plan(source, destination, op.format_map("experts", targets))


def test_the_leaf_that_is_wrong_among_many_alike_is_named() -> None:
    plan = four_layers()
    assert check(plan).ok
    wrong = dict(plan.leaves)
    leaf = wrong["layers.2.up.3"]
    wrong["layers.2.up.3"] = type(leaf)(**{**vars(leaf), "bytes_local": 0})
    (failure,) = [c for c in check(SyncPlan(**{**vars(plan), "leaves": wrong})).checks if not c.ok]
    assert failure.name == "bytes" and "layers.2.up.3" in failure.detail and "layers.1" not in failure.detail


def test_deepseek_v3_from_256_to_256_devices() -> None:
    """About a million transfers, each of them examined."""
    leaves = leaf_table(load_spec("deepseek-v3"))
    source = placed(leaves, parse_axes("pipeline=16,expert=16"), 0, "bfloat16")
    destination = placed(leaves, parse_axes("tensor=32,data=8"), 256, "bfloat16")
    certificate = check(make_plan(source, destination))
    assert certificate.ok, certificate.to_json()
    assert certificate.leaves == len(leaves) and certificate.transfers > 500_000
