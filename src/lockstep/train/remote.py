"""The rollout role behind `lockstep serve`: requests over HTTP, weights by the run's own sync to every replica."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import RolloutConfig
from lockstep.errors import ConfigError, SyncError
from lockstep.service.client import RemoteRollouts
from lockstep.service.http import require_serve_extra
from lockstep.service.http.settings import read_secrets
from lockstep.service.requests import ReplicaStatus
from lockstep.sync.choice import TRANSPORTS, Way
from lockstep.sync.mapping import FormatMap
from lockstep.sync.remote import RemoteReplica, RemoteTransport
from lockstep.sync.route import Route
from lockstep.sync.sync import WeightSync

LOCAL = "127.0.0.1"
CONNECT_S = 5.0  # that a service may take to answer for the first time


def _transport(replica: ReplicaStatus, host: str) -> RemoteTransport:
    """Our half of the way that the service was started with."""
    if replica.sync_transport not in TRANSPORTS:
        raise ConfigError(
            f"rollout.url: {replica.name} takes weights by {replica.sync_transport!r}; this release knows "
            f"{', '.join(TRANSPORTS)}"
        )
    return Way(replica.sync_transport, replica.sync_folder).make(f"actor_{replica.name}", host)


@dataclass(frozen=True)
class Remote:
    """rollouts: the service. replicas: name -> what its versions are pushed to. mapping: from the trainer's leaves to
    theirs."""

    rollouts: RemoteRollouts
    replicas: dict[str, RemoteReplica]
    mapping: FormatMap | None

    @classmethod
    def connect(
        cls, rollout: RolloutConfig, mapping: FormatMap | None, say: Callable[[str], None] | None = None
    ) -> Remote:
        """Ask the service what replicas it has. Raises ConfigError without the secrets that it takes, or for a missing
        extra; ServiceError where it does not answer."""
        require_serve_extra()
        assert rollout.url is not None
        secrets = {} if rollout.token_file is None else read_secrets(Path(rollout.token_file))
        if "sync" not in secrets:
            raise ConfigError(
                f"rollout.url = {rollout.url!r}: its replicas take weights only from those who know its `sync` secret; "
                "name the file that `lockstep serve --token-file` was given as rollout.token_file, with a line `sync "
                "TOKEN`"
            )
        rollouts = RemoteRollouts(
            rollout.url,
            secrets.get("inference", [""])[0],
            control_token=secrets.get("control", [""])[0],
            retry_s=CONNECT_S,
            say=say or logging.getLogger(__name__).warning,
        )
        try:
            found = {r.name: r for r in rollouts.status().replicas if r.alive and r.sync_address}
            if not found:
                raise ConfigError(f"rollout.url = {rollout.url!r}: no replica of it takes weights now; is it starting?")
        except BaseException:
            rollouts.close()
            raise
        rollouts.retry_s = rollout.deadline_s  # a service that was there may come back
        replicas = {
            name: RemoteReplica(name, r.sync_address, secrets["sync"][0], _transport(r, rollout.sync_host or LOCAL))
            for name, r in found.items()
        }
        return cls(rollouts, replicas, mapping)

    def routes(self) -> list[Route]:
        return [replica.route(self.mapping) for replica in self.replicas.values()]

    def take_back(self, sync: WeightSync) -> list[str]:
        """Let replicas that a publish left out, and that are there again, take part in the next one; their names."""
        alive = {r.name for r in self.rollouts.status().replicas if r.alive}
        back = [name for name in self.replicas if name not in sync.publisher.replicas and name in alive]
        for name in back:
            try:
                sync.admit(self.replicas[name].route(self.mapping))
            except SyncError as error:
                raise SyncError(f"sync: {name} is back, but cannot be taken in again: {error}") from error
        return back

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()
        self.rollouts.close()
