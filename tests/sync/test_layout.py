import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import shardings
from lockstep.errors import ConfigError
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.placement import parse_axes, placed

MESH = MeshShape((("a", 2), ("b", 3)), (10, 11, 12, 20, 21, 22))
SPEC = ModelSpec("llama", 24, 16, 2, 1, 8, 24, (LayerKind(Rope(1e4)),) * 3, 1e-5, 1.0, 64)


def test_shards_are_of_the_rounded_up_size_and_the_last_may_be_short_or_empty():
    layout = Layout(MESH, (("b",), ("a", "b")[:1]))
    assert layout.edges((10, 5)) == ((0, 4, 8, 10), (0, 3, 5))
    assert layout.edges((3, 1)) == ((0, 1, 2, 3), (0, 1, 1))
    assert layout.edges((2, 0)) == ((0, 1, 2, 2), (0, 0, 0))
    assert layout.box(10, (10, 5)) == ((0, 4), (0, 3))
    assert layout.box(22, (10, 5)) == ((8, 10), (3, 5))


def test_of_two_axes_that_cut_one_dim_the_first_varies_slowest():
    boxes = [Layout(MESH, (("a", "b"),)).box(d, (12,))[0][0] for d in MESH.devices]
    assert boxes == [0, 2, 4, 6, 8, 10]
    boxes = [Layout(MESH, (("b", "a"),)).box(d, (12,))[0][0] for d in MESH.devices]
    assert boxes == [0, 4, 8, 2, 6, 10]


def test_shards_list_their_copies():
    layout = Layout(MESH, ((), ("b",)))
    assert layout.shards().tolist() == [[10, 20], [11, 21], [12, 22]]
    assert Layout(MESH, ()).shards().tolist() == [[10, 11, 12, 20, 21, 22]]
    assert Layout(MeshShape((), (7,)), ((),)).shards().tolist() == [[7]]


def test_a_layout_in_words():
    assert Layout(MESH, (("a", "b"), ()), "host").describe() == (
        "a=2 b=3 (devices 10-12,20-22), dims cut by [a+b, whole], in host memory"
    )
    assert Layout(MeshShape((("a", 4),), (3, 4, 5, 6)), (("a",),)).describe() == "a=4 (devices 3-6), dims cut by [a]"


@settings(max_examples=50)
@given(st.permutations(["a", "b"]), st.lists(st.integers(0, 2), min_size=2, max_size=2), st.integers(0, 9), st.data())
def test_the_boxes_of_one_copy_cover_a_leaf_once(order, dims, size, data):
    spec = [[], [], []]
    for axis, dim in zip(order, dims, strict=True):
        spec[dim].append(axis)
    layout = Layout(MESH, tuple(map(tuple, spec)))
    shape = (size, *data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    count = np.zeros(shape, np.int64)
    for device in MESH.devices:
        count[tuple(slice(*part) for part in layout.box(device, shape))] += 1
    assert (count == layout.shards().shape[1]).all()
    for shard, devices in enumerate(layout.shards().tolist()):
        assert all(layout.shard_of()[device] == shard for device in devices)


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"tensor": 2, "data": 2}, {"fsdp": 2, "tensor": 2, "data": 2}])
def test_a_planned_placement_is_where_jax_puts_the_leaf(axes):
    table = leaf_table(SPEC)
    mesh = Dial.build({"actor": axes}).mesh("actor")
    for path, sharding in shardings(table, mesh).items():
        layout = placed(table, axes, 0, "float32")[path].layout
        where = sharding.devices_indices_map(table[path].shape)
        for device, index in where.items():
            box = tuple(part.indices(size)[:2] for part, size in zip(index, table[path].shape, strict=True))
            assert layout.box(device.id, table[path].shape) == box


def test_a_pipeline_puts_consecutive_layers_on_consecutive_devices():
    found = placed(leaf_table(SPEC), {"pipeline": 2, "tensor": 2}, 4, "bfloat16")
    devices = {path: p.layout.mesh.devices for path, p in found.items()}
    assert devices["embed"] == devices["layers.0.q"] == devices["layers.1.down"] == (4, 5)
    assert devices["layers.2.q"] == devices["final_norm"] == devices["head"] == (6, 7)
    assert found["layers.0.q"].layout.spec == ((), ("tensor",))


def test_experts_are_cut_by_their_axis():
    leaf = Leaf("layers.0.experts_up", (6, 8, 4), ("expert", "embed", "mlp"), "normal")
    found = placed({leaf.path: leaf}, {"fsdp": 2, "expert": 3, "tensor": 2}, range(12), "bfloat16")[leaf.path]
    assert found.layout.spec == (("expert",), ("fsdp",), ("tensor",))
    assert found.layout.box(11, leaf.shape) == ((4, 6), (4, 8), (2, 4))


def test_axes_are_read_from_text():
    assert parse_axes("tensor=4, data=2") == {"tensor": 4, "data": 2}
    assert parse_axes("") == parse_axes("1") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensr=4", "did you mean tensor"),
        ("tensor", "tensor = '' is not a positive integer"),
        ("tensor=0", "not a positive integer"),
        ("tensor=-2", "not a positive integer"),
        ("tensor=²", "not a positive integer"),
        ("fsdp=2,fsdp=4", "gives fsdp twice"),
        ("fsdp=2,", "'' is not an axis"),
    ],
)
def test_axes_that_make_no_sense_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_axes(text)


def test_a_placement_that_cannot_be_is_refused():
    table = leaf_table(SPEC)
    with pytest.raises(ConfigError, match="pipeline = 4 is more than the 3 layers"):
        placed(table, {"pipeline": 4}, 0, "bfloat16")
    with pytest.raises(ConfigError, match="needs 4 different devices; got 3"):
        placed(table, {"tensor": 4}, [0, 1, 2], "bfloat16")
    with pytest.raises(ConfigError, match="needs 2 different devices"):
        placed(table, {"tensor": 2}, [1, 1], "bfloat16")
    with pytest.raises(ConfigError, match="did you mean expert"):
        placed(table, {"experts": 2}, 0, "bfloat16")
