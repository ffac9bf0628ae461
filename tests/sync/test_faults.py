"""Faults on every send, receive, verify and flip: found before anything is served, mended by a push that succeeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place, shardings
from lockstep.errors import SyncError
from lockstep.models.spec import Leaf
from lockstep.sync.local import LocalTransport
from lockstep.sync.publish import Publisher
from lockstep.sync.replica import LocalReplica
from lockstep.sync.route import Route
from lockstep.sync.sync import WeightSync
from lockstep.sync.transport import Deadline, Staged
from lockstep.sync.verify import leaf_digests

ADAPTER = {
    f"layers.1.{name}.{part}": Leaf(f"layers.1.{name}.{part}", shape, axes, "normal")
    for name, out, axis in (("q", 16, "heads"), ("k", 8, "kv_heads"))
    for part, shape, axes in (("lora_a", (16, 2), ("embed", "rank")), ("lora_b", (2, out), ("rank", axis)))
}
A, B = "layers.1.q.lora_a", "layers.1.q.lora_b"


def noise(mesh, seed):
    rng = np.random.default_rng(seed)
    return place({p: rng.standard_normal(x.shape, np.float32) for p, x in ADAPTER.items()}, ADAPTER, mesh)


class Faulty:
    """Moves correctly, then does `spoil` to what was staged: changes it, returns another one, raises, waits."""

    name = "faulty"

    def __init__(self, spoil: Callable[[Staged], Staged | None] = lambda staged: None) -> None:
        self.spoil, self.inner = spoil, LocalTransport()
        self.send_error: Exception | None = None

    def send(self, *arguments):
        if self.send_error is not None:
            raise self.send_error
        return self.inner.send(*arguments)

    def receive(self, version, plan, destination, numbers, deadline):
        self.deadline, self.version = deadline, version
        staged = self.inner.receive(version, plan, destination, numbers, deadline)
        return self.spoil(staged) or staged

    def forget(self):
        self.inner.forget()

    def release(self, version, published):
        self.inner.release(version, published)


def on_tree(change: Callable[[dict[str, jax.Array]], object]) -> Callable[[Staged], Staged]:
    """`change` applied to the staged tree (in place, or by returning another one)."""

    def spoil(staged: Staged) -> Staged:
        tree = dict(staged.tree)
        changed = change(tree)
        return replace(staged, tree=changed if isinstance(changed, dict) else tree)

    return spoil


def flip(path, bit=0):
    """Flip one bit of one element of one leaf, on all devices that hold it."""

    def change(tree):
        raw = np.array(tree[path])
        raw.view(np.uint32).flat[raw.size // 2] ^= np.uint32(1 << bit)
        tree[path] = jax.device_put(raw, tree[path].sharding)

    return on_tree(change)


def flip_on(path, device):
    """Flip one bit of one element of one leaf on one device only."""

    def change(tree):
        leaf = tree[path]
        shards = [s.data for s in leaf.addressable_shards]
        raw = np.array(shards[device])
        raw.view(np.uint32).flat[raw.size // 2] ^= np.uint32(1)
        shards[device] = jax.device_put(raw, leaf.addressable_shards[device].device)
        tree[path] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return on_tree(change)


def changed_part(path, change: Callable[[np.ndarray], None]):
    """Rows of one leaf changed on all devices, as when a bucket of them went astray."""

    def apply(tree):
        raw = np.array(tree[path])
        change(raw)
        tree[path] = jax.device_put(raw, tree[path].sharding)

    return on_tree(apply)


def hang_until_the_deadline(transport: Faulty):
    """A peer that never answers: the transport waits as long as it may."""

    def spoil(staged: Staged):
        time.sleep(transport.deadline.remaining())
        raise transport.deadline.missed("rollout", "actor", "weights", transport.version)

    return spoil


class World:
    """One trainer, and samplers on devices of their own, each over a transport that can be told to fail."""

    def __init__(self, count: int = 1, actor=None, rollout=None, **how) -> None:
        actor = Dial.build({"actor": actor or {"tensor": 2}}).mesh("actor")
        self.actor = noise(actor, 1)
        self.served: dict[str, list] = {}
        self.transports, self.replicas, self.broken = [], [], {}
        for i in range(count):
            devices = jax.devices()[2 + 2 * i : 4 + 2 * i]
            mesh = actor if rollout == "actor" else Dial.build({"actor": rollout or {"fsdp": 2}}, devices).mesh("actor")
            name = "rollout" if count == 1 else f"rollout-{i}"
            self.served[name] = []
            self.transports.append(Faulty())
            self.replicas.append(
                LocalReplica(
                    name, noise(mesh, 2 + i), shardings(ADAPTER, mesh), self.transports[-1],
                    install=lambda policy, tree, name=name: self.install(name, policy, tree),
                )
            )  # fmt: skip
        self.sync = WeightSync(ADAPTER, [Route.local(replica) for replica in self.replicas], base={}, **how)

    def install(self, name, policy, tree):
        if name in self.broken:
            raise self.broken[name]
        self.served[name].append((policy, tree))

    def trained(self, factor: float) -> dict[str, jax.Array]:
        return {path: leaf * factor for path, leaf in self.actor.items()}


def repeated_rows(raw):
    raw[8:] = raw[:8]


def swapped_rows(raw):
    raw[:8], raw[8:] = raw[8:].copy(), raw[:8].copy()


def lost_rows(raw):
    raw[8:] = 0


def swap_leaves(tree):
    tree["layers.1.q.lora_a"], tree["layers.1.k.lora_a"] = tree["layers.1.k.lora_a"], tree["layers.1.q.lora_a"]


def without(tree):
    del tree[A]


def narrow(tree):
    tree[A] = tree[A][:8]


def cast(tree):
    tree[A] = tree[A].astype(jnp.bfloat16)


def elsewhere(tree):
    tree[A] = jax.device_put(tree[A], jax.devices()[7])


def more_on_a_link(staged):
    (link, size), *_ = staged.link_bytes.items()
    return replace(staged, link_bytes={**staged.link_bytes, link: 2 * size})


def other_link(staged):
    (link, size), *rest = staged.link_bytes.items()
    return replace(staged, link_bytes={**dict(rest), link[::-1]: size})


def die(staged):
    raise ConnectionError("peer 3 is gone")


FAULTS = {
    "one bit": (flip(A), rf"what arrived at rollout is not what actor holds, in 1 of 4 leaves: {A}"),
    "sign bit": (flip(B, bit=31), rf"in 1 of 4 leaves: {B}"),
    "one bit on the last device": (flip_on(B, 1), rf"device 2 and device 3 .* of {B}.*drifted apart"),
    "a bucket repeated": (changed_part(A, repeated_rows), rf"in 1 of 4 leaves: {A}"),
    "two buckets swapped": (changed_part(A, swapped_rows), rf"in 1 of 4 leaves: {A}"),
    "a bucket lost": (changed_part(A, lost_rows), rf"in 1 of 4 leaves: {A}"),
    "a bucket sent twice": (
        more_on_a_link,
        r"other bytes moved to rollout than planned, on 1 links: \d -> \d: \d+ planned",
    ),
    "over another link": (other_link, r"other bytes moved to rollout than planned, on 2 links"),
    "swapped leaves": (on_tree(swap_leaves), rf"in 2 of 4 leaves: .*{A}"),
    "all NaN": (changed_part(A, lambda raw: raw.fill(np.nan)), rf"in 1 of 4 leaves: {A}"),
    "dropped": (on_tree(without), rf"staged tree of rollout.*missing: {A}"),
    "extra": (on_tree(lambda tree: tree.update(extra=tree[A])), "staged tree of rollout.*not a trainable leaf: extra"),
    "shape": (on_tree(narrow), rf"{A} was staged as float32\[8,2\], the plan says float32\[16,2\].*staged: mesh"),
    "dtype": (on_tree(cast), rf"{A} was staged as bfloat16\[16,2\], the plan says float32"),
    "place": (on_tree(elsewhere), rf"{A} float32\[16,2\] was staged as .*device 7.*declared: mesh"),
    "raises": (die, "replica 'rollout': ConnectionError: peer 3 is gone"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "stale", "send raises", "hangs"])
def test_a_fault_on_the_way_is_found_and_the_old_weights_stand(fault):
    world = World(deadline_s=60.0)
    (transport,), (replica,) = world.transports, world.replicas
    first = world.sync.push(1, world.actor)
    serving, before = replica.installed, leaf_digests(replica.installed)
    held = dict(serving)
    if fault == "stale":
        transport.spoil, message = (lambda staged: replace(staged, tree=dict(held))), "in 4 of 4 leaves"
    elif fault == "send raises":
        transport.send_error, message = ConnectionError("peer 3 is gone"), "peer 3 is gone"
    elif fault == "hangs":
        world.sync._deadline_s = 0.3
        transport.spoil = hang_until_the_deadline(transport)
        message = (
            r"replica 'rollout': rollout waited 0\.\d s for actor \(weights, version 2\); the deadline was 0\.\d s"
        )
    else:
        transport.spoil, message = FAULTS[fault]
    trained = world.trained(1.5)
    with pytest.raises((SyncError, ConnectionError), match=message):
        world.sync.push(2, trained)
    assert replica.installed is serving and all(serving[p] is held[p] for p in held)
    assert leaf_digests(serving) == before and len(world.served["rollout"]) == 1
    assert world.sync.published == first.policy == replica.active
    assert not transport.inner._sent  # nothing of it is kept
    # Nothing works until somebody has looked, then everything does.
    transport.spoil, transport.send_error, world.sync._deadline_s = (lambda staged: None), None, 60.0
    with pytest.raises(SyncError, match=r"earlier push failed .*The failure was: \w+Error"):
        world.sync.push(2, trained)
    world.sync.reset()
    receipt = world.sync.push(2, trained)
    assert leaf_digests(replica.installed) == leaf_digests(trained) and receipt.syncs == 2
    assert world.served["rollout"][-1][0] == receipt.policy


def test_a_replica_that_does_not_even_answer_does_not_hold_the_trainer_up():
    """The transport ignores its deadline; the publisher does not."""
    world = World(deadline_s=0.3)
    stuck = threading.Event()
    world.transports[0].spoil = lambda staged: stuck.wait(30) and None
    start = time.monotonic()
    with pytest.raises(SyncError, match=r"actor waited 0\.\d s for replica 'rollout' \(stage, version 1\)"):
        world.sync.push(1, world.actor)
    assert time.monotonic() - start < 20
    # What comes in after it was given up is not kept, let alone served.
    stuck.set()
    for _ in range(200):
        if not any(thread.name == "stage rollout" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    assert world.replicas[0]._staged is None and world.replicas[0].active is None


def test_a_transport_that_copies_what_is_in_place_is_refused():
    world = World(actor={"fsdp": 2}, rollout="actor")
    world.transports[0].spoil = on_tree(lambda tree: {p: x.copy() for p, x in tree.items()})
    with pytest.raises(SyncError, match=r"\d+ bytes were written at rollout where 0 were planned"):
        world.sync.push(0, world.actor)
    assert world.sync.published is None


def test_leaves_in_place_that_are_not_the_right_ones_are_found():
    """On the sender's buffers, but on another leaf's: not taken for digested."""
    world = World(actor={"fsdp": 2}, rollout="actor")
    world.transports[0].spoil = on_tree(swap_leaves)
    with pytest.raises(SyncError, match="in 2 of 4 leaves"):
        world.sync.push(0, world.actor)


# -- several replicas ------------------------------------------------------------------------------------------------


def test_two_replicas_serve_one_version():
    world = World(2)
    receipt = world.sync.push(0, world.actor)
    assert receipt.replicas == ("rollout-0", "rollout-1") and not receipt.evicted
    for replica in world.replicas:
        assert replica.active == receipt.policy and leaf_digests(replica.installed) == leaf_digests(world.actor)
    assert receipt.bytes_moved == receipt.bytes_planned == 2 * World().sync.push(0, world.actor).bytes_planned


@pytest.mark.parametrize("fault", ["one bit", "raises", "dropped", "a bucket sent twice"])
def test_abort_flips_nobody(fault):
    world = World(2)
    world.sync.push(0, world.actor)
    before = [replica.installed for replica in world.replicas]
    world.transports[1].spoil = FAULTS[fault][0]
    with pytest.raises(SyncError, match=r"version 1 was not published, 1 of 2 replicas failed: replica 'rollout-1': "):
        world.sync.push(1, world.trained(2))
    assert all(r.active.number == 0 and r.installed is old for r, old in zip(world.replicas, before, strict=True))
    assert all(r._staged is None for r in world.replicas) and not world.sync.publisher.evicted
    world.transports[1].spoil = lambda staged: None
    world.sync.reset()
    assert world.sync.push(1, world.trained(2)).replicas == ("rollout-0", "rollout-1")


@pytest.mark.parametrize("fault", ["one bit", "raises", "dropped", "a bucket sent twice"])
def test_evict_names_it_and_goes_on(fault):
    world = World(2, on_failure="evict")
    world.sync.push(0, world.actor)
    world.transports[0].spoil = FAULTS[fault][0]
    receipt = world.sync.push(1, world.trained(2))
    good, bad = world.replicas[1], world.replicas[0]
    assert receipt.replicas == ("rollout-1",) and list(receipt.evicted) == ["rollout-0"]
    assert good.active == receipt.policy and bad.active.number == 0 and bad._staged is None
    # It gets nothing any more, until it is taken back in: then a whole sync mends it.
    world.transports[0].spoil = lambda staged: None
    assert world.sync.push(2, world.trained(3)).replicas == ("rollout-1",) and bad.active.number == 0
    world.sync.publisher.admit(bad)
    receipt = world.sync.push(3, world.trained(4))
    assert set(receipt.replicas) == {"rollout-0", "rollout-1"} and bad.active == good.active == receipt.policy
    assert leaf_digests(bad.installed) == leaf_digests(world.trained(4))


def test_the_last_replica_is_not_evicted():
    world = World(1, on_failure="evict")
    world.transports[0].spoil = FAULTS["one bit"][0]
    with pytest.raises(SyncError, match="1 of 1 replicas failed: replica 'rollout': what arrived"):
        world.sync.push(0, world.actor)
    world.transports[0].spoil = lambda staged: None
    world.sync.reset()
    assert world.sync.push(0, world.actor).replicas == ("rollout",)


@pytest.mark.parametrize("on_failure", ["abort", "evict"])
def test_a_flip_that_fails_after_another_one_is_named_and_never_said_to_serve(on_failure):
    world = World(2, on_failure=on_failure)
    world.sync.push(0, world.actor)
    world.broken["rollout-1"] = RuntimeError("the engine fell over")
    receipt = world.sync.push(1, world.trained(2))
    assert receipt.replicas == ("rollout-0",) and "RuntimeError: the engine fell over" in receipt.evicted["rollout-1"]
    good, bad = world.replicas
    assert good.active == receipt.policy and bad.active is None and "fell over" in bad.poisoned
    with pytest.raises(SyncError, match="rollout-1 is poisoned until a full sync succeeds"):
        _ = bad.installed
    world.broken.clear()
    world.sync.publisher.admit(bad)
    receipt = world.sync.push(2, world.trained(3))
    assert bad.active == receipt.policy and bad.poisoned is None
    assert leaf_digests(bad.installed) == leaf_digests(world.trained(3))


def test_a_first_flip_that_fails_publishes_nothing_under_abort():
    world = World(2)
    first = world.sync.push(0, world.actor)
    world.broken["rollout-0"] = SyncError("samples are under way")
    with pytest.raises(
        SyncError, match=r"replica 'rollout-0': samples are under way.*the others serve what they served"
    ):
        world.sync.push(1, world.trained(2))
    assert [r.active for r in world.replicas] == [first.policy] * 2 and world.sync.published == first.policy
    assert list(world.sync.publisher.replicas) == ["rollout-0", "rollout-1"]
    world.broken.clear()
    world.sync.reset()
    assert world.sync.push(1, world.trained(2)).replicas == ("rollout-0", "rollout-1")


def test_an_engine_that_breaks_halfway_poisons_its_replica_until_a_sync_mends_it():
    world = World()
    world.sync.push(0, world.actor)
    world.broken["rollout"] = RuntimeError("out of memory")
    with pytest.raises(SyncError, match="RuntimeError: out of memory"):
        world.sync.push(1, world.trained(2))
    (replica,) = world.replicas
    assert replica.active is None and "installing" in replica.poisoned and world.sync.published.number == 0
    world.broken.clear()
    world.sync.reset()
    receipt = world.sync.push(1, world.trained(2))
    assert replica.active == receipt.policy and replica.poisoned is None


def test_replicas_that_say_more_than_they_do_are_found():
    """A flip that returns without having flipped, and names that cannot be told apart."""
    world = World(2, on_failure="evict")
    world.sync.push(0, world.actor)
    world.replicas[1].flip = lambda policy, deadline: None
    receipt = world.sync.push(1, world.trained(2))
    assert receipt.replicas == ("rollout-0",)
    assert "it says that it serves v1:" in receipt.evicted["rollout-1"]
    with pytest.raises(SyncError, match="two replicas have one name"):
        Publisher([world.replicas[0], world.replicas[0]])
    with pytest.raises(SyncError, match="there is no replica"):
        Publisher([])
    with pytest.raises(SyncError, match="'rollout-0' is there already"):
        world.sync.publisher.admit(world.replicas[0])


def test_only_what_was_staged_is_flipped_to():
    world = World()
    receipt = world.sync.push(0, world.actor)
    (replica,) = world.replicas
    deadline = Deadline.after(5)
    with pytest.raises(SyncError, match=r"told to serve .*but has nothing staged"):
        replica.flip(receipt.policy, deadline)
    offers = []
    world.sync.publisher.publish = lambda offer, deadline, **_: offers.append(offer) or die(None)
    with pytest.raises(ConnectionError):
        world.sync.push(1, world.trained(2))
    offer = offers[0]["rollout"]
    world.transports[0].send(1, offer.plan, world.trained(2), {d.id: d for d in jax.devices()}, deadline)
    replica.stage(offer, deadline)
    with pytest.raises(SyncError, match=r"told to serve .*, but has v1:.* staged"):
        replica.flip(receipt.policy, deadline)
    replica.discard(7)
    replica.flip(offer.policy, deadline)
    assert replica.active == offer.policy
