"""What a user can get wrong: a message that says what, why and what to do, and nothing half done left behind."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import checkpoint
from lockstep.envs.rewards import Reward
from lockstep.errors import (
    ConfigError,
    DataError,
    FingerprintError,
    LockstepError,
    MismatchError,
    ModelError,
    NumericsError,
    RewardError,
    ServiceError,
)
from lockstep.metrics import read_jsonl
from lockstep.models.hf import load_folder, save_folder
from lockstep.models.init import init_params
from lockstep.train.rollouts import consumable
from lockstep.types import PolicyVersion


def reward(kit, *names: str, on_error: str = "fail") -> str:
    functions = ", ".join(f'{{name = "run_rewards:{name}"}}' for name in names)
    return f'--reward={{functions = [{functions}], on_error = "{on_error}", folder = "{kit.folder}"}}'


# ---------------------------------------------------------------- found before anything is written


@pytest.fixture(scope="module")
def broken(kit, tiny_spec, tmp_path_factory) -> Path:
    """Models and data that cannot be used."""
    folder = tmp_path_factory.mktemp("broken")
    model = kit.folder / "model"
    (folder / "empty.jsonl").write_text("\n")
    (folder / "long.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1111111+1="}\n')
    (folder / "column.jsonl").write_text('{"prompts": "1+1="}\n')
    spec, params = load_folder(model, "float32")
    params["layers.1.up"][3, 4] = np.nan
    params["final_norm"][0] = np.inf
    save_folder(folder / "nan", spec, params, tokenizer_files_from=model)
    small = replace(tiny_spec, vocab_size=200)
    save_folder(folder / "small", small, init_params(small, 0), token_ids={"eos_token_id": 1})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder / "small" / name)
    return folder


WRONG = {
    "no such model": (["--model.name=./nowhere"], ModelError, "neither a known model .* nor an existing folder"),
    "no such data": (["--task.path={broken}/gone.jsonl"], DataError, "gone.jsonl does not exist"),
    "empty data": (["--task.path={broken}/empty.jsonl"], DataError, "holds no rows"),
    "another column": (["--task.path={broken}/column.jsonl"], DataError, "no column 'prompt' .*nearest: prompts"),
    "too long": (["--task.path={broken}/long.jsonl"], DataError, "long.jsonl:2: the prompt has 10 tokens, .* is 6"),
    "vocabulary": (["--model.name={broken}/small"], ModelError, "tokenizer has ids up to 258, the embedding has 200"),
    "no such reward": (['--reward.functions=[{name = "nothing"}]'], ConfigError, "no built-in reward 'nothing'"),
    "no such function": (
        ['--reward={functions = [{name = "run_rewards:odd"}], folder = "{kit}"}'], ConfigError, "no function 'odd'",
    ),
    "layers": (["--lora.last_layers=4"], ConfigError, "lora.last_layers = 4, but the model has 3 layers; use 1 to 3"),
    "devices": (
        ["--cluster={actor = {fsdp = 8}, rollout = {data = 2}}"], ConfigError,
        "need 10 devices .actor 8, rollout 2.; 8 available",
    ),
    "positions": (
        ["--rollout.max_new_tokens=507", "--train.micro_batch_rows=600"], ConfigError,
        "task.max_prompt_tokens . rollout.max_new_tokens = 513, but .* was made for 512 positions; lower one",
    ),
    "NaN": (["--model.name={broken}/nan"], ModelError, "2 leaves hold NaN or infinity: layers.1.up, final_norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_recipe_that_does_not_work_leaves_nothing(kit, train, broken, tmp_path, name: str) -> None:
    overrides, error, message = WRONG[name]
    words = [word.replace("{broken}", str(broken)).replace("{kit}", str(kit.folder)) for word in overrides]
    runs = tmp_path / "runs"
    with pytest.raises(error, match=message):
        train(kit.config(runs, *words))
    assert not runs.exists()


def test_a_folder_that_cannot_be_made(kit, train, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run.dir: the run directory .*file/runs/run cannot be made \(Not a dir"):
        train(kit.config(tmp_path / "file" / "runs"))


def test_nothing_is_overwritten(kit, opened, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    (tmp_path / "run-2").touch()
    with opened(kit.config(tmp_path)) as loop:
        assert loop.run_dir == tmp_path / "run-3"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_longer_rows_can_be_skipped_and_are_counted(kit, opened, broken, tmp_path) -> None:
    with opened(kit.config(tmp_path, f"--task.path={broken}/long.jsonl", "--task.too_long=skip")) as loop:
        loop.start()
        assert ", 1 left out" in (loop.run_dir / "log.txt").read_text()


# ---------------------------------------------------------------- rewards that fail


@pytest.mark.parametrize(
    ("name", "on_error", "message"),
    [
        ("raises", "fail", r"'run_rewards:raises' raised ValueError: no idea \(.*run_rewards.py:\d+\) for the sample"),
        (
            "not_a_number",
            "fail",
            "'run_rewards:not_a_number' returned nan, which is not a finite number for the sample",
        ),
        ("one_missing", "fail", "'run_rewards:one_missing' returned 0 values for 1 completions"),
        ("one_missing", "drop", "'run_rewards:one_missing' returned 0 values for 1 completions"),
        ("raises", "drop", "every one of the 12 samples failed to score; the first: .*raises' raised ValueError"),
        ("not_a_number", "drop", "every one of the 12 samples failed to score; the first: .*returned nan"),
    ],
)
def test_a_reward_that_fails_stops_the_run(kit, train, tmp_path, name: str, on_error: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        train(kit.config(tmp_path, reward(kit, name, on_error=on_error)))
    run = tmp_path / "run"
    assert read_jsonl(run / "metrics.jsonl").records == () and checkpoint.latest(run) is None
    assert not (run / "trajectories").exists()
    assert "stopped (no checkpoint yet) by RewardError: " in (run / "log.txt").read_text()


def test_a_run_that_fails_later_says_how_to_go_on(kit, opened, tmp_path) -> None:
    config = kit.config(tmp_path, "--run.checkpoint_every=1")
    with pytest.raises(RewardError, match="hiccup"), opened(config) as loop:
        loop.start()
        loop.step()
        loop.cluster.reward.close()
        loop.cluster.reward = Failing({}, {}, "fail")
        loop.step()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"stopped (lockstep run --resume {tmp_path}/run goes on from step 1) by RewardError: hiccup" in log
    assert [m["step"] for m in read_jsonl(tmp_path / "run" / "metrics.jsonl").records] == [1]


class Failing(Reward):
    def score(self, prompts, completions):
        raise RewardError("hiccup")


def test_a_group_of_which_nothing_is_left_takes_no_part(kit, opened, left, tmp_path) -> None:
    """Question 3 is refused altogether; the other groups of its step are trained on."""
    with opened(kit.config(tmp_path, reward(kit, "picky", on_error="drop"))) as loop:
        loop.start()
        while not any(p.row["number"] == 3 for p in loop.cluster.task.prompts(loop.cursor, 3)):
            loop.step()
        loop.step()
        run, step = left(loop.run_dir), loop.counters.step
    (m,) = [m for m in run.metrics() if m["step"] == step]
    gone = [t for t in run.step(step).trajectories if run.step(step).prompts[t.group_id] == "03+1="]
    assert len(gone) == 4 and all(t.failed is not None for t in gone)
    assert m["groups/total"] == 2 and m["rewards/failed"] >= 4 and m["tokens/trained"] < m["tokens/generated"]
    assert np.isfinite(m["reward"]) and m["mismatch/unequal_tokens"] == 0


# ---------------------------------------------------------------- weights that training destroyed


def test_an_update_that_destroys_the_weights_is_not_published(kit, opened, tmp_path) -> None:
    """Gradient and rate are finite, their product with the weight decay is not."""
    overrides = ("--optim.lr=3e38", "--optim.weight_decay=100.0", "--run.checkpoint_every=1")
    with (
        pytest.raises(NumericsError, match=r"the update made layers.1.\S+.lora_a, .* NaN or infinite .*rate 3e\+38\)"),
        opened(kit.config(tmp_path, *overrides)) as loop,
    ):
        loop.start()
        loop.step()
    assert loop.cluster.engine.version.number == 0 and loop.cluster.sync.published.number == 0
    assert checkpoint.latest(loop.run_dir) is None and read_jsonl(loop.run_dir / "metrics.jsonl").records == ()


def test_weights_too_large_to_compute_with_stop_the_run(kit, opened, tmp_path) -> None:
    """Finite, but their products are not: found when the next batch is sampled, and nothing is trained on it."""
    with (
        pytest.raises(LockstepError, match="not finite; its weights hold NaN or infinity, or overflow in float32"),
        opened(kit.config(tmp_path, "--optim.lr=1e30", "--run.checkpoint_every=0")) as loop,
    ):
        loop.start()
        loop.step()
        loop.step()
    assert [m["step"] for m in read_jsonl(loop.run_dir / "metrics.jsonl").records] == [1]


def test_a_log_that_cannot_be_written_does_not_hide_what_stopped_the_run(kit, opened, tmp_path) -> None:
    """As on a full disk, where the line about the error is the next thing to fail."""
    with pytest.raises(ZeroDivisionError), opened(kit.config(tmp_path)) as loop:
        loop.start()
        (loop.run_dir / "log.txt").unlink()
        (loop.run_dir / "log.txt").mkdir()
        _ = 1 / 0


# ---------------------------------------------------------------- records that are not the trainer's


def test_trajectories_of_another_version_are_refused(kit, opened, tmp_path) -> None:
    """The sampler is given other weights behind the loop's back."""
    with opened(kit.config(tmp_path)) as loop:
        loop.start()
        cluster = loop.cluster
        cluster.engine.install(PolicyVersion(5, "0" * 32), {**cluster.rollout_frozen, **cluster.replica.installed})
        with pytest.raises(ServiceError, match=r"'data/0/2' of step 1 failed: .* computed it under version 5, .* v0:"):
            loop.step()


