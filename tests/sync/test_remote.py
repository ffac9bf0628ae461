"""The protocol between trainer and sampler, message by message, with both in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
from lockstep.sync import wire
from lockstep.sync.arrays import device_numbers, placed
from lockstep.sync.channel import Channel, connect, new_token
from lockstep.sync.ends import numbers_from
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.plan import Placed
from lockstep.sync.planner import make_plan
from lockstep.sync.publish import Offer, Probe, Publisher, StageReport
from lockstep.sync.remote import PLANS_KEPT, RemoteReplica
from lockstep.sync.replica import LocalReplica
from lockstep.sync.replica_server import ReplicaServer
from lockstep.sync.shared_memory import SharedMemoryTransport
from lockstep.sync.transport import Deadline
from lockstep.sync.verify import leaf_digests
from lockstep.types import PolicyVersion

TOKEN = new_token()
SHAPE = (8, 6)
BASE = "f" * 32


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


class Sampler:
    """A replica with its server, and what a trainer needs to publish to it."""

    def __init__(self, name: str = "rollout", install: Any = None, start: int = 4, score: Any = None) -> None:
        mesh = Mesh(np.array(jax.devices()[start : start + 2]), ("tensor",))
        self.where = {"w": NamedSharding(mesh, P("tensor"))}
        self.numbers = numbers_from(100, self.where.values())
        self.receiver, self.sender = SharedMemoryTransport(f"r_{name}"), SharedMemoryTransport(f"s_{name}")
        blank = {"w": jax.device_put(np.zeros(SHAPE, np.float32), self.where["w"])}
        options: dict[str, Any] = {"numbers": self.numbers, "base_digest": BASE, "install": install, "score": score}
        self.replica = LocalReplica(name, blank, self.where, self.receiver, **options)
        self.server = ReplicaServer(self.replica, self.receiver, self.numbers, "127.0.0.1:0", TOKEN).start()
        self.remote = self.trainer()
        self.asked: RemoteReplica | None = None

    def trainer(self, name: str = "trainer") -> RemoteReplica:
        return RemoteReplica(self.replica.name, self.server.address, TOKEN, self.sender, source=name)

    def offer(
        self, number: int, value: float | None = None, probe: Probe | None = None, devices: Sequence[int] = (0, 1)
    ) -> Offer:
        """Send a version whose weights are all `value`, from these devices, and offer it."""
        mesh = Mesh(np.array([jax.devices()[i] for i in devices]), ("fsdp",))
        filled = np.full(SHAPE, number if value is None else value, np.float32)
        source = {"w": jax.device_put(filled, NamedSharding(mesh, P(None, "fsdp")))}
        plan = make_plan({"w": placed(source["w"])}, (self.asked or self.remote).placed())
        numbers = device_numbers(leaf.sharding for leaf in source.values())
        self.sender.send(number, plan, source, numbers, soon())
        digests = leaf_digests(source)
        return Offer(PolicyVersion(number, digests["w"][-16:]), plan, digests, BASE, probe)

    def value(self) -> float:
        return float(np.asarray(self.replica.installed["w"])[0, 0])

    def close(self) -> None:
        for end in (self.remote, self.server, self.sender, self.receiver):
            end.close()


@pytest.fixture
def sampler() -> Iterator[Callable[..., Sampler]]:
    opened: list[Sampler] = []

    def make(*args: Any, **kwargs: Any) -> Sampler:
        opened.append(Sampler(*args, **kwargs))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_stage_flip_and_repeat(sampler):
    one = sampler()
    assert one.remote.active is None
    offer = one.offer(1)
    report = one.remote.stage(offer, soon())
    assert report.digests == offer.digests and report.bytes_written == 8 * 6 * 4 and one.value() == 0
    one.remote.flip(offer.policy, soon())
    one.remote.flip(offer.policy, soon())
    assert one.remote.active == offer.policy and one.value() == 1
    one.remote.stage(one.offer(1), soon())  # the very same again: a repair
    one.remote.flip(offer.policy, soon())


def test_a_flip_needs_exactly_what_was_staged(sampler):
    one = sampler()
    offer = one.offer(1)
    for policy in (offer.policy, PolicyVersion(1, "another")):
        with pytest.raises(SyncError, match=r"rollout: rollout was told to serve .* but has nothing staged"):
            one.remote.flip(policy, soon())
    one.remote.stage(offer, soon())
    with pytest.raises(SyncError, match=r"told to serve v1:another, but has v1:\w+ staged"):
        one.remote.flip(PolicyVersion(1, "another"), soon())
    one.remote.discard(1)
    one.remote.discard(7)
    with pytest.raises(SyncError, match="has nothing staged"):
        one.remote.flip(offer.policy, soon())
    assert one.remote.active is None and one.value() == 0


def test_late_offers_and_other_content_under_one_number_are_refused(sampler):
    one = sampler()
    for number in (1, 2):
        offer = one.offer(number)
        one.remote.stage(offer, soon())
        one.remote.flip(offer.policy, soon())
    for late in (one.offer(1), one.offer(2, value=9.0)):
        with pytest.raises(SyncError, match=r"is offered late; rollout serves v2"):
            one.remote.stage(late, soon())
    assert one.remote.active == offer.policy and one.value() == 2


def test_another_trainer_takes_over_and_may_start_earlier(sampler):
    one = sampler()
    offer = one.offer(5)
    one.remote.stage(offer, soon())
    one.remote.flip(offer.policy, soon())
    with one.trainer("restarted") as other:
        assert other.active == offer.policy
        one.asked = other
        earlier = one.offer(3)
        other.stage(earlier, soon())
        other.flip(earlier.policy, soon())
        assert other.active == earlier.policy
        with pytest.raises(SyncError, match="is offered late"):
            other.stage(one.offer(2), soon())
        with pytest.raises(SyncError, match=r"another trainer has taken over|trainer lost rollout"):
            one.remote.flip(offer.policy, soon())
        with pytest.raises(SyncError, match="another trainer has taken over"):
            one.remote.flip(offer.policy, soon())
        assert other._channel.alive()  # the refused one has not cut it off
    assert one.value() == 3


def test_a_connection_that_broke_is_made_anew(sampler):
    one = sampler()
    offer = one.offer(1)
    one.remote.stage(offer, soon())
    one.remote._channel.close()
    one.remote.flip(offer.policy, soon())  # what was staged is there still
    one.remote._channel.close()
    offer = one.offer(2)
    one.remote.stage(offer, soon())  # and the new connection is told the plan again
    one.remote.flip(offer.policy, soon())
    assert one.value() == 2


def raw(one: Sampler) -> Channel:
    return connect(one.server.address, TOKEN, here="trainer", there="rollout", deadline=soon())


def ask(channel: Channel, number: Any, do: Any = "active", **more: Any) -> dict[str, Any]:
    channel.send({"number": number, "session": "s", "seconds": 5, "do": do, **more}, soon())
    return channel.receive("an answer", -1, soon())


def test_requests_repeated_skipped_or_early_are_answered_but_not_run(sampler):
    flips = []
    one = sampler(install=lambda policy, tree: flips.append(policy))
    offer = one.offer(1)
    channel = raw(one)
    try:
        assert ask(channel, 1, "plan", plan=wire.plan_to_json(offer.plan)) == {"number": 1, "hash": offer.plan.hash}
        stage = {"offer": wire.offer_to_json(offer), "ticket": one.sender.ticket(1)}
        assert "report" in ask(channel, 2, "stage", **stage)
        policy = wire.policy_to_json(offer.policy)
        first = ask(channel, 3, "flip", policy=policy)
        assert first == ask(channel, 3, "flip", policy=policy) == {"number": 3, "active": policy}
        assert flips == [offer.policy]
        for number in (5, 2, 0, -1, None, "4", True, 4.0):
            assert "is out of order; expected 4" in ask(channel, number, "discard", version=1)["error"]
        assert ask(channel, 4) == {"number": 4, "active": policy}
    finally:
        channel.close()


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        ({"do": "nonsense"}, "'nonsense' is no request; expected one of active, placed"),
        ({"do": ["flip"]}, "is no request"),
        ({"do": "flip"}, "a flip names no version"),
        ({"do": "flip", "policy": {"number": "1", "digest": ""}}, "policy version .* does not fit at number"),
        ({"do": "discard"}, "None is no version"),
        ({"do": "plan"}, "a plan's description from the other side does not fit"),
        ({"do": "stage", "offer": {}}, "an offer from the other side does not fit at policy"),
        ({"do": "active", "seconds": -1}, "needs a deadline and a session"),
        ({"do": "active", "seconds": "1"}, "needs a deadline and a session"),
        ({"do": "active", "session": None}, "needs a deadline and a session"),
    ],
)
def test_requests_that_make_no_sense_are_answered_with_what_is_wrong(sampler, request_, match):
    one = sampler()
    channel = raw(one)
    try:
        channel.send({"number": 1, "session": "s", "seconds": 5, **request_}, soon())
        with pytest.raises(AssertionError, match=match):
            raise AssertionError(channel.receive("an answer", -1, soon())["error"])
        assert "active" in ask(channel, 2)
    finally:
        channel.close()


def test_an_unknown_plan_or_no_ticket_is_refused(sampler):
    one = sampler()
    offer = one.offer(1)
    channel = raw(one)
    try:
        assert "no plan" in ask(channel, 1, "stage", offer=wire.offer_to_json(offer), ticket={})["error"]
        ask(channel, 2, "plan", plan=wire.plan_to_json(offer.plan))
        assert "without a ticket" in ask(channel, 3, "stage", offer=wire.offer_to_json(offer))["error"]
        bad = ask(channel, 4, "stage", offer=wire.offer_to_json(offer), ticket={"segment": "/dev/shm/none"})
        assert "was it withdrawn?" in bad["error"] and one.server.last_failure == bad["error"]
    finally:
        channel.close()


def test_more_plans_than_the_sampler_keeps(sampler):
    one = sampler()
    trainers = [(0,), (1,), (2,), (3,), (0, 1), (2, 3)]
    for number, trainer in enumerate([*trainers, (0,), (2, 3), (1,)], 1):
        offer = one.offer(number, devices=trainer)
        one.remote.stage(offer, soon())
        one.remote.flip(offer.policy, soon())
        assert one.value() == number
    assert len(one.server._plans) == len(one.remote._plans) == PLANS_KEPT


def test_an_adapter_for_another_base_is_refused(sampler):
    one = sampler()
    for base in ("0" * 32, ""):
        with pytest.raises(
            SyncError, match=f"belongs to frozen weights of digest {base or 'none'}, rollout holds {BASE}"
        ):
            one.remote.stage(replace(one.offer(1), base_digest=base), soon())
    assert one.remote.active is None


def test_an_engine_that_breaks_is_reported_and_the_server_goes_on(sampler):
    def install(policy: PolicyVersion, tree: Any) -> None:
        if policy.number == 1:
            raise RuntimeError("the engine is out of pages")

    one = sampler(install=install)
    offer = one.offer(1)
    one.remote.stage(offer, soon())
    with pytest.raises(SyncError, match="rollout: RuntimeError: the engine is out of pages"):
        one.remote.flip(offer.policy, soon())
    assert one.remote.active is None and one.replica.poisoned
    offer = one.offer(2)
    one.remote.stage(offer, soon())
    one.remote.flip(offer.policy, soon())
    assert one.remote.active == offer.policy and one.value() == 2


def test_a_probe_crosses_and_decides(sampler):
    asked = []

    def score(tree: Any, sequences: Any) -> list[np.ndarray]:
        asked.append([list(sequence) for sequence in sequences])
        return [np.full(len(s) - 1, float(np.asarray(tree["w"])[0, 0]), np.float32) for s in sequences]

    one = sampler(score=score)
    good = Probe([[1, 2, 3]], [np.full(2, 1, np.float32).tobytes().hex()], True)
    assert one.remote.stage(one.offer(1, probe=good), soon()).probed == 1 and asked == [[[1, 2, 3]]]
    with pytest.raises(SyncError, match="prob"):
        one.remote.stage(one.offer(2, probe=good), soon())


def test_a_stage_that_takes_too_long_meets_the_deadline_and_its_answer_is_not_the_next_ones(sampler):
    slow, running = threading.Event(), threading.Event()

    def score(tree: Any, sequences: Any) -> list[np.ndarray]:
        running.set()
        slow.wait(10)
        return [np.full(len(s) - 1, 1, np.float32) for s in sequences]

    one = sampler(score=score)
    probe = Probe([[1, 2]], [np.full(1, 1, np.float32).tobytes().hex()], True)
    with pytest.raises(SyncError, match=r"trainer waited 0\.\d s for rollout \(to stage and verify, version 1\)"):
        one.remote.stage(one.offer(1, probe=probe), soon(0.5))
    running.wait(5)
    with pytest.raises(SyncError, match=r"rollout: a new request waited .* for rollout \(it is staging version 1"):
        one.remote.stage(one.offer(2), soon(0.5))
    one.remote.discard(1)
    slow.set()
    offer = one.offer(3)
    one.remote.stage(offer, soon())
    one.remote.flip(offer.policy, soon())
    assert one.remote.active == offer.policy and one.value() == 3


def test_two_replicas_flip_together_or_not_at_all(sampler):
    good, bad = sampler("good"), sampler("bad", start=6)
    publisher = Publisher([good.remote, bad.remote])
    offers = {"good": good.offer(1), "bad": bad.offer(1)}
    offers["bad"] = replace(offers["bad"], digests={"w": "float32[8,6]:0000000000000000"})
    with pytest.raises(SyncError, match="replica 'bad': bad: what arrived at bad is not what actor holds"):
        publisher.publish(offers, soon())
    assert good.remote.active is None and bad.remote.active is None
    offers = {"good": good.offer(1), "bad": bad.offer(1)}
    assert set(publisher.publish(offers, soon()).reports) == {"good", "bad"}
    assert good.value() == bad.value() == 1


def test_sides_with_different_transports_say_so(sampler):
    one = sampler()
    one.remote.transport = type("Other", (), {"name": "files"})()
    with pytest.raises(SyncError, match="rollout receives over 'shared-memory', trainer sends over 'files'"):
        one.remote.placed()


# ---------------------------------------------------------------- the nouns as JSON


@st.composite
def sides(draw) -> tuple[dict[str, Placed], dict[str, Placed]]:
    shape = draw(st.sampled_from([(8, 6), (4,), (7, 3), ()]))

    def side(first: int) -> dict[str, Placed]:
        a, b = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4)]))
        on = MeshShape((("a", a), ("b", b)), tuple(range(first, first + a * b)))
        spec = [()] * len(shape)
        for axis in draw(st.lists(st.sampled_from("ab"), unique=True)):
            if shape:
                dim = draw(st.integers(0, len(shape) - 1))
                spec[dim] = (*spec[dim], axis)
        return {path: Placed(shape, "float32", Layout(on, tuple(spec))) for path in ("x", "y")}

    return side(0), side(draw(st.sampled_from([0, 10])))


@settings(max_examples=40)
@given(sides(), st.booleans(), st.sampled_from([1 << 20, 512]))
def test_a_plan_made_from_its_description_is_the_same_plan(both, relay, staging):
    plan = make_plan(*both, staging_bytes=staging, relay=relay)
    again = wire.plan_from_json(json.loads(json.dumps(wire.plan_to_json(plan))))
    assert again.hash == plan.hash and list(again.transfers()) == list(plan.transfers())
    assert wire.places_from_json(wire.places_to_json(plan.source)) == dict(plan.source)


def described() -> dict[str, Any]:
    side = {"x": Placed((8, 6), "float32", Layout(MeshShape((("a", 2),), (0, 1)), (("a",), ())))}
    other = {"x": Placed((8, 6), "float32", Layout(MeshShape((), (5,)), ((), ())))}
    return wire.plan_to_json(make_plan(side, other))


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        (("hash",), "0" * 64, "both sides must run the same release"),
        (("staging_bytes",), 99, "both sides must run the same release"),
        (("staging_bytes",), "99", "does not fit at staging_bytes"),
        (("extra",), 1, "does not fit at extra"),
        (("source", "layouts", 0, 0), 7, "layouts that cannot be"),
        (("source", "meshes", 0, "devices"), [0, 0], "does not fit at source.meshes.0"),
        (("source", "leaves", "x", 1), "float33", "dtype"),
        (("mapping", "targets", "x", "pieces", 0, "source"), "y", "reads y, which is no leaf of the source"),
        (("destination", "leaves"), {}, "is no leaf of the destination"),
    ],
)
def test_a_description_that_was_altered_is_refused(where, value, match):
    found = json.loads(json.dumps(described()))
    inner = found
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(SyncError, match=match):
        wire.plan_from_json(found)


def test_offers_and_reports_survive_json():
    side = {"x": Placed((8,), "float32", Layout(MeshShape((), (0,)), ((),)))}
    plan = make_plan(side, {"x": replace(side["x"], layout=Layout(MeshShape((), (1,)), ((),)))})
    probe = Probe(((1, 2), (3, 4)), ("00000000", "0000803f"), False, 0.25)
    offer = Offer(PolicyVersion(3, "ab"), plan, {"x": "d"}, "base", probe)
    again = wire.offer_from_json(json.loads(json.dumps(wire.offer_to_json(offer))), {plan.hash: plan}.__getitem__)
    assert again.plan is plan and again.policy == offer.policy and again.digests == offer.digests
    assert [list(s) for s in again.probe.sequences] == [[1, 2], [3, 4]]
    assert (list(again.probe.logprobs), again.probe.bound) == (list(probe.logprobs), probe.bound)
    report = StageReport("r", {"x": "d"}, {(0, 1): 32}, 32, 2, {"transfer": 0.5})
    assert wire.report_from_json(json.loads(json.dumps(wire.report_to_json(report)))) == report
    assert wire.policy_from_json(None) is None is wire.policy_to_json(None)
