"""What a leaf's entry in a plan must claim, computed from the map and the layouts alone."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes  # noqa: F401  (teaches numpy the names `bfloat16` and `float8_*`)
import numpy as np

from lockstep.sync.columns import Fail
from lockstep.sync.mapping import Target
from lockstep.sync.plan import LeafPlan, Placed
from lockstep.sync.regions import Pieces, held, rows_of


def itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def wire_dtype(source: str, target: str) -> str:
    """The type that crosses: the smaller one; the destination's where both are of one size."""
    return source if itemsize(source) < itemsize(target) else target


def stays(target: Target, places: list[Placed], destination: Placed, boxes: np.ndarray) -> bool:
    """Whether every destination device holds exactly its part already, in the destination's form."""
    if len(places) != 1:
        return False
    (piece,), (place,) = target.pieces, places
    whole = all(
        (run.source, run.target, run.count) == (0, 0, n) for run, n in zip(piece.runs, target.shape, strict=True)
    )
    straight = piece.dims == tuple(range(len(target.shape))) and not piece.fixed and place.shape == target.shape
    if not (
        whole and straight and all(run.source_step == run.target_step == 1 or run.count == 1 for run in piece.runs)
    ):
        return False
    if place.dtype != target.dtype or place.layout.memory != destination.layout.memory:
        return False
    rows = rows_of(place.layout.mesh.devices, np.array(destination.layout.mesh.devices))
    return bool((rows >= 0).all() and (held(place.layout, place.shape)[rows] == boxes).all())


def check_claims(leaf: LeafPlan, true: Mapping[str, int], target: Target, fail: Fail) -> None:
    claimed = {name: getattr(leaf, f"bytes_{name}") for name in true}
    if claimed != true:
        fail("bytes", f"{target.path} claims bytes {claimed}; they are {dict(true)}")
    total = int(np.prod(target.shape, dtype=np.int64)) * itemsize(target.dtype)
    if leaf.bytes != total:
        fail("bytes", f"{target.path} claims {leaf.bytes} bytes; it has {total}")


def meet(pieces: Pieces, boxes: np.ndarray) -> np.ndarray:
    """[pieces, devices] elements that each piece has in every part."""
    low, high = turns(pieces.run[:, None, :, 1], pieces.run[:, None, :, 4], pieces.run[:, None, :, 2], boxes[None])
    return np.maximum(0, high - low).prod(axis=-1)


def available(pieces: Pieces, boxes: np.ndarray, devices: tuple[int, ...], places: list[Placed]) -> np.ndarray:
    """[pieces, devices] of those, elements that the device itself holds at the source."""
    found = np.zeros((len(places), len(devices)), np.int64)
    groups: dict[Placed, list[int]] = {}
    for at, place in enumerate(places):
        groups.setdefault(place, []).append(at)
    for place, members in groups.items():
        rows = rows_of(place.layout.mesh.devices, np.array(devices))
        both = np.flatnonzero(rows >= 0)
        if not len(both):
            continue
        parts = held(place.layout, place.shape)[rows[both]]
        run, along, fixed = pieces.run[members], pieces.source_dim[members], pieces.fixed[members, : len(place.shape)]
        low, high = turns(run[:, None, :, 1], run[:, None, :, 4], run[:, None, :, 2], boxes[both][None])
        for dim in range(run.shape[1]):
            if not place.shape:
                break
            # Of each piece the part along the source dim that this dim runs along, if any.
            side = parts[:, np.maximum(along[:, dim], 0)].transpose(1, 0, 2)
            first, end = turns(run[:, None, dim, 0], run[:, None, dim, 3], run[:, None, dim, 2], side)
            has = (along[:, dim] >= 0)[:, None]
            low[..., dim] = np.where(has, np.maximum(low[..., dim], first), low[..., dim])
            high[..., dim] = np.where(has, np.minimum(high[..., dim], end), high[..., dim])
        elements = np.maximum(0, high - low).prod(axis=-1)
        taken = (fixed[:, None] >= parts[None, :, :, 0]) & (fixed[:, None] < parts[None, :, :, 1])
        found[np.ix_(np.array(members), both)] = elements * (taken | (fixed < 0)[:, None]).all(axis=-1)
    return found


def turns(start: np.ndarray, step: np.ndarray, count: np.ndarray, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of t = 0..count-1 with index start + t * step, the range [low, high) whose indices are in the box."""
    low = np.maximum(0, -((start - box[..., 0]) // step))
    return low, np.minimum(count, (box[..., 1] - 1 - start) // step + 1)
