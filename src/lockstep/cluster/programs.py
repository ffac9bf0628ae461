"""The compiled pieces of one model on one mesh: what the engine and the trainer both run.

A forward pass is a Python loop over layers, each a call of one compiled function that all layers share. That keeps
compilation short (one layer, not thirty), and it makes the sampler and the trainer execute the same program on their
rows. The backward pass walks the layers in reverse with one compiled vector-Jacobian product per layer, recomputing the
layer from its stored input, and stops at the lowest layer that has anything to train.

On a mesh the rows are split over the axes `data` and `fsdp`, and the weights of a layer are gathered over `fsdp` where
they are used (ZeRO stage 3, arXiv:1910.02054); the gather's transpose is the gradient's reduce-scatter. The devices
along `tensor` have the same rows and share the work on them: each computes its share of the `Numerics.tensor_parts`
parts of a block (`models.parts`). Blocks that cannot be cut into so many parts are computed whole on each of them. A
row's bits depend neither on other rows nor on how many devices share its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.cluster import short_tiles
from lockstep.cluster.sharding import gather, reduce_gradient, spec_for
from lockstep.errors import ConfigError
from lockstep.models import decoder, parts, value_head
from lockstep.models.decoder import LayerConstants, Numerics, Pool, Rows, Weights
from lockstep.models.quantise import KVType, Quantised, blank
from lockstep.models.spec import Leaf, ModelSpec, require_decoder

BACKWARD_ROWS = 128  # bounds the memory of attention and head in the backward pass, whose bits nobody compares


@dataclass(frozen=True)
class SplitWeights:
    """A parameter tree as the programs take it: per layer, per role in the network. All views of the same arrays."""

    embed: jax.Array
    layers: tuple[dict[str, Any], ...]
    head: dict[str, jax.Array]

    @staticmethod
    def of(params: Weights, num_layers: int) -> SplitWeights:
        layers: list[dict[str, jax.Array]] = [{} for _ in range(num_layers)]
        for path, array in params.items():
            if path.startswith("layers."):
                _, i, name = path.split(".", 2)
                layers[int(i)][name] = array
        return SplitWeights(params["embed"], tuple(layers), decoder.head_weights(params))


class Programs:
    """Compiled functions for (spec, numerics, mesh); leaves: every leaf the weights may hold, base and adapter.

    Row arrays are global: leading dimension `row_shards * N`, the devices of row shard d (one for each step along the
    axis `tensor`) owning rows d*N..(d+1)*N-1, and every pool row number in `Rows` counts within its shard's pool.

    Raises ModelError for a model that the decoder cannot compute, ConfigError where the devices along `tensor` cannot
    share the parts evenly.
    """

    def __init__(self, spec: ModelSpec, num: Numerics, mesh: Mesh, leaves: Mapping[str, Leaf]) -> None:
        require_decoder(spec)
        self.spec, self.num, self.mesh, self.leaves = spec, num, mesh, dict(leaves)
        self.tensor = mesh.shape.get(parts.AXIS, 1)
        if num.tensor_parts % self.tensor:
            raise ConfigError(
                f"numerics.tensor_parts = {num.tensor_parts}, but the mesh has tensor = {self.tensor}, which does not "
                f"divide it: every device computes as many parts; use tensor_parts = {self.tensor} or a multiple"
            )
        self.row_axes = tuple(axis for axis in mesh.axis_names if axis != parts.AXIS)
        self.row_shards = mesh.size // self.tensor
        self.rows_spec = PartitionSpec(self.row_axes)
        cut = parts.parts_of(spec, "attention", num.tensor_parts) > 1
        self.pool_spec = PartitionSpec(self.row_axes, parts.AXIS) if cut else self.rows_spec
        self.row_sharding = NamedSharding(mesh, self.rows_spec)
        replicated = NamedSharding(mesh, PartitionSpec())
        self._constants = [
            (jax.device_put(c.inv_freq, replicated), jax.device_put(c.window, replicated))
            for c in LayerConstants.of(spec)
        ]
        # Layers are alike, so a leaf's place on the mesh is known from its name within the layer.
        self._specs = {self._short(path): spec_for(leaf, mesh) for path, leaf in leaves.items()}
        self._specs["table"] = self._specs.get("head", self._specs["embed"])
        self._axes_of = {self._short(path): leaf.axes for path, leaf in leaves.items()} | {"table": ("vocab", "embed")}
        self._layer = jax.jit(self._layer_program, donate_argnums=(3,))
        self._layer_vjp = jax.jit(self._layer_vjp_program)
        self._embed = jax.jit(self._embed_program)
        self._embed_vjp = jax.jit(self._embed_vjp_program)
        self._pick = jax.jit(self._pick_program)
        self._sample = jax.jit(self._sample_program)
        self._logprobs = jax.jit(self._logprobs_program)
        self._values = jax.jit(self._values_program)
        self._head_vjp = jax.jit(functools.partial(self.head_vjp_program, self._scored))
        self._as_a_tile: dict[int, bool] = {}  # by height of a short tile

    @staticmethod
    def _short(path: str) -> str:
        return path.split(".", 2)[2] if path.startswith("layers.") else path

    # -- what callers use ------------------------------------------------------------------------------------------

    def put_rows(self, tree: Any) -> Any:
        """Host arrays with a leading global row dimension, onto the mesh."""
        return jax.device_put(tree, self.row_sharding)

    def new_pool(self, rows: int, kv: KVType = "compute") -> Pool:
        """A zeroed key/value pool for one layer, `rows` rows in every row shard."""
        total = parts.parts_of(self.spec, "attention", self.num.tensor_parts)
        own = total // self.tensor if total > 1 else 1
        shape = (self.row_shards * rows, self.spec.num_kv_heads // own, self.spec.head_dim)
        side = functools.partial(blank, shape, self.num.dtype, kv, NamedSharding(self.mesh, self.pool_spec))
        return tuple((side(), side()) for _ in range(own))

    def new_pools(self, rows: int, kv: KVType = "compute") -> list[Pool]:
        """`new_pool` for every layer."""
        return [self.new_pool(rows, kv) for _ in range(self.spec.num_layers)]

    def embed(self, weights: SplitWeights, tokens: jax.Array) -> jax.Array:
        return self._embed(weights.embed, tokens)

    def layer(self, weights: SplitWeights, i: int, x: jax.Array, rows: Rows, pool: Pool) -> tuple[jax.Array, Pool]:
        """x after layer i, and the pool with these rows written (the pool passed in is consumed)."""
        return self.layer_of(weights.layers[i], i, x, rows, pool)

    def layer_of(self, weights: Weights, i: int, x: jax.Array, rows: Rows, pool: Pool) -> tuple[jax.Array, Pool]:
        """`layer` with layer i's own weights, by name within the layer."""
        return self._layer(weights, x, rows, pool, *self._constants[i])

    def pick(self, x: jax.Array, at: Any) -> jax.Array:
        """Rows `at` of x (numbers within the device's share). A program of its own, so that the head is compiled for
        numbers of picked rows alone."""
        return self._pick(x, at)

    def sample(
        self, weights: SplitWeights, x: jax.Array, temperature: Any, seed: Any, index: Any
    ) -> tuple[jax.Array, jax.Array]:
        """A token drawn from every row of x, and its log-probability."""
        return self._sample(weights.head, x, temperature, seed, index)

    def logprobs(self, weights: SplitWeights, x: jax.Array, target: Any, temperature: Any) -> jax.Array:
        """Log-probability of every row's `target`: the trainer's side of the record."""
        return self._logprobs(weights.head, x, target, temperature)

    def values(self, weights: SplitWeights, x: jax.Array, target: Any) -> jax.Array:
        """The scalar head's number for every row, [N] float32; target: negative where the row is padding."""
        return self._values(weights.head, x, target)

    def rows_for(self, count: int, width: int) -> int:
        """How many rows per device a pass of `count` is padded to: a power-of-two multiple of the tile, or a short tile
        that comes out as a whole one. width: of the index that its rows read by."""
        for height in short_tiles.HEIGHTS:
            if count <= height and self._may_be_short(height, width):
                return height
        return padded_rows(count, self.num.tile_rows)

    def head_rows_for(self, count: int) -> int:
        """How many rows per device are picked for the head where `count` are wanted."""
        return padded_rows(count, self.num.head_rows or decoder.HEAD_ROWS)

    def _may_be_short(self, height: int, width: int) -> bool:
        tile = self.num.tile_rows
        if not tile:
            return True
        if height >= tile or tile % height:
            return False
        if height not in self._as_a_tile:
            self._as_a_tile[height] = short_tiles.comes_out_as_a_tile(self, height, width)
        return self._as_a_tile[height]

    def place_of(self, name: str) -> PartitionSpec:
        """How the leaf of this name within its layer lies on the mesh."""
        return self._specs[name]

    # -- one device's share of each, under shard_map -----------------------------------------------------------------

    def _map(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        def precise(*arguments: Any) -> Any:
            # float32 means float32: accelerators would otherwise multiply in TF32 or in bfloat16 passes.
            with jax.default_matmul_precision("highest" if self.num.dtype == "float32" else "default"):
                return body(*arguments)

        return jax.shard_map(precise, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _of(self, w: Mapping[str, Any]) -> dict[str, Any]:
        return specs_like(w, self._specs)

    def gathered(self, w: Weights, num: Numerics | None = None) -> dict[str, Any]:
        """Inside a mapped body: the leaves as the decoder takes them under `num` (default: the programs' own). Whole,
        but for those that its blocks take in parts, of which it is this device's share."""
        cut = parts.cut_axes(self.spec, (num or self.num).tensor_parts)
        return {
            k: jax.tree.map(functools.partial(_whole, keep=not cut.isdisjoint(self._axes_of[k])), w[k], spec)
            for k, spec in self._of(w).items()
        }

    def _embed_program(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        def body(t: jax.Array, ids: jax.Array) -> jax.Array:
            return decoder.embed(self.spec, self.num, _whole(t, self._specs["embed"]), ids)

        return self._map(body, (self._specs["embed"], self.rows_spec), self.rows_spec)(table, tokens)

    def _layer_program(
        self, w: Weights, x: jax.Array, rows: Rows, pool: Pool, inv_freq: jax.Array, window: jax.Array
    ) -> Any:
        def body(w: Weights, x: jax.Array, rows: Rows, pool: Pool, inv_freq: jax.Array, window: jax.Array) -> Any:
            return decoder.layer(self.spec, self.num, self.gathered(w), x, rows, pool, inv_freq, window)

        r, p, none = self.rows_spec, self.pool_spec, PartitionSpec()
        return self._map(body, (self._of(w), r, r, p, none, none), (r, p))(w, x, rows, pool, inv_freq, window)

    def _pick_program(self, x: jax.Array, at: Any) -> jax.Array:
        return self._map(lambda x, at: x[at], (self.rows_spec, self.rows_spec), self.rows_spec)(x, at)

    def _sample_program(self, w: Weights, x: jax.Array, temperature: Any, seed: Any, index: Any) -> Any:
        def body(w: Weights, x: jax.Array, temperature: Any, seed: Any, index: Any) -> Any:
            return decoder.sample(self.spec, self.num, self.gathered(w), x, temperature, seed, index)

        r = self.rows_spec
        return self._map(body, (self._of(w), r, r, r, r), (r, r))(w, x, temperature, seed, index)

    def _logprobs_program(self, w: Weights, x: jax.Array, target: Any, temperature: Any) -> jax.Array:
        def body(w: Weights, x: jax.Array, target: Any, temperature: Any) -> jax.Array:
            return decoder.logprobs(self.spec, self.num, self.gathered(w), x, target, temperature)

        r = self.rows_spec
        return self._map(body, (self._of(w), r, r, r), r)(w, x, target, temperature)

    def _values_program(self, w: Weights, x: jax.Array, target: Any) -> jax.Array:
        def body(w: Weights, x: jax.Array, target: Any) -> jax.Array:
            return value_head.values(self.spec, self.num, self.gathered(w), x, target)

        r = self.rows_spec
        return self._map(body, (self._of(w), r, r), r)(w, x, target)

    # -- the backward pass -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _backward_num(self) -> Numerics:
        """No tiles, and one part per device: up to rounding the parts do not matter."""
        return replace(self.num, tile_rows=0, tensor_parts=self.tensor)

    def _vjp_body(self, forward: Callable[..., jax.Array], trainable: Weights, x: Any, cotangent: Any) -> Any:
        """(dx, d trainable): forward(trainable as stored, x) differentiated, summed over the row shards. Sums over
        `tensor` are taken inside, where devices differ along it."""
        _, pull = jax.vjp(forward, trainable, x)
        grads, dx = pull(cotangent)
        return dx, {k: reduce_gradient(g, self._specs[k], self.row_axes) for k, g in grads.items()}

    def layer_vjp(
        self, weights: SplitWeights, trainable: frozenset[str], i: int, x: jax.Array, rows: Rows, dx: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cotangents of layer i's input [N, D] and of its leaves named in `trainable` (full paths)."""
        chosen = {k: v for k, v in weights.layers[i].items() if f"layers.{i}.{k}" in trainable}
        frozen = {k: v for k, v in weights.layers[i].items() if k not in chosen}
        dx, grads = self._layer_vjp(frozen, chosen, x, rows, dx, *self._constants[i])
        return dx, {f"layers.{i}.{k}": g for k, g in grads.items()}

    def _layer_vjp_program(
        self, frozen: Weights, trainable: Weights, x: Any, rows: Rows, dx: Any, inv_freq: Any, window: Any
    ) -> Any:
        def body(frozen: Weights, trainable: Weights, x: Any, rows: Rows, dx: Any, inv_freq: Any, window: Any) -> Any:
            n, num = x.shape[0], self._backward_num
            heads = self.spec.num_kv_heads // parts.parts_of(self.spec, "attention", num.tensor_parts)
            empty = jnp.zeros((n + 1, heads, self.spec.head_dim), num.dtype)
            fixed = self.gathered(frozen, num)

            def forward(t: Weights, y: jax.Array) -> jax.Array:
                return decoder.layer(
                    self.spec, num, {**fixed, **self.gathered(t, num)}, y, rows, ((empty, empty),), inv_freq, window,
                    attention_tile=backward_tile(n),
                )[0]  # fmt: skip

            return self._vjp_body(forward, trainable, x, dx)

        r, none = self.rows_spec, PartitionSpec()
        in_specs = (self._of(frozen), self._of(trainable), r, r, r, none, none)
        return self._map(body, in_specs, (r, self._of(trainable)))(frozen, trainable, x, rows, dx, inv_freq, window)

    def head_vjp(
        self, weights: SplitWeights, trainable: frozenset[str], x: jax.Array, at: Any, target: Any, temperature: Any,
        dlogp: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
        """Cotangents of the final hidden rows and of the trained head leaves (`final_norm`, `head` or tied `embed`).
        With a scalar head dlogp is the cotangent of `values`, and the last leaf `value_head`."""
        return self.head_pull(self._head_vjp, weights, trainable, x, at, target, temperature, dlogp)

    def head_pull(
        self, program: Callable[..., Any], weights: SplitWeights, trainable: frozenset[str], *rows: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As `head_vjp`, of what `program` differentiates: a compiled `head_vjp_program`. rows: its arrays."""
        table = "embed" if self.spec.tied_head else "head"
        paths = {"final_norm": "final_norm", "table": table, "value_head": "value_head"}
        chosen = {k: v for k, v in weights.head.items() if paths[k] in trainable}
        frozen = {k: v for k, v in weights.head.items() if k not in chosen}
        dx, grads = program(frozen, chosen, *rows)
        return dx, {paths[k]: g for k, g in grads.items()}

    def _scored(self, num: Numerics, tile: int, w: Weights, x: jax.Array, target: Any, temperature: Any) -> jax.Array:
        """What `head_vjp` differentiates."""
        if self.spec.scalar_head:
            return value_head.values(self.spec, num, w, x, target, 0)
        block = jax.checkpoint(lambda *a: decoder.logprobs(self.spec, num, a[0], a[1], a[2], a[3], tile))
        return block(w, x, target, temperature)

    def head_vjp_program(
        self, value: Callable[..., jax.Array], frozen: Weights, trainable: Weights, x: Any, at: Any, target: Any,
        temperature: Any, cotangent: Any,
    ) -> Any:  # fmt: skip
        """To compile, with `value` given: (cotangent of x, of the trained leaves). value(num, tile, weights, rows,
        target, temperature) -> [M], of the picked rows; tile: rows at a time."""

        def body(
            frozen: Weights, trainable: Weights, x: Any, at: Any, target: Any, temperature: Any, cotangent: Any
        ) -> Any:
            num, tile = self._backward_num, backward_tile(at.shape[0])
            fixed = self.gathered(frozen, num)

            def forward(t: Weights, y: jax.Array) -> jax.Array:
                return value(num, tile, {**fixed, **self.gathered(t, num)}, y[at], target, temperature)

            return self._vjp_body(forward, trainable, x, cotangent)

        r = self.rows_spec
        in_specs = (self._of(frozen), self._of(trainable), r, r, r, r, r)
        out_specs = (r, self._of(trainable))
        return self._map(body, in_specs, out_specs)(frozen, trainable, x, at, target, temperature, cotangent)

    def embed_vjp(self, weights: SplitWeights, tokens: jax.Array, dx: jax.Array) -> jax.Array:
        """Cotangent of the embedding table."""
        return self._embed_vjp(weights.embed, tokens, dx)

    def _embed_vjp_program(self, table: jax.Array, tokens: Any, dx: Any) -> jax.Array:
        def body(table: jax.Array, tokens: Any, dx: Any) -> jax.Array:
            def forward(t: Weights, _: jax.Array) -> jax.Array:
                return decoder.embed(self.spec, self.num, _whole(t["embed"], self._specs["embed"]), tokens)

            return self._vjp_body(forward, {"embed": table}, jnp.zeros(()), dx)[1]["embed"]

        r, e = self.rows_spec, self._specs["embed"]
        return self._map(body, (e, r, r), e)(table, tokens, dx)


def _whole(shard: jax.Array, spec: PartitionSpec, keep: bool = False) -> jax.Array:
    """A leaf from its shards; with `keep`, a device's share along `tensor` of it."""
    gathered = gather(shard, PartitionSpec(*(None if axis == parts.AXIS else axis for axis in spec)))
    for dim, axis in enumerate(spec):
        if axis == parts.AXIS and not keep:
            gathered = parts.whole(gathered, dim)
    return gathered


def specs_like(w: Mapping[str, Any], specs: Mapping[str, PartitionSpec]) -> dict[str, Any]:
    """The partition specs of leaves: a quantised matrix's scales, one per output channel, are cut as its last dim."""
    return {
        k: Quantised(specs[k], PartitionSpec(*specs[k][-1:])) if isinstance(v, Quantised) else specs[k]
        for k, v in w.items()
    }


def padded_rows(count: int, tile_rows: int) -> int:
    """Rows after padding: the power-of-two multiple of the tile that holds `count`, so that few shapes are compiled.
    In fast mode (tile 0) the unit is 32."""
    return _doubled(tile_rows or 32, count)


def backward_tile(rows: int) -> int:
    """Rows that the backward pass takes at a time: `rows`, a result of `padded_rows`, halved until it is at most
    BACKWARD_ROWS or odd. A tile has to divide its rows, and `numerics.tile_rows` need not be a power of two."""
    while rows > BACKWARD_ROWS and rows % 2 == 0:
        rows //= 2
    return rows


def padded_pages(positions: int, page_size: int) -> int:
    """Width of a read index that holds `positions`: a power-of-two number of pages."""
    return _doubled(page_size, positions)


def _doubled(unit: int, wanted: int) -> int:
    """The smallest power-of-two multiple of `unit` that is at least `wanted`."""
    while unit < wanted:
        unit *= 2
    return unit


def numpy_rows(row_shards: int, rows: int, width: int, trash: int) -> Rows:
    """Blank padded rows on the host: every row writes to and reads from pool row `trash`."""
    n = row_shards * rows
    return Rows(
        tokens=np.zeros(n, np.int32),
        pos=np.full(n, -1, np.int32),
        write=np.full(n, trash, np.int32),
        read=np.full((n, width), trash, np.int32),
        length=np.ones(n, np.int32),
    )
