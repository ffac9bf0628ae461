"""Blocks cut into a fixed number of parts: tensor parallelism whose bits do not depend on the number of devices.

A block (attention by heads, MLP by width, head by vocabulary) is computed part by part, each a narrower block of its
own: products by columns, then one by rows, which leaves a partial sum of the output per part. The partial sums are
combined in a fixed tree, ((p0 + p1) + (p2 + p3)). `Numerics.tensor_parts` says how many parts there are. How many of
them one device computes, all or a few, decides where the numbers are made and not which. The cut is Megatron's
(Shoeybi et al. 2019, arXiv:1909.08053, section 3), whose sums' order depends on the number of devices.

All of this runs under `jax.shard_map`, mesh axis `tensor`, with the rows of work alike on its devices. What is computed
alike on all of them must not be summed over them when differentiated, and what reaches the loss through each device's
own parts must be: `enter`, `combine`, `join` and `whole` say so one by one, where JAX's own transposes of collectives
would sum always.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from lockstep.models.spec import ModelSpec
from lockstep.ops import fence

AXIS = "tensor"
Block = Literal["attention", "mlp", "head"]
Weights = Mapping[str, jax.Array]

_AXES: dict[Block, tuple[str, ...]] = {"attention": ("heads", "kv_heads"), "mlp": ("mlp",), "head": ("vocab",)}


def parts_of(spec: ModelSpec, block: Block, tensor_parts: int) -> int:
    """In how many parts the block is computed: `tensor_parts`, or 1 (whole, on every device) where that does not divide
    what the block is cut by."""
    sizes = {
        "attention": (spec.num_heads, spec.num_kv_heads),
        "mlp": (spec.mlp_dim,),
        "head": (spec.vocab_size,),
    }[block]
    return tensor_parts if all(size % tensor_parts == 0 for size in sizes) else 1


def whole_blocks(spec: ModelSpec, tensor_parts: int) -> list[str]:
    """In words, the blocks that are not cut although there are parts."""
    said: dict[Block, str] = {
        "attention": f"{spec.num_heads} heads on {spec.num_kv_heads}",
        "mlp": f"a width of {spec.mlp_dim}",
        "head": f"a vocabulary of {spec.vocab_size}",
    }
    return [
        f"{block}: computed whole by every device along `tensor`, {tensor_parts} parts do not divide {size}"
        for block, size in said.items()
        if parts_of(spec, block, tensor_parts) < tensor_parts
    ]


def cut_axes(spec: ModelSpec, tensor_parts: int) -> frozenset[str]:
    """Logical axes of leaves (`spec.Leaf.axes`) whose blocks are computed in parts."""
    return frozenset(axis for block, axes in _AXES.items() if parts_of(spec, block, tensor_parts) > 1 for axis in axes)


def _dims(columns: tuple[str, ...], rows: str) -> dict[str, int]:
    """Leaf name -> the dim that is cut, of a block of products by columns and one by rows, adapters included."""
    by_columns = {f"{n}{suffix}": dim for n in columns for suffix, dim in (("", 1), (".lora_b", 1), ("_bias", 0))}
    return by_columns | {rows: 0, f"{rows}.lora_a": 0}


_DIMS: dict[Block, dict[str, int]] = {
    "attention": _dims(("q", "k", "v"), "o"),
    "mlp": _dims(("gate", "up"), "down"),
    "head": {"table": 0},
}
_WIDEST: dict[Block, str] = {"attention": "o", "mlp": "down", "head": "table"}  # its dim 0 tells a device's share


def own_parts(spec: ModelSpec, block: Block, tensor_parts: int, w: Weights) -> int:
    """How many of the block's parts are this device's, told by its share of the weights."""
    widths = {"attention": spec.num_heads * spec.head_dim, "mlp": spec.mlp_dim, "head": spec.vocab_size}
    own, rest = divmod(w[_WIDEST[block]].shape[0] * parts_of(spec, block, tensor_parts), widths[block])
    assert own and not rest, f"{block}: a device's share of the weights is not a whole number of parts"
    return own


def block(
    spec: ModelSpec, tensor_parts: int, dtype: str, w: Weights, name: Block, x: jax.Array
) -> tuple[list[dict[str, jax.Array]], int, jax.Array]:
    """(weights of each of this device's parts of the block, in the compute dtype; how many parts there are on all
    devices; the block's input x as the parts take it). Leaves that are not cut are in every part's weights."""
    total, own = parts_of(spec, name, tensor_parts), own_parts(spec, name, tensor_parts, w)
    dims = _DIMS[name]
    if own < total:
        x, w = enter(x), {path: leaf if path in dims else enter(leaf) for path, leaf in w.items()}
    w = {path: leaf.astype(dtype) for path, leaf in w.items()}
    cut = {path: jnp.split(w[path], own, dim) for path, dim in dims.items() if path in w}
    # Fenced, so that a part's product is the same one whether its weights were sliced or came that way.
    return [w | fence({path: pieces[i] for path, pieces in cut.items()}) for i in range(own)], total, x


@jax.custom_vjp
def enter(x: jax.Array) -> jax.Array:
    """x, which all devices hold alike and each is about to use for its own parts: its cotangent is the sum of
    theirs."""
    return x


enter.defvjp(lambda x: (x, None), lambda _, cotangent: (lax.psum(cotangent, AXIS),))


def combine(partial_sums: Sequence[jax.Array], total: int) -> jax.Array:
    """The sum of all `total` parts, of which this device computed `partial_sums`, in the fixed tree.

    Each part's cotangent is that of the sum: what is done with the sum is done alike on every device.
    """
    return _combine(total, tuple(partial_sums))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(total: int, partial_sums: tuple[jax.Array, ...]) -> jax.Array:
    return tree_sum(_gathered(total, partial_sums))


_combine.defvjp(
    lambda total, partial_sums: (_combine(total, partial_sums), len(partial_sums)),
    lambda total, own, cotangent: ((cotangent,) * own,),
)


def _gathered(total: int, own: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Every device's parts, in order."""
    if len(own) == total:
        return list(fence(own))
    return list(fence(lax.all_gather(jnp.stack(own), AXIS, axis=0, tiled=True)))


def tree_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """Neighbours added, then neighbours of these, and so on; the last of an odd number waits. Additions of single
    elements, whose bits depend on nothing else, each fenced."""
    level = list(parts)
    while len(level) > 1:
        pairs = [fence(a + b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def join(pieces: Sequence[jax.Array], total: int) -> jax.Array:
    """[V, N] of `total` parts [V / total, N], of which this device computed `pieces`."""
    return fence(_join(total, tuple(pieces)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _join(total: int, pieces: tuple[jax.Array, ...]) -> jax.Array:
    own = jnp.concatenate(pieces)
    return own if len(pieces) == total else lax.all_gather(own, AXIS, axis=0, tiled=True)


def _join_back(total: int, own: int, cotangent: jax.Array) -> tuple[tuple[jax.Array, ...]]:
    if own < total:
        cotangent = _share(cotangent, 0, cotangent.shape[0] * own // total)
    return (tuple(jnp.split(cotangent, own)),)


_join.defvjp(lambda total, pieces: (_join(total, pieces), len(pieces)), _join_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole(shard: jax.Array, dim: int) -> jax.Array:
    """The whole of an array that is stored cut by `dim` and used alike on every device: the gradient of the shard is
    its share of the gradient, the same everywhere, and not the sum of the devices' gradients."""
    return lax.all_gather(shard, AXIS, axis=dim, tiled=True)


whole.defvjp(
    lambda shard, dim: (whole(shard, dim), shard.shape[dim]),
    lambda dim, size, cotangent: (_share(cotangent, dim, size),),
)


def _share(array: jax.Array, dim: int, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, lax.axis_index(AXIS) * size, size, dim)
