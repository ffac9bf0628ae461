"""The format map: which parts of which source leaves make up each destination leaf.

Every declared operation - rename, transpose, fuse, split, stack, pad, repeat-kv, interleave, cast - comes down to
pieces: a rectangular (possibly strided) part of one source leaf, dims possibly permuted, is one part of one destination
leaf. What no piece writes is filled with zeros, and only where a rule says so. Values are never computed, so a digest
of a destination leaf can be taken from the source. `operations` has the builders, `formats` the tables.

Imports no jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (teaches numpy the names `bfloat16` and `float8_*`)
import numpy as np

from lockstep.errors import SyncError

Form = tuple[tuple[int, ...], str]
"""Shape and dtype name of one leaf."""

_SHOWN = 5  # names in a message; the rest are counted


@dataclass(frozen=True)
class Run:
    """One dim of a piece: for t in 0..count-1, index `source + t * source_step` there is `target + t * target_step`
    here."""

    source: int
    target: int
    count: int
    source_step: int = 1
    target_step: int = 1


@dataclass(frozen=True)
class Piece:
    """A part of one source leaf that is a part of one target leaf.

    source: path of the source leaf. dims: per target dim, the source dim that it runs along (None: a dim that the
    source lacks, as in a stack; its run has count 1 and only `target` means something). runs: per target dim.
    fixed: (source dim, index) for source dims that no target dim runs along (taking one expert out of a stack).
    """

    source: str
    dims: tuple[int | None, ...]
    runs: tuple[Run, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(run.count for run in self.runs)


@dataclass(frozen=True)
class Target:
    """One destination leaf. pieces: disjoint, in any order. filled: whether what they leave out is zero (else they
    must cover the leaf). operations: names of the declared operations, in words, for people and receipts (`transpose`,
    `fuse q, k, v`, `repeat-kv x2`, `pad vocab 151936 -> 152064`, `cast float32 -> bfloat16`); empty for identity.
    A source of another dtype needs its `cast` here, or `check_total` refuses the map."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    filled: bool = False
    operations: tuple[str, ...] = ()


@dataclass(frozen=True)
class FormatMap:
    """The whole table, total on both sides: every element of every source leaf is used by a piece, or its leaf is
    listed in `unused` with the reason (a leaf of which only some elements are dropped is listed too); every destination
    leaf is a target, or listed in `unchanged` with the reason (frozen base weights, say)."""

    name: str
    targets: Mapping[str, Target]
    unused: Mapping[str, str]
    unchanged: Mapping[str, str]


def cast_operation(source: str, target: str) -> str:
    """The words by which a target declares that its dtype is not its source's."""
    return f"cast {source} -> {target}"


def whole(path: str, shape: tuple[int, ...], dtype: str) -> Target:
    """A source leaf as it is, under its own name: what the builders in `operations` start from."""
    runs = tuple(Run(0, 0, size) for size in shape)
    return Target(path, shape, dtype, (Piece(path, tuple(range(len(shape))), runs),) if math.prod(shape) else ())


def identity_map(
    source: Mapping[str, Form],
    destination: Mapping[str, Form],
    *,
    unchanged: Mapping[str, str] | None = None,
    cast: bool = False,
) -> FormatMap:
    """Equal names, equal shapes. unchanged: destination leaves that no sync writes, with the reason. cast: whether
    another dtype is a declared cast rather than an error.

    Raises SyncError naming leaf, both shapes or dtypes and the remedy.
    """
    unchanged = unchanged or {}
    targets: dict[str, Target] = {}
    wrong: list[str] = []
    for path, (shape, dtype) in destination.items():
        if path in unchanged:
            continue
        if path not in source:
            wrong.append(f"destination leaf {path} {_form((shape, dtype))} has no source leaf of its name")
            continue
        from_shape, from_dtype = source[path]
        if tuple(from_shape) != tuple(shape):
            wrong.append(
                f"{path} is {_form(source[path])} at the source and {_form((shape, dtype))} at the destination; "
                f"equal shapes are needed, or a format map that says how one becomes the other"
            )
        elif from_dtype != dtype and not cast:
            wrong.append(
                f"{path} is {from_dtype} at the source and {dtype} at the destination; declare the cast (cast=True) "
                f"or give both sides one dtype"
            )
        else:
            operations = () if from_dtype == dtype else (cast_operation(from_dtype, dtype),)
            base = whole(path, tuple(shape), dtype)
            targets[path] = Target(path, base.shape, dtype, base.pieces, operations=operations)
    wrong += [
        f"source leaf {path} {_form(source[path])} has no destination" for path in source if path not in destination
    ]
    if wrong:
        raise SyncError(f"sync: the leaves of both sides do not correspond: {_some(wrong)}")
    return FormatMap("identity", targets, {}, dict(unchanged))


