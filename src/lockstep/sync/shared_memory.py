"""Weights to another process of the same host, an engine of another make among them: one segment of shared memory per
version.

    transport = SharedMemoryTransport("actor")
    transport.send(12, plan, actor, numbers, deadline)
    transport.ticket(12)["segment"]                     # what the other process opens, with `foreign.Segment`

A segment is a file in memory (`/dev/shm`), laid out as `foreign` describes. Leaves have the names, shapes and types of
the plan's destination, whatever format that is. It is its owner's: withdrawn and removed by `release`. A killed owner's
segments are removed when the next one starts under the same name: an owner locks its segments, as readers do, and what
nobody has locked belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.cluster.devices import HostMemory
from lockstep.errors import SyncError
from lockstep.sync import foreign
from lockstep.sync.ends import checked_source
from lockstep.sync.hosted import Region, host_targets, place, said_as_sync_error
from lockstep.sync.mapping import FormatMap
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, Sent, Staged

DIRECTORY = Path("/dev/shm")
BLOCK_BYTES = 4 << 20  # of a leaf per checksum
_ALIGNMENT = 64


@dataclass
class Owned:
    """A segment that this process wrote and has locked."""

    path: Path
    plan: str
    fd: int

    def withdraw(self) -> None:
        """Tell readers, remove the name, unlock. What is mapped stays readable. Twice is harmless."""
        if self.fd < 0:
            return
        os.pwrite(self.fd, foreign.WITHDRAWN.to_bytes(8, "little"), foreign.STATE_AT)
        self.path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1


def write_segment(
    path: Path,
    version: int,
    mapping: FormatMap,
    source: Mapping[str, jax.Array],
    *,
    plan: str = "",
    policy_digest: str = "",
    check: Callable[[], None] = lambda: None,
) -> Owned:
    """Write one version's destination leaves; complete when this returns. check: raises when there is no time left.

    Raises SyncError when there is no room, with nothing left behind.
    """
    leaves: dict[str, dict[str, Any]] = {}
    at = foreign.DATA_AT
    for target in mapping.targets.values():
        size = int(np.prod(target.shape, dtype=np.int64)) * np.dtype(target.dtype).itemsize
        leaves[target.path] = {"shape": list(target.shape), "dtype": target.dtype, "offset": at, "bytes": size}
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    with said_as_sync_error(f"the shared memory of version {version}, {path}"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    owned = Owned(path, plan, fd)
    try:
        with said_as_sync_error(f"{at} bytes of shared memory for version {version} in {path.parent} (is it full?)"):
            fcntl.flock(fd, fcntl.LOCK_SH)
            # Written, not mapped: a full memory file system is an error then, not a signal, and no page is cleared.
            os.ftruncate(fd, at)
            for target, array in host_targets(mapping, source, check):
                leaves[target.path]["crc32"] = _put(fd, leaves[target.path]["offset"], array)
        manifest = json.dumps(
            {
                "format": foreign.FORMAT,
                "version": version,
                "policy_digest": policy_digest,
                "plan": plan,
                "mapping": mapping.name,
                "bytes": sum(leaf["bytes"] for leaf in leaves.values()),
                "block_bytes": BLOCK_BYTES,
                "leaves": leaves,
            }
        ).encode()
        with said_as_sync_error(f"the manifest of version {version}, {path}"):
            _write(fd, memoryview(manifest), at)
            proof = hashlib.blake2b(manifest, digest_size=foreign.DIGEST_BYTES).digest()
            fields = (at, len(manifest), at + len(manifest), proof)
            os.pwrite(fd, foreign.HEADER.pack(foreign.MAGIC, foreign.WRITING, *fields), 0)
            os.pwrite(fd, foreign.COMPLETE.to_bytes(8, "little"), foreign.STATE_AT)
    except BaseException:
        owned.withdraw()
        raise
    return owned


def _put(fd: int, at: int, array: np.ndarray) -> list[str]:
    """Write a leaf to its place. Returns its checksums."""
    if not array.size:
        return []
    data = np.ascontiguousarray(array.view(f"u{array.dtype.itemsize}")).reshape(-1).view(np.uint8).data
    _write(fd, data, at)
    return foreign.checksums(data, BLOCK_BYTES)


def _write(fd: int, data: memoryview, at: int) -> None:
    """All of it: one call writes 2 GiB at most."""
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


class SharedMemoryTransport:
    """owner: a name for whoever sends, unique on the host; what a killed owner of that name left is removed now. keep:
    how many published versions stay readable, for an engine that reads in its own time (0: none)."""

    name = "shared-memory"

    def __init__(self, owner: str, *, directory: Path = DIRECTORY, keep: int = 0) -> None:
        """Raises SyncError for a name that is no word, and where there is no such directory."""
        if not re.fullmatch(r"[A-Za-z0-9_.]+", owner):
            raise SyncError(f"sync: {owner!r} is no name for an owner of shared memory; use letters, digits, _ and .")
        if not directory.is_dir():
            raise SyncError(f"sync: there is no {directory} for shared memory; give a directory in memory")
        self.on_round: Callable[[int, int], None] | None = None
        self._owner, self._directory, self._keep = owner, directory, keep
        self._owned: dict[int, Owned] = {}
        self._released: list[Owned] = []
        self._tickets: dict[int, Mapping[str, Any]] = {}
        self._memory = HostMemory()
        clean(owner, directory)

    def send(
        self,
        version: int,
        plan: SyncPlan,
        source: Mapping[str, jax.Array],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        digest: str = "",
    ) -> Sent:
        """As `Transport.send`: writes the segment. `source` is not needed any more afterwards."""
        start = time.perf_counter()
        leaves = checked_source(plan, source, version)
        if version in self._owned:
            self._owned.pop(version).withdraw()

        def check() -> None:
            if not deadline.remaining():
                raise deadline.missed("the sender", "its own copies", "shared memory to be written", version)

        path = self._directory / f"lockstep-{self._owner}-v{version:06d}-{secrets.token_hex(6)}"
        self._owned[version] = write_segment(
            path, version, plan.mapping, leaves, plan=plan.hash, policy_digest=digest, check=check
        )
        return Sent({}, time.perf_counter() - start)

    def ticket(self, version: int) -> dict[str, Any]:
        """What the receiver needs to know, as JSON: which segment."""
        if version not in self._owned:
            raise SyncError(f"sync: version {version} was not sent over {self.name!r}, so there is no ticket for it")
        return {"segment": str(self._owned[version].path)}

    def arrived(self, version: int, round_number: int) -> None:
        """Nothing to do: all of it is there from the start."""

    def redeem(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Take note of where `version` is. Raises SyncError for what is no ticket."""
        if set(ticket) != {"segment"} or not isinstance(ticket["segment"], str):
            raise SyncError(f"sync: a ticket for transport {self.name!r} names a segment; got {sorted(ticket)}")
        self._tickets[version] = dict(ticket)

    def receive(
        self,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> Staged:
        """As `Transport.receive`, copying out of the segment: afterwards nothing depends on it."""
        start = time.perf_counter()
        if version not in self._tickets:
            raise SyncError(f"sync: version {version} needs a ticket of transport {self.name!r} from its sender")
        path = self._tickets.pop(version)["segment"]
        with said_as_sync_error(f"version {version} in shared memory"), foreign.Segment(path) as segment:
            found = segment.manifest["version"], segment.manifest["plan"]
            if found != (version, plan.hash):
                raise SyncError(
                    f"sync: {path} holds version {found[0]} for plan {found[1]}; expected version {version} for plan "
                    f"{plan.hash}"
                )
            check_forms(segment.manifest["leaves"], plan, path)
            views: dict[str, np.ndarray] = {}

            def read(leaf: str, region: Region) -> np.ndarray:
                if leaf not in views:
                    views.clear()  # one leaf at a time
                    views[leaf] = segment.array(leaf)
                return views[leaf][region]

            try:
                tree, links = place(plan, destination, numbers, read, self.name, deadline, version, self._memory)
            finally:
                views.clear()
        return Staged(tree, links, time.perf_counter() - start)

    def forget(self) -> None:
        """As `Transport.forget`: every version is whole anyway."""

    def release(self, version: int, published: bool) -> None:
        """As `Transport.release`: the segment is withdrawn, or is the newest of those kept. One that was not published
        is withdrawn at once and takes no other's place."""
        owned = self._owned.pop(version, None)
        if owned is None:
            return
        if not published:
            owned.withdraw()
            return
        self._released.append(owned)
        while len(self._released) > self._keep:
            self._released.pop(0).withdraw()

    def close(self) -> None:
        """Withdraw everything. Twice is harmless."""
        for owned in [*self._owned.values(), *self._released]:
            owned.withdraw()
        self._owned.clear()
        self._released.clear()


def check_forms(leaves: Mapping[str, Mapping[str, Any]], plan: SyncPlan, where: object) -> None:
    """Raise SyncError unless a manifest lists just what the plan writes."""
    if set(leaves) != set(plan.leaves):
        different = sorted(set(leaves) ^ set(plan.leaves))
        raise SyncError(
            f"sync: {where} and the plan do not name the same leaves; {different[0]} is only in one of them"
        )
    for path, leaf in plan.leaves.items():
        form = tuple(leaves[path]["shape"]), leaves[path]["dtype"]
        if form != (leaf.shape, leaf.dtype):
            raise SyncError(f"sync: {where} has {path} as {form[1]}{list(form[0])}, the plan as {leaf.dtype}"
                            f"{list(leaf.shape)}")  # fmt: skip


def clean(owner: str, directory: Path = DIRECTORY) -> list[str]:
    """Remove the segments under this owner's name that nobody has locked: a killed owner's. Returns their names."""
    removed = []
    for path in sorted(directory.glob(f"lockstep-{owner}-v*")):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            except BlockingIOError:
                pass  # its owner lives, or somebody reads it
            finally:
                os.close(fd)
    return removed
