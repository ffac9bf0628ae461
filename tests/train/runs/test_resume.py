"""A run that was stopped anywhere goes on as if nothing had happened, bit for bit, or says why it cannot."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config import load_config
from lockstep.errors import CheckpointError
from lockstep.models.hf import load_folder, save_folder

APART = ("--cluster={actor = {fsdp = 2}, rollout = {fsdp = 2}, reference = {tensor = 2}}",)


@pytest.fixture(scope="module", params=["together", pytest.param("apart", marks=pytest.mark.slow)])
def whole(request, kit, finished, train, left, tmp_path_factory):
    """An uninterrupted run of eight steps with checkpoints after 3, 6 and 8: colocated, and each role by itself."""
    if request.param == "together":
        return finished
    return left(train(kit.config(tmp_path_factory.mktemp("apart"), *APART)))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run without some of its checkpoints: what is on disk when it is killed after later steps."""

    def copy(run: Path, *gone: int) -> Path:
        shutil.copytree(run, tmp_path / "run")
        for step in gone:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
        return tmp_path / "run"

    return copy


def resume(train, path: Path, *overrides: str) -> Path:
    return train(load_config(path / "recipe.toml", list(overrides)), resume=path)


def same(run, other) -> None:
    assert run.metrics() == other.metrics()
    assert run.receipts() == other.receipts()
    assert run.trajectories() == other.trajectories()
    assert run.state(8) == other.state(8)  # adapter, moments, counts: dtype, shape and digest of each
    assert run.meta(8) == other.meta(8)


# ---------------------------------------------------------------- bit for bit


def test_killed_before_the_next_checkpoint(whole, train, left, copied) -> None:
    """All is there up to step 8, but the newest checkpoint is of step 3: five steps are done again."""
    path = copied(whole.path, 6, 8)
    assert resume(train, path) == path
    same(left(path), whole)
    assert [s for s in (3, 6, 8) if (path / "checkpoints" / str(s)).is_dir()] == [3, 6, 8]
    assert "resumed at step 3, policy version 3" in (path / "log.txt").read_text()


def test_killed_in_the_middle_of_everything(finished, train, left, copied) -> None:
    """A torn metrics line, a half-written checkpoint and Parquet file, no receipt of the last step yet."""
    path = copied(finished.path, 8)
    for log in ("metrics.jsonl", "receipts.jsonl"):
        text = (path / log).read_text()
        (path / log).write_text(text[:-40])
    (path / "trajectories" / "step-000008.parquet").rename(path / "trajectories" / ".step-000008.parquet.tmp")
    shutil.copytree(path / "checkpoints" / "6", path / "checkpoints" / ".saving-8")
    (path / "checkpoints" / ".saving-8" / "checkpoint.json").unlink()
    (path / "report.html").unlink()
    resume(train, path)
    same(left(path), finished)
    assert not (path / "checkpoints" / ".saving-8").exists() and (path / "report.html").is_file()


def test_more_steps_than_were_planned(finished, kit, train, left, tmp_path) -> None:
    run = train(kit.config(tmp_path, "--run.steps=2", "--run.checkpoint_every=0"))
    assert left(run).metrics() == finished.metrics()[:2]
    resume(train, run, "--run.steps=8")
    same(left(run), finished)
    assert load_config(run / "recipe.toml").run.steps == 8  # what is resumed next is the recipe that ran


def test_a_finished_run_stays_as_it_is(finished, train, left, copied) -> None:
    path = copied(finished.path)
    resume(train, path)
    same(left(path), finished)


def test_another_folder_for_the_same_model_and_data(finished, kit, train, left, copied, tmp_path) -> None:
    path = copied(finished.path, 6, 8)
    shutil.copytree(kit.folder / "model", tmp_path / "elsewhere")
    shutil.copy(kit.folder / "data.jsonl", tmp_path / "data.jsonl")
    resume(train, path, f"--model.name={tmp_path}/elsewhere", f"--task.path={tmp_path}/data.jsonl")
    same(left(path), finished)


# ---------------------------------------------------------------- refused, with everything left as it was


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "log.txt"}


