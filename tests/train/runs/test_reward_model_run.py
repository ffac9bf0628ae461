"""A run whose reward is a trained reward model: what it holds is what is planned, its scores are what is trained on."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.config import load_config
from lockstep.errors import CheckpointError, RewardError
from lockstep.models import load_model
from lockstep.models.catalog import load_spec
from lockstep.models.hf import SINGLE, save_folder
from lockstep.models.spec import leaf_table
from lockstep.train.assembly import build
from lockstep.train.dry_run import planned_bytes
from lockstep.train.footprint import bytes_per_role
from lockstep.train.policy import split_leaves
from lockstep.types import Prompt


@pytest.fixture(scope="module")
def reward_folder(kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a drawn scalar head."""
    model = load_model(kit.folder / "model")
    spec = replace(model.spec, scalar_head=True)
    head = np.random.default_rng(0).standard_normal((1, spec.dim)).astype(np.float32)
    params = {p: head if p == "value_head" else model.params[p] for p in leaf_table(spec)}
    folder = tmp_path_factory.mktemp("reward") / "model"
    save_folder(folder, spec, params, tokenizer_files_from=kit.folder / "model")
    return folder


def words(folder: Path, **more: str) -> list[str]:
    extra = "".join(f", {k} = {v}" for k, v in more.items())
    return [f"--reward={{models = [{{ name = 'taste', model = '{folder}', weight = 2.0{extra} }}]}}"]


def test_a_run_is_trained_on_a_reward_models_scores(kit, train, left, reward_folder, tmp_path) -> None:
    """On a mesh of its own; the record has the scores that the model, asked again, gives bit for bit."""
    config = kit.config(tmp_path, *words(reward_folder), "--cluster.reward={fsdp = 2}", "--run.steps=2")
    with closing(build(config)) as cluster:
        spec = load_spec(config.model.name)
        planned = planned_bytes(config, cluster.dial, spec, split_leaves(config, spec))
        assert planned == bytes_per_role(cluster) and planned["reward"]["parameters"] > 0
        run = left(train(config))
        step = run.step(2)
        asked = [Prompt(t.group_id, step.prompts[t.group_id], tuple(t.prompt_ids)) for t in step.trajectories]
        texts = [t.text for t in step.trajectories]
        again = cluster.reward_models[0].score(asked, texts)
    assert [t.rewards["taste"] for t in step.trajectories] == again and len(set(again)) > 3
    assert [t.reward for t in step.trajectories] == [2 * score for score in again]
    assert run.metrics()[1]["reward/taste"] == pytest.approx(np.mean(again))


def test_a_resume_with_another_reward_model_in_its_folder_is_refused(kit, train, reward_folder, tmp_path) -> None:
    folder = Path(shutil.copytree(reward_folder, tmp_path / "rm"))
    config = kit.config(tmp_path / "runs", *words(folder), "--run.steps=1")
    run_dir = train(config)
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {"score.weight": -tensors["score.weight"]}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"other weights of reward model 'taste' than its folder holds now"):
        train(load_config(run_dir / "recipe.toml", ["--run.steps=2"]), run_dir)


def test_a_completion_that_is_too_long_fails_as_any_reward_does(kit, train, reward_folder, tmp_path) -> None:
    short = words(reward_folder, max_tokens="8")
    config = kit.config(
        tmp_path, *short, "--run.steps=1", "--task.prompt={question}{question}", "--task.max_prompt_tokens=16"
    )
    with pytest.raises(RewardError, match=r"reward model 'taste', prompt .* expected 1 to 8"):
        train(config)
