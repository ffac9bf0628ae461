"""One sync: what arrives is what was sent, under its number, and only what has to move moves."""

from __future__ import annotations

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
from lockstep.sync.local import LocalTransport
from lockstep.sync.mapping import identity_map
from lockstep.sync.probe import make_probe
from lockstep.sync.receipt import Counters
from lockstep.sync.replica import LocalReplica
from lockstep.sync.route import Route
from lockstep.sync.select import trainable_leaves
from lockstep.sync.sync import WeightSync
from lockstep.sync.verify import leaf_digests, policy_digest, tree_digest

MODEL = leaf_table(ModelSpec("llama", 24, 16, 2, 1, 8, 20, (LayerKind(Rope(1e4)),) * 2, 1e-5, 1.0, 64))
ADAPTER = {
    f"layers.1.{name}.{part}": Leaf(f"layers.1.{name}.{part}", shape, axes, "normal")
    for name, out, axis in (("q", 16, "heads"), ("k", 8, "kv_heads"))
    for part, shape, axes in (("lora_a", (16, 2), ("embed", "rank")), ("lora_b", (2, out), ("rank", axis)))
}
A, B = "layers.1.q.lora_a", "layers.1.q.lora_b"
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
    """The two, and the sync between them. there: the sampler's dtype."""

    def __init__(
        self, dial=None, leaves=ADAPTER, transport=None, dtype="float32", base=None, mapping=None, there=None, **how
    ):
        self.dial = Dial.build(dial or PAIRS["more"])
        self.leaves = leaves
        self.actor = noise(leaves, self.dial.mesh("actor"), 1, dtype)
        self.rollout = noise(leaves, self.dial.mesh("rollout"), 2, there or dtype)
        self.destination = shardings(leaves, self.dial.mesh("rollout"))
        held = tree_digest(base) if base else ""
        self.replica = LocalReplica(
            "rollout", self.rollout, self.destination, transport or LocalTransport(), base_digest=held
        )
        self.sync = WeightSync(leaves, [Route.local(self.replica, mapping)], base=base or {}, **how)

    def push(self, number, actor=None):
        """(what is served now, receipt)"""
        receipt = self.sync.push(number, self.actor if actor is None else actor)
        return self.replica.installed, receipt


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in PAIRS), ("more", "bfloat16")])
def test_randomise_then_sync(name, dtype):
    pair = Pair(PAIRS[name], KINDS, dtype=dtype)
    before = leaf_digests(pair.rollout)
    installed, receipt = pair.push(1)
    assert leaf_digests(installed) == leaf_digests(pair.actor) == receipt.leaf_digests != before
    assert receipt.tree_digest == tree_digest(receipt.leaf_digests)
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
    assert sum(size for *_, size in receipt.links) == receipt.bytes_crossing and len(receipt.links) == receipt.num_links


def test_a_whole_model_crosses_under_full_parameter_training():
    pair = Pair({"actor": {"fsdp": 2}, "rollout": {"tensor": 2}}, trainable_leaves(MODEL, None))
    installed, receipt = pair.push(0)
    assert list(installed) == list(MODEL) and receipt.leaves == len(MODEL)
    assert leaf_digests(installed) == leaf_digests(pair.actor)


def test_identity_sync_changes_nothing():
    pair = Pair()
    first, one = pair.push(0)
    second, two = pair.push(1)
    assert leaf_digests(first) == leaf_digests(second)
    assert (one.digest, one.syncs, two.version, two.syncs) == (two.digest, 1, 1, 2)
    # I5: what is staged is never what is being served.
    assert all(first[p] is not second[p] for p in ADAPTER)
    assert one.plan == two.plan


