import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.cluster.cuts import RULES, bytes_per_device, cut, unsharded
from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import describe_layout, gather, place, reduce_gradient, shardings, spec_for
from lockstep.errors import SyncError
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table

AXES = ("data", "fsdp", "tensor")
SPEC = ModelSpec("llama", 22, 12, 2, 1, 6, 20, (LayerKind(Rope(1e4)),), 1e-5, 1.0, 64)


def mesh_of(**axes: int) -> Mesh:
    return Dial.build({"actor": axes}).mesh("actor")


def test_every_logical_axis_of_a_model_has_a_rule():
    table = leaf_table(SPEC)
    assert {axis for leaf in table.values() for axis in leaf.axes} - {None} <= set(RULES)


def test_specs_follow_the_rules():
    table, mesh = leaf_table(SPEC), mesh_of(data=2, fsdp=2, tensor=2)
    assert spec_for(table["embed"], mesh) == P("tensor", "fsdp")
    assert spec_for(table["layers.0.q"], mesh) == P("fsdp", "tensor")
    assert spec_for(table["layers.0.down"], mesh) == P("tensor", "fsdp")
    assert spec_for(table["final_norm"], mesh) == P(None)
    assert spec_for(Leaf("a", (12, 4), ("embed", "rank"), "normal"), mesh) == P("fsdp", None)


def test_axes_of_size_one_are_not_named():
    assert spec_for(leaf_table(SPEC)["layers.0.q"], mesh_of(data=4)) == P(None, None)


def test_an_axis_that_does_not_divide_leaves_the_dim_whole_and_is_listed():
    leaf = Leaf("layers.3.k", (12, 6), ("embed", "kv_heads"), "normal")
    axes, whole = cut(leaf, {"data": 1, "fsdp": 2, "tensor": 4})
    assert axes == ("fsdp", None)
    assert [str(w) for w in whole] == ["layers.3.k dim 1 (kv_heads = 6) stays whole: tensor = 4 does not divide it"]
    assert [w.path for w in unsharded(leaf_table(SPEC), {"data": 1, "fsdp": 1, "tensor": 4})] == [
        "embed",
        "layers.0.k",
        "layers.0.v",
        "head",
    ]


def test_one_mesh_axis_cuts_one_dim_of_a_leaf():
    leaf = Leaf("x", (4, 8), ("heads", "mlp"), "normal")
    axes, whole = cut(leaf, {"data": 1, "fsdp": 1, "tensor": 4})
    assert axes == ("tensor", None)
    assert "already used" in str(whole[0])


def test_place_puts_every_leaf_where_its_rule_says_and_counts_its_bytes():
    table, mesh = leaf_table(SPEC), mesh_of(fsdp=2, tensor=2)
    params = {p: np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape) for p, leaf in table.items()}
    placed = place(dict(reversed(params.items())), table, mesh)
    assert list(placed) == list(table)
    for path, where in shardings(table, mesh).items():
        assert placed[path].sharding == where
        np.testing.assert_array_equal(placed[path], params[path])
    on_first = sum(leaf.addressable_shards[0].data.nbytes for leaf in placed.values())
    assert bytes_per_device(table, mesh.shape, 4) == on_first
    again = place(placed, table, mesh)
    assert all(again[p] is placed[p] for p in table)


def test_placed_weights_do_not_share_memory_with_the_host_arrays():
    leaf = Leaf("w", (64, 64), (None, None), "normal")
    raw = np.zeros(64 * 64 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # aligned memory is what jax would adopt without copying
    host = raw[start : start + 64 * 64 * 4].view(np.float32).reshape(64, 64)
    placed = place({"w": host}, {"w": leaf}, mesh_of(data=1))["w"].block_until_ready()
    host[:] = 7
    assert float(jnp.abs(placed).max()) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("layers.0.q"), r"layers\.0\.q is missing"),
        (lambda p: p.update(extra=np.zeros(1)), r"extra is not in the leaf table"),
        (
            lambda p: p.update(final_norm=np.zeros(3, np.float32)),
            r"final_norm has shape \(3,\), the leaf table says \(12,\)",
        ),
    ],
)
def test_place_refuses_what_does_not_fit(change, message):
    table = leaf_table(SPEC)
    params = {p: np.zeros(leaf.shape, np.float32) for p, leaf in table.items()}
    change(params)
    with pytest.raises(SyncError, match=message):
        place(params, table, mesh_of(fsdp=2))


def test_a_layout_in_words():
    mesh = mesh_of(fsdp=2, tensor=2)
    assert describe_layout(NamedSharding(mesh, P("fsdp", None))) == (
        "mesh fsdp=2 tensor=2 (devices 0-3), dims cut by [fsdp, whole], in device"
    )
    assert describe_layout(jax.sharding.SingleDeviceSharding(jax.devices()[2])) == (
        "SingleDeviceSharding on device 2 in device"
    )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("spec", [P("fsdp", "tensor"), P(None, "fsdp"), P(("tensor", "fsdp"), None), P(None, None)])
def test_gather_rebuilds_the_leaf_and_the_gradient_is_the_whole_batch_s(spec, check_vma):
    rng = np.random.default_rng(0)
    # Small integers: every sum is exact, so the comparison is bitwise whatever the order of the devices.
    weight = rng.integers(-3, 4, (8, 4)).astype(np.float32)
    tokens = rng.integers(-3, 4, (16, 8)).astype(np.float32)
    mesh = mesh_of(data=2, fsdp=2, tensor=2)

    def loss(w, rows):
        return jnp.sum((rows @ w) ** 2)

    def body(shard, rows):
        gradient = jax.grad(lambda s: loss(gather(s, spec), rows))(shard)
        return reduce_gradient(gradient, spec, mesh.axis_names), gather(shard, spec)[None]

    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(spec, P(AXES)), out_specs=(spec, P(AXES)), check_vma=check_vma)
    )
    gradient, whole = step(weight, tokens)
    assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    np.testing.assert_array_equal(gradient, jax.grad(loss)(weight, tokens))
    np.testing.assert_array_equal(whole, np.broadcast_to(weight, (8, 8, 4)))


def test_reduced_gradients_are_the_same_bits_every_time():
    mesh, spec = mesh_of(data=2, fsdp=2, tensor=2), P("fsdp", None)
    rng = np.random.default_rng(1)
    weight, tokens = rng.standard_normal((32, 16), np.float32), rng.standard_normal((64, 32), np.float32)

    def body(shard, rows):
        gradient = jax.grad(lambda s: jnp.sum(jnp.tanh(rows @ gather(s, spec))))(shard)
        return reduce_gradient(gradient, spec, mesh.axis_names)

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, P(AXES)), out_specs=spec, check_vma=False))
    first = np.asarray(step(weight, tokens))
    assert all(np.array_equal(first, step(weight, tokens)) for _ in range(20))
