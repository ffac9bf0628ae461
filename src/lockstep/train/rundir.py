"""The run directory around the loop: claiming it, its dial and recipe, checkpoints, where a resume starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from lockstep import checkpoint, metrics, store
from lockstep.cluster.devices import enable_compilation_cache
from lockstep.config import Config
from lockstep.errors import CheckpointError
from lockstep.files import write_atomic
from lockstep.models.catalog import cache_dir
from lockstep.rollout.engine import json_digest
from lockstep.sync.sync import Counters
from lockstep.train.assembly import Cluster


@dataclass(frozen=True)
class ResumePoint:
    """step: the checkpoint to continue from. history: the metrics up to it."""

    step: int
    history: tuple[Mapping[str, Any], ...]


def claim_run_dir(config: Config) -> Path:
    """A fresh directory `dir/name`, or `dir/name-2`, `-3`, ... where runs of that name exist: nothing is overwritten.
    The resolved recipe is written into it."""
    number = 1
    while True:
        path = config.run.path if number == 1 else config.run.path.with_name(f"{config.run.name}-{number}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
    write_atomic(path / "recipe.toml", config.to_toml().encode())
    return path


def recipe_hash(config: Config) -> str:
    """Digest of what decides the numbers of a run: the recipe without the keys that may change on a resume (more steps
    under a constant learning rate, how often to checkpoint, names)."""
    tables = config.model_dump(mode="json")
    for key in ("name", "dir", "checkpoint_every"):
        tables["run"].pop(key)
    if config.optim.schedule == "constant":
        tables["run"].pop("steps")
    return json_digest(tables)


def save_checkpoint(run_dir: Path, config: Config, cluster: Cluster, counters: Counters, cursor: int) -> None:
    """Trainable leaves, optimizer state and counters after a step, its sync included."""
    published = cluster.sync.published
    assert published is not None and published.number == counters.version
    meta = {
        "step": counters.step,
        "version": counters.version,
        "syncs": counters.syncs,
        "digest": published.digest,
        "cursor": cursor,
        "recipe": recipe_hash(config),
        "jax": jax.__version__,
    }
    arrays = {"trainable": cluster.trainer.trainable, "optimizer": cluster.trainer.optimizer_state}
    checkpoint.save(run_dir, counters.step, arrays, meta)


def resume_point(run_dir: Path, config: Config) -> ResumePoint:
    """Where to continue, with everything the run wrote after that point taken back.

    Raises CheckpointError when there is no checkpoint or the recipe is not the one it was made under.
    """
    step = checkpoint.latest(run_dir)
    if step is None:
        raise CheckpointError(
            f"{run_dir} has no checkpoint to resume from; it stopped before the first one (run.checkpoint_every = "
            f"{config.run.checkpoint_every}). Start the recipe anew"
        )
    meta = checkpoint.read_meta(run_dir, step)
    if meta["recipe"] != recipe_hash(config):
        raise CheckpointError(
            f"checkpoint {step} of {run_dir} was made under another recipe; a resume may change run.steps (with a "
            f"constant learning rate) and run.checkpoint_every only. Start a new run for anything else"
        )
    if config.run.steps < step:
        raise CheckpointError(f"{run_dir} has done {step} steps already, the recipe asks for {config.run.steps}")
    metrics.truncate_after(run_dir / "metrics.jsonl", step)
    metrics.truncate_after(run_dir / "receipts.jsonl", step)
    store.truncate_after(run_dir / "trajectories", step)
    return ResumePoint(step, metrics.read_jsonl(run_dir / "metrics.jsonl").records)


def write_dial(run_dir: Path, cluster: Cluster) -> None:
    """`dial.json`: meshes, bytes per role, and the identity that trajectories carry, for the report."""
    content = cluster.dial.to_json(cluster.bytes_per_role) | {
        "environment": {
            "model": cluster.source,
            "numerics": cluster.config.numerics.mode,
            **{f"fingerprint of {name}": value for name, value in vars(cluster.fingerprint).items()},
        }
    }
    write_atomic(run_dir / "dial.json", json.dumps(content, indent=1).encode())


def keep_compiled_programs() -> None:
    """Compiled programs go to the cache folder, unless JAX_COMPILATION_CACHE_DIR says otherwise: the next run starts
    without compiling."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        enable_compilation_cache(cache_dir() / "compiled")
