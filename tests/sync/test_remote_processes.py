"""Trainer and sampler in processes of their own: the documented pair, and what is left when one of them dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
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

PAGE = Path(__file__).parent.parent.parent / "docs" / "transports.md"
TOKEN = new_token()
SHAPES = {"up": (64, 32), "norm": (32,)}
LEAVES = {path: Leaf(path, shape, (None,) * len(shape), "normal") for path, shape in SHAPES.items()}

COMMON = f"""
import os, signal, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from lockstep.cluster.devices import simulate_cpu_devices, enable_compilation_cache
from lockstep.models.spec import Leaf
from lockstep.sync.ends import numbers_from
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.remote import RemoteReplica
from lockstep.sync.replica import LocalReplica
from lockstep.sync.replica_server import ReplicaServer
from lockstep.sync.shared_memory import SharedMemoryTransport
from lockstep.sync.sync import WeightSync
from lockstep.sync.transfer_server import TransferTransport
simulate_cpu_devices(4)
if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    enable_compilation_cache(cache)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
SHAPES, TOKEN = {SHAPES!r}, os.environ["SYNC_TOKEN"]
LEAVES = {{path: Leaf(path, shape, (None,) * len(shape), "normal") for path, shape in SHAPES.items()}}
"""

# One sampler with a replica per transport, at unix:<folder>/<transport>.
SAMPLER = (
    COMMON
    + """
folder = Path(sys.argv[1])
where = {"up": NamedSharding(mesh, P("b", None)), "norm": NamedSharding(mesh, P())}
rng = np.random.default_rng(5)
noise = {p: jax.device_put(rng.standard_normal(shape, np.float32), where[p]) for p, shape in SHAPES.items()}
numbers = numbers_from(1024, where.values())
for transport in (TransferTransport(), FilesTransport(folder / "weights"), SharedMemoryTransport("sampler")):
    replica = LocalReplica("rollout", noise, where, transport, numbers=numbers)
    ReplicaServer(replica, transport, numbers, f"unix:{folder}/{transport.name}", TOKEN).start()
print("listening", flush=True)
sys.stdin.read()
"""
)

# A trainer that publishes version 1 and is killed in the middle of version 2.
TRAINER = (
    COMMON
    + """
class Doomed(TransferTransport):
    def arrived(self, version, round_number):
        if version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().arrived(version, round_number)