def test_same_buffers_are_the_very_arrays_and_are_decided_on_every_push():
    pair = Pair(PAIRS["colocated"])
    installed, receipt = pair.push(0)
    assert all(installed[p] is pair.actor[p] for p in ADAPTER) and receipt.same_buffers
    assert pair.replica.transport.memory.allocated == 0
    # The trainer's weights come back in another layout (a resume, an offload): the next push must move them.
    mesh = pair.dial.mesh("actor")
    moved = {p: jax.device_put(x + 1, NamedSharding(mesh, P())) for p, x in pair.actor.items()}
    again, receipt = pair.push(1, moved)
    assert not receipt.same_buffers and receipt.syncs == 1 and receipt.bytes_moved == receipt.bytes_planned > 0
    assert leaf_digests(again) == leaf_digests(moved)
    assert all(again[p].sharding == pair.destination[p] for p in ADAPTER)
    # And back in the first layout they are taken over as they are.
    back, receipt = pair.push(2)
    assert receipt.same_buffers and receipt.version == 2 and all(back[p] is pair.actor[p] for p in ADAPTER)


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_a_trainer_that_was_offloaded_is_synced(kind):
    pair = Pair(PAIRS["colocated"])
    pair.push(0)
    moved = {p: jax.device_put(x * 2, x.sharding.with_memory_kind(kind)) for p, x in pair.actor.items()}
    installed, receipt = pair.push(1, moved)
    assert receipt.same_buffers == (kind == "device") and receipt.bytes_crossing == 0
    assert all(installed[p].sharding == pair.destination[p] for p in ADAPTER)
    assert leaf_digests(installed) == leaf_digests({p: x * 2 for p, x in pair.actor.items()})


def test_the_sampler_moves_to_another_mesh():
    pair = Pair()
    pair.push(0)
    pair.replica.destination = shardings(ADAPTER, Dial.build({"actor": {"tensor": 8}}).mesh("actor"))
    installed, receipt = pair.push(1)
    assert receipt.destination_layout == "tensor=8 (devices 0-7) in device"
    assert all(installed[p].sharding == pair.replica.destination[p] for p in ADAPTER)
    assert leaf_digests(installed) == leaf_digests(pair.actor)


def test_a_declared_cast_halves_the_bytes_and_is_verified():
    forms = {dtype: {p: (leaf.shape, dtype) for p, leaf in KINDS.items()} for dtype in ("float32", "bfloat16")}
    mapping = identity_map(forms["float32"], forms["bfloat16"], cast=True)
    pair = Pair(leaves=KINDS, mapping=mapping, there="bfloat16")
    installed, receipt = pair.push(0)
    whole = Pair(leaves=KINDS).push(0)[1]
    assert (2 * receipt.bytes_moved, 2 * receipt.bytes_crossing) == (whole.bytes_moved, whole.bytes_crossing)
    # The policy is the trainer's, in whatever form it is served.
    assert receipt.digest == whole.digest and receipt.plan != whole.plan
    assert receipt.leaf_digests == leaf_digests(installed) != whole.leaf_digests
    for path, leaf in installed.items():
        assert np.asarray(leaf).tobytes() == np.asarray(pair.actor[path]).astype(jnp.bfloat16).tobytes()


def test_the_published_digest_covers_base_and_adapter():
    base = leaf_digests(noise(MODEL, Dial.build({"actor": {}}).mesh("actor"), 7))
    pair = Pair(base=base)
    _, receipt = pair.push(4)
    assert receipt.digest == policy_digest(base, leaf_digests(pair.actor))
    assert receipt.policy == pair.sync.published == pair.replica.active and receipt.policy.number == 4
    other = Pair(base={**base, "embed": "float32[24,16]:" + "0" * 32})
    assert other.push(4)[1].digest != receipt.digest


def test_the_receipt_is_one_json_line():
    pair = Pair()
    _, receipt = pair.push(2)
    line = receipt.to_json()
    data = json.loads(line)
    assert "\n" not in line and "leaf_digests" not in data
    assert data["version"] == 2 and data["leaves"] == len(ADAPTER) and data["digest"] == receipt.digest
    assert list(data["seconds"]) == ["select", "map", "stage", "transfer", "verify", "flip"]
    assert min(data["seconds"].values()) >= 0
    assert data["source_layout"] == "tensor=2 (devices 0-1) in device"
    assert data["destination_layout"] == "data=2 fsdp=2 (devices 2-5) in device"
    assert (data["transport"], data["replicas"], data["evicted"]) == ("local", ["rollout"], {})
    assert (data["density"], data["stored"], data["probed"]) == (None, {}, 0)
    assert len(data["plan"]) >= 16 and data["links"][0][2] == max(size for *_, size in data["links"])


