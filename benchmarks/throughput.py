"""Tokens per second of generation and of a training step, exact against fast, and against the machine's own limits.

    python benchmarks/throughput.py [--threads 2] [--rounds 5] [--out benchmarks/results/throughput.json]

On SmolLM2-135M with the demo's adapter, float32, one device. Exact and fast take turns in one process; medians count.
Three phases: `decode` (128 sequences, one token each per pass), `prefill` (16 prompts of 32 tokens), `train` (a whole
update on 16 prompts x 8 samples: forward of every layer, backward of the last ten, head on completion positions).

The limit of a phase is the larger of two times: its bytes over the measured read bandwidth (weights once per pass, and
the cache rows read), and its floating-point operations over the measured matrix-multiply rate. `of limit` is
limit / measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limits import child_environment, machine_facts, usable_cores, use_cores

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 32, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=min(2, usable_cores()), help="cores to use")
    parser.add_argument("--rounds", type=int, default=5, help="timed repetitions of each phase and mode")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "throughput.json")
    return parser.parse_args()


def make_cluster(mode: str) -> Any:
    """The demo's cluster in a numerics mode, sized for the phases."""
    from lockstep.config import load_config
    from lockstep.train.assembly import build

    overrides = ["--numerics.mode", mode, "--task.max_prompt_tokens", str(PROMPT_TOKENS)]
    overrides += ["--rollout.max_new_tokens", str(NEW_TOKENS), "--train.micro_batch_rows", "4096"]
    cluster = build(load_config(ROOT / "recipes" / "addition.toml", overrides))
    cluster.sync.push(0, cluster.trainer.trainable)
    return cluster


class Phases:
    """The three phases on one cluster. Each returns (seconds, tokens)."""

    def __init__(self, mode: str) -> None:
        import numpy as np

        from lockstep.types import Prompt, SamplingParams

        self.cluster = make_cluster(mode)
        rng = np.random.default_rng(0)
        ids = rng.integers(1000, 40000, (PROMPTS, PROMPT_TOKENS))
        self.prompts = [Prompt(f"p/{i}", "", tuple(int(t) for t in row)) for i, row in enumerate(ids)]
        self.seeds = {p.id: list(range(SAMPLES)) for p in self.prompts}
        self.params = SamplingParams(1.0, NEW_TOKENS, frozenset())  # nothing stops early: every pass is full
        self.update = 0

    def submit(self) -> None:
        for prompt in self.prompts:
            self.cluster.engine.submit(prompt, self.seeds[prompt.id], self.params)

    def prefill_and_decode(self) -> dict[str, tuple[float, int]]:
        """One generation, its first pass (the prompts) timed apart from the others."""
        self.submit()
        start = time.perf_counter()
        self.cluster.engine.step()
        first = time.perf_counter()
        self.trajectories = []
        while self.cluster.engine.busy:
            self.trajectories += self.cluster.engine.step()
        end = time.perf_counter()
        rows = PROMPTS * SAMPLES
        return {"prefill": (first - start, PROMPTS * PROMPT_TOKENS), "decode": (end - first, rows * (NEW_TOKENS - 1))}

    def train(self) -> tuple[float, int]:
        """One update on what was generated last."""
        import jax
        import numpy as np

        from lockstep.train.batching import make_micro_batches

        cluster = self.cluster
        batch = sorted(self.trajectories, key=lambda t: (t.group_id, t.index))
        advantages = np.resize([1.0, -1.0], len(batch))
        start = time.perf_counter()
        micro = make_micro_batches(batch, advantages, 1.0, cluster.geometry)
        before = cluster.trainer.trainable
        cluster.trainer.step(micro, batch, self.update)
        jax.block_until_ready(cluster.trainer.trainable)
        seconds = time.perf_counter() - start
        cluster.trainer.trainable = before  # the record stays that of these weights
        return seconds, sum(b.num_rows for b in micro)


def limits_of(spec: Any, trained_layers: int, limits: dict[str, Any]) -> dict[str, float]:
    """Least seconds of each phase by the measured limits."""
    from lockstep.models.spec import layer_leaves

    layer = sum(leaf.size for leaf in layer_leaves(spec).values())
    head = spec.vocab_size * spec.dim
    body = layer * spec.num_layers
    bandwidth = limits["read_gb_s"]["best"] * 1e9
    rate = max(v["best"] for v in limits["matmul_gflop_s"].values()) * 1e9
    sequences = PROMPTS * SAMPLES
    cached = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4 * (PROMPT_TOKENS + NEW_TOKENS / 2)
    weights = 4 * (body + head)

    def limit(num_bytes: float, operations: float) -> float:
        return max(num_bytes / bandwidth, operations / rate)

    decode = limit(weights + sequences * cached, 2 * sequences * (body + head)) * (NEW_TOKENS - 1)
    prefill = limit(weights, 2 * (PROMPTS * PROMPT_TOKENS * body + sequences * head))
    rows = PROMPTS * PROMPT_TOKENS + sequences * (NEW_TOKENS - 1)
    targets = sequences * NEW_TOKENS
    # Forward everywhere; in the trained layers and the head once more for the input's gradient (recomputation is a
    # choice, not a necessity, so it is not part of the limit).
    train = limit(0, 2 * (rows * (body + layer * trained_layers) + 2 * targets * head))
    return {"decode": decode, "prefill": prefill, "train": train}


def main() -> None:
    arguments = parse_arguments()
    # Before jax counts the cores; the limits are measured in a process of their own on the same ones.
    use_cores(arguments.threads)
    command = [sys.executable, str(ROOT / "benchmarks" / "limits.py"), "--threads", str(arguments.threads)]
    done = subprocess.run(
        command, env=child_environment(arguments.threads), stdout=subprocess.PIPE, text=True, check=True
    )
    limits = json.loads(done.stdout)
    modes = {mode: Phases(mode) for mode in ("exact", "fast")}
    samples: dict[str, dict[str, list[float]]] = {m: {} for m in modes}
    tokens: dict[str, int] = {}
    for round_number in range(arguments.rounds + 1):  # the first compiles
        for mode, phases in modes.items():
            timed: dict[str, Callable[[], Any]] = {"train": phases.train}
            result = phases.prefill_and_decode() | {name: run() for name, run in timed.items()}
            for name, (seconds, count) in result.items():
                tokens[name] = count
                if round_number:
                    samples[mode].setdefault(name, []).append(seconds)
    cluster = modes["exact"].cluster
    least = limits_of(cluster.spec, cluster.spec.num_layers - cluster.trainer.first_layer, limits)
    rows = []
    for name in ("decode", "prefill", "train"):
        exact, fast = (statistics.median(samples[m][name]) for m in ("exact", "fast"))
        rows.append(
            {
                "phase": name,
                "tokens": tokens[name],
                "exact_s": exact,
                "fast_s": fast,
                "exact_over_fast": exact / fast,
                "limit_s": least[name],
                "exact_of_limit": least[name] / exact,
                "fast_of_limit": least[name] / fast,
            }
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        json.dumps({"machine": machine_facts(), "limits": limits, "phases": rows}, indent=1) + "\n"
    )
    print("| phase | tokens/s exact | tokens/s fast | exact / fast time | exact of limit | fast of limit |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['phase']} | {r['tokens'] / r['exact_s']:.0f} | {r['tokens'] / r['fast_s']:.0f} | "
            f"{r['exact_over_fast']:.2f} | {r['exact_of_limit']:.0%} | {r['fast_of_limit']:.0%} |"
        )


if __name__ == "__main__":
    main()
