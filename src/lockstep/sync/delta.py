"""Delta sync: only the elements that an update changed, as values at positions, against a declared base version.

    delta = encode(published, new, base_policy, policy)
    use, why = choose(delta, full_bytes)
    tree = apply(Delta.from_bytes(delta.to_bytes()), installed, installed_policy)

A delta holds new values, never differences: whatever it is applied to, the elements it names end up right, and applying
it twice cannot revert them. It is applied to its base and nothing else all the same. Elements are bit patterns: a NaN's
payload and the sign of a zero are content.

Encoded form: MAGIC, the header's length, a digest of all that follows, a JSON header, and per leaf its positions and
its values, each a zlib stream. Nothing in it is executed, and no size it claims is trusted before it is checked against
what is really there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lockstep.errors import SyncError
from lockstep.sync import codes
from lockstep.sync.hosted import gather
from lockstep.sync.select import listed
from lockstep.text import format_bytes
from lockstep.types import PolicyVersion

MAGIC = b"lsdelta1"
_HASH_BYTES = 16
_PREFIX_BYTES = len(MAGIC) + 8 + _HASH_BYTES
_BITS: dict[int, np.dtype[Any]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}

Array = np.ndarray | jax.Array


@dataclass(frozen=True)
class LeafDelta:
    """What changed in one leaf. changed: number of elements. coding, of their positions in row-major order: `gaps`
    (distances as varints), `bitmap` (a bit per element), `all` or `none`. positions, values: zlib streams."""

    shape: tuple[int, ...]
    dtype: str
    changed: int
    coding: str
    positions: bytes
    values: bytes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def coded_bytes(self) -> int:
        """What crosses for this leaf, headers aside."""
        return len(self.positions) + len(self.values)

    @property
    def density(self) -> float:
        """Fraction of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Delta:
    """Takes the leaves of version `base` to those of version `policy`."""

    base: PolicyVersion
    policy: PolicyVersion
    leaves: Mapping[str, LeafDelta]

    @property
    def elements(self) -> int:
        return sum(leaf.elements for leaf in self.leaves.values())

    @property
    def changed(self) -> int:
        return sum(leaf.changed for leaf in self.leaves.values())

    @property
    def density(self) -> float:
        """Fraction of all elements that changed."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def coded_bytes(self) -> int:
        """What crosses: `len(self.to_bytes())`."""
        return _PREFIX_BYTES + len(self._header()) + sum(leaf.coded_bytes for leaf in self.leaves.values())

    def report(self) -> dict[str, Any]:
        """For a receipt: total and per leaf what changed and what crosses."""
        return {
            "base": str(self.base),
            "elements": self.elements,
            "changed": self.changed,
            "density": self.density,
            "bytes": self.coded_bytes,
            "leaves": {
                path: {
                    "changed": leaf.changed,
                    "density": leaf.density,
                    "bytes": leaf.coded_bytes,
                    "coding": leaf.coding,
                }
                for path, leaf in self.leaves.items()
            },
        }

    def _header(self) -> bytes:
        leaves = [
            [path, leaf.shape, leaf.dtype, leaf.changed, leaf.coding, len(leaf.positions), len(leaf.values)]
            for path, leaf in self.leaves.items()
        ]
        head = {
            "base": [self.base.number, self.base.digest],
            "policy": [self.policy.number, self.policy.digest],
            "leaves": leaves,
        }
        return json.dumps(head, separators=(",", ":")).encode()

    def to_bytes(self) -> bytes:
        """The encoded form."""
        header = self._header()
        body = [header, *(part for leaf in self.leaves.values() for part in (leaf.positions, leaf.values))]
        length = len(header).to_bytes(8, "little")
        return b"".join([MAGIC, length, _hash(length, *body), *body])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Delta:
        """Read what `to_bytes` made. Raises SyncError unless every bit is as it was written."""
        view = memoryview(data).cast("B")
        if len(view) < _PREFIX_BYTES or bytes(view[: len(MAGIC)]) != MAGIC:
            raise SyncError(f"delta: these {len(view)} bytes are no delta; expected at least {_PREFIX_BYTES}, "
                            f"beginning with {MAGIC.decode()}")  # fmt: skip
        length = view[len(MAGIC) : len(MAGIC) + 8]
        header_bytes, body = int.from_bytes(length, "little"), view[_PREFIX_BYTES:]
        if header_bytes > len(body):
            raise SyncError(f"delta: cut short: a header of {header_bytes} bytes in {len(body)}; send it again")
        if _hash(length, body) != bytes(view[len(MAGIC) + 8 : _PREFIX_BYTES]):
            raise SyncError("delta: its content does not have the digest it came with: cut short or altered on the "
                            "way; send it again")  # fmt: skip
        return _parse(bytes(body[:header_bytes]), body[header_bytes:])


def encode(
    base: Mapping[str, Array], new: Mapping[str, Array], base_policy: PolicyVersion, policy: PolicyVersion
) -> Delta:
    """The delta from `base`, the leaves of version `base_policy`, to `new`, those of `policy`.

    Leaf by leaf: besides the result, memory is bounded by a few copies of the largest leaf. Raises SyncError naming the
    leaf where names, shapes or dtypes of the two differ.
    """
    _check_same_names(base, new, "the new weights")
    leaves = {}
    for path in new:
        was, now = base[path], new[path]
        if was.shape != now.shape or was.dtype != now.dtype:
            raise SyncError(
                f"delta: {path} was {was.dtype.name}{list(was.shape)} in {base_policy} and is "
                f"{now.dtype.name}{list(now.shape)} in {policy}; push the full weights"
            )
        leaves[path] = _encode_leaf(path, _host(path, was), _host(path, now))
    return Delta(base_policy, policy, leaves)


def apply(delta: Delta, installed: Mapping[str, Array], installed_policy: PolicyVersion) -> dict[str, Array]:
    """The leaves of `delta.policy`, from those of its base. `installed` is never written: leaves in which nothing
    changed are returned as they are, others are new arrays (a jax array on the sharding of the installed one).

    Raises SyncError when `installed_policy` is not exactly the delta's base, or when a leaf is missing, unknown, of
    another shape or dtype, or its code is inconsistent.
    """
    if installed_policy != delta.base:
        done = "; it has been applied already" if installed_policy == delta.policy else ""
        raise SyncError(
            f"delta: it goes from {_name(delta.base)} to {_name(delta.policy)}, but {_name(installed_policy)} is "
            f"installed{done}. Push the full weights"
        )
    _check_same_names(delta.leaves, installed, "the installed weights")
    return {path: _apply_leaf(path, leaf, installed[path]) for path, leaf in delta.leaves.items()}


def choose(delta: Delta, full_bytes: int) -> tuple[bool, str]:
    """(whether to send the delta, why), for the receipt. full_bytes: what crosses without it."""
    crosses, share = delta.coded_bytes, f"{delta.density:.2%} of {delta.elements:,} elements changed"
    if crosses >= full_bytes:
        return False, (
            f"full: {share}; as a delta {format_bytes(crosses)} would cross, which is no less than the "
            f"{format_bytes(full_bytes)} of the full plan"
        )
    return True, f"delta: {share}; {format_bytes(crosses)} cross instead of {format_bytes(full_bytes)}"


# -- one leaf --------------------------------------------------------------------------------------------------------


def _encode_leaf(path: str, was: np.ndarray, now: np.ndarray) -> LeafDelta:
    old, new = _bits(path, was), _bits(path, now)
    differs = old != new
    changed, count = int(np.count_nonzero(differs)), len(new)
    positions = b""
    if changed == 0:
        coding, values = "none", new[:0]
    elif 8 * (count - changed) * new.itemsize <= count:  # the values left out would be less than a bit per element
        coding, changed, values = "all", count, new
    elif 8 * changed < count:  # a gap takes a byte or more
        found = np.flatnonzero(differs)
        coding, values = "gaps", new[found]
        positions = codes.varints(np.diff(found, prepend=-1) - 1)
    else:
        coding, values = "bitmap", new[differs]
        positions = np.packbits(differs).tobytes()
    # Planes of equal significance: sign and exponent bytes are alike, mantissa bytes are noise.
    planes = np.ascontiguousarray(values.view("u1").reshape(len(values), new.itemsize).T)
    return LeafDelta(now.shape, now.dtype.name, changed, coding, codes.pack(positions), codes.pack(planes.tobytes()))


def _apply_leaf(path: str, leaf: LeafDelta, installed: Array) -> Array:
    if tuple(installed.shape) != leaf.shape or installed.dtype.name != leaf.dtype:
        raise SyncError(
            f"delta: {path} is {leaf.dtype}{list(leaf.shape)} in the delta and {installed.dtype.name}"
            f"{list(installed.shape)} where it is installed; push the full weights"
        )
    if not leaf.changed:
        return installed
    result = np.array(_host(path, installed), order="C")  # a copy: what is installed may be in use
    bits = _bits(path, result)
    planes = _unpack(path, leaf.values, leaf.changed * bits.itemsize).reshape(bits.itemsize, leaf.changed)
    values = np.ascontiguousarray(planes.T).reshape(-1).view(bits.dtype)
    if leaf.coding == "all":
        bits[:] = values
    else:
        bits[_positions(path, leaf)] = values
    return result if isinstance(installed, np.ndarray) else jax.device_put(result, installed.sharding)


def _positions(path: str, leaf: LeafDelta) -> np.ndarray:
    """Where the values go: a mask, or increasing indices, within the leaf; as many as there are values."""
    if leaf.coding == "bitmap":
        packed = _unpack(path, leaf.positions, -(-leaf.elements // 8))
        mask: np.ndarray = np.unpackbits(packed, count=leaf.elements).view(bool)
        if int(np.count_nonzero(mask)) != leaf.changed:
            raise _garbled(path, "its bitmap does not mark as many elements as have values")
        return mask
    try:
        gaps = codes.gaps(codes.unpack(leaf.positions, codes.VARINT_BYTES * leaf.changed))
    except ValueError as error:
        raise _garbled(path, str(error)) from error
    # In float64 the sum cannot wrap, and it is exact wherever it matters (below 2^53).
    if len(gaps) != leaf.changed or gaps.sum(dtype=np.float64) + leaf.changed > leaf.elements:
        raise _garbled(path, "its positions do not lie within the leaf")
    return np.cumsum(gaps + 1) - 1


def _unpack(path: str, packed: bytes, size: int) -> np.ndarray:
    """[size] uint8."""
    try:
        raw = codes.unpack(packed, size)
    except ValueError as error:
        raise _garbled(path, str(error)) from error
    if len(raw) != size:
        raise _garbled(path, f"{len(packed)} bytes unpack to {len(raw)}, not to {size}")
    return raw


def _bits(path: str, leaf: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, flat; a view where `leaf` is contiguous."""
    if leaf.dtype.itemsize not in _BITS or leaf.dtype.hasobject:
        raise SyncError(f"delta: {path} has type {leaf.dtype}; expected elements of 1, 2, 4 or 8 bytes")
    return leaf.reshape(-1).view(_BITS[leaf.dtype.itemsize])


