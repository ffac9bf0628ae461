"""Arrays held in eight bits with a scale per group of values: what the sampler may read in `fast` mode.

    scale = max |x| / limit,     held = round(x * (1 / scale)),     read as held * scale

The limit is the largest number of the eight-bit type: 127 (int8), 448 (float8_e4m3fn). Both kinds are scaled: int8 has
one step size, so the scale is its precision; float8 has three bits of mantissa at any magnitude, and the scale keeps it
from overflowing (to NaN: the type has no infinity) and from its subnormals.

Every function that takes one of the sampler's arrays takes an array, or a `Quantised` in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from lockstep.errors import ConfigError

KVType = Literal["compute", "int8", "fp8"]
WeightsType = Literal["compute", "int8"]
DTYPES = {"int8": jnp.dtype("int8"), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
SCALE_DTYPE = jnp.dtype("float32")
_SMALLEST = float(jnp.finfo(SCALE_DTYPE).tiny)


@dataclass(frozen=True)
class Storage:
    """How the sampler holds what it reads; `compute`: in the type of the arithmetic.

    kv: keys and values, a scale per token and head. weights: the matrices of the layers, a scale per output channel;
    norms, biases, adapters, embedding and head are not quantised.
    """

    kv: KVType = "compute"
    weights: WeightsType = "compute"

    def require_fast(self, tile_rows: int, tensor_parts: int) -> None:
        """ConfigError where exact mode (tile_rows > 0) is combined with a quantised sampler, or int8 matrices with
        parts."""
        if tensor_parts > 1 and self.weights != "compute":
            raise ConfigError(
                f"layer matrices {self.weights} where blocks are computed in {tensor_parts} parts: a scale would have "
                "to be cut with its matrix, which is not done yet; use meshes with tensor = 1, or 'compute'"
            )
        if tile_rows and self.quantised:
            raise ConfigError(
                f"{self} in exact mode: the trainer computes with unquantised keys, values and weights, so the "
                "sampler's log-probabilities cannot be its own bit for bit; use numerics.mode = 'fast', which "
                "measures the mismatch, or hold them as 'compute'"
            )

    @property
    def quantised(self) -> bool:
        return self != Storage()

    def __str__(self) -> str:
        return f"key-value cache {self.kv}, layer matrices {self.weights}"


AS_COMPUTED = Storage()


class Quantised(NamedTuple):
    """held: eight bits each; scale: float32, without the dimension that one scale is for."""

    held: Any
    scale: Any


Held = jax.Array | Quantised


def quantise(x: jax.Array, dtype: Any, axis: int) -> Quantised:
    """x in `dtype` (one of DTYPES), a scale for all values along `axis`. |read - x| <= scale / 2 for int8, and
    <= max(|x| / 16, scale / 1024) for float8. What is not finite makes its scale, and all that it is for, so."""
    y = x.astype(SCALE_DTYPE)
    # Products with reciprocals: what XLA makes of such divisions in some programs, so it is the same in all.
    share = np.float32(1 / 127) if dtype == DTYPES["int8"] else np.float32(1 / float(jnp.finfo(dtype).max))
    # At least the smallest normal number: values that are all zero, or nearly, must not be divided by zero.
    scale = jnp.maximum(jnp.abs(y).max(axis) * share, _SMALLEST)
    y = y * jnp.expand_dims(1 / scale, axis)
    return Quantised((jnp.rint(y) if dtype == DTYPES["int8"] else y).astype(dtype), scale)


def blank(shape: tuple[int, ...], dtype: str, kv: KVType, place: Sharding | None = None) -> Held:
    """Zeros [rows, K, H]: one side of a layer's pool. place: on which devices, if not on the default one."""
    if kv == "compute":
        return jnp.zeros(shape, dtype, device=place)
    return Quantised(jnp.zeros(shape, DTYPES[kv], device=place), jnp.zeros(shape[:-1], SCALE_DTYPE, device=place))


def put(side: Held, rows: jax.Array, new: jax.Array) -> Held:
    """One side of a pool with `new` [N, K, H] written to `rows` [N]."""
    if isinstance(side, Quantised):
        q = quantise(new, side.held.dtype, -1)
        return Quantised(side.held.at[rows].set(q.held), side.scale.at[rows].set(q.scale))
    return side.at[rows].set(new)


def dequantise(q: Quantised, dtype: Any) -> jax.Array:
    """What keys or values with a scale per token and head stand for: [..., K, H]."""
    return (q.held.astype(SCALE_DTYPE) * q.scale[..., None]).astype(dtype)


def product(x: jax.Array, w: Held) -> jax.Array:
    """x [N, in] @ w [in, out]. Of a quantised w the scale is applied to the sums, which are float32."""
    if isinstance(w, Quantised):
        sums = jnp.matmul(x, w.held.astype(x.dtype), preferred_element_type=SCALE_DTYPE)
        return (sums * w.scale).astype(x.dtype)
    return x @ w
