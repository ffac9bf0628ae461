"""The plan's name: a digest of everything that decides what is carried out, computed from the plan's own nouns."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from lockstep.sync.layout import Layout
from lockstep.sync.mapping import FormatMap
from lockstep.sync.plan import Bundle, Placed


def plan_hash(
    source: Mapping[str, Placed],
    destination: Mapping[str, Placed],
    mapping: FormatMap,
    in_place: Collection[str],
    bundles: Iterable[Bundle],
) -> str:
    """Hex digest, the same in every process. in_place: targets that stay."""
    digest = hashlib.sha256()
    seen: dict[int, int] = {}  # by identity: hashing a large mesh takes long
    layouts: dict[Layout, int] = {}

    def put(*values: object) -> None:
        digest.update(repr(values).encode())

    def form(placed: Placed) -> tuple[object, ...]:
        layout = placed.layout
        if id(layout) not in seen:
            if layout not in layouts:
                layouts[layout] = len(layouts)
                put("layout", layout.mesh.axes, layout.mesh.devices, layout.spec, layout.memory)
            seen[id(layout)] = layouts[layout]
        return placed.shape, placed.dtype, seen[id(layout)]

    for path, placed in source.items():
        put("source", path, *form(placed))
    for path, target in mapping.targets.items():
        put("target", path, *form(destination[path]), target.filled, path in in_place)
        for piece in target.pieces:
            runs = [(r.source, r.target, r.count, r.source_step, r.target_step) for r in piece.runs]
            put(piece.source, piece.dims, runs, piece.fixed)
    for bundle in bundles:
        put("bundle", bundle.members, bundle.cut_dim, bundle.groups, bundle.parts, bundle.wire_bytes)
        for column in (
            bundle.low, bundle.high, bundle.rows, bundle.cell, bundle.start, bundle.stop, bundle.sender, bundle.relay,
            bundle.receivers, bundle.phase, bundle.local,
        ):  # fmt: skip
            put(column.shape)
            digest.update(column.astype("<i8").tobytes())
    return digest.hexdigest()
