"""Forms of a layer's and the head's matrix products that XLA offers on this processor: how long, and with which bits.

    python benchmarks/cpu_forms.py [--rows 8,16,32,64] [--repeats 12]

At SmolLM2-135M's widths in float32. `rows`: x [N, in] @ W [in, out], as the decoder does it. `columns`: W' [out, in] @
x' [in, N], which needs the weights stored the other way round. `fused`: q, k, v in one product, gate and up in another.
`pairs`: two halves of the rows as independent chains. Layers take turns, so that weights come from memory as they do in
decoding. Then, for the head and for the MLP's first product, which numbers of rows give the same bits: forms whose bits
change with the number of rows can have only one height in exact mode.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from limits import use_cores

WIDTH, QUERY, KEYS, MLP, VOCAB, LAYERS = 576, 576, 192, 1536, 49152, 12
HEIGHTS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 256)
fence = jax.lax.optimization_barrier
Weights = dict[str, jax.Array]


def layer_weights(rng: np.random.Generator) -> Weights:
    shapes = {
        "q": (WIDTH, QUERY), "k": (WIDTH, KEYS), "v": (WIDTH, KEYS), "o": (QUERY, WIDTH),
        "gate": (WIDTH, MLP), "up": (WIDTH, MLP), "down": (MLP, WIDTH),
    }  # fmt: skip
    return {name: jnp.asarray(0.02 * rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


def rows(w: Weights, x: jax.Array) -> jax.Array:
    q, k, v = (x @ w[n] for n in "qkv")
    x = x + fence(q) @ w["o"] + 0 * (k.sum() + v.sum())
    return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def columns(w: Weights, x: jax.Array) -> jax.Array:
    q, k, v = (w[n] @ x for n in "qkv")
    x = x + w["o"] @ fence(q) + 0 * (k.sum() + v.sum())
    return x + w["down"] @ (jax.nn.silu(w["gate"] @ x) * (w["up"] @ x))


def fused(w: Weights, x: jax.Array) -> jax.Array:
    y = fence(x @ w["qkv"])
    x = x + y[:, :QUERY] @ w["o"] + 0 * y[:, QUERY:].sum()
    y = fence(x @ w["gate_up"])
    return x + (jax.nn.silu(y[:, :MLP]) * y[:, MLP:]) @ w["down"]


def pairs(w: Weights, x: jax.Array) -> jax.Array:
    halves = [fence(half) for half in jnp.split(x, 2)]
    return jnp.concatenate([fence(rows(w, half)) for half in halves])


def forms(layers: Sequence[Weights]) -> dict[str, tuple[Any, list[Weights], bool]]:
    """Name -> (compiled, its layers' weights, whether x is transposed)."""
    turned = [{k: jnp.array(a.T) for k, a in w.items()} for w in layers]
    joined = [
        {
            "qkv": jnp.concatenate([w[n] for n in "qkv"], 1),
            "gate_up": jnp.concatenate([w["gate"], w["up"]], 1),
            "o": w["o"],
            "down": w["down"],
        }
        for w in layers
    ]
    return {
        "rows": (jax.jit(rows), list(layers), False),
        "columns": (jax.jit(columns), turned, True),
        "fused": (jax.jit(fused), joined, False),
        "pairs": (jax.jit(pairs), list(layers), False),
    }


def milliseconds(run: Callable[[], Any], layers: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return 1e3 * (time.perf_counter() - start) / layers


def through(compiled: Any, layers: Sequence[Weights], x: jax.Array) -> jax.Array:
    for w in layers:
        x = compiled(w, x)
    return x


def time_forms(counts: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Rows -> form -> median milliseconds of one layer's products; the forms take turns."""
    rng = np.random.default_rng(0)
    all_forms = forms([layer_weights(rng) for _ in range(LAYERS)])
    found = {}
    for n in counts:
        x = rng.standard_normal((n, WIDTH), np.float32)
        times: dict[str, list[float]] = {name: [] for name in all_forms}
        for turn in range(repeats + 1):
            for name, (compiled, layers, turned) in all_forms.items():
                put = jnp.asarray(x.T if turned else x)
                took = milliseconds(lambda c=compiled, w=layers, p=put: through(c, w, p), LAYERS)
                times[name] += [took] if turn else []  # the first one compiles
        found[str(n)] = {name: round(statistics.median(own), 3) for name, own in times.items()}
    return found


def time_head(counts: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Rows -> form -> median milliseconds of the head's product with its table [VOCAB, WIDTH]; the forms take turns."""
    rng = np.random.default_rng(3)
    table = jnp.asarray(rng.standard_normal((VOCAB, WIDTH), np.float32))
    by_rows, by_columns = jax.jit(lambda w, x: x @ w.T), jax.jit(lambda w, x: w @ x)
    found = {}
    for n in counts:
        x = jnp.asarray(rng.standard_normal((n, WIDTH), np.float32))
        runs = {
            "rows": functools.partial(by_rows, table, x),
            "columns": functools.partial(by_columns, table, jnp.array(x.T)),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(repeats + 1):
            for name, run in runs.items():
                took = milliseconds(run, 1)
                times[name] += [took] if turn else []
        found[str(n)] = {name: round(statistics.median(own), 3) for name, own in times.items()}
    return found


def classes(product: Any, w: jax.Array, turned: bool) -> list[list[int]]:
    """Numbers of rows whose first rows come out with the same bits. product(w, x): x [N, WIDTH], or turned."""
    x = np.random.default_rng(1).standard_normal((max(HEIGHTS), WIDTH), np.float32)
    compiled = jax.jit(product)
    found: list[tuple[np.ndarray, list[int]]] = []
    for n in HEIGHTS:
        # Turned on the host: in the program the compiler would fold it into the product, and make another of it.
        y = np.asarray(compiled(w, np.ascontiguousarray(x[:n].T) if turned else x[:n]))
        y = np.ascontiguousarray(y.T) if turned else y
        for like, members in found:
            both = min(len(like), n)
            if like[:both].tobytes() == y[:both].tobytes():
                members.append(n)
                break
        else:
            found.append((y, [n]))
    return [members for _, members in found]


def bits() -> dict[str, list[list[int]]]:
    rng = np.random.default_rng(2)
    gate, table = (jnp.asarray(rng.standard_normal((out, WIDTH), np.float32)) for out in (MLP, VOCAB))
    return {
        "mlp rows": classes(lambda w, x: x @ w, jnp.array(gate.T), False),
        "mlp columns": classes(lambda w, x: w @ x, gate, True),
        "head columns": classes(lambda w, x: w @ x, table, True),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="8,16,32,64", help="numbers of rows, by comma, even (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2, help="cores to use")
    args = parser.parse_args(argv)
    counts = [int(n) for n in args.rows.split(",")]
    if any(n < 2 or n % 2 for n in counts) or args.repeats < 1:
        parser.error(f"--rows must be even numbers and --repeats at least 1, got {args.rows} and {args.repeats}")
    use_cores(args.threads)
    found = {
        "milliseconds a layer": time_forms(counts, args.repeats),
        "milliseconds of the head": time_head(counts, args.repeats),
        "equal bits": bits(),
    }
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
