"""What the commands share: their numbers and texts, the run directory they are given, what they say."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.text import visible

Add = Callable[..., argparse.ArgumentParser]
"""Adds a command: its name, the function that runs it, its help."""


def number(kind: Callable[[str], Any], minimum: float, words: str) -> Callable[[str], Any]:
    """An argparse type: a finite number that is at least `minimum`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= minimum):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}")
        return value

    return parse


def escaped(text: str) -> str:
    r"""A text in which \n, \t and \\ stand for what they stand for in a recipe: shells hand them on as they are."""
    parts = text.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\t", "\t") for part in parts)


def shown(text: str) -> str:
    """What a model wrote: on a terminal it cannot move the cursor or change colours; a pipe gets it as it is."""
    return visible(text) if sys.stdout.isatty() else text


def say(line: str) -> None:
    """Tell the user what takes long, apart from the output."""
    print(line, file=sys.stderr, flush=True)


def run_directory(text: str) -> Path:
    """A folder that a run was written into. Raises: CheckpointError naming the runs that are there."""
    path = Path(text)
    if (path / "recipe.toml").is_file():
        return path
    what = "is not a run directory (it has no recipe.toml)" if path.is_dir() else "does not exist"
    for folder in dict.fromkeys([path, path.parent, Path("runs")]):
        runs = sorted(str(p.parent) for p in folder.glob("*/recipe.toml"))
        if runs:
            raise CheckpointError(f"{path} {what}; runs in {folder}: {', '.join(runs[:10])}")
    raise CheckpointError(f"{path} {what}; expected the folder of a run, such as runs/addition")
