"""Random parameters from the leaf table. Each leaf is a pure function of (seed, path), so neither the order in which
leaves are made, nor which other leaves exist, nor how they are sharded changes a value.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import ml_dtypes
import numpy as np

from lockstep.errors import ModelError
from lockstep.models.spec import Leaf, ModelSpec, leaf_table


def init_leaf(leaf: Leaf, seed: int, norm_offset: float = 0.0) -> np.ndarray:
    """One leaf, float32. `normal` has std 1/sqrt(fan_in); the fan-in of a [vocab, dim] table is dim, because the head
    contracts over it, that of stacked experts [E, in, out] is in."""
    if leaf.init == "zeros":
        return np.zeros(leaf.shape, np.float32)
    if leaf.init == "norm":
        return np.full(leaf.shape, 1.0 - norm_offset, np.float32)
    digest = hashlib.sha256(f"{seed}/{leaf.path}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    fan_in = leaf.shape[-1] if leaf.axes[0] == "vocab" else leaf.shape[-2]
    return generator.standard_normal(leaf.shape, np.float32) * np.float32(1 / math.sqrt(fan_in))


def init_params(spec: ModelSpec, seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Parameters of a fresh model, path -> array of `dtype` (`float32` or `bfloat16`)."""
    kinds: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    if dtype not in kinds:
        raise ModelError(f"parameters can be initialised as float32 or bfloat16, not {dtype!r}")
    return {
        path: init_leaf(leaf, seed, spec.norm_offset).astype(kinds[dtype], copy=False)
        for path, leaf in leaf_table(spec).items()
    }
