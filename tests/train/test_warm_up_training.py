"""Supervised fine-tuning and DPO: the losses, their gradient through the whole model, training runs, text."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
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

from lockstep.algorithms.dpo import dpo
from lockstep.algorithms.sft import sft
from lockstep.cli import main
from lockstep.config import parse_config
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError, ModelError, NumericsError
from lockstep.metrics import read_jsonl
from lockstep.models import LoadedModel, load_model
from lockstep.models.decoder import reference_logits
from lockstep.models.spec import ModelSpec
from lockstep.supervised_recipe import DpoRecipe, SftRecipe, SupervisedRecipe, load_supervised
from lockstep.train.supervised.examples import require_different
from lockstep.train.supervised.likelihood import Continuations, PromptedText
from lockstep.train.supervised.run import Training, describe, make_training, run_supervised

KINDS: dict[str, type[SupervisedRecipe]] = {"sft": SftRecipe, "dpo": DpoRecipe}
COMMON = """
run = { name = "warm", dir = "runs", seed = 5, checkpoint_every = 8 }
model = { name = "./model" }
optim = { lr = 0.01 }
numerics = { tile_rows = 16 }
"""
RECIPES = {
    "sft": COMMON
    + '[sft]\ndata = "sft.jsonl"\neval_fraction = 0.25\nmax_tokens = 24\nepochs = 2\nbatch_examples = 16\n'
    "micro_batch_rows = 512",
    "dpo": COMMON + '[dpo]\ndata = "dpo.jsonl"\neval_fraction = 0.25\nmax_tokens = 24\nepochs = 2\nbatch_pairs = 16\n'
    "micro_batch_rows = 512",
}
both = pytest.mark.parametrize("kind", KINDS)


def row(kind: str, number: int) -> dict[str, Any]:
    """A letter is to be repeated."""
    letter, other = "abcdefgh"[number % 8], "abcdefgh"[(number // 8 + number) % 7]
    completion = letter * (2 + number % 3)
    if kind == "sft":
        return {"prompt": f"{number % 5}{letter}:", "completion": completion}
    return {"prompt": f"{number % 5}{letter}:", "chosen": completion, "rejected": f"{other}z" * 2}


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("warm_up")
    (made / "model").symlink_to(tiny_folder)
    for kind, text in RECIPES.items():
        (made / f"{kind}.jsonl").write_text("".join(json.dumps(row(kind, n)) + "\n" for n in range(192)))
        (made / f"{kind}.toml").write_text(text)
    return made


Make = Callable[..., SupervisedRecipe]


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Make:
    return lambda kind, runs, *words: load_supervised(
        KINDS[kind], folder / f"{kind}.toml", [f"--run.dir={runs}", *words]
    )


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


@pytest.fixture(scope="module")
def trainings(recipe: Make) -> dict[str, Training]:
    return {kind: make_training(recipe(kind, "runs")) for kind in KINDS}


@pytest.fixture(scope="module")
def finished(recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: run_supervised(recipe(kind, tmp_path_factory.mktemp(kind)), console=quiet()) for kind in KINDS}


# -- the losses ------------------------------------------------------------------------------------------------------

LOGP = st.integers(-160, 0).map(lambda n: n / 16)  # exact in float32, and so are their differences


@given(st.lists(st.tuples(LOGP, st.integers(1, 9)), min_size=1, max_size=4))
def test_sft_is_the_mean_over_all_tokens(completions: list[tuple[float, int]]) -> None:
    sums, counts = np.zeros(4, np.float32), [n for _, n in completions]
    sums[: len(completions)] = [x for x, _ in completions]
    (loss, metrics), slope = jax.value_and_grad(sft, has_aux=True)(jnp.asarray(sums), np.float32(sum(counts)))
    np.testing.assert_allclose(loss, -sum(x for x, _ in completions) / sum(counts), rtol=1e-6)
    np.testing.assert_allclose(slope, -1 / sum(counts), rtol=1e-6)
    assert metrics["loss"] == loss


@settings(max_examples=40)
@given(st.lists(st.tuples(LOGP, LOGP, st.booleans()), min_size=3, max_size=3), st.sampled_from([0.125, 0.5, 2.0]))
def test_dpo_and_its_gradient_are_their_closed_form(pairs: list[tuple[float, float, bool]], beta: float) -> None:
    """The gradient as the paper's equation after 7: beta sigmoid(r_rejected - r_chosen)."""
    chosen, rejected, mask = (np.array(x) for x in zip(*pairs, strict=True))
    mask[0] = True
    garbage = np.where(mask[:, None], np.stack([chosen, rejected], 1), np.nan).astype(np.float32)
    (loss, metrics), slope = jax.value_and_grad(lambda r: dpo(r, beta, mask), has_aux=True)(jnp.asarray(garbage))
    r = beta * np.stack([chosen, rejected], 1)[mask]
    z = r[:, 0] - r[:, 1]
    np.testing.assert_allclose(loss, np.logaddexp(0, -z).mean(), rtol=1e-5)
    expected = np.zeros((3, 2))
    expected[mask, 0] = -beta / (1 + np.exp(z)) / mask.sum()
    expected[mask, 1] = -expected[mask, 0]
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(metrics["margin"], z.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([metrics["chosen"], metrics["rejected"]], r.mean(0), rtol=1e-5, atol=1e-6)


# -- the step --------------------------------------------------------------------------------------------------------


def gradients(training: Training, items: list[Continuations], max_rows: int) -> tuple[dict[str, float], Any]:
    """Of one step that changes nothing, cut into passes of so many rows."""
    trainer, found = training.trainer, {}
    geometry, model = trainer.geometry, trainer.model

    def keep(grads: Any, number: int, name: str) -> dict[str, float]:
        found.update({path: np.asarray(g) for path, g in grads.items()})
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "update", keep)
        patch.setattr(trainer, "geometry", replace(geometry, max_rows=max_rows))
        assert (len(trainer.objective.lay_out(items, trainer.geometry)) > 1) == (max_rows == 32)
        return trainer.step(items, 0), found


