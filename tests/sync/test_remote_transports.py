"""Every transport between processes, held to the same laws. Both sides live in this process, on devices numbered apart:
nothing is handed over but tickets, arrays, files and segments. `test_remote_processes.py` does it for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
from lockstep.models.spec import Leaf
from lockstep.sync.arrays import layout_of, placed
from lockstep.sync.channel import new_token
from lockstep.sync.delta_files import DeltaFilesTransport
from lockstep.sync.ends import numbers_from, renumbered
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.foreign import Segment
from lockstep.sync.mapping import FormatMap, Piece, Run, Target, cast_operation, materialise, whole
from lockstep.sync.plan import Placed, SyncPlan
from lockstep.sync.planner import make_plan
from lockstep.sync.publish import planned_links
from lockstep.sync.remote import RemoteReplica
from lockstep.sync.replica import LocalReplica
from lockstep.sync.replica_server import ReplicaServer
from lockstep.sync.shared_memory import SharedMemoryTransport
from lockstep.sync.sync import WeightSync
from lockstep.sync.transfer_server import TransferTransport
from lockstep.sync.transport import Deadline, Staged

TRANSPORTS = ("transfer", "files", "shared-memory")
SHAPES = {"embed": (16, 12), "w": (16, 12), "norm": (12,), "scale": ()}
LEAVES = {path: Leaf(path, shape, (None,) * len(shape), "normal") for path, shape in SHAPES.items()}
FIRST = 100
TOKEN = new_token()
Wrap = Callable[[Any], Any]


def cuts(start: int, spec: P, **axes: int) -> dict[str, NamedSharding]:
    devices = np.array(jax.devices()[start : start + int(np.prod([*axes.values()]))])
    mesh = Mesh(devices.reshape(*axes.values()), tuple(axes))
    return {path: NamedSharding(mesh, spec if len(shape) == 2 else P()) for path, shape in SHAPES.items()}


SOURCE = lambda: cuts(0, P("fsdp", "tensor"), fsdp=2, tensor=2)  # noqa: E731
DESTINATIONS = {
    "halves, twice": lambda: cuts(4, P(None, "tensor"), data=2, tensor=2),
    "one device": lambda: cuts(5, P(), data=1),
    "whole, four times": lambda: cuts(4, P(), data=4),
}


def noise(where: dict[str, NamedSharding], seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {p: jax.device_put(rng.standard_normal(SHAPES[p], np.float32), sharding) for p, sharding in where.items()}


@dataclass
class Ends:
    """Both sides of one transport, and what crosses."""

    sender: Any
    receiver: Any
    source: dict[str, jax.Array]
    where: dict[str, NamedSharding]
    root: Path

    @property
    def numbers(self) -> dict[int, jax.Device]:
        return numbers_from(FIRST, self.where.values())

    def plan(self, mapping: FormatMap | None = None, **options: Any) -> SyncPlan:
        forms = {path: (leaf.shape, leaf.dtype.name) for path, leaf in self.source.items()}
        if mapping is not None:
            forms = {path: (target.shape, target.dtype) for path, target in mapping.targets.items()}
        places = {path: Placed(*form, layout_of(self.where[path], form[0])) for path, form in forms.items()}
        held = {path: placed(leaf) for path, leaf in self.source.items()}
        return make_plan(held, renumbered(places, self.numbers), mapping, **options)

    def send(self, version: int, plan: SyncPlan, source: dict[str, jax.Array] | None = None) -> None:
        devices = {device.id: device for device in jax.devices()}
        self.sender.send(version, plan, self.source if source is None else source, devices, Deadline.after(60))

    def receive(self, version: int, plan: SyncPlan, seconds: float = 60.0, ticket: Any = None) -> Staged:
        self.receiver.on_round = self.sender.arrived
        self.receiver.redeem(version, self.sender.ticket(version) if ticket is None else ticket)
        return self.receiver.receive(version, plan, self.where, self.numbers, Deadline.after(seconds))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Callable[..., Ends]]:
    segments = [SharedMemoryTransport(f"test_{side}") for side in ("sender", "receiver")]
    root = tmp_path / "weights"

    def make(name: str, where: str = "halves, twice") -> Ends:
        sender, receiver = {
            "transfer": lambda: (TransferTransport(), TransferTransport()),
            "files": lambda: (FilesTransport(root, max_file_bytes=800), FilesTransport(root)),
            "shared-memory": lambda: segments,
        }[name]()
        return Ends(sender, receiver, noise(SOURCE(), 1), DESTINATIONS[where](), root)

    yield make
    for segment in segments:
        segment.close()


def assert_same(staged: Staged, source: dict[str, Any], where: dict[str, NamedSharding]) -> None:
    assert list(staged.tree) == list(source)
    for path, leaf in staged.tree.items():
        assert leaf.sharding == where[path]
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(source[path])[shard.index])


# ---------------------------------------------------------------- what arrives is what was sent, over the planned links


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("where", DESTINATIONS)
@pytest.mark.parametrize("staging", [1 << 20, 100])
def test_what_arrives_is_what_was_sent_and_takes_the_planned_bytes(ends, name, where, staging):
    pair = ends(name, where)
    plan = pair.plan(staging_bytes=staging)
    assert (plan.rounds > 2) == (staging == 100)
    pair.send(3, plan)
    staged = pair.receive(3, plan)
    assert_same(staged, pair.source, pair.where)
    assert staged.link_bytes == planned_links(plan)
    pair.sender.release(3, True)
    pair.sender.release(3, True)


def relaying(pair: Ends) -> SyncPlan:
    """One source device, four whole copies wanted: receivers pass on what they get."""
    one = cuts(0, P(), data=1)
    pair.source = {path: jax.device_put(leaf, one[path]) for path, leaf in pair.source.items()}
    plan = pair.plan(staging_bytes=200)
    assert plan.relayed
    return plan


@pytest.mark.parametrize("name", TRANSPORTS)
def test_relays_are_carried_out(ends, name):
    pair = ends(name, "whole, four times")
    plan = relaying(pair)
    pair.send(1, plan)
    staged = pair.receive(1, plan)
    assert_same(staged, pair.source, pair.where)
    assert staged.link_bytes == planned_links(plan)
    assert any(sender >= FIRST for sender, _ in staged.link_bytes)


def foreign_map() -> FormatMap:
    """A transpose with a cast and a padding; a stack; a tied copy: what foreign engines ask for."""
    embed = Target(
        "tok.weight", (12, 20), "bfloat16", (Piece("embed", (1, 0), (Run(0, 0, 12), Run(0, 0, 16))),), filled=True,
        operations=("transpose", "pad 16 -> 20", cast_operation("float32", "bfloat16")),
    )  # fmt: skip
    tied = Target("head.weight", embed.shape, embed.dtype, embed.pieces, True, embed.operations)
    rows = Run(0, 0, 16)
    stacked = Target(
        "stack", (2, 16, 12), "float32",
        tuple(Piece(s, (None, 0, 1), (Run(0, at, 1), rows, Run(0, 0, 12))) for at, s in enumerate(("w", "embed"))),
        operations=("stack",),
    )  # fmt: skip
    other = [whole(path, SHAPES[path], "float32") for path in ("norm", "scale")]
    return FormatMap("foreign", {t.path: t for t in (embed, tied, stacked, *other)}, {}, {})


@pytest.mark.parametrize("name", TRANSPORTS)
def test_formats_are_those_of_the_map(ends, name):
    pair = ends(name)
    mapping = foreign_map()
    mesh = next(iter(pair.where.values())).mesh
    specs = {"tok.weight": P("tensor"), "head.weight": P(None, "data"), "stack": P(None, "tensor", None)}
    pair.where = {path: NamedSharding(mesh, specs.get(path, P())) for path in mapping.targets}
    plan = pair.plan(mapping)
    pair.send(1, plan)
    staged = pair.receive(1, plan)
    host = {path: np.asarray(leaf) for path, leaf in pair.source.items()}
    assert_same(staged, {path: materialise(target, host) for path, target in mapping.targets.items()}, pair.where)
    assert staged.link_bytes == planned_links(plan)


@pytest.mark.parametrize("name", ["files", "shared-memory"])
def test_what_was_left_does_not_depend_on_the_source_nor_what_was_read_on_what_was_left(ends, name):
    pair = ends(name)
    plan, before = pair.plan(), {path: np.array(leaf) for path, leaf in pair.source.items()}
    pair.send(1, plan)
    for leaf in pair.source.values():
        leaf.delete()
    staged = pair.receive(1, plan)
    pair.sender.release(1, True)
    shutil.rmtree(pair.root, ignore_errors=True)
    assert_same(staged, before, pair.where)


# ---------------------------------------------------------------- publishing: noise first, every call fails once


@dataclass
class Cluster:
    """A trainer and a sampler that talk over loopback."""

    pair: Ends
    replica: LocalReplica
    remote: RemoteReplica
    sync: WeightSync

    def serves(self, source: dict[str, jax.Array]) -> bool:
        installed = self.replica.installed
        return all(np.asarray(installed[path]).tobytes() == np.asarray(leaf).tobytes() for path, leaf in source.items())


@pytest.fixture
def cluster(ends) -> Iterator[Callable[..., Cluster]]:
    opened: list[ReplicaServer | RemoteReplica] = []

    def make(
        name: str,
        sender: Callable[[Any], Any] = lambda it: it,
        receiver: Callable[[Any], Any] = lambda it: it,
        where: str = "halves, twice",
        **options: Any,
    ) -> Cluster:
        pair = ends(name, where)
        pair.sender, pair.receiver = sender(pair.sender), receiver(pair.receiver)
        replica = LocalReplica("rollout", noise(pair.where, 99), pair.where, pair.receiver, numbers=pair.numbers)
        server = ReplicaServer(replica, pair.receiver, pair.numbers, "127.0.0.1:0", TOKEN).start()
        remote = RemoteReplica("rollout", server.address, TOKEN, pair.sender)
        opened.extend([remote, server])
        sync = WeightSync(LEAVES, [remote.route()], base={}, staging_bytes=200, **options)
        return Cluster(pair, replica, remote, sync)

    yield make
    for end in opened:
        end.close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_noise_becomes_the_trainers_weights_and_stays_them(cluster, name):
    there = cluster(name)
    assert there.remote.active is None and not there.serves(there.pair.source)
    receipt = there.sync.push(1, there.pair.source)
    assert there.serves(there.pair.source) and there.remote.active == receipt.policy
    assert receipt.bytes_moved == receipt.bytes_planned > 0 and receipt.transport == name
    if name == "files":
        manifest = json.loads((there.pair.root / "v000001" / "manifest.json").read_text())
        assert (manifest["version"], manifest["policy_digest"]) == (1, receipt.digest)
    before = {path: np.array(leaf) for path, leaf in there.replica.installed.items()}
    again = there.sync.push(2, there.pair.source)
    assert again.digest == receipt.digest and there.remote.active == again.policy
    for path, leaf in there.replica.installed.items():
        np.testing.assert_array_equal(leaf, before[path])


class Faulty:
    """A transport with one fault: the first call of a method runs `instead` of it."""

    def __init__(self, inner: Any, method: str, instead: Callable[..., Any]) -> None:
        self._inner, self._method, self._instead = inner, method, instead

    def __getattr__(self, name: str) -> Any:
        if name == self._method and self._instead is not None:
            instead, self._instead = self._instead, None
            return lambda *args: instead(self._inner, *args)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "on_round":
            self._inner.on_round = value
        else:
            object.__setattr__(self, name, value)


def breaks(inner: Any, *args: Any) -> Any:
    raise OSError("the network is down")


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("call", ["send", "ticket", "redeem", "receive"])
def test_every_call_that_fails_once_stops_the_sync_and_the_next_one_is_whole(cluster, name, call):
    side = "sender" if call in ("send", "ticket") else "receiver"
    calls = []

    def wrap(inner: Any) -> Any:
        def second_time_breaks(inner: Any, *args: Any) -> Any:
            calls.append(call)
            return breaks(inner)

        return Faulty(inner, call, second_time_breaks)

    there = cluster(name, **{side: wrap})
    with pytest.raises((SyncError, OSError), match="the network is down"):
        there.sync.push(1, there.pair.source)
    assert calls == [call] and there.remote.active is None and not there.serves(there.pair.source)
    there.sync.reset()
    receipt = there.sync.push(1, there.pair.source)
    assert there.remote.active == receipt.policy and there.serves(there.pair.source)


# ---------------------------------------------------------------- faults: detected, never served


def flipped(leaf: jax.Array, at: int = 5) -> jax.Array:
    """The same array with one bit of one byte flipped."""
    data = bytearray(np.asarray(leaf).tobytes())
    data[at] ^= 1
    return jax.device_put(np.frombuffer(bytes(data), leaf.dtype).reshape(leaf.shape), leaf.sharding)


def send_flipped(inner: Any, version: int, plan: SyncPlan, source: Any, *rest: Any) -> Any:
    return inner.send(version, plan, {**source, "w": flipped(source["w"])}, *rest)


def send_wrong_tie(inner: Any, version: int, plan: SyncPlan, source: Any, *rest: Any) -> Any:
    return inner.send(version, plan, {**source, "embed": source["w"]}, *rest)


def refused(there: Cluster, old: dict[str, jax.Array], new: dict[str, jax.Array], match: str) -> None:
    """Version 2 is refused with the message, version 1 goes on being served, and the next push mends it."""
    served = there.remote.active
    with pytest.raises(SyncError, match=match):
        there.sync.push(2, new)
    assert there.remote.active == served and there.serves(old)
    there.sync.reset()
    assert there.sync.push(2, new).policy == there.remote.active and there.serves(new)


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("instead", [send_flipped, send_wrong_tie])
def test_content_that_is_not_the_senders_is_refused(cluster, name, instead):
    faults: list[Faulty] = []

    def armed(inner: Any) -> Any:
        faults.append(Faulty(inner, "send", lambda inner, *args: inner.send(*args)))
        return faults[0]

    there = cluster(name, sender=armed)
    old = there.pair.source
    there.sync.push(1, old)
    faults[0]._instead = instead
    refused(there, old, noise(SOURCE(), 2), "what arrived at rollout is not what actor holds")


class Offers(TransferTransport):
    """A sender whose offers of one version go wrong: `fault` gets the list of (number, link, arrays) of a round."""

    fault: Callable[[list], list] | None = None

    def _offer_round(self, box: Any) -> None:
        kept: list = []
        offer, self._offer = self._offer, lambda *args: kept.append(args)  # type: ignore[method-assign]
        try:
            super()._offer_round(box)
        finally:
            self._offer = offer  # type: ignore[method-assign]
        for args in kept if self.fault is None else self.fault(kept):
            offer(*args)


def dropped(offers: list) -> list:
    return offers[1:]


def alike(offers: list) -> list[int]:
    """Which of the offers have boxes of the same forms as the first that has a twin: these can be taken for each
    other."""
    forms = [[(array.shape, array.dtype) for array in args[-1]] for args in offers]
    return next(([i for i, f in enumerate(forms) if f == form] for form in forms if forms.count(form) > 1), [])


SWAPPED: list[int] = []  # how many offers were exchanged, per round


def exchanged(offers: list, order: Callable[[list[int]], list[int]]) -> list:
    which = alike(offers)
    SWAPPED.append(len(which))
    made = list(offers)
    for to, source in zip(which, order(which), strict=True):
        made[to] = (*offers[to][:-1], offers[source][-1])
    return made


def repeated(offers: list) -> list:
    """One bucket in the place of all that have its shapes."""
    return exchanged(offers, lambda which: [which[0]] * len(which) if which else [])


def reordered(offers: list) -> list:
    """Buckets of equal shapes in each other's places."""
    return exchanged(offers, lambda which: which[1:] + which[:1])


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (dropped, r"the receiver waited .* for the sender at .*round 1 of .* boxes had not arrived, version 2"),
        # Of equal shapes, so that nothing but the digests can tell.
        (repeated, "what arrived at rollout is not what actor holds"),
        (reordered, "what arrived at rollout is not what actor holds"),
    ],
)
def test_buckets_dropped_repeated_or_reordered_are_refused(cluster, fault, match):
    # One copy of everything: else the copies would differ, which is found before their digests are compared.
    there = cluster("transfer", sender=lambda _: Offers(), where="one device", deadline_s=20.0)
    old = there.pair.source
    there.sync.push(1, old)
    there.pair.sender.fault = fault
    there.sync._deadline_s = 2.0 if fault is dropped else 20.0
    SWAPPED.clear()
    new = noise(SOURCE(), 2)
    with pytest.raises(SyncError, match=match):
        there.sync.push(2, new)
    assert there.serves(old) and (fault is dropped or max(SWAPPED) > 1)
    there.pair.sender.fault = None
    there.sync._deadline_s = 20.0
    there.sync.reset()
    assert there.sync.push(2, new).policy == there.remote.active and there.serves(new)


