"""Every algorithm in the loop: the record is bitwise, and every number follows from the stored trajectories."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.audit.definitions import k_estimate
from lockstep.audit.oracle import differences
from lockstep.envs.base import Score
from lockstep.errors import RewardError
from lockstep.store import read_step

CRITIC = "--critic={head_std = 0.5, lora = {rank = 2, last_layers = 1}, optim = {lr = 0.01}}"
CASES: dict[str, list[str]] = {
    "dr_grpo": ["--algorithm={name = 'dr_grpo', entropy_coef = 0.01}"],
    "dapo": ["--algorithm={name = 'dapo', overlong_tokens = 3, overlong_penalty = 0.5}"],
    "gspo": ["--algorithm={name = 'gspo', kl_coef = 0.1}"],
    "cispo": ["--algorithm={name = 'cispo', scale_rewards = 'batch'}"],
    "rloo": ["--algorithm={name = 'rloo', kl_coef = 0.1}"],
    "reinforce_pp": ["--algorithm={name = 'reinforce_pp', kl_coef = 0.1, group_baseline = true}"],
    "ppo": ["--algorithm={name = 'ppo', kl_coef = 0.1}", CRITIC],
    "raft": ["--algorithm={name = 'raft', best_of = 2}"],
    "ppo, twice in halves": [
        "--algorithm={name = 'ppo', measure_entropy = true}", CRITIC.replace("{head", "{warmup_steps = 1, head"),
        "--train.epochs=2", "--train.mini_batches=2",
    ],
    "grpo, twice in thirds": ["--train.epochs=2", "--train.mini_batches=3", "--optim.schedule=linear"],
    "grpo, no long ones": ["--algorithm={mask_truncated = true, measure_entropy = true}"],
}  # fmt: skip


# What no trajectory shows: clocks, what the engine and the weights did, what was lost before it was sampled; and of
# several updates in a step what ran under weights in between.
UNSEEN = (
    r"time/|engine/|warmup/|(critic/)?(grad_norm|lr)$|entropy$|syncs$|step$|prompts/skipped$|dynamic/rounds$|failures/"
    r"|dropped/"
)
OF_ONE_UPDATE = r"loss$|ratio$|clip_fraction|critic/"


def unnoticed(config: Any, step: Any, metrics: dict[str, Any]) -> list[str]:
    """Numbers that could be logged wrong without the oracle's seeing it."""
    exempt = UNSEEN if metrics["updates"] == 1 else f"{UNSEEN}|{OF_ONE_UPDATE}"
    if config.algorithm.entropy_coef and config.algorithm.aggregate != "token_mean":
        exempt += "|loss$"  # the entropy of each token is not stored
    names = [name for name, value in metrics.items() if isinstance(value, int | float) and not re.match(exempt, name)]
    assert {"reward", "updates", "groups/total", "mismatch/k1", "loss/denominator"} & set(names)
    return [n for n in names if differences(config, step, metrics | {n: metrics[n] * 1.5 + 1}) == []]


FAST = {"dr_grpo", "reinforce_pp", "raft", "ppo, twice in halves", "grpo, twice in thirds"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES])
def test_every_number_follows_from_the_trajectories(kit, train, left, tmp_path: Path, case: str) -> None:
    config = kit.config(tmp_path, "--run.steps=3", "--run.checkpoint_every=0", *CASES[case])
    run = left(train(config))
    metrics = run.metrics()
    assert len(metrics) == 3
    for m in metrics:
        step = run.step(m["step"])
        assert differences(config, step, m) == [] and unnoticed(config, step, m) == []
        assert m["mismatch/unequal_tokens"] == 0 and m["mismatch/max_abs"] == 0
        if "twice" not in case:
            assert m["ratio"] == 1.0 and m["clip_fraction"] == 0.0 and m["updates"] == 1
            tokens, sequences = m["tokens/trained"], sum(a is not None for a in step.extra["advantage"])
            wanted = {"token_mean": tokens, "sequence_mean": sequences, "constant": sequences * 6}
            assert m["loss/denominator"] == wanted[config.algorithm.aggregate]
    _check(case, config, run, metrics)