WIDTH, SEQUENCES = 24, 12  # of the twin: one shape, compiled once


@partial(jax.jit, static_argnums=0)
def twin(spec: ModelSpec, params: Any, tokens: Any, on: Any, slopes: Any) -> tuple[jax.Array, Any]:
    """(log-probability of each completion [B], gradient of slopes [B] times these) by the slow way: every sequence by
    itself, nothing shared, nothing cut."""

    def sums(params: Any) -> jax.Array:
        logp = jax.nn.log_softmax(reference_logits(spec, params, tokens)[:, :-1])
        return (jnp.take_along_axis(logp, tokens[:, 1:, None], 2)[..., 0] * on[:, 1:]).sum(1)

    found, back = jax.vjp(sums, params)
    return found, back(slopes)[0]


def by_twin(model: LoadedModel, params: Any, items: Sequence[Continuations], slopes: Any) -> tuple[np.ndarray, Any]:
    """slopes: from the log-probabilities [B], what the gradient is taken of."""
    sides = [(item.prompt, completion) for item in items for completion in item.completions]
    tokens, on = np.zeros((SEQUENCES, WIDTH), np.int32), np.zeros((SEQUENCES, WIDTH), bool)
    for i, (prompt, completion) in enumerate(sides):
        both = np.concatenate([prompt, completion])
        tokens[i, : len(both)], on[i, len(prompt) : len(both)] = both, True
    device = {path: jnp.asarray(x, jnp.float32) for path, x in params.items()}
    sums, _ = twin(model.spec, device, tokens, on, jnp.zeros(SEQUENCES))
    _, gradient = twin(model.spec, device, tokens, on, jnp.float32(slopes(np.asarray(sums, np.float64))))
    return np.asarray(sums, np.float64)[: len(sides)], gradient


def loss_of(kind: str, items: Sequence[Continuations]) -> Callable[[Any], jax.Array]:
    """The paper's, of the log-probabilities [B], in so many words."""
    if kind == "sft":
        tokens = sum(len(item.completions[0]) for item in items)
        return lambda sums: -sums.sum() / tokens
    reference = np.concatenate([item.reference for item in items])

    def loss(sums: Any) -> jax.Array:
        r = 0.1 * (sums - reference).reshape(-1, 2)
        return jnp.mean(-jnp.log(jax.nn.sigmoid(r[:, 0] - r[:, 1])))

    return loss


