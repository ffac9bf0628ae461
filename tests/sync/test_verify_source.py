"""`source_digests`, `leaf_digests` and `host_digest` agree: on every kind of map, layout and type."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
from lockstep.sync import keyed_sums
from lockstep.sync.digest import host_digest
from lockstep.sync.mapping import FormatMap, Piece, Run, Target, materialise, whole
from lockstep.sync.verify import check_same, leaf_digests, source_digests

DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "int32", "float8_e4m3fn", "float8_e5m2")


def noise(shape, dtype="float32", seed=0) -> np.ndarray:
    dtype = jnp.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (math.prod(shape) * dtype.itemsize,), np.uint8)
    return raw.view(dtype).reshape(shape)


def finite(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def mesh(*sizes) -> Mesh:
    return Mesh(np.array(jax.devices())[: math.prod(sizes)].reshape(sizes), ("a", "b", "c")[: len(sizes)])


def put(array, spec=None, sizes=(2, 2, 2)):
    return jnp.asarray(array) if spec is None else jax.device_put(array, NamedSharding(mesh(*sizes), spec))


def of(*targets: Target) -> FormatMap:
    return FormatMap("test", {t.path: t for t in targets}, {}, {})


def piece(source, dims, *runs, fixed=()) -> Piece:
    return Piece(source, dims, tuple(Run(*run) for run in runs), fixed)


def check(mapping: FormatMap, host, source) -> None:
    """The digests foretold are those of the leaves made by numpy, in host memory and on a device."""
    made = {path: materialise(target, host) for path, target in mapping.targets.items()}
    foretold = source_digests(source, mapping)
    assert foretold == {path: host_digest(leaf) for path, leaf in made.items()}
    check_same(foretold, leaf_digests({path: jnp.asarray(leaf) for path, leaf in made.items()}), "actor", "rollout")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (3, 0, 2), (9, 4), (17, 3), (3, 8, 5), (2, 3, 2, 3)])
def test_host_and_device_agree(shape, dtype):
    array = noise(shape, dtype)
    assert host_digest(array) == leaf_digests({"w": jnp.asarray(array)})["w"]


@pytest.mark.parametrize("dtype", ["float64", "int64"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 9, 3)])
def test_elements_of_eight_bytes(shape, dtype):
    array = noise(shape, dtype)
    with jax.enable_x64(True):
        leaf = jnp.asarray(array)
    assert host_digest(array) == leaf_digests({"w": leaf})["w"]
    turned = of(Target("t", shape[::-1], dtype, (_turned(shape),)))
    assert source_digests({"w": leaf}, turned) == {"t": host_digest(np.array(array.T, order="C"))}


def _turned(shape) -> Piece:
    runs = tuple(Run(0, 0, size) for size in reversed(shape))
    return Piece("w", tuple(range(len(shape)))[::-1], runs)


def test_leaves_in_pinned_host_memory():
    host = finite((8, 6))
    for layout in (NamedSharding(mesh(2, 2), P("a")), SingleDeviceSharding(jax.devices()[1])):
        leaf = jax.device_put(host, layout.with_memory_kind("pinned_host"))
        assert leaf_digests({"w": leaf}) == {"w": host_digest(host)}
        turned = of(Target("t", (6, 8), "bfloat16", (piece("w", (1, 0), (0, 0, 6), (0, 0, 8)),)))
        check(turned, {"w": host}, {"w": leaf})


def test_host_digest_takes_any_memory():
    array = noise((300, 700), "float32")
    digest = host_digest(array)
    assert digest == host_digest(np.asfortranarray(array))
    assert host_digest(array[::2, ::3]) == host_digest(array[::2, ::3].copy())
    swapped = array.view("u4").byteswap().view(">f4").reshape(array.shape)
    assert host_digest(swapped) == digest
    array.setflags(write=False)
    assert host_digest(array) == digest
    with pytest.raises(SyncError, match="adapter has type bool"):
        host_digest(np.array([True]), "adapter")
    for dtype in ("int4", "float4_e2m1fn", "complex64"):
        with pytest.raises(SyncError, match=f"type {dtype}"):
            host_digest(np.zeros(2, jnp.dtype(dtype)))


def test_large_leaves_of_all_shapes():
    for shape in ((200_001,), (3, 70_000), (70_001, 3), (333, 777), (3, 101, 333)):
        array = noise(shape, "bfloat16")
        assert host_digest(array) == leaf_digests({"w": jnp.asarray(array)})["w"]


SPECS = [None, P("a"), P(None, "c"), P("b", ("c", "a"))]


@pytest.mark.parametrize("spec", SPECS)
def test_maps_of_matrices(spec):
    host = {n: finite((8, 16), i) for i, n in enumerate("qkv")} | {"fused": finite((24, 16), 9)}
    source = {name: put(leaf, spec) for name, leaf in host.items()}
    rows = [piece(n, (0, 1), (0, i * 8, 8), (0, 0, 16)) for i, n in enumerate("qkv")]
    columns = [piece(n, (1, 0), (0, 0, 16), (0, i, 8, 1, 3)) for i, n in enumerate("qkv")]
    check(
        of(
            whole("q", (8, 16), "float32"),
            Target("cast", (8, 16), "bfloat16", whole("k", (8, 16), "float32").pieces),
            Target("turned", (16, 8), "float16", (piece("q", (1, 0), (0, 0, 16), (0, 0, 8)),)),
            Target("fused rows", (24, 16), "float32", tuple(rows)),
            Target("interleaved columns", (16, 24), "bfloat16", tuple(columns)),
            Target("padded", (11, 20), "float32", (piece("v", (0, 1), (0, 0, 8), (0, 3, 16)),), filled=True),
            Target("split", (5, 16), "float32", (piece("fused", (0, 1), (7, 0, 5), (0, 0, 16)),)),
            Target("every third", (8, 16), "float32", (piece("fused", (0, 1), (1, 0, 8, 3), (0, 0, 16)),)),
            Target("inner", (3, 4), "float32", (piece("fused", (0, 1), (11, 0, 3), (6, 0, 4, 2)),)),
            Target("stacked", (3, 8, 16), "float32", tuple(
                piece(n, (None, 0, 1), (0, i, 1), (0, 0, 8), (0, 0, 16)) for i, n in enumerate("qkv"))),
            Target("twice", (16, 16), "float32", tuple(
                piece("q", (0, 1), (i * 4, i * 8 + j * 4, 4), (0, 0, 16)) for i in range(2) for j in range(2))),
            Target("tied", (8, 16), "float32", whole("q", (8, 16), "float32").pieces),
            Target("row", (16,), "float32", (piece("q", (1,), (0, 0, 16), fixed=((0, 5),)),)),
            Target("one", (), "bfloat16", (piece("q", (), fixed=((0, 5), (1, 2))),)),
            Target("zeros", (4, 4), "float32", (), filled=True),
        ),
        host,
        source,
    )  # fmt: skip


@pytest.mark.parametrize("spec", [None, P(("a", "b"), "c"), P(None, "b", "a")])
def test_maps_of_stacks(spec):
    host = {"experts": finite((4, 8, 16)), "norm": finite((4, 8, 16), 1)}
    source = {name: put(leaf, spec) for name, leaf in host.items()}
    each = [
        Target(f"e{i}", (16, 8), "bfloat16", (piece("experts", (2, 1), (0, 0, 16), (0, 0, 8), fixed=((0, i),)),))
        for i in range(4)
    ]
    gate_up = [
        Target(f"g{i}", (8, 24), "float32", (
            piece("experts", (1, 2), (0, 0, 8), (0, 0, 16), fixed=((0, i),)),
            piece("norm", (1, 2), (0, 0, 8), (8, 16, 8), fixed=((0, 3 - i),))))
        for i in range(4)
    ]  # fmt: skip
    halves = [
        Target(f"h{i}", (2, 8, 16), "float32", (piece("norm", (0, 1, 2), (i, 0, 2, 2), (0, 0, 8), (0, 0, 16)),))
        for i in range(2)
    ]
    rolled = Target("rolled", (16, 4, 8), "float32", (piece("norm", (2, 0, 1), (0, 0, 16), (0, 0, 4), (0, 0, 8)),))
    check(of(*each, *gate_up, *halves, rolled, whole("norm", (4, 8, 16), "float32")), host, source)


@st.composite
def random_maps(draw):
    """A source leaf and a target made of one strided, permuted part of it, padded."""
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from([4, 8, 12])) for _ in range(ndim))
    order = draw(st.permutations(range(ndim)))
    runs, sizes = [], []
    for dim in order:
        step = draw(st.integers(1, 3))
        count = draw(st.integers(1, -(-shape[dim] // step)))
        start = draw(st.integers(0, shape[dim] - (count - 1) * step - 1))
        onto, gap = draw(st.integers(0, 3)), draw(st.integers(1, 2))
        runs.append(Run(start, onto, count, step, gap))
        sizes.append(onto + (count - 1) * gap + 1 + draw(st.integers(0, 2)))
    extra = draw(st.booleans())
    dims, at = tuple(order), draw(st.integers(0, ndim))
    if extra:  # a dim that the source lacks
        dims, runs = (*dims[:at], None, *dims[at:]), [*runs[:at], Run(0, 2, 1), *runs[at:]]
        sizes.insert(at, 4)
    cuts = draw(
        st.sampled_from([P(), P("a"), P("b"), P(("b", "a"))] + ([P("a", "b"), P(None, "b")] if ndim > 1 else []))
    )
    return shape, Target("t", tuple(sizes), "float32", (Piece("w", dims, tuple(runs)),), filled=True), cuts


@settings(max_examples=12)
@given(random_maps(), st.integers(0, 99))
def test_any_strided_permuted_padded_part(case, seed):
    shape, target, cuts = case
    host = {"w": noise(shape, "float32", seed)}
    check(of(target), host, {"w": put(host["w"], cuts, sizes=(2, 2))})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_casts_round_as_everywhere(dtype):
    """Ties, overflow, subnormals, infinities and zeros of both signs, vectorised and not."""
    edges = np.array(
        [0, 1e-45, 1e-40, 6e-8, 3e-8, 1 + 2**-8, 1 + 2**-9, 3e38, 65519.9, 65520, 449, 464.1, np.inf, 1e-7]
    )
    values = np.concatenate([finite(4000), edges, -edges]).astype(np.float32)
    with np.errstate(over="ignore"):
        cast = values.astype(jnp.dtype(dtype))
    mapping = of(Target("w", values.shape, dtype, whole("w", values.shape, dtype).pieces))
    assert source_digests({"w": jnp.asarray(values)}, mapping) == {"w": host_digest(cast)}


def test_identity_is_the_same_pass_and_tied_leaves_are_read_once(monkeypatch):
    calls = []
    start = keyed_sums.start_sums
    monkeypatch.setattr("lockstep.sync.verify.start_sums", lambda *a: calls.append(a[0]) or start(*a))
    source = {"embed": put(finite((8, 16)), P("a")), "experts": put(finite((4, 8, 16)))}
    tied = Target("head", (8, 16), "float32", whole("embed", (8, 16), "float32").pieces)
    each = [
        Target(f"e{i}", (8, 16), "float32", (piece("experts", (1, 2), (0, 0, 8), (0, 0, 16), fixed=((0, i),)),))
        for i in range(4)
    ]
    source_digests(source, of(whole("embed", (8, 16), "float32"), tied, *each))
    assert calls == ["embed", "experts"]
    program = keyed_sums._program(mesh(2, 2, 2), ("a", None), 0, np.dtype("float32"), (), False)
    compiled = program._cache_size()
    assert leaf_digests({"embed": source["embed"]})["embed"] == source_digests(source, of(tied))["head"]
    assert program._cache_size() == compiled


def test_a_wrong_element_anywhere_is_seen_in_its_target_only():
    host = {n: finite((6, 10), i) for i, n in enumerate("ab")}
    fuse = [piece(n, (1, 0), (0, i * 10, 10), (0, 0, 6)) for i, n in enumerate("ab")]
    mapping = of(Target("ab", (20, 6), "bfloat16", tuple(fuse)), whole("a", (6, 10), "float32"))
    right = source_digests({n: jnp.asarray(a) for n, a in host.items()}, mapping)
    made = materialise(mapping.targets["ab"], host)
    for index in np.ndindex(made.shape):
        wrong = made.copy()
        wrong.view("u2")[index] ^= 1
        assert host_digest(wrong) != right["ab"]
    host["b"][0, 0] += 1
    now = source_digests({n: jnp.asarray(a) for n, a in host.items()}, mapping)
    assert now["ab"] != right["ab"] and now["a"] == right["a"]


def test_wrong_maps_of_the_right_shape_are_seen():
    """A missing transpose where the leaf is square, gate and up exchanged, one head written twice."""
    host = {"w": finite((8, 8)), "u": finite((8, 8), 1)}
    source = {n: jnp.asarray(a) for n, a in host.items()}
    right = of(
        Target("t", (8, 8), "float32", (piece("w", (1, 0), (0, 0, 8), (0, 0, 8)),)),
        Target("gu", (16, 8), "float32", tuple(
            piece(n, (0, 1), (0, i * 8, 8), (0, 0, 8)) for i, n in enumerate("wu"))),
    )  # fmt: skip
    wrong = {"t": host["w"], "gu": np.concatenate([host["u"], host["w"]])}
    foretold = source_digests(source, right)
    assert all(host_digest(leaf) != foretold[path] for path, leaf in wrong.items())
    assert host_digest(np.concatenate([host["w"], host["w"]])) != foretold["gu"]


def test_replicas_that_differ_at_the_source_are_named():
    layout = NamedSharding(mesh(2, 2), P("a"))
    array = jax.device_put(finite((4, 6, 8)), layout)
    shards = [s.data for s in array.addressable_shards]
    shards[1] = jax.device_put(np.asarray(shards[1]) + 1, jax.devices()[1])
    source = {"w": jax.make_array_from_single_device_arrays((4, 6, 8), layout, shards)}
    torn = r"device 0 and device 1 should hold the same part of w, .*\(0, 2\).*drifted apart"
    with pytest.raises(SyncError, match=torn):
        source_digests(source, of(whole("w", (4, 6, 8), "bfloat16")))
    each = [
        Target(f"e{i}", (6, 8), "float32", (piece("w", (1, 2), (0, 0, 6), (0, 0, 8), fixed=((0, i),)),)) for i in (0, 1)
    ]
    with pytest.raises(SyncError, match=torn):
        source_digests(source, of(*each))


def test_maps_that_do_not_fit_are_named():
    source = {"w": jnp.zeros((4, 4))}
    with pytest.raises(SyncError, match="t is made of x, which the source does not hold"):
        source_digests(source, of(Target("t", (4, 4), "float32", whole("x", (4, 4), "float32").pieces)))
    with pytest.raises(SyncError, match=r"t \(5, 4\) <- w \(4, 4\): a piece reads beyond dim 0"):
        source_digests(source, of(Target("t", (5, 4), "float32", whole("w", (5, 4), "float32").pieces)))
    with pytest.raises(SyncError, match="w has type bool"):
        source_digests(source, of(whole("w", (4, 4), "bool")))
