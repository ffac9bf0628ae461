import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
from lockstep.sync import codes
from lockstep.sync.delta import Delta, apply, choose, encode
from lockstep.types import PolicyVersion

BASE, NEXT = PolicyVersion(4, "b" * 32), PolicyVersion(5, "c" * 32)
DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "int32", "float8_e4m3fn")


def noise(shape, dtype, rng) -> np.ndarray:
    """Random bits: NaNs with payloads, infinities, zeros of both signs."""
    dtype = jnp.dtype(dtype)
    return rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def changed(array: np.ndarray, density: float, rng) -> np.ndarray:
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}").copy()
    where = rng.random(len(bits)) < density
    bits[where] ^= rng.integers(1, 256, int(where.sum())).astype(bits.dtype)
    return bits.view(array.dtype).reshape(array.shape)


def same(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def through(base, new):
    """`new` as it comes out of bytes."""
    delta = encode(base, new, BASE, NEXT)
    data = delta.to_bytes()
    assert len(data) == delta.coded_bytes
    return apply(Delta.from_bytes(data), base, BASE)


@settings(max_examples=150)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.97, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_of_any_bits(shapes, dtype, density, seed):
    rng = np.random.default_rng(seed)
    base = {f"l{i}": noise(shape, dtype, rng) for i, shape in enumerate(shapes)}
    before = {path: leaf.copy() for path, leaf in base.items()}
    new = {path: changed(leaf, density, rng) for path, leaf in base.items()}
    got = through(base, new)
    assert all(same(got[path], new[path]) for path in new) and got.keys() == new.keys()
    assert all(same(base[path], before[path]) for path in base)


@settings(max_examples=100)
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1)), min_size=1, max_size=40))
def test_varints_of_any_size(numbers):
    coded = np.frombuffer(codes.varints(np.array(numbers, np.int64)), "u1")
    assert codes.gaps(coded).tolist() == numbers


@pytest.mark.parametrize("coding, density", [("none", 0), ("gaps", 0.02), ("bitmap", 0.4), ("all", 0.999)])
def test_the_shortest_code_of_the_positions_is_taken(coding, density):
    rng = np.random.default_rng(0)
    base = {"w": noise((64, 100), "bfloat16", rng)}
    delta = encode(base, {"w": changed(base["w"], density, rng)}, BASE, NEXT)
    leaf = delta.leaves["w"]
    assert leaf.coding == coding
    assert delta.density == leaf.density == leaf.changed / 6400 and leaf.density == pytest.approx(density, abs=0.02)
    assert delta.report()["leaves"]["w"]["bytes"] == len(leaf.positions) + len(leaf.values)


def test_nothing_changed_costs_nothing_and_returns_what_is_there():
    base = {"w": np.zeros((1000, 1000), np.float32), "empty": np.zeros((0, 4), np.float32), "one": np.float32(3)[...]}
    delta = encode(base, {path: leaf.copy() for path, leaf in base.items()}, BASE, NEXT)
    assert delta.changed == 0 and delta.coded_bytes < 400
    assert all(got is base[path] for path, got in apply(delta, base, BASE).items())
    none = encode({}, {}, BASE, NEXT)
    assert none.density == 0 and apply(Delta.from_bytes(none.to_bytes()), {}, BASE) == {}


def test_a_huge_gap_and_a_long_run():
    base = {"w": np.zeros(20_000_000, np.int8)}
    new = {"w": base["w"].copy()}
    new["w"][[0, 19_999_999]] = 1
    new["w"][7_000_000:7_100_000] = 2
    delta = encode(base, new, BASE, NEXT)
    assert delta.leaves["w"].coding == "gaps" and delta.coded_bytes < 2000
    assert same(apply(delta, base, BASE)["w"], new["w"])


