"""The answer as text: aligned, at most 100 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from lockstep.plan.folding import LeafClass, fate, fold
from lockstep.plan.request import NATIVE
from lockstep.plan.words import (
    WIDTH,
    certificate_words,
    counted,
    cuts,
    device_words,
    link_words,
    seconds,
    shortened,
    span,
    table,
    wrapped,
)
from lockstep.text import format_bytes

if TYPE_CHECKING:
    from lockstep.plan.answer import Answer

LARGEST = 5
FATES = {
    "in place": "the destination reuses the source's buffers",
    "local": "copied on their own devices, nothing crosses",
    "over links": "written into new buffers, replicas included",
}


def summarise(answer: Answer) -> str:
    """Every section, in the order in which one asks."""
    sections = [_head(answer), _leaves(answer), _largest(answer), _loads(answer), _cost(answer), _others(answer)]
    return "\n\n".join("\n".join(section) for section in sections)


def _head(answer: Answer) -> list[str]:
    request = answer.request
    parameters, size = answer.parameters, format_bytes(answer.bytes)
    rows = [["model", f"{request.name}: {parameters:,} parameters, {size} in {request.dtype}"]]
    if request.lora is not None:
        trained = sum(leaf.size for leaf in answer.selected.values())
        crossing = format_bytes(sum(leaf.bytes for leaf in answer.plan.leaves.values()))
        rows.append(["lora", f"rank {request.lora.rank}: {trained:,} parameters, {crossing} in {request.dtype}"])
    if request.format != NATIVE:
        made = sum(bool(target.operations) for target in answer.plan.mapping.targets.values())
        rows.append(["format", f"{request.format}: {made} of {len(answer.plan.leaves)} leaves are made by operations"])
    for role, grid, dtype in (
        ("actor", request.actor, request.actor_dtype),
        ("rollout", request.rollout, request.dtype),
    ):
        if role == "rollout" and request.colocated:
            rows.append([role, "the actor's mesh"])
        else:
            held = answer.bytes_per_device(role)
            rows.append([role, f"{grid.text} on {device_words(grid.devices)}, {dtype}, {span(held)} per device"])
    return table(rows, "ll")


def _leaves(answer: Answer) -> list[str]:
    plan = answer.plan
    rows = [["leaves", "", "bytes", ""]]
    for name, meaning in FATES.items():
        group = [leaf for leaf in plan.leaves.values() if fate(leaf) == name]
        size = sum(leaf.bytes if name == "in place" else leaf.bytes_written for leaf in group)
        rows.append([f"  {name}", f"{len(group)} of {len(plan.leaves)}", format_bytes(size), meaning])
    lines = table(rows, "lrrl")
    local = sum(leaf.bytes_local for leaf in plan.leaves.values())
    filled = sum(leaf.bytes_filled for leaf in plan.leaves.values())
    arrived = plan.bytes_written - local - filled
    # What crosses in a smaller type than it is written in counts for less on the links.
    crosses = "" if arrived == plan.bytes_crossing else f" ({format_bytes(plan.bytes_crossing)} as they cross)"
    lines.append(
        f"  written: {format_bytes(plan.bytes_written)} = {format_bytes(arrived)} over links{crosses}"
        f" + {format_bytes(local)} local + {format_bytes(filled)} zeros"
    )
    return lines


def largest(answer: Answer) -> list[LeafClass]:
    """Classes of leaves, those of the largest single leaves first."""
    return sorted(fold(answer.plan.leaves.values()), key=lambda found: (-found.first.bytes, -found.bytes))


def _largest(answer: Answer) -> list[str]:
    rows = [["largest leaves", "shape", "each", "all cross", "cut on actor -> rollout"]]
    for found in largest(answer)[:LARGEST]:
        leaf = found.first
        rows.append(
            [
                f"  {found.name}", "x".join(map(str, leaf.shape)), format_bytes(leaf.bytes),
                format_bytes(found.bytes_crossing), f"{_source_cuts(found)} -> {cuts(leaf.target_layout)}",
            ]
        )  # fmt: skip
    rest = sum(max(len(row[at]) for row in rows) + 2 for at in range(1, len(rows[0])))
    return table([[_name(row[0], max(20, WIDTH - rest)), *row[1:]] for row in rows], "llrrl")


def _name(cell: str, width: int) -> str:
    """A first cell: the heading, or an indented name."""
    return f"  {shortened(cell.strip(), width - 2)}" if cell.startswith(" ") else cell


def _source_cuts(found: LeafClass) -> str:
    """How the leaves that it is made of are cut: `2 x (fsdp/8,-)`."""
    count = len(found.first.sources)
    return f"{count} x {cuts(found.first.source_layout)}" if count > 1 else cuts(found.first.source_layout)


def _loads(answer: Answer) -> list[str]:
    plan = answer.plan
    rows = [["load per device", "min", "max", ""]]
    for name, grid, loads in (
        ("send", answer.request.actor, plan.sent),
        ("receive", answer.request.rollout, plan.received),
    ):
        own = loads[np.isin(plan.devices, grid.devices)]
        where = f"the {'actor' if name == 'send' else 'rollout'}'s {counted(len(grid.devices), 'device')}"
        rows.append([f"  {name}", format_bytes(int(own.min())), format_bytes(int(own.max())), where])
    passed = plan.sent[~np.isin(plan.devices, answer.request.actor.devices)]
    if passed.any():
        rows.append(
            ["  pass on", format_bytes(int(passed.min())), format_bytes(int(passed.max())), "receivers that relay"]
        )
    return table(rows, "lrrl")


def _cost(answer: Answer) -> list[str]:
    plan, link = answer.plan, answer.request.link
    bounds = {"receive": plan.bounds.receive_s, "send": plan.bounds.send_s, "bisection": plan.bounds.bisection_s}
    words = [f"{name} {seconds(value)}{' (binds)' if name == answer.binding else ''}" for name, value in bounds.items()]
    ratio = "" if not plan.bounds.seconds else f", {plan.seconds / plan.bounds.seconds:.3f} x the bound"
    staging = (
        f"{format_bytes(plan.peak_staging_bytes)} per device and round (budget {format_bytes(plan.staging_bytes)})"
    )
    rows = [
        ("link model", link_words(link.link_gbps, link.bisection_gbps, link.latency_s)),
        ("lower bound", ", ".join(words)),
        (
            "predicted",
            f"{seconds(plan.seconds)}{ratio}; the busiest link end carries {plan.load_over_bound:.3f} x its bound",
        ),
        ("rounds", f"{plan.rounds:,}; receivers {'pass on what they got' if plan.relayed else 'pass nothing on'}"),
        ("staging", staging),
        ("new buffers", f"at most {format_bytes(plan.new_bytes)} on a rollout device, beside what it serves"),
        ("certificate", certificate_words(answer.certificate)),
        ("plan hash", plan.hash),
    ]
    return wrapped(rows)


def _others(answer: Answer) -> list[str]:
    plan = answer.plan
    rows = [["the same boundary", "over links", "seconds", "new buffers", ""]]
    rows.append(
        ["  this plan", format_bytes(plan.bytes_crossing), seconds(plan.seconds), format_bytes(plan.new_bytes), ""]
    )
    notes = []
    for name, other in answer.alternatives.items():
        label = {"colocated": "colocated", "lora": "LoRA", "naive": "naive"}[name]
        size, new = format_bytes(other.bytes_crossing), format_bytes(other.new_bytes)
        rows.append([f"  {label}", size, seconds(other.seconds), new, "" if name == "naive" else other.how])
        if name == "naive":
            notes = textwrap.wrap(f"naive: {other.how}", WIDTH - 2, initial_indent="  ", subsequent_indent="    ")
    return [*table(rows, "lrrrl"), *notes, "  units: GiB = 2^30 bytes, GB/s = 10^9 bytes per second"]
