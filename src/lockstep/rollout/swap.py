"""Pool rows out to the host's memory and back, for sequences that are preempted; and whether that pays."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.cluster.programs import Programs, padded_pages
from lockstep.models.decoder import Pool
from lockstep.rollout.work import Swap

ASSUMED_BYTES_PER_S = 1e9  # until a copy was timed


@dataclass(frozen=True)
class Saved:
    """Keys and values of `count` pool rows, one array [count, ...] per leaf of the pools."""

    leaves: tuple[np.ndarray, ...]
    count: int

    def __len__(self) -> int:
        return self.count


class SwapCosts:
    """When copying is cheaper than computing again: rows x copy_s < rows x compute_s.

    compute_s: seconds per row of the fastest pass so far (a slow one may have compiled), so computing is never taken
    for dearer than it can be. copy_s: seconds per row, out and back, of the fastest copies so far. Either way gives the
    same tokens, so a rule that depends on the clock decides nothing but time.
    """

    def __init__(self, bytes_per_row: int) -> None:
        self.compute_s = math.inf
        self.copy_s = 2 * bytes_per_row / ASSUMED_BYTES_PER_S
        self._out_s = self._in_s = math.inf

    def ran(self, rows: int, seconds: float) -> None:
        """A pass of so many real rows took so long."""
        if rows:
            self.compute_s = min(self.compute_s, seconds / rows)

    def copied(self, rows: int, seconds: float, *, out: bool) -> None:
        """So many rows were copied."""
        if out:
            self._out_s = min(self._out_s, seconds / rows)
        else:
            self._in_s = min(self._in_s, seconds / rows)
        if math.isfinite(self._out_s + self._in_s):
            self.copy_s = self._out_s + self._in_s

    def pays(self, rows: int) -> bool:
        return rows * self.copy_s < rows * self.compute_s


class PoolRows:
    """Compiled copies of rows of all layers' pools on a mesh. Row counts are padded to few shapes."""

    def __init__(self, programs: Programs, trash: int) -> None:
        self.programs, self._trash = programs, trash
        pool, row = programs.pool_spec, programs.rows_spec
        self._content = NamedSharding(programs.mesh, pool)

        def over_mesh(body: Any, *specs: PartitionSpec) -> Any:
            return jax.shard_map(body, mesh=programs.mesh, in_specs=specs, out_specs=pool, check_vma=False)

        def gather(pools: list[Pool], rows: jax.Array) -> Any:
            return jax.tree.map(lambda pool: pool[rows], pools)

        def scatter(pools: list[Pool], rows: jax.Array, content: Any) -> Any:
            return jax.tree.map(lambda pool, new: pool.at[rows].set(new), pools, content)

        self._gather = jax.jit(over_mesh(gather, pool, row))
        self._scatter = jax.jit(over_mesh(scatter, pool, row, pool), donate_argnums=(0,))

    def _layout(self, swaps: Sequence[Sequence[Swap]]) -> tuple[np.ndarray, list[tuple[Swap, slice]]]:
        """Row numbers [row shards * n], and which of them are each swap's. swaps: per row shard."""
        most = max(sum(len(s.rows) for s in own) for own in swaps)
        n = padded_pages(most, self.programs.num.page_size)
        rows, places = np.full(len(swaps) * n, self._trash, np.int32), []
        for d, own in enumerate(swaps):
            at = d * n
            for swap in own:
                place = slice(at, at + len(swap.rows))
                rows[place] = swap.rows
                places.append((swap, place))
                at = place.stop
        return rows, places

    def save(self, pools: list[Pool], swaps: Sequence[Sequence[Swap]], costs: SwapCosts) -> None:
        """Copy the rows of every swap to the host, into its sequence's `saved`."""
        start = time.perf_counter()
        rows, places = self._layout(swaps)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._gather(pools, self.programs.put_rows(rows)))]
        for swap, place in places:
            swap.sequence.saved = Saved(tuple(leaf[place].copy() for leaf in leaves), len(swap.rows))
        costs.copied(sum(len(s.rows) for s, _ in places), time.perf_counter() - start, out=True)

    def run_blank(self, pools: list[Pool], count: int) -> list[Pool]:
        """Compile both copies for `count` rows a device: the spare row out and back."""
        rows = np.full(self.programs.row_shards * count, self._trash, np.int32)
        return self._write(pools, rows, jax.tree.map(np.asarray, self._gather(pools, self.programs.put_rows(rows))))

    def _write(self, pools: list[Pool], rows: np.ndarray, content: Any) -> list[Pool]:
        """The pools (those passed in are consumed) with `content`, in the form of the pools, written to `rows`."""
        return self._scatter(pools, self.programs.put_rows(rows), jax.device_put(content, self._content))

    def load(self, pools: list[Pool], swaps: Sequence[Sequence[Swap]], costs: SwapCosts) -> list[Pool]:
        """The pools (those passed in are consumed) with every swap's rows written; nothing is saved any more."""
        start = time.perf_counter()
        rows, places = self._layout(swaps)
        leaves, shape = jax.tree.flatten(pools)
        content = [np.zeros((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        for swap, place in places:
            for into, saved in zip(content, swap.sequence.saved.leaves, strict=True):
                into[place] = saved
        pools = jax.block_until_ready(self._write(pools, rows, jax.tree.unflatten(shape, content)))
        for swap, _ in places:
            swap.sequence.saved = None
        costs.copied(sum(len(s.rows) for s, _ in places), time.perf_counter() - start, out=False)
        return pools