def _host(path: str, leaf: Array) -> np.ndarray:
    """The whole leaf in host memory; a view where it lies there in one piece."""
    return leaf if isinstance(leaf, np.ndarray) else gather(path, leaf)


def _garbled(path: str, why: str) -> SyncError:
    return SyncError(f"delta: the code of {path} is inconsistent: {why}. Push the full weights")


def _hash(*parts: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


# -- the header ------------------------------------------------------------------------------------------------------


def _parse(header: bytes, body: memoryview) -> Delta:
    """The delta whose JSON header is `header`. Its bytes are those that were written; still, nothing is taken on
    trust, because another release may have written them."""
    try:
        head = json.loads(header)
        base, policy = (PolicyVersion(_count(n), _word(d)) for n, d in (head["base"], head["policy"]))
        leaves, at = {}, 0
        for path, shape, dtype, changed, coding, *sizes in head["leaves"]:
            ends = [at + _count(sizes[0]), at + _count(sizes[0]) + _count(sizes[1])]
            positions, values = bytes(body[at : ends[0]]), bytes(body[ends[0] : ends[1]])
            leaf = LeafDelta(tuple(map(_count, shape)), _word(dtype), _count(changed), coding, positions, values)
            whole = {"none": leaf.changed == 0, "all": leaf.changed == leaf.elements}
            if len(sizes) != 2 or not whole.get(coding, coding in ("gaps", "bitmap")):
                raise ValueError(f"{path} has {changed} changes coded as {coding!r}")
            if leaf.changed > leaf.elements or ends[1] > len(body) or path in leaves:
                raise ValueError(f"{path} has more changes than elements, lies outside, or is there twice")
            leaves[_word(path)], at = leaf, ends[1]
        if at != len(body):
            raise ValueError(f"{len(body) - at} bytes belong to no leaf")
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise SyncError(f"delta: its header cannot be read ({error}); both sides must run the same release") from error
    return Delta(base, policy, leaves)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is no count")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _name(policy: PolicyVersion) -> str:
    """`version 7 (0123456789abcdef...)`: the whole digest, for two that differ only late."""
    return f"version {policy.number} ({policy.digest})"


def _check_same_names(expected: Mapping[str, Any], got: Mapping[str, Any], what: str) -> None:
    if missing := sorted(expected.keys() - got.keys()):
        raise SyncError(f"delta: {what} lack {listed(missing)}; push the full weights")
    if extra := sorted(got.keys() - expected.keys()):
        raise SyncError(f"delta: {what} have {listed(extra)}, which the base has not; push the full weights")
