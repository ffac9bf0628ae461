"""LoRA (Hu et al. 2021, arXiv:2106.09685): the adapter as a parameter tree of its own.

The base stays frozen and is the reference policy; the adapter is all that trains, all that is checkpointed, and all
that crosses to the sampler. W x becomes W x + (alpha / rank) B A x, with B starting at zero.

A target names a matrix by what it does. Where a layer has several that do it, or one that is made up of two, all of
them are adapted: `gate` is the gate of a plain MLP, of every expert of a stack, each with an adapter of its own, and of
a shared expert. A leaf's own name is a target too, so `experts_gate` alone is possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.errors import ModelError
from lockstep.models.spec import Leaf, ModelSpec, layer_leaves

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")

# Target -> leaves, of which a layer has some. Latent attention makes q out of two matrices, k and v out of two others.
_LEAVES = {
    "q": ("q", "q_a", "q_b"),
    "k": ("k", "kv_a", "kv_b"),
    "v": ("v", "kv_a", "kv_b"),
    "gate": ("gate", "experts_gate", "experts_gate_up", "shared_gate"),
    "up": ("up", "experts_up", "experts_gate_up", "shared_up"),
    "down": ("down", "experts_down", "shared_down"),
}


@dataclass(frozen=True)
class LoraSpec:
    """rank, alpha (scale = alpha / rank), the adapted leaves of a layer, and how many of the last layers (0 = all)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    last_layers: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def _adapted(leaves: dict[str, Leaf], targets: tuple[str, ...]) -> list[Leaf]:
    """The matrices of a layer that the targets name, each once, in the order of the targets."""
    names = dict.fromkeys(name for target in targets for name in _LEAVES.get(target, (target,)))
    # Biases have no adapter, stacked ones included.
    return [leaves[n] for n in names if n in leaves and len(leaves[n].shape) > 1 and not n.endswith("_bias")]


def adapter_table(spec: ModelSpec, lora: LoraSpec) -> dict[str, Leaf]:
    """Leaves of the adapter by path: `layers.<i>.<leaf>.lora_a` [in, rank] and `.lora_b` [rank, out]; of stacked
    experts [E, in, rank] and [E, rank, out].

    Raises ModelError for a target that no adapted layer has.
    """
    first = max(0, spec.num_layers - lora.last_layers) if lora.last_layers else 0
    found: set[str] = set()
    table = {}
    per_kind: dict[bool, list[Leaf]] = {}
    for i in range(first, spec.num_layers):
        kind = spec.layers[i].experts
        if kind not in per_kind:
            leaves = layer_leaves(spec, i)
            per_kind[kind] = _adapted(leaves, lora.targets)
            found |= {t for t in lora.targets if _adapted(leaves, (t,))}
        for leaf in per_kind[kind]:
            *stack, fan_in, fan_out = leaf.shape
            *ax_stack, ax_in, ax_out = leaf.axes
            path = f"layers.{i}.{leaf.path}"
            a, b = (*stack, fan_in, lora.rank), (*stack, lora.rank, fan_out)
            table[f"{path}.lora_a"] = Leaf(f"{path}.lora_a", a, (*ax_stack, ax_in, "rank"), "normal")
            table[f"{path}.lora_b"] = Leaf(f"{path}.lora_b", b, (*ax_stack, "rank", ax_out), "zeros")
    unknown = [target for target in lora.targets if target not in found]
    if unknown:
        has = [leaf.path for leaf in layer_leaves(spec, spec.num_layers - 1).values() if len(leaf.shape) > 1]
        raise ModelError(
            f"lora: no layer that is adapted has the target {unknown[0]!r}; its matrices: {', '.join(has)}"
        )
    return table


def merge(params: dict[str, np.ndarray], adapter: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Base plus adapter as one tree of the base's shapes and dtypes, for export (float64 products, rounded once)."""
    merged = dict(params)
    for path in sorted(p.removesuffix(".lora_a") for p in adapter if p.endswith(".lora_a")):
        a, b = (np.asarray(adapter[f"{path}.{n}"], np.float64) for n in ("lora_a", "lora_b"))
        merged[path] = (np.asarray(params[path], np.float64) + scale * (a @ b)).astype(params[path].dtype)
    return merged
