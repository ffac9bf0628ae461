import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place, shardings
from lockstep.errors import SyncError
from lockstep.models.spec import Leaf
from lockstep.sync.arrays import shared_devices
from lockstep.sync.snapshot import Snapshot
from lockstep.sync.verify import leaf_digests
from lockstep.types import PolicyVersion

LEAVES = {
    "q": Leaf("q", (8, 4), ("embed", "heads"), "normal"),
    "norm": Leaf("norm", (8,), (None,), "norm"),
}
VERSION = PolicyVersion(3, "abcdef0123456789")
DIAL = Dial.build({"actor": {"fsdp": 2, "tensor": 2}, "rollout": {"data": 2, "fsdp": 2}})
step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)


def weights():
    rng = np.random.default_rng(5)
    return place({p: rng.standard_normal(x.shape, np.float32) for p, x in LEAVES.items()}, LEAVES, DIAL.mesh("actor"))


@pytest.mark.parametrize("memory", ["pinned_host", "device", None])
def test_a_snapshot_outlives_the_donation_of_the_weights(memory):
    live = weights()
    digests = leaf_digests(live)
    snapshot = Snapshot(live, VERSION, memory)
    assert snapshot.memory == (memory or "pinned_host") and snapshot.version == VERSION
    after = step(live)
    assert all(leaf.is_deleted() for leaf in live.values())
    restored = snapshot.restore()
    assert leaf_digests(restored) == digests != leaf_digests(after)
    assert all(restored[p].sharding == after[p].sharding for p in LEAVES)


@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_nothing_is_shared_with_the_live_weights_nor_with_what_was_restored(memory):
    live = weights()
    snapshot = Snapshot(live, VERSION, memory)
    first, second = snapshot.restore(), snapshot.restore()
    for path in LEAVES:
        assert not shared_devices(live[path], first[path])
        assert not shared_devices(first[path], second[path])
    jax.block_until_ready(step(first))
    snapshot.free()
    assert leaf_digests(second) == leaf_digests(live)


@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_restore_on_another_mesh(memory):
    live = weights()
    where = shardings(LEAVES, DIAL.mesh("rollout"))
    restored = Snapshot(live, VERSION, memory).restore(where)
    assert {p: leaf.sharding for p, leaf in restored.items()} == where
    assert leaf_digests(restored) == leaf_digests(live)


def test_free_gives_the_memory_back_and_is_final():
    snapshot = Snapshot(weights(), VERSION)
    # q is cut in four; norm is on each of the four devices.
    assert snapshot.nbytes == 8 * 4 * 4 + 4 * 8 * 4
    kept = list(snapshot._kept.values())
    snapshot.free()
    snapshot.free()
    assert snapshot.nbytes == 0 and all(leaf.is_deleted() for leaf in kept)
    with pytest.raises(SyncError, match=r"snapshot of v3:abcdef01 was freed"):
        snapshot.restore()


def test_bad_input_is_named():
    with pytest.raises(SyncError, match="no weights to keep"):
        Snapshot({}, VERSION)
    with pytest.raises(SyncError, match=r"has no memory 'tape'; it has device"):
        Snapshot(weights(), VERSION, "tape")
    live = weights()
    live["q"].delete()
    with pytest.raises(SyncError, match="q deleted or donated already; take the snapshot before"):
        Snapshot(live, VERSION)
    with pytest.raises(SyncError, match="no destination for norm"):
        Snapshot(weights(), VERSION).restore({"q": weights()["q"].sharding})


def test_snapshots_do_not_accumulate():
    live = weights()
    Snapshot(live, VERSION).free()
    before = len(jax.live_arrays())
    for _ in range(20):
        snapshot = Snapshot(live, VERSION)
        jnp.sum(snapshot.restore()["q"]).block_until_ready()
        snapshot.free()
    assert len(jax.live_arrays()) <= before + 4
