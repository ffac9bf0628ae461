"""Compiled entropies and their gradient on a mesh, for recipes with an entropy term. Beside `Programs.logprobs`, which
stays what it is without one."""

from __future__ import annotations

from typing import Any

import jax

from lockstep.cluster.programs import Programs, SplitWeights, backward_tile
from lockstep.models.decoder import Weights
from lockstep.models.entropy import entropies


class Entropy:
    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._value = jax.jit(self._value_program)
        self._vjp = jax.jit(self._vjp_program)

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
        p = self.programs
        paths = p.head_paths
        chosen = {k: v for k, v in weights.head.items() if paths[k] in trainable}
        frozen = {k: v for k, v in weights.head.items() if k not in chosen}
        dx, grads = self._vjp(frozen, chosen, x, at, target, temperature, cotangent)
        return dx, {paths[k]: g for k, g in grads.items()}

    def _vjp_program(
        self, frozen: Weights, trainable: Weights, x: Any, at: Any, target: Any, temperature: Any, cotangent: Any
    ) -> Any:
        p = self.programs

        def body(
            frozen: Weights, trainable: Weights, x: Any, at: Any, target: Any, temperature: Any, cotangent: Any
        ) -> Any:
            num, tile = p._backward_num, backward_tile(at.shape[0])
            fixed = p.gathered(frozen, num)

            def forward(t: Weights, y: jax.Array) -> jax.Array:
                block = jax.checkpoint(lambda *a: entropies(p.spec, num, a[0], a[1], a[2], a[3], tile))
                return block({**fixed, **p.gathered(t, num)}, y[at], target >= 0, temperature)

            return p._vjp_body(forward, trainable, x, cotangent)

        r = p.rows_spec
        in_specs = (p._of(frozen), p._of(trainable), r, r, r, r, r)
        return p._map(body, in_specs, (r, p._of(trainable)))(frozen, trainable, x, at, target, temperature, cotangent)
