"""The service over workers that are moved by hand: every order of events is a test's own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from fakes import BusyWorker, ManualWorker, expected, request
from jax.sharding import SingleDeviceSharding

from lockstep.errors import CapacityError, DataError, QueueFullError, ServiceError, SyncError
from lockstep.models.spec import Leaf
from lockstep.service.blocking import run_all, score
from lockstep.service.requests import Ended, Refused, Started, Tokens
from lockstep.service.service import RolloutService
from lockstep.sync.local import LocalTransport
from lockstep.sync.replica import LocalReplica
from lockstep.sync.route import Route
from lockstep.sync.sync import WeightSync
from lockstep.sync.transport import Deadline
from lockstep.types import PolicyVersion

LEAVES = {"w": Leaf("w", (8,), (None,), "normal")}


def weights(value: float) -> dict[str, jax.Array]:
    return {"w": jax.device_put(np.full(8, value, np.float32), jax.devices()[0])}


class World:
    """A trainer, a service, and workers whose replicas are real ones."""

    def __init__(self, count: int = 1, kind: type[ManualWorker] = ManualWorker, capacity: int = 8, **how) -> None:
        on_failure, deadline_s = how.pop("on_failure", "abort"), how.pop("deadline_s", 20.0)
        self.service = RolloutService(**how)
        self.workers = [kind(f"r{i}", capacity) for i in range(count)]
        self.replicas = []
        for i, worker in enumerate(self.workers):
            where = {"w": SingleDeviceSharding(jax.devices()[1 + i])}
            blank = {"w": jax.device_put(np.zeros(8, np.float32), where["w"])}
            self.replicas.append(LocalReplica(worker.name, blank, where, LocalTransport(), install=worker.install))
            self.service.join(worker, shards=2)
        routes = [self.service.route(Route.local(r)) for r in self.replicas]
        self.sync = WeightSync(LEAVES, routes, base={}, on_failure=on_failure, deadline_s=deadline_s)
        self.heard: dict[str, list] = {}

    def push(self, number: int):
        return self.sync.push(number, weights(number))

    def submit(self, *args, **more) -> list:
        asked = request(*args, **more)
        self.heard[asked.id] = []
        self.service.submit(asked, self.heard[asked.id].append)
        return self.heard[asked.id]


def background(call, *args):
    """The call in a thread of its own, and a moment for it to begin."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args)
    time.sleep(0.05)
    return future


def until(holds) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it never came")


def ids_of(end: Ended) -> list[list[int]]:
    return [t.completion_ids.tolist() for t in end.trajectories]


def test_a_request_waits_for_a_version_runs_and_ends_once():
    world = World()
    (worker,) = world.workers
    heard = world.submit("a", seeds=(1, 2))
    assert heard == [] and "r0: nothing yet" in world.service.status().waiting_for
    policy = world.push(0).policy
    assert heard == [Started(policy, "r0")]
    worker.finish()
    (end,) = heard[1:]
    assert (end.outcome, end.policy) == ("finished", policy)
    assert ids_of(end) == expected(request("a", seeds=(1, 2)), policy)
    worker.emit(Refused("a", "late")), world.service.cancel("a")
    assert len(heard) == 2
    assert world.service.status().ended == {"finished": 1}


def test_drain_lets_requests_finish_on_the_old_version():
    world = World()
    (worker,) = world.workers
    old = world.push(0).policy
    first = world.submit("a")
    flip = background(world.push, 1)
    second = world.submit("b")
    assert not flip.done() and second == []
    assert "r0 to flip to v1" in world.service.status().waiting_for
    worker.finish("a")
    new = flip.result(20).policy
    assert first[-1].policy == old and worker.installs[-1] == (new, [])
    assert second == [Started(new, "r0")]
    worker.finish()
    assert second[-1].policy == new and ids_of(second[-1]) == expected(request("b"), new)
    assert [r.version for r in world.service.status().retired] == [old]


def test_a_drain_that_takes_too_long_leaves_the_old_version_serving():
    world = World(deadline_s=1.0)
    (worker,) = world.workers
    old = world.push(0).policy
    first = world.submit("a")
    with pytest.raises(SyncError, match=r"waited .*r0 has 1 requests under way, the oldest 'a'"):
        world.push(1)
    second = world.submit("b")
    worker.finish()
    assert first[-1].policy == second[-1].policy == old
    world.sync.reset()
    assert world.push(1).policy.number == 1


