"""Reward models: the loss, its gradient through the whole model, training runs on preference pairs, and scoring."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lockstep import checkpoint
from lockstep.algorithms.bradley_terry import bradley_terry
from lockstep.cli import main
from lockstep.cluster.mesh import Dial
from lockstep.config import parse_config
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError, ModelError, RewardError
from lockstep.metrics import read_jsonl
from lockstep.models.catalog import load_value_model
from lockstep.models.decoder import Numerics, reference_logits
from lockstep.models.spec import ModelSpec
from lockstep.models.tokenizer import Tokenizer
from lockstep.supervised_recipe import RewardRecipe, load_supervised
from lockstep.train.batching import Geometry
from lockstep.train.reward_model import RewardModel, make_reward_models
from lockstep.train.scored_text import ScoredText
from lockstep.train.sequences import at_last, last_of
from lockstep.train.supervised.run import describe, make_training, run_supervised
from lockstep.types import Prompt
from lockstep.value_sections import RewardModelConfig

RECIPE = """
run = { name = "rm", dir = "runs", seed = 5, checkpoint_every = 12 }
model = { name = "./model" }
[reward_model]
data = "pairs.jsonl"
eval_fraction = 0.25
max_tokens = 24
end = "<|im_end|>"
epochs = 3
batch_pairs = 16
micro_batch_rows = 512
[optim]
lr = 0.003
[numerics]
tile_rows = 16
"""


def pair(number: int) -> dict[str, Any]:
    """Letters; the better completion holds a `z`."""
    rng = np.random.default_rng(number)
    letters = [list(rng.choice(list("abcdefgh"), 6)) for _ in range(2)]
    letters[0][int(rng.integers(6))] = "z"
    chosen, rejected = map("".join, letters)
    return {"prompt": f"{number % 7}: ", "chosen": chosen, "rejected": rejected, "by": number % 2}


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward_model")
    (made / "model").symlink_to(tiny_folder)
    (made / "pairs.jsonl").write_text("".join(json.dumps(pair(n)) + "\n" for n in range(256)))
    (made / "rm.toml").write_text(RECIPE)
    return made


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Callable[..., RewardRecipe]:
    return lambda runs, *words: load_supervised(RewardRecipe, folder / "rm.toml", [f"--run.dir={runs}", *words])


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    return run_supervised(recipe(tmp_path_factory.mktemp("finished")), console=quiet())


@partial(jax.jit, static_argnums=0)
def plain_values(spec: ModelSpec, params: Any, tokens: np.ndarray) -> jax.Array:
    """[B, S] by the slow twin of a model with a head over tokens, whose first row is the value head."""
    head = jnp.zeros((spec.vocab_size, spec.dim)).at[0].set(jnp.asarray(params["value_head"])[0])
    leaves = {p: x for p, x in params.items() if p != "value_head"} | {"head": head}
    return reference_logits(replace(spec, scalar_head=False, tied_head=False), leaves, tokens)[..., 0]


# -- the loss --------------------------------------------------------------------------------------------------------

SCORES = st.integers(-64, 64).map(lambda n: n / 16)  # exact in float32, and so are their differences


@settings(max_examples=40)
@given(
    st.lists(st.tuples(SCORES, SCORES, st.integers(0, 32).map(lambda n: n / 16), st.booleans()), min_size=5, max_size=5)
)
def test_loss_and_gradient_are_their_closed_form(pairs: list[tuple[float, float, float, bool]]) -> None:
    chosen, rejected, margin, mask = (np.array(x) for x in zip(*pairs, strict=True))
    mask[0] = True
    garbage = np.where(mask[:, None], np.stack([chosen, rejected], 1), np.nan).astype(np.float32)
    (loss, metrics), slope = jax.value_and_grad(bradley_terry, has_aux=True)(
        jnp.asarray(garbage), np.float32(margin), mask
    )
    d = (chosen - rejected)[mask]
    z = d - margin[mask]
    np.testing.assert_allclose(loss, np.log1p(np.exp(-z)).mean(), rtol=1e-5)
    expected = np.zeros((5, 2))
    expected[mask, 0] = -1 / (1 + np.exp(z)) / mask.sum()
    expected[mask, 1] = -expected[mask, 0]
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(metrics["accuracy"], ((d > 0) + 0.5 * (d == 0)).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["margin"], d.mean(), rtol=1e-4, atol=1e-6)


def test_equal_scores_cost_log_two() -> None:
    loss, metrics = bradley_terry(jnp.zeros((3, 2)), np.zeros(3, np.float32), np.ones(3, bool))
    assert math.isclose(loss, math.log(2), rel_tol=1e-6) and metrics["accuracy"] == 0.5


@pytest.mark.slow
def test_the_gradient_of_every_leaf_is_that_of_the_plain_way(recipe, tmp_path) -> None:
    """And the same from several micro-batches as from one, to rounding."""
    made = recipe(tmp_path, "--reward_model.head_std=0.5")
    training = make_training(made)
    model, pairs = training.trainer.model, training.data.train[:6]
    sequences = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    gradients = []
    for max_rows in (512, 32):
        geometry = Geometry(1, max_rows, 16, 16)
        batches = training.trainer.objective.lay_out(pairs, geometry)
        assert (len(batches) > 1) == (max_rows == 32)
        scores = np.zeros(12, np.float32)
        passes = [model.forward(model.weights, b) for b in batches]
        for b, p in zip(batches, passes, strict=True):
            last_of(b, np.asarray(p.outputs), scores)
        slope = jax.grad(lambda s: bradley_terry(s, np.zeros(6, np.float32), np.ones(6, bool))[0])(
            jnp.asarray(scores).reshape(6, 2)
        )
        total = None
        for b, p in zip(batches, passes, strict=True):
            total = model.gradients(model.weights, p, jnp.asarray(at_last(b, np.asarray(slope).ravel())), total)
        gradients.append({path: np.asarray(g) for path, g in total.items()})
    spec = training.base.spec
    longest = max(map(len, sequences))
    tokens = np.stack([np.pad(s, (0, longest - len(s))) for s in sequences])

    def loss(params: Any) -> jax.Array:
        table = plain_values(spec, params, tokens)
        last = table[np.arange(12), [len(s) - 1 for s in sequences]].reshape(6, 2)
        return jax.nn.softplus(last[:, 1] - last[:, 0]).mean()

    expected = jax.jit(jax.grad(loss))({p: jnp.asarray(x) for p, x in model.params.items()})
    for path, wanted in expected.items():
        scale = float(np.abs(wanted).max())
        assert scale > 0, f"{path}: nothing to compare"
        assert np.abs(gradients[0][path] - wanted).max() <= 2e-4 * scale, path
        assert np.abs(gradients[1][path] - gradients[0][path]).max() <= 2e-5 * scale, path


# -- runs ------------------------------------------------------------------------------------------------------------


def test_it_learns_a_preference_and_says_so(finished: Path) -> None:
    records = read_jsonl(finished / "metrics.jsonl").records
    assert [r["step"] for r in records] == list(range(1, 37)) and records[-1]["epoch"] == 3
    assert records[0]["loss"] == pytest.approx(math.log(2)) and records[0]["accuracy"] == 0.5
    assert records[-1]["eval/accuracy"] > 0.9 and records[-1]["eval/loss"] < 0.4, records[-1]
    assert [r["step"] for r in records if "eval/accuracy" in r] == [12, 24, 36]
    assert checkpoint.steps(finished) == [12, 24, 36]
    assert "64 held out" in (finished / "log.txt").read_text()


def without_time(records: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


def test_a_resumed_run_goes_on_bit_for_bit(recipe, finished: Path, tmp_path: Path) -> None:
    import shutil

    left = tmp_path / "rm"
    shutil.copytree(finished, left)
    shutil.rmtree(left / "checkpoints" / "36")
    shutil.rmtree(left / "model")
    with pytest.raises(CheckpointError, match=r"the recipe changed since checkpoint 24 \(optim.lr was 0.003 and is"):
        run_supervised(
            load_supervised(RewardRecipe, left / "recipe.toml", ["--optim.lr=0.1"]), resume=left, console=quiet()
        )
    run_supervised(load_supervised(RewardRecipe, left / "recipe.toml"), resume=left, console=quiet())
    a, b = (read_jsonl(p / "metrics.jsonl").records for p in (finished, left))
    assert without_time(a) == without_time(b)
    for name in ("model.safetensors", "config.json"):
        assert (left / "model" / name).read_bytes() == (finished / "model" / name).read_bytes()


def test_every_pair_once_per_epoch_and_the_held_out_ones_never(recipe, tmp_path) -> None:
    data = make_training(recipe(tmp_path, "--reward_model.batch_pairs=50")).data
    assert (len(data.train), len(data.held_out), data.batches_per_epoch(50)) == (192, 64, 4)
    epochs = [[id(p) for s in range(4 * e, 4 * e + 4) for p in data.batch(s, 50, 5)] for e in (0, 1)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == sorted(map(id, data.train))
    assert len(data.batch(3, 50, 5)) == 42


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_exported_folder(recipe, tmp_path) -> None:
    made = recipe(
        tmp_path, "--lora={rank = 2, last_layers = 1}", "--reward_model.epochs=1", "--reward_model.batch_pairs=64",
        "--optim.lr=0.05", "--reward_model.margin_column=by",
    )  # fmt: skip
    run_dir = run_supervised(made, console=quiet())
    training = make_training(made)
    training.trainer.model.state, _ = checkpoint.restore(run_dir, 3, training.trainer.model.state)
    pairs = training.data.held_out[:4]
    sequences = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    merged = load_value_model(run_dir / "model", std=0.0, seed=0)
    assert merged.params["layers.2.q"].tobytes() != training.base.params["layers.2.q"].tobytes()
    tokens = np.stack([np.pad(s, (0, 24 - len(s))) for s in sequences])
    plain = plain_values(merged.spec, merged.params, tokens)
    expected = [plain[i, len(s) - 1] for i, s in enumerate(sequences)]
    np.testing.assert_allclose(training.trainer.scores(pairs), expected, rtol=1e-4, atol=1e-5)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"rejected": None}, r"pairs.jsonl:1: 'rejected' must be text, got NoneType"),
    "no Unicode": ({"chosen": "\ud800"}, r"pairs.jsonl:1: "),
    "the same": ({"rejected": "x", "chosen": "x"}, r":1: the two completions are the same"),
    "too long": ({"chosen": "x" * 40}, r":1: prompt and completion are 44 tokens .* expected 1 to 24 \(max_tokens\)"),
    "messages": ({"prompt": [{"role": "user", "content": "a"}]}, r'a list of messages; template = "plain" takes text'),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_and_leaves_no_run_behind(name: str, recipe, tmp_path) -> None:
    change, words = BAD_ROWS[name]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair(1) | change) + "\n")
    with pytest.raises(DataError, match=words):
        run_supervised(recipe(tmp_path, f"--reward_model.data={tmp_path / 'pairs.jsonl'}"), console=quiet())
    assert [p.name for p in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_recipes_that_do_not_fit_are_refused(recipe, folder: Path, tmp_path) -> None:
    for words, said in {
        ("--reward_model.micro_batch_rows=8",): r"cannot hold one sequence of `reward_model.max_tokens` = 24 rows",
        ("--cluster.reward.tensor=2", "--numerics.tensor_parts=3"): "not a multiple of `cluster.reward.tensor` = 2",
        ("--cluster.reward.data=2", "--cluster.cpu_devices=1"): "but `cluster.reward` has 2 devices",
        ("--reward_model.bath_pairs=3",): r"unknown key `reward_model.bath_pairs`.*`reward_model.batch_pairs`",
    }.items():
        with pytest.raises(ConfigError, match=said):
            recipe(tmp_path, *words)
    with pytest.raises(ConfigError, match=r"max_tokens = 600, but .* was made for 512 positions"):
        make_training(recipe(tmp_path, "--reward_model.max_tokens=600", "--reward_model.micro_batch_rows=600"))
    with pytest.raises(ConfigError, match=r"the command that takes it is `lockstep run`"):
        parse_config(RECIPE, overrides=[], folder=folder, where="rm.toml")


def test_the_command_recognises_the_recipe(folder: Path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(folder / "rm.toml"), "--name", "b", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert 'name = "b"' in out and "with a scalar head" in out and "parameters/device" in out
    assert main(["keys", "--reward-model", "batch_pairs"]) == 0
    assert "reward_model.batch_pairs = 32" in capsys.readouterr().out
    assert main(["run", str(folder / "rm.toml"), "--reward_model.epoch", "2"]) == 2
    assert "`reward_model.epochs`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_the_mesh_holds(recipe, tmp_path) -> None:
    made = recipe(tmp_path, "--cluster.reward={fsdp = 2}")
    training, text = make_training(made), describe(made)
    held = sum(a.addressable_shards[0].data.nbytes for a in training.trainer.model.params.values())
    from lockstep.text import format_bytes

    assert text.startswith(made.to_toml().rstrip()) and format_bytes(held) in text


# -- scoring ---------------------------------------------------------------------------------------------------------


def scorer(config: Any, policy: Tokenizer, folder: Path, **settings: Any) -> RewardModel:
    def geometry(_: Any, programs: Any) -> Geometry:
        return Geometry(programs.row_shards, 256, 16, 16)

    wanted = RewardModelConfig(name="taste", model=str(folder), **settings)
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"models": (wanted,)})})
    dial = Dial.build({"reward": {"data": 1}})
    (made,) = make_reward_models(config, dial, policy, Numerics("float32", 16, 16), geometry)
    return made


@pytest.fixture(scope="module")
def config(folder: Path) -> Any:
    text = """
    run = { name = "r", steps = 1 }
    model = { name = "./model" }
    task = { kind = "reasoning_gym", dataset = "chain_sum" }
    reward = { functions = [{ name = "exact" }] }
    """
    return parse_config(text, overrides=[], folder=folder, where="r.toml")


def prompts(tokenizer: Tokenizer, numbers: list[int]) -> list[Prompt]:
    return [Prompt(f"p{n % 7}", text, tuple(tokenizer.encode(text))) for n in numbers for text in [pair(n)["prompt"]]]


def test_a_trained_model_prefers_what_it_was_taught_whatever_the_batch(config, folder, finished) -> None:
    tokenizer = Tokenizer.from_hf(folder / "model")
    made = scorer(config, tokenizer, finished / "model", end="<|im_end|>")
    numbers = list(range(1000, 1020))
    asked, rows = prompts(tokenizer, numbers), [pair(n) for n in numbers]
    good, bad = (made.score(asked, [row[side] for row in rows]) for side in ("chosen", "rejected"))
    assert np.mean(np.array(good) > np.array(bad)) > 0.9
    order = np.random.default_rng(0).permutation(20)
    assert [good[i] for i in order] == made.score([asked[i] for i in order], [rows[i]["chosen"] for i in order])
    assert made.score(asked[3:4], [rows[3]["chosen"]]) == good[3:4]
    assert made.score([], []) == []


def test_a_score_is_the_value_at_the_last_token(config, folder, finished) -> None:
    """Of the policy's own ids where the tokenizer is the same; of the text in the model's template where that is asked
    for."""
    tokenizer = Tokenizer.from_hf(folder / "model")
    model = load_value_model(finished / "model", std=0.0, seed=0)

    def last(ids: list[int]) -> float:
        padded = np.pad(np.array([ids], np.int32), ((0, 0), (0, 64 - len(ids))))
        return float(plain_values(model.spec, model.params, padded)[0, len(ids) - 1])

    odd = Prompt("p", "text that the ids are not of", tuple(tokenizer.encode("3: ")))
    plain = scorer(config, tokenizer, finished / "model", end="<|im_end|>")
    assert plain.same_tokens
    ids = [*odd.ids, *tokenizer.encode("abz"), *tokenizer.encode("<|im_end|>", allow_special=True)]
    assert plain.score([odd], ["abz"])[0] == pytest.approx(last(ids), rel=1e-4)
    chat = scorer(config, tokenizer, finished / "model", template="chat")
    turns = [{"role": "user", "content": odd.text}, {"role": "assistant", "content": "abz"}]
    assert chat.score([odd], ["abz"])[0] == pytest.approx(last(tokenizer.apply_template(turns, False)), rel=1e-4)
    empty = Prompt("q", "", tuple(tokenizer.encode("x")))
    assert plain.score([empty], [""])[0] == pytest.approx(last([*empty.ids, *ids[-1:]]), rel=1e-4)


def test_what_cannot_be_scored_is_named(config, folder, finished) -> None:
    tokenizer = Tokenizer.from_hf(folder / "model")
    made = scorer(config, tokenizer, finished / "model", max_tokens=8)
    with pytest.raises(RewardError, match=r"reward model 'taste', prompt 'p0': .* are 11 tokens .* expected 1 to 8"):
        made.score(prompts(tokenizer, [0]), ["abcdefgh"])
    with pytest.raises(ModelError, match=r"has a head over tokens, not a scalar one"):
        scorer(config, tokenizer, folder / "model")
    for settings_, said in (({"max_tokens": 300}, "max_tokens = 300, but the model was made for 512 positions"),):
        with pytest.raises(LockstepError, match=said):
            scorer(config, tokenizer, finished / "model", **settings_)


def test_a_template_that_is_not_there_is_refused(folder: Path) -> None:
    tokenizer = Tokenizer.from_hf(folder / "model")
    tokenizer.template = None
    with pytest.raises(ConfigError, match=r"has no chat template; use template = .plain."):
        ScoredText(tokenizer, "chat", "", 9)
