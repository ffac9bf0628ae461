"""The answer as one page that loads nothing: meshes, leaves and their slices, link loads, the proof.

The style sheet and the sortable tables are the run report's; `assets/plan.css` adds to them. The pictures of leaves are
drawn by `assets/plan.js` from the values that `picture.py` makes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup

from lockstep.plan.folding import fate, fold
from lockstep.plan.picture import Heat, Layouts, heat_of, picture_of
from lockstep.plan.summary import FATES, largest
from lockstep.plan.words import certificate_words, cuts, device_words, link_words, ranges, seconds, span
from lockstep.text import format_bytes, visible

if TYPE_CHECKING:
    from lockstep.plan.answer import Answer
    from lockstep.plan.request import Grid

LEVELS = 8  # of the heat map's colour
WIDEST_ROW = 32  # devices in a row of a mesh's picture


def render(answer: Answer) -> str:
    """The page as HTML."""
    package = files("lockstep")  # by its path: importing lockstep.report would bring in jax
    assets = package.joinpath("plan", "assets")
    shared = package.joinpath("report", "assets")
    script = assets.joinpath("plan.js").read_text() + shared.joinpath("tables.js").read_text()
    style = shared.joinpath("style.css").read_text() + assets.joinpath("plan.css").read_text()
    environment = jinja2.Environment(
        autoescape=True, finalize=_finalize, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"bytes": format_bytes, "seconds": seconds, "cuts": cuts}
    plan, request = answer.plan, answer.request
    heat = heat_of(plan, request.rollout.devices)
    return environment.from_string(assets.joinpath("plan.html").read_text()).render(
        answer=answer,
        plan=plan,
        request=request,
        tiles=_tiles(answer),
        meshes=_meshes(answer),
        classes=[_row(found) for found in fold(plan.leaves.values())],
        fates=[_fate(answer, name, meaning) for name, meaning in FATES.items()],
        heat=_heat_svg(heat),
        heat_words=_heat_words(heat),
        senders=device_words([device for row in heat.rows for device in row]),
        receivers=device_words([device for column in heat.columns for device in column]),
        bounds=(
            ("receive", plan.bounds.receive_s),
            ("send", plan.bounds.send_s),
            ("bisection", plan.bounds.bisection_s),
        ),
        link=link_words(request.link.link_gbps, request.link.bisection_gbps, request.link.latency_s),
        proof=certificate_words(answer.certificate),
        data=_script_data(_data(answer, heat)),
        style=Markup(style),
        script=Markup(script),
        # The only script that may run is ours: even markup that got through would be dead.
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _finalize(value: Any) -> Any:
    """Every text that the template prints comes through here: nothing invisible gets out."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _script_data(value: Any) -> Markup:
    """JSON inside a script element: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _tiles(answer: Answer) -> list[tuple[str, str, str]]:
    """(label, value, note) of the headline numbers."""
    plan = answer.plan
    bound = plan.bounds.seconds
    ratio = f"{plan.seconds / bound:.3f} x the lower bound ({answer.binding})" if bound else "nothing crosses"
    staging = f"budget {format_bytes(plan.staging_bytes)}; {plan.rounds} rounds"
    return [
        (
            "Over links",
            format_bytes(plan.bytes_crossing),
            f"of {format_bytes(plan.bytes_written)} written, per boundary",
        ),
        ("Predicted", seconds(plan.seconds), ratio),
        ("Busiest link end", f"{plan.load_over_bound:.3f} x", "its bound; 1 is optimal"),
        ("Staging", format_bytes(plan.peak_staging_bytes), staging),
        ("New buffers", format_bytes(plan.new_bytes), "most on one rollout device"),
    ]


def _row(found: Any) -> dict[str, Any]:
    leaf = found.first
    return {"found": found, "leaf": leaf, "shape": " x ".join(map(str, leaf.shape)) or "scalar", "fate": found.fate}


def _fate(answer: Answer, name: str, meaning: str) -> dict[str, Any]:
    group = [leaf for leaf in answer.plan.leaves.values() if fate(leaf) == name]
    return {"name": name, "meaning": meaning, "leaves": len(group), "bytes": sum(leaf.bytes for leaf in group)}


def _meshes(answer: Answer) -> list[dict[str, Any]]:
    """Both meshes as grids. A device's bar is its share of the largest load of any device."""
    plan, request = answer.plan, answer.request
    loads = {d: (int(s), int(r)) for d, s, r in zip(plan.devices, plan.sent, plan.received, strict=True)}
    largest_load = max((max(pair) for pair in loads.values()), default=0) or 1
    # Colours are the actor's devices: what a slice is made of. Devices that only receive have none.
    hues = {device: round(360 * at / len(request.actor.devices)) for at, device in enumerate(request.actor.devices)}
    shown = [("actor", request.actor, "holds and sends")]
    if not request.colocated:
        shown.append(("rollout", request.rollout, "receives and serves"))
    return [
        {
            "role": role,
            "text": grid.text,
            "devices": device_words(grid.devices),
            "does": does,
            "held": span(answer.bytes_per_device(role)),
            "columns": _columns(grid),
            "tiny": len(grid.devices) > 64 and _columns(grid) > 16,
            "cells": [
                {
                    "device": device,
                    "hue": hues.get(device),
                    "place": _place(grid, at),
                    "sent": loads[device][0],
                    "received": loads[device][1],
                    "bar": 100 * max(loads[device]) / largest_load,
                }
                for at, device in enumerate(grid.devices)
            ],
        }
        for role, grid, does in shown
    ]


