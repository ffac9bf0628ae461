"""Weights by way of files: the sender writes a version's folder, the receiver reads it, whatever lies between them.

    sender = FilesTransport(Path("weights"), keep=2)
    sender.send(12, plan, actor, numbers, deadline)              # weights/v000012/, see `weight_files`
    receiver = FilesTransport(Path("weights"))
    staged = receiver.receive(12, plan, rollout_shardings, numbers, deadline)    # waits for the folder

Folders stay after the sync: that is what they are for. With `release` one that was not published goes, and only then do
old ones (`keep`). Until then a complete folder says that the weights are whole, not that they are being served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.cluster.devices import HostMemory
from lockstep.errors import SyncError
from lockstep.sync.ends import checked_source
from lockstep.sync.foreign import WeightsError
from lockstep.sync.hosted import host_targets, place, said_as_sync_error
from lockstep.sync.mapping import Target
from lockstep.sync.plan import SyncPlan
from lockstep.sync.shared_memory import check_forms
from lockstep.sync.transport import Deadline, Sent, Staged, Stored
from lockstep.sync.weight_files import (
    MANIFEST,
    MAX_FILE_BYTES,
    Manifest,
    VersionFolder,
    folder_of,
    prune,
    settle,
    write_version,
)

Leaves = Iterable[tuple[Target, np.ndarray]]

_POLL_S = 0.02  # between two looks for a folder; file systems across machines tell nobody


class FilesTransport:
    """Either side, or both. root: where the folders are. keep: how many published versions stay (at least one)."""

    name = "files"

    def __init__(self, root: Path, *, keep: int = 2, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        assert keep >= 1 and max_file_bytes >= 1, (keep, max_file_bytes)
        self.on_round: Callable[[int, int], None] | None = None
        self.root = Path(root)
        self._keep, self._max_file_bytes = keep, max_file_bytes
        self._sent: dict[int, Manifest] = {}
        self._kept: set[int] = set()  # of `_sent`: those that were there already
        self._refused: set[int] = set()  # versions that could not be removed when they should, or must not be kept
        self._tickets: dict[int, Mapping[str, Any]] = {}
        self._memory = HostMemory()

    def send(
        self,
        version: int,
        plan: SyncPlan,
        source: Mapping[str, jax.Array],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        digest: str = "",
    ) -> Sent:
        """As `Transport.send`: writes the folder, unless this very version is there. `source` is not needed any more
        afterwards."""
        start = time.perf_counter()
        leaves = checked_source(plan, source, version)

        def check() -> None:
            if not deadline.remaining():
                raise deadline.missed("the sender", "its own disk", f"{folder_of(self.root, version)}", version)

        head = {"policy_digest": digest, "plan": plan.hash, "mapping": plan.mapping.name}
        manifest, stored = self._write(version, plan, host_targets(plan.mapping, leaves, check), head)
        self._sent[version] = manifest
        return Sent({}, time.perf_counter() - start, stored)

    def _write(self, version: int, plan: SyncPlan, leaves: Leaves, head: Manifest) -> tuple[Manifest, Stored]:
        """Put the folder there. leaves: whole, as they are to be stored, in the map's order."""
        if (there := self._there(version, head)) is not None:
            return there, kept(there)
        manifest = write_version(self.root, version, plan.mapping.targets.values(), leaves, head, self._max_file_bytes)
        return manifest, Stored("full", sum(manifest["files"].values()), manifest["bytes"])

    def _there(self, version: int, head: Manifest) -> Manifest | None:
        """The manifest of a folder that holds this very version, after a restart, say: followers may be reading it, so
        it is not written again. What it holds is verified like anything that was just sent."""
        folder = folder_of(self.root, version)
        if not head["policy_digest"] or version in self._refused or not (folder / MANIFEST).is_file():
            return None
        try:
            with VersionFolder(folder) as opened:
                found = opened.manifest
        except (WeightsError, OSError):
            return None
        if found["version"] != version or any(
            found.get(name) != head[name] for name in ("policy_digest", "plan", "mapping")
        ):
            return None
        self._kept.add(version)
        return found

    def ticket(self, version: int) -> dict[str, Any]:
        """What the receiver needs to know, as JSON: the digest of the manifest."""
        if version not in self._sent:
            raise SyncError(f"sync: version {version} was not sent over {self.name!r}, so there is no ticket for it")
        return {"manifest": self._sent[version]["digest"]}

    def arrived(self, version: int, round_number: int) -> None:
        """Nothing to do: all of it is there from the start."""

    def redeem(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Take note of which manifest `version` must have. Raises SyncError for what is no ticket."""
        if set(ticket) != {"manifest"} or not isinstance(ticket["manifest"], str):
            raise SyncError(f"sync: a ticket for transport {self.name!r} names a manifest; got {sorted(ticket)}")
        self._tickets[version] = dict(ticket)

    def receive(
        self,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> Staged:
        """As `Transport.receive`: waits until the folder is complete, and copies out of it."""
        start = time.perf_counter()
        ticket = self._tickets.pop(version, None)
        folder = folder_of(self.root, version)
        while not (folder / MANIFEST).is_file():
            if not deadline.remaining():
                raise deadline.missed("the receiver", "the sender's files", f"{folder / MANIFEST}", version)
            time.sleep(min(_POLL_S, deadline.remaining()))
        with said_as_sync_error(f"version {version} in files"), VersionFolder(folder) as opened:
            self._check(opened, version, plan, ticket)
            tree, links = self._read(opened, version, plan, destination, numbers, deadline)
        return Staged(tree, links, time.perf_counter() - start)

    def _check(self, opened: VersionFolder, version: int, plan: SyncPlan, ticket: Mapping[str, Any] | None) -> None:
        found = opened.manifest
        if (found["version"], found["plan"]) != (version, plan.hash):
            raise WeightsError(
                f"{opened.folder} holds version {found['version']} for plan {found['plan']}; expected version "
                f"{version} for plan {plan.hash}"
            )
        if ticket is not None and found["digest"] != ticket["manifest"]:
            raise WeightsError(f"{opened.folder} is not the folder that was offered: its manifest is another")
        check_forms(found["leaves"], plan, opened.folder)

    def _read(
        self,
        opened: VersionFolder,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> tuple[dict[str, jax.Array], dict[tuple[int, int], int]]:
        if opened.manifest["kind"] != "full":
            raise WeightsError(f"{opened.folder} holds what changed only; receive it with DeltaFilesTransport")
        return place(plan, destination, numbers, opened.read, self.name, deadline, version, self._memory)

    def read_back(self, version: int) -> Iterator[tuple[str, np.ndarray]]:
        """Every leaf of a version that was sent, whole, out of the folder again; each is valid until the next. Raises
        SyncError unless the folder is the one that was sent, and every bit as it was written."""
        folder = folder_of(self.root, version)
        with said_as_sync_error(f"version {version} in files"), VersionFolder(folder) as opened:
            if version not in self._sent or opened.manifest["digest"] != self._sent[version]["digest"]:
                raise WeightsError(f"{folder} is not the folder that was sent: its manifest is another")
            yield from self._whole(opened)

    def _whole(self, opened: VersionFolder) -> Iterator[tuple[str, np.ndarray]]:
        if opened.manifest["kind"] != "full":
            raise WeightsError(f"{opened.folder} holds what changed only; read it with DeltaFilesTransport")
        for path in opened.manifest["leaves"]:
            yield path, opened.read(path, (...,))

    def forget(self) -> None:
        """As `Transport.forget`: every version is whole anyway."""

    def release(self, version: int, published: bool) -> None:
        """As `Transport.release`. Published: the folder stays, and old ones go. Not published: it goes (as soon as
        nobody reads it), unless it was there before `send`."""
        if self._sent.pop(version, None) is None:
            return
        was_there = version in self._kept
        self._kept.discard(version)
        with said_as_sync_error(f"the folders in {self.root}"):
            if published:
                self._refused.discard(version)
                settle(self.root, version, published=True)
                prune(self.root, self._keep, version)
            elif was_there:
                self._refused.add(version)  # written anew next time
            elif not settle(self.root, version, published=False):
                self._refused.add(version)


def kept(manifest: Manifest) -> Stored:
    """Of a version that was there already."""
    whole = sum(leaf["bytes"] for leaf in manifest["leaves"].values())
    return Stored("kept", 0, whole, why="kept: this very version was there already")
