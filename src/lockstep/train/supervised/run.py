"""A run of supervised training: `lockstep run` with a `[reward_model]`, `[sft]` or `[dpo]` recipe.

The run directory has `recipe.toml`, `metrics.jsonl`, `checkpoints/`, `log.txt`, `environment.json` and, once it has
ended, `model/`: a Hugging Face folder, `ForSequenceClassification` of a reward model, `ForCausalLM` of a policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from lockstep import checkpoint, metrics
from lockstep.cluster.cuts import bytes_per_device
from lockstep.cluster.devices import available_devices
from lockstep.cluster.mesh import Dial
from lockstep.cluster.shared import shared_programs
from lockstep.environment import write_environment
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files import write_atomic
from lockstep.models.catalog import LoadedModel, load_spec
from lockstep.models.decoder import Numerics
from lockstep.models.lora import merge
from lockstep.models.spec import num_parameters
from lockstep.rollout.generate import PAGE_SIZE
from lockstep.supervised_recipe import DpoRecipe, RewardRecipe, SftRecipe, SupervisedRecipe
from lockstep.sync.verify import leaf_digests, tree_digest
from lockstep.text import sanitize
from lockstep.train import rundir
from lockstep.train.batching import Geometry
from lockstep.train.export import write_model
from lockstep.train.policy import TRAINABLE_DTYPE, LeafSplit, trained_leaves
from lockstep.train.supervised.examples import Examples
from lockstep.train.supervised.likelihood import DpoObjective, SftObjective
from lockstep.train.supervised.objective import Objective, SupervisedTrainer
from lockstep.train.supervised.reward import PairObjective
from lockstep.train.trained_model import make_trained_model

MODEL = "model"
Say = Callable[[str], None]
OBJECTIVES: Mapping[type[SupervisedRecipe], type[Objective[Any]]] = {
    RewardRecipe: PairObjective,
    SftRecipe: SftObjective,
    DpoRecipe: DpoObjective,
}


@dataclass
class Training:
    """Everything a step needs. base: the model that training started from, on the host; digest: of its weights."""

    recipe: SupervisedRecipe
    base: LoadedModel
    leaves: LeafSplit
    data: Examples[Any]
    trainer: SupervisedTrainer[Any]
    digest: str

    @property
    def steps(self) -> int:
        wanted = self.recipe.examples
        return wanted.epochs * self.data.batches_per_epoch(wanted.batch)


def make_training(recipe: SupervisedRecipe, say: Say | None = None) -> Training:
    """Load model and examples and set up the trainer. Writes nothing; raises a LockstepError for what does not fit."""
    kind, wanted, seed = OBJECTIVES[type(recipe)], recipe.examples, recipe.run.seed
    model = kind.load(recipe, say)
    if wanted.max_tokens > model.spec.max_position:
        raise ConfigError(
            f"{recipe.TABLE}.max_tokens = {wanted.max_tokens}, but {recipe.model.name} was made for "
            f"{model.spec.max_position} positions; lower it"
        )
    objective = kind(recipe, model)
    data = objective.read()
    leaves = trained_leaves(recipe.lora, model.spec)
    dial = Dial.build({recipe.ROLE: recipe.mesh.axes}, available_devices(recipe.cpu_devices))
    tile = recipe.numerics.tile_rows if recipe.numerics.mode == "exact" else 0
    scale = leaves.lora.scale if leaves.lora else 0.0
    num = Numerics(recipe.model.dtype, tile, PAGE_SIZE, scale, recipe.tensor_parts)
    programs = shared_programs(model.spec, num, dial.mesh(recipe.ROLE), leaves.all)
    updates = wanted.epochs * data.batches_per_epoch(wanted.batch)
    if recipe.optim.warmup_steps > updates:
        raise ConfigError(
            f"`optim.warmup_steps` = {recipe.optim.warmup_steps} is more than the {updates} updates of this run: its "
            "learning rate would never be reached; use fewer"
        )
    trained = make_trained_model(model, programs, leaves, recipe.optim, (updates, 1), seed, {})
    geometry = Geometry(programs.row_shards, wanted.micro_batch_rows, tile, PAGE_SIZE)
    trainer = SupervisedTrainer(trained, objective, geometry, wanted.batch)
    digest = tree_digest(leaf_digests(trained.params))
    return Training(recipe, model, leaves, objective.prepared(data, trainer, say), trainer, digest)


def describe(recipe: SupervisedRecipe, say: Say | None = None) -> str:
    """The resolved recipe, and what the mesh holds: `--dry-run`. Reads numbers of the model and no weights."""
    spec = OBJECTIVES[type(recipe)].spec(load_spec(recipe.model.name, say=say), recipe.model.name)
    leaves, axes = trained_leaves(recipe.lora, spec), recipe.mesh.axes
    dial = Dial.build({recipe.ROLE: axes}, available_devices(recipe.cpu_devices))
    trained = bytes_per_device(leaves.trains, axes, jnp.dtype(TRAINABLE_DTYPE).itemsize)
    frozen = bytes_per_device(leaves.frozen, axes, jnp.dtype(recipe.model.dtype).itemsize)
    sizes: dict[str, dict[str, int]] = {
        recipe.ROLE: {"parameters": frozen + trained, "optimizer": 2 * trained + 8, "gradients": 2 * trained}
    }
    count = sum(leaf.size for leaf in leaves.trains.values())
    head = " with a scalar head" if spec.scalar_head else ""
    what = "full" if leaves.lora is None else "LoRA and the head" if spec.scalar_head else "LoRA"
    return "\n".join(
        [
            recipe.to_toml().rstrip(),
            "",
            f"model: {recipe.model.name}: {num_parameters(spec):,} parameters{head}, {count:,} train ({what}, "
            f"{TRAINABLE_DTYPE})",
            "",
            dial.describe(sizes, leaves.all),
            "activations come on top and are not counted",
        ]
    )


def run_supervised(recipe: SupervisedRecipe, *, resume: Path | None = None, console: Console | None = None) -> Path:
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
        say(f"{training.trainer.objective.NAME}: {run_dir / MODEL}")
    return run_dir


def _turn(training: Training, number: int) -> dict[str, Any]:
    """One update and its record; where a checkpoint is due, also what the held-out examples say afterwards."""
    trainer, size, began = training.trainer, training.recipe.examples.batch, time.perf_counter()
    items = training.data.batch(number, size, training.recipe.run.seed)
    record: dict[str, Any] = {"step": number + 1, **trainer.step(items, number), **trainer.objective.counts(items)}
    record["epoch"] = (number + 1) / training.data.batches_per_epoch(size)
    if training.data.held_out and _due(training.recipe, number + 1, training.steps):
        record |= {f"eval/{k}": v for k, v in trainer.measure(training.data.held_out).items()}
    return record | {"time/step_s": time.perf_counter() - began}


def _due(recipe: SupervisedRecipe, step: int, steps: int) -> bool:
    every = recipe.run.checkpoint_every
    return step == steps or bool(every and step % every == 0)


def _line(record: dict[str, Any], steps: int) -> str:
    shown = ("loss", "accuracy", "margin", "grad_norm", "lr", "eval/loss", "eval/accuracy")
    numbers = "  ".join(f"{name} {record[name]:.4g}" for name in shown if name in record)
    return f"step {record['step']}/{steps}  {numbers}  {record['time/step_s']:.2f}s"


def _meta(training: Training, step: int) -> dict[str, Any]:
    recipe = training.recipe.model_dump(mode="json")
    # Where things lie may change; what the examples are is in `data`.
    for table, name in (("run", "name"), ("run", "dir"), ("run", "checkpoint_every"), ("model", "name"),
                        (training.recipe.TABLE, "data"), (training.recipe.TABLE, "eval_data")):  # fmt: skip
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
    for name, words in (("recipe", "recipe"), ("data", "examples"), ("model", "model to start from")):
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
    """What was trained as a Hugging Face folder, an adapter merged in, in the type that it was loaded in. Raises
    ModelError when `to` exists."""
    model, base, lora = training.trainer.model, training.base, training.leaves.lora
    trained = {path: np.asarray(array) for path, array in model.trainable.items()}
    whole = {path: array.astype(base.params["embed"].dtype) for path, array in trained.items() if path in base.params}
    params = base.params | whole
    if lora is not None:
        params = merge(params, trained, lora.scale)
    write_model(to, base, params)
