import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
from lockstep.sync import keyed_sums
from lockstep.sync.verify import check_same, leaf_digests, policy_digest, tree_digest

AXES = ("data", "fsdp", "tensor")
DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "float8_e4m3fn")
M64 = 2**64 - 1


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def slow_digest(array: np.ndarray) -> str:
    """The digest element by element, in Python integers."""
    words = array.view(f"u{array.dtype.itemsize}")
    lanes = [0, 0]
    for index, word in np.ndenumerate(words):
        value = int(word) ^ (int(word) >> 16 if array.dtype.itemsize == 4 else 0)
        for lane in range(2):
            product = value
            for dim, i in enumerate(index):
                product *= splitmix(splitmix(2 * dim + lane + 1) + i * 0x9E3779B97F4A7C15 & M64) >> 32 | 1
            lanes[lane] = (lanes[lane] + product) & M64
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]:{lanes[0]:016x}{lanes[1]:016x}"


def noise(shape, dtype="float32", seed=0) -> np.ndarray:
    """Random bits, so NaNs, infinities and subnormals are among them."""
    size = jnp.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, (math.prod(shape) * size,), np.uint8)
    return raw.view(jnp.dtype(dtype)).reshape(shape)


def digest_of(array) -> str:
    return leaf_digests({"w": jnp.asarray(array)})["w"]


def sharding_of(devices, sizes, spec) -> NamedSharding:
    grid = np.array(jax.devices())[list(devices)].reshape(sizes)
    return NamedSharding(Mesh(grid, AXES), spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2), (0, 3)])
def test_digest_equals_its_slow_twin(shape, dtype):
    array = noise(shape, dtype)
    assert digest_of(array) == slow_digest(array)


def test_eight_byte_elements_are_digested_word_by_word():
    with jax.enable_x64(True):
        array = noise((3, 2), "float64")
        words = array.view(np.uint32).reshape(3, 2, 2)
        assert digest_of(array).rpartition(":")[2] == slow_digest(words).rpartition(":")[2]


@st.composite
def layouts(draw, ndim=2):
    """Devices in any order, any mesh of up to 8 of them, any cut, multi-axis ones too; dims must divide by 8."""
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 8, 1), (1, 1, 3)]))
    devices = draw(st.permutations(range(8)))[: math.prod(sizes)]
    entries: list = [None] * ndim
    for axis in draw(st.lists(st.sampled_from(AXES), unique=True)):
        dim = draw(st.integers(0, ndim - 1))
        entries[dim] = (entries[dim] or ()) + (axis,)
    return sharding_of(devices, sizes, P(*(e[0] if e and len(e) == 1 else e for e in entries)))


@settings(max_examples=12)
@given(layouts(), st.sampled_from([(24, 24), (48, 24)]), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 99))
def test_digest_does_not_depend_on_the_layout(layout, shape, dtype, seed):
    array = noise(shape, dtype, seed)
    assert leaf_digests({"w": jax.device_put(array, layout)})["w"] == digest_of(array)


@settings(max_examples=50)
@given(st.integers(0, 11), st.integers(0, 31), st.integers(0, 99))
def test_any_flipped_bit_changes_both_lanes(position, bit, seed):
    array = noise((3, 4), "uint32", seed)
    changed = array.copy()
    changed.flat[position] ^= np.uint32(1 << bit)
    before, after = (digest_of(a).rpartition(":")[2] for a in (array, changed))
    assert before[:16] != after[:16] and before[16:] != after[16:]


def test_moved_and_paired_changes_are_seen():
    array = noise((24, 24), "uint32")
    variants = {
        "transposed": array.T,
        "rolled": np.roll(array, 1, 0),
        "rows swapped": array[[1, 0, *range(2, 24)]],
        "two elements swapped": array.copy(),
        "two signs flipped": array.copy(),
        "one up, one down": array.copy(),
        "zeros": np.zeros_like(array),
        "reshaped": array.reshape(12, 48),
        "retyped": array.view(np.int32),
    }
    swap = variants["two elements swapped"]
    swap[0, 0], swap[5, 7] = array[5, 7], array[0, 0]
    variants["two signs flipped"][:2, 0] ^= np.uint32(1 << 31)
    variants["one up, one down"][0, 0] += np.uint32(1)
    variants["one up, one down"][0, 1] -= np.uint32(1)
    digests = [digest_of(a) for a in (array, *variants.values())]
    assert len(set(digests)) == len(digests)


