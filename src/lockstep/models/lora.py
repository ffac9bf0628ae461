"""LoRA (Hu et al. 2021, arXiv:2106.09685): the adapter as a parameter tree of its own.

The base stays frozen and is the reference policy; the adapter is all that trains, all that is checkpointed, and all
that crosses to the sampler. W x becomes W x + (alpha / rank) B A x, with B starting at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.models.spec import Leaf, ModelSpec, layer_leaves

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


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


def adapter_table(spec: ModelSpec, lora: LoraSpec) -> dict[str, Leaf]:
    """Leaves of the adapter by path: `layers.<i>.<target>.lora_a` [in, rank] and `.lora_b` [rank, out]."""
    per_layer = layer_leaves(spec)
    first = max(0, spec.num_layers - lora.last_layers) if lora.last_layers else 0
    table = {}
    for i in range(first, spec.num_layers):
        for target in lora.targets:
            (fan_in, fan_out), (ax_in, ax_out) = per_layer[target].shape, per_layer[target].axes
            path = f"layers.{i}.{target}"
            table[f"{path}.lora_a"] = Leaf(f"{path}.lora_a", (fan_in, lora.rank), (ax_in, "rank"), "normal")
            table[f"{path}.lora_b"] = Leaf(f"{path}.lora_b", (lora.rank, fan_out), ("rank", ax_out), "zeros")
    return table


def merge(params: dict[str, np.ndarray], adapter: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Base plus adapter as one tree of the base's shapes and dtypes, for export (float64 products, rounded once)."""
    merged = dict(params)
    for path in sorted(p.removesuffix(".lora_a") for p in adapter if p.endswith(".lora_a")):
        a, b = (np.asarray(adapter[f"{path}.{n}"], np.float64) for n in ("lora_a", "lora_b"))
        merged[path] = (np.asarray(params[path], np.float64) + scale * (a @ b)).astype(params[path].dtype)
    return merged
