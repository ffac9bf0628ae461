"""Compiled draws from changed distributions on a mesh: what rows need that ask for more than temperature."""

from __future__ import annotations

from typing import Any

import jax

from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.models import sampling
from lockstep.models.decoder import Weights
from lockstep.models.sampling import Changes, Choice


class ChangedSampling:
    """Beside `Programs.sample`; one program per number of likeliest ids that is asked for."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._choose = jax.jit(self._choose_program, static_argnums=(0,))

    def choose(
        self, weights: SplitWeights, x: jax.Array, temperature: Any, seed: Any, index: Any, changes: Changes,
        likeliest: int,
    ) -> Choice:  # fmt: skip
        """One token for every row of x; see `models.sampling.choose`."""
        return self._choose(likeliest, weights.head, x, temperature, seed, index, changes)

    def _choose_program(
        self, likeliest: int, w: Weights, x: Any, temperature: Any, seed: Any, index: Any, changes: Changes
    ) -> Choice:
        p = self.programs

        def body(w: Weights, x: Any, temperature: Any, seed: Any, index: Any, changes: Changes) -> Choice:
            gathered = p.gathered(w)
            return sampling.choose(p.spec, p.num, likeliest, gathered, x, temperature, seed, index, changes)

        r = p.rows_spec
        in_specs = (p._of(w), *(r,) * 5)
        return p._map(body, in_specs, r)(w, x, temperature, seed, index, changes)