def test_step_version_and_syncs_are_three_numbers():
    apart, together = Pair(), Pair(PAIRS["colocated"])
    for pair, syncs in ((apart, 2), (together, 0)):
        counters = Counters()
        for _ in range(2):
            for _ in range(3):
                counters = counters.stepped()
            trained = {p: x + counters.step for p, x in pair.actor.items()}
            counters = counters.published(pair.push(counters.version + 1, trained)[1])
        assert counters == Counters(step=6, version=2, syncs=syncs)


def test_the_probe_runs_on_the_staged_tree_when_something_moved():
    asked = []

    def scored(tree, sequences):
        asked.append(tree)
        return [np.full(len(s) - 1, np.asarray(tree[A]).sum() / len(s), np.float32) for s in sequences]

    def probe(tree):
        return make_probe(lambda sequences: scored(tree, sequences), [(1, 2, 3), (4, 5)], True)

    for name, probed in (("more", 2), ("colocated", 0)):
        pair = Pair(PAIRS[name])
        pair.replica = LocalReplica("rollout", pair.rollout, pair.destination, LocalTransport(), score=scored)
        pair.sync = WeightSync(ADAPTER, [Route.local(pair.replica)], base={}, probe=probe)
        asked.clear()
        installed, receipt = pair.push(0)
        assert receipt.probed == probed == len(asked)
        assert ("probe" in receipt.seconds) == bool(probed)
        assert not asked or all(asked[1][p] is installed[p] for p in ADAPTER)


def test_the_probe_of_an_offloaded_trainer_sees_its_weights_on_the_devices():
    pair = Pair(PAIRS["colocated"])
    frozen = pair.rollout[A]

    def scored(tree, sequences):
        assert {leaf.sharding.memory_kind for leaf in tree.values()} == {frozen.sharding.memory_kind}
        return [np.full(len(s) - 1, -float((tree[A] * frozen).max()), np.float32) for s in sequences]

    replica = LocalReplica("rollout", pair.rollout, pair.destination, LocalTransport(), score=scored)
    sync = WeightSync(
        ADAPTER, [Route.local(replica)], base={},
        probe=lambda tree: make_probe(lambda s: scored(tree, s), [(1, 2, 3)], True),
    )  # fmt: skip
    offloaded = {p: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) for p, x in pair.actor.items()}
    assert sync.push(0, offloaded).probed == 1


def test_outputs_that_do_not_follow_from_the_weights_are_refused():
    pair = Pair()
    old = {p: np.asarray(x) for p, x in pair.rollout.items()}

    def scored(tree, sequences):
        return [np.full(len(s) - 1, -abs(np.asarray(tree[A]).sum()), np.float32) for s in sequences]

    replica = LocalReplica(
        "rollout", pair.rollout, pair.destination, LocalTransport(), score=lambda _, s: scored(old, s)
    )
    sync = WeightSync(
        ADAPTER, [Route.local(replica)], base={},
        probe=lambda tree: make_probe(lambda s: scored(tree, s), [(1, 2, 3)], True),
    )  # fmt: skip
    with pytest.raises(SyncError, match=r"probe: rollout gives token 1 .* stale copy"):
        sync.push(0, pair.actor)
    assert replica.active is None and all(replica.installed[p] is pair.rollout[p] for p in ADAPTER)
    blind = LocalReplica("rollout", pair.rollout, pair.destination, LocalTransport())
    sync = WeightSync(
        ADAPTER, [Route.local(blind)], base={},
        probe=lambda tree: make_probe(lambda s: scored(tree, s), [(1, 2, 3)], True),
    )  # fmt: skip
    with pytest.raises(SyncError, match="given no way to score"):
        sync.push(0, pair.actor)


# -- what does not fit, found before anything is written -------------------------------------------------------------


class NeverCalled(LocalTransport):
    def send(self, *arguments):
        raise AssertionError("nothing may be sent")


