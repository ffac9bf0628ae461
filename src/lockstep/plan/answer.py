"""The answer: the plan, its proof, and what the same boundary would cost otherwise."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import Leaf, ModelSpec, leaf_table
from lockstep.plan.alternatives import Alternative, alternatives, itemsize
from lockstep.plan.request import NATIVE, Request, make_request
from lockstep.sync.certificate import Certificate, check
from lockstep.sync.formats import engine_map
from lockstep.sync.mapping import FormatMap
from lockstep.sync.placement import placed
from lockstep.sync.plan import LinkModel, Placed, SyncPlan
from lockstep.sync.planner import make_plan

VOCAB_MULTIPLE = 64  # to which engines that hold fused leaves pad the vocabulary


@dataclass(frozen=True)
class Answer:
    """What `plan_sync` returns. model: every leaf of the model; selected: those that cross at a boundary (under LoRA
    the adapter's, else all). plan: what moves. certificate: what independent code found in it. alternatives: the same
    boundary in other ways, by name."""

    request: Request
    model: Mapping[str, Leaf]
    selected: Mapping[str, Leaf]
    plan: SyncPlan
    certificate: Certificate
    alternatives: Mapping[str, Alternative]

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(leaf.size for leaf in self.model.values())

    @property
    def bytes(self) -> int:
        """Of the whole model, once, as the sampler holds it."""
        return self.parameters * itemsize(self.request.dtype)

    @property
    def binding(self) -> str:
        """Which lower bound is the largest: `receive`, `send` or `bisection`; `none` when nothing crosses."""
        bounds = self.plan.bounds
        found = {"receive": bounds.receive_s, "send": bounds.send_s, "bisection": bounds.bisection_s}
        return max(found, key=lambda name: found[name]) if bounds.seconds else "none"

    def bytes_per_device(self, role: str) -> tuple[int, int]:
        """Least and most bytes that one device of `actor` or `rollout` holds of what is planned."""
        side = self.plan.source if role == "actor" else self.plan.destination
        held: dict[int, int] = {}
        sizes: dict[Placed, list[int]] = {}
        for leaf in side.values():
            layout = leaf.layout
            if leaf not in sizes:
                lengths = [np.diff(edges) for edges in layout.edges(leaf.shape)]
                where = layout.coordinates()
                count = math.prod(
                    (lengths[dim][where[:, dim]] for dim in range(len(leaf.shape))), start=itemsize(leaf.dtype)
                )
                sizes[leaf] = np.broadcast_to(count, len(layout.mesh.devices)).tolist()
            for device, size in zip(layout.mesh.devices, sizes[leaf], strict=True):
                held[device] = held.get(device, 0) + size
        return min(held.values()), max(held.values())

    @cached_property
    def summary(self) -> str:
        """The answer as text, at most 100 columns wide."""
        from lockstep.plan.summary import summarise

        return summarise(self)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values; docs/plan.md explains every field."""
        from lockstep.plan.document import document

        return document(self)

    def to_html(self) -> str:
        """The answer as one self-contained page."""
        from lockstep.plan.page import render

        return render(self)

    def __str__(self) -> str:
        return self.summary


def plan_sync(
    model: str | os.PathLike[str] | ModelSpec,
    *,
    actor: str | Mapping[str, Any],
    rollout: str | Mapping[str, Any],
    lora: int | LoraSpec | None = None,
    dtype: str = "bfloat16",
    actor_dtype: str | None = None,
    link: LinkModel | float | None = None,
    staging_bytes: int | None = None,
    format: str = "native",
) -> Answer:
    """Plan, prove and price the sync of a model's weights from an actor mesh to a rollout mesh.

        answer = lockstep.plan_sync("llama-3.1-8b", actor="fsdp=8", rollout="tensor=4,data=2", link=400)
        print(answer.summary)
        answer.plan.bytes_crossing     # 32124239872
        answer.certificate.ok          # True

    model: a known name, a folder with a `config.json`, a .gguf file, or a specification. actor, rollout: meshes, as
    text (`tensor=4,data=2`, `fsdp=4@0-3` on named devices) or mappings ({"tensor": 4, "devices": [0, 1, 2, 3]});
    rollout "actor": the two share one mesh and its arrays. lora: a rank; only the adapter crosses. dtype: what the
    sampler holds; actor_dtype: what the trainer holds (default: the same). link: a `LinkModel`, or Gbit/s per device
    and direction. staging_bytes: what one device may send or receive in a round. format: names and shapes that the
    sampler wants: `native` are the trainer's, others are those of `sync.formats` (`hf`, `sglang_jax`, `fused`).

    Needs no devices and no weights, and imports no jax. Raises ConfigError or ModelError for what cannot be asked,
    SyncError for what cannot be planned.
    """
    return answer(
        make_request(
            model,
            actor=actor,
            rollout=rollout,
            lora=lora,
            dtype=dtype,
            actor_dtype=actor_dtype,
            link=link,
            staging_bytes=staging_bytes,
            format=format,
        )
    )


def answer(request: Request) -> Answer:
    """Plan, prove, price."""
    model = leaf_table(request.spec)
    plan = plan_of(request)
    return Answer(
        request, model, selected(request), plan, check(plan, listing=False), alternatives(request, plan, plan_of)
    )


def selected(request: Request) -> dict[str, Leaf]:
    """What crosses at a boundary: the adapter's leaves under LoRA, else the model's."""
    return leaf_table(request.spec) if request.lora is None else adapter_table(request.spec, request.lora)


def plan_of(request: Request) -> SyncPlan:
    """What moves, from whom to whom. Raises SyncError for a format that does not know the model or does not fit."""
    leaves, mapping = selected(request), None
    wanted: Mapping[str, Leaf] = leaves
    if request.format != NATIVE:
        tensor = dict(request.rollout.axes).get("tensor", 1)
        padded = VOCAB_MULTIPLE if request.format == "fused" else 1
        mapping = engine_map(
            request.format, request.spec, request.actor_dtype, to=request.dtype, tensor=tensor, vocab_multiple=padded
        )
        wanted = foreign_leaves(mapping, leaves)
    return make_plan(
        placed(leaves, dict(request.actor.axes), request.actor.devices, request.actor_dtype),
        placed(wanted, dict(request.rollout.axes), request.rollout.devices, request.dtype),
        mapping,
        link=request.link,
        staging_bytes=request.staging_bytes,
        cast=True,
    )


def foreign_leaves(mapping: FormatMap, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The targets as leaves: a dim is cut as the dim of ours that it runs along (that of its first piece)."""
    found = {}
    for path, target in mapping.targets.items():
        piece = target.pieces[0]
        axes = tuple(None if dim is None else leaves[piece.source].axes[dim] for dim in piece.dims)
        found[path] = Leaf(path, target.shape, axes, leaves[piece.source].init)
    return found
