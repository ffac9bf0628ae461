"""Which forms of the decoder's blocks give a row the same bits whatever surrounds it, on the device at hand.

    bash benchmarks/gpu.sh                         # on one GPU card, about ten minutes, environment included
    python benchmarks/gpu_exact.py [--quick] [--out FILE] [--compare FILE]

Exact mode needs of every block (qkv, attention, out + MLP, head) that a row's result depends on the row alone. Four
ways in which a compiler and a library of matrix products can break that are looked at one by one:

- height: the number of rows decides the kernel. Heights with the same bits are a class.
- neighbours: at one height, the row's place, or what stands in the other rows, matters.
- repeat: the same call gives other bits the second time (atomic sums).
- program: the block in a loop over tiles gives other bits than alone, or with another number of tiles.

`--compare` takes the result of an earlier process and adds a fifth: kernels chosen by timing may differ from process to
process. Then what a tile costs against all rows at once, and the claim itself: an engine's recorded log-probabilities
against the trainer's, on SmolLM2-135M or, where it cannot be had, on random weights of its shape.

`gemm pallas` is a product written as a kernel of our own with a fixed block: the form that holds by construction, if
the device's compiler keeps to it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gpu_forms import PAGE, blocks, check_heights, check_tiles, tile_cost

from lockstep.models.decoder import Numerics
from lockstep.models.init import init_params
from lockstep.models.spec import LayerKind, ModelSpec, Rope


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. SystemExit with a message when a value makes no sense."""
    parser = argparse.ArgumentParser(description="Which forms are exact on this device, and what they cost.")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few heights, to try the script itself")
    parser.add_argument("--model", default="smollm2-135m", help="for the engine: a known name or a folder")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="by comma")
    parser.add_argument("--compare", type=Path, help="an earlier result of the same command, from another process")
    parser.add_argument("--out", type=Path, help="the JSON result")
    args = parser.parse_args(argv)
    args.dtypes = args.dtypes.split(",")
    if wrong := [d for d in args.dtypes if d not in ("float32", "bfloat16")]:
        parser.error(f"--dtypes: {wrong[0]!r} is not float32 or bfloat16")
    if args.compare and not args.compare.is_file():
        parser.error(f"--compare: {args.compare} does not exist; it is the --out of an earlier run")
    return args


def shape_of_model(quick: bool) -> ModelSpec:
    """SmolLM2-135M's numbers, or a model that compiles in a moment."""
    if quick:
        return ModelSpec("llama", 256, 64, 4, 2, 16, 128, (LayerKind(Rope(1e4)),) * 2, 1e-5, 0.25, 512, tied_head=True)
    layers = (LayerKind(Rope(1e5)),) * 30
    return ModelSpec("llama", 49152, 576, 9, 3, 64, 1536, layers, 1e-5, 64**-0.5, 2048, tied_head=True)


# ---------------------------------------------------------------- the claim itself


def engine_check(args: argparse.Namespace, dtype: str, tile: int, new_tokens: int) -> dict[str, Any]:
    """Generate, recompute as the trainer does, compare. tile 0: fast mode, for its speed and its mismatch."""
    from lockstep.cluster.mesh import Dial
    from lockstep.cluster.programs import Programs, SplitWeights
    from lockstep.cluster.sharding import place
    from lockstep.models.spec import leaf_table
    from lockstep.rollout.engine import Engine
    from lockstep.train.batching import Geometry, make_micro_batches
    from lockstep.train.forward import score
    from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams

    spec, host, what = weights_for(args, dtype)
    mesh = Dial.build({"actor": {}}, jax.devices()[:1]).mesh("actor")
    programs = Programs(spec, Numerics(dtype, tile, PAGE), mesh, leaf_table(spec))
    params = place(host, programs.leaves, mesh)
    engine = Engine(programs, slots=64, max_positions=64 + new_tokens, fingerprint=Fingerprint("t", "c", "d", "n"))
    engine.install(PolicyVersion(0, "digest"), params)
    rng = np.random.default_rng(2)
    made = [Prompt(f"p/{i}", "", tuple(rng.integers(0, spec.vocab_size, 8 + 5 * i % 48).tolist())) for i in range(12)]
    seeds = {p.id: list(range(5)) for p in made}
    sampling = SamplingParams(1.0, new_tokens, frozenset())
    engine.generate(made, seeds, sampling)  # compiles
    start = time.perf_counter()
    found = engine.generate(made, seeds, sampling)
    spent = time.perf_counter() - start
    recorded, again = [], []
    for part in (found, found[::2]):  # other micro-batches, other neighbours
        batches = make_micro_batches(part, np.zeros(len(part)), 1.0, Geometry(1, 1024, tile, PAGE))
        flat: list[np.ndarray | None] = [None] * len(part)
        for batch, values in zip(
            batches, score(programs, SplitWeights.of(params, spec.num_layers), batches), strict=True
        ):
            batch.scatter(values, flat)
        recorded += [t.logprobs for t in part]
        again += [np.asarray(v) for v in flat]
    a, b = np.concatenate(recorded), np.concatenate(again)
    tokens = sum(len(t.completion_ids) for t in found)
    return {
        "model": what, "dtype": dtype, "tile": tile, "tokens": len(a), "tokens_per_s": tokens / spent,
        "unequal": int((a.view(np.uint32) != b.view(np.uint32)).sum()), "max_abs": float(np.abs(a - b).max()),
    }  # fmt: skip


