"""One folder per version, complete or refused:

    v000012/data-00000.safetensors ...     the leaves, plain safetensors files of bounded size
    v000012/manifest.json                  written last, and at once

The manifest names version, policy digest, plan, format map, every file with its size, and for every leaf its file,
place, shape, type, and the checksums of its blocks; and it carries its own digest. A reader takes nothing on trust: a
folder without a manifest, with a file missing, cut short, grown or left over, with a manifest of another version or
plan, or with one flipped bit in what is read is refused by name.

A reader holds a shared lock on the manifest while it reads, and `prune` passes over folders that are locked. Removal
is a rename first, so that no reader sees half a folder. A version that is written anew is set aside until `settle`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, BinaryIO

import numpy as np

from lockstep.errors import SyncError
from lockstep.files import fsync_dir, write_atomic
from lockstep.sync.foreign import FORMAT, WeightsError, check_leaves, checksums, digest, wrong_blocks
from lockstep.sync.mapping import Target

MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20  # of a leaf per checksum: what is read of a leaf is checked by whole blocks
MAX_FILE_BYTES = 4 << 30
_GONE = ".removed-"
_ASIDE = ".replaced-"
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip

Manifest = dict[str, Any]
Leaf = tuple[Target, np.ndarray]


def folder_of(root: Path, version: int) -> Path:
    """`v000012`."""
    return root / f"v{version:06d}"


def versions(root: Path) -> list[int]:
    """Versions that have a manifest, ascending. Nothing of them has been checked."""
    found = [re.fullmatch(r"v(\d{6,})", path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for match in found if match and (root / match[0] / MANIFEST).is_file())


def write_version(
    root: Path, version: int, targets: Iterable[Target], leaves: Iterable[Leaf], head: Manifest, max_file_bytes: int
) -> Manifest:
    """Write `leaves`, which come in the order of `targets`, and then the manifest: `head` and what describes them.

    A complete folder of this version that is there already is set aside (`settle` ends that), unless somebody reads it.
    Returns the manifest. Raises SyncError; a folder without a manifest may stay behind, which no reader takes and the
    next write replaces.
    """
    _check_types(targets := list(targets))
    with fresh_folder(root, version) as folder:
        described: dict[str, dict[str, Any]] = {}
        sizes = {}
        supply = iter(leaves)
        for number, group in enumerate(_groups(targets, max_file_bytes)):
            name = f"data-{number:05d}.safetensors"
            sizes[name] = _write_file(folder / name, group, supply, described)
        total = sum(leaf["bytes"] for leaf in described.values())
        body = {"kind": "full", "bytes": total, "block_bytes": BLOCK_BYTES, "files": sizes, "leaves": described}
        return write_manifest(folder, {**head, "version": version, **body})


@contextlib.contextmanager
def fresh_folder(root: Path, version: int) -> Iterator[Path]:
    """An empty folder for the version, the old one set aside. Raises SyncError where that cannot be; a complete old one
    is then where it was."""
    folder = folder_of(root, version)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_GONE}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        aside = _aside(root, version)
        if aside.exists():  # whoever set it aside was killed before it was settled
            settle(root, version, published=(folder / MANIFEST).is_file())
        complete = (folder / MANIFEST).is_file()
        if folder.exists() and not (_moved(folder, aside) if complete else remove(folder)):
            raise SyncError(f"sync: {folder} is being read, so version {version} cannot be written anew; wait, or use "
                            f"a new version number")  # fmt: skip
        folder.mkdir()
        try:
            yield folder
        except BaseException:
            if complete:
                settle(root, version, published=False)
            raise
        fsync_dir(root)
    except OSError as error:
        raise SyncError(
            f"sync: version {version} could not be written to {folder} ({error}); is the disk full?"
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Add format and digest, make what is in the folder durable, and put the manifest there."""
    manifest = {"format": FORMAT, **manifest}
    manifest["digest"] = _manifest_digest(manifest)
    fsync_dir(folder)
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())
    return manifest


