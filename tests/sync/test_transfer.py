import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
from lockstep.sync.transfer import LocalTransport, boxes, plan_leaf, shared_devices, written_bytes

AXES = ("data", "fsdp", "tensor")


def sharding_of(devices, sizes, spec, memory=None) -> NamedSharding:
    grid = np.array(jax.devices())[list(devices)].reshape(sizes)
    return NamedSharding(Mesh(grid, AXES), spec, memory_kind=memory)


def stage(array, destination):
    move = plan_leaf("w", array.sharding, destination, array.shape, array.dtype.itemsize)
    return LocalTransport().stage({"w": array}, {"w": destination}, {"w": move})["w"], move


def put(layout, shape=(8, 8)):
    return jax.device_put(np.random.default_rng(0).standard_normal(shape, np.float32), layout)


@st.composite
def layouts(draw):
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 4, 1)]))
    # Mostly in order, so that leaves already in place are met too.
    order = draw(st.one_of(st.just(list(range(8))), st.permutations(range(8))))
    entries: list = [None, None]
    for axis in draw(st.lists(st.sampled_from(AXES), unique=True)):
        dim = draw(st.integers(0, 1))
        entries[dim] = (entries[dim] or ()) + (axis,)
    return sharding_of(order[: math.prod(sizes)], sizes, P(*entries))


@settings(max_examples=60)
@given(layouts(), layouts(), st.sampled_from([(8, 8), (16, 8)]))
def test_staging_equals_gather_then_place_and_moves_what_was_planned(source, destination, shape):
    array = put(source, shape)
    staged, move = stage(array, destination)
    oracle = jax.device_put(np.array(array), destination)
    assert staged.sharding == destination
    for got, expected in zip(staged.addressable_shards, oracle.addressable_shards, strict=True):
        assert got.device == expected.device and got.index == expected.index
        np.testing.assert_array_equal(got.data, expected.data)
    assert written_bytes(array, staged) == move.bytes_planned
    assert 0 <= move.bytes_crossing <= move.bytes_planned
    # All or nothing: on the source's buffers everywhere, or nowhere.
    assert len(shared_devices(array, staged)) == (len(destination.device_set) if move.in_place else 0)


@settings(max_examples=60)
@given(layouts(), layouts())
def test_planned_bytes_equal_a_count_element_by_element(source, destination):
    move = plan_leaf("w", source, destination, (8, 8), 4)
    held = {}
    for device, box in boxes(source, (8, 8)).items():
        held[device] = {(i, j) for i in range(*box[0]) for j in range(*box[1])}
    wanted = {d: {(i, j) for i in range(*b[0]) for j in range(*b[1])} for d, b in boxes(destination, (8, 8)).items()}
    assert move.in_place == all(held.get(d) == elements for d, elements in wanted.items())
    crossing = sum(len(elements - held.get(d, set())) for d, elements in wanted.items())
    assert move.bytes_crossing == (0 if move.in_place else 4 * crossing)
    assert move.bytes_planned == (0 if move.in_place else 4 * sum(map(len, wanted.values())))


def test_equal_layouts_reuse_the_very_array():
    array = put(sharding_of(range(4), (1, 2, 2), P("fsdp", "tensor")))
    staged, move = stage(array, array.sharding)
    assert staged is array and move.bytes_planned == 0


def test_the_same_places_under_another_mesh_reuse_the_buffers():
    array = put(sharding_of(range(4), (1, 4, 1), P("fsdp", None)))
    destination = sharding_of(range(4), (1, 1, 4), P("tensor", None))
    staged, move = stage(array, destination)
    assert move.in_place and staged.sharding == destination and written_bytes(array, staged) == 0


def test_a_subset_of_replicas_reuses_their_buffers():
    array = put(sharding_of(range(8), (8, 1, 1), P()))
    destination = sharding_of([2, 5], (2, 1, 1), P())
    staged, move = stage(array, destination)
    assert move.in_place and written_bytes(array, staged) == 0
    np.testing.assert_array_equal(staged, array)


def test_shards_that_happen_to_be_in_place_are_copied_with_the_rest():
    array = put(sharding_of(range(4), (1, 4, 1), P("fsdp", None)))
    staged, move = stage(array, sharding_of([0, 1, 3, 2], (1, 4, 1), P("fsdp", None)))
    assert move.bytes_planned == array.nbytes and move.bytes_crossing == array.nbytes // 2
    assert not shared_devices(array, staged)
    np.testing.assert_array_equal(staged, array)
    array.delete()
    assert np.isfinite(np.asarray(staged)).all()


def test_another_memory_is_another_place():
    array = put(sharding_of(range(2), (1, 2, 1), P("fsdp", None)))
    staged, move = stage(array, array.sharding.with_memory_kind("pinned_host"))
    assert move.bytes_planned == move.bytes_crossing == array.nbytes
    assert staged.sharding.memory_kind == "pinned_host" and written_bytes(array, staged) == array.nbytes


def test_a_leaf_that_cannot_be_placed_is_named_with_both_layouts():
    array = put(sharding_of(range(2), (1, 2, 1), P("fsdp", None)), (2, 3))
    destination = sharding_of(range(2, 4), (1, 2, 1), P(None, "fsdp"))
    move = plan_leaf("w", array.sharding, array.sharding, (2, 3), 4)
    with pytest.raises(SyncError, match=r"w float32\[2, 3\] could not be placed.*source: mesh.*destination: mesh"):
        LocalTransport().stage({"w": array}, {"w": destination}, {"w": move.__class__("w", False, 24, 24)})
