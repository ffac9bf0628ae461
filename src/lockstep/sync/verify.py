"""Digests of weights: computed where the weights are, from what is really there, equal for equal content in any layout.

    wanted = source_digests(actor_leaves, mapping)      # of what must arrive, from what the trainer holds
    check_same(wanted, leaf_digests(installed), "actor", "rollout")

`digest` says what a digest is; because it is a sum, that of a fused, transposed, padded or cast leaf follows from its
pieces without making it. Every device's shard is digested, replicas included, and replicas that differ are an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from lockstep.cluster.sharding import describe_layout, mesh_order
from lockstep.errors import SyncError
from lockstep.sync.digest import LANES, host_digest, keys, kind, spell
from lockstep.sync.keyed_sums import Along, start_sums
from lockstep.sync.layout import Box
from lockstep.sync.mapping import FormatMap, Piece, Target, piece_problem

__all__ = [
    "check_same", "host_digest", "kind_of", "leaf_digests", "policy_digest", "source_digests", "start_digests",
    "start_source_digests", "tree_digest",
]  # fmt: skip


def leaf_digests(tree: Mapping[str, jax.Array]) -> dict[str, str]:
    """path -> digest of each leaf, such as `float32[576,192]:` and 32 hex digits, from the bytes on the devices.

    Raises SyncError naming the leaf: replicas that differ, an array that was deleted or donated, that other processes
    hold parts of, or of a type without a bit pattern of whole bytes.
    """
    return start_digests(tree)()


def start_digests(tree: Mapping[str, jax.Array]) -> Callable[[], dict[str, str]]:
    """Put the digests of all leaves under way and return the function that waits for them; both as `leaf_digests`.

    Two trees on different devices are digested at the same time when both are started before either is awaited.
    """
    reads = {path: _Read(path, leaf.dtype, _whole(leaf.shape), leaf.ndim) for path, leaf in tree.items()}
    wait = _start(tree, reads.values())

    def finish() -> dict[str, str]:
        sums = wait()
        return {path: spell(leaf.dtype.name, leaf.shape, sums[reads[path]]) for path, leaf in tree.items()}

    return finish


def source_digests(source: Mapping[str, jax.Array], mapping: FormatMap) -> dict[str, str]:
    """Target path -> the digest that this leaf must have where it arrives, from the source's shards alone.

    Each source element counts in every target that it becomes a part of, after the cast to the target's type and at
    its place there; a leaf that becomes several, or one that several become, is read once. Zeros that fill a target
    count nothing. A NaN's payload is the one thing that casts on different machines may not agree on.

    Raises SyncError as `leaf_digests` does for the source's leaves, and where the map does not fit them.
    """
    return start_source_digests(source, mapping)()


def start_source_digests(source: Mapping[str, jax.Array], mapping: FormatMap) -> Callable[[], dict[str, str]]:
    """As `start_digests`, of what `source_digests` gives."""
    shares = {
        path: [_share(target, piece, source) for piece in target.pieces] for path, target in mapping.targets.items()
    }
    shares = _joined(shares, source)
    wait = _start(source, [share.read for parts in shares.values() for share in parts])

    def finish() -> dict[str, str]:
        sums = wait()
        lanes = {path: sum((share.of(sums) for share in parts), _NOTHING) for path, parts in shares.items()}
        return {path: spell(t.dtype, t.shape, lanes[path]) for path, t in mapping.targets.items()}

    return finish


def tree_digest(leaves: Mapping[str, str]) -> str:
    """Digest (32 hex digits) of a whole tree from its leaf digests; the order of the mapping does not matter."""
    return _blake(*(f"{path}={leaves[path]}" for path in sorted(leaves)))


def policy_digest(base: Mapping[str, str], trainable: Mapping[str, str]) -> str:
    """Digest (32 hex digits) of every weight that a policy is made of, for `PolicyVersion`.

    base: leaf digests of the frozen weights, computed once (empty when every leaf trains). trainable: those of what
    trains. The same weights give the same digest whichever of them are called trainable, if their names are disjoint.
    """
    shared = sorted(set(base) & set(trainable))
    assert not shared, f"leaves both frozen and trainable: {shared[:5]}"
    return tree_digest({**base, **trainable})


def check_same(source: Mapping[str, str], installed: Mapping[str, str], source_role: str, installed_role: str) -> None:
    """Raise SyncError, naming leaves and digests, unless both sides hold the same leaves with the same content."""
    wrong = sorted(p for p in source.keys() | installed.keys() if source.get(p) != installed.get(p))
    if not wrong:
        return
    none = "has no such leaf"
    shown = "; ".join(
        f"{p}: {source_role} {source.get(p, none)}, {installed_role} {installed.get(p, none)}" for p in wrong[:3]
    )
    raise SyncError(
        f"sync: what arrived at {installed_role} is not what {source_role} holds, in {len(wrong)} of "
        f"{len(source.keys() | installed.keys())} leaves: {shown}. Nothing was published"
    )


def kind_of(leaf: jax.Array) -> str:
    """`float32[576,192]`."""
    return kind(leaf.dtype.name, leaf.shape)


def _blake(*parts: str) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part.encode() + b"\n")
    return state.hexdigest()


# -- sums over what is read ------------------------------------------------------------------------------------------

_NOTHING = np.zeros(LANES, np.uint64)


class _Read(NamedTuple):
    """One pass over one source leaf: what `start_sums` is asked."""

    path: str
    dtype: np.dtype
    along: tuple[Along, ...]
    words_dim: int
    keep: bool = False


@dataclass(frozen=True)
class _Share:
    """What one piece adds to a target's sums: those of `read`, times `factor` per lane (of target dims that the source
    lacks). first: how the read's first dim, left unsummed, runs along the target (None: it is summed)."""

    read: _Read
    factor: tuple[int, ...]
    first: Along | None = None

    def of(self, sums: Mapping[_Read, np.ndarray]) -> np.ndarray:
        """[LANES] uint64."""
        found = sums[self.read]
        if self.first is not None:
            run = self.first
            rows = found[run.source : run.source + (run.size - 1) * run.source_step + 1 : run.source_step]
            if run.dim is not None:
                rows = rows * keys(run.dim, run.target, run.target_step, run.size).T
            found = rows.sum(axis=0, dtype=np.uint64)
        result: np.ndarray = found * np.array(self.factor, np.uint64)
        return result


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> tuple[Along, ...]:
    return tuple(Along(dim, 0, 0, size) for dim, size in enumerate(shape))


