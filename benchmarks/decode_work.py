"""What `benchmarks/decode.py` asks of every peer, and the least time that this machine needs for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from lockstep.models.spec import ModelSpec, layer_leaves


@dataclass(frozen=True)
class Shape:
    """prompts x samples completions of prompts of prompt_tokens each. new_tokens: of every sample; with a median, the
    most of any, the lengths then being long-tailed. temperature 0 is greedy."""

    name: str
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    median: int | None = None
    temperature: float = 0.0

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def lengths(self, seed: int) -> list[list[int]]:
        """Completion tokens of every sample. The same lengths for every seed, dealt out differently."""
        if self.median is None:
            return [[self.new_tokens] * self.samples for _ in range(self.prompts)]
        flat = np.random.default_rng(seed).permutation(long_tailed(self.sequences, self.median, self.new_tokens))
        return [row.tolist() for row in flat.reshape(self.prompts, self.samples)]


def brief(shape: Shape) -> Shape:
    """As many sequences, a few tokens each."""
    return replace(shape, new_tokens=min(shape.new_tokens, 8), median=None)


def long_tailed(count: int, median: int, most: int, sigma: float = 0.9) -> list[int]:
    """`count` lengths at the quantiles of a log-normal distribution, cut off at `most`, ascending."""
    quantiles = (NormalDist().inv_cdf((i + 0.5) / count) for i in range(count))
    return [min(most, max(1, round(median * math.exp(sigma * z)))) for z in quantiles]


def shapes(quick: bool) -> dict[str, Shape]:
    """By name: batches, and a group-relative update's generation. quick: as small as can be, to try a peer."""
    if quick:
        batches = {str(n): Shape(str(n), n, 1, 32, 6) for n in (1, 8)}
        return {**batches, "rl": Shape("rl", 4, 3, 32, 12, median=4, temperature=1.0)}
    batches = {str(n): Shape(str(n), n, 1, 64, 128) for n in (1, 8, 32, 64)}
    return {**batches, "rl": Shape("rl", 16, 8, 64, 256, median=40, temperature=1.0)}


def job(shape: Shape, vocab_size: int, round_: int) -> dict[str, Any]:
    """The job of a round, as `decode_worker.Job`: random prompts, new ones every round, so that no peer has them in its
    cache."""
    seed = [round_ + 1, shape.sequences, shape.new_tokens]
    rng = np.random.default_rng(seed)
    low = min(1000, vocab_size // 4)  # above the special ids
    prompts = rng.integers(low, vocab_size, (shape.prompts, shape.prompt_tokens)).tolist()
    return {
        "prompts": prompts,
        "lengths": shape.lengths(round_ + 1),
        "temperature": shape.temperature,
        "seed": round_ + 1,
    }


def machine_limit(shape: Shape, spec: ModelSpec, limits: dict[str, Any]) -> dict[str, Any]:
    """The least seconds of a shape in float32, were all sequences stepped together and no row computed in vain.

    Each step takes the larger of its bytes (every weight once, the cached keys and values of the sequences in it) over
    the measured read bandwidth, and its operations over the best measured matrix-multiply rate; the prompts, each once,
    are one step. of_it_bytes: seconds of steps that bandwidth decides.
    """
    layer = sum(leaf.size for leaf in layer_leaves(spec).values())
    body, head = layer * spec.num_layers, spec.vocab_size * spec.dim
    bandwidth = limits["read_gb_s"]["best"] * 1e9
    rate = max(v["best"] for v in limits["matmul_gflop_s"].values()) * 1e9
    cached = 2 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim  # bytes of a position
    attended = 4 * spec.num_layers * spec.num_heads * spec.head_dim  # operations of a row per position that it sees
    weights = 4 * (body + head)
    total_bytes = total_operations = total = by_bytes = 0.0

    def step(num_bytes: float, operations: float) -> None:
        nonlocal total_bytes, total_operations, total, by_bytes
        seconds = num_bytes / bandwidth, operations / rate
        total_bytes, total_operations, total = (
            total_bytes + num_bytes,
            total_operations + operations,
            total + max(seconds),
        )
        by_bytes += seconds[0] if seconds[0] >= seconds[1] else 0.0

    p = shape.prompt_tokens
    rows = shape.prompts * p
    step(weights + rows * cached, 2 * (rows * body + shape.prompts * head) + rows * attended * p / 2)
    lengths = [n for own in shape.lengths(0) for n in own]
    for done in range(1, max(lengths)):
        active = sum(n > done for n in lengths)
        seen = p + done
        step(weights + active * seen * cached, 2 * active * (body + head) + active * seen * attended)
    return {
        "limit_s": total, "of_it_bytes_s": by_bytes, "gigabytes": total_bytes / 1e9,
        "gigaflop": total_operations / 1e9, "tokens_per_s": sum(lengths) / total,
    }  # fmt: skip


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Mean fraction of a completion's tokens before the first that differs. Of greedy completions under the same
    weights it is near 1: rounding alone turns a choice between two equally likely tokens now and then."""

    def same(a: Sequence[int], b: Sequence[int]) -> float:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) / len(a)

    return statistics.mean(same(a, b) for a, b in zip(ours, theirs, strict=True))


def summarise(
    samples: dict[str, dict[str, list[dict[str, Any]]]], least: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row per shape and peer. samples: shape -> peer -> answers by round. *_over: tokens per second of that variant
    of lockstep over the peer's, medians of the same run."""
    rows = []
    for shape, by_peer in samples.items():
        speed = {n: [a["tokens"] / a["seconds"] for a in answers] for n, answers in by_peer.items() if answers}
        for name, speeds in speed.items():
            answers = by_peer[name]
            row = {
                "shape": shape,
                "peer": name,
                "tokens": answers[0]["tokens"],
                "seconds": [a["seconds"] for a in answers],
                "cpu_s": [a["cpu_s"] for a in answers],
                "tokens_per_s": statistics.median(speeds),
                "least": min(speeds),
                "most": max(speeds),
                "of_limit": least[shape]["limit_s"] / statistics.median(a["seconds"] for a in answers),
                "details": answers[-1]["details"],
            }
            for ours in ("lockstep", "lockstep-fast"):
                if ours in speed and not name.startswith("lockstep"):
                    row[f"{ours}_over"] = statistics.median(speed[ours]) / row["tokens_per_s"]
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], least: dict[str, dict[str, Any]], names: Sequence[str]) -> str:
    """Shapes against peers: tokens per second, and lockstep's over theirs."""
    found = {(r["shape"], r["peer"]): r for r in rows}
    lines = ["| tokens/s | " + " | ".join(names) + " | limit |", "|---" * (len(names) + 2) + "|"]

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "failed"
        ratio = f" ({row['lockstep_over']:.2f} x)" if "lockstep_over" in row else ""
        return f"{row['tokens_per_s']:.0f}{ratio}"

    for shape, limit in least.items():
        cells = " | ".join(cell(found.get((shape, n))) for n in names)
        lines.append(f"| {shape} | {cells} | {limit['tokens_per_s']:.0f} |")
    return "\n".join(lines)
