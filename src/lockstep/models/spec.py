"""What a model is: its numbers (`ModelSpec`) and its leaves (`leaf_table`).

A leaf is described once. Initialisation, sharding, checkpoints, LoRA targets, weight sync and the Hugging Face name
map are all derived from that description. Parameters are a flat dict, path -> array; a path is `embed`, `final_norm`,
`head` (untied only) or `layers.<i>.<name>`. Matrices are stored [in, out], the transpose of Hugging Face's.

Imports no jax: a leaf table of a 400-billion-parameter model costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864), halves convention: [x1, x2] becomes
    [x1 c - x2 s, x2 c + x1 s].

    theta: base. scaling: None, ("linear", factor), or ("llama3", factor, low_freq_factor, high_freq_factor,
    original_max_position).
    """

    theta: float
    scaling: tuple[str, float] | tuple[str, float, float, float, int] | None = None

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """[head_dim / 2] float32 inverse frequencies, radians per position."""
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
    """What differs from layer to layer. window: a query sees itself and the window-1 positions before it; None: all."""

    rope: Rope
    window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Counts are numbers of things, `*_dim` are widths.

    norm_offset: RMSNorm multiplies by (offset + weight): 1.0 for Gemma, 0.0 elsewhere. embed_scale: factor on the
    embedding output (Gemma: sqrt(dim)). query_scale: factor on q.k before the soft cap and softmax.
    attn_softcap / final_softcap: cap * tanh(x / cap), None for none.
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

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Leaf:
    """One array. axes: a logical name per dimension (`vocab`, `embed`, `heads`, `kv_heads`, `mlp`, `rank`, or None),
    which `cluster.sharding` maps to mesh axes. init: `normal` (std 1/sqrt(fan_in)), `zeros`, `norm`
    (1 - norm_offset, so that the effective scale is one)."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "zeros", "norm"]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def layer_leaves(spec: ModelSpec) -> dict[str, Leaf]:
    """Leaves of one layer, by name within the layer (every layer has the same ones)."""
    d, f = spec.dim, spec.mlp_dim
    nh, kh = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    leaves = [
        Leaf("attn_norm", (d,), (None,), "norm"),
        Leaf("q", (d, nh), ("embed", "heads"), "normal"),
        Leaf("k", (d, kh), ("embed", "kv_heads"), "normal"),
        Leaf("v", (d, kh), ("embed", "kv_heads"), "normal"),
        Leaf("o", (nh, d), ("heads", "embed"), "normal"),
        Leaf("mlp_norm", (d,), (None,), "norm"),
        Leaf("gate", (d, f), ("embed", "mlp"), "normal"),
        Leaf("up", (d, f), ("embed", "mlp"), "normal"),
        Leaf("down", (f, d), ("mlp", "embed"), "normal"),
    ]
    if spec.qkv_bias:
        leaves += [Leaf("q_bias", (nh,), ("heads",), "zeros")]
        leaves += [Leaf(f"{n}_bias", (kh,), ("kv_heads",), "zeros") for n in "kv"]
    if spec.qk_norm:
        leaves += [Leaf(f"{n}_norm", (spec.head_dim,), (None,), "norm") for n in "qk"]
    if spec.post_norms:
        leaves += [Leaf(f"{n}_post_norm", (d,), (None,), "norm") for n in ("attn", "mlp")]
    return {leaf.path: leaf for leaf in leaves}


def leaf_table(spec: ModelSpec) -> dict[str, Leaf]:
    """Every leaf of the model, by path, in a fixed order (embed, layers in order, final norm, head)."""
    table = {"embed": Leaf("embed", (spec.vocab_size, spec.dim), ("vocab", "embed"), "normal")}
    per_layer = layer_leaves(spec)
    for i in range(spec.num_layers):
        for name, leaf in per_layer.items():
            path = f"layers.{i}.{name}"
            table[path] = Leaf(path, leaf.shape, leaf.axes, leaf.init)
    table["final_norm"] = Leaf("final_norm", (spec.dim,), (None,), "norm")
    if not spec.tied_head:
        table["head"] = Leaf("head", (spec.vocab_size, spec.dim), ("vocab", "embed"), "normal")
    return table


def num_parameters(spec: ModelSpec) -> int:
    """Number of parameters (a tied head counts once)."""
    return sum(leaf.size for leaf in leaf_table(spec).values())