@pytest.mark.slow
@both
def test_the_gradient_of_every_leaf_is_that_of_the_plain_way(kind: str, trainings: dict[str, Training]) -> None:
    """And the same from several micro-batches as from one, to rounding."""
    training = trainings[kind]
    items = list(training.data.train[: SEQUENCES if kind == "sft" else SEQUENCES // 2])
    if kind == "dpo":  # away from the start, where all pairs pull alike
        rng = np.random.default_rng(0)
        items = [replace(item, reference=item.reference + rng.normal(0, 9, 2)) for item in items]
    (metrics, whole), (cut_metrics, cut) = (gradients(training, items, rows) for rows in (512, 32))
    loss = loss_of(kind, items)
    sums, expected = by_twin(training.base, training.trainer.model.params, items, jax.grad(loss))
    assert metrics["loss"] == pytest.approx(float(loss(sums)), rel=1e-5)
    assert metrics == pytest.approx(cut_metrics, rel=1e-5)
    for path, wanted in expected.items():
        scale = float(np.abs(wanted).max())
        assert scale > 0, f"{path}: nothing to compare"
        assert np.abs(whole[path] - wanted).max() <= 2e-4 * scale, path
        assert np.abs(cut[path] - whole[path]).max() <= 2e-5 * scale, path


@pytest.mark.slow
@both
@pytest.mark.parametrize("mesh", ["{data = 2, fsdp = 2}", "{fsdp = 2, tensor = 2}"])
def test_a_mesh_changes_a_gradient_by_rounding_only(kind: str, mesh: str, recipe: Make) -> None:
    """And of a log-probability not a bit."""
    words = ("--numerics.tensor_parts=2",)
    one = make_training(recipe(kind, "runs", *words))
    many = make_training(recipe(kind, "runs", f"--cluster={{actor = {mesh}}}", *words))
    assert many.trainer.model.programs.mesh.size == 4
    for a, b in zip(one.data.train, many.data.train, strict=True):
        assert (a.reference is None) == (kind == "sft") and np.array_equal(a.prompt, b.prompt)
        assert kind == "sft" or a.reference.tobytes() == b.reference.tobytes()
    (metrics, expected), (mesh_metrics, found) = (
        gradients(training, list(training.data.train[:12]), 512) for training in (one, many)
    )
    assert mesh_metrics == pytest.approx(metrics, rel=1e-5)
    for path, wanted in expected.items():
        assert np.abs(found[path] - wanted).max() <= 2e-5 * np.abs(wanted).max(), path


def test_what_is_measured_does_not_depend_on_the_batch(trainings: dict[str, Training]) -> None:
    for training in trainings.values():
        items = list(training.data.held_out[:20])  # 16 and 4
        together = training.trainer.measure(items)
        alone = [training.trainer.measure([item]) for item in items]
        size = [item.num_tokens if len(item.completions) == 1 else 1 for item in items]
        mean = sum(n * found["loss"] for n, found in zip(size, alone, strict=True)) / sum(size)
        assert together["loss"] == pytest.approx(mean, rel=1e-5)


def test_a_score_that_is_not_finite_stops_the_step(trainings: dict[str, Training], monkeypatch) -> None:
    trainer = trainings["sft"].trainer
    broken = dict(trainer.model.trainable)
    broken["final_norm"] = jnp.full_like(broken["final_norm"], jnp.nan)
    monkeypatch.setattr(trainer.model, "trainable", broken)
    with pytest.raises(NumericsError, match=r"a score is nan; the policy's weights hold NaN"):
        trainer.step(trainings["sft"].data.train[:16], 0)
    assert trainer.model.trainable is broken


def test_weights_that_an_update_destroys_are_neither_kept_nor_written(recipe: Make, tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match=r"update 0: it would make .* NaN or infinite .*was not applied"):
        run_supervised(recipe("sft", tmp_path, "--optim.lr=1e38", "--optim.weight_decay=1e3"), console=quiet())
    assert not list(tmp_path.glob("**/*.safetensors"))


# -- runs ------------------------------------------------------------------------------------------------------------


def test_sft_learns_to_continue_and_to_stop(finished: dict[str, Path]) -> None:
    records = read_jsonl(finished["sft"] / "metrics.jsonl").records
    assert len(records) == 18 and [r["step"] for r in records if "eval/loss" in r] == [8, 16, 18]
    assert records[0]["loss"] > 4 and records[-1]["eval/loss"] < 1.5, records[-1]
    assert sum(r["examples"] for r in records) == 2 * 144 and records[-1]["tokens"] > 16
    model = load_model(finished["sft"] / "model")
    prompt, answer = (
        model.tokenizer.encode("1c:"),
        [*model.tokenizer.encode("ccc"), model.tokenizer.single_id("<|im_end|>")],
    )
    one = Continuations(np.array(prompt, np.int32), (np.array(answer, np.int32),))
    assert math.exp(by_twin(model, model.params, [one], np.zeros_like)[0][0]) > 0.05


def test_dpo_starts_at_the_reference_and_learns_what_is_preferred(finished: dict[str, Path]) -> None:
    records = read_jsonl(finished["dpo"] / "metrics.jsonl").records
    first, last = records[0], records[-1]
    # Exact mode: under the start weights every ratio is 1, to the bit.
    assert first["loss"] == pytest.approx(math.log(2)) and first["accuracy"] == 0.5
    assert first["margin"] == first["chosen"] == first["rejected"] == 0.0
    assert last["eval/accuracy"] > 0.9 and last["eval/loss"] < 0.4 and last["margin"] > 1, last


def without_time(records: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(finished: dict[str, Path], tmp_path: Path) -> None:
    """DPO, whose reference is the start weights and not those of the checkpoint."""
    left = tmp_path / "warm"
    shutil.copytree(finished["dpo"], left)
    for step in ("16", "18"):
        shutil.rmtree(left / "checkpoints" / step)
    shutil.rmtree(left / "model")
    changed = load_supervised(DpoRecipe, left / "recipe.toml", ["--dpo.beta=0.2"])
    with pytest.raises(CheckpointError, match=r"the recipe changed since checkpoint 8 \(dpo.beta was 0.1 and is 0.2"):
        run_supervised(changed, resume=left, console=quiet())
    run_supervised(load_supervised(DpoRecipe, left / "recipe.toml"), resume=left, console=quiet())
    a, b = (read_jsonl(p / "metrics.jsonl").records for p in (finished["dpo"], left))
    assert without_time(a) == without_time(b)
    for name in ("model.safetensors", "config.json"):
        assert (left / "model" / name).read_bytes() == (finished["dpo"] / "model" / name).read_bytes()


@pytest.mark.slow
def test_an_adapter_is_merged_and_an_rl_recipe_takes_the_folder(
    recipe: Make, trainings: dict[str, Training], tmp_path: Path
) -> None:
    rows = [row("dpo", n) for n in range(300, 306)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run_dir = run_supervised(
        recipe(
            "dpo", tmp_path, "--lora={rank = 2, last_layers = 1}", "--dpo.epochs=1", "--optim.lr=0.05",
            f"--dpo.eval_data={tmp_path / 'eval.jsonl'}",
        ),
        console=quiet(),
    )  # fmt: skip
    base, merged = trainings["dpo"].base, load_model(run_dir / "model")
    assert merged.params["layers.2.q"].tobytes() != base.params["layers.2.q"].tobytes()
    assert merged.params["layers.1.q"].tobytes() == base.params["layers.1.q"].tobytes()
    text = PromptedText.of(recipe("dpo", "runs"), base.tokenizer)
    items = [text.ids(r["prompt"], [r["chosen"], r["rejected"]], "row") for r in rows]
    before, after = (by_twin(m, m.params, items, np.zeros_like)[0].reshape(-1, 2) for m in (base, merged))
    rewards = 0.1 * (after - before).mean(0)
    last = read_jsonl(run_dir / "metrics.jsonl").records[-1]
    assert [last["eval/chosen"], last["eval/rejected"]] == pytest.approx(rewards, rel=1e-3) and last["eval/margin"] > 0
    config = parse_config(
        """
        run = { name = "rl", steps = 1 }
        model = { name = "./warm/model" }
        task = { kind = "reasoning_gym", dataset = "chain_sum" }
        reward = { functions = [{ name = "exact" }] }
        """,
        overrides=[], folder=tmp_path, where="rl.toml",
    )  # fmt: skip
    assert load_model(config.model.name).source == str(run_dir / "model")


# -- text ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_what_the_policy_will_be_asked_with(recipe: Make, trainings: dict[str, Training]) -> None:
    """Ids of the RL task's prompt for the same text, and the completion ends with what stops the sampler."""
    tokenizer = trainings["sft"].base.tokenizer
    chat = PromptedText.of(recipe("sft", "runs", "--sft.template=chat", "--sft.max_tokens=100"), tokenizer)
    made = chat.ids("hi", ["yes<|im_end|>"], "row")
    assert made.prompt.tolist() == tokenizer.apply_template([{"role": "user", "content": "hi"}])
    assert made.completions[0].tolist() == [*tokenizer.encode("yes<|im_end|>"), tokenizer.single_id("<|im_end|>")]
    assert made.completions[0][-1] in tokenizer.eos_ids and made.completions[0][-2] not in tokenizer.eos_ids
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert chat.ids(messages, ["x"], "row").prompt.tolist() == tokenizer.apply_template(messages)
    bare = PromptedText.of(recipe("sft", "runs", "--sft.end="), tokenizer)
    assert [x.tolist() for x in bare.ids("a", ["b"], "row").completions] == [tokenizer.encode("b")]


BAD_ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no column": ("sft", {"completion": 3}, r"sft.jsonl:1: 'completion' must be text, got int"),
    "prompt": ("sft", {"prompt": 3}, r":1: the prompt must be text or a list of messages, got 3"),
    "no Unicode, prompt": ("sft", {"prompt": "\ud800"}, r"sft.jsonl:1: "),
    "no Unicode, completion": ("dpo", {"chosen": "\ud800"}, r"dpo.jsonl:1: "),
    "empty": ("sft", {"prompt": ""}, r":1: the prompt is empty \(no token\)"),
    "the same": ("dpo", {"rejected": "x", "chosen": "x"}, r"dpo.jsonl:1: the two completions are the same"),
    "too long": ("dpo", {"chosen": "x" * 40}, r":1: prompt and completion are 44 tokens; expected at most 24"),
    "messages": ("sft", {"prompt": [{"role": "user", "content": "a"}]}, r'template = "plain" takes text'),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_and_leaves_no_run_behind(name: str, recipe: Make, tmp_path: Path) -> None:
    kind, change, words = BAD_ROWS[name]
    file = tmp_path / f"{kind}.jsonl"
    file.write_text(json.dumps(row(kind, 1) | change) + "\n")
    with pytest.raises(DataError, match=words):
        run_supervised(recipe(kind, tmp_path, f"--{kind}.data={file}"), console=quiet())
    assert list(tmp_path.iterdir()) == [file]


def test_texts_that_are_the_same_tokens_are_no_pair() -> None:
    """To a tokenizer that does not know their characters, or under a template that trims them."""
    require_different(np.array([1, 2]), np.array([1, 3]), "x.jsonl:1")
    with pytest.raises(DataError, match=r"x.jsonl:1: the two completions are the same 2 tokens.*neither is better"):
        require_different(np.array([1, 2]), np.array([1, 2]), "x.jsonl:1")


def test_what_does_not_fit_is_refused(recipe: Make, folder: Path, tmp_path: Path) -> None:
    refusals: list[tuple[str, tuple[str, ...], str]] = [
        ("sft", ("--sft.micro_batch_rows=8",), r"cannot hold one sequence of `sft.max_tokens` = 24 rows"),
        ("dpo", ("--cluster.actor.data=2", "--cluster.cpu_devices=1"), "but `cluster.actor` has 2 devices"),
        ("dpo", ("--dpo.beta=0",), "`dpo.beta`"),
        ("sft", ("--sft.bath_examples=3",), r"unknown key `sft.bath_examples`.*`sft.batch_examples`"),
    ]
    for kind, words, said in refusals:
        with pytest.raises(ConfigError, match=said):
            recipe(kind, tmp_path, *words)
    with pytest.raises(ConfigError, match=r"sft.max_tokens = 600, but .* was made for 512 positions"):
        make_training(recipe("sft", tmp_path, "--sft.max_tokens=600", "--sft.micro_batch_rows=600"))
    with pytest.raises(ConfigError, match=r"`optim.warmup_steps` = 99 is more than the 18 updates of this run"):
        make_training(recipe("sft", tmp_path, "--optim.warmup_steps=99"))
    for kind in KINDS:
        with pytest.raises(ConfigError, match=rf"a recipe with \[{kind}\] trains on a file"):
            parse_config(RECIPES[kind], overrides=[], folder=folder, where="x.toml")


@both
def test_the_command_recognises_the_recipe(kind: str, folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(folder / f"{kind}.toml"), "--name", "b", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert 'name = "b"' in out and "train (full, float32)" in out and "parameters/device" in out
    assert main(["keys", f"--{kind}", "batch_"]) == 0
    assert f"{kind}.batch_" in capsys.readouterr().out
    assert main(["run", str(folder / f"{kind}.toml"), f"--{kind}.epoch", "2"]) == 2
    assert f"`{kind}.epochs`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_reward_model_is_no_policy_to_start_from(recipe: Make, tmp_path: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    made = recipe("sft", tmp_path, f"--model.name={tmp_path / 'm'}")
    for act in (describe, make_training):
        with pytest.raises(ModelError, match="has a scalar head"):
            act(made)
    assert issubclass(ModelError, LockstepError)