def test_abort_starts_them_anew_with_the_same_seeds():
    world = World(update="abort")
    (worker,) = world.workers
    old = world.push(0).policy
    heard = world.submit("a", seeds=(5, 6))
    worker.step()
    flip = background(world.push, 1)
    assert worker.cancels == ["a"] and not flip.done()
    worker.settle()
    new = flip.result(20).policy
    worker.finish()
    assert [type(e) for e in heard] == [Started, Started, Ended]
    assert [e.version for e in heard[:2]] == [old, new] and ids_of(heard[-1]) == expected(
        request("a", seeds=(5, 6)), new
    )


def test_one_that_finishes_before_its_cancellation_counts_as_it_is():
    world = World(update="abort")
    (worker,) = world.workers
    old = world.push(0).policy
    heard = world.submit("a", stream=True)
    flip = background(world.push, 1)
    worker.finish()  # its tokens are not shown while it is being cancelled, and come with its end
    flip.result(20)
    tokens = [t for e in heard if isinstance(e, Tokens) for t in e.ids]
    assert [tokens] == ids_of(heard[-1]) == expected(request("a"), old)


def test_a_stream_that_was_shown_tokens_is_aborted_and_not_begun_anew():
    world = World(update="abort")
    (worker,) = world.workers
    world.push(0)
    heard = world.submit("a", stream=True)
    worker.step()
    flip = background(world.push, 1)
    worker.settle()
    flip.result(20)
    assert isinstance(heard[1], Tokens) and heard[-1].outcome == "aborted" and "served no more" in heard[-1].reason


def test_dual_runs_both_versions_and_never_three():
    world = World(update="dual")
    (worker,) = world.workers
    policies = [world.push(0).policy]
    heard = [world.submit("a0")]
    policies.append(world.push(1).policy)
    heard.append(world.submit("a1"))
    assert worker.installs[-1] == (policies[1], ["a0"])
    status = world.service.status().replicas[0]
    assert (status.active, status.draining) == (policies[1], policies[0])
    flip = background(world.push, 2)
    heard.append(world.submit("b1"))
    assert not flip.done() and heard[2] == [Started(policies[1], "r0")]
    worker.finish("a0")
    policies.append(flip.result(20).policy)
    heard.append(world.submit("a2"))
    worker.finish()
    assert [h[-1].policy.number for h in heard] == [0, 1, 1, 2]
    for h, id in zip(heard, ("a0", "a1", "b1", "a2"), strict=True):
        assert ids_of(h[-1]) == expected(request(id), h[-1].policy)


def test_rolling_leaves_one_replica_serving_and_together_does_not():
    for flips in ("rolling", "together"):
        world = World(2, flips=flips)
        one, two = world.workers
        old = world.push(0).policy
        heard = [world.submit(i) for i in "ab"]
        assert one.open and two.open
        flip = background(world.push, 1)
        until(lambda world=world: not world.service.status().replicas[0].accepting)
        late = world.submit("c")
        if flips == "rolling":
            assert late == [Started(old, "r1")]
            one.finish()
            until(lambda world=world: world.service.status().replicas[0].active.number == 1)
            assert not flip.done()
        else:
            assert late == []
            one.finish()
        two.finish()
        new = flip.result(20).policy
        for worker in (one, two):
            worker.finish()
        assert [h[-1].policy for h in heard] == [old, old]
        assert late[-1].policy == (old if flips == "rolling" else new)


def test_a_flip_that_was_prepared_and_never_comes_is_given_up():
    """Whoever published may be gone between two flips."""
    world = World(2, flips="together")
    old = world.push(0).policy
    new = PolicyVersion(1, "new")
    for name in ("r0", "r1"):
        world.service.staged(name, world.service.staging(name, new))
    world.service.flip("r0", new, lambda: world.service.serves("r0", new), Deadline.after(0.3))
    replicas = world.service.status().replicas
    assert [(r.active, r.accepting) for r in replicas] == [(new, True), (old, False)]
    until(lambda: world.service.status().replicas[1].accepting)
    assert world.service.status().replicas[1].active == old
    assert world.service.staging("r1", PolicyVersion(2, "of another trainer"))


def test_clients_words_do_not_pile_up():
    world = World()
    world.service.pause()
    for i in range(200):
        world.submit(str(i))
        world.service.cancel(str(i), f"I do not like it for the reason no. {i}")
    reasons = world.service.status().reasons
    assert sum(reasons.values()) == 200 and len(reasons) < 100


