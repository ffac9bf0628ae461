"""Where the roles run changes nothing but the number of syncs: the rest is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import jax
import numpy as np
import pytest

from lockstep.cluster.programs import SplitWeights
from lockstep.sync.verify import leaf_digests
from lockstep.train.batching import make_micro_batches
from lockstep.train.forward import score
from lockstep.train.loop import Loop
from lockstep.types import Prompt, Trajectory

FSDP2 = "actor = {fsdp = 2}"
TOGETHER = FSDP2
APART = {
    "each by itself": f"{FSDP2}, rollout = {{fsdp = 2}}, reference = {{tensor = 2}}",
    "all eight devices": f"{FSDP2}, rollout = {{data = 2, tensor = 2}}, reference = {{fsdp = 2}}",
    "reference with the rollout": f'{FSDP2}, rollout = {{data = 2}}, reference = "rollout"',
}
# Every placement compiles programs of its own: the quick tests take steps on one of two meshes.
QUICK = "reference with the rollout"
PLACES = [pytest.param(name, marks=[pytest.mark.slow] * (name != QUICK)) for name in APART]
FULL = ("--lora=none", "--optim.lr=0.002")
STEPS = 3


def overrides(cluster: str, more: Sequence[str] = ()) -> list[str]:
    # Parts as some placement needs them: their number is the one thing about a placement that bits depend on.
    fixed = [f"--run.steps={STEPS}", "--run.checkpoint_every=0", "--numerics.tensor_parts=2"]
    return [f"--cluster={{{cluster}}}", *fixed, *more]


class Placed:
    """A run of three steps that is still open, under one placement."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.blank = dict(loop.cluster.replica.installed)
        loop.start()
        for _ in range(STEPS):
            loop.step()

    @property
    def params(self) -> dict[str, jax.Array]:
        return self.loop.cluster.trainer.params

    def logprobs(self, batch: list[Trajectory], params) -> list[np.ndarray | None]:
        """The trainer's log-probabilities of a batch under any weights."""
        cluster = self.loop.cluster
        micro = make_micro_batches(batch, np.zeros(len(batch)), cluster.sampling.temperature, cluster.geometry)
        weights = SplitWeights.of(params, cluster.spec.num_layers)
        found: list[np.ndarray | None] = [None] * len(batch)
        for mb, flat in zip(micro, score(cluster.trainer.programs, weights, micro), strict=True):
            mb.scatter(flat, found)
        return found

    def sample(self, temperature: float | None = None) -> tuple[list[Prompt], list[Trajectory]]:
        """The next prompts' completions under what is installed."""
        cluster = self.loop.cluster
        prompts = cluster.task.prompts(self.loop.cursor, 3)
        seeds = {p.id: [7, 8, 9, 10] for p in prompts}
        params = cluster.sampling if temperature is None else replace(cluster.sampling, temperature=temperature)
        return prompts, cluster.engine.generate(prompts, seeds, params)

    def publish(self, trainable):
        """A push and an install, as the loop does them."""
        cluster = self.loop.cluster
        version = cluster.engine.version.number + 1
        return cluster.sync.push(version, trainable)


@pytest.fixture(scope="module")
def place(kit, opened, tmp_path_factory):
    """(cluster table, more overrides) -> Placed, made once each."""
    made: dict[tuple[str, tuple[str, ...]], Placed] = {}
    with ExitStack() as stack:

        def get(cluster: str, more: tuple[str, ...] = ()) -> Placed:
            if (cluster, more) not in made:
                config = kit.config(tmp_path_factory.mktemp("placed"), *overrides(cluster, more))
                made[cluster, more] = Placed(stack.enter_context(opened(config)))
            return made[cluster, more]

        yield get


@pytest.fixture(scope="module", params=["together", *PLACES])
def placed(request, place) -> Placed:
    return place(TOGETHER if request.param == "together" else APART[request.param])


def bits(arrays: list[np.ndarray | None]) -> list[bytes]:
    assert all(a is not None and a.dtype == np.float32 for a in arrays)
    return [a.tobytes() for a in arrays]


# ---------------------------------------------------------------- the same run


