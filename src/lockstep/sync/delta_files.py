"""Files that hold only what changed: `delta.bin` instead of data files, where that is smaller.

    sender = DeltaFilesTransport(Path("weights"))
    receiver = DeltaFilesTransport(Path("weights"))

A delta folder's manifest has `kind` "delta", `base` (number and policy digest of the version that it starts from),
`why`, and, for every leaf, the checksums of the result. The receiver applies it to the weights that it staged last, on
the host, when they are exactly that base; it refuses any other. What it makes is held against the checksums before it
is put into place, and digested like any other weights afterwards.

The first version, one that does not follow the last, one whose number is sent again (after a failure, say), and one
whose delta would not be smaller are written whole; `why` says so. So a receiver that has lost its base refuses one
sync, and the repeated one mends it. Both sides keep the last version: the sender in host memory, the receiver as the
arrays that it staged. A delta saves bytes in the store; into place go whole leaves: those are what link bytes count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.sync.delta import Delta, apply, choose, encode
from lockstep.sync.ends import checked_source
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.foreign import WeightsError, checksums
from lockstep.sync.hosted import Region, gather, host_targets, place
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, Sent
from lockstep.sync.weight_files import (
    BLOCK_BYTES,
    MAX_FILE_BYTES,
    Manifest,
    VersionFolder,
    folder_of,
    fresh_folder,
    prune,
    write_manifest,
    write_version,
)
from lockstep.types import PolicyVersion

DELTA = "delta.bin"


class DeltaFilesTransport(FilesTransport):
    """`FilesTransport` with deltas; both sides must be of this kind."""

    def __init__(self, root: Path, *, keep: int = 2, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        super().__init__(root, keep=keep, max_file_bytes=max_file_bytes)
        self._base: tuple[PolicyVersion, dict[str, np.ndarray]] | None = None
        self._staged: tuple[PolicyVersion, Mapping[str, jax.Array]] | None = None

    def send(
        self,
        version: int,
        plan: SyncPlan,
        source: Mapping[str, jax.Array],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        digest: str = "",
    ) -> Sent:
        """As `FilesTransport.send`; the manifest says which kind of folder was written, and why."""
        start = time.perf_counter()
        leaves = checked_source(plan, source, version)

        def check() -> None:
            if not deadline.remaining():
                raise deadline.missed("the sender", "its own disk", f"{folder_of(self.root, version)}", version)

        targets = plan.mapping.targets
        new = {t.path: np.array(array, copy=True) for t, array in host_targets(plan.mapping, leaves, check)}
        policy = PolicyVersion(version, digest)
        delta, why = self._delta(policy, new)
        head = {"policy_digest": digest, "plan": plan.hash, "mapping": plan.mapping.name, "why": why}
        if delta is None:
            supply = ((targets[path], array) for path, array in new.items())
            manifest = write_version(self.root, version, targets.values(), supply, head, self._max_file_bytes)
        else:
            manifest = write_delta(self.root, delta, new, head)
        self._sent[version], self._base = manifest, (policy, new)
        prune(self.root, self._keep)
        return Sent({}, time.perf_counter() - start)

    def _delta(self, policy: PolicyVersion, new: Mapping[str, np.ndarray]) -> tuple[Delta | None, str]:
        """What to write instead of all, and why (not)."""
        if self._base is None:
            return None, "full: nothing was sent before"
        base, old = self._base
        if policy.number != base.number + 1:
            return None, f"full: version {policy.number} does not follow {base.number}, the last that was sent"
        forms = {path: (leaf.shape, leaf.dtype) for path, leaf in new.items()}
        if forms != {path: (leaf.shape, leaf.dtype) for path, leaf in old.items()}:
            return None, "full: the leaves are others than before"
        delta = encode(old, new, base, policy)
        use, why = choose(delta, sum(leaf.nbytes for leaf in new.values()))
        return (delta if use else None), why

    def _read(
        self,
        opened: VersionFolder,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> tuple[dict[str, jax.Array], dict[tuple[int, int], int]]:
        if opened.manifest["kind"] == "full":
            tree, links = super()._read(opened, version, plan, destination, numbers, deadline)
        else:
            made = self._applied(opened)

            def read(path: str, region: Region) -> np.ndarray:
                return made[path][region]

            tree, links = place(plan, destination, numbers, read, self.name, deadline, version, self._memory)
        self._staged = PolicyVersion(version, opened.manifest["policy_digest"]), tree
        return tree, links

    def _applied(self, opened: VersionFolder) -> dict[str, np.ndarray]:
        """Whole leaves on the host: the delta applied to what was staged last."""
        manifest = opened.manifest
        base = PolicyVersion(manifest["base"]["number"], manifest["base"]["digest"])
        if self._staged is None or self._staged[0] != base:
            last = "nothing" if self._staged is None else str(self._staged[0])
            raise WeightsError(
                f"{opened.folder} is a delta from {base}, but {last} was staged here last; send the version again, "
                f"whole"
            )
        delta = Delta.from_bytes(opened.bytes_of(DELTA))
        if (delta.base, delta.policy.number) != (base, manifest["version"]):
            raise WeightsError(f"{opened.folder}: its delta goes from {delta.base} to {delta.policy}")
        held = {path: gather(path, leaf) for path, leaf in self._staged[1].items()}
        made = {path: np.asarray(leaf) for path, leaf in apply(delta, held, base).items()}
        for path, leaf in manifest["leaves"].items():
            if path not in made or checksums(_bytes_of(made[path]), manifest["block_bytes"]) != leaf["crc32"]:
                raise WeightsError(f"{opened.folder}: {path} does not come out as it was sent")
        return made


def write_delta(root: Path, delta: Delta, new: Mapping[str, np.ndarray], head: Manifest) -> Manifest:
    """Write a delta's folder and return its manifest; as `weight_files.write_version`."""
    version = delta.policy.number
    with fresh_folder(root, version) as folder:
        with open(folder / DELTA, "wb") as file:
            file.write(delta.to_bytes())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        described: dict[str, Any] = {}
        for path, leaf in new.items():
            described[path] = {
                "file": DELTA,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype.name,
                "offset": 0,
                "bytes": leaf.nbytes,
                "crc32": checksums(_bytes_of(leaf), BLOCK_BYTES),
            }
        base = {"number": delta.base.number, "digest": delta.base.digest}
        body = {"kind": "delta", "base": base, "bytes": size, "block_bytes": BLOCK_BYTES}
        return write_manifest(folder, {**head, "version": version, **body, "files": {DELTA: size}, "leaves": described})


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