def test_a_lost_replica_s_requests_run_elsewhere_and_streams_go_on_where_they_were():
    world = World(2)
    one, two = world.workers
    policy = world.push(0).policy
    heard = world.submit("a", tokens=5, stream=True)
    assert heard == [Started(policy, "r0")]
    one.step()
    one.step()
    one.lose()
    assert heard[-1] == Started(policy, "r1")
    one.emit(Refused("a", "an answer of before"))
    two.finish()
    tokens = [t for e in heard if isinstance(e, Tokens) for t in e.ids]
    assert [tokens] == ids_of(heard[-1]) == expected(request("a", 5), policy)
    assert world.service.status().redispatched == 1


def test_a_replica_that_draws_other_tokens_under_the_same_version_is_caught():
    world = World(2)
    one, two = world.workers
    world.push(0)
    heard = world.submit("a", tokens=5, stream=True)
    one.step()
    one.lose()
    two.step(by=type(two.version)(7, "another"))
    assert heard[-1].outcome == "failed" and "other tokens" in heard[-1].reason
    assert two.cancels == ["a"]


def test_a_request_that_takes_every_replica_down_fails():
    world = World(4)
    policy = world.push(0).policy
    heard = world.submit("a")
    for worker in world.workers:
        worker.lose()
    assert [type(e) for e in heard] == [Started] * 4 + [Ended]
    assert (
        heard[-1].outcome == "failed"
        and "4 replicas that ran it were lost" in heard[-1].reason
        and heard[-1].policy == policy
    )
    with pytest.raises(ServiceError, match="no replica is left"):
        world.submit("b")


def test_what_waits_fails_when_no_replica_is_left_and_none_is_started_again():
    world = World(2)
    world.service.on_lost(lambda name, reason: None, brings=lambda policy: True)
    world.push(0)
    for worker in world.workers:
        worker.lose()
    heard = world.submit("a")
    world.service.abandon("r0", "lost too often")
    assert not heard, "the other may come back"
    world.service.abandon("r1", "lost too often, too")
    assert [type(e) for e in heard] == [Ended]
    assert heard[0].outcome == "failed" and "none is started again; the last was r1: lost too often" in heard[0].reason
    with pytest.raises(ServiceError, match="no replica is left"):
        world.submit("b")
    again = ManualWorker("r0")
    world.service.join(again)
    assert world.submit("c") == [], "it waits for a version"


def test_when_the_last_replica_of_a_version_is_lost_no_older_one_is_served():
    """r1 was left behind by the publish. That it still serves version 0 is no reason to answer under it."""
    world = World(2, on_failure="evict")
    world.service.on_lost(lambda name, reason: None, brings=lambda policy: policy.number == 0)
    one, two = world.workers
    world.push(0)
    flip, world.replicas[1].flip = world.replicas[1].flip, None
    policy = world.push(1).policy
    assert {(r.name, r.active.number) for r in world.service.status().replicas} == {("r0", 1), ("r1", 0)}
    running = world.submit("a")
    assert world.submit("b", seeds=tuple(range(8)), min_version=1) == []
    assert running == [Started(policy, "r0")] and world.service.status().lost is None
    one.lose()
    assert not two.open and world.service.status().lost == policy
    for heard in world.heard.values():
        assert heard[-1].outcome == "failed" and f"{policy}, which was served last, is lost" in heard[-1].reason
    with pytest.raises(ServiceError, match=f"{policy}, which was served last, is lost"):
        world.submit("c")
    world.replicas[1].flip = flip
    routes = [world.service.route(Route.local(world.replicas[1]))]
    after = WeightSync(LEAVES, routes, base={}).push(2, weights(2)).policy
    assert world.service.status().lost is None and world.submit("d") == [Started(after, "r1")]


def test_a_version_that_is_brought_again_is_waited_for():
    world = World(2, on_failure="evict")
    world.service.on_lost(lambda name, reason: None, brings=lambda policy: True)
    one, two = world.workers
    world.push(0)
    world.replicas[1].flip = None
    policy = world.push(1).policy
    one.lose()
    heard = world.submit("a")
    assert (
        heard == [] and not two.open and f"a replica that serves {policy} again" in world.service.status().waiting_for
    )
    again = ManualWorker("r0")
    again.version = policy
    world.service.join(again, active=policy)
    assert heard == [Started(policy, "r0")]


def test_a_flip_that_is_still_to_come_is_waited_for():
    """The first replica to serve a version dies in the middle of its publish; the second has it staged."""
    world = World(2, on_failure="evict")
    one = world.workers[0]
    world.push(0)
    flip, came = world.replicas[1].flip, []

    def lose_the_other_first(policy, deadline):
        one.lose()
        came.append((world.service.status().lost, world.submit("a")))
        assert came[0][1] == []
        flip(policy, deadline)

    world.replicas[1].flip = lose_the_other_first
    policy = world.push(1).policy
    assert came == [(None, [Started(policy, "r1")])]