def damage(name: str, what: str) -> Callable[..., Any]:
    """Instead of `ticket`: do something to what was just sent."""

    def files(inner: FilesTransport, version: int) -> None:
        folder = inner.root / f"v{version:06d}"
        data = sorted(folder.glob("*.safetensors"))
        if what == "a flipped byte":
            text = bytearray(data[-1].read_bytes())
            text[-3] ^= 16
            data[-1].write_bytes(text)
        elif what == "a missing part":
            data[0].unlink()
        elif what == "parts swapped":
            same = [path for path in data if path.stat().st_size == data[0].stat().st_size][:2]
            assert len(same) == 2
            a, b = (path.read_bytes() for path in same)
            same[0].write_bytes(b)
            same[1].write_bytes(a)
        else:
            shutil.rmtree(folder)
            shutil.copytree(inner.root / f"v{version - 1:06d}", folder)

    def segment(inner: SharedMemoryTransport, version: int) -> None:
        path = Path(inner.ticket(version)["segment"])
        with Segment(path) as opened:
            leaves = opened.manifest["leaves"]
        text = bytearray(path.read_bytes())
        if what == "a flipped byte":
            text[leaves["w"]["offset"] + 7] ^= 16
        elif what == "a missing part":
            del text[-100:]
        elif what == "parts swapped":
            (a, b), size = (leaves[leaf]["offset"] for leaf in ("w", "embed")), leaves["w"]["bytes"]
            text[a : a + size], text[b : b + size] = text[b : b + size], text[a : a + size]
        else:
            old = [owned for owned in inner._released if f"-v{version - 1:06d}-" in owned.path.name]
            text = bytearray(old[0].path.read_bytes())
        path.write_bytes(text)

    def instead(inner: Any, version: int) -> Any:
        ticket = inner.ticket(version)
        (files if name == "files" else segment)(inner, version)
        return ticket

    return instead


