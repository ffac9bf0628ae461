"""What a model is: its numbers (`ModelSpec`) and its leaves (`leaf_table`).

A leaf is described once. Initialisation, sharding, checkpoints, LoRA targets, weight sync and the Hugging Face name
map are all derived from that description. Parameters are a flat dict, path -> array; a path is `embed`, `final_norm`,
`head` (untied only), `value_head` (scalar only) or `layers.<i>.<name>`. Matrices are stored [in, out], the transpose of
Hugging Face's; the experts of a layer are one leaf per matrix, [E, in, out].

More models have a spec and leaves, and so a plan, than the decoder can run: `ModelSpec.unsupported` says what keeps it
from it, `require_decoder` refuses them. Imports no jax: a leaf table of a trillion-parameter model costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.errors import ModelError

Activation = Literal["silu", "gelu_tanh"]
VALUE_HEAD = "value_head"


@dataclass(frozen=True)
class Yarn:
    """The numbers of YaRN (Peng et al. 2023, arXiv:2309.00071), recorded so that they survive; the decoder does not
    compute it. factor: stretch of the context; beta_fast, beta_slow: rotations over original_max_position between
    which frequencies are blended; mscale, mscale_all_dim: numerator and denominator of the factor on cos and sin (None:
    the formula's own); truncate: whether the blend's ends are rounded to whole dims."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864), halves convention: [x1, x2] becomes
    [x1 c - x2 s, x2 c + x1 s].

    theta: base. scaling: None, ("linear", factor), ("llama3", factor, low_freq_factor, high_freq_factor,
    original_max_position), or a `Yarn`.
    """

    theta: float
    scaling: tuple[str, float] | tuple[str, float, float, float, int] | Yarn | None = None

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """[head_dim / 2] float32 inverse frequencies, radians per position. Raises ModelError for YaRN."""
        if isinstance(self.scaling, Yarn):
            raise ModelError("lockstep does not compute YaRN rotary scaling; it can only plan models that use it")
        inv = 1.0 / (self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))
        if self.scaling is None:
            return inv.astype(np.float32)
        if self.scaling[0] == "linear":
            return (inv / self.scaling[1]).astype(np.float32)
        _, factor, low, high, original = self.scaling  # type: ignore[misc]
        wavelen = 2 * math.pi / inv
        smooth = np.clip((original / wavelen - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * inv / factor + smooth * inv).astype(np.float32)


@dataclass(frozen=True)
class LayerKind:
    """What differs from layer to layer. window: a query sees itself and the window-1 positions before it; None: all.
    experts: its MLP is `ModelSpec.experts`, not one of width `mlp_dim`."""

    rope: Rope
    window: int | None = None
    experts: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router sends every token to a few of many MLPs.

    num: experts in a layer, E. per_token: how many a token visits. mlp_dim: width of one. shared_dim: width of the MLP
    that every token visits besides (0: none; several shared experts are stored as one MLP). normalised: the weights
    of a token's experts add up to 1. scale: factor on them. groups, groups_per_token: experts lie in groups, a token
    chooses among those of the best ones. correction: a bias per expert steers the choice, not the weight. bias: router
    and experts have biases. fused: gate and up are one leaf, [E, D, 2 F], columns alternating: gate 0, up 0, gate 1,
    up 1, ... limit: gate and up are clamped to it (None: not).
    """

    num: int
    per_token: int
    mlp_dim: int
    shared_dim: int = 0
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    correction: bool = False
    bias: bool = False
    fused: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come out of one narrow vector.

    q_rank: width of the vector that queries come out of (None: straight from the model's); kv_rank: of that of keys and
    values; nope_dim, rope_dim: parts of a head's query and key without and with rotary embedding (head_dim is their
    sum; the rotary part of the key is one for all heads); value_dim: width of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Counts are numbers of things, `*_dim` are widths.

    norm_offset: RMSNorm multiplies by (offset + weight): 1.0 for Gemma, 0.0 elsewhere. embed_scale: factor on the
    embedding output (Gemma: sqrt(dim)). query_scale: factor on q.k before the soft cap and softmax.
    attn_softcap / final_softcap: cap * tanh(x / cap), None for none. sinks: a learnt logit per head that takes part in
    the softmax and has no value. mlp_dim: of layers without experts. scalar_head: the model gives one number per
    position, `value_head` . final_norm(x), where a language model gives logits: a critic or a reward model.
    """

    family: str
    vocab_size: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    layers: tuple[LayerKind, ...]
    norm_eps: float
    query_scale: float
    max_position: int
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    activation: Activation = "silu"
    attn_softcap: float | None = None
    final_softcap: float | None = None
    o_bias: bool = False
    sinks: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    scalar_head: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """What this model has and the decoder has not, in words; empty for a model that lockstep runs."""
        found = {
            "mixture of experts": self.experts is not None,
            "multi-head latent attention": self.latent is not None,
            "attention sinks": self.sinks,
            "bias on the attention's output": self.o_bias,
            "YaRN rotary scaling": any(isinstance(rope.scaling, Yarn) for rope in {kind.rope for kind in self.layers}),
        }
        return tuple(name for name, has in found.items() if has)


def require_decoder(spec: ModelSpec, model: str = "MODEL") -> None:
    """Raise ModelError for a model that lockstep can plan and not run: called wherever one is about to be run.

    model: its name or folder, for the error.
    """
    if spec.unsupported:
        raise ModelError(
            f"lockstep can plan {model} (family {spec.family!r}) but not run it: its decoder has no "
            f"{', no '.join(spec.unsupported)} yet. `lockstep plan --model {model}` prices its weight sync; to train "
            "or sample, take a model of a family that runs (docs/models.md)"
        )


def require_policy(spec: ModelSpec, model: str = "MODEL") -> None:
    """Raise ModelError for a model that cannot be sampled from: what `require_decoder` refuses, and a scalar head."""
    require_decoder(spec, model)
    if spec.scalar_head:
        raise ModelError(
            f"{model} has a scalar head (config.json: ForSequenceClassification): a number per position, and no "
            "distribution over tokens; a policy needs the ForCausalLM folder. Models with a scalar head belong into "
            "[[reward.models]], `critic.model`, or the `model.name` of a [reward_model] recipe"
        )


@dataclass(frozen=True)
class Leaf:
    """One array. axes: a logical name per dim, which `cluster` maps to mesh axes, or None for a dim that stays whole:

        vocab     rows of embedding and head
        embed     the model's width
        heads     query heads x their width, head by head     kv_heads  the same for keys and values
        mlp       an MLP's width, an expert's too
        expert    the experts of a layer, stacked
        rank      an adapter's

    init: `normal` (std 1/sqrt(fan_in)), `zeros`, `norm` (1 - norm_offset, so that the effective scale is one)."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "zeros", "norm"]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _attention(spec: ModelSpec) -> list[Leaf]:
    d, nh, kh = spec.dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    leaves = [
        Leaf("q", (d, nh), ("embed", "heads"), "normal"),
        Leaf("k", (d, kh), ("embed", "kv_heads"), "normal"),
        Leaf("v", (d, kh), ("embed", "kv_heads"), "normal"),
        Leaf("o", (nh, d), ("heads", "embed"), "normal"),
    ]
    return leaves if spec.latent is None else _latent_attention(spec, spec.latent)


def _latent_attention(spec: ModelSpec, latent: LatentAttention) -> list[Leaf]:
    """Narrow dims are whole everywhere: they are short, and every head needs all of them. A head's columns of `kv_b`
    are its key's part without rotary embedding, then its value."""
    d, n, r = spec.dim, spec.num_heads, latent.kv_rank
    leaves = [Leaf("q", (d, n * spec.head_dim), ("embed", "heads"), "normal")]
    if latent.q_rank is not None:
        leaves = [
            Leaf("q_a", (d, latent.q_rank), ("embed", None), "normal"),
            Leaf("q_a_norm", (latent.q_rank,), (None,), "norm"),
            Leaf("q_b", (latent.q_rank, n * spec.head_dim), (None, "heads"), "normal"),
        ]
    return [
        *leaves,
        Leaf("kv_a", (d, r + latent.rope_dim), ("embed", None), "normal"),
        Leaf("kv_a_norm", (r,), (None,), "norm"),
        Leaf("kv_b", (r, n * (latent.nope_dim + latent.value_dim)), (None, "heads"), "normal"),
        Leaf("o", (n * latent.value_dim, d), ("heads", "embed"), "normal"),
    ]


def _mlp(prefix: str, d: int, f: int) -> list[Leaf]:
    return [
        Leaf(f"{prefix}gate", (d, f), ("embed", "mlp"), "normal"),
        Leaf(f"{prefix}up", (d, f), ("embed", "mlp"), "normal"),
        Leaf(f"{prefix}down", (f, d), ("mlp", "embed"), "normal"),
    ]


def _experts(d: int, experts: Experts) -> list[Leaf]:
    e, f = experts.num, experts.mlp_dim
    into, out = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
    leaves = [Leaf("router", (d, e), ("embed", None), "normal")]
    if experts.correction:
        leaves += [Leaf("router_correction", (e,), (None,), "zeros")]
    if experts.fused:
        leaves += [Leaf("experts_gate_up", (e, d, 2 * f), into, "normal")]
    else:
        leaves += [Leaf(f"experts_{n}", (e, d, f), into, "normal") for n in ("gate", "up")]
    leaves += [Leaf("experts_down", (e, f, d), out, "normal")]
    if experts.bias:
        inner = {"gate_up": 2 * f} if experts.fused else {"gate": f, "up": f}
        leaves += [Leaf("router_bias", (e,), (None,), "zeros")]
        leaves += [Leaf(f"experts_{n}_bias", (e, width), ("expert", "mlp"), "zeros") for n, width in inner.items()]
        leaves += [Leaf("experts_down_bias", (e, d), ("expert", "embed"), "zeros")]
    return leaves + (_mlp("shared_", d, experts.shared_dim) if experts.shared_dim else [])


def layer_leaves(spec: ModelSpec, layer: int = 0) -> dict[str, Leaf]:
    """Leaves of one layer, by name within the layer. Layers differ only in whether they have experts."""
    d, nh, kh = spec.dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    leaves = [Leaf("attn_norm", (d,), (None,), "norm"), *_attention(spec), Leaf("mlp_norm", (d,), (None,), "norm")]
    if spec.layers[layer].experts:
        assert spec.experts is not None, "a layer has experts, the model says not which"
        leaves += _experts(d, spec.experts)
    else:
        leaves += _mlp("", d, spec.mlp_dim)
    if spec.qkv_bias:
        leaves += [Leaf("q_bias", (nh,), ("heads",), "zeros")]
        leaves += [Leaf(f"{n}_bias", (kh,), ("kv_heads",), "zeros") for n in "kv"]
    if spec.o_bias:
        leaves += [Leaf("o_bias", (d,), (None,), "zeros")]
    if spec.sinks:
        leaves += [Leaf("sinks", (spec.num_heads,), ("heads",), "zeros")]
    if spec.qk_norm:
        leaves += [Leaf(f"{n}_norm", (spec.head_dim,), (None,), "norm") for n in "qk"]
    if spec.post_norms:
        leaves += [Leaf(f"{n}_post_norm", (d,), (None,), "norm") for n in ("attn", "mlp")]
    return {leaf.path: leaf for leaf in leaves}


def leaf_table(spec: ModelSpec) -> dict[str, Leaf]:
    """Every leaf of the model, by path, in a fixed order (embed, layers in order, final norm, head or value head)."""
    table = {"embed": Leaf("embed", (spec.vocab_size, spec.dim), ("vocab", "embed"), "normal")}
    per_kind: dict[bool, dict[str, Leaf]] = {}
    for i, kind in enumerate(spec.layers):
        if kind.experts not in per_kind:
            per_kind[kind.experts] = layer_leaves(spec, i)
        for name, leaf in per_kind[kind.experts].items():
            path = f"layers.{i}.{name}"
            table[path] = Leaf(path, leaf.shape, leaf.axes, leaf.init)
    table["final_norm"] = Leaf("final_norm", (spec.dim,), (None,), "norm")
    if spec.scalar_head:
        table[VALUE_HEAD] = Leaf(VALUE_HEAD, (1, spec.dim), (None, "embed"), "zeros")
    elif not spec.tied_head:
        table["head"] = Leaf("head", (spec.vocab_size, spec.dim), ("vocab", "embed"), "normal")
    return table


def num_parameters(spec: ModelSpec) -> int:
    """Number of parameters (a tied head counts once)."""
    return sum(leaf.size for leaf in leaf_table(spec).values())
