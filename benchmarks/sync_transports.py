"""Syncs to another process, over every transport, against a plain copy of the same bytes, in one run.

    python benchmarks/sync_transports.py [--parameters 135m 1b] [--dtype bfloat16] [--repeats 3] [--json FILE]

The trainer holds the tree on two devices (fsdp = 2), the sampler, a process of its own, on two others (tensor = 2).
Every line is the best of the repeats; the sampler's weights are noise before the first. `transfer` is until all had
arrived, `sync` a whole push: plan, send, transfer, digests on both sides, flip. Files go to a folder on disk and are
read back from the system's cache. `memory copy` writes into memory that exists, `fresh copy` into memory that does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.cluster.devices import simulate_cpu_devices
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table
from lockstep.sync.channel import new_token
from lockstep.sync.ends import numbers_from
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.remote import RemoteReplica
from lockstep.sync.replica import LocalReplica
from lockstep.sync.replica_server import ReplicaServer
from lockstep.sync.shared_memory import SharedMemoryTransport
from lockstep.sync.sync import WeightSync
from lockstep.sync.transfer_server import TransferTransport

MODELS = {
    "135m": ModelSpec("llama", 49152, 576, 9, 3, 64, 1536, (LayerKind(Rope(1e5)),) * 30, 1e-5, 0.125, 8192, True),
    "1b": ModelSpec("llama", 128256, 2048, 32, 8, 64, 8192, (LayerKind(Rope(5e5)),) * 16, 1e-5, 0.125, 8192, True),
}
TOKEN = "LOCKSTEP_BENCHMARK_TOKEN"


def dtype_of(name: str) -> np.dtype:
    return np.dtype(name if name == "float32" else getattr(ml_dtypes, name))


def tree_of(leaves: dict[str, Leaf], dtype: str, spec: PartitionSpec, axis: str, seed: int) -> dict[str, jax.Array]:
    """Noise of every leaf's shape; matrices cut along `axis`."""
    mesh = Mesh(np.array(jax.devices()), (axis,))
    rng = np.random.default_rng(seed)
    found = {}
    for path, leaf in leaves.items():
        where = NamedSharding(mesh, spec if len(leaf.shape) == 2 else PartitionSpec())
        # Bits, not numbers: drawing a thousand million normal ones takes longer than all that is measured.
        raw = rng.integers(0, 0x3F80, leaf.shape, np.uint16)
        wide = raw.view(ml_dtypes.bfloat16).astype(dtype_of(dtype))
        found[path] = jax.device_put(wide, where)
    return jax.block_until_ready(found)


def ends(folder: Path, owner: str) -> dict[str, Any]:
    """One end of every transport."""
    every = TransferTransport(), FilesTransport(folder / "weights"), SharedMemoryTransport(owner)
    return {transport.name: transport for transport in every}


def serve(model: str, dtype: str, folder: Path, name: str) -> None:
    """The sampler's process, until stdin closes."""
    simulate_cpu_devices(2)
    leaves = leaf_table(MODELS[model])
    blank = tree_of(leaves, dtype, PartitionSpec(None, "tensor"), "tensor", 1)
    where = {path: leaf.sharding for path, leaf in blank.items()}
    numbers = numbers_from(1024, where.values())
    transport = ends(folder, "sampler")[name]
    replica = LocalReplica("rollout", blank, where, transport, numbers=numbers)
    del blank
    ReplicaServer(replica, transport, numbers, f"unix:{folder}/channel", os.environ[TOKEN]).start()
    print("ready", flush=True)
    sys.stdin.read()


def copies(tree: dict[str, jax.Array]) -> dict[str, float]:
    """Seconds to copy the tree's bytes in memory: the limit of one host."""
    host = [np.asarray(shard.data).view(np.uint8) for leaf in tree.values() for shard in leaf.addressable_shards]
    target = [np.empty_like(part) for part in host]
    for into, part in zip(target, host, strict=True):
        np.copyto(into, part)
    start = time.perf_counter()
    for into, part in zip(target, host, strict=True):
        np.copyto(into, part)
    middle = time.perf_counter()
    kept = [part.copy() for part in host]
    end = time.perf_counter()
    del kept
    return {"memory copy": middle - start, "fresh copy": end - middle}


def measure(model: str, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Rows for one model: {"model", "what", "seconds", "bytes", "copies": seconds over those of a memory copy}."""
    leaves = leaf_table(MODELS[model])
    tree = tree_of(leaves, dtype, PartitionSpec("fsdp", None), "fsdp", 2)
    size = sum(leaf.nbytes for leaf in tree.values())
    every = [copies(tree) for _ in range(repeats)]
    best = {what: min(found[what] for found in every) for what in every[0]}
    for name in ("transfer", "files", "shared-memory"):
        with tempfile.TemporaryDirectory() as folder:
            best |= between_processes(name, Path(folder), model, dtype, tree, repeats)
    copy_s = best["memory copy"]
    return [
        {"model": model, "what": what, "seconds": seconds, "bytes": size, "copies": seconds / copy_s}
        for what, seconds in best.items()
    ]


def between_processes(
    name: str, folder: Path, model: str, dtype: str, tree: dict[str, jax.Array], repeats: int
) -> dict[str, float]:
    """Best seconds over one transport, to a sampler that is started for it."""
    token = new_token()
    sampler = subprocess.Popen(
        [sys.executable, __file__, "--serve", model, dtype, str(folder), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, TOKEN: token},
    )
    try:
        assert sampler.stdout is not None and sampler.stdout.readline() == "ready\n"
        transport = ends(folder, "trainer")[name]
        return pushes(transport, f"unix:{folder}/channel", token, leaf_table(MODELS[model]), tree, repeats)
    finally:
        sampler.communicate()


def pushes(
    transport: Any, address: str, token: str, leaves: dict[str, Leaf], tree: dict[str, jax.Array], repeats: int
) -> dict[str, float]:
    """Best seconds of the phases of a push, after one to warm up."""
    with RemoteReplica("rollout", address, token, transport, patience_s=600) as remote:
        sync = WeightSync(leaves, [remote.route()], base={}, deadline_s=600)
        found: dict[str, list[float]] = {}
        for version in range(repeats + 1):
            start = time.perf_counter()
            receipt = sync.push(version, tree)
            whole = time.perf_counter() - start
            assert receipt.bytes_moved == receipt.bytes_planned > 0
            if version:
                moving = receipt.seconds["stage"] + receipt.seconds["transfer"]
                for phase, seconds in (("send and transfer", moving), ("sync", whole)):
                    found.setdefault(f"{transport.name}: {phase}", []).append(seconds)
    return {what: min(seconds) for what, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", nargs="+", choices=list(MODELS), default=["135m"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], args.serve[1], Path(args.serve[2]), args.serve[3])
        return
    simulate_cpu_devices(2)
    rows = []
    for model in args.parameters:
        rows += measure(model, args.dtype, args.repeats)
    for row in rows:
        speed = row["bytes"] / row["seconds"] / 1e9
        print(
            f"{row['model']:5s} {row['what']:34s} {row['seconds']:8.3f} s {speed:7.2f} GB/s {row['copies']:7.1f} x copy"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