def change_shape(pair):
    pair.actor[A] = jax.device_put(np.ones((8, 2), np.float32), pair.actor[A].sharding)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.actor.pop(A), rf"source \(actor\).*missing: {A}"),
        (lambda p: p.actor.update(mu=p.actor[A]), r"source \(actor\).*not a trainable leaf: mu"),
        (lambda p: p.replica.destination.pop(A), rf"{A}"),
        (change_shape, rf"{A} has shape \(8, 2\) at actor, the leaf table says \(16, 2\).*actor: mesh"),
        (
            lambda p: p.actor.update({B: p.actor[B].astype(jnp.bfloat16)}),
            rf"{B} is bfloat16\[2,16\] at actor and float32 at rollout.*no cast is declared.*actor: mesh.*rollout: ",
        ),
        (lambda p: p.actor[A].delete(), rf"actor's {A} deleted or donated"),
    ],
)
def test_a_misfit_is_named_before_anything_is_written(change, message):
    pair = Pair(transport=NeverCalled())
    change(pair)
    with pytest.raises((SyncError, KeyError), match=message):
        pair.push(0)
    assert pair.sync.published is None
    with pytest.raises(SyncError, match=r"has not been reset since; call reset\(\)"):
        pair.push(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop(A), rf"destination shardings of rollout.*not a trainable leaf: {A}"),
        (lambda tree: tree.update(extra=tree[A]), "destination shardings of rollout.*missing: extra"),
        (
            lambda tree: tree.update({A: jax.device_put(tree[A], jax.devices()[7])}),
            rf"{A} float32\[16,2\] is installed elsewhere than declared.*device 7",
        ),
        (lambda tree: tree[B].delete(), rf"rollout's {B} deleted or donated"),
    ],
)
def test_an_installed_tree_that_is_not_what_is_declared_is_refused(change, message):
    pair = Pair()
    tree = dict(noise(ADAPTER, pair.dial.mesh("rollout"), 5))
    change(tree)
    with pytest.raises(SyncError, match=message):
        LocalReplica("rollout", tree, pair.destination, LocalTransport())


def test_the_destination_must_hold_what_trains():
    pair = Pair()
    some = {p: x for p, x in pair.rollout.items() if p != A}
    replica = LocalReplica("rollout", some, {p: pair.destination[p] for p in some}, LocalTransport())
    with pytest.raises(SyncError, match=f"destination shardings of rollout.*missing: {A}"):
        WeightSync(ADAPTER, [Route.local(replica)], base={})


def test_version_numbers_grow_by_one_and_name_one_content():
    pair = Pair()
    pair.push(5)
    for wrong in (4, 7):
        with pytest.raises(SyncError, match=rf"version {wrong} is out of order; expected 6 \(or 5 again"):
            pair.push(wrong)
        pair.sync.reset()
    # The same content under the same number repairs a destination; other content does not pass for it.
    pair.replica._installed = noise(ADAPTER, pair.dial.mesh("rollout"), 9)
    repaired, receipt = pair.push(5)
    assert leaf_digests(repaired) == leaf_digests(pair.actor) and receipt.version == 5
    changed = {p: x + 1 for p, x in pair.actor.items()}
    with pytest.raises(SyncError, match="need a new version number"):
        pair.push(5, changed)
    pair.sync.reset()
    assert pair.push(6, changed)[1].policy == pair.sync.published


def test_weights_with_nan_and_infinity_cross_bit_for_bit():
    pair = Pair()
    raw = np.random.default_rng(3).integers(0, 2**32, (16, 2), np.uint32)
    raw[:4, 0] = [0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000]
    pair.actor[A] = jax.device_put(raw.view(np.float32), pair.actor[A].sharding)
    installed, _ = pair.push(0)
    np.testing.assert_array_equal(np.asarray(installed[A]).view(np.uint32), raw)


def test_a_source_whose_replicas_drifted_apart_is_refused():
    pair = Pair({"actor": {"data": 2}, "rollout": {"fsdp": 2}})

    leaf = pair.actor[A]
    shards = [s.data for s in leaf.addressable_shards]
    raw = np.array(shards[1])
    raw.view(np.uint32).flat[7] ^= np.uint32(1)
    shards[1] = jax.device_put(raw, leaf.addressable_shards[1].device)
    pair.actor[A] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    with pytest.raises(SyncError, match=f"device 0 and device 1 .* of {A}.*drifted apart"):
        pair.push(0)