def materialise(target: Target, source: Mapping[str, np.ndarray]) -> np.ndarray:
    """The destination leaf, whole, from whole source leaves: [*target.shape] of target.dtype, in a buffer of its own.

    Raises SyncError if a source leaf is missing or does not have the dims that the pieces read.
    """
    dtype = np.dtype(target.dtype)
    if not target.filled and sum(piece.size for piece in target.pieces) != math.prod(target.shape):
        raise SyncError(f"sync: the pieces of {target.path} {target.shape} leave elements out and no rule fills them")
    out = np.zeros(target.shape, dtype)
    for piece in target.pieces:
        if piece.source not in source:
            raise SyncError(f"sync: {target.path} is made of {piece.source}, which the source does not hold")
        wrong = piece_problem(piece, target.shape, source[piece.source].shape)
        if wrong:
            raise SyncError(f"sync: {target.path} <- {piece.source}: {wrong}")
        read, write = piece_index(piece)
        order = [dim for dim in piece.dims if dim is not None]
        order = [sorted(order).index(dim) for dim in order]  # fixed dims are gone after reading
        part = source[piece.source][read].transpose(order)
        out[write] = part.reshape([run.count for run in piece.runs])
    return out


def piece_index(piece: Piece) -> tuple[tuple[int | slice, ...], tuple[slice, ...]]:
    """Where a piece is read (per source dim, its own order) and written (per target dim), to index numpy arrays."""
    read: dict[int, int | slice] = dict(piece.fixed)
    write = []
    for dim, run in zip(piece.dims, piece.runs, strict=True):
        if dim is not None:
            read[dim] = slice(run.source, run.source + (run.count - 1) * run.source_step + 1, run.source_step)
        write.append(slice(run.target, run.target + (run.count - 1) * run.target_step + 1, run.target_step))
    return tuple(read[dim] for dim in sorted(read)), tuple(write)


def piece_problem(piece: Piece, shape: tuple[int, ...], source: tuple[int, ...]) -> str:
    """What is wrong with a piece of a target of `shape` that reads a leaf of shape `source`; empty when it fits."""
    if not len(piece.dims) == len(piece.runs) == len(shape):
        return f"a piece has {len(piece.dims)} dims and {len(piece.runs)} runs, the leaf's shape is {shape}"
    read = [dim for dim in piece.dims if dim is not None] + [dim for dim, _ in piece.fixed]
    if sorted(read) != list(range(len(source))):
        return f"a piece reads the dims {read} of a leaf of shape {source}; each must be read once"
    for taken, index in piece.fixed:
        if not 0 <= index < source[taken]:
            return f"a piece takes index {index} of dim {taken}, the source's shape is {source}"
    for at, (dim, run) in enumerate(zip(piece.dims, piece.runs, strict=True)):
        if run.count < 1 or run.source_step < 1 or run.target_step < 1 or (dim is None and run.count != 1):
            return f"a piece has the run {run} along dim {at}"
        if run.target < 0 or run.target + (run.count - 1) * run.target_step >= shape[at]:
            return f"a piece writes beyond dim {at} of shape {shape}: {run}"
        if dim is not None and (run.source < 0 or run.source + (run.count - 1) * run.source_step >= source[dim]):
            return f"a piece reads beyond dim {dim} of the source's shape {source}: {run}"
    return ""


