"""The sampler's copy of a policy whose layer matrices are held in int8, made from what was installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from lockstep.cluster.cuts import bytes_per_device
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.models.quantise import DTYPES, SCALE_DTYPE, Quantised, quantise
from lockstep.models.spec import Leaf


def layer_matrices(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a layer that are quantised: its matrices. Not norms and biases, which are small, and not adapters,
    which are what trains."""
    return {name: leaf for name, leaf in layer.items() if len(leaf.shape) == 2 and ".lora_" not in name}


def int8_bytes(leaves: Mapping[str, Leaf], axis_sizes: Mapping[str, int]) -> int:
    """Bytes that one device holds of the copy: the matrices among all `leaves` of a policy, and their scales."""
    matrices = layer_matrices({path: leaf for path, leaf in leaves.items() if path.startswith("layers.")})
    scales = {path: replace(leaf, shape=leaf.shape[1:], axes=leaf.axes[1:]) for path, leaf in matrices.items()}
    return bytes_per_device(matrices, axis_sizes, DTYPES["int8"].itemsize) + bytes_per_device(
        scales, axis_sizes, SCALE_DTYPE.itemsize
    )


class Int8Weights:
    """Quantises on the mesh of `programs`; all layers share one compiled function."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._make = jax.jit(self._of_layer)

    def _of_layer(self, matrices: dict[str, jax.Array]) -> dict[str, Quantised]:
        made = {name: quantise(leaf, DTYPES["int8"], 0) for name, leaf in matrices.items()}
        places = jax.tree.map(lambda spec: NamedSharding(self.programs.mesh, spec), self.programs._of(made))
        return jax.lax.with_sharding_constraint(made, places)

    def __call__(self, weights: SplitWeights) -> SplitWeights:
        """The same policy with new int8 matrices; everything else is the very arrays."""
        return replace(
            weights, layers=tuple({**layer, **self._make(layer_matrices(layer))} for layer in weights.layers)
        )
