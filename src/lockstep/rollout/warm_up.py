"""Every program that an engine can need, compiled before there is work.

Rows, index widths and draws are padded to power-of-two multiples of a unit, so the shapes are few and known from the
sizes alone: `needed` lists them. `warm_up` runs each once on blank rows, which write to and read from the pool's spare
row: nothing that a sequence reads is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from lockstep.cluster.programs import numpy_rows, padded_pages
from lockstep.rollout.pool_size import enough_pages
from lockstep.types import SamplingParams

if TYPE_CHECKING:
    from lockstep.rollout.engine import Engine

COMPILED = "/jax/core/compile/backend_compile_duration"
Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class WarmUp:
    """seconds: wall time. programs: how many were compiled, or read from the cache of compiled ones; what had been
    compiled in this process already is not among them."""

    seconds: float
    programs: int

    def __add__(self, other: WarmUp) -> WarmUp:
        return WarmUp(self.seconds + other.seconds, self.programs + other.programs)

    def __str__(self) -> str:
        return f"warm-up: {self.programs} programs compiled or read from the cache in {self.seconds:.1f} s"


def sizes(unit: int, largest: int) -> list[int]:
    """Power-of-two multiples of `unit` up to `largest`, which is one."""
    return [unit << k for k in range((largest // unit).bit_length())]


def needed(
    *,
    slots: int,
    max_rows: int,
    max_positions: int,
    page_size: int,
    rows_for: Callable[[int], int],
    head_rows_for: Callable[[int], int],
    params: SamplingParams,
    drafts: bool = False,
    ahead: bool = False,
    layer_kinds: int = 1,
    swap_rows: int = 0,
) -> dict[str, Shapes]:
    """Program -> shapes that requests like `params` can need, whatever their lengths and number.

    slots, max_rows, max_positions: of a device. rows_for, head_rows_for: how rows of a pass, and of the head, are
    padded (`Programs`). ahead: whether steps are sent off several at a time. layer_kinds: layers that differ in their
    leaves (with and without an adapter). swap_rows: pool rows that may be swapped at a time; 0: none ever are.
    A pass of n rows with an index of w positions picks m rows: embed (n,); layer (kind, n, w); pick (n, m); sample,
    choose, logprobs (m,); advance (n, w); save, load (rows,).
    """

    def padded(pad: Callable[[int], int], most: int) -> list[int]:
        return sorted({pad(count) for count in range(1, most + 1)})

    rows = padded(rows_for, max_rows)
    widths = sizes(page_size, padded_pages(max_positions, page_size))
    # A running sample draws one token, and one more for each row of a draft.
    drawn = set(padded(head_rows_for, slots + (max_rows if drafts else 0)))
    steps = padded(rows_for, slots) if ahead and params.plain and not params.stop_strings else []
    scored = {(n, m) for n in rows for m in padded(head_rows_for, n)} if params.prompt_logprobs else set()
    found: dict[str, Shapes] = {
        "embed": [(n,) for n in rows],
        "layer": [(kind, n, w) for kind in range(layer_kinds) for n in rows for w in widths],
        "pick": sorted({(n, m) for n in rows for m in drawn} | {(n, head_rows_for(n)) for n in steps} | scored),
        "sample" if params.plain else "choose": [(m,) for m in sorted(drawn | {head_rows_for(n) for n in steps})],
        "logprobs": [(m,) for m in sorted({m for _, m in scored} | (set() if params.plain else drawn))],
        "advance": [(n, w) for n in steps for w in widths],
    }
    if swap_rows:
        found["save"] = found["load"] = [(r,) for r in sizes(page_size, padded_pages(swap_rows, page_size))]
    return {program: shapes for program, shapes in found.items() if shapes}


@contextmanager
def counted() -> Iterator[list[float]]:
    """Seconds of every compilation in this process while the block runs."""
    found: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def layer_kinds(engine: Engine) -> list[int]:
    """The first layer of each kind."""
    kinds: dict[frozenset[str], int] = {}
    for i, layer in enumerate(engine.weights.layers):
        kinds.setdefault(frozenset(layer), i)
    return list(kinds.values())


def needed_by(engine: Engine, params: SamplingParams) -> dict[str, Shapes]:
    """What `warm_up` compiles for this engine, the trials of short tiles (`short_tiles`) aside."""
    shard, p = engine._shards[0], engine.programs
    return needed(
        slots=shard.slots,
        max_rows=shard.max_rows,
        max_positions=engine.max_positions,
        page_size=p.num.page_size,
        rows_for=lambda count: p.rows_for(count, p.num.page_size),
        head_rows_for=p.head_rows_for,
        params=params,
        drafts=shard.drafts is not None,
        ahead=shard.drafts is None and engine.decode_steps > 1,
        layer_kinds=len(layer_kinds(engine)),
        swap_rows=_swap_rows(engine),
    )


def _swap_rows(engine: Engine) -> int:
    """Rows that may be copied to the host at a time: none where pages cannot run out."""
    shard, page = engine._shards[0], engine.programs.num.page_size
    never = shard.swap_pays is None or engine.num_pages >= enough_pages(shard.slots, engine.max_positions, page)
    return 0 if never else engine.num_pages * page


def warm_up(engine: Engine, params: SamplingParams) -> WarmUp:
    """Compile what `needed_by` lists. Only while nothing runs."""
    assert not engine.busy, "warm up before there is work"
    start = time.perf_counter()
    wanted = needed_by(engine, params)
    with counted() as compiled:
        _passes(engine, params, wanted)
        for (count,) in wanted.get("save", []):
            engine._pools = engine._pool_rows.run_blank(engine._pools, count)
        jax.block_until_ready(engine._pools)
    # Passes of these shapes need no compiler now, so their times count.
    engine._shapes.update((n, w, m) for _, n, w in wanted["layer"] for rows, m in wanted["pick"] if rows == n)
    made, drafts = WarmUp(time.perf_counter() - start, len(compiled)), engine._shards[0].drafts
    return made if drafts is None else made + drafts.warm_up(params)


def _passes(engine: Engine, params: SamplingParams, wanted: dict[str, Shapes]) -> None:
    """Everything between the rows of a pass and what it draws, on padding."""
    p, weights, kinds = engine.programs, engine.weights, layer_kinds(engine)
    heads = {(name, m) for name in ("sample", "choose", "logprobs") for (m,) in wanted.get(name, [])}
    for (n,) in wanted["embed"]:
        for kind, _, width in (shape for shape in wanted["layer"] if shape[1] == n):
            i, blank = kinds[kind], numpy_rows(p.row_shards, n, width, engine._trash)
            rows = p.put_rows(blank)
            x, engine._pools[i] = p.layer(weights, i, p.embed(weights, rows.tokens), rows, engine._pools[i])
            if (n, width) in wanted.get("advance", []) and not kind:
                engine._decode_steps.run_blank(blank, p.head_rows_for(n), len(params.stop_ids))
        for m in (shape[1] for shape in wanted["pick"] if shape[0] == n):
            picked = p.pick(x, p.put_rows(np.zeros(p.row_shards * m, np.int32)))
            for name in ("sample", "choose", "logprobs"):
                if (name, m) in heads:
                    heads.remove((name, m))
                    engine._sampler.run_blank(name, weights, picked, m, params)
