"""What a weight sync costs: seconds and bytes of ours against the plain ways of moving the same weights, in one run.

    python benchmarks/sync.py [--trees smollm2,1b] [--pairs same,apart] [--rounds 7] [--processes] [--out F]

On eight simulated CPU devices, made-up weights, float32 (the tree of 1 B parameters bfloat16). `same`: actor and
rollout share a mesh (fsdp=4).
`apart`: actor fsdp=4, rollout tensor=2 x data=2 (tensor=4 for the tree of 1 B), on
devices of its own. Within each round every way takes its turn;
medians count.

- sync: `WeightSync.push`, digests on both sides included; its transfer and its verification also apart.
- device_put: `jax.device_put` of the whole tree, waited for.
- gather: to numpy on the host, whole leaves, and from there with `jax.device_put` to the destination.
- copy_fresh, copy_existing: numpy copies of as many bytes as the destination holds, into memory that is made for it
  and into memory that is there, on as many threads as the sync has.

On `same` a sync moves nothing; device_put hands the same arrays back; gather and copies are what it would cost.
Other transports add rows of their own (`--processes`) through `MORE`: name -> function of (tree, pair, rounds) that
returns rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from limits import machine_facts, usable_cores, use_cores

ROOT = Path(__file__).resolve().parent.parent
PAIRS: dict[str, dict[str, Any]] = {
    "same": {"actor": {"fsdp": 4}, "rollout": "actor"},
    "apart": {"actor": {"fsdp": 4}, "rollout": {"tensor": 2, "data": 2}},
}
TREES = ("smollm2", "1b", "tiny")
LARGE = 3 << 29  # bytes at the destination, of which the machine cannot hold one for every way
MORE: dict[str, Callable[[str, str, int], list[dict[str, Any]]]] = {}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. SystemExit with a message when a value makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trees", default="smollm2,1b", help=f"of {', '.join(TREES)}; tiny is for trying it out")
    parser.add_argument("--pairs", default="same,apart", help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--rounds", type=int, default=7, help="timed repetitions of each way")
    parser.add_argument("--threads", type=int, default=min(2, usable_cores()), help="cores to use")
    parser.add_argument("--processes", action="store_true", help="rows for a sampler in another process as well")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sync.json")
    args = parser.parse_args(argv)
    for name, known in (("trees", TREES), ("pairs", tuple(PAIRS))):
        chosen = getattr(args, name).split(",")
        unknown = [word for word in chosen if word not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]!r} is not one of {', '.join(known)}")
        setattr(args, name, chosen)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if not 1 <= args.threads <= usable_cores():
        parser.error(f"--threads is {args.threads}, this process may use 1 to {usable_cores()} cores")
    return args


def make_leaves(tree: str) -> Any:
    """The leaf table of SmolLM2-135M, of a Llama of a thousand million parameters, or of next to nothing."""
    from lockstep.models.spec import LayerKind, ModelSpec, Rope, leaf_table

    vocab, dim, heads, kv, head_dim, mlp, layers = {
        "smollm2": (49152, 576, 9, 3, 64, 1536, 30),
        "1b": (32000, 2048, 16, 8, 128, 5632, 20),
        "tiny": (64, 16, 2, 1, 8, 32, 2),
    }[tree]
    kinds = (LayerKind(Rope(1e5)),) * layers
    return leaf_table(
        ModelSpec("llama", vocab, dim, heads, kv, head_dim, mlp, kinds, 1e-5, 0.125, 8192, tied_head=True)
    )


class Case:
    """One tree between one pair of meshes, and the ways of getting it across. Each way returns what it made, which is
    kept until its next turn, as a sampler keeps what it serves; of a large tree only the sync's can be."""

    def __init__(self, tree: str, pair: str) -> None:
        import jax
        import ml_dtypes
        import numpy as np

        from lockstep.cluster.mesh import Dial
        from lockstep.cluster.sharding import place, shardings
        from lockstep.sync.local import LocalTransport
        from lockstep.sync.replica import LocalReplica
        from lockstep.sync.route import Route
        from lockstep.sync.sync import WeightSync

        self.jax, self.np = jax, np
        self.leaves = make_leaves(tree)
        # One copy of the large tree: the machine holds several trees at once as it is.
        shapes = PAIRS[pair] | ({"rollout": {"tensor": 4}} if (tree, pair) == ("1b", "apart") else {})
        dial = Dial.build(shapes)
        rng = np.random.default_rng(0)
        dtype = np.dtype(ml_dtypes.bfloat16 if tree == "1b" else np.float32)
        host = {path: rng.random(leaf.shape, np.float32).astype(dtype) for path, leaf in self.leaves.items()}
        self.actor = place(host, self.leaves, dial.mesh("actor"))
        self.where = shardings(self.leaves, dial.mesh("rollout"))
        blank = {path: np.zeros(leaf.shape, dtype) for path, leaf in self.leaves.items()}
        installed = self.actor if pair == "same" else place(blank, self.leaves, dial.mesh("rollout"))
        self.replica = LocalReplica("rollout", installed, self.where, LocalTransport())
        del blank, installed
        self.sync = WeightSync(self.leaves, [Route.local(self.replica)], base={}, deadline_s=3600)
        self.host = host
        self.held = sum(s.data.nbytes for leaf in self.replica.installed.values() for s in leaf.addressable_shards)
        self.large = self.held > LARGE
        self.kept: dict[str, Any] = {}
        self.threads = ThreadPoolExecutor(usable_cores())
        self.receipts: list[Any] = []

    def ways(self) -> dict[str, Callable[[], Any]]:
        return {
            "sync": self.push,
            "device_put": lambda: self.jax.device_put(self.actor, self.where),
            "gather": self.gather,
            "copy_fresh": lambda: list(self.threads.map(self.np.array, self.copied())),
            "copy_existing": self.copy_existing,
        }

    def push(self) -> None:
        self.receipts.append(self.sync.push(len(self.receipts), self.actor))

    def gather(self) -> Any:
        return {path: self.jax.device_put(self.np.array(leaf), self.where[path]) for path, leaf in self.actor.items()}

    def copied(self) -> list[Any]:
        """Host arrays that together have the bytes that the destination holds, and a little more."""
        arrays, total = [], 0
        while total < self.held:
            for array in self.host.values():
                arrays.append(array)
                total += array.nbytes
                if total >= self.held:
                    break
        return arrays

    def copy_existing(self) -> Any:
        into = self.kept["copy_existing"]
        list(self.threads.map(self.np.copyto, into, self.copied()))
        return into

    def time(self, name: str) -> float:
        way = self.ways()[name]
        if self.large:
            self.kept.clear()
        if name == "copy_existing" and name not in self.kept:
            self.kept[name] = [self.np.ones_like(array) for array in self.copied()]  # written to, so that it is there
        gc.collect()
        start = time.perf_counter()
        made = self.jax.block_until_ready(way())
        seconds = time.perf_counter() - start
        self.kept[name] = made
        return seconds