def test_signs_of_zero_and_payloads_of_nan_are_changes():
    was = np.array([0.0, np.nan, 1.0], np.float32)
    now = np.array([0x80000000, 0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
    delta = encode({"w": was}, {"w": now}, BASE, NEXT)
    assert delta.changed == 2 and same(apply(delta, {"w": was}, BASE)["w"], now)
    nan = encode({"w": now}, {"w": now.copy()}, BASE, NEXT)
    assert nan.changed == 0  # equal bits, though NaN != NaN


def test_values_not_differences():
    """What a delta writes does not depend on what was there."""
    rng = np.random.default_rng(1)
    base = {"w": noise((500,), "bfloat16", rng)}
    new = {"w": changed(base["w"], 0.2, rng)}
    delta = encode(base, new, BASE, NEXT)
    assert same(apply(delta, new, BASE)["w"], new["w"])  # on its own result, under a false label


def test_leaves_that_are_strided_views():
    rng = np.random.default_rng(2)
    base = {"w": noise((40, 60), "float32", rng)[::2, ::3]}
    new = {"w": changed(np.ascontiguousarray(base["w"]), 0.1, rng)}
    assert same(through(base, new)["w"], new["w"])


def test_arrays_on_devices_come_back_where_they_were():
    rng = np.random.default_rng(3)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    layouts = {"cut": P("a", ("b", "c")), "some": P(None, "b"), "whole": P()}
    host = {path: noise((8, 12), "bfloat16", rng) for path in layouts}
    new = {path: changed(leaf, 0.2, rng) for path, leaf in host.items()}
    installed = {path: jax.device_put(host[path], NamedSharding(mesh, spec)) for path, spec in layouts.items()}
    trained = {path: jax.device_put(new[path], NamedSharding(mesh, P("b"))) for path in new}
    got = apply(encode(installed, trained, BASE, NEXT), installed, BASE)
    for path, leaf in got.items():
        assert isinstance(leaf, jax.Array) and leaf.sharding == installed[path].sharding
        assert same(leaf, new[path]) and same(installed[path], host[path])


# -- what must be refused ------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> tuple[dict, Delta]:
    rng = np.random.default_rng(4)
    base = {"a": noise((40,), "bfloat16", rng), "b": noise((5, 3), "float32", rng)}
    new = {"a": changed(base["a"], 0.05, rng), "b": changed(base["b"], 0.5, rng)}
    return base, encode(base, new, BASE, NEXT)


def test_every_flipped_bit_is_detected(small):
    data = small[1].to_bytes()
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SyncError, match="delta"):
            Delta.from_bytes(torn)


def test_every_truncation_and_any_tail_is_detected(small):
    data = small[1].to_bytes()
    for size in range(len(data)):
        with pytest.raises(SyncError, match="delta"):
            Delta.from_bytes(data[:size])
    with pytest.raises(SyncError, match="cut short or altered"):
        Delta.from_bytes(data + b"\0")


@pytest.mark.parametrize(
    "policy, said",
    [
        (PolicyVersion(3, "b" * 32), "version 3"),
        (PolicyVersion(4, "d" * 32), "version 4 .d"),
        (NEXT, "applied already"),
    ],
)
def test_no_base_but_its_own(small, policy, said):
    base, delta = small
    with pytest.raises(SyncError, match=rf"goes from version 4 .*{said}.*Push the full weights"):
        apply(delta, base, policy)


def test_leaves_that_do_not_fit_are_named(small):
    base, delta = small
    with pytest.raises(SyncError, match="lack b"):
        apply(delta, {"a": base["a"]}, BASE)
    with pytest.raises(SyncError, match="have z"):
        apply(delta, {**base, "z": base["a"]}, BASE)
    with pytest.raises(SyncError, match=r"b is float32\[5, 3\] in the delta and float32\[3, 5\]"):
        apply(delta, {**base, "b": base["b"].reshape(3, 5)}, BASE)
    with pytest.raises(SyncError, match=r"b was float32\[5, 3\] .* is int32\[5, 3\]"):
        encode(base, {**base, "b": base["b"].view(np.int32)}, BASE, NEXT)
    with pytest.raises(SyncError, match="lack b"):
        encode(base, {"a": base["a"]}, BASE, NEXT)
    with pytest.raises(SyncError, match="w has type complex128"):
        encode({"w": np.zeros(2, complex)}, {"w": np.ones(2, complex)}, BASE, NEXT)


def rewritten(delta: Delta, change) -> bytes:
    """`delta` encoded by somebody who means something else by it: header changed, digest right."""
    header = json.loads(delta._header())
    change(header)
    twin = Delta(delta.base, delta.policy, delta.leaves)
    object.__setattr__(twin, "_header", lambda: json.dumps(header).encode())
    return twin.to_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("base"),
        lambda h: h["base"].append(1),
        lambda h: h["policy"].__setitem__(0, -1),
        lambda h: h["policy"].__setitem__(0, True),
        lambda h: h["leaves"].append(h["leaves"][0]),
        lambda h: h["leaves"].pop(),
        lambda h: h["leaves"][0].pop(),
        lambda h: h["leaves"][0].__setitem__(0, 7),
        lambda h: h["leaves"][0].__setitem__(1, [-1]),
        lambda h: h["leaves"][0].__setitem__(1, [2**60]),
        lambda h: h["leaves"][0].__setitem__(3, 10**9),
        lambda h: h["leaves"][0].__setitem__(4, "xor"),
        lambda h: h["leaves"][0].__setitem__(4, "all"),
        lambda h: h["leaves"][0].__setitem__(4, []),
        lambda h: h["leaves"][0].__setitem__(5, 10**12),
        lambda h: h["leaves"][0].__setitem__(6, 10**12),
    ],
)
def test_headers_that_make_no_sense(small, change):
    with pytest.raises(SyncError, match="header cannot be read"):
        Delta.from_bytes(rewritten(small[1], change))


