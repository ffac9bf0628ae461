import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place, shardings
from lockstep.errors import SyncError
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table
from lockstep.sync.select import trainable_leaves
from lockstep.sync.sync import Counters, WeightSync
from lockstep.sync.transfer import LocalTransport
from lockstep.sync.verify import leaf_digests, policy_digest

MODEL = leaf_table(ModelSpec("llama", 24, 16, 2, 1, 8, 20, (LayerKind(Rope(1e4)),) * 2, 1e-5, 1.0, 64))
ADAPTER = {
    f"layers.1.{name}.{part}": Leaf(f"layers.1.{name}.{part}", shape, axes, "normal")
    for name, out, axis in (("q", 16, "heads"), ("k", 8, "kv_heads"))
    for part, shape, axes in (("lora_a", (16, 2), ("embed", "rank")), ("lora_b", (2, out), ("rank", axis)))
}
# One leaf of each kind of cut.
KINDS = {path: MODEL[path] for path in ("embed", "layers.0.q", "final_norm")}
PAIRS = {
    "colocated": {"actor": {"fsdp": 2, "tensor": 2}, "rollout": "actor"},
    "one to one": {"actor": {}, "rollout": {}},
    "sharded to replicated": {"actor": {"fsdp": 4}, "rollout": {"data": 4}},
    "fewer": {"actor": {"fsdp": 2, "tensor": 2}, "rollout": {"tensor": 2}},
    "more": {"actor": {"tensor": 2}, "rollout": {"data": 2, "fsdp": 2}},
    "overlapping": {"actor": {"fsdp": 4, "devices": [0, 1, 2, 3]}, "rollout": {"tensor": 4, "devices": [5, 3, 2, 0]}},
    "same places": {"actor": {"fsdp": 2, "devices": [0, 1]}, "rollout": {"fsdp": 2, "devices": [0, 1]}},
}


def noise(leaves, mesh, seed, dtype="float32"):
    rng = np.random.default_rng(seed)
    return place({p: rng.standard_normal(x.shape).astype(jnp.dtype(dtype)) for p, x in leaves.items()}, leaves, mesh)


class Pair:
    """A trainer and a sampler whose weights have nothing in common, and the sync between them."""

    def __init__(self, dial=None, leaves=ADAPTER, transport=None, dtype="float32", base=None):
        self.dial = Dial.build(dial or PAIRS["more"])
        self.leaves = leaves
        self.actor = noise(leaves, self.dial.mesh("actor"), 1, dtype)
        self.rollout = noise(leaves, self.dial.mesh("rollout"), 2, dtype)
        self.destination = shardings(leaves, self.dial.mesh("rollout"))
        self.sync = WeightSync(leaves, self.destination, base=base or {}, transport=transport)


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in PAIRS), ("more", "bfloat16")])
def test_randomise_then_sync(name, dtype):
    pair = Pair(PAIRS[name], KINDS, dtype=dtype)
    before = leaf_digests(pair.rollout)
    installed, receipt = pair.sync.push(1, pair.actor, pair.rollout)
    assert leaf_digests(installed) == leaf_digests(pair.actor) == receipt.leaf_digests != before
    assert list(installed) == list(KINDS)
    for path, leaf in installed.items():
        assert leaf.sharding == pair.destination[path]
        np.testing.assert_array_equal(leaf, pair.actor[path])
    assert leaf_digests(pair.rollout) == before
    assert receipt.bytes_moved == receipt.bytes_planned >= receipt.bytes_crossing
    assert receipt.bytes_selected == sum(leaf.nbytes for leaf in pair.actor.values())
    same_places = name in ("colocated", "same places")
    assert receipt.same_buffers == same_places == (receipt.bytes_moved == 0)
    assert receipt.syncs == (0 if same_places else 1)
    if name == "sharded to replicated":
        assert receipt.bytes_crossing == receipt.bytes_moved == 4 * receipt.bytes_selected


def test_a_whole_model_crosses_under_full_parameter_training():
    pair = Pair({"actor": {"fsdp": 2}, "rollout": {"tensor": 2}}, trainable_leaves(MODEL, None))
    installed, receipt = pair.sync.push(0, pair.actor, pair.rollout)
    assert list(installed) == list(MODEL) and receipt.leaves == len(MODEL)
    assert leaf_digests(installed) == leaf_digests(pair.actor)


