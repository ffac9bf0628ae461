"""Files that hold only what changed: `delta.bin` instead of data files, where that is smaller.

    sender = DeltaFilesTransport(Path("weights"))
    receiver = DeltaFilesTransport(Path("weights"))

A delta folder's manifest has `kind` "delta", `base` (number and policy digest of the version that it starts from),
`why`, and, for every leaf, the checksums of the result. The receiver applies it on the host to the weights that it
staged last, when they are exactly that base. What it makes is held against the checksums before it
is put into place, and digested like any other weights afterwards.

What a delta starts from is the last version that was *published*. The first version, one that does not follow the last,
one that follows a version that was sent and not published, one whose delta would not be smaller, and one after
`FULL_EVERY` deltas are written whole; `why` says so. A receiver that holds another version than the base starts from
the last whole one in the store, which stays as long as a delta needs it. Sender and receiver keep the last version: the
sender in host memory, the receiver as the arrays that it staged. A delta saves bytes in the store; into place go whole
leaves: those are what link bytes count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.sync.delta import Delta, apply, choose, encode
from lockstep.sync.files_transport import FilesTransport, Leaves, kept
from lockstep.sync.foreign import WeightsError, checksums
from lockstep.sync.hosted import Region, gather, place
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, Stored
from lockstep.sync.weight_files import (
    BLOCK_BYTES,
    MANIFEST,
    MAX_FILE_BYTES,
    Manifest,
    VersionFolder,
    folder_of,
    fresh_folder,
    write_manifest,
    write_version,
)
from lockstep.types import PolicyVersion

DELTA = "delta.bin"
FULL_EVERY = 16  # deltas in a row, at most: who begins to read applies no more

Version = tuple[PolicyVersion, dict[str, np.ndarray]]


class DeltaFilesTransport(FilesTransport):
    """`FilesTransport` with deltas; both sides must be of this kind."""

    def __init__(self, root: Path, *, keep: int = 2, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        super().__init__(root, keep=keep, max_file_bytes=max_file_bytes)
        self._base: Version | None = None
        self._pending: dict[int, Version] = {}
        self._without = "nothing was published before"  # why there is no base
        self._deltas = 0  # since the last whole one
        self._staged: tuple[PolicyVersion, Mapping[str, jax.Array]] | None = None

    def _write(self, version: int, plan: SyncPlan, leaves: Leaves, head: Manifest) -> tuple[Manifest, Stored]:
        new = {target.path: np.array(array, copy=True) for target, array in leaves}
        policy, size = PolicyVersion(version, head["policy_digest"]), sum(leaf.nbytes for leaf in new.values())
        self._pending[version] = policy, new
        if (there := self._there(version, head)) is not None:
            return there, kept(there)
        delta, use, why = self._delta(policy, new)
        head, density = {**head, "why": why}, None if delta is None else delta.density
        if delta is not None and use:
            manifest = write_delta(self.root, delta, new, head)
            return manifest, Stored("delta", manifest["bytes"], size, density, str(delta.base), why)
        targets = plan.mapping.targets
        supply = ((targets[path], array) for path, array in new.items())
        manifest = write_version(self.root, version, targets.values(), supply, head, self._max_file_bytes)
        return manifest, Stored("full", sum(manifest["files"].values()), size, density, None, why)

    def release(self, version: int, published: bool) -> None:
        """As `FilesTransport.release`; only what was published is a base."""
        sent, pending = self._sent.get(version), self._pending.pop(version, None)
        super().release(version, published)
        if sent is None or pending is None:
            return
        if published:
            self._base, self._deltas = pending, self._deltas + 1 if sent["kind"] == "delta" else 0
        else:
            self._base, self._without = None, f"version {version} was sent and not published"

    def forget(self) -> None:
        """As `Transport.forget`: the next version is written whole."""
        self._base, self._without = None, "the receiver may have lost what it had"

    def _delta(self, policy: PolicyVersion, new: Mapping[str, np.ndarray]) -> tuple[Delta | None, bool, str]:
        """(the delta, whether to write it instead of all, why)."""
        if self._base is None:
            return None, False, f"full: {self._without}"
        base, old = self._base
        if policy.number != base.number + 1:
            return None, False, f"full: version {policy.number} does not follow {base.number}, the last published"
        forms = {path: (leaf.shape, leaf.dtype) for path, leaf in new.items()}
        if forms != {path: (leaf.shape, leaf.dtype) for path, leaf in old.items()}:
            return None, False, "full: the leaves are others than before"
        if self._refused.intersection([base.number]) or not (folder_of(self.root, base.number) / MANIFEST).is_file():
            return None, False, f"full: the folder of version {base.number} is gone"
        delta = encode(old, new, base, policy)
        if self._deltas >= FULL_EVERY:
            return delta, False, f"full: after {self._deltas} deltas, for those who begin to read now"
        return delta, *choose(delta, sum(leaf.nbytes for leaf in new.values()))

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
            made = dict(self._whole(opened))

            def read(path: str, region: Region) -> np.ndarray:
                return made[path][region]

            tree, links = place(plan, destination, numbers, read, self.name, deadline, version, self._memory)
        self._staged = PolicyVersion(version, opened.manifest["policy_digest"]), tree
        return tree, links

    def _whole(self, opened: VersionFolder) -> Iterator[tuple[str, np.ndarray]]:
        """Whole leaves on the host: of a delta, applied to what is held of its base, or to what the store has of it."""
        if opened.manifest["kind"] == "full":
            yield from super()._whole(opened)
            return
        with contextlib.ExitStack() as stack:
            chain, held = [opened], self._held(opened)
            while held is None and chain[-1].manifest["kind"] == "delta":
                chain.append(stack.enter_context(self._open_base(chain[-1])))
                held = self._held(chain[-1])
            if held is None:
                held = dict(super()._whole(chain.pop()))
            for step in reversed(chain):
                held = _applied(step, held)
            yield from held.items()

    def _held(self, opened: VersionFolder) -> dict[str, np.ndarray] | None:
        """The base of a delta, where this side has it in memory."""
        if opened.manifest["kind"] == "delta":
            base = _base_of(opened)
            if self._staged is not None and self._staged[0] == base:
                return {path: gather(path, leaf) for path, leaf in self._staged[1].items()}
            if self._base is not None and self._base[0] == base:
                return dict(self._base[1])
        return None

    def _open_base(self, opened: VersionFolder) -> VersionFolder:
        base = _base_of(opened)
        try:
            found = VersionFolder(folder_of(self.root, base.number))
        except WeightsError as error:
            raise WeightsError(
                f"{opened.folder} is a delta from {base}, which was not staged here last and cannot be read ({error}); "
                f"send the version again, whole"
            ) from error
        if (found.manifest["version"], found.manifest["policy_digest"]) != (base.number, base.digest):
            found.close()
            raise WeightsError(f"{opened.folder} is a delta from {base}, but {found.folder} holds another")
        return found


def _base_of(opened: VersionFolder) -> PolicyVersion:
    return PolicyVersion(opened.manifest["base"]["number"], opened.manifest["base"]["digest"])


def _applied(opened: VersionFolder, held: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Whole leaves: a delta's folder applied to its base, and held against the checksums of what was sent."""
    manifest, base = opened.manifest, _base_of(opened)
    delta = Delta.from_bytes(opened.bytes_of(DELTA))
    if (delta.base, delta.policy.number) != (base, manifest["version"]):
        raise WeightsError(f"{opened.folder}: its delta goes from {delta.base} to {delta.policy}")
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
