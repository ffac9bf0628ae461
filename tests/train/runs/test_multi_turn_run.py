"""Whole runs with an environment: the record is the trainer's, observations are in nothing, failures are failures."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.audit.oracle import differences
from lockstep.config import load_config
from lockstep.errors import RewardError

MODULE = '''
"""Environments that answer by what the policy wrote alone, so that a run can be done again."""

import asyncio

from lockstep.envs.multi_turn import Environment, Observation, Step


class Echo(Environment):
    """Three turns: each is worth its share of letters; what it reads then depends on what it wrote."""

    def __init__(self, mode, row, seed):
        self.mode, self.row, self.seed = mode, row, seed

    async def start(self):
        return "go" if self.mode == "first" else None

    async def step(self, turn):
        reward = (sum(c.isalpha() for c in turn.text) + turn.number) / 10
        if self.mode == "once":
            return Step(reward=reward, done=True)
        bad = turn.number == 1 and self.seed % 3 == 0
        if bad and self.mode == "raises":
            raise ValueError("no idea")
        if bad and self.mode == "hangs":
            await asyncio.sleep(3600)
        if bad and self.mode == "empty":
            return Step("", reward)
        if turn.number == 2:
            return Step(reward=reward, done=True)
        return Step(Observation(f"<{self.row['number']}>"[: 1 + len(turn.ids) % 2]), reward)


def make(mode):
    return lambda row, seed: Echo(mode, row, seed)


echo, once, first, raises, hangs, empty = map(make, ("echo", "once", "first", "raises", "hangs", "empty"))
'''
PLAY = ("--environment.max_total_tokens=10", "--rollout.max_new_tokens=3")


@pytest.fixture(scope="module")
def play(kit: Any, train: Callable[..., Path]) -> Callable[..., Path]:
    """play(folder for runs, name of an environment, overrides): a run."""
    (kit.folder / "run_environments.py").write_text(MODULE)

    def one(runs: Path, name: str, *more: str) -> Path:
        words = (f"--environment.function=run_environments:{name}", *PLAY, "--run.steps=2", *more)
        return train(kit.config(runs, *words))

    return one


@pytest.fixture(scope="module")
def done(play: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory.mktemp("runs"), "echo", "--algorithm.name=reinforce_pp", "--run.checkpoint_every=1")


@pytest.mark.slow
def test_a_critic_values_the_sampled_tokens_of_every_turn(play: Any, left: Any, tmp_path: Path) -> None:
    """PPO on rewards per turn, with a KL in the rewards and a penalty for length: every number follows."""
    words = ["--algorithm={name = 'ppo', kl_coef = 0.1, overlong_tokens = 4, overlong_penalty = 0.5}"]
    words += ["--critic={head_std = 0.5, lora = {rank = 2, last_layers = 1}, optim = {lr = 0.01}}", "--train.epochs=2"]
    run_dir = play(tmp_path, "echo", *words)
    run, config = left(run_dir), load_config(run_dir / "recipe.toml")
    for metrics in run.metrics():
        step = run.step(metrics["step"])
        assert metrics["mismatch/max_abs"] == 0 and metrics["turns/max"] > 1 and metrics["updates"] == 2
        assert differences(config, step, metrics) == []
        for t in step.trajectories:
            assert t.values is not None and len(t.values) == t.num_sampled
        assert any(t.sampled is not None and not t.sampled.all() for t in step.trajectories)


def test_a_run_of_several_turns_is_exact_and_its_numbers_follow(done: Path, left: Any) -> None:
    run = left(done)
    config = load_config(done / "recipe.toml")
    for number, metrics in enumerate(run.metrics(), 1):
        step = run.step(number)
        assert metrics["mismatch/unequal_tokens"] == 0 and metrics["mismatch/max_abs"] == 0
        assert metrics["turns/max"] > 1
        assert differences(config, step, metrics) == []
        for t, mine in zip(step.trajectories, step.extra["trainer_logprobs"], strict=True):
            assert t.logprobs.tobytes() == mine.tobytes()
            assert t.reward == pytest.approx(2 * t.rewards["run_rewards:even"] + t.turn_rewards.sum())
            assert len(t.turn_ends) == len(t.turn_rewards) and t.turn_ends[-1] == t.num_sampled - 1
        some = [t for t in step.trajectories if t.sampled is not None and not t.sampled.all()]
        assert some and metrics["tokens/generated"] == sum(t.sampled_ids.size for t in step.trajectories)
        assert sum(len(t.completion_ids) - t.num_sampled for t in some) > 0


@pytest.mark.slow
def test_it_resumes_bit_for_bit(done: Path, train: Any, left: Any, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    shutil.rmtree(copy / "checkpoints" / "2")
    again = left(train(load_config(copy / "recipe.toml"), resume=copy))
    assert again.trajectories() == left(done).trajectories()
    assert again.weights(2) == left(done).weights(2)


@pytest.mark.slow
def test_an_environment_of_one_turn_samples_what_there_would_be_without_one(
    play: Any, kit: Any, train: Any, left: Any, tmp_path: Path
) -> None:
    """And earns what it says on top: nothing here, so the two runs are one, to the last bit of the weights."""
    zero = play(tmp_path / "with", "once", "--environment.max_total_tokens=3", "--run.steps=1")
    without = train(kit.config(tmp_path / "without", *PLAY[1:], "--run.steps=1"))
    pairs = list(zip(left(zero).step(1).trajectories, left(without).step(1).trajectories, strict=True))
    for a, b in pairs:
        assert a.sampled is None and a.completion_ids.tobytes() == b.completion_ids.tobytes()
        assert a.logprobs.tobytes() == b.logprobs.tobytes() and (a.seed, a.finish_reason) == (b.seed, b.finish_reason)
        assert (
            a.rewards["run_rewards:even"] == b.rewards["run_rewards:even"]
            and a.reward == b.reward + a.rewards["environment"]
        )


@pytest.mark.slow
def test_what_start_says_comes_before_the_first_turn(play: Any, left: Any, tmp_path: Path) -> None:
    run = left(play(tmp_path, "first", "--run.steps=1"))
    for t in run.step(1).trajectories:
        assert not t.sampled[:2].any()
        assert t.text.startswith("go")
    assert run.metrics()[0]["mismatch/unequal_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("raises", "exception", "step raised ValueError: no idea"),
        ("hangs", "timeout", "step took more than 0.2 s"),
        ("empty", "contract", "an observation is empty"),
    ],
)
def test_what_fails_is_left_out_with_its_reason(
    play: Any, left: Any, tmp_path: Path, name: str, kind: str, words: str
) -> None:
    more = ("--environment.step_deadline_s=0.2", "--run.steps=1")
    run = left(play(tmp_path, name, *more, "--environment.on_error=drop"))
    failed = [t for t in run.step(1).trajectories if t.failed is not None]
    assert failed and all(words in t.failed and math.isnan(t.reward) for t in failed)
    metrics = run.metrics()[0]
    assert metrics[f"failures/environment/{kind}"] == metrics["rewards/failed"] == len(failed)
    extra = run.step(1).extra["advantage"]
    assert all((a is None) == (t.failed is not None) for a, t in zip(extra, run.step(1).trajectories, strict=True))
    if name == "raises":
        with pytest.raises(RewardError, match=r"environment exception: step raised .*on_error = \"drop\""):
            play(tmp_path / "again", name, *more)


@pytest.mark.slow
def test_episodes_go_on_while_the_trainer_trains(play: Any, left: Any, tmp_path: Path) -> None:
    """Turns of one episode may be of two versions; each is held against its own, bit for bit."""
    run = left(play(tmp_path, "echo", "--rollout.staleness=1", "--run.steps=4"))
    for number, metrics in enumerate(run.metrics(), 1):
        assert metrics["mismatch/unequal_tokens"] == 0 and metrics["staleness/max"] <= 1
        assert all((number - 1 - t.versions <= 1).all() for t in run.step(number).trajectories)