def check_total(mapping: FormatMap, source: Mapping[str, Form], destination: Mapping[str, Form]) -> None:
    """Raise SyncError unless the map is total on both sides: every destination leaf has one target of its very shape
    and dtype (or is listed as unchanged), written by pieces that are in bounds, disjoint and covering (or filled);
    every element of every source leaf is used (or its leaf is listed as unused); dtypes differ only by declared casts.

    The message names the leaves, both shapes and the remedy.
    """
    wrong = _name_problems(mapping, source, destination)
    if not wrong:
        checked: dict[object, str] = {}
        for target in mapping.targets.values():
            wrong += _target_problems(target, source, destination[target.path], checked)
    if not wrong:
        wrong = _source_problems(mapping, source)
    if wrong:
        raise SyncError(f"sync: the format map {mapping.name!r} does not fit: {_some(wrong)}")


def _name_problems(mapping: FormatMap, source: Mapping[str, Form], destination: Mapping[str, Form]) -> list[str]:
    wrong = []
    for path, target in mapping.targets.items():
        if target.path != path:
            wrong.append(f"the target listed as {path} calls itself {target.path}")
        if path in mapping.unchanged:
            wrong.append(f"{path} is a target and listed as unchanged; it can be one of the two")
    for path, form in destination.items():
        if path not in mapping.targets and path not in mapping.unchanged:
            wrong.append(
                f"nothing writes the destination leaf {path} {_form(form)}; give it a target, or list it as unchanged "
                f"with the reason"
            )
    wrong += [f"the target {path} is no leaf of the destination" for path in mapping.targets if path not in destination]
    wrong += [
        f"the unchanged {path} is no leaf of the destination" for path in mapping.unchanged if path not in destination
    ]
    wrong += [f"the unused leaf {path} is no leaf of the source" for path in mapping.unused if path not in source]
    used = {piece.source: path for path, target in mapping.targets.items() for piece in target.pieces}
    wrong += [f"{used[path]} reads {path}, which is no leaf of the source" for path in used if path not in source]
    for path, form in source.items():
        if path not in used and path not in mapping.unused and _size(form):
            wrong.append(
                f"nothing uses the source leaf {path} {_form(form)}; give it a place, or list it as unused with the "
                f"reason"
            )
    return wrong


def _target_problems(
    target: Target, source: Mapping[str, Form], form: Form, checked: dict[object, str]
) -> Iterable[str]:
    """checked: what was found for pieces that lie alike in leaves of one shape (layers repeat)."""
    if (tuple(form[0]), form[1]) != (target.shape, target.dtype):
        yield (
            f"{target.path} becomes {_form((target.shape, target.dtype))} by [{', '.join(target.operations)}], the "
            f"destination has {_form(form)}; change the map's operations or the destination's shape"
        )
        return
    for piece in target.pieces:
        shape, dtype = source[piece.source]
        if wrong := piece_problem(piece, target.shape, tuple(shape)):
            yield f"{target.path} {target.shape} <- {piece.source} {tuple(shape)}: {wrong}"
            return
        if dtype != target.dtype and cast_operation(dtype, target.dtype) not in target.operations:
            yield (
                f"{target.path} is {target.dtype} and its source {piece.source} is {dtype}; declare "
                f"{cast_operation(dtype, target.dtype)!r} or give both sides one dtype"
            )
            return
    key = (target.shape, target.filled, tuple(piece.runs for piece in target.pieces))
    if key not in checked:
        parts = [tuple((run.target, run.count, run.target_step) for run in piece.runs) for piece in target.pieces]
        checked[key] = _cover_problem(target.shape, parts, once=True, gaps=target.filled)
    if checked[key]:
        names = list(dict.fromkeys(piece.source for piece in target.pieces))
        remedy = "" if "twice" in checked[key] else "; add what is missing, or declare the padding"
        yield f"{target.path} {target.shape} made of {_some(names)}: {checked[key]}{remedy}"