@pytest.mark.parametrize("name", ["files", "shared-memory"])
@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("a flipped byte", "w was altered, in 1 of 1 blocks|scale was altered"),
        ("a missing part", "has no bytes, the manifest says|torn"),
        ("parts swapped", "was altered, in 1 of 1 blocks"),
        ("an old version", "holds version 1 for plan .* expected version 2"),
    ],
)
def test_what_was_damaged_after_it_was_written_is_refused(cluster, name, what, match):
    faults: list[Faulty] = []

    def armed(inner: Any) -> Any:
        if isinstance(inner, SharedMemoryTransport):
            inner._keep = 1
        faults.append(Faulty(inner, "ticket", lambda inner, version: inner.ticket(version)))
        return faults[0]

    there = cluster(name, sender=armed)
    old = there.pair.source
    there.sync.push(1, old)
    faults[0]._instead = damage(name, what)
    refused(there, old, noise(SOURCE(), 2), match)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_ticket_of_another_version_gets_nothing(ends, name):
    pair = ends(name)
    plan = pair.plan()
    pair.send(1, plan)
    pair.send(2, plan, noise(SOURCE(), 2))
    ticket = pair.sender.ticket(1)
    pair.sender.release(1, True)
    with pytest.raises(SyncError):
        pair.receive(2, plan, 1.0, ticket)
    assert_same(pair.receive(2, plan), noise(SOURCE(), 2), pair.where)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_plan_of_other_layouts_is_refused_on_both_sides(ends, name):
    pair = ends(name)
    plan = pair.plan()
    moved = {path: jax.device_put(leaf, cuts(0, P(), data=1)[path]) for path, leaf in pair.source.items()}
    with pytest.raises(SyncError, match=r"embed float32\[16, 12\] .*|embed is float32.* but was planned as"):
        pair.send(1, plan, moved)
    pair.send(1, plan)
    pair.where = DESTINATIONS["whole, four times"]()
    with pytest.raises(SyncError, match=r"is wanted as .* but was planned as"):
        pair.receive(1, plan)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_two_sides_that_share_device_numbers_are_refused(ends, name):
    pair = ends(name)
    pair.where = SOURCE()
    held = {path: placed(leaf) for path, leaf in pair.source.items()}
    plan = make_plan(held, held)
    pair.send(1, plan)
    pair.receiver.redeem(1, pair.sender.ticket(1))
    with pytest.raises(SyncError, match="number the two sides' devices apart"):
        numbers = {device.id: device for device in jax.devices()}
        pair.receiver.receive(1, plan, pair.where, numbers, Deadline.after(5))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_without_a_ticket_or_with_a_bad_one_nothing_is_waited_for(ends, name):
    pair = ends(name)
    plan = pair.plan()
    with pytest.raises(SyncError, match="was not sent over"):
        pair.sender.ticket(1)
    for bad in ({}, {"nonsense": 1}):
        with pytest.raises(SyncError, match="a ticket for transport"):
            pair.receiver.redeem(1, bad)
    with pytest.raises(SyncError, match=r"ticket|the receiver waited 0\.\d s for the sender's files"):
        pair.receiver.receive(1, plan, pair.where, pair.numbers, Deadline.after(0.2))


