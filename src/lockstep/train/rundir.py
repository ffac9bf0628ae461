"""The run directory around the loop: claiming it, its dial and recipe, checkpoints, where a resume starts."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

from lockstep import checkpoint, metrics, store
from lockstep.cluster.devices import enable_compilation_cache
from lockstep.config import Config
from lockstep.environment import write_environment
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files import write_atomic
from lockstep.models.fetch import cache_dir
from lockstep.sections import NamedRun
from lockstep.sync.receipt import Counters
from lockstep.train.assembly import Cluster, make_storage
from lockstep.train.footprint import bytes_per_role
from lockstep.types import Fingerprint

RunT = TypeVar("RunT", bound=NamedRun)
JUDGE_FREE = ("url", "api_key_env", "deadline_s", "retries", "concurrency")


@dataclass(frozen=True)
class ResumePoint:
    """Where a run continues. step: of the checkpoint. meta: what `save_checkpoint` wrote beside the arrays. history:
    the metrics up to that step."""

    step: int
    meta: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...]


def claim_run_dir(run: NamedRun) -> Path:
    """A fresh directory `dir/name`, or `dir/name-2`, `-3`, ... where runs of that name exist: nothing is overwritten.

    Raises ConfigError when it cannot be made.
    """
    number = 1
    while True:
        path = run.path if number == 1 else run.path.with_name(f"{run.name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"run.dir: the run directory {path} cannot be made ({error.strerror}); choose another run.dir"
            ) from error


def named(run: RunT, run_dir: Path) -> RunT:
    """The `[run]` table under the name that its run directory got, so that folder, panel and report agree."""
    return run.model_copy(update={"name": run_dir.name})


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keep other processes from writing into the run; the operating system lets go of it when this process ends,
    however it ends. Raises CheckpointError when another process holds it."""
    with (run_dir / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{run_dir} is being written by another process; wait for it or stop it, then resume"
            ) from error
        yield


def write_head(run_dir: Path, config: Config, cluster: Cluster) -> None:
    """`recipe.toml`, `dial.json` (meshes, bytes per role, the identity that trajectories carry) and
    `environment.json`: what the steps that follow are made under."""
    write_atomic(run_dir / "recipe.toml", config.to_toml().encode())
    content = cluster.dial.to_json(bytes_per_role(cluster)) | {
        "environment": {
            "model": cluster.source,
            "numerics": config.numerics.mode,
            "sampler": str(make_storage(config)),
            **{f"fingerprint of {name}": value for name, value in vars(cluster.fingerprint).items()},
        }
    }
    write_atomic(run_dir / "dial.json", json.dumps(content, indent=1).encode())
    write_environment(run_dir)


def fixed_keys(config: Config) -> dict[str, str]:
    """`section.key` -> value, as JSON, of every key that decides the numbers of a run. Left out are those that may
    change on a resume: names, how often to checkpoint, what is compiled when, how weights are synced (bit for bit,
    anyhow), under a constant learning rate the number of steps, and where model and data lie (it is their content that
    must be the same)."""
    free = {"run.name", "run.dir", "run.checkpoint_every", "model.name", "task.path", "task.folder", "reward.folder"}
    free |= {"algorithm.folder", "reward.workers"}
    free |= {f"rollout.{key}" for key in ("warm_up", "patience_s", "deadline_s", "url", "token_file")}
    if config.optim.schedule == "constant":
        free.add("run.steps")
    found = {
        f"{section}.{key}": json.dumps(value)
        for section, table in config.model_dump(mode="json").items()
        for key, value in (table or {}).items()
    }
    # Where a judge is, and how hard it is tried, decides nothing: its answers are greedy, and kept.
    judges = [j.model_dump(mode="json", exclude=set(JUDGE_FREE)) for j in config.reward.judges]
    found["reward.judges"] = json.dumps(judges)
    return {path: value for path, value in found.items() if path not in free and not path.startswith("sync.")}


def save_checkpoint(
    run_dir: Path, config: Config, cluster: Cluster, counters: Counters, cursor: int, task: str
) -> None:
    """Trainable leaves, optimizer state and counters after a step, its sync included. task: the data's identity."""
    published = cluster.sync.published
    assert published is not None and published.number == counters.version
    meta = {
        "step": counters.step,
        "version": counters.version,
        "syncs": counters.syncs,
        "digest": published.digest,
        "cursor": cursor,
        "task": task,
        "model": cluster.model_digest,
        "reward_models": {model.name: model.digest for model in cluster.reward_models},
        "recipe": fixed_keys(config),
        "fingerprint": vars(cluster.fingerprint),
        "jax": jax.__version__,
    }
    checkpoint.save(run_dir, counters.step, state_of(cluster), meta)