def _source_problems(mapping: FormatMap, source: Mapping[str, Form]) -> list[str]:
    """Source leaves of which elements are used nowhere, though not listed; and such as are listed and wholly used."""
    parts: dict[str, dict[tuple[Strided, ...], None]] = {path: {} for path in source}
    for target in mapping.targets.values():
        for piece in target.pieces:
            read = {dim: (index, 1, 1) for dim, index in piece.fixed}
            for along, run in zip(piece.dims, piece.runs, strict=True):
                if along is not None:
                    read[along] = (run.source, run.count, run.source_step)
            parts[piece.source][tuple(read[dim] for dim in range(len(read)))] = None
    wrong = []
    checked: dict[object, str] = {}
    for path, form in source.items():
        shape = tuple(form[0])
        key = (shape, tuple(parts[path]))
        if key not in checked:
            checked[key] = _cover_problem(shape, list(parts[path]), once=False, gaps=False)
        gap = checked[key]
        if gap and path not in mapping.unused:
            wrong.append(f"source leaf {path} {shape}: {gap}; give it a place, or list the leaf as unused")
        elif not gap and path in mapping.unused and _size(form):
            wrong.append(f"source leaf {path} {shape} is listed as unused, yet all of it is used")
    return wrong


Strided = tuple[int, int, int]  # start, count, step


def _cover_problem(shape: tuple[int, ...], parts: list[tuple[Strided, ...]], *, once: bool, gaps: bool) -> str:
    """How strided boxes in bounds fail to cover an array of `shape`; empty when they do. once: none may overlap.
    gaps: what they leave out is fine.

    Per dim, indices that the same boxes reach are one class, so that the painted grid has as many cells as there are
    different things to see, not as the leaf has elements.
    """
    if parts == [tuple((0, size, 1) for size in shape)]:
        return ""
    axes = [_classes(size, [part[dim] for part in parts]) for dim, size in enumerate(shape)]
    grid = np.zeros([len(first) for first, _ in axes], np.int32)
    for at, _ in enumerate(parts):
        grid[np.ix_(*(np.flatnonzero(member[at]) for _, member in axes))] += 1
    for bad, words in ((grid == 0) & (not gaps), "written or read by no piece"), ((grid > 1) & once, "written twice"):
        if bad.any():
            cell = np.argwhere(bad)[0]
            index = tuple(int(first[i]) for (first, _), i in zip(axes, cell, strict=True))
            return f"element {index} is {words}"
    return ""


def _classes(size: int, parts: list[Strided]) -> tuple[np.ndarray, np.ndarray]:
    """Classes of the indices 0..size-1 that no part tells apart: first index of each [classes], and [parts, classes]
    whether a part has it. A class is a residue (by the common multiple of the steps) within a segment between ends."""
    modulus = math.lcm(*(step for _, count, step in parts if count > 1))
    ends = {0, size}
    for start, count, step in parts:
        ends |= {start, start + (count - 1) * step + 1}
    edges = np.array(sorted(ends))
    first = (edges[:-1, None] + np.arange(modulus)).reshape(-1)
    first = first[first < np.repeat(edges[1:], modulus)]
    member = np.zeros((len(parts), len(first)), bool)
    for at, (start, count, step) in enumerate(parts):
        inside = (first >= start) & (first <= start + (count - 1) * step)
        member[at] = inside & ((first - start) % step == 0)
    return first, member


def _size(form: Form) -> int:
    return math.prod(int(size) for size in form[0])


def _form(form: Form) -> str:
    return f"{form[1]}[{','.join(map(str, form[0]))}]"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more
