"""What verification costs: digests of a tree beside copies and a plain read of the same bytes, in one run.

    python benchmarks/digest.py [--dtype bfloat16] [--repeats 9]

The tree has the shapes of SmolLM2-135M, filled with noise, on two simulated devices. Every round measures every row
once, so that whatever else the machine does meets all of them; shown are medians, and medians of the rounds' ratios.
`device copy` is `jax.device_put` to the other device, which allocates, as a sync does; `host copy` writes into memory
that exists; `plain read` is numpy's maximum over the bytes as 64-bit words. `both sides` digests source and destination
one after the other, as a sync in one process does for leaves that moved; `cast` foretells the digests of the tree in
the other of the two types.
"""

import argparse
import statistics
import time

import jax
import ml_dtypes
import numpy as np

from lockstep.cluster.devices import simulate_cpu_devices
from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place, shardings
from lockstep.models.spec import LayerKind, ModelSpec, Rope, leaf_table
from lockstep.sync.mapping import identity_map
from lockstep.sync.verify import host_digest, leaf_digests, source_digests

SMOLLM2 = ModelSpec(
    "llama", 49152, 576, 9, 3, 64, 1536, (LayerKind(Rope(1e5)),) * 30, 1e-5, 0.125, 8192, tied_head=True
)
DTYPES = {"float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def interleaved(rows, repeats: int) -> dict[str, list[float]]:
    """Seconds of every row in every round, after one round to warm up."""
    for function in rows.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, function in rows.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    simulate_cpu_devices(2)
    leaves = leaf_table(SMOLLM2)
    dial = Dial.build({"actor": {}, "rollout": {}})
    rng = np.random.default_rng(0)
    host = {p: rng.standard_normal(leaf.shape, np.float32).astype(DTYPES[args.dtype]) for p, leaf in leaves.items()}
    actor = place(host, leaves, dial.mesh("actor"))
    where = shardings(leaves, dial.mesh("rollout"))
    installed = jax.block_until_ready({p: jax.device_put(x, where[p]) for p, x in actor.items()})
    held = {"previous": installed}
    target = {p: np.empty_like(x) for p, x in host.items()}
    size = sum(x.nbytes for x in host.values())
    (other,) = set(DTYPES) - {args.dtype}
    forms = {p: (x.shape, x.dtype.name) for p, x in host.items()}
    cast = identity_map(forms, {p: (shape, other) for p, (shape, _) in forms.items()}, cast=True)

    def plain_read() -> None:
        for array in host.values():
            array.reshape(-1).view(np.uint64).max()

    def host_copy() -> None:
        for path, array in host.items():
            np.copyto(target[path], array)

    def device_copy() -> None:
        # The one before stays until this one is there, as the installed weights do in a sync.
        held["previous"] = jax.block_until_ready({p: jax.device_put(x, where[p]) for p, x in actor.items()})

    def both_sides() -> None:
        assert leaf_digests(actor) == leaf_digests(installed)

    rows = {
        "plain read": plain_read,
        "host copy": host_copy,
        "device copy": device_copy,
        "digest": lambda: leaf_digests(actor),
        "both sides": both_sides,
        "cast": lambda: source_digests(actor, cast),
        "host digest": lambda: {path: host_digest(array) for path, array in host.items()},
    }
    times = interleaved(rows, args.repeats)
    print(f"{size / 2**20:.0f} MiB, {len(leaves)} leaves, {args.dtype}, {jax.devices()[0].device_kind}")
    print(f"{'':14s} {'seconds':>9s} {'GB/s':>7s} {'x plain read':>13s} {'x device copy':>14s}")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        read, copied = (
            statistics.median(a / b for a, b in zip(seconds, times[base], strict=True))
            for base in ("plain read", "device copy")
        )
        print(f"{name:14s} {middle:9.4f} {size / middle / 1e9:7.2f} {read:13.2f} {copied:14.2f}")


if __name__ == "__main__":
    main()
