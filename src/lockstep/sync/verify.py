"""Digests of weights: computed where the weights are, from what is really there, equal for equal content in any layout.

Of a leaf with elements w_i (their bits as unsigned integers) at global index i, each of two 32-bit lanes is

    sum_i  mix_lane( w_i xor key_lane(i) )   mod 2^32

`mix` is a bijection with full avalanche (MurmurHash3's finaliser, A. Appleby), so changing any one element (of up to
32 bits) always changes both lanes, and any other change goes unnoticed with probability about 2^-64. Sums commute:
shards are summed on their devices and added up, so a digest does not depend on the cut. Every device's shard is
digested, replicas included, and replicas that differ are an error. NaNs, infinities and zeros of either sign are
content like everything else.

The digest is meant against faults, not against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.cluster.sharding import describe_layout, mesh_order
from lockstep.errors import SyncError
from lockstep.sync.transfer import Box, boxes

U32 = jnp.uint32
MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)  # of the keys, per lane; primes of xxHash32 (Y. Collet)
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def leaf_digests(tree: Mapping[str, jax.Array]) -> dict[str, str]:
    """path -> digest of each leaf, such as `float32[576,192]:0123456789abcdef`, from the bytes on the devices.

    Raises SyncError naming the leaf: replicas that differ, an array that was deleted or donated, that other processes
    hold parts of, or of a type without a bit pattern of whole bytes.
    """
    return start_digests(tree)()


def start_digests(tree: Mapping[str, jax.Array]) -> Callable[[], dict[str, str]]:
    """Put the digests of all leaves under way and return the function that waits for them; both as `leaf_digests`.

    Two trees on different devices are digested at the same time when both are started before either is awaited.
    """
    lanes = {path: _lanes(path, leaf) for path, leaf in tree.items()}
    return lambda: {path: _combine(path, tree[path], np.asarray(lanes[path])) for path in tree}


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
    return f"{leaf.dtype.name}[{','.join(str(n) for n in leaf.shape)}]"


def _blake(*parts: str) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part.encode() + b"\n")
    return state.hexdigest()


def _lanes(path: str, leaf: jax.Array) -> jax.Array:
    """Start the digest of every shard of `leaf`: [devices in mesh order, 2] uint32, not waited for."""
    if leaf.is_deleted():
        raise SyncError(f"digest: {path} was deleted or donated; a donated tree must not be used again")
    if not leaf.is_fully_addressable:
        raise SyncError(f"digest: other processes hold parts of {path} ({describe_layout(leaf.sharding)})")
    if _bits(leaf.dtype) not in (8, 16, 32, 64):
        raise SyncError(f"digest: {path} has type {leaf.dtype}; weights are integers or floats of whole bytes")
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        return _sharded_lanes(sharding.mesh, sharding.spec, leaf.ndim)(leaf)
    if len(sharding.device_set) == 1:
        return _single_lanes(leaf)
    raise SyncError(
        f"digest: {path} is laid out by a {type(sharding).__name__} over {len(sharding.device_set)} devices; "
        f"place it with a NamedSharding"
    )


def _bits(dtype: np.dtype) -> int:
    """Bits of one element; 0 for types that are neither integer nor float."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    return int(jnp.finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.floating) else 0


@jax.jit
def _single_lanes(leaf: jax.Array) -> jax.Array:
    return _shard_lanes(leaf, [U32(0)] * leaf.ndim)[None]


@lru_cache(maxsize=512)
def _sharded_lanes(mesh: Mesh, spec: PartitionSpec, ndim: int) -> Callable[[jax.Array], jax.Array]:
    """The digest of each shard under `spec`; compiled once per shape and type."""
    entries = [*spec, *[None] * (ndim - len(spec))]

    def shard(leaf: jax.Array) -> jax.Array:
        offsets = [
            U32(0) if entry is None else lax.axis_index(entry).astype(U32) * U32(size)
            for entry, size in zip(entries, leaf.shape, strict=True)
        ]
        return _shard_lanes(leaf, offsets)[None]

    everywhere = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=everywhere, check_vma=False))


def _shard_lanes(shard: jax.Array, offsets: list[jax.Array]) -> jax.Array:
    """[2] uint32: both lanes of one shard whose first element sits at `offsets` in the whole leaf."""
    bits = lax.bitcast_convert_type(shard, _UNSIGNED[shard.dtype.itemsize]).astype(U32)
    # A wider type becomes several 32-bit words, in a new last dim.
    offsets = offsets + [U32(0)] * (bits.ndim - shard.ndim)
    first = avalanche(bits ^ _keys(bits.shape, offsets, MULTIPLIERS[0]))
    # The second lane goes on from the first one's well-mixed value: half the work, its own keys, still a bijection.
    second = (first ^ _keys(bits.shape, offsets, MULTIPLIERS[1])) * U32(0xC2B2AE3D)
    second = (second ^ (second >> 15)) * U32(0x27D4EB2F)
    # One reduction over both: two separate sums would run the mixing twice and, on the CPU, seven times slower.
    sums = lax.reduce((first, second), (U32(0), U32(0)), _add_pairs, tuple(range(bits.ndim)))
    return jnp.stack(sums)


def _add_pairs(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return a[0] + b[0], a[1] + b[1]


def _keys(shape: tuple[int, ...], offsets: list[jax.Array], multiplier: int) -> jax.Array:
    """uint32 of `shape`: key of the position (i, j, ...) = (i + 1) c + (j + 1) c^2 + ..., c the lane's multiplier.

    Linear, because hashed indices would cost more than the mixing. Two positions of a matrix share a key of one lane
    only when they are tens of thousands apart, and never those of both lanes: the difference of the two multipliers is
    twice an odd number.
    """
    key = jnp.zeros(shape, U32)
    for dim, (size, offset) in enumerate(zip(shape, offsets, strict=True)):
        step = U32(pow(multiplier, dim + 1, 2**32))
        key = key + lax.broadcast_in_dim((lax.iota(U32, size) + offset + U32(1)) * step, shape, (dim,))
    return key


def avalanche(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit reaches every output bit (MurmurHash3's fmix32)."""
    x = (x ^ (x >> 16)) * U32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * U32(0xC2B2AE35)
    return x ^ (x >> 16)


def _combine(path: str, leaf: jax.Array, lanes: np.ndarray) -> str:
    """Add up the shards' lanes, each box once; replicas of a box must agree."""
    sharding = leaf.sharding
    held = boxes(sharding, leaf.shape)
    devices = mesh_order(sharding)
    first: dict[Box, int] = {}
    for row, device in enumerate(devices):
        box = held[device]
        if box not in first:
            first[box] = row
        elif (lanes[row] != lanes[first[box]]).any():
            raise SyncError(
                f"digest: device {devices[first[box]].id} and device {device.id} should hold the same part of {path}, "
                f"{list(box)}, but their content differs: the replicas have drifted apart; {describe_layout(sharding)}"
            )
    total = lanes[list(first.values())].sum(axis=0, dtype=np.uint32)
    return f"{kind_of(leaf)}:{int(total[0]):08x}{int(total[1]):08x}"