def settle(root: Path, version: int, *, published: bool) -> bool:
    """End the writing of a version. Published: what was set aside for it goes; else the new folder goes, and what was
    set aside comes back. Returns False, with the new folder still there, while somebody reads it."""
    folder, aside = folder_of(root, version), _aside(root, version)
    if published:
        shutil.rmtree(aside, ignore_errors=True)
        return True
    if folder.exists() and not remove(folder):
        return False
    if aside.exists():
        os.rename(aside, folder)
    return True


def prune(root: Path, keep: int, newest: int | None = None) -> list[int]:
    """Remove all but the `keep` newest complete versions up to `newest` (at least one stays), the bases that deltas
    among them need, and what is newer; and incomplete ones older than these. What somebody reads stays. Returns what
    was removed."""
    there = versions(root)
    kept = [version for version in there if newest is None or version <= newest][-max(1, keep) :]
    needed = set(kept)
    for version in kept:
        while (base := _base_of(root, version)) is not None and base not in needed:
            needed.add(version := base)
    removed = []
    for path in sorted(root.glob("v*")) if root.is_dir() else []:
        match = re.fullmatch(r"v(\d{6,})", path.name)
        if match and kept and int(match[1]) < kept[0] and int(match[1]) not in needed and remove(path):
            removed.append(int(match[1]))
    return removed


def _base_of(root: Path, version: int) -> int | None:
    """The version that this one is a delta from; None for whole ones, and where that cannot be read."""
    try:
        manifest = json.loads((folder_of(root, version) / MANIFEST).read_bytes())
        return int(manifest["base"]["number"]) if manifest["kind"] == "delta" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _aside(root: Path, version: int) -> Path:
    return root / f"{_ASIDE}{folder_of(root, version).name}"


def remove(folder: Path) -> bool:
    """Remove a version's folder unless somebody reads it; whether it is gone."""
    gone = folder.with_name(f"{_GONE}{folder.name}-{os.getpid()}")
    if not _moved(folder, gone):
        return False
    shutil.rmtree(gone)
    return True


