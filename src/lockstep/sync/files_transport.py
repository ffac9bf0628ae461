"""Weights by way of files: the sender writes a version's folder, the receiver reads it, whatever lies between them.

    sender = FilesTransport(Path("weights"), keep=2)
    sender.send(12, plan, actor, numbers, deadline)              # weights/v000012/, see `weight_files`
    receiver = FilesTransport(Path("weights"))
    staged = receiver.receive(12, plan, rollout_shardings, numbers, deadline)    # waits for the folder

Folders stay after the sync: that is what they are for. The sender removes old ones (`keep`), and `withdraw` one that
was not published after all: a complete folder says that the weights are whole, not that they are being served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from lockstep.cluster.devices import HostMemory
from lockstep.errors import SyncError
from lockstep.sync.ends import checked_source
from lockstep.sync.foreign import WeightsError
from lockstep.sync.hosted import host_targets, place, said_as_sync_error
from lockstep.sync.plan import SyncPlan
from lockstep.sync.shared_memory import check_forms
from lockstep.sync.transport import Deadline, Sent, Staged
from lockstep.sync.weight_files import (
    MANIFEST,
    MAX_FILE_BYTES,
    Manifest,
    VersionFolder,
    folder_of,
    prune,
    remove,
    write_version,
)

_POLL_S = 0.02  # between two looks for a folder; file systems across machines tell nobody


class FilesTransport:
    """Either side, or both. root: where the folders are. keep: how many complete versions stay (at least one)."""

    name = "files"

    def __init__(self, root: Path, *, keep: int = 2, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        assert keep >= 1 and max_file_bytes >= 1, (keep, max_file_bytes)
        self.on_round: Callable[[int, int], None] | None = None
        self.root = Path(root)
        self._keep, self._max_file_bytes = keep, max_file_bytes
        self._sent: dict[int, Manifest] = {}
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
        """As `Transport.send`: writes the folder and removes old ones. `source` is not needed any more afterwards."""
        start = time.perf_counter()
        leaves = checked_source(plan, source, version)

        def check() -> None:
            if not deadline.remaining():
                raise deadline.missed("the sender", "its own disk", f"{folder_of(self.root, version)}", version)

        mapping = plan.mapping
        head = {"policy_digest": digest, "plan": plan.hash, "mapping": mapping.name}
        self._sent[version] = write_version(
            self.root,
            version,
            mapping.targets.values(),
            host_targets(mapping, leaves, check),
            head,
            self._max_file_bytes,
        )
        prune(self.root, self._keep)
        return Sent({}, time.perf_counter() - start)

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

    def withdraw(self, version: int) -> None:
        """Remove a version that was sent but not published. Raises SyncError while somebody reads it."""
        folder = folder_of(self.root, version)
        if folder.exists() and not remove(folder):
            raise SyncError(f"sync: {folder} is being read and cannot be withdrawn now; try again")
        self._sent.pop(version, None)

    def release(self, version: int, published: bool) -> None:
        """As `Transport.release`; the folder stays."""
        self._sent.pop(version, None)