def _check(case: str, config: Any, run: Any, metrics: list[dict[str, Any]]) -> None:
    """What is the case's own."""
    first = run.step(1)
    if case.startswith("ppo"):
        assert all(t.values is not None and len(t.values) == len(t.completion_ids) for t in first.trajectories)
        assert all("critic/loss" in m and m["critic/grad_norm"] > 0 for m in metrics)
        assert any(len(set(np.round(a, 6))) > 1 for a in first.extra["token_advantages"] if len(a) > 1)
    if case == "ppo, twice in halves":
        assert [m["updates"] for m in metrics] == [0, 4, 4] and "loss" not in metrics[0]
        assert metrics[1]["ratio"] != 1.0 and metrics[1]["entropy"] > 0
        receipts = run.receipts()
        assert receipts[0]["digest"] == receipts[1]["digest"] != receipts[2]["digest"], "the critic trained alone"
    if case == "grpo, twice in thirds":
        assert [m["updates"] for m in metrics] == [6, 6, 6]
        rates = [m["lr"] for m in metrics]  # of the last update of each step, of 18 in all
        np.testing.assert_allclose(rates, [0.02 * (1 - n / 18) for n in (5, 11, 17)], rtol=1e-5)
    if case == "raft":
        assert sum(a is not None for a in first.extra["advantage"]) == 2 * 3
    if case == "grpo, no long ones":
        used = [t for t, a in zip(first.trajectories, first.extra["advantage"], strict=True) if a is not None]
        assert 0 < len(used) < 12 and all(t.finish_reason == "stop" for t in used)
    if case in ("rloo", "reinforce_pp", "gspo"):
        again = run.step(3)
        kl = [
            k_estimate(config.algorithm.kl_estimator, t.logprobs.astype(float), t.reference_logprobs.astype(float))
            for t in again.trajectories
        ]
        assert np.abs(np.concatenate(kl)).max() > 1e-4, "the KL plays a part"
    if case == "dr_grpo":
        assert all(0 < m["entropy"] < np.log(262) for m in metrics)


def test_groups_that_teach_nothing_are_replaced(kit, train, left, tmp_path: Path) -> None:
    """Prompts go on where the rounds ended; what was dropped is counted, kept in the store, and not trained on."""
    reward = "--reward.functions=[{name = 'run_rewards:odd_rows'}]"
    with_flat = kit.folder / "run_rewards.py"
    assert "def odd_rows" in with_flat.read_text()
    config = kit.config(tmp_path, "--run.steps=2", "--algorithm={dynamic_rounds = 2}", reward)
    run = left(train(config))
    for m in run.metrics():
        step = run.step(m["step"])
        assert differences(config, step, m) == []
        trained = {t.group_id for t, a in zip(step.trajectories, step.extra["advantage"], strict=True) if a is not None}
        rows = {g: int(step.prompts[g][:2]) % 2 for g in {t.group_id for t in step.trajectories}}
        assert all(rows[g] == 1 for g in trained) and len(trained) == 3
        assert m["dynamic/rounds"] >= 2 and m["dynamic/flat_groups"] == sum(odd == 0 for odd in rows.values())
        assert m["groups/zero_variance"] == 0 and m["groups/total"] == 3
        assert len(step.trajectories) == m["dynamic/rounds"] * 12
    first, second = (read_step(run.path / "trajectories", n) for n in (1, 2))
    assert not {t.group_id for t in first.trajectories} & {t.group_id for t in second.trajectories}


def test_a_round_that_failed_as_a_whole_is_one_round(kit, opened, tmp_path: Path, monkeypatch) -> None:
    """The step goes on with the groups of its other rounds; where every round failed, it says so."""
    words = ["--run.steps=2", "--algorithm={dynamic_rounds = 1}", "--reward.on_error=drop"]
    with opened(kit.config(tmp_path, *words)) as loop:
        loop.start()
        reward = loop.cluster.reward
        rounds, score = [], reward.score

        def failing(prompts, completions):
            rounds.append(len(prompts))
            lost = [Score(float("nan"), {}, "it is down")] * len(prompts)
            return lost if len(rounds) != 2 else score(prompts, completions)

        monkeypatch.setattr(reward, "score", failing)
        loop.step()
        assert rounds == [12, 12] and loop.counters.step == 1
        with pytest.raises(RewardError, match="every one of the 24 samples failed to score; the first: it is down"):
            loop.step()