def test_a_new_trainer_may_count_from_the_start():
    world = World()
    world.push(7)
    first = (
        WeightSync(LEAVES, [world.service.route(Route.local(world.replicas[0]))], base={}).push(1, weights(1)).policy
    )
    assert world.service.latest == first and world.submit("a") == [Started(first, "r0")]


def test_what_old_versions_freed_is_counted():
    world = World()
    for number in range(3):
        world.push(number)
    assert world.service.status().freed == {"versions": 2, "weight_bytes": 64, "pages": 0}


def test_the_update_policy_changes_between_two_decisions():
    world = World()
    with world.service._lock:
        changing = background(world.service.update_by, "dual")
        assert world.service.protocol.update == "drain" and not changing.done()
    changing.result(20)
    assert world.service.protocol.update == "dual"


def test_tokens_of_another_version_than_agreed_are_not_handed_on():
    world = World()
    (worker,) = world.workers
    world.push(0)
    heard = world.submit("a")
    asked, _, drawn = worker.open["a"]
    worker.open["a"] = (asked, type(worker.version)(3, "x"), drawn)
    worker.finish()
    assert heard[-1].outcome == "failed" and "computed it under version 3" in heard[-1].reason


def test_a_flip_whose_answer_is_lost_is_asked_about():
    world = World(2, on_failure="evict")
    world.push(0)
    inner = world.replicas[0]
    flip = inner.flip

    def lost(policy, deadline):
        flip(policy, deadline)
        raise ConnectionError("no answer")

    inner.flip = lost
    receipt = world.push(1)
    assert not receipt.evicted and {r.active for r in world.service.status().replicas} == {receipt.policy}


def test_nothing_is_sent_to_a_replica_of_which_nobody_knows_what_it_serves():
    world = World(2, on_failure="evict")
    world.push(0)

    class Silent(LocalReplica):
        active = property(lambda self: (_ for _ in ()).throw(ConnectionError("no answer")))

        def flip(self, policy, deadline):
            raise ConnectionError("no answer")

    world.replicas[0].__class__ = Silent
    receipt = world.push(1)
    assert set(receipt.evicted) == {"r0"}
    assert [world.submit(i)[0].replica for i in "abc"] == ["r1"] * 3
    assert not world.service.status().replicas[0].accepting


def test_a_group_has_one_version():
    """Members on two replicas, one of which flips: what cannot begin anew is not begun under another version."""
    world = World(2, update="abort")
    one, two = world.workers
    world.push(0)
    heard = {i: world.submit(i, group="g") for i in "ab"}
    assert one.open and two.open
    two.finish()
    flip = background(world.push, 1)
    one.settle()
    until(lambda: "a" in two.open or flip.done())
    two.settle()
    two.finish() if two.open else None
    flip.result(20)
    ended = [heard[i][-1] for i in "ab"]
    finished = [e for e in ended if e.outcome == "finished"]
    assert len({e.policy for e in finished}) == 1
    assert all(e.outcome == "finished" or "served no more" in e.reason for e in ended)
    # Once none of its requests is open, the group may begin anew.
    heard = world.submit("c", group="g")
    world.workers[0].finish(), world.workers[1].finish()
    assert heard[-1].policy.number == 1


def test_a_minimum_version_is_waited_for_and_holds_up_nobody():
    world = World()
    (worker,) = world.workers
    world.push(0)
    early, other = world.submit("a", min_version=1), world.submit("b")
    assert early == [] and other != []
    assert "version 1 or later" in world.service.status().waiting_for
    worker.finish()
    world.push(1)
    worker.finish()
    assert early[-1].policy.number == 1


def test_capacity_is_kept_and_the_oldest_is_not_overtaken():
    world = World(capacity=4)
    (worker,) = world.workers
    world.push(0)
    heard = [world.submit("a", seeds=(1, 2, 3)), world.submit("b", seeds=(1, 2)), world.submit("c")]
    assert [bool(h) for h in heard] == [True, False, False]
    assert "room" in world.service.status().waiting_for
    worker.finish()
    assert [bool(h) for h in heard] == [True, True, True]
    worker.finish()
    huge = world.submit("d", seeds=tuple(range(9)))  # more than the capacity, alone
    assert huge


def test_what_cannot_be_taken_is_refused_with_nothing_admitted():
    world = World(max_waiting=2)
    with pytest.raises(CapacityError):
        world.service.submit(too_long(), print)
    world.submit("a", seeds=(1, 2))
    with pytest.raises(DataError, match="under way already"):
        world.submit("a")
    with pytest.raises(QueueFullError, match="2 samples wait"):
        world.submit("b")
    assert list(world.service.protocol.requests) == ["a"]