def assert_same_run(one: Placed, other: Placed, left) -> None:
    a, b = left(one.loop.run_dir), left(other.loop.run_dir)
    # How full a pass is depends on how many devices share it; nothing that is learned does.
    apart = ("syncs", "engine/passes", "engine/padding")
    assert a.metrics(*apart) == b.metrics(*apart)
    assert [r["digest"] for r in a.receipts()] == [r["digest"] for r in b.receipts()]
    assert a.weights(STEPS) == b.weights(STEPS) and a.state(STEPS) == b.state(STEPS)
    ours, theirs = a.trajectories(), b.trajectories()
    assert ours == theirs


@pytest.mark.parametrize(
    "cluster",
    [pytest.param(c, id=name, marks=[pytest.mark.slow] * (name != QUICK)) for name, c in APART.items()],
)
def test_the_placement_does_not_show(place, left, cluster: str) -> None:
    assert_same_run(place(TOGETHER), place(cluster), left)


@pytest.mark.slow
def test_the_placement_does_not_show_when_everything_trains(place, left) -> None:
    together, apart = place(TOGETHER, FULL), place(APART["each by itself"], FULL)
    assert_same_run(together, apart, left)
    metrics = left(together.loop.run_dir).metrics()
    assert all(m["grad_norm"] > 0 and m["mismatch/unequal_tokens"] == 0 for m in metrics)
    # The reference is the model as it was given, not the weights that train.
    assert metrics[0]["kl/k3"] == 0 and metrics[-1]["kl/k3"] > 0


@pytest.mark.parametrize(
    "trains",
    [pytest.param((), marks=pytest.mark.slow), pytest.param(FULL, marks=pytest.mark.slow)],
    ids=["an adapter", "everything"],
)
def test_a_sampler_in_bfloat16_is_the_same_sampler(place, left, trains) -> None:
    """On a mesh of its own it holds what it computes with: half the bytes, the same bits in every record."""
    more = (*trains, "--model.dtype=bfloat16")
    together, apart = place(TOGETHER, more), place(APART["each by itself"], more)
    assert_same_run(together, apart, left)
    metrics = left(apart.loop.run_dir).metrics()
    assert all(m["grad_norm"] > 0 and m["mismatch/unequal_tokens"] == 0 for m in metrics)
    installed, trained = apart.loop.cluster.replica.installed, apart.loop.cluster.trainer.trainable
    assert {str(leaf.dtype) for leaf in installed.values()} == {"bfloat16"}
    for path, leaf in installed.items():
        assert np.asarray(leaf).tobytes() == np.asarray(trained[path]).astype(leaf.dtype).tobytes()
    for r in left(apart.loop.run_dir).receipts():
        held = sum(shard.data.nbytes for leaf in installed.values() for shard in leaf.addressable_shards)
        assert r["bytes_crossing"] == r["bytes_planned"] == r["bytes_moved"] == held and r["probed"] == 2


@pytest.mark.parametrize("name", PLACES)
def test_only_the_syncs_differ(place, left, name: str) -> None:
    assert [m["syncs"] for m in left(place(TOGETHER).loop.run_dir).metrics()] == [0, 0, 0]
    records = left(place(APART[name]).loop.run_dir).metrics()
    assert [m["syncs"] for m in records] == [2, 3, 4]  # the first version crossed before step 1
    assert [m["policy_version"] for m in records] == [0, 1, 2]


@pytest.mark.parametrize("name", PLACES)
def test_receipts_say_what_crossed(place, left, name: str) -> None:
    placed = place(APART[name])
    receipts = left(placed.loop.run_dir).receipts()
    assert [(r["step"], r["version"], r["syncs"]) for r in receipts] == [(n, n, n + 1) for n in range(STEPS + 1)]
    shards = [s for leaf in placed.loop.cluster.replica.installed.values() for s in leaf.addressable_shards]
    assert len({s.device for s in shards}) == (4 if name == "all eight devices" else 2)
    copies = 2 if "data = 2" in APART[name].split("rollout")[1] else 1  # fsdp and tensor cut, data keeps copies
    for r in receipts:
        assert not r["same_buffers"] and r["bytes_moved"] == r["bytes_planned"] == r["bytes_crossing"]
        assert r["bytes_moved"] == sum(s.data.nbytes for s in shards)
        # What no axis can cut is kept once by each device.
        assert copies <= r["bytes_moved"] / r["bytes_selected"] <= len({s.device for s in shards})


