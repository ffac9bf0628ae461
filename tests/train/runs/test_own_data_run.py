"""A model folder in several files, one's own rows and one's own reward, asked in the model's chat template: trained."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config import load_config, parse_config
from lockstep.models import load_model
from lockstep.models.hf import load_folder, save_folder

ROOT = Path(__file__).parents[3]
ROWS = [{"prompt": f"Name {n} {{things}}", "wanted": 3 + n % 4} for n in range(6)]
SYSTEM = "Be brief."
RECIPE = """
run = { name = "run", seed = 1, steps = 2 }
model = { name = "./sharded" }
lora = { rank = 2, last_layers = 2 }
task = { TASK, template = "chat", system = "Be brief.", max_prompt_tokens = 64 }
reward = { functions = [{ name = "mine:letters" }] }
rollout = { prompts = 2, samples = 4, max_new_tokens = 6, slots = 32, page_size = 16 }
optim = { lr = 0.02 }
train = { micro_batch_rows = 128 }
"""
MODULE = """
def rows(index, seed):
    return {"prompt": f"Name {index} {{things}}", "wanted": 3 + index % 4, "seed": seed}


def letters(prompts, completions, rows):
    assert all(row["prompt"] in prompt for prompt, row in zip(prompts, rows, strict=True))
    return [-abs(sum(c.isalpha() for c in text) - row["wanted"]) for text, row in zip(completions, rows, strict=True)]
"""
TASKS = {
    "jsonl": 'kind = "file", path = "rows.jsonl", prompt_column = "prompt"',
    "parquet": 'kind = "file", path = "rows.parquet", prompt_column = "prompt"',
    "function": 'kind = "function", function = "mine:rows", prompt = "{prompt}"',
}


@pytest.fixture(scope="module")
def mine(kit, tmp_path_factory) -> Path:
    """A folder as a user would have it."""
    folder = tmp_path_factory.mktemp("mine")
    spec, params = load_folder(kit.folder / "model", "float32")
    files = kit.folder / "model"
    save_folder(folder / "sharded", spec, params, tokenizer_files_from=files, max_shard_bytes=20_000)
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 2
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    (folder / "mine.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module", params=TASKS)
def trained(request, mine, train, left, tmp_path_factory):
    """Two steps on each kind of data."""
    runs = tmp_path_factory.mktemp("runs")
    text = RECIPE.replace("TASK", TASKS[request.param])
    config = parse_config(text, overrides=[f"--run.dir={runs}"], folder=mine, where="recipe")
    return request.param, left(train(config))


def test_the_rows_are_asked_in_the_models_own_template(trained, mine) -> None:
    kind, run = trained
    tokenizer = load_model(str(mine / "sharded")).tokenizer
    asked = []
    for step in (1, 2):
        record = run.step(step)
        for t in record.trajectories:
            number = int(t.group_id.rsplit("/", 1)[1])
            turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Name {number} {{things}}"}]
            assert record.prompts[t.group_id] == tokenizer.render(turns)
            assert t.prompt_ids.tolist() == tokenizer.apply_template(turns)
            asked.append(number)
    assert len(set(asked)) == 4 and (kind != "function" or set(asked) == {0, 1, 2, 3})


def test_ones_own_reward_is_what_it_learns_from(trained) -> None:
    _, run = trained
    for m in run.metrics():
        record = run.step(m["step"])
        for t, advantage in zip(record.trajectories, record.extra["advantage"], strict=True):
            wanted = 3 + int(t.group_id.rsplit("/", 1)[1]) % 4
            assert t.reward == t.rewards["mine:letters"] == -abs(sum(c.isalpha() for c in t.text) - wanted)
            assert advantage is not None and t.failed is None
        assert m["reward_std"] > 0 and m["grad_norm"] > 0 and m["mismatch/unequal_tokens"] == 0
    assert run.weights(2) and run.meta(2)["cursor"] == 4


@pytest.mark.slow
def test_the_shipped_recipe_trains_another_model(kit, train, left, tmp_path) -> None:
    """`recipes/own-data.toml` with its own data and reward; only the model, and sizes to its measure, are given."""
    words = [
        f"--run.dir={tmp_path}", f"--model.name={kit.folder}/model", "--lora.last_layers=2", "--run.steps=2",
        "--rollout.prompts=2", "--rollout.samples=2", "--rollout.max_new_tokens=4", "--rollout.slots=32",
    ]  # fmt: skip
    config = load_config(ROOT / "recipes" / "own-data.toml", words)
    run = left(train(config))
    assert [m["step"] for m in run.metrics()] == [1, 2] and run.path == tmp_path / "own-data"
    questions = [
        json.loads(line)["prompt"] for line in (ROOT / "recipes" / "own-data" / "data.jsonl").read_text().splitlines()
    ]
    for step in (1, 2):
        record = run.step(step)
        for t in record.trajectories:
            text = record.prompts[t.group_id]
            assert "Answer with one word." in text and sum(q in text for q in questions) == 1
            # Random weights know no capitals; a reward of another value, or none, would be another function's.
            assert t.rewards == {"reward:one_word": 0.0} and t.failed is None
    assert "nothing to learn from" in (run.path / "log.txt").read_text()