def test_cancel_waiting_running_and_unknown():
    world = World()
    (worker,) = world.workers
    waiting = world.submit("a")
    world.service.cancel("a")
    assert waiting == [Ended("aborted", (), "cancelled by the client")]
    world.push(0)
    running = world.submit("b")
    worker.step()
    world.service.cancel("b"), world.service.cancel("b"), world.service.cancel("nobody")
    assert worker.cancels == ["b"]
    worker.settle()
    assert running[-1].outcome == "aborted" and len(running[-1].trajectories[0].completion_ids) == 1
    assert not world.service.protocol.requests and not world.service.protocol.pins


def test_waiting_too_long_fails_and_says_for_what():
    world = World()
    heard = world.submit("a", queue_s=0.01)
    until(lambda: heard)
    assert heard[-1].outcome == "failed" and "waited longer than 0.01 s for a replica that serves" in heard[-1].reason


def test_pause_holds_requests_and_resume_sends_them():
    world = World()
    world.push(0)
    world.service.pause("by request")
    heard = world.submit("a")
    assert heard == [] and "paused" in world.service.status().waiting_for
    world.service.resume()
    assert heard


def test_closing_reports_what_was_under_way():
    world = World(kind=BusyWorker)
    world.push(0)
    short, long = world.submit("short"), world.submit("long", tokens=10**6)
    ends = world.service.close(0.5)
    assert ends == {"finished": ["short"], "aborted": ["long"], "failed": []}
    assert short[-1].outcome == "finished" and long[-1].outcome == "aborted"
    with pytest.raises(ServiceError, match="shutting down"):
        world.submit("late")


def test_a_listener_that_raises_harms_nobody_else(caplog):
    world = World()
    (worker,) = world.workers
    world.push(0)
    world.service.submit(request("bad"), lambda event: 1 / 0)
    good = world.submit("good")
    worker.finish()
    assert good[-1].outcome == "finished" and "the listener of request 'bad' raised" in caplog.text


def test_many_threads_and_many_flips():
    """The hammer in small: streams, groups, cancellations, flips and a lost replica, by every policy."""
    for update in ("drain", "abort", "dual"):
        world = World(3, BusyWorker, update=update, flips="rolling")
        world.push(0)
        stop, ends = threading.Event(), []

        def client(number: int, world=world, stop=stop, ends=ends) -> None:
            rng, made = np.random.default_rng(number), 0
            while not stop.is_set():
                made += 1
                asked = request(
                    f"{number}/{made}",
                    int(rng.integers(1, 12)),
                    tuple(range(int(rng.integers(1, 4)))),
                    stream=bool(rng.integers(2)),
                )
                heard, over = [], threading.Event()

                def hear(event, heard=heard, over=over):
                    heard.append(event)
                    if isinstance(event, Ended):
                        over.set()

                world.service.submit(asked, hear)
                if rng.random() < 0.1:
                    world.service.cancel(asked.id)
                assert over.wait(30), asked.id
                ends.append((asked, heard))

        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for number in range(1, 30):
            world.push(number)
        stop.set()
        for t in threads:
            t.join(60)
        assert len(ends) > 20
        for asked, heard in ends:
            (end,) = [e for e in heard if isinstance(e, Ended)]
            assert end is heard[-1]
            if end.outcome == "finished":
                assert ids_of(end) == expected(asked, end.policy)
                if asked.stream:
                    for t in end.trajectories:
                        shown = [i for e in heard if isinstance(e, Tokens) and e.index == t.index for i in e.ids]
                        assert shown == t.completion_ids.tolist()
            else:
                assert end.outcome == "aborted"
        assert not world.service.protocol.requests and not world.service.protocol.pins
        world.service.close()


def test_blocking_helpers():
    world = World(kind=BusyWorker)
    policy = world.push(0).policy
    asked = [request(f"{i}", seeds=(i, i + 1)) for i in range(5)]
    ends = run_all(world.service, asked)
    assert [ids_of(e) for e in ends] == [expected(a, policy) for a in asked]
    with pytest.raises(CapacityError):
        run_all(world.service, [request("ok"), too_long()])
    until(lambda: not world.service.protocol.requests)
    with pytest.raises(AssertionError):  # these workers score nothing
        score(world.service, [[1, 2, 3]], 1.0)
    world.service.close()


def too_long():
    short = request("long")
    return type(short)(type(short.prompt)("long", "", (1,) * 101), (1,), short.params)