def test_identity_sync_changes_nothing():
    pair = Pair()
    first, one = pair.sync.push(0, pair.actor, pair.rollout)
    second, two = pair.sync.push(1, pair.actor, first)
    assert leaf_digests(first) == leaf_digests(second)
    assert (one.digest, one.syncs, two.version, two.syncs) == (two.digest, 1, 1, 2)
    # I5: what is staged is never what is being served.
    assert all(first[p] is not second[p] for p in ADAPTER)


def test_same_buffers_are_the_very_arrays_and_are_decided_on_every_push():
    pair = Pair(PAIRS["colocated"])
    installed, receipt = pair.sync.push(0, pair.actor, pair.actor)
    assert all(installed[p] is pair.actor[p] for p in ADAPTER) and receipt.same_buffers
    # The trainer's weights come back in another layout (a resume, an offload): the next push must move them.
    mesh = pair.dial.mesh("actor")
    moved = {p: jax.device_put(x + 1, NamedSharding(mesh, P())) for p, x in pair.actor.items()}
    again, receipt = pair.sync.push(1, moved, installed)
    assert not receipt.same_buffers and receipt.syncs == 1 and receipt.bytes_moved == receipt.bytes_planned > 0
    assert leaf_digests(again) == leaf_digests(moved)
    assert all(again[p].sharding == pair.destination[p] for p in ADAPTER)


def test_the_published_digest_covers_base_and_adapter():
    base = leaf_digests(noise(MODEL, Dial.build({"actor": {}}).mesh("actor"), 7))
    pair = Pair(base=base)
    _, receipt = pair.sync.push(4, pair.actor, pair.rollout)
    assert receipt.digest == policy_digest(base, leaf_digests(pair.actor))
    assert receipt.policy == pair.sync.published and receipt.policy.number == 4
    other = Pair(base={**base, "embed": "float32[24,16]:0000000000000000"})
    assert other.sync.push(4, other.actor, other.rollout)[1].digest != receipt.digest


def test_the_receipt_is_one_json_line():
    pair = Pair()
    _, receipt = pair.sync.push(2, pair.actor, pair.rollout)
    line = receipt.to_json()
    data = json.loads(line)
    assert "\n" not in line and "leaf_digests" not in data
    assert data["version"] == 2 and data["leaves"] == len(ADAPTER) and data["digest"] == receipt.digest
    assert set(data["seconds"]) == {"select", "stage", "verify"} and min(data["seconds"].values()) >= 0
    assert data["source_layout"] == "tensor=2 (devices 0-1) in device"
    assert data["destination_layout"] == "data=2 fsdp=2 (devices 2-5) in device"


def test_step_version_and_syncs_are_three_numbers():
    counters = Counters()
    apart, together = Pair(), Pair(PAIRS["colocated"])
    for pair, syncs in ((apart, 2), (together, 0)):
        counters, installed = Counters(), pair.rollout
        for _ in range(2):
            for _ in range(3):
                counters = counters.stepped()
            trained = {p: x + counters.step for p, x in pair.actor.items()}
            installed, receipt = pair.sync.push(counters.version + 1, trained, installed)
            counters = counters.published(receipt)
        assert counters == Counters(step=6, version=2, syncs=syncs)


# -- what does not fit, found before anything is written -------------------------------------------------------------

A, B = "layers.1.q.lora_a", "layers.1.q.lora_b"


class NeverCalled:
    def stage(self, leaves, destination, moves):
        raise AssertionError("nothing may be staged")


def change_shape(pair):
    pair.actor[A] = jax.device_put(np.ones((8, 2), np.float32), pair.actor[A].sharding)