def _columns(grid: Grid) -> int:
    """Devices per row: the axis that varies fastest, so that rows are what the other axes tell apart."""
    sizes = [size for _, size in grid.axes if size > 1]
    if len(sizes) > 1 and 2 <= sizes[-1] <= WIDEST_ROW:
        return sizes[-1]
    return min(len(grid.devices), 16 if len(grid.devices) > WIDEST_ROW else 8)


def _place(grid: Grid, at: int) -> str:
    """`data 1, tensor 3`: where on the mesh the device at this position is."""
    sizes = [size for _, size in grid.axes]
    where = np.unravel_index(at, sizes) if sizes else ()
    return ", ".join(f"{axis} {i}" for (axis, size), i in zip(grid.axes, where, strict=True) if size > 1)


def _heat_words(heat: Heat) -> str:
    """What the heat map shows, for those who cannot see it and for its caption."""
    if not heat.bytes.any():
        return "No byte goes over a link."
    used = heat.bytes[heat.bytes > 0]
    block = len(heat.rows[0]), len(heat.columns[0])
    of = "links" if block == (1, 1) else f"blocks of {block[0]} x {block[1]} devices"
    carry = span((int(used.min()), int(used.max())))
    return f"{len(used)} of {heat.bytes.size} {of} are used; they carry {carry} each."


def _heat_svg(heat: Heat) -> Markup:
    """Senders down, receivers across; one path per level of colour keeps it small."""
    rows, columns = heat.bytes.shape
    largest_sum = int(heat.bytes.max(initial=0))
    paths: dict[int, list[str]] = {}
    for (row, column), value in np.ndenumerate(heat.bytes):
        level = math.ceil(LEVELS * int(value) / largest_sum) if largest_sum else 0
        paths.setdefault(level, []).append(f"M{column} {row}h1v1h-1z")
    body = Markup("").join(
        Markup('<path class="heat" style="fill-opacity:{:.2f}" d="{}"/>').format(level / LEVELS, "".join(path))
        if level
        else Markup('<path class="cold" d="{}"/>').format("".join(path))
        for level, path in sorted(paths.items())
    )
    return Markup(
        '<svg class="heatmap" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" tabindex="0" '
        'style="aspect-ratio:{w}/{h};max-width:{px}px;--gap:{gap}" '
        'aria-label="Bytes from sender (rows) to receiver (columns). {words}">{body}'
        '<rect class="pick" width="1" height="1" visibility="hidden"/></svg>'
    ).format(
        w=columns,
        h=rows,
        gap=int(columns <= 32),
        px=max(64, min(620, 44 * columns)),
        words=_heat_words(heat),
        body=body,
    )


def _data(answer: Answer, heat: Heat) -> dict[str, Any]:
    """What the script draws from."""
    layouts = Layouts()
    leaves = [picture_of(answer.plan, found, layouts) for found in fold(answer.plan.leaves.values(), by_place=True)]
    order = largest(answer)
    first = order[0].first.path if order else ""
    return {
        "leaves": leaves,
        "layouts": layouts.listed,
        "first": max(0, next((at for at, leaf in enumerate(leaves) if leaf["path"] == first), 0)),
        "actor": answer.request.actor.devices,
        "rollout": answer.request.rollout.devices,
        "heat": {
            "rows": [ranges(row) for row in heat.rows],
            "columns": [ranges(column) for column in heat.columns],
            "bytes": heat.bytes.tolist(),
        },
    }