def test_a_slow_sender_meets_the_receivers_deadline(ends):
    """Rounds whose arrival nobody reports are not followed by others."""
    pair = ends("transfer")
    plan = pair.plan(staging_bytes=200)
    pair.send(1, plan)
    pair.receiver.redeem(1, pair.sender.ticket(1))
    match = r"the receiver waited 0\.\d s for the sender at 127.0.0.1:\d+ \(round 3 of \d+: .*version 1\)"
    with pytest.raises(SyncError, match=match):
        pair.receiver.receive(1, plan, pair.where, pair.numbers, Deadline.after(0.5))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_sender_that_is_not_there_is_not_waited_for_beyond_the_deadline(ends, address):
    pair = ends("transfer")
    plan = pair.plan()
    pair.send(1, plan)
    ticket = {**pair.sender.ticket(1), "address": address}
    with pytest.raises(SyncError, match=r"the receiver waited|could not be pulled from nonsense"):
        pair.receive(1, plan, 0.3, ticket)


def test_deltas_are_published_and_a_sampler_that_lost_its_base_reads_it_again(cluster):
    """A restarted sampler has nothing that a delta could start from but the folder."""
    ends: list[DeltaFilesTransport] = []

    def with_deltas(inner: FilesTransport) -> DeltaFilesTransport:
        ends.append(DeltaFilesTransport(inner.root))
        return ends[-1]

    there = cluster("files", sender=with_deltas, receiver=with_deltas)
    weights = there.pair.source
    for version in (1, 2, 3):
        there.sync.push(version, weights)
        assert there.serves(weights)
        manifest = json.loads((there.pair.root / f"v{version:06d}" / "manifest.json").read_text())
        assert manifest["kind"] == ("full" if version == 1 else "delta")
        weights = {**weights, "w": weights["w"].at[3, version].add(1.0)}
    ends[1]._staged = None
    receipt = there.sync.push(4, weights)
    assert receipt.stored["rollout"]["kind"] == "delta" and there.serves(
        weights
    )  # from the last whole one in the store
    ends[1]._staged, weights = None, {**weights, "w": weights["w"].at[3, 9].add(1.0)}
    shutil.rmtree(there.pair.root / "v000003")
    with pytest.raises(SyncError, match=r"is a delta from v3:\w+, which was not staged here last and cannot be read"):
        there.sync.push(5, weights)
    assert there.remote.active.number == 4 and not (there.pair.root / "v000005").exists()
    there.sync.reset()
    receipt = there.sync.push(5, weights)
    assert there.serves(weights) and there.remote.active.number == 5
    assert receipt.stored["rollout"]["why"] == "full: version 5 was sent and not published"


