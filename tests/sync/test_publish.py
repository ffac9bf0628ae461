"""Every call of every replica and transport fails in every way, one at a time: what is served is known afterwards."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from lockstep.errors import SyncError
from lockstep.models.spec import Leaf
from lockstep.sync.local import LocalTransport
from lockstep.sync.replica import LocalReplica
from lockstep.sync.route import Route
from lockstep.sync.sync import WeightSync
from lockstep.sync.verify import leaf_digests, tree_digest

LEAVES = {"w": Leaf("w", (8,), (None,), "normal")}
DEADLINE_S = 1.2  # of pushes where something hangs
CALLS = ("placed", "active", "stage", "flip", "discard", "send", "receive", "release", "digests")
KINDS = ("raises", "hangs", "answer lost")


class Trouble:
    """What goes wrong at one replica. calls: names of the calls, and how."""

    def __init__(self) -> None:
        self.calls: dict[str, str] = {}
        self.over = threading.Event()

    def meet(self, name: str, call: Callable[[], Any]) -> Any:
        kind = self.calls.get(name)
        if kind == "raises":
            raise RuntimeError(f"no {name}")
        if kind == "hangs":
            self.over.wait(300)  # and goes on, late
        result = call()
        if kind == "answer lost":
            raise ConnectionError(f"{name}: no answer")
        return result


class Moves(LocalTransport):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.trouble, self.forgotten = trouble, 0

    def send(self, *arguments):
        return self.trouble.meet("send", lambda: LocalTransport.send(self, *arguments))

    def receive(self, *arguments):
        return self.trouble.meet("receive", lambda: LocalTransport.receive(self, *arguments))

    def release(self, *arguments):
        return self.trouble.meet("release", lambda: LocalTransport.release(self, *arguments))

    def forget(self):
        self.forgotten += 1


class Serves(LocalReplica):
    """A replica that meets the trouble of its transport. serving: what it really serves."""

    @property
    def active(self):
        return self.transport.trouble.meet("active", lambda: self.serving)

    @property
    def serving(self):
        return LocalReplica.active.fget(self)

    def placed(self):
        return self.transport.trouble.meet("placed", lambda: LocalReplica.placed(self))

    def stage(self, *arguments):
        return self.transport.trouble.meet("stage", lambda: LocalReplica.stage(self, *arguments))

    def flip(self, *arguments):
        return self.transport.trouble.meet("flip", lambda: LocalReplica.flip(self, *arguments))

    def discard(self, *arguments):
        return self.transport.trouble.meet("discard", lambda: LocalReplica.discard(self, *arguments))

    def _digests(self, *arguments):
        return self.transport.trouble.meet("digests", lambda: LocalReplica._digests(self, *arguments))


numbers = itertools.count()


def weights(value: float) -> dict[str, jax.Array]:
    return {"w": jax.device_put(np.full(8, value, np.float32), jax.devices()[0])}


def replica(name: str, device: int, **how) -> Serves:
    where = {"w": SingleDeviceSharding(jax.devices()[device])}
    return Serves(name, {"w": jax.device_put(np.zeros(8, np.float32), where["w"])}, where, Moves(Trouble()), **how)


class World:
    """A trainer and its replicas, whose names nobody else has."""

    def __init__(self, count: int, **how) -> None:
        self.names = [f"r{next(numbers)}" for _ in range(count)]
        self.replicas = {name: replica(name, 1 + i) for i, name in enumerate(self.names)}
        routes = [Route.local(one) for one in self.replicas.values()]
        self.sync = WeightSync(LEAVES, routes, base={}, **how)

    def wait_for_the_late(self) -> None:
        """Until the calls that were given up have come to their end."""
        for thread in threading.enumerate():
            if thread.name.split(" ")[-1] in self.names:
                thread.join(20)


def one_case(call: str, kind: str, count: int, which: int, on_failure: str) -> None:
    world = World(count, on_failure=on_failure)
    sync, replicas = world.sync, world.replicas
    first = sync.push(1, weights(1)).policy
    bad = world.names[which]
    trouble = replicas[bad].transport.trouble
    trouble.calls[call] = kind
    if call == "discard":
        trouble.calls["stage"] = "raises"  # else nothing is discarded
    sync._deadline_s = DEADLINE_S if kind == "hangs" else 20.0
    receipt, why = None, ""
    try:
        receipt = sync.push(2, weights(2))
    except SyncError as error:
        why = str(error)
    sync._deadline_s = 20.0
    publisher, doubted = sync.publisher, sync.publisher.in_doubt

    def check() -> None:
        now = {name: one.serving for name, one in replicas.items()}
        if receipt is None:
            assert bad in why and sync.published == first
            assert all(now[name] in (first, doubted) for name in now)
            assert all(policy == first for name, policy in now.items() if name != bad), now
            # None serves another version than it did, unless that was said.
            assert now[bad] == first or doubted is not None
        else:
            assert receipt.policy == sync.published and receipt.version == 2 and doubted is None
            assert set(receipt.replicas) == set(publisher.replicas) == set(replicas) - set(receipt.evicted)
            assert all(now[name] == receipt.policy for name in receipt.replicas)
            assert all(leaf_digests(replicas[n].installed) == receipt.leaf_digests for n in receipt.replicas)
            named = {*receipt.evicted, *receipt.unreleased}
            assert named <= {bad}
            assert named or (call, kind) in {("flip", "answer lost")}  # a failure is named, unless asking mended it

    check()
    trouble.over.set()
    world.wait_for_the_late()
    check()
    # Whoever has looked can go on, with other weights too.
    trouble.calls.clear()
    if receipt is None:
        sync.reset()
    for name in replicas.keys() - publisher.replicas.keys():
        sync.admit(Route.local(replicas[name]))
        assert replicas[name].transport.forgotten
    number = 3 if receipt is not None or doubted is not None else 2
    receipt = sync.push(number, weights(3))
    assert set(receipt.replicas) == set(replicas) and not receipt.evicted and publisher.in_doubt is None
    assert all(one.serving == receipt.policy for one in replicas.values())
    assert all(np.asarray(one.installed["w"])[0] == 3 for one in replicas.values())
    assert all(not one.transport._sent for one in replicas.values()), "something is not released"


@pytest.mark.parametrize(("call", "kind"), list(itertools.product(CALLS, KINDS)))
def test_whatever_fails_what_is_served_is_known_and_the_next_push_mends_it(call, kind):
    cases = [(*where, mode) for where, mode in itertools.product([(1, 0), (2, 0), (2, 1)], ["abort", "evict"])]
    with ThreadPoolExecutor(len(cases)) as pool:  # they mostly wait
        for case, done in [(case, pool.submit(one_case, call, kind, *case)) for case in cases]:
            assert done.result(120) is None, case


# -- what is asked, and when -------------------------------------------------------------------------------------------


def test_a_version_that_is_published_is_published_whoever_is_lost_afterwards():
    """Also between two flips, and when nothing at all is to be heard of the replicas any more."""
    for on_failure in ("abort", "evict"):
        world = World(2, on_failure=on_failure)
        world.sync.push(1, weights(1))
        one, two = world.names
        install, lost = world.replicas[one].flip, world.replicas[two].transport.trouble
        world.replicas[one].flip = lambda *a, i=install, t=lost: (i(*a), t.calls.update(active="raises", flip="raises"))
        receipt = world.sync.push(2, weights(2))
        assert receipt.policy == world.sync.published == world.replicas[one].serving
        # Under evict all flip at once: the trouble comes before the second's flip, or while it is asked what it serves.
        why = receipt.evicted.get(two, "")
        assert "no flip" in why or (on_failure == "evict" and (not why or "no active" in why))


def test_what_a_replica_holds_is_asked_once_per_push():
    world = World(1)
    (name,) = world.names
    asked = []
    world.sync._routes[name] = Route(
        world.replicas[name], world.replicas[name].transport, lambda: asked.append(1) or world.replicas[name].placed()
    )
    for number in (1, 2):
        world.sync.push(number, weights(number))
        assert len(asked) == number


def test_a_replica_comes_back_by_its_route():
    world = World(2, on_failure="evict")
    one, two = world.names
    world.replicas[two].transport.trouble.calls["receive"] = "raises"
    assert "no receive" in world.sync.push(1, weights(1)).evicted[two]
    with pytest.raises(SyncError, match=f"{one}' is there already"):
        world.sync.admit(Route.local(replica(one, 2)))
    other = LocalReplica(two, {"v": weights(0)["w"]}, {"v": weights(0)["w"].sharding}, LocalTransport())
    with pytest.raises(SyncError, match=rf"destination shardings of {two}.*missing: w"):
        world.sync.admit(Route.local(other))
    again = replica(two, 3)
    world.sync.admit(Route.local(again))
    assert again.transport.forgotten == 1 and again.serving is None
    receipt = world.sync.push(2, weights(2))
    assert set(receipt.replicas) == {one, two} and again.serving == receipt.policy
    assert world.replicas[two].serving is None  # the one that it stands in for gets nothing
    # A new one, too; one that the publisher was given behind our back is no more than named.
    world.sync.admit(Route.local(replica("new", 4)))
    assert set(world.sync.push(3, weights(3)).replicas) == {one, two, "new"}
    world.sync.publisher.admit(replica("stray", 5))
    with pytest.raises(SyncError, match=r"another replica called 'stray' .*take it in with WeightSync.admit"):
        world.sync.push(4, weights(4))


def test_a_replica_knows_its_base():
    where = {"w": SingleDeviceSharding(jax.devices()[1])}
    base = {"frozen": "float32[1]:" + "0" * 32}
    for held, wanted in (("", base), (tree_digest(base), {}), (tree_digest({"frozen": "other"}), base)):
        one = replica("r", 1, base_digest=held)
        sync = WeightSync(LEAVES, [Route.local(one)], base=wanted)
        with pytest.raises(SyncError, match=rf"belongs to frozen weights of digest \w+, r holds {held or 'none'}"):
            sync.push(1, weights(1))
        assert one.serving is None
    one = LocalReplica("r", weights_on(where), where, LocalTransport(), base_digest=tree_digest(base))
    assert WeightSync(LEAVES, [Route.local(one)], base=base).push(1, weights(1)).policy == one.active


def weights_on(where):
    return {path: jax.device_put(np.zeros(8, np.float32), sharding) for path, sharding in where.items()}


def test_a_late_word_about_one_version_does_not_reach_another():
    world = World(1)
    (one,) = world.replicas.values()
    world.sync.push(1, weights(1))
    receive = one.transport.receive
    one.transport.receive = lambda *a: (one.discard(1), one.discard(3), receive(*a))[-1]
    assert world.sync.push(2, weights(2)).policy == one.serving
    one.transport.receive = lambda *a: (one.discard(3), receive(*a))[-1]
    with pytest.raises(SyncError, match="version 3 was discarded at r"):
        world.sync.push(3, weights(3))
    one.transport.receive = receive
    world.sync.reset()
    assert world.sync.push(3, weights(3)).policy == one.serving


def test_a_send_that_hangs_over_a_push_is_not_mixed_with_the_next():
    world = World(1, deadline_s=0.4)
    (one,) = world.replicas.values()
    trouble = one.transport.trouble
    trouble.calls["send"] = "hangs"
    with pytest.raises(SyncError, match=r"actor waited 0\.\d s for replica 'r"):
        world.sync.push(1, weights(1))
    world.sync.reset()
    with pytest.raises(SyncError, match="an earlier send is under way still"):
        world.sync.push(1, weights(2))
    trouble.over.set()
    world.wait_for_the_late()
    assert not one.transport._sent and one.serving is None
    world.sync.reset()
    world.sync._deadline_s = 20
    assert world.sync.push(1, weights(2)).policy == one.serving


@pytest.mark.parametrize("on_failure", ["abort", "evict"])
def test_one_that_only_keeps_versions_does_not_count_and_comes_last(on_failure):
    serves, keeps = (replica(f"r{next(numbers)}", device) for device in (1, 2))
    routes = [Route(keeps, keeps.transport, keeps.placed, serves=False), Route.local(serves)]
    sync = WeightSync(LEAVES, routes, base={}, on_failure=on_failure)
    first = sync.push(1, weights(1))
    assert first.replicas == (serves.name,) and serves.serving == keeps.serving == first.policy
    # Without one that serves nothing is published, and nothing kept as if it were.
    for call in ("stage", "flip"):
        serves.transport.trouble.calls[call] = "raises"
        with pytest.raises(SyncError, match=f"replica '{serves.name}': RuntimeError: no {call}"):
            sync.push(2, weights(2))
        assert serves.serving == keeps.serving == sync.published == first.policy
        serves.transport.trouble.calls.clear()
        sync.reset()
    keeps.transport.trouble.calls["flip"] = "raises"
    receipt = sync.push(2, weights(2))
    assert (receipt.replicas, list(receipt.evicted)) == ((serves.name,), [keeps.name])
    assert serves.serving == receipt.policy and keeps.serving == first.policy