@pytest.mark.slow
def test_roles_are_where_the_dial_says(place, kit, opened, tmp_path) -> None:
    with opened(kit.config(tmp_path, *overrides(APART["each by itself"]))) as loop:
        _each_by_itself(loop.cluster)
    with opened(kit.config(tmp_path, *overrides(APART["reference with the rollout"]))) as loop:
        shared = loop.cluster
        assert shared.reference.weights.layers[0]["q"] is shared.rollout_frozen["layers.0.q"]
    eight = place(APART["all eight devices"]).loop.cluster
    assert {d.id for role in ("actor", "rollout", "reference") for d in eight.dial.mesh(role).devices.flat} == set(
        range(8)
    )
    together = place(TOGETHER).loop.cluster
    assert all(together.replica.installed[p] is a for p, a in together.trainer.trainable.items())


def _each_by_itself(cluster) -> None:
    held = {
        "actor": cluster.trainer.params["layers.2.q.lora_a"],
        "rollout": cluster.replica.installed["layers.2.q.lora_a"],
        "reference": cluster.reference.weights.layers[2]["q"],
    }
    assert {role: sorted(d.id for d in a.sharding.device_set) for role, a in held.items()} == {
        "actor": [0, 1], "rollout": [2, 3], "reference": [4, 5],
    }  # fmt: skip


# ---------------------------------------------------------------- gates


def test_a_blank_destination_gets_the_trainers_digest(place) -> None:
    """Gate 2: before the first publish the trained leaves of a rollout mesh are zeros, then they are the actor's."""
    placed = place(APART[QUICK])
    assert all(not np.asarray(leaf).any() for leaf in placed.blank.values())
    cluster = placed.loop.cluster
    digests = leaf_digests(cluster.trainer.trainable)
    assert leaf_digests(cluster.replica.installed) == digests != leaf_digests(placed.blank)


def test_the_batch_is_scored_under_the_weights_that_sampled_it(placed) -> None:
    """The snapshot gate: after the update, the old policy's log-probabilities are the record, the live ones are not."""
    loop, cluster = placed.loop, placed.loop.cluster
    kept = dict(cluster.trainer.trainable), cluster.trainer.optimizer_state
    _, batch = placed.sample()
    advantages = np.linspace(-1, 1, len(batch))
    micro = make_micro_batches(batch, advantages, cluster.sampling.temperature, cluster.geometry)
    cluster.trainer.step(micro, batch, STEPS)
    recorded = bits([t.logprobs for t in batch])
    assert bits(loop.old_policy_logprobs(batch)) == recorded
    live = bits(placed.logprobs(batch, placed.params))
    assert all(a != b for a, b in zip(live, recorded, strict=True))
    assert loop.snapshot.version == cluster.engine.version
    cluster.trainer.trainable, cluster.trainer.optimizer_state = kept[0], None  # later tests need no optimizer


def test_unchanged_weights_published_again_change_nothing(placed) -> None:
    """Gate 1."""
    cluster = placed.loop.cluster
    _, before = placed.sample(temperature=0)
    digest = cluster.engine.version.digest
    receipt = placed.publish(cluster.trainer.trainable)
    assert receipt.digest == digest and receipt.version == before[0].versions[0] + 1
    _, after = placed.sample(temperature=0)
    for a, b in zip(before, after, strict=True):
        assert a.completion_ids.tobytes() == b.completion_ids.tobytes()
        assert a.logprobs.tobytes() == b.logprobs.tobytes() and b.versions[0] == receipt.version


def test_the_adapter_reaches_the_sampler(placed) -> None:
    """Gate 11: an adapter moved strongly changes what is sampled, and both sides hold the same one."""
    cluster = placed.loop.cluster
    _, before = placed.sample(temperature=0)
    rng = np.random.default_rng(0)
    moved = {
        path: jax.device_put(np.asarray(leaf) + rng.standard_normal(leaf.shape).astype(np.float32), leaf.sharding)
        for path, leaf in cluster.trainer.trainable.items()
    }
    receipt = placed.publish(moved)
    assert leaf_digests(cluster.replica.installed) == leaf_digests(moved) == receipt.leaf_digests
    _, after = placed.sample(temperature=0)
    assert sum(a.completion_ids.tolist() != b.completion_ids.tolist() for a, b in zip(before, after, strict=True)) > 6
    _, batch = placed.sample()
    assert bits(placed.logprobs(batch, {**placed.params, **moved})) == bits([t.logprobs for t in batch])
    placed.publish(cluster.trainer.trainable)
    _, back = placed.sample(temperature=0)
    assert [t.completion_ids.tolist() for t in back] == [t.completion_ids.tolist() for t in before]
