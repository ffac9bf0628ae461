"""What a run of `benchmarks/loop.py` came to: medians, ratios, reward curves, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SIDES = ("lockstep", "trl")


@dataclass(frozen=True)
class Run:
    """One process. steps: a record per step with step, reward, completion_length and seconds (`step_s`, `generate_s`,
    `score_s`, `train_s`). process_s, process_cpu_s: wall-clock and CPU seconds, start and compilation included.
    prompt_ids: the different prompts of the first step. stop_ids: ids that end a completion, ascending."""

    side: str
    round: int
    seed: int
    process_s: float
    process_cpu_s: float
    prompt_ids: list[list[int]]
    stop_ids: list[int]
    versions: dict[str, str]
    steps: list[dict[str, float]]


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over all warm steps, ratios TRL / lockstep (overall, and the least and largest of a pair), rewards."""
    summary: dict[str, Any] = {}
    for side in SIDES:
        mine = [r for r in runs if r.side == side]
        warm = [s for r in mine for s in r.steps[1:]]
        seconds = {key: spread([s[key] for s in warm]) for key in ("step_s", "generate_s", "score_s", "train_s")}
        summary[side] = {
            **seconds,
            "first_step_s": spread([r.steps[0]["step_s"] for r in mine]),
            "process_s": spread([r.process_s for r in mine]),
            "process_cpu_s": spread([r.process_cpu_s for r in mine]),
            "completion_length": statistics.mean(s["completion_length"] for r in mine for s in r.steps),
            "reward": rewards(mine),
        }
    pairs = [
        median_step(theirs) / median_step(ours)
        for ours in runs
        for theirs in runs
        if (ours.side, theirs.side) == SIDES and (ours.round, ours.seed) == (theirs.round, theirs.seed)
    ]
    overall = summary["trl"]["step_s"]["median"] / summary["lockstep"]["step_s"]["median"]
    summary["step_ratio"] = {"median": overall, "min": min(pairs), "max": max(pairs)}
    return summary


def median_step(run: Run) -> float:
    """Seconds of a run's median step, its first left out."""
    return statistics.median(s["step_s"] for s in run.steps[1:])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def rewards(runs: Sequence[Run]) -> dict[str, Any]:
    """by_seed: reward of each step, a list per run; by_step: their mean; mean: over all steps and runs, the area under
    the curve; last_5: mean of each run's last 5 steps."""
    curves = [[s["reward"] for s in r.steps] for r in runs]
    return {
        "by_seed": curves,
        "by_step": [statistics.mean(step) for step in zip(*curves, strict=True)],
        "mean": statistics.mean(v for c in curves for v in c),
        "mean_by_seed": [statistics.mean(c) for c in curves],
        "last_5": statistics.mean(statistics.mean(c[-5:]) for c in curves),
    }


def time_table(summary: dict[str, Any]) -> str:
    """Seconds of both sides and their ratio, as Markdown."""
    lines = ["| seconds, median (least - largest) | lockstep, exact | TRL | TRL / lockstep |", "|---|---|---|---|"]
    names = {"step_s": "step", "generate_s": "of it generating", "train_s": "of it training"}
    names |= {"first_step_s": "first step", "process_s": "whole process", "process_cpu_s": "whole process, CPU seconds"}
    for key, name in names.items():
        ours, theirs = (summary[side][key] for side in SIDES)
        cells = [f"{v['median']:.2f} ({v['min']:.2f} - {v['max']:.2f})" for v in (ours, theirs)]
        ratio = f"{theirs['median'] / ours['median']:.2f}"
        if key == "step_s":
            ratio += " ({min:.2f} - {max:.2f} by pair)".format(**summary["step_ratio"])
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {ratio} |")
    return "\n".join(lines)


def learning_table(summary: dict[str, Any]) -> str:
    """Mean reward per step of both sides over the seeds, as Markdown, and their means in the last lines."""
    ours, theirs = (summary[side]["reward"] for side in SIDES)
    lines = ["| step | lockstep (per seed) | TRL (per seed) |", "|---|---|---|"]
    for i, (a, b) in enumerate(zip(ours["by_step"], theirs["by_step"], strict=True)):
        cells = [f"{m:.3f} ({', '.join(f'{c[i]:.2f}' for c in s['by_seed'])})" for m, s in ((a, ours), (b, theirs))]
        lines.append(f"| {i + 1} | {cells[0]} | {cells[1]} |")
    for name, key in (("mean of all steps", "mean"), ("mean of the last 5", "last_5")):
        lines.append(f"| {name} | {ours[key]:.3f} | {theirs[key]:.3f} |")
    return "\n".join(lines)
