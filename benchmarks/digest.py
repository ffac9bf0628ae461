"""What verification costs: the digest of a tree against copies of the same bytes, and a whole sync, in one run.

    python benchmarks/digest.py [--dtype float32] [--repeats 5]

The tree has the shapes of SmolLM2-135M, filled with noise. Every line is the best of the repeats. `host copy` writes
into memory that exists; `device copy` is `jax.device_put` to another device, which allocates, as a sync does.
"""

import argparse
import time

import jax
import ml_dtypes
import numpy as np

from lockstep.cluster.devices import simulate_cpu_devices
from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place, shardings
from lockstep.models.spec import LayerKind, ModelSpec, Rope, leaf_table
from lockstep.sync.sync import WeightSync
from lockstep.sync.verify import leaf_digests

SMOLLM2 = ModelSpec(
    "llama", 49152, 576, 9, 3, 64, 1536, (LayerKind(Rope(1e5)),) * 30, 1e-5, 0.125, 8192, tied_head=True
)


def best(function, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    simulate_cpu_devices(2)
    leaves = leaf_table(SMOLLM2)
    dial = Dial.build({"actor": {}, "rollout": {}})
    rng = np.random.default_rng(0)
    dtype = np.dtype(args.dtype if args.dtype == "float32" else ml_dtypes.bfloat16)
    host = {p: rng.standard_normal(leaf.shape, np.float32).astype(dtype) for p, leaf in leaves.items()}
    actor = place(host, leaves, dial.mesh("actor"))
    where = shardings(leaves, dial.mesh("rollout"))
    installed = jax.block_until_ready({p: jax.device_put(x, where[p]) for p, x in actor.items()})
    held = {"previous": installed}
    target = {p: np.empty_like(x) for p, x in host.items()}
    size = sum(x.nbytes for x in host.values())

    def host_copy() -> None:
        for path, array in host.items():
            np.copyto(target[path], array)

    def device_copy() -> None:
        # The one before stays until this one is there, as the installed weights do in a sync.
        held["previous"] = jax.block_until_ready({p: jax.device_put(x, where[p]) for p, x in actor.items()})

    rows = {
        "host copy": best(host_copy, args.repeats),
        "device copy": best(device_copy, args.repeats),
        "digest": best(lambda: leaf_digests(actor), args.repeats),
    }
    sync, receipts = WeightSync(leaves, where, base={}), []
    for version in range(args.repeats + 1):
        installed, receipt = sync.push(version, actor, installed)
        receipts.append(receipt)
    for phase in ("select", "stage", "verify"):
        rows[f"sync: {phase}"] = min(receipt.seconds[phase] for receipt in receipts[1:])
    print(f"{size / 2**20:.0f} MiB, {len(leaves)} leaves, {args.dtype}, {jax.devices()[0].device_kind}")
    for name, seconds in rows.items():
        ratio = seconds / rows["device copy"]
        print(f"{name:14s} {seconds:8.4f} s  {size / seconds / 1e9:7.2f} GB/s  {ratio:5.2f} x device copy")


if __name__ == "__main__":
    main()
