"""The whole of `lockstep serve` but its HTTP: replicas in processes of their own, started again when they are lost.

    with Server(ServeSpec(model="smollm2-135m"), replicas=2) as server:
        server.service.submit(request, print)

This process decides and passes on; it keeps the weights to begin with in host memory, on the CPU device. Where there
are accelerators, call `cluster.devices.cpu_only` first, as the command does: they are the replicas'.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from lockstep.errors import ConfigError, LockstepError, ServiceError
from lockstep.serve.folder import SocketFolder
from lockstep.serve.hosts import AllowedHosts
from lockstep.serve.process import BOOT_S, ProcessWorker
from lockstep.serve.relay import RelayedReplica, RelayTransport
from lockstep.serve.role import Served, load_served
from lockstep.serve.sources import Sources
from lockstep.serve.spec import ServeSpec
from lockstep.serve.versions import Versions
from lockstep.service.controls import Source
from lockstep.service.requests import Outcome, UpdatePolicy
from lockstep.service.service import Flips, Ledger, RolloutService
from lockstep.service.status import SyncAt
from lockstep.sync.channel import is_loopback, new_token
from lockstep.sync.choice import TransportName, Way
from lockstep.sync.remote import RemoteReplica
from lockstep.sync.replica_server import ReplicaServer
from lockstep.sync.route import Route
from lockstep.types import PolicyVersion

RESTARTS = 5  # of one replica in a row, without it having served for a while; then it stays away
SERVED_S = 60.0  # that while
FIRST_PAUSE_S = 0.5  # before a second restart; doubles


def check_ways(transport: TransportName, folder: Path | None, host: str) -> None:
    """Raises ConfigError unless weights can go this way. Arguments as `Server`."""
    if (transport == "files") != (folder is not None):
        raise ConfigError(
            "serve: --transport files needs --transport-dir, a folder that both sides see"
            if folder is None
            else f"serve: --transport-dir has no effect with --transport {transport}; use --transport files"
        )
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"serve: --transport-dir {folder} is not a folder")
    if transport == "shared_memory" and not is_loopback(host):
        raise ConfigError(
            f"serve: --sync-host {host} is for trainers on other machines, which shared memory does not reach; use "
            "--transport transfer, or files"
        )
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"serve: --sync-host {host!r} is no address that a trainer could be told; name one of this machine"
        )


@dataclass
class _Replica:
    """One replica through its lives. route: of the front's own versions; server: where a trainer's sync talks to."""

    worker: ProcessWorker
    relayed: RelayedReplica
    route: Route
    server: ReplicaServer
    restarts: int = 0


class Server:
    """Implements `controls.Controls`; `service` implements `requests.Rollouts`.

    replicas: how many. update, flips, max_waiting, ledger: as `RolloutService`. weights_dir: where `stage` may read
    versions from. sync_token: the secret of trainers that sync by themselves (default: a new one, which nobody knows).
    sync_host: this machine's address where their connections are taken. transport: which way weights go to the
    replicas, from here and from trainers. transport_dir: of `files`: a folder that this machine and the trainers' see.
    offers_from: hosts that `stage` may pull offers from. boot_s: seconds that a replica may take to load its model.
    environments: per replica, beside this process's environment
    (`devices.replica_environments`: which devices it may use). say: told what takes long, and what is lost.

    Raises ConfigError for options that do not go together.
    """

    def __init__(
        self,
        spec: ServeSpec,
        *,
        replicas: int = 1,
        update: UpdatePolicy = "drain",
        flips: Flips = "rolling",
        max_waiting: int = 4096,
        ledger: Ledger | None = None,
        weights_dir: Path | None = None,
        sync_token: str = "",
        sync_host: str = "127.0.0.1",
        transport: TransportName = "shared_memory",
        transport_dir: Path | None = None,
        offers_from: Sequence[str] = (),
        boot_s: float = BOOT_S,
        environments: Callable[[int], Mapping[str, str]] = lambda number: {},
        say: Callable[[str], None] | None = None,
    ) -> None:
        check_ways(transport, transport_dir, sync_host)
        hosts = AllowedHosts.of(offers_from)
        self.spec, self._say = spec, say or (lambda line: None)
        self._transport, self._transport_dir = transport, transport_dir
        self._sync_token, self._sync_host = sync_token or new_token(), sync_host
        self._environments, self._boot_s = environments, boot_s
        self.served: Served = load_served(spec, self._say)
        self.service = RolloutService(update=update, flips=flips, max_waiting=max_waiting, ledger=ledger)
        self._folder = SocketFolder()
        self._replicas: dict[str, _Replica] = {}
        self._spawning: set[ProcessWorker] = set()  # processes that are not ready yet
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.versions = Versions(self.served, self.service, self._routes, Sources(self.served, weights_dir, hosts))
        try:
            # From the first moment on: one that is lost before the first version is out is started again, too.
            self.service.on_lost(self._lost, brings=self.versions.holds)
            self._bring_all_up([f"rollout-{number}" for number in range(replicas)])
            self.policy: PolicyVersion = self.versions.publish_first()
        except BaseException:
            self.close(0.0)
            raise

    def _routes(self) -> list[Route]:
        status = self.service.status()
        alive = {r.name for r in status.replicas if r.alive}
        return [one.route for name, one in self._replicas.items() if name in alive]

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _spawn(self, name: str) -> ProcessWorker:
        """A process that is ready. Raises ServiceError if it cannot be, or the server is closed meanwhile."""
        with self._lock:
            if self._closing.is_set():
                raise ServiceError(f"replica {name} is not started: the server is closing")
            worker = ProcessWorker(
                name,
                self.spec,
                self._folder.path,
                way=self._way(name),
                host=self._sync_host,
                environment=self._environments(int(name.rpartition("-")[2])),
                say=self._say,
            )
            self._spawning.add(worker)
        try:
            worker.ready(self._boot_s)
        finally:
            with self._lock:
                self._spawning.discard(worker)
        return worker

    def _stop_spawning(self) -> None:
        """Nothing is started any more, and what is being started is ended."""
        with self._lock:
            self._closing.set()
            spawning = list(self._spawning)
        for worker in spawning:
            worker.end()

    def _bring_all_up(self, names: list[str]) -> None:
        """All at once. Where one cannot be brought up, the others are not waited for."""
        with ThreadPoolExecutor(len(names)) as pool:
            try:
                for made in as_completed([pool.submit(self._bring_up, name) for name in names]):
                    made.result()
            except BaseException:
                self._stop_spawning()
                raise

    def _bring_up(self, name: str) -> None:
        """Start a replica for the first time."""
        worker = self._spawn(name)
        try:
            transport = RelayTransport(self._way(name).make(f"front_{name}", self._sync_host))
            remote = RemoteReplica(name, worker.sync_address, worker.sync_token, transport, source="the front")
            relayed = RelayedReplica(remote, self.service)
            server = ReplicaServer(
                relayed,
                transport,
                None,
                f"{self._sync_host}:0",
                self._sync_token,
                allow_remote=not is_loopback(self._sync_host),
                on_trainer=lambda: relayed.inner.start_anew(),
            ).start()
        except BaseException:  # an address that cannot be listened at, say: nobody else knows of the process
            worker.kill()
            raise
        self._replicas[name] = _Replica(worker, relayed, self._route(relayed), server)
        self._join(self._replicas[name])

    def _way(self, name: str) -> Way:
        """Each replica's transport is its own, so its folder is too."""
        return Way(self._transport, "" if self._transport_dir is None else str(self._transport_dir.resolve() / name))

    def _route(self, relayed: RelayedReplica) -> Route:
        return replace(relayed.inner.route(), replica=relayed)

    def _join(self, one: _Replica) -> None:
        assert one.worker.limits is not None
        way = self._way(one.worker.name)
        self.service.syncs[one.worker.name] = SyncAt(one.server.address, way.transport, way.folder)
        self.service.join(one.worker, shards=one.worker.limits.shards)

    def _lost(self, name: str, reason: str) -> None:
        """Start it again, and bring it to what is served. In a thread of its own."""
        one = self._replicas[name]
        pauses = deque(FIRST_PAUSE_S * 2**i for i in range(one.restarts, RESTARTS))
        while pauses and not self._closing.is_set():
            self._say(f"{name} is lost ({reason}); starting it again")
            one.restarts += 1
            pause = pauses.popleft()
            if one.restarts > 1 and self._closing.wait(pause):
                return
            try:
                worker = self._spawn(name)
            except (LockstepError, OSError) as error:
                reason = str(error)
                continue
            with self._lock:
                if self._closing.is_set():
                    worker.kill()
                    return
                one.worker = worker
            self._take_in(one)
            return
        if not self._closing.is_set():
            self._say(f"{name} was lost {one.restarts} times in a row and is not started again: {reason}")
            self.service.abandon(name, reason)

    def _take_in(self, one: _Replica) -> None:
        """A replica that was started again: requests and versions go to it from now on."""
        name, worker, old = one.worker.name, one.worker, one.relayed.inner
        one.relayed.inner = RemoteReplica(
            name, worker.sync_address, worker.sync_token, old.transport, source="the front"
        )
        old.close()
        one.route = self._route(one.relayed)
        self._join(one)
        try:
            policy = self.versions.catch_up(one.route)
        except LockstepError as error:
            self._say(f"{name} cannot be brought to what is served: {error}")
            worker.kill()  # and is heard of as lost
            return
        self._say(f"{name} is back" + (f", serving {policy}" if policy else "; the next version comes to it"))
        settled = threading.Timer(SERVED_S, self._settled, (one, worker))
        settled.daemon = True
        settled.start()

    def _settled(self, one: _Replica, worker: ProcessWorker) -> None:
        if one.worker is worker:
            one.restarts = 0

    # -- Controls ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        self.service.pause()

    def resume(self) -> None:
        self.service.resume()

    def stage(self, source: Source, number: int) -> dict[str, Any]:
        return self.versions.stage(source, number)

    def commit(self, number: int, policy: UpdatePolicy | None = None) -> dict[str, Any]:
        return self.versions.commit(number, policy)

    def abort_version(self, number: int) -> dict[str, Any]:
        return self.versions.abort_version(number)

    def close(self, deadline_s: float) -> dict[Outcome, list[str]]:
        """As `RolloutService.close`; the processes are gone when it returns, also those that were being started."""
        self._stop_spawning()
        ends = self.service.close(deadline_s)
        for one in self._replicas.values():
            one.server.close()
            one.relayed.inner.close()
            one.worker.close()
        self._folder.close()
        return ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0.0)
