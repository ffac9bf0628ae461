"""Puts the page together: numbers, charts, samples and tables, rendered by the template in `assets/`."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lockstep.files import write_atomic
from lockstep.report.charts import Series, line_chart, rolling_mean, stacked_bars
from lockstep.report.data import RunData, finite, mean, read_run
from lockstep.report.figures import Figure, last
from lockstep.report.receipts import receipt_row, sync_figures, sync_summary
from lockstep.report.samples import pick_samples
from lockstep.report.timelines import timeline_figure
from lockstep.text import duration, format_bytes, number, visible

PHASES = ("generate", "score", "train", "sync", "wait")
TABLE_ROWS = 2000


@dataclass(frozen=True)
class Tile:
    """One headline number. good: True or False colours it, None does not."""

    label: str
    value: str
    note: str
    good: bool | None = None


@dataclass(frozen=True)
class Quantity:
    """What a small chart shows. keys: metric -> label. always: draw it even when it never changes."""

    title: str
    unit: str
    keys: Mapping[str, str]
    note: str = ""
    limit: tuple[str, float] | None = None
    always: bool = False


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory, from what is there now, and return its path.

    Raises CheckpointError when it is not a run directory.
    """
    page = render(read_run(run_dir))
    path = run_dir / "report.html"
    write_atomic(path, page.encode("utf-8", errors="backslashreplace"))
    return path