weights = {p: jax.device_put(np.full(s, 2.0, np.float32), NamedSharding(mesh, P("a"))) for p, s in SHAPES.items()}
sync = WeightSync(LEAVES, [RemoteReplica("rollout", sys.argv[1], TOKEN, Doomed()).route()], base={}, staging_bytes=512)
sync.push(1, weights)
print("published", flush=True)
sync.push(2, {p: x + 1 for p, x in weights.items()})
"""
)


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    running: list[subprocess.Popen] = []

    def start(code: str, *args: object) -> subprocess.Popen:
        script = tmp_path / f"script{len(running)}.py"
        script.write_text(code)
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, args)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "SYNC_TOKEN": TOKEN, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )  # fmt: skip
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def weights(seed: int) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    rng = np.random.default_rng(seed)
    place = {"up": P("a", "b"), "norm": P()}
    return {
        path: jax.device_put(rng.standard_normal(shape, np.float32), NamedSharding(mesh, place[path]))
        for path, shape in SHAPES.items()
    }


def test_the_documented_pair_syncs(spawn) -> None:
    sampler_code, trainer_code, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    sampler = spawn(sampler_code)
    trainer = spawn(trainer_code, sampler.stdout.readline().strip())
    said, _ = trainer.communicate(timeout=120)
    # 64 rows of 128 in halves; 64 numbers on two devices.
    assert trainer.returncode == 0 and re.fullmatch(r"published v1:\w{8}: 33280 bytes over \d+ links\n", said), said
    assert re.fullmatch(r"serving v1:\w{8}: up is 8192.000 in all\n", sampler.stdout.readline())
    sampler.communicate(timeout=60)
    assert sampler.returncode == 0


def test_every_transport_to_a_process_that_is_stopped_killed_and_restarted(spawn, tmp_path: Path) -> None:
    """Noise first; a peer that is stopped meets the deadline; one that is killed is noticed at once; one that comes
    back serves nothing and is mended by a whole sync."""
    shared = SharedMemoryTransport("trainer")
    senders: list[Any] = [TransferTransport(), FilesTransport(tmp_path / "weights"), shared]
    sampler = spawn(SAMPLER, tmp_path)
    assert sampler.stdout.readline() == "listening\n"
    remotes = {
        t.name: RemoteReplica("rollout", f"unix:{tmp_path}/{t.name}", TOKEN, t, source="actor", patience_s=3.0)
        for t in senders
    }
    syncs = {}
    try:
        for name, remote in remotes.items():
            assert remote.active is None
            syncs[name] = WeightSync(LEAVES, [remote.route()], base={}, staging_bytes=512, deadline_s=60)
            receipt = syncs[name].push(1, weights(1))
            assert receipt.bytes_moved == receipt.bytes_planned > 0 and remote.active == receipt.policy
            again = syncs[name].push(2, weights(1))
            assert again.leaf_digests == receipt.leaf_digests and again.digest == receipt.digest

        os.kill(sampler.pid, signal.SIGSTOP)
        syncs["transfer"]._deadline_s = 0.5
        waited = r"actor waited 0\.[4-9] s for (rollout|replica 'rollout') \(.*version 3\)"
        with pytest.raises(SyncError, match=waited):
            syncs["transfer"].push(3, weights(3))
        syncs["transfer"].reset()
        syncs["transfer"]._deadline_s = 60
        os.kill(sampler.pid, signal.SIGCONT)
        for name, remote in remotes.items():
            assert remote.active.number == 2
            assert syncs[name].push(3, weights(3)).policy == remote.active

        os.kill(sampler.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (sampler.pid, signal.SIGKILL)).start()
        with pytest.raises(SyncError, match=r"actor lost rollout after waiting \d\.\d s .*version 4"):
            syncs["transfer"].push(4, weights(4))
        sampler.wait(timeout=30)
        for name in remotes:
            with pytest.raises(SyncError, match=r"actor cannot reach rollout at unix:|actor lost rollout"):
                _ = remotes[name].active
        syncs["transfer"].reset()

        sampler = spawn(SAMPLER, tmp_path)
        assert sampler.stdout.readline() == "listening\n"
        for name, remote in remotes.items():
            assert remote.active is None
            receipt = syncs[name].push(4, weights(4))
            assert remote.active == receipt.policy and receipt.bytes_moved == receipt.bytes_planned > 0
    finally:
        for remote in remotes.values():
            remote.close()
        shared.close()


def test_a_trainer_that_is_killed_halfway_leaves_the_old_version_serving(spawn) -> None:
    mesh = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("a", "b"))
    where = {"up": NamedSharding(mesh, P("b")), "norm": NamedSharding(mesh, P())}
    noise = {path: jax.device_put(np.zeros(shape, np.float32), where[path]) for path, shape in SHAPES.items()}
    numbers, transport = numbers_from(1024, where.values()), TransferTransport()
    replica = LocalReplica("rollout", noise, where, transport, numbers=numbers)
    with ReplicaServer(replica, transport, numbers, "127.0.0.1:0", TOKEN) as server:
        trainer = spawn(TRAINER, server.address)
        assert trainer.stdout.readline() == "published\n"
        trainer.wait(timeout=60)
        assert trainer.returncode == -signal.SIGKILL
        end = time.monotonic() + 30
        while server.last_failure is None and time.monotonic() < end:
            time.sleep(0.01)
        assert re.search(r"version 2 could not be pulled from|rollout lost trainer", str(server.last_failure))
        assert replica.active.number == 1 and (np.asarray(replica.installed["up"]) == 2).all()
        # Another trainer, from an earlier checkpoint, takes over.
        with RemoteReplica("rollout", server.address, TOKEN, TransferTransport()) as remote:
            receipt = WeightSync(LEAVES, [remote.route()], base={}).push(1, weights(7))
            assert replica.active == receipt.policy
            np.testing.assert_array_equal(replica.installed["up"], weights(7)["up"])
