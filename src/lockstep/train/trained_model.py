"""A model that trains on one number per token: a value where it has a scalar head, else the token's log-probability.
What the critic and supervised training have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.config import OptimConfig
from lockstep.errors import ModelError, NumericsError
from lockstep.models.catalog import LoadedModel
from lockstep.models.init import init_leaf
from lockstep.sync.select import listed
from lockstep.train.batching import MicroBatch
from lockstep.train.forward import DeviceBatch, backward, last_state, layer_states
from lockstep.train.optimizer import added, gradient_norm, make_optimizer, make_schedule, placed
from lockstep.train.policy import TRAINABLE_DTYPE, LeafSplit
from lockstep.train.trainer import first_trained_layer


@dataclass(frozen=True)
class Forward:
    """One micro-batch's forward pass: its arrays, all that `layer_states` yielded, and a number per completion token
    [row shards * M] float32."""

    device: DeviceBatch
    states: list[jax.Array]
    outputs: jax.Array


class TrainedModel:
    """Owns a model of which `trainable` trains, and its optimizer's state."""

    def __init__(
        self,
        programs: Programs,
        frozen: Mapping[str, jax.Array],
        trainable: Mapping[str, jax.Array],
        optimizer: optax.GradientTransformation,
        schedule: optax.Schedule,
    ) -> None:
        self.programs, self.frozen, self.trainable = programs, dict(frozen), dict(trainable)
        self._schedule, self._names = schedule, frozenset(trainable)
        self._first_layer = first_trained_layer(trainable)
        self.optimizer_state, self._update = placed(optimizer, self.trainable, programs.mesh)

    @property
    def params(self) -> dict[str, jax.Array]:
        return {**self.frozen, **self.trainable}

    @property
    def weights(self) -> SplitWeights:
        """As they are now."""
        return SplitWeights.of(self.params, self.programs.spec.num_layers)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"trainable": self.trainable, "optimizer": self.optimizer_state}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.trainable, self.optimizer_state = state["trainable"], state["optimizer"]

    def outputs(self, weights: SplitWeights, batch: MicroBatch) -> np.ndarray:
        """[row shards * M] float32: of the row that predicts each completion token."""
        return outputs_of(self.programs, weights, batch)

    def forward(self, weights: SplitWeights, batch: MicroBatch) -> Forward:
        """The same, with what the backward pass needs."""
        device, first = DeviceBatch.put(self.programs, batch), self._first_layer
        trunk = last_state(self.programs, weights, device.rows, 0, first) if first else None
        layers = first, self.programs.spec.num_layers
        states = list(layer_states(self.programs, weights, device.rows, *layers, trunk))
        return Forward(device, states, _outputs(self.programs, weights, device, states[-1]))

    def gradients(
        self, weights: SplitWeights, forward: Forward, doutputs: jax.Array, so_far: dict[str, jax.Array] | None
    ) -> dict[str, jax.Array]:
        """so_far plus this micro-batch's gradients. doutputs: the loss's with respect to `forward.outputs`."""
        more = backward(
            self.programs, weights, self._names, forward.device, forward.states, doutputs, self._first_layer
        )
        return more if so_far is None else added(so_far, more)

    def update(self, grads: dict[str, jax.Array], number: int, name: str) -> dict[str, float]:
        """Apply one update; returns `grad_norm` (before clipping) and `lr`. number: updates before it. name: the
        model's, for the error. Raises NumericsError, and changes no weight, where the gradient or what comes of it is
        not finite."""
        norm = float(gradient_norm(grads))
        if not math.isfinite(norm):
            raise NumericsError(
                f"{name}, update {number}: the norm of the gradient is {norm}, while the loss is finite; the "
                f"backward pass overflowed in {self.programs.num.dtype}. No update was applied; use a lower learning "
                'rate, or model.dtype = "float32"'
            )
        trainable, self.optimizer_state = self._update(grads, self.optimizer_state, self.trainable)
        rate = float(self._schedule(number))
        if broken := not_finite(trainable):
            raise NumericsError(
                f"{name}, update {number}: it would make {listed(broken)} NaN or infinite (gradient norm {norm:.3g}, "
                f"learning rate {rate:.3g}), and was not applied; use a lower learning rate, or clip at a lower norm"
            )
        self.trainable = trainable
        return {"grad_norm": norm, "lr": rate}


def outputs_of(programs: Programs, weights: SplitWeights, batch: MicroBatch) -> np.ndarray:
    """[row shards * M] float32: the value at the row that predicts each completion token, or its log-probability."""
    device = DeviceBatch.put(programs, batch)
    x = last_state(programs, weights, device.rows, 0, programs.spec.num_layers)
    return np.asarray(_outputs(programs, weights, device, x))


def _outputs(programs: Programs, weights: SplitWeights, device: DeviceBatch, x: jax.Array) -> jax.Array:
    picked = programs.pick(x, device.at)
    if programs.spec.scalar_head:
        return programs.values(weights, picked, device.target)
    return programs.logprobs(weights, picked, device.target, device.temperature)


def initial_trainable(params: Mapping[str, np.ndarray], leaves: LeafSplit, seed: int) -> dict[str, np.ndarray]:
    """A fresh adapter (B zero, so that the model starts as its base), and the model's own weights in the master
    dtype."""
    return {
        path: np.asarray(params[path], TRAINABLE_DTYPE) if path in params else init_leaf(leaf, seed)
        for path, leaf in leaves.trains.items()
    }


def require_finite(tree: Mapping[str, jax.Array], source: str) -> None:
    """Raise ModelError for loaded weights that hold NaN or infinity."""
    if broken := not_finite(tree):
        raise ModelError(
            f"{source}: {len(broken)} leaves hold NaN or infinity: {listed(broken)}; the weights are damaged, get them "
            "anew"
        )


def not_finite(tree: Mapping[str, jax.Array]) -> list[str]:
    """Paths of the leaves that hold NaN or infinity."""
    finite = {path: _all_finite(leaf) for path, leaf in tree.items()}  # all under way before one is waited for
    return [path for path, flag in finite.items() if not flag]


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


def make_trained_model(
    model: LoadedModel,
    programs: Programs,
    leaves: LeafSplit,
    optim: OptimConfig,
    steps: tuple[int, int],
    seed: int,
    shared: Mapping[str, jax.Array],
) -> TrainedModel:
    """A model with its optimizer. leaves: what trains (an adapter starts fresh, B zero). steps: how many there
    will be, and updates in each, for the schedule. shared: arrays that are already on the mesh and are the model's
    frozen leaves, or none.

    Raises ModelError for weights that are not finite.
    """
    mesh = programs.mesh
    if shared:
        frozen = {path: shared[path] for path in leaves.frozen}
    else:
        frozen = place({path: model.params[path] for path in leaves.frozen}, leaves.frozen, mesh)
    trainable = place(initial_trainable(model.params, leaves, seed), leaves.trains, mesh)
    require_finite({**frozen, **trainable}, model.source)
    schedule = make_schedule(optim, *steps)
    return TrainedModel(programs, frozen, trainable, make_optimizer(optim, schedule), schedule)
