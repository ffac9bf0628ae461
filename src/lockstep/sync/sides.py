"""Whether two sides fit, and what of a destination is there already: asked before anything is planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import ml_dtypes  # noqa: F401  (teaches numpy the names `bfloat16` and `float8_*`)
import numpy as np

from lockstep.errors import SyncError
from lockstep.sync.layout import Layout
from lockstep.sync.mapping import FormatMap, Target, check_total, identity_map
from lockstep.sync.plan import LinkModel, Placed


def check_sides(
    source: Mapping[str, Placed], destination: Mapping[str, Placed], link: LinkModel, staging_bytes: int
) -> None:
    """Raise SyncError for a side that is wrong in itself, a link that carries nothing, or no staging budget."""
    rates = {"link_gbps": link.link_gbps, "memory_gbps": link.memory_gbps}
    if link.bisection_gbps is not None:
        rates["bisection_gbps"] = link.bisection_gbps
    for name, rate in rates.items():
        if not (rate > 0 and math.isfinite(rate)):
            raise SyncError(f"sync: {name} must be a number above 0; got {rate!r}")
    if not (link.latency_s >= 0 and math.isfinite(link.latency_s)):
        raise SyncError(f"sync: latency_s must be a number of at least 0; got {link.latency_s!r}")
    if staging_bytes < 1:
        raise SyncError(f"sync: the staging budget must be at least 1 byte; got {staging_bytes!r}")
    for side, leaves in (("source", source), ("destination", destination)):
        for path, placed in leaves.items():
            _check_placed(side, path, placed)


def _check_placed(side: str, path: str, placed: Placed) -> None:
    layout = placed.layout
    if len(layout.spec) != len(placed.shape):
        raise SyncError(
            f"sync: {path} at the {side} has shape {placed.shape} and a layout of {len(layout.spec)} dims "
            f"({layout.describe()}); a layout names the mesh axes of every dim"
        )
    if any(size < 0 for size in placed.shape):
        raise SyncError(f"sync: {path} at the {side} has shape {placed.shape}; sizes must be at least 0")
    if layout.memory not in ("device", "host"):
        raise SyncError(f"sync: {path} at the {side} is in {layout.memory!r} memory; expected device or host")
    if not _is_dtype(placed.dtype):
        raise SyncError(f"sync: {path} at the {side} has dtype {placed.dtype!r}, which is none that jax knows")


@lru_cache(maxsize=256)
def _is_dtype(name: str) -> bool:
    try:
        return np.dtype(name).kind not in "OSUM" and np.dtype(name).name == name
    except TypeError:
        return False


def total_map(
    source: Mapping[str, Placed], destination: Mapping[str, Placed], mapping: FormatMap | None, cast: bool
) -> FormatMap:
    """`mapping`, or the identity; checked to be total on both sides. Raises SyncError naming leaf, shapes, layouts."""
    forms = tuple({path: (p.shape, p.dtype) for path, p in side.items()} for side in (source, destination))
    try:
        if mapping is None:
            return identity_map(*forms, cast=cast)
        check_total(mapping, *forms)
        return mapping
    except SyncError as error:
        raise SyncError(f"{error}{_layouts_in(str(error), source, destination, mapping)}") from None


def _layouts_in(
    message: str, source: Mapping[str, Placed], destination: Mapping[str, Placed], mapping: FormatMap | None
) -> str:
    """Where the first destination leaf named in an error lies on both sides."""
    words = set(message.replace(",", " ").replace(";", " ").split())
    path = next((path for path in destination if path in words), None)
    if path is None:
        return ""
    reads = (
        [path]
        if mapping is None
        else [p.source for p in mapping.targets[path].pieces]
        if path in mapping.targets
        else []
    )
    text = f". {path} at the destination: {_words(destination[path])}"
    return text + "".join(f"; {name} at the source: {_words(source[name])}" for name in reads[:1] if name in source)


def _words(placed: Placed) -> str:
    return f"{placed.dtype}[{','.join(map(str, placed.shape))}] on {placed.layout.describe()}"


def in_place(target: Target, source: Mapping[str, Placed], destination: Placed) -> bool:
    """Whether every destination device holds exactly its part already: one whole source leaf as it is, in the same
    dtype and the same memory. Then the source's buffers are the destination's."""
    if len(target.pieces) != 1:
        return False
    piece = target.pieces[0]
    held = source[piece.source]
    if held.dtype != target.dtype or held.shape != target.shape or piece.dims != tuple(range(len(target.shape))):
        return False
    whole = all(
        run.source == run.target == 0 and run.count == size for run, size in zip(piece.runs, target.shape, strict=True)
    )
    return whole and _same_boxes(held.layout, destination.layout, target.shape)


@lru_cache(maxsize=16384)
def _same_boxes(source: Layout, destination: Layout, shape: tuple[int, ...]) -> bool:
    """Whether every device of the destination has the same part of a leaf of `shape` in both layouts."""
    if source == destination:
        return True
    index = {device: at for at, device in enumerate(source.mesh.devices)}
    if source.memory != destination.memory or not set(destination.mesh.devices) <= set(index):
        return False
    rows = [index[device] for device in destination.mesh.devices]
    here, there = source.coordinates()[rows], destination.coordinates()
    for dim, (a, b) in enumerate(zip(source.edges(shape), destination.edges(shape), strict=True)):
        first, second = np.array(a, np.int64), np.array(b, np.int64)
        at, to = here[:, dim], there[:, dim]
        if not (np.array_equal(first[at], second[to]) and np.array_equal(first[at + 1], second[to + 1])):
            return False
    return True