def state_of(cluster: Cluster) -> dict[str, Any]:
    """The arrays of a checkpoint: what trains, the optimizers' states, and a reference that moves."""
    arrays = {"trainable": cluster.trainer.trainable, "optimizer": cluster.trainer.optimizer_state}
    if cluster.reference is not None and cluster.reference.moving is not None:
        arrays["reference"] = cluster.reference.moving
    return arrays if cluster.critic is None else arrays | {"critic": cluster.critic.model.state}


def put_state(cluster: Cluster, arrays: Mapping[str, Any]) -> None:
    """Give the trainers what `state_of` named."""
    cluster.trainer.trainable, cluster.trainer.optimizer_state = arrays["trainable"], arrays["optimizer"]
    if cluster.critic is not None:
        cluster.critic.model.state = arrays["critic"]
    if "reference" in arrays and cluster.reference is not None:
        cluster.reference.moving = arrays["reference"]


def resume_point(run_dir: Path, config: Config) -> ResumePoint:
    """Where to continue. Reads only.

    Raises CheckpointError when there is no checkpoint or the recipe is not the one it was made under.
    """
    step = checkpoint.latest(run_dir)
    if step is None:
        raise CheckpointError(
            f"{run_dir} has no checkpoint to resume from; it stopped before the first one (run.checkpoint_every = "
            f"{config.run.checkpoint_every}). Start the recipe anew"
        )
    meta = checkpoint.read_meta(run_dir, step)
    was, now = meta["recipe"], fixed_keys(config)
    changed = [
        f"{path} was {was.get(path, 'unset')} and is {now.get(path, 'unset')}"
        for path in sorted(was.keys() | now.keys())
        if was.get(path) != now.get(path)
    ]
    if changed:
        raise CheckpointError(
            f"checkpoint {step} of {run_dir} was made under another recipe: {'; '.join(changed)}. A resume may change "
            "run.steps (with a constant learning rate), run.checkpoint_every, and the paths of model and data; start a "
            "new run for anything else"
        )
    if config.run.steps < step:
        raise CheckpointError(f"{run_dir} has done {step} steps already, the recipe asks for {config.run.steps}")
    records = metrics.read_jsonl(run_dir / "metrics.jsonl").records
    return ResumePoint(step, meta, tuple(record for record in records if record["step"] <= step))


def require_same_world(run_dir: Path, point: ResumePoint, cluster: Cluster, task: str) -> str | None:
    """Raise CheckpointError if data, model, tokenizer or decoding are not those of the checkpoint. Returns a warning
    where the run can go on, but not bit for bit: another jax version or kind of device."""
    here = f"checkpoint {point.step} of {run_dir}"
    if cluster.model_digest != point.meta["model"]:
        raise CheckpointError(
            f"{here} was made on other weights than {cluster.source} holds now (digest then {point.meta['model'][:8]}, "
            f"now {cluster.model_digest[:8]}); put the model back, or start a new run"
        )
    for model in cluster.reward_models:
        then = point.meta["reward_models"][model.name]
        if model.digest != then:
            raise CheckpointError(
                f"{here} was made with other weights of reward model {model.name!r} than its folder holds now (digest "
                f"then {then[:8]}, now {model.digest[:8]}); put the model back, or start a new run"
            )
    if task != point.meta["task"]:
        raise CheckpointError(
            f"{here} was made on other data: then {point.meta['task']}; now {task}. Put the data back, or start a new "
            "run"
        )
    changed = cluster.fingerprint.difference(Fingerprint(**point.meta["fingerprint"]))
    fatal = [name for name in changed if name != "numerics"]
    if fatal:
        raise CheckpointError(
            f"{here} was made under another {' and '.join(fatal)}; put the model's files back, or start a new run"
        )
    if not changed:
        return None
    return (
        f"{here} was made on another kind of device or version of jax (then {point.meta['jax']}, now "
        f"{jax.__version__}): the run goes on, but not bit for bit as it would have"
    )


def cut_back(run_dir: Path, step: int) -> None:
    """Take back what the run wrote after the checkpoint of `step`."""
    metrics.truncate_after(run_dir / "metrics.jsonl", step)
    metrics.truncate_after(run_dir / "receipts.jsonl", step)
    metrics.truncate_after(run_dir / "timeline.jsonl", step, reaches=False)
    store.truncate_after(run_dir / "trajectories", step)


def keep_compiled_programs() -> None:
    """Compiled programs go to the cache folder, or where JAX_COMPILATION_CACHE_DIR says: the next run starts without
    compiling."""
    enable_compilation_cache(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_dir() / "compiled")
