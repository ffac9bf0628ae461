"""A scalar head: one number per position, where a language model has logits.

    value = value_head . final_norm(x)        value_head [1, D], no bias, as transformers' `score.weight`

The number of a row is about everything up to and including that row's token: a critic's value of the state in which the
next token is drawn; at a sequence's last token a reward model's score. It is computed in float32 whatever the compute
dtype, by a sum per row in the head's tiles, so that in exact mode its bits depend on the row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.errors import ModelError
from lockstep.models.spec import VALUE_HEAD, ModelSpec, leaf_table
from lockstep.ops import rms_norm, tiled

if TYPE_CHECKING:
    from lockstep.models.catalog import LoadedModel
    from lockstep.models.decoder import Numerics


def values(
    spec: ModelSpec, num: Numerics, w: Mapping[str, Any], x: jax.Array, target: jax.Array, tile: int | None = None
) -> jax.Array:
    """[N] float32 values of rows x [N, D] (the last layer's output). w: `final_norm` and `value_head`.

    target [N] int32: negative for padding, whose result means nothing. tile: rows at a time where that is not
    num.head_rows (the backward pass).
    """
    w = {"final_norm": w["final_norm"].astype(num.dtype), VALUE_HEAD: w[VALUE_HEAD].astype(jnp.float32)}
    tile = num.head_rows if tile is None else tile
    return tiled(functools.partial(_block, spec), tile, target >= 0, w, x)


def _block(spec: ModelSpec, w: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    h = rms_norm(x, w["final_norm"], spec.norm_eps, spec.norm_offset).astype(jnp.float32)
    # A sum, not a product of matrices: a kernel for [N, D] x [D, 1] may add a row up by where it lies among the others.
    return (h * w[VALUE_HEAD]).sum(-1)


def with_value_head(model: LoadedModel, std: float, seed: int) -> LoadedModel:
    """The model with a scalar head: as it is where it has one, else a fresh one in place of the head over tokens.

    std: standard deviation of the fresh head's entries; 0 makes zeros, so that every value starts as exactly 0.
    Raises ModelError for a standard deviation that is not a finite number >= 0.
    """
    if not (np.isfinite(std) and std >= 0):
        raise ModelError(f"the value head's standard deviation must be a finite number >= 0, got {std}")
    if model.spec.scalar_head:
        return model
    spec = replace(model.spec, scalar_head=True)
    dtype = model.params["embed"].dtype
    drawn = np.random.Generator(np.random.Philox(key=seed)).standard_normal((1, spec.dim), np.float32)
    fresh = {VALUE_HEAD: (drawn * np.float32(std)).astype(dtype)}
    params = {path: fresh[path] if path in fresh else model.params[path] for path in leaf_table(spec)}
    return replace(model, spec=spec, params=params)
