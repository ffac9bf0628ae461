"""What the same boundary costs in other ways: on one mesh, under LoRA, and naively."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  (its types become numpy's)
import numpy as np

from lockstep.plan.request import DEFAULT_RANK, NATIVE, Request, read_lora
from lockstep.plan.words import counted
from lockstep.sync.plan import SyncPlan
from lockstep.text import format_bytes

GIGA = 1e9


@dataclass(frozen=True)
class Alternative:
    """One other way. bytes_crossing: over links, replicas counted. new_bytes: most bytes of new buffers on one device.
    how: in words, with the numbers of this case."""

    bytes_crossing: int
    seconds: float
    new_bytes: int
    how: str


Planner = Callable[[Request], SyncPlan]


def alternatives(request: Request, plan: SyncPlan, plan_of: Planner) -> dict[str, Alternative]:
    """By name: `colocated`, `lora`, `naive`. plan: the request's own; plan_of: makes those of others."""
    return {
        "colocated": _colocated(request, plan_of),
        "lora": _lora(request, plan, plan_of),
        "naive": naive(plan),
    }


def _colocated(request: Request, plan_of: Planner) -> Alternative:
    """Actor and rollout on the actor's mesh. Equal types and forms: the very same buffers."""
    if request.actor_dtype == request.dtype and request.format == NATIVE:
        return Alternative(0, 0.0, 0, "one mesh, the same buffers: nothing runs")
    there = plan_of(replace(request, rollout=request.actor))
    how = "one mesh, another type or form: new buffers"
    return Alternative(there.bytes_crossing, there.seconds, there.new_bytes, how)


def _lora(request: Request, plan: SyncPlan, plan_of: Planner) -> Alternative:
    """Only an adapter crosses: the request's own, else one of rank `DEFAULT_RANK` on every matrix of every layer."""
    lora = request.lora or read_lora("lora", DEFAULT_RANK, request.spec)
    assert lora is not None
    there = plan if request.lora else plan_of(replace(request, lora=lora, format=NATIVE))
    size = format_bytes(sum(leaf.bytes for leaf in there.leaves.values()))
    return Alternative(there.bytes_crossing, there.seconds, there.new_bytes, f"rank {lora.rank}, an adapter of {size}")


def naive(plan: SyncPlan) -> Alternative:
    """One source device gathers what it lacks and then sends everything to every other destination device:

        bytes = (G - held) + S n        seconds = bytes / link

    G, S: bytes of all source and of all destination leaves, each once, in the type that crosses (the same number when
    nothing is padded or repeated); held: what the gathering device has of G; n: destination devices besides it. Its
    one link carries all of it, first in, then out. Every destination device needs room for S before it keeps its part.
    """
    placed = [*plan.source.values()]
    root = min(device for leaf in placed for device in leaf.layout.mesh.devices)
    wire = {source: itemsize(leaf.wire_dtype) for leaf in plan.leaves.values() for source in leaf.sources}
    gathered = held = 0
    for path, size in wire.items():
        leaf = plan.source[path]
        gathered += math.prod(leaf.shape) * size
        if root in leaf.layout.mesh.devices:
            held += math.prod(stop - start for start, stop in leaf.layout.box(root, leaf.shape)) * size
    total = sum(math.prod(leaf.shape) * itemsize(leaf.wire_dtype) for leaf in plan.leaves.values())
    copies = len({device for leaf in plan.destination.values() for device in leaf.layout.mesh.devices} - {root})
    lacks, whole = format_bytes(gathered - held), format_bytes(total)
    moved = gathered - held + total * copies
    how = (
        f"device {root} gathers the {lacks} that it lacks, then sends all {whole} to {counted(copies, 'device')}: "
        f"({lacks} + {copies} x {whole}) / {plan.link.link_gbps / 8:g} GB/s"
    )
    return Alternative(moved, moved * 8 / (plan.link.link_gbps * GIGA), total, how)


def itemsize(dtype: str) -> int:
    """Bytes of one element. ml_dtypes has told numpy of bfloat16."""
    return np.dtype(dtype).itemsize