def _share(target: Target, piece: Piece, source: Mapping[str, jax.Array]) -> _Share:
    if piece.source not in source:
        raise SyncError(f"digest: {target.path} is made of {piece.source}, which the source does not hold")
    leaf = source[piece.source]
    if wrong := piece_problem(piece, target.shape, leaf.shape):
        raise SyncError(f"digest: {target.path} {target.shape} <- {piece.source} {leaf.shape}: {wrong}")
    along = {dim: Along(None, index, 0, 1) for dim, index in piece.fixed}
    factor = [1] * LANES
    for at, (dim, run) in enumerate(zip(piece.dims, piece.runs, strict=True)):
        if dim is None:
            factor = [f * int(k) % 2**64 for f, k in zip(factor, keys(at, run.target, 1, 1)[:, 0], strict=True)]
        else:
            along[dim] = Along(at, run.source, run.target, run.count, run.source_step, run.target_step)
    read = _Read(piece.source, np.dtype(target.dtype), tuple(along[d] for d in range(leaf.ndim)), len(target.shape))
    return _Share(read, tuple(factor))


def _joined(shares: Mapping[str, list[_Share]], source: Mapping[str, jax.Array]) -> dict[str, list[_Share]]:
    """The same shares with reads that differ along the first dim only made one, which leaves that dim unsummed: a stack
    of experts that become leaves of their own is read once, not once per expert."""
    firsts: dict[_Read, set[Along]] = {}
    for parts in shares.values():
        for share in parts:
            if len(share.read.along) > 2:
                firsts.setdefault(_unsummed(share.read, source), set()).add(share.read.along[0])

    def join(share: _Share) -> _Share:
        if len(share.read.along) <= 2:
            return share
        read = _unsummed(share.read, source)
        return _Share(read, share.factor, share.read.along[0]) if len(firsts[read]) > 1 else share

    return {path: [join(share) for share in parts] for path, parts in shares.items()}


def _unsummed(read: _Read, source: Mapping[str, jax.Array]) -> _Read:
    everything = Along(None, 0, 0, source[read.path].shape[0])
    return read._replace(along=(everything, *read.along[1:]), keep=True)


def _start(tree: Mapping[str, jax.Array], reads: Iterable[_Read]) -> Callable[[], dict[_Read, np.ndarray]]:
    """Start every read, once each; the returned function waits for their sums, [LANES] or [n, LANES] uint64 each."""
    with jax.enable_x64(True):
        started = {
            read: start_sums(read.path, tree[read.path], read.dtype, read.along, read.words_dim, read.keep)
            for read in dict.fromkeys(reads)
        }
    return lambda: {
        read: _combine(read, tree[read.path], lanes)
        for read, lanes in zip(started, jax.device_get(list(started.values())), strict=True)
    }


def _combine(read: _Read, leaf: jax.Array, lanes: np.ndarray) -> np.ndarray:
    """Add up the shards' sums, each part once; replicas of a part must agree. lanes: [devices, ...] uint64."""
    if len(lanes) == 1:
        total: np.ndarray = lanes[0]
        return total
    devices = mesh_order(leaf.sharding)
    held = _boxes(leaf.sharding, leaf.shape)
    first: dict[Box, int] = {}
    for row, box in enumerate(held):
        if first.setdefault(box, row) != row and (lanes[row] != lanes[first[box]]).any():
            raise SyncError(
                f"digest: device {devices[first[box]].id} and device {devices[row].id} should hold the same part of "
                f"{read.path}, {list(box)}, but their content differs: the replicas have drifted apart; "
                f"{describe_layout(leaf.sharding)}"
            )
    if not read.keep:
        return lanes[list(first.values())].sum(axis=0, dtype=np.uint64)
    total = np.zeros((leaf.shape[0], LANES), np.uint64)
    for box, row in first.items():
        total[slice(*box[0])] += lanes[row]
    return total


@lru_cache(maxsize=4096)
def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """What each device holds of a leaf, in mesh order."""
    held = sharding.devices_indices_map(shape)
    return tuple(
        tuple(part.indices(size)[:2] for part, size in zip(held[device], shape, strict=True))
        for device in mesh_order(sharding)
    )
