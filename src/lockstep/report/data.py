"""Reads a run directory into one value, and says what it could not read."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import checkpoint, store
from lockstep.environment import FILE as ENVIRONMENT
from lockstep.errors import CheckpointError
from lockstep.metrics import read_jsonl

LOG_LINES = 200


@dataclass
class RunData:
    """What a run directory holds. notes: what is missing, unfinished or damaged, in words for the page.

    recipe: parsed; recipe_text: as written. steps: what the recipe plans, None when unknown. dial, environment: empty
    when not written (a dial may bring an `environment` of its own). log: the last lines of `log.txt`.
    """

    path: Path
    records: tuple[dict[str, Any], ...] = ()
    receipts: tuple[dict[str, Any], ...] = ()
    timeline: tuple[dict[str, Any], ...] = ()
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    dial: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    trajectory_steps: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def get(self, table: str, key: str, default: Any = None) -> Any:
        """A value of the recipe."""
        section = self.recipe.get(table)
        return section.get(key, default) if isinstance(section, dict) else default

    @property
    def steps(self) -> int | None:
        return self.get("run", "steps")

    @property
    def name(self) -> str:
        """The folder's name: the recipe's, with a number when there were several runs of it."""
        return self.path.resolve().name

    def column(self, key: str) -> list[float | None]:
        """One number per step; None where the record has none. NaN and infinities stay what they are."""
        return [
            v if isinstance(v := r.get(key), int | float) and not isinstance(v, bool) else None for r in self.records
        ]

    def names(self, prefix: str) -> list[str]:
        """Metric names that start with `prefix`, in order of first appearance."""
        return list(dict.fromkeys(k for r in self.records for k in r if k.startswith(prefix)))


def read_run(path: Path) -> RunData:
    """Read a run directory, whatever state it is in.

    Raises CheckpointError only when `path` is not a run directory at all: no recipe.toml and no metrics.jsonl.
    """
    if not (path / "recipe.toml").is_file() and not (path / "metrics.jsonl").is_file():
        raise CheckpointError(f"{path} is not a run directory: it has neither recipe.toml nor metrics.jsonl")
    run = RunData(path)
    _read_recipe(run)
    run.records = _read_log(run, "metrics.jsonl", "no step has finished")
    if not all(isinstance(r.get("step"), int) for r in run.records):
        run.notes.append("metrics.jsonl has records without a `step` and is left out: something else wrote into it.")
        run.records = ()
    run.receipts = _read_log(run, "receipts.jsonl", "no weight sync is shown")
    if (path / "timeline.jsonl").is_file():
        run.timeline = _read_log(run, "timeline.jsonl", "no time lines are shown")
    run.dial = _read_json(run, "dial.json", "the mesh picture is left out")
    run.environment = flat(run.dial.get("environment", {}))
    if (path / ENVIRONMENT).is_file() or not run.environment:
        run.environment |= _read_json(run, ENVIRONMENT, "versions and devices are unknown")
    if (path / "log.txt").is_file():
        run.log = (path / "log.txt").read_text(errors="backslashreplace").splitlines()[-LOG_LINES:]
    run.checkpoints = checkpoint.steps(path)
    run.trajectory_steps = store.steps(path / "trajectories")
    if not run.trajectory_steps:
        why = " (train.save_trajectories is false)" if run.get("train", "save_trajectories") is False else ""
        run.notes.append(f"No trajectories are stored{why}: there are no samples to read.")
    return run


def read_trajectories(run: RunData, step: int) -> store.StepRecord | None:
    """One step's trajectories; None, with a note, when the file is damaged."""
    try:
        return store.read_step(run.path / "trajectories", step)
    except CheckpointError as error:
        run.notes.append(f"The trajectories of step {step} cannot be read: {error}")
        return None


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested mappings as one, `{"a": {"b": 1}}` as `{"a b": 1}`."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{before}{key} ") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return out


def finite(values: list[float | None]) -> list[float]:
    """The values that are numbers."""
    return [v for v in values if v is not None and math.isfinite(v)]


def mean(values: list[float | None]) -> float | None:
    """Mean of the values that are numbers, None when there are none."""
    known = finite(values)
    return sum(known) / len(known) if known else None


def _read_recipe(run: RunData) -> None:
    try:
        run.recipe_text = (run.path / "recipe.toml").read_text()
        run.recipe = tomllib.loads(run.recipe_text)
    except FileNotFoundError:
        run.notes.append("recipe.toml is missing: what was planned is unknown.")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        run.notes.append(f"recipe.toml cannot be read: {error}")


def _read_log(run: RunData, name: str, without: str) -> tuple[dict[str, Any], ...]:
    if not (run.path / name).is_file():
        run.notes.append(f"{name} is missing: {without}.")
        return ()
    try:
        log = read_jsonl(run.path / name)
    except CheckpointError as error:
        run.notes.append(f"{name} is damaged and left out: {error}")
        return ()
    if log.torn is not None:
        run.notes.append(f"{name} ends in an unfinished line, left out: its writer was killed in the middle of it.")
    return log.records


def _read_json(run: RunData, name: str, without: str) -> dict[str, Any]:
    try:
        value = json.loads((run.path / name).read_text())
    except FileNotFoundError:
        run.notes.append(f"{name} is missing: {without}.")
        return {}
    except ValueError as error:
        run.notes.append(f"{name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        run.notes.append(f"{name} cannot be read: expected an object, got {type(value).__name__}")
        return {}
    return value
