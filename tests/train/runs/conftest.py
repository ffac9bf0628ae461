"""Whole runs on the tiny model: one recipe, its own data and rewards, and what a run left behind as plain values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lockstep import checkpoint, store
from lockstep.config import Config, parse_config
from lockstep.metrics import read_jsonl
from lockstep.progress import Progress
from lockstep.train import rundir
from lockstep.train.assembly import build
from lockstep.train.loop import Loop, run
from lockstep.types import Trajectory

RECIPE = """
run = { name = "run", dir = "runs", seed = 3, steps = 8, checkpoint_every = 3 }
model = { name = "./model" }
lora = { rank = 2, last_layers = 2 }
task = { kind = "file", path = "data.jsonl", max_prompt_tokens = 6 }
reward = { functions = [{ name = "run_rewards:even", weight = 2.0 }] }
rollout = { prompts = 3, samples = 4, max_new_tokens = 6, slots = 32, page_size = 16, stop = ["a", "e", "i", "o", "t"] }
optim = { lr = 0.02 }
train = { micro_batch_rows = 32 }
"""

REWARDS = '''
"""Rewards that can be told to fail. Which samples do depends on their text alone, so that it can be recomputed."""

import math
import os
import time


def even(prompts, completions, rows):
    """Share of characters with an even code point."""
    # For a step of twelve completions, by two workers.
    time.sleep(float(os.environ.get("REWARD_DELAY_S", "0")) * len(completions) / 6)
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in completions]


def odd_rows(prompts, completions, rows):
    """Tells apart only the completions of odd questions."""
    return [sum(map(ord, c)) % 97 if row["number"] % 2 else 1 for c, row in zip(completions, rows, strict=True)]


def length(prompts, completions, rows):
    return [len(text) for text in completions]


def same(prompts, completions, rows):
    return [1.0] * len(completions)


def raises(prompts, completions, rows):
    raise ValueError("no idea")


def not_a_number(prompts, completions, rows):
    return [math.nan] * len(completions)


def one_missing(prompts, completions, rows):
    return [1.0] * (len(completions) - 1)


def picky(prompts, completions, rows):
    """Refuses the whole group of question 3, and one other completion in three or so."""
    for text, row in zip(completions, rows, strict=True):
        if row["number"] == 3 or sum(map(ord, text)) % 3 == 0:
            raise ValueError(f"cannot judge {text!r}")
    return even(prompts, completions, rows)
'''


@dataclass(frozen=True)
class Kit:
    """A folder with a model, data and rewards. `config` makes recipes on them, with runs in the caller's folder."""

    folder: Path

    def config(self, runs: Path, *overrides: str, text: str = RECIPE) -> Config:
        words = [f"--run.dir={runs}", *overrides]
        return parse_config(text, overrides=words, folder=self.folder, where="recipe")


@pytest.fixture(scope="session")
def kit(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder = tmp_path_factory.mktemp("kit")
    shutil.copytree(tiny_folder, folder / "model")
    rows = [{"prompt": f"{n:02d}+1=", "number": n} for n in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run_rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(RECIPE)
    return Kit(folder)


def quiet() -> Console:
    return Console(file=StringIO(), force_terminal=False, width=200)


@pytest.fixture(scope="session")
def train() -> Callable[..., Path]:
    """`run` without a word: config -> run directory."""
    return lambda config, resume=None: run(config, resume=resume, console=quiet())


@contextmanager
def _opened(config: Config) -> Iterator[Loop]:
    """A fresh run's loop before its start, for tests that look between the steps."""
    cluster = build(config)
    run_dir = rundir.claim_run_dir(config.run)
    with (
        closing(cluster),
        Progress(config, run_dir, quiet()) as progress,
        Loop(cluster, run_dir, progress) as loop,
    ):
        yield loop


@pytest.fixture(scope="session")
def opened() -> Callable[[Config], Any]:
    """`_opened`: config -> context of a Loop."""
    return _opened


@dataclass(frozen=True)
class Left:
    """What a run left behind, as values that can be compared: no times, no paths."""

    path: Path

    def metrics(self, *without: str) -> list[dict[str, Any]]:
        records = read_jsonl(self.path / "metrics.jsonl").records
        clock = ("time/", "idle/")
        return [{k: v for k, v in r.items() if not k.startswith(clock) and k not in without} for r in records]

    def receipts(self) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in r.items() if k != "seconds"} for r in read_jsonl(self.path / "receipts.jsonl").records
        ]

    def step(self, number: int) -> store.StepRecord:
        return store.read_step(self.path / "trajectories", number)

    def trajectories(self) -> dict[int, list[dict[str, Any]]]:
        """step -> one dict per trajectory, arrays as bytes."""
        found = {}
        for number in store.steps(self.path / "trajectories"):
            record = self.step(number)
            extra = [dict(zip(record.extra, row, strict=True)) for row in zip(*record.extra.values(), strict=True)]
            found[number] = [
                {k: bits(v) for k, v in ((vars(t) | more | {"prompt": record.prompts[t.group_id]}).items())}
                for t, more in zip(record.trajectories, extra, strict=True)
            ]
            for row in found[number]:
                del row["generate_s"]
        return found

    def state(self, step: int) -> dict[str, list[Any]]:
        """leaf -> [dtype, shape, sha256] of a checkpoint."""
        return json.loads((self.path / "checkpoints" / str(step) / "checkpoint.json").read_text())["leaves"]

    def weights(self, step: int) -> dict[str, list[Any]]:
        return {path: leaf for path, leaf in self.state(step).items() if path.startswith("trainable/")}

    def meta(self, step: int) -> dict[str, Any]:
        return checkpoint.read_meta(self.path, step)


def bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    return repr(value) if isinstance(value, float) else value


@pytest.fixture(scope="session")
def left() -> Callable[[Path], Left]:
    """`Left`: run directory -> what is in it."""
    return Left


@pytest.fixture(scope="session")
def finished(kit: Kit, train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The recipe as it is, run to its end: eight steps, checkpoints after 3, 6 and 8. Not to be written to."""
    return Left(train(kit.config(tmp_path_factory.mktemp("finished"))))


@pytest.fixture(scope="session")
def tokens_of() -> Callable[[list[Trajectory], str], np.ndarray]:
    """(trajectories, field) -> the field of all their tokens, float64."""
    return lambda trajectories, name: np.concatenate([getattr(t, name) for t in trajectories]).astype(np.float64)
