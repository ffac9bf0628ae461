"""Reading weights that lockstep left in shared memory: numpy and the standard library alone, nothing of lockstep.

    with Segment("/dev/shm/lockstep-actor-v000012-...") as segment:
        segment.check()                                       # every byte
        q = segment.array("model.layers.0.self_attn.q_proj.weight")     # read-only view; copy what is to be kept

An engine that cannot import lockstep can copy this file. A segment is one file, little-endian:

    0   8 bytes   LSTPSEG1
    8   uint64    state: 0 being written, 1 complete, 2 withdrawn
    16  uint64    where the manifest begins
    24  uint64    bytes of the manifest
    32  uint64    bytes of the whole segment
    40  16 bytes  BLAKE2b of the manifest
    64            leaves, each at a multiple of 64 bytes, C order; then the manifest (UTF-8 JSON)

The manifest: `format`, `version`, `policy_digest`, `plan`, `mapping`, `bytes`, `block_bytes`, and `leaves`: name ->
`shape`, `dtype`, `offset` (from the start of the segment), `bytes`, `crc32` (eight hex digits for each `block_bytes` of
the leaf; the last block may be shorter). It is written last, and the state after it. Versions do not
overwrite each other: each has a segment of its own. Whoever reads holds a shared lock (`flock`) on the file; a segment
that nobody has locked may be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

MAGIC = b"LSTPSEG1"
FORMAT = "lockstep weights 1"
HEADER = struct.Struct("<8sQQQQ16s")
STATE_AT = 8
DATA_AT = 64
WRITING, COMPLETE, WITHDRAWN = 0, 1, 2
DIGEST_BYTES = 16


class WeightsError(RuntimeError):
    """What is there is not what a manifest says, or is not complete."""


def digest(data: Any) -> str:
    """Of a manifest."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def checksums(data: memoryview, block_bytes: int, which: Iterable[int] | None = None) -> list[str]:
    """CRC-32 of each block of a leaf (or of those asked for), several at a time: it finds any fault of up to 32 bits in
    a row and all but one in 2^32 others, at twice the speed of a cryptographic digest."""
    numbers = list(range(-(-len(data) // block_bytes)) if which is None else which)

    def one(number: int) -> str:
        return f"{zlib.crc32(data[number * block_bytes : (number + 1) * block_bytes]):08x}"

    if len(numbers) < 2:
        return [one(number) for number in numbers]
    with ThreadPoolExecutor(threads_here()) as pool:
        return list(pool.map(one, numbers))


def wrong_blocks(data: memoryview, expected: list[str], block_bytes: int, which: Iterable[int]) -> list[int]:
    """Numbers of the blocks, of those asked for, whose content does not have its checksum."""
    numbers = list(which)
    found = checksums(data, block_bytes, numbers)
    return [number for number, crc in zip(numbers, found, strict=True) if crc != expected[number]]


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of that name; for one that it does not know (bfloat16, float8 without `ml_dtypes`) unsigned
    integers of its size."""
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  (teaches numpy the names)
    try:
        return np.dtype(name)
    except TypeError:
        size = {"bfloat16": 2, "float8": 1}.get(name.split("_")[0])
        if size is None:
            raise WeightsError(f"dtype {name!r} is not known") from None
        return np.dtype(f"<u{size}")


def check_leaves(leaves: object, block_bytes: object, start: int, end: int) -> None:
    """Raise WeightsError unless every entry of a manifest's `leaves` lies within start..end and fits itself."""
    if not isinstance(leaves, dict) or type(block_bytes) is not int or block_bytes < 1:
        raise WeightsError("the manifest has no leaves or no block size")
    for name, leaf in leaves.items():
        try:
            shape, offset, size = leaf["shape"], leaf["offset"], leaf["bytes"]
            counts = [*shape, offset, size]
            if any(type(n) is not int or n < 0 for n in counts) or not all(isinstance(c, str) for c in leaf["crc32"]):
                raise ValueError("numbers and checksums are of other types")
            if size != math.prod(shape) * numpy_dtype(leaf["dtype"]).itemsize:
                raise ValueError(f"{size} bytes are not {leaf['dtype']}{shape}")
            if len(leaf["crc32"]) != -(-size // block_bytes):
                raise ValueError(f"{len(leaf['crc32'])} checksums for {size} bytes")
            if size and not start <= offset <= offset + size <= end:
                raise ValueError(f"it lies at {offset}..{offset + size}, outside {start}..{end}")
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"the manifest's entry of {name} is wrong: {error!r}") from error


class Segment:
    """One version's weights in shared memory. manifest: as above. version: its number."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises WeightsError for a segment that is missing, incomplete, withdrawn, torn or of another format."""
        self.path = os.fspath(path)
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise WeightsError(f"{self.path}: {error.strerror}; was it withdrawn?") from error
        self._map: mmap.mmap | None = None
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self.manifest: Mapping[str, Any] = self._open()
        except BaseException:
            self.close()
            raise
        self.version: int = self.manifest["version"]
        self._checked: set[str] = set()

    def _open(self) -> dict[str, Any]:
        size = os.fstat(self._file.fileno()).st_size
        if size < DATA_AT:
            raise WeightsError(f"{self.path} has {size} bytes; it is still being written, or torn")
        # All pages at once: met one by one they cost more than what is done with them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(self._file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        magic, state, at, length, total, proof = HEADER.unpack_from(self._map)
        if magic != MAGIC:
            raise WeightsError(f"{self.path} is no segment of weights: it begins with {magic!r}")
        if state != COMPLETE:
            raise WeightsError(f"{self.path} is {'withdrawn' if state == WITHDRAWN else 'still being written'}")
        if total != size or not DATA_AT <= at <= at + length == total:
            raise WeightsError(f"{self.path} has {size} bytes, its header says {total}; it is torn")
        text = self._map[at : at + length]
        if hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest() != proof:
            raise WeightsError(f"{self.path}: its manifest was altered")
        manifest = json.loads(text)
        if manifest.get("format") != FORMAT or type(manifest.get("version")) is not int:
            raise WeightsError(f"{self.path} has format {manifest.get('format')!r}, expected {FORMAT!r}")
        check_leaves(manifest.get("leaves"), manifest.get("block_bytes"), DATA_AT, at)
        return manifest

    def array(self, name: str, *, check: bool = True) -> np.ndarray:
        """A leaf, whole, as a read-only view of the segment. check: whether to hold it against its checksums first,
        once per leaf. Raises WeightsError where they differ."""
        leaf = self.manifest["leaves"].get(name)
        if leaf is None or self._map is None:
            raise WeightsError(f"{self.path} has no leaf {name!r}" if self._map else f"{self.path} was closed")
        if check:
            self.check([name])
        flat = np.frombuffer(self._map, np.uint8, count=leaf["bytes"], offset=leaf["offset"] if leaf["bytes"] else 0)
        return flat.view(numpy_dtype(leaf["dtype"])).reshape(leaf["shape"])

    def check(self, names: Iterable[str] | None = None) -> None:
        """Hold leaves (by default all) against their checksums. Raises WeightsError naming one that differs."""
        for name in self.manifest["leaves"] if names is None else names:
            if name in self._checked:
                continue
            leaf = self.manifest["leaves"][name]
            with memoryview(self._map)[leaf["offset"] : leaf["offset"] + leaf["bytes"]] as data:  # type: ignore[arg-type]
                bad = wrong_blocks(data, leaf["crc32"], self.manifest["block_bytes"], range(len(leaf["crc32"])))
            if bad:
                raise WeightsError(f"{self.path}: {name} was altered, in {len(bad)} of {len(leaf['crc32'])} blocks")
            self._checked.add(name)

    def withdrawn(self) -> bool:
        """Whether the owner has withdrawn it since it was opened; views stay readable."""
        return self._map is None or self._map[STATE_AT] == WITHDRAWN

    def close(self) -> None:
        """Unmap and unlock. Raises WeightsError while views are in use: drop them first. Twice is harmless."""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError as error:
                raise WeightsError(f"{self.path}: arrays of it are still in use; drop or copy them first") from error
            self._map = None
        self._file.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except WeightsError:
            if kind is None:
                raise
            self._file.close()  # what went wrong holds views still, and says more


def threads_here() -> int:
    """Cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
