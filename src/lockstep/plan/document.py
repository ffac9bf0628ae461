"""The answer as JSON: a stable schema, every field of which docs/plan.md explains.

`schema_version` grows when a field changes its meaning or goes; new fields may come without that.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lockstep.sync.layout import Layout
from lockstep.sync.plan import LeafPlan

if TYPE_CHECKING:
    from lockstep.plan.answer import Answer
    from lockstep.plan.request import Grid

SCHEMA_VERSION = 1


def document(answer: Answer) -> dict[str, Any]:
    """Plain values only: dicts, lists, texts, numbers that are finite, booleans, None."""
    request, plan, lora = answer.request, answer.plan, answer.request.lora
    leaves = plan.leaves.values()
    return {
        "schema_version": SCHEMA_VERSION,
        "lockstep": version("lockstep-rl"),
        "model": request.name,
        "family": request.spec.family,
        "dtype": request.dtype,
        "actor_dtype": request.actor_dtype,
        "format": plan.mapping.name,
        "parameters": answer.parameters,
        "bytes": answer.bytes,
        "lora": None if lora is None else {"rank": lora.rank, "targets": list(lora.targets)},
        "selected": {
            "leaves": len(answer.selected),
            "parameters": sum(leaf.size for leaf in answer.selected.values()),
            "bytes": sum(leaf.bytes for leaf in leaves),
        },
        "actor": _grid(answer, "actor", request.actor),
        "rollout": _grid(answer, "rollout", request.rollout),
        "colocated": request.colocated,
        "link": {
            "link_gbps": request.link.link_gbps,
            "bisection_gbps": request.link.bisection_gbps,
            "latency_s": request.link.latency_s,
            "memory_gbps": request.link.memory_gbps,
        },
        "bytes_written": plan.bytes_written,
        "bytes_crossing": plan.bytes_crossing,
        "bytes_local": sum(leaf.bytes_local for leaf in leaves),
        "bytes_filled": sum(leaf.bytes_filled for leaf in leaves),
        "seconds": plan.seconds,
        "bound_seconds": plan.bounds.seconds,
        "bounds": {
            "receive_s": plan.bounds.receive_s,
            "send_s": plan.bounds.send_s,
            "bisection_s": plan.bounds.bisection_s,
            "binding": answer.binding,
        },
        "load_over_bound": plan.load_over_bound,
        "rounds": plan.rounds,
        "relayed": plan.relayed,
        "staging_bytes": plan.staging_bytes,
        "peak_staging_bytes": plan.peak_staging_bytes,
        "new_bytes": plan.new_bytes,
        "devices": [
            {"device": device, "sent": int(sent), "received": int(received)}
            for device, sent, received in zip(plan.devices, plan.sent, plan.received, strict=True)
        ],
        "leaves": [_leaf(leaf) for leaf in leaves],
        "unused": dict(plan.mapping.unused),
        "unchanged": dict(plan.mapping.unchanged),
        "certificate": {
            "ok": answer.certificate.ok,
            "checks": [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in answer.certificate.checks],
        },
        "alternatives": {
            name: {"bytes_crossing": a.bytes_crossing, "seconds": a.seconds, "new_bytes": a.new_bytes, "how": a.how}
            for name, a in answer.alternatives.items()
        },
        "plan_hash": plan.hash,
    }


def dumps(answer: Answer) -> str:
    """The document as text. A number that is not finite would be a fault of ours and raises ValueError."""
    return json.dumps(document(answer), indent=1, allow_nan=False) + "\n"


def _grid(answer: Answer, role: str, grid: Grid) -> dict[str, Any]:
    least, most = answer.bytes_per_device(role)
    return {
        "axes": dict(grid.axes),
        "devices": list(grid.devices),
        "bytes_per_device": {"min": least, "max": most},
    }


def _leaf(leaf: LeafPlan) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype,
        "wire_dtype": leaf.wire_dtype,
        "sources": list(leaf.sources),
        "operations": list(leaf.operations),
        "actor_cuts": _cuts(leaf.source_layout),
        "rollout_cuts": _cuts(leaf.target_layout),
        "in_place": leaf.in_place,
        "bytes": leaf.bytes,
        "bytes_written": leaf.bytes_written,
        "bytes_local": leaf.bytes_local,
        "bytes_filled": leaf.bytes_filled,
        "bytes_crossing": leaf.bytes_crossing,
    }


def _cuts(layout: Layout) -> list[dict[str, Any]]:
    """Per dim, in how many parts it lies and which mesh axes cut it."""
    return [{"parts": parts, "axes": list(axes)} for parts, axes in zip(layout.parts(), layout.spec, strict=True)]
