"""One decoder for every family, read top to bottom: embed, L times (attention, MLP), norm, head.

Everything here works on *rows*: a row is one token of one sequence, and nothing but its position, the pool row its key
and value are written to, and the pool rows it may read says which sequence it belongs to. Prefill, decode and the
trainer's teacher-forced forward are the same functions on differently filled `Rows`; that is why they agree.

Weights of a layer arrive as a dict by leaf name (`q`, `gate`, ..., and `q.lora_a`, `q.lora_b` where adapted). These
functions see one device, whose share of the weights may be some of the parts that blocks are cut into
(`models.parts`); `cluster.programs` puts them on a mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.models import parts
from lockstep.models.attention import NO_WINDOW, attend
from lockstep.models.quantise import Held, Quantised, product, put
from lockstep.models.spec import ModelSpec
from lockstep.ops import LANES, fence, log_normaliser, rms_norm, rotate, softcap, temperature_scaled, tiled

Weights = Mapping[str, Any]  # arrays; the sampler's matrices may be `Quantised`
Cache = tuple[Held, Held]
Pool = tuple[Cache, ...]
"""Keys and values [R, K, H] of a layer, once per part of attention that is this device's (then K is a part's)."""

HEAD_ROWS = 32
ATTENTION_ROWS = 8


class Rows(NamedTuple):
    """N rows of work. Filled by the engine's scheduler or by the trainer's batcher; padded rows have position -1, write
    to and read from the pool's last row and have length 1.

    tokens, pos [N] int32; write [N] int32: pool row for this row's key and value; read [N, S] int32: pool row of each
    position of the row's sequence; length [N] int32: positions visible, itself included (pos + 1).
    """

    tokens: Any
    pos: Any
    write: Any
    read: Any
    length: Any


@dataclass(frozen=True)
class Numerics:
    """What decides the last bits besides the weights. tile_rows 0 is `fast`; dtype is the compute dtype; tensor_parts:
    parts that blocks are cut into, whatever the number of devices that share them."""

    dtype: str
    tile_rows: int
    page_size: int
    lora_scale: float = 0.0
    tensor_parts: int = 1

    @property
    def head_rows(self) -> int:
        """Tile of the head, 0 in `fast`. HEAD_ROWS where that divides the tile: a product of so many columns is the
        cheapest per row, and its last bits are not those of 16 or 64, so fewer rows are padded to it."""
        return self.tile_rows and math.gcd(self.tile_rows, HEAD_ROWS)

    @property
    def attention_rows(self) -> int:
        """Tile of attention, 0 in `fast`: few rows, so that what is gathered for them stays in the cache."""
        return self.tile_rows and math.gcd(self.tile_rows, ATTENTION_ROWS)


@dataclass(frozen=True)
class LayerConstants:
    """What layer i needs besides weights, as arrays, so that all layers share one compiled function."""

    inv_freq: np.ndarray
    window: np.ndarray

    @staticmethod
    def of(spec: ModelSpec) -> list[LayerConstants]:
        return [
            LayerConstants(k.rope.inv_freq(spec.head_dim), np.array(k.window or NO_WINDOW, np.int32))
            for k in spec.layers
        ]


def linear(w: Weights, name: str, x: jax.Array, lora_scale: float) -> jax.Array:
    """x @ W (+ bias) (+ scale * (x @ A) @ B), the last term being LoRA (Hu et al. 2021, arXiv:2106.09685)."""
    y = product(x, w[name])
    if f"{name}.lora_a" in w:
        y = y + lora_scale * ((x @ w[f"{name}.lora_a"]) @ w[f"{name}.lora_b"])
    return y + w[f"{name}_bias"] if f"{name}_bias" in w else y


def _qkv(spec: ModelSpec, num: Numerics, shared: tuple[Weights, jax.Array], x: jax.Array, pos: jax.Array) -> Any:
    w, inv_freq = shared
    h = rms_norm(x, w["attn_norm"], spec.norm_eps, spec.norm_offset)
    q, k, v = (linear(w, n, h, num.lora_scale).reshape(x.shape[0], -1, spec.head_dim) for n in "qkv")
    if spec.qk_norm:
        q, k = (rms_norm(y, w[f"{n}_norm"], spec.norm_eps, spec.norm_offset) for n, y in (("q", q), ("k", k)))
    return rotate(q, pos, inv_freq), rotate(k, pos, inv_freq), v


def _post_norm(spec: ModelSpec, w: Weights, name: str, y: jax.Array) -> jax.Array:
    return rms_norm(y, w[name], spec.norm_eps, spec.norm_offset) if spec.post_norms else y


def _gated(spec: ModelSpec, num: Numerics, w: Weights, x: jax.Array) -> jax.Array:
    """What `down` is applied to."""
    h = rms_norm(x, w["mlp_norm"], spec.norm_eps, spec.norm_offset)
    gate = linear(w, "gate", h, num.lora_scale)
    gate = jax.nn.silu(gate) if spec.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return gate * linear(w, "up", h, num.lora_scale)


def _out_and_mlp(spec: ModelSpec, num: Numerics, w: Weights, x: jax.Array, attended: jax.Array) -> jax.Array:
    x = x + _post_norm(spec, w, "attn_post_norm", linear(w, "o", attended, num.lora_scale))
    return x + _post_norm(spec, w, "mlp_post_norm", linear(w, "down", _gated(spec, num, w, x), num.lora_scale))


def cast(w: Weights, dtype: str) -> dict[str, Any]:
    """Weights in the compute dtype, once per call and outside the tiles; what is quantised stays so."""
    return {k: v if isinstance(v, Quantised) else v.astype(dtype) for k, v in w.items()}


def embed(spec: ModelSpec, num: Numerics, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """[N, D] embeddings; the scale is rounded to the compute dtype first, as the published Gemma models are run."""
    x = table[tokens].astype(num.dtype)
    return x if spec.embed_scale == 1.0 else x * jnp.asarray(spec.embed_scale, num.dtype)


def layer(
    spec: ModelSpec,
    num: Numerics,
    w: Weights,
    x: jax.Array,
    rows: Rows,
    pool: Pool,
    inv_freq: jax.Array,
    window: jax.Array,
    attention_tile: int | None = None,
) -> tuple[jax.Array, Pool]:
    """One transformer layer on N rows: x [N, D] -> x [N, D], with the rows' keys and values written to the pool first.

    attention_tile: rows of attention at a time where that is not num.attention_rows (the backward pass, which tiles
    attention only, to bound memory).
    """
    attention = functools.partial(_attention, spec, num, rows, inv_freq, window, attention_tile)
    if num.tensor_parts > 1:
        return _layer_in_parts(spec, num, w, x, rows, pool, attention)
    (cache,) = pool
    w = cast(w, num.dtype)
    attended, cache = attention(w, x, cache)
    x = tiled(lambda s, *r: _out_and_mlp(spec, num, s, *r), num.tile_rows, rows.pos >= 0, w, x, attended)
    return x, (cache,)


def _attention(
    spec: ModelSpec,
    num: Numerics,
    rows: Rows,
    inv_freq: jax.Array,
    window: jax.Array,
    attention_tile: int | None,
    w: Weights,
    x: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """What each row's heads attend to, [N, Q*H], before the output product. w: of all heads or of a part of them."""
    live = rows.pos >= 0
    q, k, v = tiled(lambda s, *r: _qkv(spec, num, s, *r), num.tile_rows, live, (w, inv_freq), x, rows.pos)
    cache = (put(cache[0], rows.write, k), put(cache[1], rows.write, v))

    def attention(shared: tuple[Cache, jax.Array], *r: jax.Array) -> jax.Array:
        q, read, length = r
        return attend(
            shared[0], q, read, length, shared[1], page_size=num.page_size, scale=spec.query_scale,
            cap=spec.attn_softcap, remat=backward,
        )  # fmt: skip

    backward = attention_tile is not None
    tile = num.attention_rows if attention_tile is None else attention_tile
    if backward:
        attention = jax.checkpoint(attention)
    # A short pass is filled up: fewer rows would be attended to by other kernels, and cost no less.
    n, short = x.shape[0], max(0, num.attention_rows - x.shape[0])
    work: tuple[jax.Array, ...] = (live, q, rows.read, rows.length)
    if short:
        work = tuple(jnp.concatenate([a, jnp.repeat(a[-1:], short, 0)]) for a in work)
    live, *queries = work
    return tiled(attention, tile, live, (cache, window), *queries)[:n], cache