def test_trajectories_of_a_version_that_is_not_there_yet_are_refused(kit, opened, tmp_path) -> None:
    """A service that does not look at what its replicas say."""
    with opened(kit.config(tmp_path)) as loop:
        loop.start()
        (first, *_), _ = consumable(loop.collector._generate(1, 0, 0), 0, "fail")
        with pytest.raises(FingerprintError, match="holds tokens of policy version 1; this step trains version 0"):
            loop.collector._accepted([replace(first, versions=first.versions + 1)], 0)


def test_stale_weights_under_the_right_number_are_found(kit, opened, tmp_path) -> None:
    """Right label, wrong weights: only the comparison of the bits can tell, before the update."""
    with opened(kit.config(tmp_path)) as loop:
        loop.start()
        stale = {path: jnp.copy(leaf) for path, leaf in loop.cluster.replica.installed.items()}
        loop.step()
        cluster = loop.cluster
        cluster.engine.install(cluster.engine.version, {**cluster.rollout_frozen, **stale})
        before = {path: np.asarray(leaf).tobytes() for path, leaf in cluster.trainer.trainable.items()}
        with pytest.raises(MismatchError, match=r"exact mode, but token .* recomputed as"):
            loop.step()
        assert {path: np.asarray(leaf).tobytes() for path, leaf in cluster.trainer.trainable.items()} == before


def test_fast_mode_measures_the_mismatch_and_goes_on(kit, opened, left, tmp_path) -> None:
    with opened(kit.config(tmp_path, '--numerics={mode = "fast"}', "--run.steps=9")) as loop:
        loop.start()
        stale = {path: jnp.copy(leaf) for path, leaf in loop.cluster.replica.installed.items()}
        loop.step()
        cluster = loop.cluster
        cluster.engine.install(cluster.engine.version, {**cluster.rollout_frozen, **stale})
        loop.step()
    first, second = left(loop.run_dir).metrics()
    assert first["mismatch/max_abs"] < 1e-4 and second["mismatch/unequal_tokens"] > 0
    assert second["mismatch/max_abs"] > 1e-4 > first["mismatch/k3"] and second["mismatch/ess"] < 1
