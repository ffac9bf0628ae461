"""What planning costs: seconds of one core and memory for the plan and its certificate, each case in a process of its
own.

    python benchmarks/plan.py [--rounds 3]

Nothing is moved and nothing is loaded: plans are made from configurations. CPU seconds, not wall-clock, are the figure,
because one core is what is asked about; `peak` is the largest resident memory of the process, Python included.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from limits import child_environment, machine_facts, use_cores

RESULT = Path(__file__).parent / "results" / "plan.json"
CASES = {
    "Llama-3.1-8B, 8 -> 8": ("llama-3.1-8b", "fsdp=8", "tensor=4,data=2"),
    "Llama-3.1-405B, 128 -> 64": ("llama-3.1-405b", "fsdp=64,tensor=2", "tensor=8,data=8"),
    "DeepSeek-V3, 256 -> 256, by stages and experts": ("deepseek-v3", "pipeline=16,expert=16", "tensor=32,data=8"),
    "DeepSeek-V3, 256 -> 256, by width": ("deepseek-v3", "fsdp=256", "tensor=32,data=8"),
    "Kimi-K2, 256 -> 128, by stages and experts": ("kimi-k2", "pipeline=16,expert=16", "tensor=16,data=8"),
    "Kimi-K2, 256 -> 128, by width": ("kimi-k2", "fsdp=256", "tensor=16,data=8"),
}


def measure(model: str, actor: str, rollout: str) -> dict[str, Any]:
    """One case in this process."""
    from lockstep.models.catalog import load_spec
    from lockstep.models.spec import leaf_table
    from lockstep.sync.certificate import check
    from lockstep.sync.placement import parse_axes, placed
    from lockstep.sync.planner import make_plan

    start = time.process_time()
    leaves = leaf_table(load_spec(model))
    axes = [parse_axes(text) for text in (actor, rollout)]
    counts = [math.prod(sizes.values()) for sizes in axes]
    source = placed(leaves, axes[0], range(counts[0]), "bfloat16")
    destination = placed(leaves, axes[1], range(counts[0], sum(counts)), "bfloat16")
    plan = make_plan(source, destination)
    planned = time.process_time()
    certificate = check(plan)
    done = time.process_time()
    certificate.require()
    return {
        "plan_s": planned - start,
        "certificate_s": done - planned,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "transfers": certificate.transfers,
        "load_over_bound": plan.load_over_bound,
        "seconds_over_bound": plan.seconds / plan.bounds.seconds,
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that each case is measured (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the figures are written (JSON)")
    parser.add_argument("--case", choices=tuple(CASES), help="measure this one here and print it as JSON")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/performance.md."""
    lines = [
        "| plan | CPU s: plan | certificate | peak MiB | transfers | busiest end / bound |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['plan_s']:.2f} | {r['certificate_s']:.2f} | {r['peak_mib']:.0f} | {r['transfers']:,} | "
        f"{r['load_over_bound']:.4f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    if args.case:
        use_cores(1)
        print(json.dumps(measure(*CASES[args.case])))
        return
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(args.rounds):
        for case in CASES:  # interleaved: whatever else the machine does meets all of them
            command = [sys.executable, __file__, "--case", case]
            answer = subprocess.run(command, check=True, capture_output=True, text=True, env=child_environment(1))
            found[case].append(json.loads(answer.stdout))
    rows = [
        {"case": case, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}}
        for case, runs in found.items()
    ]
    args.out.write_text(json.dumps({"machine": machine_facts(), "rounds": args.rounds, "rows": rows}, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