def render(run: RunData) -> str:
    """The page as HTML."""
    figures, constants = _figures(run)
    samples = pick_samples(run)  # before the template, because reading them can add notes
    assets = files("lockstep.report").joinpath("assets")
    script = assets.joinpath("script.js").read_text() + assets.joinpath("tables.js").read_text()
    environment = jinja2.Environment(
        autoescape=True, finalize=_finalize, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"bytes": format_bytes, "duration": duration, "number": number}
    template = environment.from_string(assets.joinpath("page.html").read_text())
    return template.render(
        run=run,
        state=_state(run),
        subtitle=_subtitle(run),
        tiles=_tiles(run),
        reward=_reward_figure(run) if run.records else None,
        figures=figures,
        constants=constants,
        time=_time_figure(run) if run.records else None,
        shares=_time_shares(run),
        strips=timeline_figure(run),
        dial=_dial(run),
        receipts=[receipt_row(r) for r in run.receipts[-TABLE_ROWS:]],
        sync=sync_summary(run),
        sync_figures=sync_figures(run),
        samples=samples,
        columns=list(dict.fromkeys(k for r in run.records for k in r)),
        rows=run.records[-TABLE_ROWS:],
        table_rows=TABLE_ROWS,
        style=Markup(assets.joinpath("style.css").read_text()),
        script=Markup(script),
        # The only script that may run is ours: even markup that got through would be dead.
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _finalize(value: Any) -> Any:
    """Every string that the template prints comes through here, whoever wrote it: nothing invisible gets out."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _state(run: RunData) -> tuple[str, str]:
    """(style, words): how far the run got."""
    done = run.records[-1]["step"] if run.records else 0
    if run.steps is None:
        return "unknown", f"{done} steps done"
    if done >= run.steps:
        return "finished", f"finished, {done} of {run.steps} steps"
    return "partial", f"{done} of {run.steps} steps done"


def _subtitle(run: RunData) -> str:
    task = " ".join(str(v) for key in ("kind", "dataset", "path", "function") if (v := run.get("task", key)))
    lora = f"LoRA rank {run.get('lora', 'rank')}" if "lora" in run.recipe else "all weights"
    parts = [run.get("model", "name"), lora, run.get("algorithm", "name"), task, run.get("numerics", "mode")]
    return " · ".join(str(p) for p in parts if p) if run.recipe else ""


def _tiles(run: RunData) -> list[Tile]:
    rewards, seconds = run.column("reward"), finite(run.column("time/step_s"))
    tiles = [
        _reward_tile(rewards),
        Tile("Steps", f"{len(run.records)}" + (f" / {run.steps}" if run.steps else ""), _checkpoint_note(run)),
        Tile("Wall-clock", duration(sum(seconds)) if seconds else "-", _per_step(seconds)),
        _mismatch_tile(run),
        Tile("Policy versions", str(_versions(run)), "published after verification"),
    ]
    # Where batches are sampled ahead, the loop waits for less than what sampling takes.
    sampling = "time/rollout_s" if run.names("time/rollout_s") else "time/generate_s"
    tokens, generating = finite(run.column("tokens/generated")), finite(run.column(sampling))
    if tokens and sum(generating) > 0:
        tiles.append(Tile("Tokens generated", f"{sum(tokens):,.0f}", f"{sum(tokens) / sum(generating):.0f} per second"))
    return tiles


def _reward_tile(rewards: list[float | None]) -> Tile:
    first, last = mean(rewards[:5]), mean(rewards[-5:])
    if first is None or last is None:
        return Tile("Mean reward", "-", "no step has one")
    if len(rewards) <= 5:
        return Tile("Mean reward", f"{first:.3f}", f"over {len(rewards)} {'step' if len(rewards) == 1 else 'steps'}")
    return Tile("Mean reward", f"{first:.3f} → {last:.3f}", "first 5 steps → last 5 steps", last > first)


def _mismatch_tile(run: RunData) -> Tile:
    """The largest |trainer - sampler| log-probability; a NaN counts as the worst."""
    values = [v for v in run.column("mismatch/max_abs") if v is not None]
    if not values:
        return Tile("Mismatch", "-", "not measured")
    worst = math.nan if any(math.isnan(v) for v in values) else max(values)
    if worst == 0:
        return Tile("Mismatch", "0", "trainer = sampler, every token, every step", True)
    exact = run.get("numerics", "mode") == "exact"
    return Tile("Mismatch", f"{worst:.2g}", "largest |Δ log-probability|, nats", False if exact else None)


def _versions(run: RunData) -> int:
    if run.receipts:
        return len({r.get("version") for r in run.receipts})
    return len({v for v in run.column("policy_version") if v is not None})


def _checkpoint_note(run: RunData) -> str:
    kept = run.checkpoints
    return f"checkpoint at {', '.join(map(str, kept[-3:]))}" if kept else "no checkpoint"


def _per_step(seconds: list[float]) -> str:
    if not seconds:
        return "no step finished"
    return f"{duration(sorted(seconds)[len(seconds) // 2])} per step (median), start-up not counted"


def _steps(run: RunData) -> list[int]:
    return [r["step"] for r in run.records]


def _reward_figure(run: RunData) -> Figure:
    rewards = run.column("reward")
    series = [
        Series("reward", rewards, "s1", "points"),
        Series("mean of the last 5 steps", rolling_mean(rewards, 5), "s1"),
    ]
    chart = line_chart("Mean reward per step", _steps(run), series, size=(1140, 300))
    legend = (("s1 dot", "each step"), ("s1", "mean of the last 5 steps"))
    return Figure("Reward", "mean over all completions of a step", last(rewards), chart, legend)


def _figures(run: RunData) -> tuple[list[Figure], list[tuple[str, str]]]:
    """The small charts, one per quantity that was measured, and (name, value) of those that never changed."""
    figures: list[Figure] = []
    constants: list[tuple[str, str]] = []
    for quantity in _quantities(run):
        found = {key: label for key, label in quantity.keys.items() if any(v is not None for v in run.column(key))}
        columns = [run.column(key) for key in found]
        if not found:
            continue
        if not quantity.always and len(run.records) > 1 and all(len(set(column)) == 1 for column in columns):
            for column, label in zip(columns, found.values(), strict=True):
                constants.append((label if len(found) > 1 else quantity.title.lower(), number(column[0])))
            continue
        series = [
            Series(label, c, f"s{i + 1}") for i, (c, label) in enumerate(zip(columns, found.values(), strict=True))
        ]
        legend = tuple((s.style, s.label) for s in series) if len(series) > 1 else ()
        chart = line_chart(quantity.title, _steps(run), series, limit=quantity.limit)
        figures.append(Figure(quantity.title, quantity.unit, last(columns[0]), chart, legend, quantity.note))
    return figures, constants


def _quantities(run: RunData) -> list[Quantity]:
    """What the small charts show, in order."""
    rewards = {key: key.removeprefix("reward/") for key in run.names("reward/")}
    norm = run.get("optim", "max_grad_norm")
    limit = (f"clipped at {norm:g}", float(norm)) if isinstance(norm, int | float) and norm > 0 else None
    zero = all(v == 0 for v in run.column("mismatch/max_abs"))
    exact = "Exactly 0 at every step: every log-probability was recomputed bit for bit." if zero else ""
    ends = {"finish/stop": "ended by a stop token", "finish/length": "cut at the limit"}
    groups = f"equal rewards within; of {run.get('rollout', 'prompts', '?')} groups"
    return [
        *([Quantity("Rewards by name", "mean, before weights", rewards)] if len(rewards) > 1 else []),
        *(
            Quantity(
                "KL to the reference", f"estimator {key.removeprefix('kl/')}, nats per token trained on", {key: "KL"}
            )
            for key in run.names("kl/")
        ),
        Quantity("Completion length", "tokens, mean", {"completion_length": "length"}),
        Quantity(
            "Mismatch",
            "largest |trainer − sampler| log-probability, nats",
            {"mismatch/max_abs": "mismatch"},
            note=exact,
            always=True,
        ),
        Quantity("Tokens that differ", "sampled tokens not equal bit for bit", {"mismatch/unequal_tokens": "tokens"}),
        Quantity("Groups without signal", groups, {"groups/zero_variance": "groups"}, always=True),
        Quantity(
            "Staleness",
            "versions by which the sampling weights are behind",
            {"staleness/mean": "mean over tokens", "staleness/max": "largest"},
        ),
        Quantity(
            "Groups left out",
            "groups",
            {"dropped/stale": "too old", "dropped/aborted": "aborted", "dropped/failed": "failed"},
        ),
        Quantity("Loss", "", {"loss": "loss"}),
        Quantity("Gradient norm", "before clipping", {"grad_norm": "norm"}, limit=limit),
        Quantity("Ratio", "trainer / sampler, mean over tokens", {"ratio": "ratio"}),
        Quantity("Clip fraction", "share of tokens whose ratio was clipped", {"clip_fraction": "clipped"}),
        Quantity("Entropy", "nats per token trained on", {"entropy": "entropy"}),
        Quantity("Critic", "of the values", {"critic/loss": "loss", "critic/explained_variance": "explained variance"}),
        Quantity(
            "Correction",
            "weights of tokens that other weights or arithmetic sampled",
            {"correction/mean": "mean", "correction/capped": "share at the cap"},
        ),
        Quantity(
            "Groups replaced",
            "groups of further prompts were sampled for them",
            {"dynamic/flat_groups": "equal rewards", "dynamic/surplus_groups": "beyond the number wanted"},
        ),
        Quantity("How completions end", "completions", ends),
        Quantity("Reward spread", "standard deviation within a step", {"reward_std": "std"}),
        Quantity(
            "Rewards failed",
            "completions",
            {"rewards/failed": "without a reward", "rewards/error_scored": "with the error score"},
        ),
        *_by_name(run, "failures/", "Failures of", "completions; no point where there were none"),
        *_by_name(run, "judge/", "Judge", "questions of a step"),
        Quantity("Learning rate", "", {"lr": "lr"}),
        Quantity(
            "Idle",
            "fraction of the step in which the role did nothing",
            {f"idle/{role}": role for role in ("actor", "rollout", "reward")},
        ),
    ]


def _by_name(run: RunData, prefix: str, title: str, unit: str) -> list[Quantity]:
    """A chart for each NAME of the metrics prefix/NAME/KIND, with a line for each kind."""
    keys = [key.removeprefix(prefix).rpartition("/") for key in run.names(prefix)]
    return [
        Quantity(f"{title} {name}", unit, {f"{prefix}{name}/{k}": k for n, _, k in keys if n == name}, always=True)
        for name in dict.fromkeys(name for name, _, _ in keys)
    ]


def _phase_columns(run: RunData) -> dict[str, list[float | None]]:
    """phase -> seconds per step, with what the phases do not cover as `other`; phases never recorded are left out."""
    measured = {phase: run.column(f"time/{phase}_s") for phase in PHASES}
    columns = {phase: column for phase, column in measured.items() if any(v is not None for v in column)}
    known = [sum(finite([c[i] for c in columns.values()])) for i in range(len(run.records))]
    rest = [max(0.0, t - k) if t is not None else None for t, k in zip(run.column("time/step_s"), known, strict=True)]
    if sum(finite(rest)) > 0.01 * sum(known):
        columns["other"] = rest
    return columns


def _time_figure(run: RunData) -> Figure:
    parts = [Series(phase, column, f"p-{phase}") for phase, column in _phase_columns(run).items()]
    chart = stacked_bars("Seconds per step by phase", _steps(run), parts)
    legend = tuple((f"bar {p.style}", p.label) for p in parts)
    note = "wait: what no phase accounts for, such as writing the step's files and the checkpoint before it."
    note = note if any(p.label == "wait" for p in parts) else ""
    return Figure("Where the time went", "seconds per step", last(run.column("time/step_s")), chart, legend, note)


def _time_shares(run: RunData) -> list[tuple[str, float, float]]:
    """(phase, seconds over the run, share)."""
    totals = {phase: sum(finite(column)) for phase, column in _phase_columns(run).items()} if run.records else {}
    whole = sum(totals.values())
    return [(phase, seconds, seconds / whole) for phase, seconds in totals.items()] if whole > 0 else []


def _dial(run: RunData) -> dict[str, Any]:
    """The mesh picture: every role with its squares on the row of all devices, and its bytes per device."""
    roles = run.dial.get("roles", {})
    devices = sorted({d for role in roles.values() for d in role.get("devices", ())})
    kinds = list(dict.fromkeys(k for role in roles.values() for k in role.get("bytes", {})))
    largest = max((sum(role.get("bytes", {}).values()) for role in roles.values()), default=0)
    rows = []
    for name, role in roles.items():
        mesh = " × ".join(f"{axis} {n}" for axis, n in role.get("axes", {}).items() if n > 1) or "1 device"
        sizes = role.get("bytes", {})
        rows.append(
            {
                "name": name,
                "mesh": f"the arrays of {role['same_as']}" if role.get("same_as") else mesh,
                "on": set(role.get("devices", ())),
                "devices": len(role.get("devices", ())),
                "bytes": sizes,
                "bar": [(i + 1, 100 * sizes[k] / largest) for i, k in enumerate(kinds) if sizes.get(k)]
                if largest
                else [],
            }
        )
    return {"devices": devices, "kinds": kinds, "rows": rows}
