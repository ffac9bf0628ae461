"""Training a reward model on preference pairs: `lockstep run` with a `[reward_model]` recipe.

    pairs -> scores at the last tokens -> Bradley-Terry loss -> update -> metrics, checkpoints, at the end a folder

An update sees all scores of its batch before any gradient is taken, so that loss and gradients are the same however
the sequences are cut into micro-batches. The run directory has `recipe.toml`, `metrics.jsonl`, `checkpoints/`,
`log.txt`, `environment.json` and, once it has ended, `model/`: a `ForSequenceClassification` folder.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from lockstep import checkpoint, metrics
from lockstep.algorithms.bradley_terry import bradley_terry
from lockstep.cluster.cuts import bytes_per_device
from lockstep.cluster.devices import available_devices
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.environment import write_environment
from lockstep.errors import CheckpointError, ConfigError, NumericsError
from lockstep.files import write_atomic
from lockstep.models.catalog import LoadedModel, load_spec, load_value_model
from lockstep.models.decoder import Numerics
from lockstep.models.hf import save_folder
from lockstep.models.lora import merge
from lockstep.models.spec import num_parameters, require_decoder
from lockstep.reward_recipe import RewardRecipe
from lockstep.sync.verify import leaf_digests, tree_digest
from lockstep.text import sanitize
from lockstep.train import rundir
from lockstep.train.batching import Geometry
from lockstep.train.policy import TRAINABLE_DTYPE, LeafSplit, value_leaves
from lockstep.train.preferences import Pair, Preferences, require_trainable, sequences_of
from lockstep.train.scored_text import ScoredText
from lockstep.train.sequences import at_last, last_of, sequence_batches
from lockstep.train.value_model import ValueModel, make_value_model

PAGE_SIZE = 16
MODEL = "model"
Say = Callable[[str], None]


class PairTrainer:
    """A reward model and its training on pairs. size: pairs of a batch at most, which the loss is compiled for."""

    def __init__(self, model: ValueModel, geometry: Geometry, size: int) -> None:
        self.model, self.geometry, self.size = model, geometry, size
        self._loss = jax.jit(jax.value_and_grad(bradley_terry, has_aux=True))

    def step(self, pairs: Sequence[Pair], number: int) -> dict[str, float]:
        """One update. number: how many came before. Metrics are of the weights that it started from.

        Raises NumericsError, before anything is changed, where a score or the gradient is not finite.
        """
        sequences, groups = sequences_of(pairs)
        batches, weights = sequence_batches(sequences, groups, self.geometry), self.model.weights
        scores = np.zeros(len(sequences), np.float32)
        # One pass is kept for its backward; of several, the states of all at once would not fit.
        kept = [self.model.forward(weights, batch) for batch in batches] if len(batches) == 1 else None
        for i, batch in enumerate(batches):
            flat = self.model.values(weights, batch) if kept is None else np.asarray(kept[i].values)
            last_of(batch, flat, scores)
        found, dscores = self._scored(pairs, scores)
        grads: dict[str, jax.Array] | None = None
        for i, batch in enumerate(batches):
            forward = self.model.forward(weights, batch) if kept is None else kept[i]
            dvalues = self.model.programs.put_rows(at_last(batch, dscores))
            grads = self.model.gradients(weights, forward, dvalues, grads)
        assert grads is not None, "a step needs at least one pair"
        return found | self.model.update(grads, number, "reward model")

    def measure(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Loss, accuracy and scores of any number of pairs; nothing is trained."""
        sums: dict[str, float] = {}
        for start in range(0, len(pairs), self.size):
            chunk = pairs[start : start + self.size]
            found, _ = self._scored(chunk, self.scores(*sequences_of(chunk)))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value * len(chunk) / len(pairs)
        return sums

    def scores(self, sequences: Sequence[np.ndarray], groups: Sequence[str]) -> np.ndarray:
        """[B] float32 at the last token of each sequence."""
        scores, weights = np.zeros(len(sequences), np.float32), self.model.weights
        for batch in sequence_batches(sequences, groups, self.geometry):
            last_of(batch, self.model.values(weights, batch), scores)
        return scores

    def _scored(self, pairs: Sequence[Pair], scores: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        """(metrics, the loss's gradient with respect to each score). scores: chosen and rejected in turn."""
        if not np.isfinite(scores).all():
            raise NumericsError(
                f"a score is {scores[~np.isfinite(scores)][0]}; the reward model's weights hold NaN or infinity, or "
                "overflowed. Resume from the newest checkpoint, with a lower optim.lr"
            )
        table, margins, mask = np.zeros((self.size, 2)), np.zeros(self.size), np.arange(self.size) < len(pairs)
        table[: len(pairs)] = scores.reshape(-1, 2)
        margins[: len(pairs)] = [pair.margin for pair in pairs]
        (_, found), gradient = self._loss(jnp.float32(table), jnp.float32(margins), mask)
        return {k: float(v) for k, v in found.items()}, np.asarray(gradient)[: len(pairs)].reshape(-1)


@dataclass
class Training:
    """Everything a step needs. base: the model that training started from, on the host."""

    recipe: RewardRecipe
    base: LoadedModel
    leaves: LeafSplit
    data: Preferences
    trainer: PairTrainer
    digest: str

    @property
    def steps(self) -> int:
        wanted = self.recipe.reward_model
        return wanted.epochs * self.data.batches_per_epoch(wanted.batch_pairs)


def make_training(recipe: RewardRecipe, say: Say | None = None) -> Training:
    """Load model and pairs and set up the trainer. Writes nothing; raises a LockstepError for what does not fit."""
    wanted, seed = recipe.reward_model, recipe.run.seed
    model = load_value_model(recipe.model.name, recipe.model.dtype, std=wanted.head_std, seed=seed, say=say)
    if wanted.max_tokens > model.spec.max_position:
        raise ConfigError(
            f"reward_model.max_tokens = {wanted.max_tokens}, but {recipe.model.name} was made for "
            f"{model.spec.max_position} positions; lower it"
        )
    data = Preferences.read(wanted, ScoredText(model.tokenizer, wanted.template, wanted.end, wanted.max_tokens), seed)
    require_trainable(data)
    leaves = value_leaves(recipe.lora, model.spec)
    shape = recipe.cluster.reward.axes
    dial = Dial.build({"reward": shape}, available_devices(recipe.cluster.cpu_devices))
    tile = recipe.numerics.tile_rows if recipe.numerics.mode == "exact" else 0
    scale = leaves.lora.scale if leaves.lora else 0.0
    num = Numerics(recipe.model.dtype, tile, PAGE_SIZE, scale, recipe.tensor_parts)
    programs = Programs(model.spec, num, dial.mesh("reward"), leaves.all)
    updates = wanted.epochs * data.batches_per_epoch(wanted.batch_pairs)
    value_model = make_value_model(model, programs, leaves, recipe.optim, (updates, 1), seed, {})
    geometry = Geometry(programs.row_shards, wanted.micro_batch_rows, tile, PAGE_SIZE)
    digest = tree_digest(leaf_digests(value_model.params))
    return Training(recipe, model, leaves, data, PairTrainer(value_model, geometry, wanted.batch_pairs), digest)


def describe(recipe: RewardRecipe) -> str:
    """The resolved recipe, and what the mesh holds: `--dry-run`. Reads numbers of the model and no weights."""
    spec = replace(load_spec(recipe.model.name), scalar_head=True)
    require_decoder(spec, recipe.model.name)
    leaves, axes = value_leaves(recipe.lora, spec), recipe.cluster.reward.axes
    dial = Dial.build({"reward": axes}, available_devices(recipe.cluster.cpu_devices))
    trained = bytes_per_device(leaves.trains, axes, jnp.dtype(TRAINABLE_DTYPE).itemsize)
    frozen = bytes_per_device(leaves.frozen, axes, jnp.dtype(recipe.model.dtype).itemsize)
    sizes = {"reward": {"parameters": frozen + trained, "optimizer": 2 * trained + 8, "gradients": 2 * trained}}
    count = sum(leaf.size for leaf in leaves.trains.values())
    return "\n".join(
        [
            recipe.to_toml().rstrip(),
            "",
            f"model: {recipe.model.name}: {num_parameters(spec):,} parameters with a scalar head, {count:,} train "
            f"({'LoRA and the head' if leaves.lora else 'full'}, {TRAINABLE_DTYPE})",
            "",
            dial.describe(sizes, leaves.all),
            "activations come on top and are not counted",
        ]
    )


def run_reward_model(recipe: RewardRecipe, *, resume: Path | None = None, console: Console | None = None) -> Path:
    """Train as the recipe says; returns the run directory.

    resume: a run directory to continue from its newest checkpoint, bit for bit. Raises a LockstepError for anything the
    user can mend; a recipe that does not work leaves no directory behind.
    """
    rundir.keep_compiled_programs()
    console = console or Console()
    with ExitStack() as stack:
        if resume is not None:
            stack.enter_context(rundir.held(resume))
        training = make_training(recipe, say=lambda line: console.print(Text(sanitize(line))))
        if resume is None:
            run_dir = rundir.claim_run_dir(recipe.run)
            recipe = training.recipe = recipe.model_copy(update={"run": rundir.named(recipe.run, run_dir)})
            stack.enter_context(rundir.held(run_dir))
            write_atomic(run_dir / "recipe.toml", recipe.to_toml().encode())
        else:
            run_dir = resume
        write_environment(run_dir)

        def say(line: str) -> None:
            with (run_dir / "log.txt").open("a", encoding="utf-8") as log:
                log.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {sanitize(line)}\n")
            console.print(Text(sanitize(line)), soft_wrap=True, highlight=False)

        first = _restore(training, run_dir) if resume is not None else 0
        say(f"{training.data.identity}; {training.steps} updates, run directory {run_dir}")
        if first:
            say(f"resumed after update {first}")
        log = stack.enter_context(metrics.StepLog(run_dir / "metrics.jsonl"))
        for number in range(first, training.steps):
            record = _turn(training, number)
            log.write(record)
            console.print(Text(_line(record, training.steps)), soft_wrap=True, highlight=False)
            if _due(recipe, number + 1, training.steps):
                _save(training, run_dir, number + 1)
        if not (run_dir / MODEL).exists():  # written whole or not at all
            export(training, run_dir / MODEL)
        say(f"reward model: {run_dir / MODEL}")
    return run_dir


def _turn(training: Training, number: int) -> dict[str, Any]:
    """One update and its record; where a checkpoint is due, also what the held-out pairs say afterwards."""
    wanted, began = training.recipe.reward_model, time.perf_counter()
    pairs = training.data.batch(number, wanted.batch_pairs, training.recipe.run.seed)
    record: dict[str, Any] = {"step": number + 1, **training.trainer.step(pairs, number), "pairs": len(pairs)}
    record["epoch"] = (number + 1) / training.data.batches_per_epoch(wanted.batch_pairs)
    if training.data.held_out and _due(training.recipe, number + 1, training.steps):
        record |= {f"eval/{k}": v for k, v in training.trainer.measure(training.data.held_out).items()}
    return record | {"time/step_s": time.perf_counter() - began}


def _due(recipe: RewardRecipe, step: int, steps: int) -> bool:
    every = recipe.run.checkpoint_every
    return step == steps or bool(every and step % every == 0)


def _line(record: dict[str, Any], steps: int) -> str:
    shown = ("loss", "accuracy", "margin", "grad_norm", "lr", "eval/loss", "eval/accuracy")
    numbers = "  ".join(f"{name} {record[name]:.4g}" for name in shown if name in record)
    return f"step {record['step']}/{steps}  {numbers}  {record['time/step_s']:.2f}s"


def _meta(training: Training, step: int) -> dict[str, Any]:
    recipe = training.recipe.model_dump(mode="json")
    # Where things lie may change; what the pairs are is in `data`.
    for table, name in (("run", "name"), ("run", "dir"), ("run", "checkpoint_every"), ("model", "name"),
                        ("reward_model", "data"), ("reward_model", "eval_data")):  # fmt: skip
        recipe[table].pop(name)
    return {"step": step, "data": training.data.identity, "model": training.digest, "recipe": recipe}


def _save(training: Training, run_dir: Path, step: int) -> None:
    checkpoint.save(run_dir, step, training.trainer.model.state, _meta(training, step))


def _restore(training: Training, run_dir: Path) -> int:
    """Take up the newest checkpoint and cut the metrics back to it; returns how many updates it has seen."""
    step = checkpoint.latest(run_dir)
    if step is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to resume from; start the recipe anew")
    was, now = checkpoint.read_meta(run_dir, step), _meta(training, step)
    for name, words in (("recipe", "recipe"), ("data", "preference pairs"), ("model", "model to start from")):
        if was[name] != now[name]:
            raise CheckpointError(
                f"{run_dir}: the {words} changed since checkpoint {step} ({_first_change(was[name], now[name])}); put "
                "it back, or start a new run"
            )
    training.trainer.model.state, _ = checkpoint.restore(run_dir, step, training.trainer.model.state)
    metrics.truncate_after(run_dir / "metrics.jsonl", step)
    return step


def _first_change(was: Any, now: Any, path: str = "") -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        name = next(k for k in sorted(was.keys() | now.keys()) if was.get(k) != now.get(k))
        return _first_change(was.get(name), now.get(name), f"{path}.{name}" if path else name)
    return f"{path} was {was!r:.80} and is {now!r:.80}".strip()


def export(training: Training, to: Path) -> None:
    """The reward model as a `ForSequenceClassification` folder, an adapter merged in, in the type that it was loaded
    in. Raises ModelError when `to` exists."""
    model, base, lora = training.trainer.model, training.base, training.leaves.lora
    trained = {path: np.asarray(array) for path, array in model.trainable.items()}
    whole = {path: array.astype(base.params["embed"].dtype) for path, array in trained.items() if path in base.params}
    params = base.params | whole
    if lora is not None:
        params = merge(params, trained, lora.scale)
    with tempfile.TemporaryDirectory() as scratch:
        base.tokenizer.save(scratch)
        Path(scratch, "config.json").write_text(json.dumps({"eos_token_id": sorted(base.tokenizer.eos_ids)}))
        save_folder(to, base.spec, params, tokenizer_files_from=scratch)