def test_other_sampling_weights_are_corrected_for(kit, train, left, tmp_path: Path) -> None:
    """Fast numerics: the loss's ratio is to the trainer's own log-probabilities, the weights carry the rest."""
    fast = ["--numerics={mode = 'fast'}", "--run.steps=2", "--algorithm={correction = 'token_truncated'}"]
    config = kit.config(tmp_path, *fast)
    run = left(train(config))
    for m in run.metrics():
        assert differences(config, run.step(m["step"]), m) == [] and unnoticed(config, run.step(m["step"]), m) == []
        assert m["ratio"] == 1.0 and m["correction/mean"] == pytest.approx(1, abs=1e-3) and m["correction/capped"] == 0


MINE = '''
import jax.numpy as jnp
from lockstep.algorithms.advantages import per_group
from lockstep.algorithms.base import Algorithm


class Ranked(Algorithm):
    """Advantage by rank within the group, REINFORCE."""

    options = {"spread": 1.0}

    def advantages(self, samples):
        def by_rank(r):
            rank = r.argsort().argsort()
            return self.option("spread") * (rank / (len(r) - 1) - 0.5)

        return per_group(samples, by_rank)

    def objective(self, logp, ratio, tokens):
        return tokens.advantage * logp, jnp.zeros_like(logp, bool)
'''


def test_an_algorithm_of_ones_own(kit, train, left, tmp_path: Path) -> None:
    (tmp_path / "ranked.py").write_text(MINE)
    own = f"--algorithm={{name = 'ranked:Ranked', folder = '{tmp_path}', options = {{spread = 2.0}}}}"
    config = kit.config(tmp_path, "--run.steps=2", own)
    run = left(train(config))
    step = run.step(1)
    assert {round(abs(a), 6) for a in step.extra["advantage"]} <= {1.0, round(1 / 3, 6), 0.0}
    assert all(differences(config, run.step(m["step"]), m) == [] for m in run.metrics())


@pytest.mark.parametrize(
    "words",
    [
        # What would move weights without any advantage: an entropy, a KL (the reference is another policy), a decay.
        [
            "--algorithm={mask_truncated = true, entropy_coef = 0.1, kl_coef = 0.1}",
            "--rollout.stop=[]",
            "--rollout.max_new_tokens=1",
            "--optim.weight_decay=0.1",
            "--optim.lr=0.1",
        ],
        ["--algorithm.name=raft"],
    ],
    ids=["cut", "raft"],
)
def test_a_step_with_nothing_to_train_on_is_a_step(kit, opened, left, tmp_path: Path, words: list[str]) -> None:
    flat = ["--reward.functions=[{name = 'run_rewards:same'}]"] if "raft" in words[0] else []
    config = kit.config(tmp_path, "--run.steps=1", *words, *flat)
    with opened(config) as loop:
        loop.start()
        before = {path: np.asarray(leaf).copy() for path, leaf in loop.cluster.trainer.trainable.items()}
        loop.step()
        after = loop.cluster.trainer.trainable
    run = left(loop.run_dir)
    (m,) = run.metrics()
    assert "raft" in words[0] or {t.finish_reason for t in run.step(1).trajectories} == {"length"}
    assert all(np.array_equal(before[path], np.asarray(after[path])) for path in before)
    assert "no completion is left to train on; nothing is updated" in (loop.run_dir / "log.txt").read_text()
    assert m["updates"] == 0 and "loss" not in m and m["mismatch/unequal_tokens"] == 0
    assert differences(config, run.step(1), m) == [] and unnoticed(config, run.step(1), m) == []