def with_leaf(delta: Delta, **fields) -> Delta:
    """`delta` with other contents of leaf `a`."""
    from dataclasses import replace

    return Delta(delta.base, delta.policy, {**delta.leaves, "a": replace(delta.leaves["a"], **fields)})


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": b"garbage"},
        {"values": b""},
        {"values": codes.pack(b"x" * 10**6)},  # a bomb: unpacks to more than the leaf can take
        {"values": codes.pack(b"x")},
        {"positions": codes.pack(b"\x80\x80")},
        {"positions": codes.pack(b"\xff" * 10 + b"\x01")},
        {"positions": codes.pack(b"\x7f" * 3)},
        {"positions": codes.pack(b"\xff" * 8 + b"\x7f" + b"\0\0")},
        {"coding": "bitmap"},
        {"coding": "bitmap", "positions": codes.pack(b"\xff" * 5)},
    ],
)
def test_codes_that_make_no_sense(small, fields):
    base, delta = small
    with pytest.raises(SyncError, match="code of a is inconsistent"):
        apply(Delta.from_bytes(with_leaf(delta, **fields).to_bytes()), base, BASE)


# -- when it pays ---------------------------------------------------------------------------------------------------


def test_choice_says_why():
    rng = np.random.default_rng(5)
    base = {"w": noise((1000, 100), "bfloat16", rng)}
    sparse = encode(base, {"w": changed(base["w"], 0.01, rng)}, BASE, NEXT)
    dense = encode(base, {"w": noise((1000, 100), "bfloat16", rng)}, BASE, NEXT)
    use, why = choose(sparse, 200_000)
    assert use and why.startswith("delta: 1.0") and "cross instead of 195.3 KiB" in why
    use, why = choose(dense, 200_000)
    assert not use and "no less than the 195.3 KiB of the full plan" in why


def test_what_an_optimizer_does_in_bfloat16_is_small():
    """Steps of 1e-6 on weights of 0.04 rarely cross a rounding boundary of bfloat16."""
    rng = np.random.default_rng(6)
    master = rng.standard_normal((500, 400), np.float32) * np.float32(0.04)
    moved = master - np.float32(1e-6) * np.sign(rng.standard_normal(master.shape, np.float32))
    base, new = {"w": master.astype(ml_dtypes.bfloat16)}, {"w": moved.astype(ml_dtypes.bfloat16)}
    delta = encode(base, new, BASE, NEXT)
    assert 0 < delta.density < 0.05
    assert delta.coded_bytes < 0.1 * base["w"].nbytes and same(through(base, new)["w"], new["w"])
