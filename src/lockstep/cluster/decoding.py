"""From one decode step to the next on the device: what the scheduler would do if it looked, for rows that need it not.

A row of a sample that goes on gets the token that was drawn and moves to the next position, whose pool row its index
names already; a row of a sample that is over becomes padding. So several steps can be sent off at once, and none waits
for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.cluster.programs import Programs, padded_pages
from lockstep.models.decoder import Rows


class Decoding(NamedTuple):
    """N rows per device, the first of them one sample each, and M >= N places of the head, place i drawing for row i.

    at [M] int32: the rows that are picked. temperature [M], seed [M, 2], index [M]: as `decoder.sample` (index -1:
    over, or padding). end [M] int32: index at which the sample has all its tokens. stops [M, E] int32: ids that end it,
    padded with -1.
    """

    rows: Rows
    at: Any
    temperature: Any
    seed: Any
    index: Any
    end: Any
    stops: Any


class DecodeSteps:
    """Moves a `Decoding` on by a step. trash: the pool row that padding writes to and reads."""

    def __init__(self, programs: Programs, trash: int) -> None:
        self.programs, self._trash = programs, trash
        self._advance = jax.jit(self._advance_program)

    def advance(self, state: Decoding, drawn: jax.Array) -> Decoding:
        """The state after `drawn` [M] int32, the tokens of this step."""
        return self._advance(state, drawn)

    def run_blank(self, rows: Rows, places: int, stop_ids: int) -> None:
        """Compile a step of such rows (on the host, all padding), with so many places and stop ids."""
        m = self.programs.row_shards * places
        index, stops = np.full(m, -1, np.int32), np.full((m, padded_pages(stop_ids, 1)), -1, np.int32)
        zero, temperature, seed = np.zeros(m, np.int32), np.ones(m, np.float32), np.zeros((m, 2), np.uint32)
        state = Decoding(rows, zero, temperature, seed, index, zero, stops)
        self.advance(*self.programs.put_rows((state, zero)))

    def _advance_program(self, state: Decoding, drawn: jax.Array) -> Decoding:
        r = self.programs.rows_spec
        return self.programs._map(self._advanced, (r, r), r)(state, drawn)

    def _advanced(self, state: Decoding, drawn: jax.Array) -> Decoding:
        index = state.index + 1
        stopped = (state.stops == drawn[:, None]).any(1)
        live = (state.index >= 0) & ~stopped & (index < state.end)
        rows, n = state.rows, state.rows.tokens.shape[0]
        on = live[:n]
        write = jnp.take_along_axis(rows.read, jnp.minimum(rows.pos + 1, rows.read.shape[1] - 1)[:, None], 1)[:, 0]
        moved = Rows(
            tokens=jnp.where(on, drawn[:n], 0),
            pos=jnp.where(on, rows.pos + 1, -1),
            write=jnp.where(on, write, self._trash),
            read=jnp.where(on[:, None], rows.read, self._trash),
            length=jnp.where(on, rows.length + 1, 1),
        )
        return state._replace(rows=moved, index=jnp.where(live, index, -1))
