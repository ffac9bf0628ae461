"""Forward and backward passes over micro-batches, layer by layer: what the trainer and the reference role run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.models.decoder import Rows
from lockstep.train.batching import MicroBatch


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch's arrays on a role's mesh."""

    rows: Rows
    at: jax.Array
    target: jax.Array
    temperature: jax.Array

    @staticmethod
    def put(programs: Programs, batch: MicroBatch) -> DeviceBatch:
        return DeviceBatch(*programs.put_rows((batch.rows, batch.at, batch.target, batch.temperature)))


def layer_states(
    programs: Programs, weights: SplitWeights, rows: Rows, first: int, last: int, x: jax.Array | None = None
) -> Iterator[jax.Array]:
    """Input of layer `first`, then the output of each of layers first..last-1: last - first + 1 arrays
    [row shards * N, D], one at a time, so that nothing is kept that the caller does not keep.

    x: input of layer `first`; None starts from the embedding (then first is 0).
    """
    if x is None:
        assert first == 0
        x = programs.embed(weights, rows.tokens)
    yield x
    if last > first:
        rows_per_shard = rows.tokens.shape[0] // programs.row_shards
        # One scratch pool serves all layers: each layer writes every real row before anything reads it.
        pool = programs.new_pool(rows_per_shard + 1)
        for i in range(first, last):
            x, pool = programs.layer(weights, i, x, rows, pool)
            yield x


def last_state(
    programs: Programs, weights: SplitWeights, rows: Rows, first: int, last: int, x: jax.Array | None = None
) -> jax.Array:
    """Output of layer last-1 (the input of layer `first` where no layer lies between); arguments as `layer_states`."""
    for state in layer_states(programs, weights, rows, first, last, x):
        x = state
    assert x is not None
    return x


def score(
    programs: Programs,
    weights: SplitWeights,
    batches: Sequence[MicroBatch],
    trunks: Sequence[jax.Array] | None = None,
    first: int = 0,
) -> list[np.ndarray]:
    """Log-probabilities of every completion token, [row shards * M] per micro-batch. trunks: of layer `first`, its
    inputs."""
    out = []
    for i, batch in enumerate(batches):
        device = DeviceBatch.put(programs, batch)
        x = trunks[i] if trunks is not None else None
        x = last_state(programs, weights, device.rows, first, programs.spec.num_layers, x)
        x = programs.pick(x, device.at)
        out.append(np.asarray(programs.logprobs(weights, x, device.target, device.temperature)))
    return out


def backward(
    programs: Programs,
    weights: SplitWeights,
    trainable: frozenset[str],
    device: DeviceBatch,
    states: list[jax.Array],
    dlogp: jax.Array,
    first: int,
    extra: tuple[jax.Array, dict[str, jax.Array]] | None = None,
) -> dict[str, jax.Array]:
    """Gradients of every trainable leaf, summed over the mesh. states: all that `layer_states(first, L)` yields. extra:
    cotangents of the last state, and of head leaves, that come on top of those through the log-probabilities."""
    x = states[-1]
    dx, grads = programs.head_vjp(weights, trainable, x, device.at, device.target, device.temperature, dlogp)
    if extra is not None:
        dx = dx + extra[0]
        grads = {path: g + extra[1][path] for path, g in grads.items()}
    for i in range(programs.spec.num_layers - 1, first - 1, -1):
        dx, layer_grads = programs.layer_vjp(weights, trainable, i, states[i - first], device.rows, dx)
        grads |= layer_grads
    if "embed" in trainable:
        table = programs.embed_vjp(weights, device.rows.tokens, dx)
        grads["embed"] = grads["embed"] + table if "embed" in grads else table
    return grads