def test_paired_changes_spread_over_both_lanes():
    """Two sign flips cancel in a sum of the elements; 600 pairs must give 600 different lane pairs."""
    array = noise((25, 24), "uint32")
    seen = set()
    for i in range(600):
        changed = array.copy()
        changed.flat[i] ^= np.uint32(1 << 31)
        changed.flat[(i + 1) % 600] ^= np.uint32(1 << 31)
        seen.add(digest_of(changed).rpartition(":")[2])
    assert len({d[:16] for d in seen}) == len({d[16:] for d in seen}) == 600


def test_nan_payloads_and_the_sign_of_zero_are_content():
    quiet = np.array([0x7FC00000, 0], np.uint32).view(np.float32)
    payload = np.array([0x7FC00001, 0], np.uint32).view(np.float32)
    negative_zero = np.array([0x7FC00000, 0x80000000], np.uint32).view(np.float32)
    assert len({digest_of(a) for a in (quiet, payload, negative_zero)}) == 3
    assert digest_of(payload) == slow_digest(payload)


def test_replicas_that_differ_are_an_error_that_names_the_devices():
    layout = sharding_of(range(4), (2, 2, 1), P("fsdp", None))
    array = jax.device_put(noise((4, 4), "int32"), layout)
    shards = [s.data for s in array.addressable_shards]
    shards[3] = jax.device_put(np.asarray(shards[3]) ^ np.eye(2, 4, dtype=np.int32), jax.devices()[3])
    torn = jax.make_array_from_single_device_arrays((4, 4), layout, shards)
    with pytest.raises(SyncError, match=r"device 1 and device 3 .* of w, \[\(2, 4\), \(0, 4\)\].*drifted apart"):
        leaf_digests({"w": torn})


def test_what_has_no_digest_is_named():
    with pytest.raises(SyncError, match="w has type bool"):
        leaf_digests({"w": jnp.array([True])})
    with pytest.raises(SyncError, match="w has type int4"):
        leaf_digests({"w": jnp.array([1], jnp.int4)})
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(SyncError, match="w was deleted or donated"):
        leaf_digests({"w": gone})


def test_tree_digest_covers_names_and_content_but_not_order():
    leaves = {"a": "x:1", "b": "x:2"}
    assert tree_digest(leaves) == tree_digest(dict(reversed(leaves.items())))
    variants = [leaves, {"a": "x:2", "b": "x:1"}, {"a": "x:1"}, {"a": "x:1", "c": "x:2"}, {}]
    assert len({tree_digest(v) for v in variants}) == len(variants)
    assert len(tree_digest(leaves)) == 32


def test_policy_digest_covers_base_and_trainable():
    base, adapter = {"embed": "x:1"}, {"q.lora_a": "x:2"}
    digests = {
        policy_digest(base, adapter),
        policy_digest({"embed": "x:9"}, adapter),
        policy_digest(base, {"q.lora_a": "x:9"}),
        policy_digest({}, adapter),
    }
    assert len(digests) == 4
    assert policy_digest({}, {**base, **adapter}) == policy_digest(base, adapter)


def test_check_same_names_leaf_and_both_digests():
    check_same({"a": "1"}, {"a": "1"}, "actor", "rollout")
    with pytest.raises(SyncError, match=r"1 of 2 leaves: b: actor 2, rollout 3\. Nothing was published"):
        check_same({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, "actor", "rollout")
    with pytest.raises(SyncError, match="b: actor 2, rollout has no such leaf"):
        check_same({"b": "2"}, {}, "actor", "rollout")


def test_one_compilation_per_shape_type_and_layout():
    layout = sharding_of(range(8), (2, 2, 2), P("fsdp", "tensor"))
    tree = {f"l{i}": jax.device_put(noise((8, 40), seed=i), layout) for i in range(6)}
    leaf_digests(tree)
    program = keyed_sums._program(layout.mesh, ("fsdp", "tensor"), 0, np.dtype("float32"), (), False)
    assert program._cache_size() == 1
    leaf_digests(tree)
    leaf_digests({"other": jax.device_put(noise((8, 40), seed=9), layout)})
    assert program._cache_size() == 1