@pytest.fixture
def refused(train) -> Callable[..., None]:
    def check(path: Path, message: str, *overrides: str) -> None:
        before = files(path)
        with pytest.raises(CheckpointError, match=message):
            resume(train, path, *overrides)
        assert files(path) == before

    return check


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optim.lr=0.5"], r"under another recipe: optim.lr was 0.02 and is 0.5\. A resume may change run.steps"),
        (["--run.seed=4"], "run.seed was 3 and is 4"),
        (["--rollout.stop=[]"], r'rollout.stop was \["a", "e", "i", "o", "t"\] and is \[\]'),
        (["--lora=none"], "lora.rank was 2 and is unset"),
        (["--cluster.rollout={data = 2}"], 'cluster.rollout was "actor" and is {"data": 2, "fsdp": 1, "tensor": 1}'),
        (["--run.steps=7"], "has done 8 steps already, the recipe asks for 7"),
        (["--optim.max_grad_norm=inf"], "optim.max_grad_norm was 1.0 and is Infinity"),
    ],
)
def test_a_changed_recipe(finished, refused, copied, overrides: list[str], message: str) -> None:
    refused(copied(finished.path), message, *overrides)


def test_more_steps_under_a_schedule_that_ends(kit, train, refused, copied, tmp_path) -> None:
    run = train(kit.config(tmp_path / "cosine", "--run.steps=1", "--optim.schedule=cosine"))
    refused(copied(run), "run.steps was 1 and is 2", "--run.steps=2")


def test_changed_data(finished, kit, refused, copied, tmp_path) -> None:
    path = copied(finished.path)
    text = (kit.folder / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text(text.replace("04+1", "04+2"))
    message = r"made on other data: then data.jsonl \(10 rows, sha256 \w+\).*; now data.jsonl \(10 rows, sha256"
    refused(path, message, f"--task.path={tmp_path}/data.jsonl", "--run.steps=9")


def test_a_changed_model(finished, kit, refused, copied, tmp_path) -> None:
    spec, params = load_folder(kit.folder / "model", "float32")
    params["layers.0.q"] = params["layers.0.q"] * 1.001
    save_folder(tmp_path / "other", spec, params, tokenizer_files_from=kit.folder / "model")
    refused(copied(finished.path), "made on other weights than .*other holds now", f"--model.name={tmp_path}/other")


def test_a_changed_tokenizer(finished, kit, refused, copied, tmp_path) -> None:
    shutil.copytree(kit.folder / "model", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
    file.write_text(json.dumps(tokenizer))
    refused(copied(finished.path), "made under another tokenizer", f"--model.name={tmp_path}/other")


def test_another_version_of_jax_is_a_warning(finished, train, left, copied) -> None:
    path = copied(finished.path)
    for step in (3, 6, 8):
        manifest = path / "checkpoints" / str(step) / "checkpoint.json"
        content = json.loads(manifest.read_text())
        content["meta"]["jax"], content["meta"]["fingerprint"]["numerics"] = "0.1.0", "0" * 32
        manifest.write_text(json.dumps(content))
    resume(train, path)
    assert "then 0.1.0" in (path / "log.txt").read_text()
    assert left(path).metrics() == finished.metrics()


def test_a_checkpoint_whose_version_is_not_its_arrays(finished, refused, copied) -> None:
    path = copied(finished.path)
    manifest = path / "checkpoints" / "8" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    content["meta"]["digest"] = "0" * 32
    manifest.write_text(json.dumps(content))
    refused(
        path, r"policy version 8 has digest 0+, its arrays have \w+; its checkpoint.json is damaged", "--run.steps=9"
    )


def test_nothing_to_resume(finished, refused, copied) -> None:
    refused(copied(finished.path, 3, 6, 8), "has no checkpoint to resume from; .*Start the recipe anew")


def test_a_damaged_checkpoint_costs_nothing_else(finished, train, left, refused, copied) -> None:
    """Later records stay where they are until the checkpoint has been read, and the remedy works."""
    path = copied(finished.path, 8)
    manifest = path / "checkpoints" / "6" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    content["leaves"]["trainable/layers.1.q.lora_b"][2] = "0" * 64
    manifest.write_text(json.dumps(content))
    refused(path, "leaf 'trainable/layers.1.q.lora_b' is not what was saved .*resume an earlier checkpoint")
    shutil.rmtree(path / "checkpoints" / "6")
    resume(train, path)
    same(left(path), finished)


def test_a_run_that_is_still_going(finished, refused, copied) -> None:
    path = copied(finished.path)
    with (path / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(path, "is being written by another process")
