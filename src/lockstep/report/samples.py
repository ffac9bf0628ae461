"""Completions to read: for a few steps the best, the worst and a random one, with everything known about them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from lockstep.report.data import RunData, read_trajectories
from lockstep.store import StepRecord
from lockstep.text import number

SAMPLE_STEPS = 6
SAMPLE_CHARACTERS = 4000


@dataclass(frozen=True)
class Sample:
    """One completion to read. kind: why it was picked."""

    kind: str
    prompt: str
    completion: str
    facts: tuple[tuple[str, str], ...]
    reward: float


def pick_samples(run: RunData) -> list[tuple[int, list[Sample]]]:
    """For a few steps from first to last: the best, the worst and a random completion."""
    steps = run.trajectory_steps
    count = min(SAMPLE_STEPS, len(steps))
    picked = sorted({steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)})
    read = ((step, read_trajectories(run, step)) for step in picked)
    return [(step, _samples_of(record)) for step, record in read if record is not None and record.trajectories]


def _samples_of(record: StepRecord) -> list[Sample]:
    rows = range(len(record.trajectories))
    scored = [i for i in rows if math.isfinite(record.trajectories[i].reward)]
    choices: dict[int, str] = {}
    if scored:
        choices[max(scored, key=lambda i: record.trajectories[i].reward)] = "best"
        choices.setdefault(min(scored, key=lambda i: record.trajectories[i].reward), "worst")
    failed = [i for i in rows if record.trajectories[i].failed is not None]
    if failed:
        choices.setdefault(failed[0], "failed")
    # Seeded by the step: the same run gives the same page.
    rest = [i for i in rows if i not in choices]
    if rest:
        choices[random.Random(record.step).choice(rest)] = "random"
    return [_sample(record, i, kind) for i, kind in choices.items()]


def _sample(record: StepRecord, row: int, kind: str) -> Sample:
    t = record.trajectories[row]
    versions = sorted(set(t.versions.tolist()))
    facts = [("reward", number(t.reward))]
    if (advantage := record.extra.get("advantage")) is not None and advantage[row] is not None:
        facts.append(("advantage", f"{advantage[row]:+.3g}"))
    facts += [
        ("ends by", t.finish_reason),
        ("tokens", str(t.num_sampled)),
        ("policy", ", ".join(f"v{v}" for v in versions) or "-"),
        ("group", f"{t.group_id} #{t.index}"),
    ]
    if t.failed is not None:
        facts.append(("failed", shortened(t.failed)))
    return Sample(kind, shortened(record.prompts[t.group_id]), shortened(t.text), tuple(facts), t.reward)


def shortened(text: str) -> str:
    """Text as it is, cut when very long."""
    more = len(text) - SAMPLE_CHARACTERS
    return text if more <= 0 else f"{text[:SAMPLE_CHARACTERS]}\n… {more} more characters in the trajectory file"
