"""A reference that follows the policy: what it holds, where it lies, and that a resume puts it back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import ConfigError, SyncError
from lockstep.train import reference as reference_module
from lockstep.train.dry_run import planned_bytes
from lockstep.train.footprint import bytes_per_role
from lockstep.train.policy import split_leaves

APART = "--cluster={cpu_devices = 8, actor = {fsdp = 2}, rollout = 'actor', reference = {fsdp = 2}}"
FULL = "--lora=none"
AVERAGE = "--algorithm={reference_every = 1, reference_mix = 0.25, kl_coef = 0.1}"


def numbers(tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.items()}


@pytest.mark.parametrize(
    "words",
    [[], pytest.param([APART], marks=pytest.mark.slow), pytest.param([FULL, APART], marks=pytest.mark.slow)],
    ids=["together", "apart", "everything, apart"],
)
def test_a_reference_that_is_the_policy_is_no_distance_away(kit, train, left, tmp_path: Path, words) -> None:
    """Refreshed after every step it has the very weights that sampled: the KL is 0, not nearly 0."""
    config = kit.config(tmp_path, "--run.steps=3", "--algorithm={reference_every = 1}", "--optim.lr=0.01", *words)
    for m in left(train(config)).metrics():
        assert m["kl/k3"] == 0 and m["reference/step"] == m["step"] - 1 and m["mismatch/max_abs"] == 0
        assert m["grad_norm"] > 0


def test_an_average_is_the_formula(kit, opened, tmp_path: Path) -> None:
    with opened(kit.config(tmp_path, "--run.steps=3", AVERAGE)) as loop:
        loop.start()
        reference, trainer = loop.cluster.reference, loop.cluster.trainer
        expected = numbers(trainer.trainable)
        for _ in range(3):
            loop.step()
            policy = numbers(trainer.trainable)
            expected = {p: 0.25 * policy[p].astype(np.float64) + 0.75 * expected[p] for p in policy}
            for path, leaf in numbers(reference.moving).items():
                np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-7)
                expected[path] = leaf
        assert bytes_per_role(loop.cluster)["reference"]["parameters"] == sum(e.nbytes for e in expected.values())


def test_every_third_step(kit, train, left, tmp_path: Path) -> None:
    """Between refreshes it stands still; a run that was stopped in between goes on as if it had not been."""
    words = ["--run.steps=5", "--run.checkpoint_every=4", "--algorithm={reference_every = 3, reference_mix = 0.5}"]
    whole = left(train(kit.config(tmp_path, *words)))
    assert [m["reference/step"] for m in whole.metrics()] == [0, 0, 0, 3, 3]
    stopped = train(kit.config(tmp_path, *words, "--run.steps=4"))
    resumed = left(train(kit.config(tmp_path, *words, f"--run.name={stopped.name}"), resume=stopped))
    assert resumed.state(5) == whole.state(5) and any(p.startswith("reference/") for p in whole.state(5))
    assert [m["kl/k3"] for m in resumed.metrics()] == [m["kl/k3"] for m in whole.metrics()]


@pytest.mark.parametrize(
    "words", [[APART], *(pytest.param(w, marks=pytest.mark.slow) for w in ([], [FULL], [FULL, APART]))]
)
def test_its_bytes_are_planned(kit, opened, tmp_path: Path, words: list[str]) -> None:
    config = kit.config(tmp_path, AVERAGE, *words)
    with opened(config) as loop:
        cluster = loop.cluster
        loop.start()
        cluster.reference.follow(cluster.trainer.trainable, 0.5)
        planned = planned_bytes(config, cluster.dial, cluster.spec, split_leaves(config, cluster.spec))
        assert planned["reference"] == bytes_per_role(cluster)["reference"]


def test_weights_that_arrive_changed_are_not_taken(kit, opened, tmp_path: Path, monkeypatch) -> None:
    with opened(kit.config(tmp_path, AVERAGE, APART)) as loop:
        reference, trainer = loop.cluster.reference, loop.cluster.trainer
        before, digests = numbers(reference.moving), reference_module.leaf_digests
        calls = []

        def damaged(tree):
            calls.append(tree)
            found = digests(tree)
            return found if len(calls) == 1 else found | {next(iter(found)): "0" * 16}

        monkeypatch.setattr(reference_module, "leaf_digests", damaged)
        with pytest.raises(SyncError, match="what arrived at reference is not what actor holds, in 1 of"):
            reference.follow(trainer.trainable, 0.5)
        assert all(np.array_equal(leaf, before[path]) for path, leaf in numbers(reference.moving).items())


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("{reference_every = 2, measure_kl = false}", "`algorithm.reference_every` = 2 has no effect with"),
        ("{reference_mix = 0.5}", "`algorithm.reference_mix` = 0.5 has no effect without"),
        ("{reference_every = 1, reference_mix = 0.0}", "reference_mix"),
        ("{reference_every = 1, reference_mix = 1.5}", "reference_mix"),
        ("{reference_every = -1}", "reference_every"),
    ],
)
def test_what_makes_no_sense_is_refused(kit, tmp_path: Path, algorithm: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kit.config(tmp_path, f"--algorithm={algorithm}")


def test_a_frozen_one_cannot_be_moved(kit, opened, tmp_path: Path) -> None:
    with opened(kit.config(tmp_path)) as loop:
        assert loop.cluster.reference.moving is None
        with pytest.raises(AssertionError, match="this reference is frozen"):
            loop.cluster.reference.follow(loop.cluster.trainer.trainable, 1.0)
