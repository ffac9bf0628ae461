"""What this machine can do at most: memory bandwidth and float32 multiply rate, the yardsticks of the benchmarks.

    python benchmarks/limits.py [--threads 2] [--repeats 5] [--megabytes 256] [--out limits.json]

Decoding a token reads every weight once, so read bandwidth bounds it; training is matrix products, so the multiply
rate bounds it. Every number is the best of several repeats: a limit is what the machine reaches when nothing disturbs.

copy_gb_s counts the bytes read plus the bytes written. read_gb_s reduces an array much larger than the caches.
matmul_gflop_s is 2 m k n / seconds for [m, k] x [k, n] at sizes of SmolLM2-135M: a decode tile, a training
micro-batch, the head. Each is measured with numpy (and its BLAS) and with jax (compiled for the CPU); `best` is the
larger of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# [m, k] x [k, n]: a square one for the peak, then rows x (width -> MLP, MLP -> width, width -> vocabulary).
MATMULS = (
    (2048, 2048, 2048),
    (32, 576, 1536),
    (128, 576, 1536),
    (1024, 576, 1536),
    (1024, 1536, 576),
    (32, 576, 49152),
    (128, 576, 49152),
)
GB = 1e9


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. SystemExit with a message when a value makes no sense."""
    parser = argparse.ArgumentParser(description="Measure this machine's memory bandwidth and float32 multiply rate.")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="cores to use (default: all usable)")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many is reported")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the array that bandwidth is measured on")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args(argv)
    for name in ("threads", "repeats", "megabytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.threads > usable_cores():
        parser.error(f"--threads is {args.threads}, this process may use {usable_cores()} cores")
    return args


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_cores(count: int) -> None:
    """Confine this process, and those it starts, to `count` of the cores it has (where the system can do that)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a measured process: so many threads, CPU only, and no BLAS kernel forced from outside (a
    forced one can be many times slower than the machine's own)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return env | counts | {"JAX_PLATFORMS": "cpu"}


def machine_facts() -> dict[str, Any]:
    """What the numbers were measured on."""
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory_gb"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB, 1)
    if hasattr(os, "getloadavg"):
        facts["load_average"] = round(os.getloadavg()[0], 2)
    return facts


def cpu_name() -> str:
    """The processor as the system names it; family and model with it, since virtual machines shorten the name."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in info.read_text().split("\n\n", 1)[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    name = fields.get("model name", platform.machine())
    if "cpu family" in fields and "model" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def best_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Least wall-clock seconds of one call, after one call that does not count. Short calls are repeated in a batch."""
    run()
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    inner = max(1, int(0.02 / max(once, 1e-7)))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        found.append((time.perf_counter() - start) / inner)
    return min(found)


def with_best(measured: dict[str, float]) -> dict[str, float]:
    """The numbers rounded, and the largest of them as `best`."""
    return {name: round(value, 1) for name, value in {**measured, "best": max(measured.values())}.items()}


def bandwidth(threads: int, repeats: int, megabytes: int) -> dict[str, dict[str, float]]:
    """copy_gb_s and read_gb_s, by method."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    source = np.ones(megabytes * 1_000_000 // 4, np.float32)
    target = np.empty_like(source)
    pieces = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:  # numpy lets go of the interpreter lock in these calls
        copy_s = best_seconds(lambda: list(pool.map(lambda p: np.copyto(p[1], p[0]), pieces)), repeats)
        read_s = best_seconds(lambda: list(pool.map(lambda p: p[0].max(), pieces)), repeats)
    array = jnp.asarray(source)
    total = jax.jit(jnp.sum)
    sum_s = best_seconds(lambda: total(array).block_until_ready(), repeats)
    # Donated, so that the result is written over the argument: a new one would measure how pages are handed out.
    update = jax.jit(lambda x: x + 1.0, donate_argnums=0)

    def update_in_place() -> None:
        nonlocal array
        array = update(array).block_until_ready()

    update_s = best_seconds(update_in_place, repeats)
    size = source.nbytes / GB
    return {
        "copy_gb_s": with_best({"numpy": 2 * size / copy_s, "jax": 2 * size / update_s}),
        "read_gb_s": with_best({"numpy": size / read_s, "jax": size / sum_s}),
    }


def multiply_rates(repeats: int) -> dict[str, dict[str, float]]:
    """matmul_gflop_s by size and method."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    product = jax.jit(lambda a, b: a @ b)
    rates = {}
    for m, k, n in MATMULS:
        a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
        out = np.empty((m, n), np.float32)
        da, db = jax.device_put(a), jax.device_put(b)
        seconds = {
            "numpy": best_seconds(lambda a=a, b=b, out=out: np.matmul(a, b, out=out), repeats),
            "jax": best_seconds(lambda da=da, db=db: product(da, db).block_until_ready(), repeats),
        }
        rates[f"{m}x{k}x{n}"] = with_best({name: 2 * m * k * n / s / 1e9 for name, s in seconds.items()})
    return rates


def measure(threads: int, repeats: int, megabytes: int) -> dict[str, Any]:
    """Everything, in this process: call it before numpy or jax are imported, from one with `child_environment`."""
    return {**bandwidth(threads, repeats, megabytes), "matmul_gflop_s": multiply_rates(repeats)}


def markdown(limits: dict[str, Any]) -> str:
    """The limits as a table."""
    lines = ["| limit | numpy | jax | best |", "|---|---|---|---|"]
    rows = {"copy, GB/s (read + written)": limits["copy_gb_s"], "read, GB/s": limits["read_gb_s"]}
    rows |= {f"matmul {size}, GFLOP/s": rate for size, rate in limits["matmul_gflop_s"].items()}
    lines += [f"| {name} | {r['numpy']} | {r['jax']} | {r['best']} |" for name, r in rows.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    env = child_environment(args.threads)
    if any(os.environ.get(k) != v for k, v in env.items()) or env.keys() != os.environ.keys():
        # The math libraries read these when they load, so a fresh interpreter gets them.
        use_cores(args.threads)
        os.execve(sys.executable, [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)], env)
    result = {
        "machine": machine_facts(),
        "threads": args.threads,
        **measure(args.threads, args.repeats, args.megabytes),
    }
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