def _layer_in_parts(
    spec: ModelSpec, num: Numerics, w: Weights, x: jax.Array, rows: Rows, pool: Pool, attention: Any
) -> tuple[jax.Array, Pool]:
    """`layer` with its blocks in parts (`models.parts`). A part is the same function of the same shapes wherever it is
    computed, in loops over tiles of its own; collectives lie between the loops, two in a layer."""
    live, whole_w = rows.pos >= 0, cast(w, num.dtype)
    parted = functools.partial(parts.block, spec, num.tensor_parts, num.dtype, w)
    caches, sums = [], []
    own, total, inside = parted("attention", x)
    for part, cache in zip(own, pool, strict=True):
        attended, cache = attention(part, inside, cache)
        caches.append(cache)
        sums.append(tiled(functools.partial(_row_product, "o"), num.tile_rows, live, part, attended))
    x = _add_block(spec, num, ("o", "attn_post_norm"), total, live, whole_w, x, sums)

    def mlp(part: Weights, y: jax.Array) -> tuple[jax.Array, ...]:
        return _row_product("down", part, _gated(spec, num, part, y))

    own, total, inside = parted("mlp", x)
    sums = [tiled(mlp, num.tile_rows, live, part, inside) for part in own]
    return _add_block(spec, num, ("down", "mlp_post_norm"), total, live, whole_w, x, sums), tuple(caches)