def change_installed_place(pair):
    pair.rollout[A] = jax.device_put(pair.rollout[A], jax.devices()[7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.actor.pop(A), rf"source \(actor\).*missing: {A}"),
        (lambda p: p.rollout.pop(A), rf"destination \(rollout\).*missing: {A}"),
        (lambda p: p.actor.update(mu=p.actor[A]), r"source \(actor\).*not a trainable leaf: mu"),
        (lambda p: p.rollout.update(extra=p.rollout[A]), r"destination \(rollout\).*not a trainable leaf: extra"),
        (change_shape, rf"{A} has shape \(8, 2\) at actor and \(16, 2\) at rollout.*actor: mesh.*rollout: mesh"),
        (
            lambda p: p.actor.update({B: p.actor[B].astype(jnp.bfloat16)}),
            rf"{B} is bfloat16\[2,16\] at actor and float32\[2,16\] at rollout.*actor: mesh.*rollout: mesh",
        ),
        (change_installed_place, rf"{A} float32\[16,2\] is installed elsewhere than declared.*device 7"),
        (lambda p: p.actor[A].delete(), rf"actor's {A} deleted or donated"),
        (lambda p: p.rollout[B].delete(), rf"rollout's {B} deleted or donated"),
    ],
)
def test_a_misfit_is_named_before_anything_is_written(change, message):
    pair = Pair(transport=NeverCalled())
    change(pair)
    with pytest.raises(SyncError, match=message):
        pair.sync.push(0, pair.actor, pair.rollout)
    assert pair.sync.published is None
    with pytest.raises(SyncError, match=r"has not been reset since; call reset\(\)"):
        pair.sync.push(0, pair.actor, pair.rollout)


def test_destination_table_must_match_what_trains():
    pair = Pair()
    with pytest.raises(SyncError, match=f"destination shardings of rollout.*missing: {A}"):
        WeightSync(ADAPTER, {p: s for p, s in pair.destination.items() if p != A}, base={})


def test_version_numbers_grow_by_one_and_name_one_content():
    pair = Pair()
    installed, _ = pair.sync.push(5, pair.actor, pair.rollout)
    for wrong in (4, 7):
        with pytest.raises(SyncError, match=rf"version {wrong} is out of order; expected 6 \(or 5 again"):
            pair.sync.push(wrong, pair.actor, installed)
        pair.sync.reset()
    # The same content under the same number repairs a destination; other content does not pass for it.
    repaired, receipt = pair.sync.push(5, pair.actor, noise(ADAPTER, pair.dial.mesh("rollout"), 9))
    assert leaf_digests(repaired) == leaf_digests(pair.actor) and receipt.version == 5
    changed = {p: x + 1 for p, x in pair.actor.items()}
    with pytest.raises(SyncError, match="need a new version number"):
        pair.sync.push(5, changed, repaired)
    pair.sync.reset()
    assert pair.sync.push(6, changed, repaired)[1].policy == pair.sync.published


# -- faults on the way, found before anything is published -----------------------------------------------------------


class Faulty:
    """Stages correctly, then spoils the result."""

    def __init__(self, spoil):
        self.spoil = spoil

    def stage(self, leaves, destination, moves):
        staged = LocalTransport().stage(leaves, destination, moves)
        return self.spoil(staged) or staged


