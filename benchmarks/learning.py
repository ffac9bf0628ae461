"""Does every algorithm learn? Reward per step on a small task, three seeds each, beside a reward that says nothing.

    python benchmarks/learning.py                                  # the sorting task, every algorithm
    python benchmarks/learning.py --task addition --only grpo,ppo  # the demo's model and task: hours for all
    python benchmarks/learning.py --task calculator --seeds 1      # the recipe with a tool: half an hour a seed
    python benchmarks/learning.py --only ppo --seeds 1 --out ppo.json
    python benchmarks/learning.py --trl --steps 14                 # GRPO on the demo's task, beside TRL's

The recipe is `recipes/sort.toml` (or that of the task) with the words of `TASKS`; what they start from is made first.
Runs of what is measured again replace its part of the JSON result; the figure is drawn from all of it. Every run is
refused that has a step whose record was not the trainer's bit for bit.

With `--trl` the runs are the pairs of `benchmarks/loop.py`: the same model files, prompts in the same order, settings
and number of samples a step, so that reward per step is reward against samples.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import loop
from limits import machine_facts
from summary import learning_table

ROOT = Path(__file__).resolve().parent.parent
CONTROL = "random reward"
NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "raft")
WORDS: dict[str, list[str]] = {
    **{name: [f"--algorithm.name={name}"] for name in NAMES},
    # What it is told says nothing; the task's own reward counts nothing and is what the curve shows.
    CONTROL: ["--reward.functions=[{name = 'sorting:at_random'}, {name = 'sorting:in_order', weight = 0.0}]"],
}
WORDS["ppo"] += ["--critic={warmup_steps = 5, optim = {lr = 3e-3}}"]
DEMO_WORDS: dict[str, list[str]] = {
    "grpo": [],
    "ppo": [
        "--algorithm={name = 'ppo', clip_low = 0.2, clip_high = 0.28}",
        "--critic={lora = {rank = 8, alpha = 16.0, last_layers = 10}, optim = {lr = 3e-3}}",
    ],
}
TASKS = {"sort": WORDS, "addition": DEMO_WORDS, "calculator": {"grpo": []}}
SHOWN = {"sort": "reward/sorting:in_order", "addition": "reward/first_line_exact", "calculator": "reward"}
LAST = 10  # steps whose mean is what a run came to


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. SystemExit with a message when a value makes no sense."""
    parser = argparse.ArgumentParser(description="Reward per step of every algorithm.")
    parser.add_argument("--task", choices=tuple(TASKS), default="sort")
    parser.add_argument("--trl", action="store_true", help="lockstep's GRPO and TRL's in pairs, on the addition task")
    parser.add_argument("--only", help="algorithms, by comma (default: all of the task's)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, help="per run (default: the recipe's; 15 with --trl)")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "benchmarks" / "learning")
    parser.add_argument("--out", type=Path, help="the JSON result; a figure with the same name goes beside it")
    args = parser.parse_args(argv)
    if args.trl and (args.only is not None or args.task != "sort"):
        parser.error("--trl compares GRPO on its own task; --only and --task are for runs without it")
    args.words = TASKS[args.task]
    args.only = list(args.words) if args.only is None else args.only.split(",")
    if unknown := [name for name in args.only if name not in args.words]:
        parser.error(f"--only names {', '.join(unknown)}; {args.task} has {', '.join(args.words)}")
    if args.seeds < 1 or (args.steps is not None and args.steps < 2):
        parser.error("--seeds must be at least 1, --steps at least 2")
    args.out = args.out or ROOT / "benchmarks" / "results" / f"learning_{'trl' if args.trl else args.task}.json"
    return args


def beside_trl(args: argparse.Namespace) -> str:
    """The pairs of runs, and their rewards as Markdown. SystemExit where the two cannot be compared."""
    words = ["--rounds=1", f"--seeds={args.seeds}", f"--out={args.out}", f"--work={args.work.parent}"]
    words.append(f"--steps={args.steps or 15}")
    try:
        return learning_table(loop.compared(loop.parse_arguments(words))["summary"])
    except loop.BenchmarkError as error:
        raise SystemExit(f"error: {error}") from error


def warmed_up(work: Path) -> Path:
    """The sorting task's start, made with the two commands that its recipe names."""
    folder = work / "sort-warm-up" / "model"
    if not folder.is_dir():
        data = work / "sort-data"
        if not data.is_dir():
            subprocess.run([sys.executable, ROOT / "recipes" / "sort" / "sorting.py", data], check=True)
        recipe = ROOT / "recipes" / "sort-warm-up.toml"
        words = [f"--run.dir={work}", f"--model.name={data / 'model'}", f"--sft.data={data / 'examples.jsonl'}"]
        subprocess.run([sys.executable, "-m", "lockstep", "run", recipe, *words], check=True)
    return folder


def curve(args: argparse.Namespace, name: str, seed: int, start: list[str]) -> dict[str, Any]:
    """One run in this process. Raises SystemExit where the record was not the trainer's."""
    from lockstep.config import load_config
    from lockstep.train.loop import run

    label = re.sub(r"\W", "-", name)
    words = [f"--run.dir={args.work}", f"--run.name={args.task}-{label}-{seed}", f"--run.seed={seed}"]
    words += ["--run.checkpoint_every=0", *start, *args.words[name]]
    words += [] if args.steps is None else [f"--run.steps={args.steps}"]
    began = time.perf_counter()
    folder = run(load_config(ROOT / "recipes" / f"{args.task}.toml", words))
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if wrong := [r["step"] for r in records if r["mismatch/unequal_tokens"]]:
        raise SystemExit(f"error: {name}, seed {seed}: steps {wrong} have tokens whose record is not the trainer's")
    return {"seed": seed, "seconds": seconds, "reward": [r[SHOWN[args.task]] for r in records]}


def summary(curves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """first, last: mean reward of the first step and of the last `LAST`, per seed and over all."""
    first = [c["reward"][0] for c in curves]
    last = [statistics.mean(c["reward"][-LAST:]) for c in curves]
    return {
        "first": statistics.mean(first), "last": statistics.mean(last), "last_by_seed": last,
        "seconds": statistics.median(c["seconds"] for c in curves),
    }  # fmt: skip


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """As Markdown."""
    lines = [f"| algorithm | step 1 | last {LAST} steps | by seed | seconds of a run |", "|---|---|---|---|---|"]
    for name, found in results.items():
        s = found["summary"]
        seeds = ", ".join(f"{v:.2f}" for v in s["last_by_seed"])
        lines.append(f"| {name} | {s['first']:.2f} | **{s['last']:.2f}** | {seeds} | {s['seconds']:.0f} |")
    return "\n".join(lines)


def figure(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A panel per algorithm, a line per seed, as SVG that follows the reader's light or dark."""
    from lockstep.report.charts import Series, line_chart

    width, height, columns = 300, 170, 3
    rows = -(-len(results) // columns)
    panels = []
    for i, (name, found) in enumerate(results.items()):
        curves = found["curves"]
        steps = list(range(1, len(curves[0]["reward"]) + 1))
        series = [Series(f"seed {c['seed']}", c["reward"], f"s{1 + n % 6}") for n, c in enumerate(curves)]
        chart = str(line_chart(name, steps, series, size=(width, height - 20), limit=("", 1.0)))
        x, y = i % columns * width, i // columns * height
        placed = chart.replace("<svg ", f'<svg x="0" y="20" width="{width}" height="{height - 20}" ', 1)
        panels.append(f'<g transform="translate({x} {y})"><text class="name" x="54" y="16">{name}</text>{placed}</g>')
    style = (
        "svg{font-family:system-ui,sans-serif;--s1:#2364aa;--s2:#c8551b;--s3:#2e8b57;--s4:#7b4bb0;--s5:#b08900;"
        "--s6:#5f6b7a;--soft:#60666f;--grid:#dcdcd7}@media (prefers-color-scheme:dark){svg{--s1:#6aaaf0;--s2:#f09a62;"
        "--s3:#67c793;--soft:#9aa1ab;--grid:#3a3f47}}.rule{stroke:var(--grid)}.zero,line.limit{stroke:var(--soft)}"
        "line.limit{stroke-dasharray:5 4}.tick,.name,text.limit{fill:var(--soft);font-size:11.5px}.name{font-size:14px}"
        ".line{fill:none;stroke:currentColor;stroke-width:1.5}"
        + "".join(f".s{n}{{color:var(--s{n})}}" for n in range(1, 7))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * width} {rows * height}">'
        f"<style>{style}</style>{''.join(panels)}</svg>\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.trl:
        print(beside_trl(args))
        return 0
    args.work = args.work.resolve()
    start = [f"--model.name={warmed_up(args.work)}"] if args.task == "sort" else []
    measured = {}
    for name in args.only:
        curves = [curve(args, name, seed, start) for seed in range(args.seeds)]
        measured[name] = {"words": args.words[name], "curves": curves, "summary": summary(curves)}
    before = json.loads(args.out.read_text())["results"] if args.out.is_file() else {}
    found = before | measured
    results = {name: found[name] for name in args.words if name in found}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
    args.out.with_suffix(".svg").write_text(figure(results), encoding="utf-8")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