@pytest.mark.parametrize("kind", [FilesTransport, DeltaFilesTransport])
def test_a_store_offers_what_was_published_and_keeps_what_is_served(cluster, kind):
    """keep=1: a version that is refused neither stays nor costs the one that is being served."""
    there = cluster("files", sender=lambda it: kind(it.root, keep=1), receiver=lambda it: kind(it.root))
    there.sync.push(1, there.pair.source)
    new = noise(SOURCE(), 2)
    stage, there.replica.stage = there.replica.stage, lambda *_: (_ for _ in ()).throw(SyncError("no"))
    refused_ones = [path.name for path in there.pair.root.iterdir()]
    with pytest.raises(SyncError, match="no"):
        there.sync.push(2, new)
    assert [path.name for path in there.pair.root.iterdir()] == refused_ones == ["v000001"]
    there.replica.stage = stage
    there.sync.reset()
    there.sync.push(2, new)
    assert [path.name for path in there.pair.root.iterdir()] == ["v000002"] and there.serves(new)


def test_a_segment_that_was_refused_takes_no_published_ones_place(cluster, tmp_path):
    directory = tmp_path / "memory"
    directory.mkdir()
    there = cluster("shared-memory", sender=lambda _: SharedMemoryTransport("kept", directory=directory, keep=1))
    there.sync.push(1, there.pair.source)
    (served,) = directory.iterdir()
    there.replica.stage = lambda *_: (_ for _ in ()).throw(SyncError("no"))
    with pytest.raises(SyncError, match="no"):
        there.sync.push(2, noise(SOURCE(), 2))
    assert list(directory.iterdir()) == [served]
    with Segment(served) as opened:
        opened.check()
    there.pair.sender.close()