@functools.cache
def _loaded(name: str, dtype: str) -> Any:
    from lockstep.models import load_model

    return load_model(name, dtype)


def weights_for(args: argparse.Namespace, dtype: str) -> tuple[ModelSpec, dict[str, Any], str]:
    """(spec, weights, what they are): the model, or random ones where it cannot be had."""
    from lockstep.errors import LockstepError

    if not args.quick:
        try:
            loaded = _loaded(args.model, dtype)
            return loaded.spec, dict(loaded.params), args.model
        except (LockstepError, OSError) as error:
            print(f"{args.model} cannot be had ({error}); random weights of its shape instead", file=sys.stderr)
    spec = shape_of_model(args.quick)
    return spec, dict(init_params(spec, 3, dtype)), "random weights"


# ---------------------------------------------------------------- the whole script


def attempt(what: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """run()'s findings, or the error in their place: a form that a device cannot run is a finding too."""
    try:
        return run()
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything. "forms": per block, dtype; "engine": per dtype and tile."""
    heights = [1, 16, 32] if args.quick else [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512, 1024]
    tiles, counts = ([8], (1, 2)) if args.quick else ([8, 16, 32, 64, 128], (1, 2, 8))
    spec, forms = shape_of_model(args.quick), []
    for dtype in args.dtypes:
        for block in blocks(spec, dtype, max(heights)):
            say = f"{block.name}, {dtype}"
            form: dict[str, Any] = {"block": block.name, "dtype": dtype}
            form |= attempt(say, lambda b=block, d=dtype: check_heights(b, d, heights))
            form["tiles"] = {}
            for tile in tiles:
                found = attempt(f"{say}, tile {tile}", lambda b=block, d=dtype, t=tile: check_tiles(b, d, t, counts))
                if "error" not in found:
                    repeats = 3 if args.quick else 20
                    found["cost"] = tile_cost(block, dtype, tile, max(heights), repeats)
                form["tiles"][str(tile)] = found
            forms.append(form)
            print(line_of(form), flush=True)
    engine = []
    for dtype in args.dtypes:
        for tile in (32, 0) if args.quick else (32, 64, 128, 0):
            found = attempt(
                f"engine, {dtype}, tile {tile}",
                lambda d=dtype, t=tile: engine_check(args, d, t, 8 if args.quick else 64),
            )
            engine.append({"dtype": dtype, "tile": tile} | found)
    return {"forms": forms, "engine": engine}


def line_of(form: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in form:
        return f"| {form['block']} | {form['dtype']} | {form['error']} | | | |"
    classes = " ".join("{" + ", ".join(map(str, c)) + "}" for c in form["classes"])
    tiles = form["tiles"].items()
    holding = ", ".join(f"{t} ({f['cost']:.2f} x)" for t, f in tiles if f.get("holds")) or "none"
    breaking = ", ".join(t for t, f in tiles if not f.get("holds")) or "-"
    bad = form["neighbours_matter_at"] + form["repeats_differ_at"]
    return f"| {form['block']} | {form['dtype']} | {classes} | {bad or '-'} | {holding} | {breaking} |"


def tables(result: dict[str, Any]) -> str:
    """The findings as Markdown."""
    lines = [
        "| block | dtype | heights of equal bits | others or repeats matter at | tiles that hold (cost) | that break |",
        "|---|---|---|---|---|---|",
        *map(line_of, result["forms"]),
        "",
        "| engine | dtype | tile | unequal tokens | max abs | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for e in result["engine"]:
        if "error" in e:
            lines.append(f"| {e['error']} | {e['dtype']} | {e['tile']} | | | |")
        else:
            unequal = f"{e['unequal']} of {e['tokens']}"
            lines.append(
                f"| {e['model']} | {e['dtype']} | {e['tile'] or 'fast'} | {unequal} | {e['max_abs']:.3g} | "
                f"{e['tokens_per_s']:.0f} |"
            )
    if "processes" in result:
        changed = result["processes"]["changed"]
        lines += ["", "other process: " + ("other bits in " + "; ".join(changed) if changed else "the same bits")]
    return "\n".join(lines)


def changed_since(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Blocks, dtypes and tiles whose digest another process found to be different."""

    def digests(result: dict[str, Any]) -> dict[str, str]:
        return {
            f"{f['block']} {f['dtype']} tile {t}": v["digest"]
            for f in result["forms"] for t, v in f["tiles"].items() if "digest" in v
        }  # fmt: skip

    before, after = digests(earlier), digests(now)
    return [name for name in after if name in before and before[name] != after[name]]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    start = time.perf_counter()
    device = jax.devices()[0]
    result: dict[str, Any] = {
        "device": f"{device.platform} {device.device_kind}",
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **measure(args),
    }
    if args.compare:
        earlier = json.loads(args.compare.read_text(encoding="utf-8"))
        result["processes"] = {"changed": changed_since(earlier, result)}
    result["seconds"] = time.perf_counter() - start
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{result['device']}, jax {jax.__version__}, XLA_FLAGS={result['xla_flags']!r}\n\n{tables(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
