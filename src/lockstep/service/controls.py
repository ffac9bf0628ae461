"""What an operator asks of the rollout service: new versions, pauses, an orderly end. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lockstep.service.requests import Outcome, UpdatePolicy


@dataclass(frozen=True)
class Source:
    """Where a version's weights are. place: of `files` a folder, of `shared_memory` a segment's name, of `transfer` the
    host:port where another process offers them (`offers.offer`). token, digest: of an offer: its secret, and the digest
    that the weights must have."""

    kind: Literal["files", "shared_memory", "transfer"]
    place: str
    token: str = field(default="", repr=False)
    digest: str = ""

    def to_json(self) -> dict[str, str]:
        """For the request to stage it."""
        return {name: value for name, value in vars(self).items() if value}


class Controls(Protocol):
    """Beside `Rollouts`. Every verb blocks until it is done; what it answers can be written as JSON."""

    def pause(self) -> None:
        """Send nothing more to replicas; requests under way finish, new ones wait."""
        ...

    def resume(self) -> None: ...

    def stage(self, source: Source, number: int) -> dict[str, Any]:
        """Bring a version beside the active one on every replica, and verify it. Raises SyncError, with the active one
        untouched."""
        ...

    def commit(self, number: int, policy: UpdatePolicy | None = None) -> dict[str, Any]:
        """Serve the staged version; policy: what becomes of requests under way (default: the service's). Raises
        SyncError where that version is not staged on every replica."""
        ...

    def abort_version(self, number: int) -> dict[str, Any]:
        """Forget the staged version. Raises SyncError where it is not staged."""
        ...

    def close(self, deadline_s: float) -> Mapping[Outcome, Sequence[str]]:
        """Admit nothing more, finish what is under way within deadline_s, cancel the rest. Returns the requests that
        were in flight, by how they ended."""
        ...


@dataclass(frozen=True)
class Stored:
    """An answer that was given to a request with an idempotency key."""

    status: int
    media: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Replay(Protocol):
    """Answers by idempotency key. Called from one thread."""

    def begin(self, key: str, digest: str) -> Stored | None:
        """The answer of before, or None: then the key is taken until `keep` or `release`. digest: of the request.
        Raises `KeyConflict` where the key stands for another request, or for one still under way."""
        ...

    def keep(self, key: str, answer: Stored) -> None: ...

    def release(self, key: str) -> None:
        """Nothing came of it: the same request may be made again."""
        ...


class KeyConflict(Exception):
    """An idempotency key that cannot be used now. under_way: it can be later."""

    def __init__(self, message: str, under_way: bool):
        super().__init__(message)
        self.under_way = under_way
