"""What a delta sync sends: the fraction of bfloat16 weights that one update changes, on a real run.

    python benchmarks/delta.py [--lr 1e-6 1e-5 --steps 6]

Trains every weight of SmolLM2-135M on the recipe `recipes/addition.toml` (without its adapter): real rollouts, real
gradients, AdamW on float32 master weights. After each update the weights are rounded to bfloat16, as a sampler on an
accelerator holds them, and encoded against those of the version before. Every delta is applied and compared bit for
bit. Writes a JSON result (default: benchmarks/results/delta.json) and prints tables for docs/delta.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from limits import machine_facts

from lockstep.config import Config, parse_config
from lockstep.progress import Progress
from lockstep.sync.delta import Delta, apply, choose, encode
from lockstep.text import format_bytes
from lockstep.train import rundir
from lockstep.train.assembly import build
from lockstep.train.loop import Loop
from lockstep.types import PolicyVersion

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "addition.toml"
SAMPLER_DTYPE = ml_dtypes.bfloat16


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5], help="one run for each")
    parser.add_argument("--steps", type=int, default=6, help="updates per run")
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--samples", type=int, default=6, help="per prompt")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "delta.json")
    args = parser.parse_args(argv)
    runs = [measure(lr, args.steps, args.prompts, args.samples) for lr in args.lr]
    result = {"machine": machine_facts(), "model": "smollm2-135m", "sampler_dtype": "bfloat16", "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(runs))
    return 0


def recipe(lr: float, steps: int, prompts: int, samples: int, folder: Path) -> Config:
    """The addition recipe with every weight trained, at a constant learning rate. Sums of single digits: enough of
    them are right from the start for every step to have a gradient."""
    text = re.sub(r"(?ms)^\[lora\].*?(?=^\[)", "", RECIPE.read_text(encoding="utf-8"))
    settings: Mapping[str, Any] = {
        "run.dir": folder, "run.steps": steps, "run.checkpoint_every": 0, "optim.lr": lr,
        "optim.schedule": "constant", "rollout.prompts": prompts, "rollout.samples": samples,
        "algorithm.measure_kl": "false", "train.save_trajectories": "false",
        "task.options": "{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }",
    }  # fmt: skip
    words = [f"--{key}={value}" for key, value in settings.items()]
    return parse_config(text, overrides=words, folder=RECIPE.parent, where=str(RECIPE))


def measure(lr: float, steps: int, prompts: int, samples: int) -> dict[str, Any]:
    """One run: a record per step."""
    with tempfile.TemporaryDirectory() as folder:
        config = recipe(lr, steps, prompts, samples, Path(folder))
        cluster = build(config)
        run_dir = rundir.claim_run_dir(config.run)
        records = []
        with closing(cluster), Progress(config, run_dir) as progress, Loop(cluster, run_dir, progress) as loop:
            loop.start()
            held, policy = sampler_weights(cluster.trainer.trainable), PolicyVersion(0, "start")
            for step in range(1, steps + 1):
                loop.step()
                new, next_policy = sampler_weights(cluster.trainer.trainable), PolicyVersion(step, f"step {step}")
                records.append({"step": step, **compare(held, new, policy, next_policy)})
                held, policy = new, next_policy
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for record, line in zip(records, lines, strict=True):
        logged = json.loads(line)
        record |= {key: logged[key] for key in ("reward", "grad_norm", "groups/zero_variance", "groups/total")}
    return {"lr": lr, "prompts": prompts, "samples": samples, "steps": records}


def sampler_weights(trainable: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf).astype(SAMPLER_DTYPE) for path, leaf in trainable.items()}


def compare(
    held: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], base: PolicyVersion, policy: PolicyVersion
) -> dict[str, Any]:
    """What takes `held` to `new`."""
    clock = [time.perf_counter()]
    encoded = encode(held, new, base, policy).to_bytes()
    clock.append(time.perf_counter())
    delta = Delta.from_bytes(encoded)
    got = apply(delta, held, base)
    clock.append(time.perf_counter())
    for path, leaf in new.items():
        if np.asarray(got[path]).tobytes() != leaf.tobytes():
            raise SystemExit(f"{path} did not come out as it went in")
    full = sum(leaf.nbytes for leaf in new.values())
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, leaf in delta.leaves.items():
        kind = re.sub(r"layers\.\d+\.", "", path)
        kinds[kind][0] += leaf.changed
        kinds[kind][1] += leaf.elements
    return {
        "elements": delta.elements,
        "changed": delta.changed,
        "density": delta.density,
        "full_bytes": full,
        "delta_bytes": len(encoded),
        "position_bytes": sum(len(leaf.positions) for leaf in delta.leaves.values()),
        "value_bytes": sum(len(leaf.values) for leaf in delta.leaves.values()),
        "encode_s": round(clock[1] - clock[0], 3),
        "apply_s": round(clock[2] - clock[1], 3),
        "why": choose(delta, full)[1],
        "density_by_kind": {kind: changed / total for kind, (changed, total) in kinds.items()},
    }


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row per learning rate: the median step, and the span over the steps."""
    lines = ["| lr | weights changed | crosses | instead of | less | encode | apply |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        steps = run["steps"]
        middle = {key: statistics.median(s[key] for s in steps) for key in ("density", "delta_bytes", "full_bytes")}
        span = f"{min(s['density'] for s in steps):.2%} - {max(s['density'] for s in steps):.2%}"
        seconds = [statistics.median(s[key] for s in steps) for key in ("encode_s", "apply_s")]
        lines.append(
            f"| {run['lr']:g} | {middle['density']:.2%} ({span}) | {format_bytes(int(middle['delta_bytes']))} | "
            f"{format_bytes(int(middle['full_bytes']))} | {middle['full_bytes'] / middle['delta_bytes']:.1f} x | "
            f"{seconds[0]:.2f} s | {seconds[1]:.2f} s |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