def measure(tree: str, pair: str, rounds: int) -> list[dict[str, Any]]:
    """A row per way: median, best and worst seconds; for the sync its phases and bytes as well."""
    case = Case(tree, pair)
    names = list(case.ways())
    for name in names:  # compiles, plans, and fills what is kept
        case.time(name)
        case.time(name)
    case.receipts = case.receipts[:2]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            seconds[name].append(case.time(name))
    receipts = case.receipts[-rounds:]
    rows = []
    for name in names:
        row: dict[str, Any] = {"tree": tree, "pair": pair, "way": name, "bytes_held": case.held}
        row |= spread(seconds[name])
        if name == "sync":
            phases = receipts[0].seconds
            row["phases_s"] = {p: statistics.median(r.seconds[p] for r in receipts) for p in phases}
            row |= {key: getattr(receipts[-1], key) for key in ("bytes_planned", "bytes_moved", "bytes_crossing")}
        rows.append(row)
    return rows


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per tree and pair, what the goals are about: the transfer over a device_put of the tree and over plain copies of
    as many bytes, and verification over the transfer. None where nothing moves."""
    found = []
    for tree, pair in dict.fromkeys((r["tree"], r["pair"]) for r in rows):
        by = {r["way"]: r for r in rows if (r["tree"], r["pair"]) == (tree, pair)}
        if "sync" not in by:
            continue
        phases = by["sync"]["phases_s"]
        moving = sum(phases.get(p, 0.0) for p in ("select", "map", "stage", "transfer", "flip"))
        moves = by["sync"]["bytes_moved"] > 0
        found.append(
            {"tree": tree, "pair": pair, "sync_s": by["sync"]["median_s"], "moving_s": moving}
            | {
                f"moving_over_{way}": moving / by[way]["median_s"] if moves else None
                for way in ("device_put", "gather", "copy_fresh", "copy_existing")
                if way in by
            }
            | {
                f"sync_over_{way}": by["sync"]["median_s"] / by[way]["median_s"]
                for way in ("device_put", "copy_existing")
                if way in by and (moves or way != "device_put")
            }
            | {"verify_over_moving": phases["verify"] / moving if moves else None}
        )
    return found


def markdown(rows: Sequence[dict[str, Any]], summary: Sequence[dict[str, Any]]) -> str:
    """Both as tables."""
    lines = [
        "| tree | pair | way | median s (min - max) | GB/s of what the destination holds |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        rate = r["bytes_held"] / r["median_s"] / 1e9
        lines.append(
            f"| {r['tree']} | {r['pair']} | {r['way']} | {r['median_s']:.4f} ({r['min_s']:.4f} - {r['max_s']:.4f}) | "
            f"{rate:.1f} |"
        )
    head = "| tree | pair | moving / device_put | / gather | / fresh copy | / copy | verifying / moving |"
    head += " whole / device_put | / copy |"
    lines += ["", head]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for s in summary:
        keys = ("device_put", "gather", "copy_fresh", "copy_existing")
        cells = [s.get(f"moving_over_{key}") for key in keys] + [s["verify_over_moving"]]
        cells += [s.get(f"sync_over_{key}") for key in ("device_put", "copy_existing")]
        shown = " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells)
        lines.append(f"| {s['tree']} | {s['pair']} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    use_cores(args.threads)  # before jax counts them
    from lockstep.cluster.devices import simulate_cpu_devices

    simulate_cpu_devices(8)
    if args.processes:
        import sync_transports

        MORE["processes"] = sync_transports.rows
    rows: list[dict[str, Any]] = []
    for tree in args.trees:
        for pair in args.pairs:
            rows += measure(tree, pair, args.rounds)
            gc.collect()
            for more in MORE.values():
                rows += more(tree, pair, args.rounds)
    summary = summarise(rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine_facts(), "rounds": args.rounds, "rows": rows, "summary": summary}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(rows, summary))


if __name__ == "__main__":
    main()