def flip(path, bit=0):
    """Flip one bit of one element of one leaf, on all devices that hold it."""

    def spoil(staged):
        raw = np.array(staged[path])
        raw.view(np.uint32).flat[raw.size // 2] ^= np.uint32(1 << bit)
        staged[path] = jax.device_put(raw, staged[path].sharding)

    return spoil


def flip_on(path, device):
    """Flip one bit of one element of one leaf on one device only."""

    def spoil(staged):
        leaf = staged[path]
        shards = [s.data for s in leaf.addressable_shards]
        raw = np.array(shards[device])
        raw.view(np.uint32).flat[raw.size // 2] ^= np.uint32(1)
        shards[device] = jax.device_put(raw, leaf.addressable_shards[device].device)
        staged[path] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return spoil


def swap_leaves(staged):
    staged["layers.1.q.lora_a"], staged["layers.1.k.lora_a"] = staged["layers.1.k.lora_a"], staged["layers.1.q.lora_a"]


def stale(staged):
    staged[A] = jax.device_put(np.asarray(staged[A]) - 1e-3, staged[A].sharding)


def drop(staged):
    del staged[A]


def narrow(staged):
    staged[A] = staged[A][:8]


def cast(staged):
    staged[A] = staged[A].astype(jnp.bfloat16)


def elsewhere(staged):
    staged[A] = jax.device_put(staged[A], jax.devices()[7])


def nan(staged):
    staged[A] = jax.device_put(np.asarray(staged[A]) * np.float32("nan"), staged[A].sharding)


FAULTS = {
    "one bit": (flip(A), rf"what arrived at rollout is not what actor holds, in 1 of 4 leaves: {A}"),
    "sign bit": (flip(B, bit=31), rf"in 1 of 4 leaves: {B}"),
    "one bit on the last device": (flip_on(B, 3), rf"{B}.*drifted apart"),
    "swapped leaves": (swap_leaves, rf"in 2 of 4 leaves: .*{A}"),
    "stale": (stale, rf"in 1 of 4 leaves: {A}"),
    "all NaN": (nan, rf"in 1 of 4 leaves: {A}"),
    "dropped": (drop, rf"staged tree of rollout.*missing: {A}"),
    "extra": (lambda s: s.update(extra=s[A]), "staged tree of rollout.*not a trainable leaf: extra"),
    "shape": (narrow, rf"{A} was staged as float32\[8,2\], the source is float32\[16,2\].*source: mesh.*staged: mesh"),
    "dtype": (cast, rf"{A} was staged as bfloat16\[16,2\], the source is float32"),
    "place": (elsewhere, rf"{A} float32\[16,2\] was staged as .*device 7.*declared: mesh"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_found_and_the_old_weights_stand(fault):
    spoil, message = FAULTS[fault]
    transport = Faulty(lambda staged: None)
    pair = Pair(transport=transport)
    serving, receipt = pair.sync.push(1, pair.actor, pair.rollout)
    before, held = leaf_digests(serving), dict(serving)
    trained = {p: x * 1.5 for p, x in pair.actor.items()}
    transport.spoil = spoil
    with pytest.raises(SyncError, match=message):
        pair.sync.push(2, trained, serving)
    assert serving.keys() == held.keys() and all(serving[p] is held[p] for p in held)
    assert leaf_digests(serving) == before
    assert pair.sync.published == receipt.policy
    # Nothing works until somebody has looked, then everything does.
    transport.spoil = lambda staged: None
    with pytest.raises(SyncError, match=r"earlier push failed .*The failure was: SyncError"):
        pair.sync.push(2, trained, serving)
    pair.sync.reset()
    installed, receipt = pair.sync.push(2, trained, serving)
    assert leaf_digests(installed) == leaf_digests(trained) and receipt.syncs == 2


def test_a_transport_that_dies_leaves_the_old_weights_and_says_why():
    def die(staged):
        raise ConnectionError("peer 3 is gone")

    pair = Pair(transport=Faulty(die))
    with pytest.raises(ConnectionError):
        pair.sync.push(0, pair.actor, pair.rollout)
    with pytest.raises(SyncError, match="The failure was: ConnectionError: peer 3 is gone"):
        pair.sync.push(0, pair.actor, pair.rollout)
    assert pair.sync.published is None


def test_a_transport_that_copies_what_is_in_place_is_refused():
    def needless_copies(staged):
        return {p: x.copy() for p, x in staged.items()}

    pair = Pair(PAIRS["colocated"], transport=Faulty(needless_copies))
    with pytest.raises(SyncError, match=r"sync: \d+ bytes were written where 0 were planned"):
        pair.sync.push(0, pair.actor, pair.rollout)
    assert pair.sync.published is None


def test_weights_with_nan_and_infinity_cross_bit_for_bit():
    pair = Pair()
    raw = np.random.default_rng(3).integers(0, 2**32, (16, 2), np.uint32)
    raw[:4, 0] = [0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000]
    pair.actor[A] = jax.device_put(raw.view(np.float32), pair.actor[A].sharding)
    installed, _ = pair.sync.push(0, pair.actor, pair.rollout)
    np.testing.assert_array_equal(np.asarray(installed[A]).view(np.uint32), raw)


def test_a_source_whose_replicas_drifted_apart_is_refused():
    pair = Pair({"actor": {"data": 2}, "rollout": {"fsdp": 2}})
    flip_on(A, 1)(pair.actor)
    with pytest.raises(SyncError, match=f"device 0 and device 1 .* of {A}.*drifted apart"):
        pair.sync.push(0, pair.actor, pair.rollout)
