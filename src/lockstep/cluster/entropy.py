"""Compiled entropies and their gradient on a mesh, for recipes with an entropy term. Beside `Programs.logprobs`, which
stays what it is without one."""

from __future__ import annotations

import functools
from typing import Any

import jax

from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.models.decoder import Numerics, Weights
from lockstep.models.entropy import entropies


class Entropy:
    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._value = jax.jit(self._value_program)
        self._vjp = jax.jit(functools.partial(programs.head_vjp_program, self._rows))

    def __call__(self, weights: SplitWeights, x: jax.Array, target: Any, temperature: Any) -> jax.Array:
        """[row shards * M] float32 nats, at the picked rows x. target: -1 for padding."""
        return self._value(weights.head, x, target, temperature)

    def _value_program(self, w: Weights, x: Any, target: Any, temperature: Any) -> jax.Array:
        p = self.programs

        def body(w: Weights, x: Any, target: Any, temperature: Any) -> jax.Array:
            return entropies(p.spec, p.num, p.gathered(w), x, target >= 0, temperature, None)

        r = p.rows_spec
        return p._map(body, (p._of(w), r, r, r), r)(w, x, target, temperature)

    def vjp(
        self, weights: SplitWeights, trainable: frozenset[str], x: jax.Array, at: Any, target: Any, temperature: Any,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
        """As `Programs.head_vjp`, of the entropies."""
        return self.programs.head_pull(self._vjp, weights, trainable, x, at, target, temperature, cotangent)

    def _rows(self, num: Numerics, tile: int, w: Weights, x: jax.Array, target: Any, temperature: Any) -> jax.Array:
        spec = self.programs.spec
        block = jax.checkpoint(lambda *a: entropies(spec, num, a[0], a[1], a[2], a[3], tile))
        return block(w, x, target >= 0, temperature)