def test_two_replicas_need_two_transports(ends):
    pair = ends("files")
    remotes = [RemoteReplica(name, "127.0.0.1:1", TOKEN, pair.sender) for name in ("a", "b")]
    mapping = FormatMap("as it is", {path: whole(path, shape, "float32") for path, shape in SHAPES.items()}, {}, {})
    with pytest.raises(SyncError, match=r"'a' and 'b' share one transport of kind 'files'.* a transport of its own"):
        WeightSync(LEAVES, [remote.route(mapping) for remote in remotes], base={})


def test_unchanged_weights_change_nothing_however_many_leaves_go_at_a_time(cluster):
    """Buckets of about one leaf, some, all; over every transport; a forward pass over what is served is the probe."""
    tokens = np.arange(6)

    def logits(tree: dict[str, Any]) -> np.ndarray:
        host = {path: np.asarray(leaf) for path, leaf in tree.items()}
        return (host["embed"][tokens] * host["norm"]) @ host["w"].T + host["scale"]

    for name in TRANSPORTS:
        there, version = cluster(name), 0
        source, rounds = there.pair.source, set()
        greedy, digests = logits(source).argmax(-1).tobytes(), None
        for budget in (100, 800, 1 << 20):
            there.sync._staging_bytes = budget
            there.sync._planned.clear()
            rounds.add(there.pair.plan(staging_bytes=budget).rounds)
            for _ in range(2):
                version += 1
                receipt = there.sync.push(version, source)
                assert receipt.bytes_moved == receipt.bytes_planned > 0
                digests = digests or receipt.leaf_digests
                assert receipt.leaf_digests == digests
                assert logits(there.replica.installed).argmax(-1).tobytes() == greedy
                assert logits(there.replica.installed).tobytes() == logits(source).tobytes()
        assert len(rounds) == 3, rounds
