"""Syncs to another process, over every transport, against plain copies of the same bytes, in one run.

    python benchmarks/sync_transports.py [--trees smollm2,1b] [--rounds 5] [--out F]

The trainer holds the tree in bfloat16 on two devices (fsdp = 2), the sampler, a process of its own, on two others
(tensor = 2), with noise before the first sync. `moving` is sending and receiving, `sync` a whole push: plan, send,
transfer, digests on both sides, flip. Files go to a folder on disk, fsync included, and are read back from the
system's cache. copy_existing writes into memory that is there, copy_fresh into memory that is made for it. Medians
count. `python benchmarks/sync.py --processes` puts these rows beside those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from limits import machine_facts

from lockstep.cluster.devices import simulate_cpu_devices
from lockstep.models.spec import Leaf
from lockstep.sync.channel import new_token
from lockstep.sync.ends import numbers_from
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.remote import RemoteReplica
from lockstep.sync.replica import LocalReplica
from lockstep.sync.replica_server import ReplicaServer
from lockstep.sync.shared_memory import SharedMemoryTransport
from lockstep.sync.sync import WeightSync
from lockstep.sync.transfer_server import TransferTransport
from sync import TREES, make_leaves, markdown, spread

TOKEN = "LOCKSTEP_BENCHMARK_TOKEN"


def tree_of(leaves: Mapping[str, Leaf], axis: str, dim: int, seed: int) -> dict[str, jax.Array]:
    """Noise of every leaf's shape; matrices cut along one dim."""
    mesh = Mesh(np.array(jax.devices()[:2]), (axis,))
    rng = np.random.default_rng(seed)
    found = {}
    for path, leaf in leaves.items():
        cut = [axis if at == dim and len(leaf.shape) == 2 else None for at in range(len(leaf.shape))]
        # Bits, not numbers: drawing a thousand million normal ones takes longer than all that is measured.
        bits = rng.integers(0, 0x3F80, leaf.shape, np.uint16)
        found[path] = jax.device_put(bits.view(ml_dtypes.bfloat16), NamedSharding(mesh, PartitionSpec(*cut)))
    return jax.block_until_ready(found)


def ends(folder: Path, owner: str) -> dict[str, Any]:
    """One end of every transport."""
    every = TransferTransport(), FilesTransport(folder / "weights"), SharedMemoryTransport(owner)
    return {transport.name: transport for transport in every}


def serve(tree: str, folder: Path, name: str) -> None:
    """The sampler's process, until stdin closes."""
    simulate_cpu_devices(2)
    blank = tree_of(make_leaves(tree), "tensor", 1, 1)
    where = {path: leaf.sharding for path, leaf in blank.items()}
    numbers = numbers_from(1024, where.values())
    transport = ends(folder, "sampler")[name]
    replica = LocalReplica("rollout", blank, where, transport, numbers=numbers)
    del blank
    ReplicaServer(replica, transport, numbers, f"unix:{folder}/channel", os.environ[TOKEN]).start()
    print("ready", flush=True)
    sys.stdin.read()


def copies(tree: Mapping[str, jax.Array]) -> dict[str, float]:
    """Seconds to copy the tree's bytes in memory, on one thread."""
    host = [np.asarray(shard.data).view(np.uint16) for leaf in tree.values() for shard in leaf.addressable_shards]
    target = [part.copy() for part in host]
    start = time.perf_counter()
    for into, part in zip(target, host, strict=True):
        np.copyto(into, part)
    middle = time.perf_counter()
    kept = [part.copy() for part in host]
    end = time.perf_counter()
    del kept
    return {"copy_existing": middle - start, "copy_fresh": end - middle}


def rows(tree: str, pair: str, rounds: int) -> list[dict[str, Any]]:
    """Rows for `sync.MORE`; none for meshes that are one, because two processes share no device."""
    if pair != "apart":
        return []
    weights = tree_of(make_leaves(tree), "fsdp", 0, 2)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way, spent in copies(weights).items():
            seconds.setdefault(f"{way} (bfloat16)", []).append(spent)
    for name in ("transfer", "files", "shared-memory"):
        with tempfile.TemporaryDirectory() as folder:
            seconds |= between_processes(name, Path(folder), tree, weights, rounds)
    size = sum(leaf.nbytes for leaf in weights.values())
    head = {"tree": tree, "pair": pair, "bytes_held": size}
    return [{**head, "way": way, **spread(spent)} for way, spent in seconds.items()]


def between_processes(
    name: str, folder: Path, tree: str, weights: Mapping[str, jax.Array], rounds: int
) -> dict[str, list[float]]:
    """Way -> seconds of every round over one transport, to a sampler that is started for it; one round more, to warm
    up, comes first."""
    token = new_token()
    sampler = subprocess.Popen(
        [sys.executable, __file__, "--serve", tree, str(folder), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, TOKEN: token},
    )
    found: dict[str, list[float]] = {f"{name}: moving": [], f"{name}: sync": []}
    try:
        assert sampler.stdout is not None and sampler.stdout.readline() == "ready\n"
        transport = ends(folder, "trainer")[name]
        with RemoteReplica("rollout", f"unix:{folder}/channel", token, transport, patience_s=3600) as remote:
            sync = WeightSync(make_leaves(tree), [remote.route()], base={}, deadline_s=3600)
            for version in range(rounds + 1):
                start = time.perf_counter()
                receipt = sync.push(version, weights)
                whole = time.perf_counter() - start
                assert receipt.bytes_moved == receipt.bytes_planned > 0
                if version:
                    found[f"{name}: moving"].append(receipt.seconds["stage"] + receipt.seconds["transfer"])
                    found[f"{name}: sync"].append(whole)
    finally:
        sampler.communicate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trees", default="smollm2", help=f"of {', '.join(TREES)}")
    parser.add_argument("--rounds", type=int, default=5, help="timed repetitions")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], Path(args.serve[1]), args.serve[2])
        return
    simulate_cpu_devices(2)
    found = [row for tree in args.trees.split(",") for row in rows(tree, "apart", args.rounds)]
    if args.out:
        args.out.write_text(
            json.dumps({"machine": machine_facts(), "rounds": args.rounds, "rows": found}, indent=1) + "\n"
        )
    print(markdown(found, []))


if __name__ == "__main__":
    main()