def _row_product(name: str, w: Weights, x: jax.Array) -> tuple[jax.Array, ...]:
    """A part's share of x @ W, and of x @ A where adapted, in float32: sums of parts are rounded once."""
    matrices = [w[leaf] for leaf in (name, f"{name}.lora_a") if leaf in w]
    return tuple(jnp.matmul(x, matrix, preferred_element_type=jnp.float32) for matrix in matrices)


def _add_block(
    spec: ModelSpec,
    num: Numerics,
    names: tuple[str, str],
    total: int,
    live: jax.Array,
    w: Weights,
    x: jax.Array,
    sums: list[tuple[jax.Array, ...]],
) -> jax.Array:
    """x + the block's output, of whose `total` parts `sums` are this device's. names: last matrix, norm after it."""
    name, norm = names
    summed = [parts.combine(own, total).astype(num.dtype) for own in zip(*sums, strict=True)]

    def block(w: Weights, x: jax.Array, y: jax.Array, *low: jax.Array) -> jax.Array:
        for a in low:
            y = y + num.lora_scale * (a @ w[f"{name}.lora_b"])
        return x + _post_norm(spec, w, norm, y)

    return tiled(block, num.tile_rows, live, w, x, *summed)


def _logits(spec: ModelSpec, w: Weights, x: jax.Array) -> jax.Array:
    """[V, N] float32 logits; w holds `final_norm` and `table` [V, D] (the head, or the embedding where tied), or
    `tables`: this device's parts of it.

    A column per row of x: XLA:CPU multiplies a large table from the left faster, and the sums over the vocabulary run
    over several rows at once.
    """
    h = fence(rms_norm(x, w["final_norm"], spec.norm_eps, spec.norm_offset).T)

    def product(table: jax.Array, h: jax.Array) -> jax.Array:
        return jnp.matmul(table, h, preferred_element_type=jnp.float32)

    if "tables" in w:
        tables = w["tables"]
        z = parts.join([fence(product(*fence((t, h)))) for t in tables], spec.vocab_size // tables[0].shape[0])
    else:
        z = product(w["table"], h)
    return softcap(z, spec.final_softcap)


def head_inputs(spec: ModelSpec, num: Numerics, w: Weights, x: jax.Array) -> tuple[Any, jax.Array]:
    """Weights as `_logits` takes them, in the compute dtype, and the rows x."""
    if parts.parts_of(spec, "head", num.tensor_parts) == 1:
        return cast(w, num.dtype), x
    own, _, x = parts.block(spec, num.tensor_parts, num.dtype, w, "head", x)
    return {"final_norm": own[0]["final_norm"], "tables": [part["table"] for part in own]}, x


def invert(weights_NM: jax.Array, uniform_N: jax.Array) -> jax.Array:
    """[N] index drawn from each row of weights [N, M] (>= 0, not all 0) by inversion: the first index whose running
    sum exceeds uniform * total. Never one of weight 0, for any uniform in [0, 1] and any order of summation."""
    running = jnp.cumsum(weights_NM, -1)
    # A parallel prefix sum need not be monotone in its last bit, so entries of weight 0 are excluded by name and the
    # aim is kept below what the others reach.
    reached = jnp.where(weights_NM > 0, running, 0.0)
    total = reached.max(-1, keepdims=True)
    aim = jnp.minimum(uniform_N[:, None] * total, jnp.nextafter(total, 0.0))
    return jnp.argmax(reached > aim, -1)


def _draw(z_VN: jax.Array, peak: jax.Array, chunks: jax.Array, temperature: jax.Array, uniform: jax.Array) -> jax.Array:
    """[N] token ids: the largest where temperature is 0, else by inversion, first of the chunk, then within it."""
    vocab, n = z_VN.shape
    chunk = invert(chunks, uniform[:, 0])
    columns = chunk[:, None] * LANES + jnp.arange(LANES)
    inside = z_VN[jnp.minimum(columns, vocab - 1), jnp.arange(n)[:, None]]
    weights = jnp.where(columns < vocab, jnp.exp(inside - peak[:, None]), 0.0)
    # The first of the largest by a plain minimum, which vectorises where argmax does not.
    ids = jnp.arange(vocab, dtype=jnp.int32)[:, None]
    largest = jnp.minimum(jnp.where(z_VN == peak, ids, vocab).min(0), vocab - 1)
    return jnp.where(temperature > 0, chunk * LANES + invert(weights, uniform[:, 1]), largest)


def _head_block(
    spec: ModelSpec, w: Weights, x: jax.Array, target: jax.Array, temperature: jax.Array, uniform: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(token, its log-probability) of each row: the target where there is one (>= 0), else one drawn by `uniform`.

    One block for both sides, on purpose. Drawing and scoring as two programs around the same normaliser came out with
    other last bits for some shapes: the compiler shapes a sum by who else reads what it sums.
    """
    z = fence(temperature_scaled(fence(_logits(spec, w, x)), temperature))
    peak, log_sum, chunks = fence(log_normaliser(z))
    drawn = _draw(*jax.lax.stop_gradient((z, peak, chunks)), temperature, uniform)
    token = jnp.where(target >= 0, target, drawn).astype(jnp.int32)
    return token, z[token, jnp.arange(len(token))] - peak - log_sum


def logprobs(
    spec: ModelSpec,
    num: Numerics,
    w: Weights,
    x: jax.Array,
    target: jax.Array,
    temperature: jax.Array,
    tile: int | None = None,
) -> jax.Array:
    """[N] float32 log-probabilities (nats) of target ids at the given temperature: the trainer's side of the record.

    target [N] int32, -1 for padding, whose result means nothing. tile: rows at a time where that is not num.head_rows
    (the backward pass).
    """
    # Fenced, so that the compiler does not know them and makes of the block what it makes of it for the sampler.
    unused = fence(jnp.full((x.shape[0], 2), 0.5, jnp.float32))
    block, tile = functools.partial(_head_block, spec), num.head_rows if tile is None else tile
    w, x = head_inputs(spec, num, w, x)
    return tiled(block, tile, target >= 0, w, x, target, temperature, unused)[1]


def uniforms(seed: jax.Array, index: jax.Array) -> jax.Array:
    """[N, 2] float32 in (0, 1), of (seed, index) alone. seed [N, 2] uint32, index [N] int32."""

    def of_one(words: jax.Array, i: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), i)
        # The middle of each of the 2^23 steps: at 0 itself an entry however improbable would be taken for being first.
        return jax.random.uniform(key, (2,)) + 2.0**-24

    return jax.vmap(of_one)(seed, index)


def sample(
    spec: ModelSpec, num: Numerics, w: Weights, x: jax.Array, temperature: jax.Array, seed: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row and record its log-probability: ([N] int32, [N] float32).

    temperature [N] float32 (0 = greedy); seed [N, 2] uint32: the request's; index [N] int32: how many tokens of the
    completion came before, -1 for padding. The draw is by inversion in two levels, 128-entry chunk then entry, from two
    uniforms that depend on (seed, index) alone, so a completion does not depend on its batch.
    """

    u = uniforms(seed, index)
    draw = fence(jnp.full(x.shape[:1], -1, jnp.int32))
    block = functools.partial(_head_block, spec)
    w, x = head_inputs(spec, num, w, x)
    return tiled(block, num.head_rows, index >= 0, w, x, draw, temperature, u)


def head_weights(params: Weights) -> dict[str, jax.Array]:
    """The leaves the head reads, from a full tree: final norm; scalar head, or [V, D] table (the embedding if tied)."""
    name, leaf = ("value_head", "value_head") if "value_head" in params else ("table", "head")
    return {"final_norm": params["final_norm"], name: params[leaf] if leaf in params else params["embed"]}


def layer_weights(params: Weights, i: int) -> dict[str, jax.Array]:
    """The leaves of layer i by name within the layer, adapter leaves included if present in `params`."""
    prefix = f"layers.{i}."
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}


def reference_logits(spec: ModelSpec, params: Weights, tokens: Any, lora_scale: float = 0.0) -> jax.Array:
    """[B, S, V] float32 logits of whole sequences, the plain way: the slow twin that the row form is tested against.

    tokens [B, S] int32, all positions real. Quadratic attention with a dense mask, no pages, no tiles, no cache.
    """
    tokens = jnp.asarray(tokens)
    b, s = tokens.shape
    dtype = str(params["embed"].dtype)
    num = Numerics(dtype, 0, 1, lora_scale)
    pos = jnp.tile(jnp.arange(s), b)
    x = embed(spec, num, jnp.asarray(params["embed"]), tokens.reshape(-1))
    distance = jnp.arange(s)[:, None] - jnp.arange(s)[None]
    groups = spec.num_heads // spec.num_kv_heads
    for i, const in enumerate(LayerConstants.of(spec)):
        w = cast({k: jnp.asarray(v) for k, v in layer_weights(params, i).items()}, dtype)
        q, k, v = (
            y.reshape(b, s, -1, spec.head_dim) for y in _qkv(spec, num, (w, jnp.asarray(const.inv_freq)), x, pos)
        )
        k, v = (jnp.repeat(y, groups, 2) for y in (k, v))
        z = softcap(jnp.einsum("bsnh,btnh->bnst", q, k, preferred_element_type=jnp.float32) * spec.query_scale,
                    spec.attn_softcap)  # fmt: skip
        z = jnp.where((distance >= 0) & (distance < const.window), z, -jnp.inf)
        mixed = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(z, -1).astype(dtype), v)
        x = _out_and_mlp(spec, num, w, x, mixed.reshape(b * s, -1))
    head = {k: jnp.asarray(v) for k, v in head_weights(params).items()}
    return _logits(spec, cast(head, dtype), x).T.reshape(b, s, -1)