def _moved(folder: Path, to: Path) -> bool:
    """Rename a version's folder unless somebody reads it; whether it was."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            file = stack.enter_context(open(folder / MANIFEST, "rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        os.rename(folder, to)
    return True


class VersionFolder:
    """A version's folder, open for reading. manifest: checked against its own digest; data is checked as it is read."""

    def __init__(self, folder: Path) -> None:
        """Raises WeightsError for a folder that is not complete, or not what its manifest says."""
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        self._good: dict[str, set[int]] = {}
        try:
            self._lock: BinaryIO = open(folder / MANIFEST, "rb")  # noqa: SIM115  (held until `close`)
        except FileNotFoundError as error:
            state = "incomplete: it has no manifest" if folder.is_dir() else "not there"
            raise WeightsError(f"{folder} is {state}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if not (folder / MANIFEST).is_file() or os.fstat(self._lock.fileno()).st_nlink == 0:
                raise WeightsError(f"{folder} was removed just now")
            self.manifest = self._read_manifest()
        except BaseException:
            self.close()
            raise

    def _read_manifest(self) -> Manifest:
        try:
            manifest = json.loads(self._lock.read())
            claimed = manifest.pop("digest")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{self.folder / MANIFEST} is no manifest ({error})") from error
        if claimed != _manifest_digest(manifest):
            raise WeightsError(f"{self.folder / MANIFEST} was altered: its digest is another")
        if manifest.get("format") != FORMAT:
            raise WeightsError(f"{self.folder} has format {manifest.get('format')!r}, expected {FORMAT!r}")
        there = {path.name: path.stat().st_size for path in self.folder.iterdir() if path.name != MANIFEST}
        wrong = {
            name for name in there.keys() | manifest["files"].keys() if there.get(name) != manifest["files"].get(name)
        }
        if wrong:
            name = sorted(wrong)[0]
            raise WeightsError(
                f"{self.folder / name} has {there.get(name, 'no')} bytes, the manifest says "
                f"{manifest['files'].get(name, 'there is no such file')}"
            )
        end = max(there.values(), default=0) if manifest["kind"] == "full" else sys.maxsize  # a delta names results
        check_leaves(manifest.get("leaves"), manifest.get("block_bytes"), 0, end)
        if manifest["kind"] == "full":
            for path, leaf in manifest["leaves"].items():
                if leaf["bytes"] and leaf["offset"] + leaf["bytes"] > there.get(leaf["file"], 0):
                    raise WeightsError(f"{self.folder}: {path} lies beyond the end of {leaf['file']}")
        return {**manifest, "digest": claimed}

    def read(self, path: str, region: tuple[slice | EllipsisType, ...]) -> np.ndarray:
        """A region of a leaf, as a view of the file. Only its rows are read, and held against their checksums. Raises
        WeightsError when they differ. Drop views before `close`."""
        leaf = self.manifest["leaves"][path]
        shape, dtype = tuple(leaf["shape"]), np.dtype(leaf["dtype"])
        if not leaf["bytes"]:
            return np.empty(shape, dtype)[region]
        flat = np.frombuffer(self._mapped(leaf["file"]), np.uint8, leaf["bytes"], leaf["offset"])
        row = leaf["bytes"] // shape[0] if shape else leaf["bytes"]
        rows = region[0].indices(shape[0]) if isinstance(region[0], slice) else (0, 1, 1)
        block = self.manifest["block_bytes"]
        needed = range(rows[0] * row // block, -(-rows[1] * row // block))
        good = self._good.setdefault(path, set())
        if bad := wrong_blocks(flat.data, leaf["crc32"], block, [n for n in needed if n not in good]):
            raise WeightsError(
                f"{self.folder / leaf['file']}: {path} was altered, in {len(bad)} of {len(leaf['crc32'])} blocks"
            )
        good.update(needed)
        return flat.view(dtype).reshape(shape)[region]

    def bytes_of(self, name: str) -> bytes:
        """A whole file of the folder."""
        return (self.folder / name).read_bytes()

    def _mapped(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            with open(self.folder / name, "rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[name]

    def close(self) -> None:
        """Unlock. Views that are still in use stay valid until they are dropped."""
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps.clear()
        self._lock.close()

    def __enter__(self) -> VersionFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return digest(json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _check_types(targets: list[Target]) -> None:
    for target in targets:
        if target.dtype not in _SAFETENSORS:
            raise SyncError(f"sync: {target.path} has type {target.dtype}, which safetensors files cannot hold")


def _size(target: Target) -> int:
    return int(np.prod(target.shape, dtype=np.int64)) * np.dtype(target.dtype).itemsize


def _groups(targets: list[Target], max_file_bytes: int) -> list[list[Target]]:
    """What goes into each file: in order, as much as fits; a leaf that is larger than a file may be has one alone."""
    groups: list[list[Target]] = [[]]
    room = max_file_bytes
    for target in targets:
        if groups[-1] and _size(target) > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(target)
        room -= _size(target)
    return groups


def _write_file(
    path: Path, group: list[Target], supply: Iterator[tuple[Target, np.ndarray]], described: Manifest
) -> int:
    """Write one safetensors file, leaf by leaf, as they are supplied. Returns its size."""
    header: Manifest = {"__metadata__": {"format": FORMAT}}
    at = 0
    for target in group:
        header[target.path] = {
            "dtype": _SAFETENSORS[target.dtype],
            "shape": list(target.shape),
            "data_offsets": [at, at + _size(target)],
        }
        at += _size(target)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # leaves begin aligned
    start = 8 + len(text)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for expected in group:
            target, array = next(supply)
            assert target is expected, (target.path, expected.path)
            # As bytes: `tobytes` of a type that numpy does not know itself goes element by element.
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write(data)
            described[target.path] = {
                "file": path.name,
                "shape": list(target.shape),
                "dtype": target.dtype,
                "offset": start + header[target.path]["data_offsets"][0],
                "bytes": data.nbytes,
                "crc32": checksums(data, BLOCK_BYTES),
            }
        file.flush()
        os.fsync(file.fileno())
        return file.tell()
