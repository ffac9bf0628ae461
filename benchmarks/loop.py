"""lockstep against TRL's GRPO on one machine: the same model files, prompts, sampling, loss and optimizer settings.

    python benchmarks/loop.py [--steps 6 --rounds 2 --seeds 1]        # seconds per step, paired

Runs lockstep (exact mode) and TRL alternately, never both at once, each run in a process of its own on the same cores.
Reward against samples, of the same pairs of runs, is `benchmarks/learning.py --trl`.
Writes a JSON result (default: under benchmarks/results/) and prints tables for docs/performance.md. Seconds of a step
are compared by medians; the first step of each run, which compiles or warms up, is left out.

TRL runs in its own environment, made on first use in `.venvs/trl` (about 1.5 GB with the CPU build of torch; where the
package index offers several builds of torch, pip's own settings choose). `--peer tuned`, the default, gives TRL what
was found to make it fastest here: micro-batches of 32 sequences and an allocator that keeps its memory. `--peer plain`
is the whole batch in one forward and the system's allocator settings. Neither recomputes activations, TRL's default.

The comparison is refused unless both had the same prompt ids and stop ids, and lockstep's mismatch was 0 in every step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from limits import child_environment, machine_facts, usable_cores, use_cores
from limits import markdown as limits_table
from summary import Run, median_step, summarise, time_table

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "benchmarks" / "peers" / "trl_addition.py"
RECIPE = ROOT / "recipes" / "addition.toml"
REQUIREMENTS = (
    "torch==2.13.0",
    "trl==1.16.0",
    "transformers==5.24.0",
    "peft==0.21.2",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "safetensors==0.8.0",
)
# glibc: large buffers come from the heap and are never given back, so their pages are not faulted in again each step.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}
PEERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "tuned": (["--micro-batch", "32"], KEEP_MEMORY),
    "plain": ([], {}),
}
# The shared settings; a recipe's table and key -> value. What is not here is as in the recipe.
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 8, "alpha": 16.0, "last_layers": 10, "targets": ["q", "k", "v", "o", "gate", "up", "down"]},
    "rollout": {"prompts": 16, "samples": 8, "max_new_tokens": 5, "temperature": 1.0, "stop": ["\n"]},
    "algorithm": {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "measure_kl": False, "std_epsilon": 1e-4},
    "optim": {
        "lr": 2e-3,
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "max_grad_norm": 1.0,
    },
    "train": {"select": "all", "select_count": 0},
    "numerics": {"mode": "exact"},
}


class BenchmarkError(Exception):
    """A run failed, or the two sides did not do the same work."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. SystemExit with a message when a value makes no sense."""
    parser = argparse.ArgumentParser(description="lockstep against TRL on the addition task, paired.")
    parser.add_argument("--steps", type=int, default=6, help="per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of runs for each seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ... (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=min(2, usable_cores()), help="cores for each side")
    parser.add_argument("--model", default="smollm2-135m", help="a known name (`lockstep models`) or a folder")
    parser.add_argument("--peer", choices=tuple(PEERS), default="tuned", help="TRL at its fastest, or as it comes")
    parser.add_argument("--peer-python", type=Path, help="an interpreter that has TRL, instead of .venvs/trl")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / ".cache" / "benchmarks",
        help="model files, and loop-runs/ with the last runs",
    )
    out = ROOT / "benchmarks" / "results" / "loop.json"
    parser.add_argument("--out", type=Path, default=out, help="the JSON result")
    args = parser.parse_args(argv)
    for name, least in (("steps", 2), ("rounds", 1), ("seeds", 1), ("threads", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.threads > usable_cores():
        parser.error(f"--threads is {args.threads}, this process may use {usable_cores()} cores")
    return args


# ---------------------------------------------------------------- what both sides are given


def peer_python(folder: Path) -> Path:
    """The interpreter of the environment with TRL; made, or made anew when the requirements changed."""
    python, stamp = folder / "bin" / "python", folder / "requirements"
    wanted = "\n".join(REQUIREMENTS)
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"making {folder}: {', '.join(REQUIREMENTS)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        stamp.write_text(wanted)
    return python


def model_folder(name: str, work: Path) -> Path:
    """The model as a folder in Hugging Face layout, float32: what both sides load."""
    if Path(name).is_dir():
        return Path(name).resolve()
    folder = work / "models" / name
    if not folder.is_dir():
        from lockstep.models import load_model
        from lockstep.models.hf import save_folder

        model, partial = load_model(name, "float32"), folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it wrote
        save_folder(partial, model.spec, model.params, token_ids={"eos_token_id": sorted(model.tokenizer.eos_ids)})
        model.tokenizer.save(partial)
        partial.rename(folder)
    return folder


def write_prompts(path: Path, count: int, seed: int) -> None:
    """`count` two-digit sums behind two solved ones, as JSON lines with prompt and answer."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            row = {"prompt": f"1 + 1 = 2\n5 + 2 = 7\n{a} + {b} =", "answer": str(a + b)}
            file.write(json.dumps(row) + "\n")


def make_recipe(base: dict[str, Any], run: dict[str, Any], model: Path, prompts: Path) -> dict[str, Any]:
    """The demo's recipe with the shared settings, the file of prompts as its task, and `run` as its [run] table."""
    recipe = {table: {**base.get(table, {}), **SETTINGS.get(table, {})} for table in base.keys() | SETTINGS.keys()}
    recipe["run"] = {"checkpoint_every": 0, **run}
    recipe["model"] = {"name": str(model), "dtype": "float32"}
    recipe["task"] = {
        "kind": "file",
        "path": str(prompts),
        "prompt_column": "prompt",
        "prompt": "{question}",
        "template": "plain",
        "shuffle": False,
        "max_prompt_tokens": 64,
    }
    recipe["reward"] = {"functions": [{"name": "first_line_exact", "weight": 1.0}], "on_error": "fail"}
    return recipe


# ---------------------------------------------------------------- one run


def timed_process(command: list[str], log: Path, env: dict[str, str]) -> tuple[float, float]:
    """Run to the end, output to `log`. Returns (wall-clock, CPU) seconds. BenchmarkError shows the log's end."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT, check=False).returncode
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise BenchmarkError(f"{' '.join(command)} ended with code {code}; the end of {log}:\n{tail}")
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def run_lockstep(args: argparse.Namespace, folder: Path, model: Path, prompts: Path, round_: int, seed: int) -> Run:
    """A `lockstep run` in its own process."""
    import pyarrow.parquet
    import tomli_w

    folder.mkdir(parents=True)
    table = {"name": "run", "dir": str(folder), "seed": seed, "steps": args.steps}
    recipe = make_recipe(tomllib.loads(RECIPE.read_text(encoding="utf-8")), table, model, prompts)
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "lockstep", "run", str(path)]
    wall, cpu = timed_process(command, folder / "log.txt", child_environment(args.threads))
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first = pyarrow.parquet.read_table(folder / "run" / "trajectories" / "step-000001.parquet")
    ids = list(dict.fromkeys(tuple(row) for row in first.column("prompt_ids").to_pylist()))
    steps = [lockstep_step(r) for r in records]
    return Run("lockstep", round_, seed, wall, cpu, [list(row) for row in ids], stop_ids(model), versions(), steps)


def lockstep_step(record: dict[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl in the form that both sides share. BenchmarkError when it says the run was not exact."""
    if record["mismatch/max_abs"] != 0:
        raise BenchmarkError(f"lockstep step {record['step']}: mismatch/max_abs is {record['mismatch/max_abs']}, not 0")
    phases = {f"{name}_s": record[f"time/{name}_s"] for name in ("step", "generate", "score", "train", "sync", "wait")}
    return {key: record[key] for key in ("step", "reward", "completion_length")} | phases


def versions() -> dict[str, str]:
    """What the lockstep side is made of."""
    from importlib.metadata import version

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {name: version(name) for name in ("lockstep-rl", "jax", "jaxlib", "numpy")}
    return found | ({"commit": commit.stdout.strip()} if commit.returncode == 0 else {})


def run_peer(
    args: argparse.Namespace, python: Path, folder: Path, model: Path, prompts: Path, round_: int, seed: int
) -> Run:
    """A run of the peer's script in its own process and environment."""
    folder.mkdir(parents=True)
    options, env = PEERS[args.peer]
    out = folder / "steps.jsonl"
    values = {"model": model, "prompts": prompts, "out": out, "steps": args.steps, "seed": seed}
    values |= {"threads": args.threads} | peer_settings()
    command = [str(python), str(PEER), *options]
    command += [word for name, value in values.items() for word in (f"--{name}", str(value))]
    wall, cpu = timed_process(command, folder / "log.txt", child_environment(args.threads) | env)
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    setup, steps = records[0], [{k: v for k, v in r.items() if k != "event"} for r in records[1:]]
    return Run("trl", round_, seed, wall, cpu, setup["prompt_ids"], setup["stop_ids"], setup["versions"], steps)


def peer_settings() -> dict[str, Any]:
    """The shared settings in the words of the peer's command line (its script fixes the others)."""
    rollout, lora = SETTINGS["rollout"], SETTINGS["lora"]
    return {
        "group-prompts": rollout["prompts"],
        "samples": rollout["samples"],
        "max-new-tokens": rollout["max_new_tokens"],
        "temperature": rollout["temperature"],
        "lr": SETTINGS["optim"]["lr"],
        "lora-rank": lora["rank"],
        "lora-alpha": lora["alpha"],
        "lora-last-layers": lora["last_layers"],
    }


def run_all(args: argparse.Namespace) -> list[Run]:
    """Every run, alternating: lockstep, TRL, lockstep, TRL, ..."""
    python = args.peer_python or peer_python(ROOT / ".venvs" / "trl")
    model = model_folder(args.model, args.work)
    scratch = args.work / "loop-runs"
    shutil.rmtree(scratch, ignore_errors=True)
    runs: list[Run] = []
    for round_ in range(args.rounds):
        for seed in range(args.seeds):
            folder = scratch / f"round{round_}-seed{seed}"
            folder.mkdir(parents=True)
            prompts = folder / "prompts.jsonl"
            write_prompts(prompts, args.steps * SETTINGS["rollout"]["prompts"], seed)
            ours = run_lockstep(args, folder / "lockstep", model, prompts, round_, seed)
            announce(ours)
            theirs = run_peer(args, python, folder / "trl", model, prompts, round_, seed)
            announce(theirs)
            check_same_work(ours, theirs)
            runs += [ours, theirs]
    return runs


def stop_ids(model: Path) -> list[int]:
    """The token ids that end a completion: the stop texts', and every end-of-sequence id of the model."""
    from lockstep.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_hf(model)
    return sorted(tokenizer.eos_ids | {tokenizer.single_id(text) for text in SETTINGS["rollout"]["stop"]})


def check_same_work(ours: Run, theirs: Run) -> None:
    """BenchmarkError unless both had the same prompts in their first step (in any order) and the same stop ids."""
    for what, a, b in (
        ("prompts of the first step", sorted(ours.prompt_ids), sorted(theirs.prompt_ids)),
        ("stop ids", ours.stop_ids, theirs.stop_ids),
    ):
        if a != b:
            raise BenchmarkError(f"the two sides differ in their {what}: lockstep {a}, TRL {b}")


def announce(run: Run) -> None:
    """A line per finished run."""
    rewards = " ".join(f"{s['reward']:.2f}" for s in run.steps)
    print(
        f"{run.side:8} round {run.round} seed {run.seed}: {median_step(run):.2f} s a step; reward {rewards}", flush=True
    )


# ---------------------------------------------------------------- the whole benchmark


def measure_limits(args: argparse.Namespace) -> dict[str, Any]:
    """`benchmarks/limits.py` in its own process, on the same cores."""
    command = [sys.executable, str(ROOT / "benchmarks" / "limits.py"), "--threads", str(args.threads)]
    done = subprocess.run(command, env=child_environment(args.threads), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs and write the result, which is returned. BenchmarkError where the two cannot be compared."""
    machine = machine_facts()
    use_cores(args.threads)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    limits = measure_limits(args)
    runs = run_all(args)
    result = {
        "machine": machine,
        "limits": limits,
        "settings": {"shared": SETTINGS, "threads": args.threads, "model": args.model, "peer": args.peer},
        "requirements": list(REQUIREMENTS),
        "summary": summarise(runs),
        "runs": [asdict(run) for run in runs],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        found = compared(args)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tables = [time_table(found["summary"]), limits_table(found["limits"])]
    cpu = found["machine"]["cpu"]
    print(f"\n{cpu}, {args.threads} cores\n\n" + "\n\n".join(tables) + f"\n\n{os.path.relpath(args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
