"""The declared operations of a format map: functions from targets to targets, composable in any order.

    q, k, v = (whole(f"layers.0.{n}", shapes[n], "float32") for n in "qkv")
    k, v = (repeat_kv(t, dim=1, heads=2, times=2) for t in (k, v))
    rename(cast(fuse([q, k, v], dim=1, ranks=4), "bfloat16"), "layers.0.qkv_proj")

Each one rearranges pieces and adds its words to `operations`; none computes a value. What does not fit raises SyncError
with the shapes: nothing is repeated, cut or padded because the numbers happen to divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lockstep.errors import SyncError
from lockstep.sync.mapping import FormatMap, Piece, Run, Target, cast_operation


def format_map(
    name: str,
    targets: Iterable[Target],
    *,
    unused: Mapping[str, str] | None = None,
    unchanged: Mapping[str, str] | None = None,
) -> FormatMap:
    """Targets by their paths. Raises SyncError for a path that two of them have."""
    table: dict[str, Target] = {}
    for target in targets:
        if target.path in table:
            raise SyncError(f"format map {name!r}: two targets are called {target.path!r}; rename one")
        table[target.path] = target
    return FormatMap(name, table, dict(unused or {}), dict(unchanged or {}))


def rename(target: Target, path: str) -> Target:
    """Under the name that the destination has for it."""
    return replace(target, path=path)


def tie(target: Target, path: str) -> Target:
    """A copy under a second name, as a head that the destination keeps beside the embedding it is tied to."""
    return replace(target, path=path, operations=(*target.operations, f"tied to {_short(target)}"))


def cast(target: Target, dtype: str) -> Target:
    """To another dtype, rounding to nearest even; the same dtype is no operation. A second cast would round twice and
    is an error."""
    if dtype == target.dtype:
        return target
    if any(words.startswith("cast ") for words in target.operations):
        raise SyncError(f"{target.path}: already {target.operations[-1]!r}; cast once, from the source's dtype")
    words = cast_operation(target.dtype, dtype)
    return replace(target, dtype=dtype, operations=(*target.operations, words))


def transpose(target: Target, order: Sequence[int] | None = None) -> Target:
    """Dims in `order` (None: reversed), as numpy's."""
    dims = tuple(range(len(target.shape)))[::-1] if order is None else tuple(order)
    if sorted(dims) != list(range(len(target.shape))):
        raise SyncError(f"{target.path}: {dims} is no order of the dims of {target.shape}")
    if dims == tuple(range(len(dims))):
        return target
    pieces = (
        replace(piece, dims=tuple(piece.dims[d] for d in dims), runs=tuple(piece.runs[d] for d in dims))
        for piece in target.pieces
    )
    words = "transpose" if dims == tuple(range(len(dims)))[::-1] else f"transpose {list(dims)}"
    return _made(target, tuple(target.shape[d] for d in dims), pieces, words)


def fuse(targets: Sequence[Target], dim: int, *, ranks: int = 1) -> Target:
    """Concatenated along `dim`. ranks: per tensor rank, as engines that cut a fused leaf once want it: for each rank
    its part of the first, its part of the second, and so on."""
    _same(targets, dim, "fuse")
    names = ", ".join(_short(target) for target in targets)
    if ranks == 1:
        return _joined(targets, dim, f"fuse {names}")
    for target in targets:
        if ranks < 1 or target.shape[dim] % ranks:
            raise SyncError(
                f"fuse {names}: {_short(target)} has {target.shape[dim]} along dim {dim}, not a multiple of {ranks} "
                f"tensor ranks; use fewer ranks, or declare repeat_kv or a padding first"
            )
    sliced = [_even(target, dim, ranks) for target in targets]
    return _joined([parts[rank] for rank in range(ranks) for parts in sliced], dim, f"fuse {names} by {ranks} ranks")


def interleave(targets: Sequence[Target], dim: int) -> Target:
    """Elements along `dim` in turn: index j of target i is index j * len(targets) + i."""
    _same(targets, dim, "interleave", equal=True)
    count, base = len(targets), targets[0]
    pieces = []
    for at, target in enumerate(targets):
        for piece in target.pieces:
            run = piece.runs[dim]
            run = replace(run, target=run.target * count + at, target_step=run.target_step * count)
            pieces.append(_with_run(piece, dim, run))
    shape = (*base.shape[:dim], base.shape[dim] * count, *base.shape[dim + 1 :])
    words = f"interleave {', '.join(_short(target) for target in targets)}"
    return _made(_merged(targets), shape, pieces, words)


def deinterleave(target: Target, dim: int, count: int) -> tuple[Target, ...]:
    """The inverse of `interleave`: every count-th element along `dim`, from 0, 1, ..."""
    _divides(target, dim, count, "deinterleave")
    size = target.shape[dim]
    return tuple(_cut(target, dim, range(at, size, count), f"deinterleave {at} of {count}") for at in range(count))


def split(target: Target, dim: int, sizes: Sequence[int]) -> tuple[Target, ...]:
    """Consecutive parts along `dim`; `sizes` must add up to it."""
    _check_dim(target, dim)
    if sum(sizes) != target.shape[dim] or min(sizes, default=0) < 0:
        raise SyncError(f"{target.path} {target.shape}: cannot split dim {dim} into {list(sizes)} (sum {sum(sizes)})")
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(
        _cut(target, dim, range(stop - size, stop), f"split {stop - size}:{stop} of {target.shape[dim]}")
        for size, stop in zip(sizes, stops, strict=True)
    )


def stack(targets: Sequence[Target], dim: int = 0) -> Target:
    """One new dim, of as many as there are targets (experts of a layer, say)."""
    _same(targets, None, "stack")
    pieces = [
        replace(
            piece,
            dims=(*piece.dims[:dim], None, *piece.dims[dim:]),
            runs=(*piece.runs[:dim], Run(0, at, 1), *piece.runs[dim:]),
        )
        for at, target in enumerate(targets)
        for piece in target.pieces
    ]
    base = _merged(targets)
    return _made(base, (*base.shape[:dim], len(targets), *base.shape[dim:]), pieces, f"stack {len(targets)}")


def unstack(target: Target, dim: int = 0) -> tuple[Target, ...]:
    """The inverse of `stack`: one target per index along `dim`."""
    _check_dim(target, dim)
    return tuple(_taken(target, dim, at, f"unstack {at} of {target.shape[dim]}") for at in range(target.shape[dim]))


def unfold(target: Target, dim: int, heads: int) -> Target:
    """`dim` of heads * width as two dims, heads and width."""
    _divides(target, dim, heads, "unfold")
    return replace(stack(_even(target, dim, heads), dim), operations=(*target.operations, f"unfold {heads} heads"))


def fold(target: Target, dim: int) -> Target:
    """The inverse of `unfold`: dims `dim` and `dim + 1` as one."""
    _check_dim(target, dim + 1)
    if not target.shape[dim]:
        raise SyncError(f"{target.path} {target.shape}: dim {dim} has no heads to fold")
    parts = [_taken(target, dim, at, "") for at in range(target.shape[dim])]
    return replace(_joined(parts, dim, ""), operations=(*target.operations, f"fold {target.shape[dim]} heads"))


def pad(target: Target, dim: int, size: int, what: str) -> Target:
    """Zeros behind, up to `size` along `dim`. what: the rule's name (`vocab`), for people."""
    _check_dim(target, dim)
    if size < target.shape[dim]:
        raise SyncError(f"{target.path} {target.shape}: cannot pad {what} (dim {dim}) to {size}, which is less")
    if size == target.shape[dim]:
        return target
    shape = (*target.shape[:dim], size, *target.shape[dim + 1 :])
    return replace(_made(target, shape, target.pieces, f"pad {what} {target.shape[dim]} -> {size}"), filled=True)


def pad_heads(target: Target, dim: int, heads: int, head_dim: int) -> Target:
    """Zeros behind each of `heads` heads along `dim`, so that each is `head_dim` wide."""
    _divides(target, dim, heads, "pad head dim")
    width = target.shape[dim] // heads
    if width == head_dim:
        return target
    parts = [pad(part, dim, head_dim, "head dim") for part in _even(target, dim, heads)]
    words = f"pad head dim {width} -> {head_dim} ({heads} heads)"
    return replace(_joined(parts, dim, ""), operations=(*target.operations, words))


def repeat_kv(target: Target, dim: int, heads: int, times: int) -> Target:
    """Each of `heads` heads along `dim` `times` times in place: h0 h0 h1 h1, for tensor ranks that share a KV head."""
    if times < 1:
        raise SyncError(f"{target.path}: repeat-kv x{times}; expected at least 1")
    _divides(target, dim, heads, "repeat-kv")
    if times == 1:
        return target
    parts = [part for part in _even(target, dim, heads) for _ in range(times)]
    return replace(_joined(parts, dim, ""), operations=(*target.operations, f"repeat-kv x{times}"))


def _made(base: Target, shape: tuple[int, ...], pieces: Iterable[Piece], words: str) -> Target:
    made = _continuous([_canonical(piece) for piece in pieces if all(run.count for run in piece.runs)])
    operations = (*base.operations, words) if words else base.operations
    return Target(base.path, shape, base.dtype, made, base.filled, operations)


def _merged(targets: Sequence[Target]) -> Target:
    """The first of `targets`, with the operations that any of them had."""
    path = targets[0].path if len({t.path for t in targets}) == 1 else "+".join(t.path for t in targets[:4])
    operations = tuple(dict.fromkeys(words for target in targets for words in target.operations))
    return replace(targets[0], path=path, operations=operations, filled=any(target.filled for target in targets))


def _joined(targets: Sequence[Target], dim: int, words: str) -> Target:
    base, pieces, size = _merged(targets), [], 0
    for target in targets:
        for piece in target.pieces:
            run = piece.runs[dim]
            pieces.append(_with_run(piece, dim, replace(run, target=run.target + size)))
        size += target.shape[dim]
    return _made(base, (*base.shape[:dim], size, *base.shape[dim + 1 :]), pieces, words)


def _even(target: Target, dim: int, count: int) -> list[Target]:
    width = target.shape[dim] // count
    return [_cut(target, dim, range(at * width, (at + 1) * width), "") for at in range(count)]


def _taken(target: Target, dim: int, at: int, words: str) -> Target:
    cut = _cut(target, dim, range(at, at + 1), words)
    pieces = []
    for piece in cut.pieces:
        along, run = piece.dims[dim], piece.runs[dim]
        pieces.append(
            Piece(
                piece.source,
                piece.dims[:dim] + piece.dims[dim + 1 :],
                piece.runs[:dim] + piece.runs[dim + 1 :],
                piece.fixed if along is None else tuple(sorted((*piece.fixed, (along, run.source)))),
            )
        )
    return _made(cut, cut.shape[:dim] + cut.shape[dim + 1 :], pieces, "")


def _cut(target: Target, dim: int, kept: range, words: str) -> Target:
    """The indices `kept` along `dim`."""
    pieces = []
    for piece in target.pieces:
        run = _within(piece.runs[dim], kept)
        if run is not None:
            pieces.append(_with_run(piece, dim, run))
    return _made(target, (*target.shape[:dim], len(kept), *target.shape[dim + 1 :]), pieces, words)


def _within(run: Run, kept: range) -> Run | None:
    """The part of a run whose targets are in `kept`, counted by their place in it."""
    common = math.gcd(run.target_step, kept.step)
    if (kept.start - run.target) % common:
        return None
    # run.target + t * run.target_step is in kept's progression for t = first, first + every, ...
    every = kept.step // common
    first = (kept.start - run.target) // common * pow(run.target_step // common, -1, every) % every
    low = max(0, -(-(kept.start - run.target) // run.target_step))
    first += -(-(max(low, first) - first) // every) * every
    last = min(run.count - 1, (kept.stop - 1 - run.target) // run.target_step)
    if first > last:
        return None
    count = (last - first) // every + 1
    at = (run.target + first * run.target_step - kept.start) // kept.step
    step = run.target_step * every // kept.step
    return Run(run.source + first * run.source_step, at, count, run.source_step * every, step)


def _with_run(piece: Piece, dim: int, run: Run) -> Piece:
    return replace(piece, runs=(*piece.runs[:dim], run, *piece.runs[dim + 1 :]))


def _canonical(piece: Piece) -> Piece:
    """One way to write one thing: steps of single indices are 1, and a target dim without a source dim takes up a
    source dim that is fixed (so that stacking what was unstacked is the whole again)."""
    dims, fixed = list(piece.dims), list(piece.fixed)
    runs = [run if run.count > 1 else Run(run.source, run.target, 1) for run in piece.runs]
    for at, along in enumerate(dims):
        if along is None:
            runs[at] = Run(0, runs[at].target, 1)
            if fixed:
                dims[at], index = fixed.pop(0)
                runs[at] = Run(index, runs[at].target, 1)
    return Piece(piece.source, tuple(dims), tuple(runs), tuple(fixed))


def _continuous(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Pieces that continue one another along one dim as one piece."""
    for dim in range(len(pieces[0].runs) if pieces else 0):
        groups: dict[object, list[Piece]] = {}
        for piece in pieces:
            key = (piece.source, piece.dims, piece.fixed, piece.runs[:dim], piece.runs[dim + 1 :])
            groups.setdefault(key, []).append(piece)
        if len(groups) == len(pieces):
            continue
        pieces = []
        for group in groups.values():
            group.sort(key=lambda piece: piece.runs[dim].target)
            kept = group[:1]
            for piece in group[1:]:
                longer = _continued(kept[-1].runs[dim], piece.runs[dim]) if piece.dims[dim] is not None else None
                if longer is None:
                    kept.append(piece)
                else:
                    kept[-1] = _with_run(kept[-1], dim, longer)
            pieces += kept
    return tuple(pieces)


def _continued(run: Run, other: Run) -> Run | None:
    """Both as one run, if `other` goes on where `run` ends, in the same steps."""
    steps = {(r.source_step, r.target_step) for r in (run, other) if r.count > 1} or {(1, 1)}
    if len(steps) > 1:
        return None
    ((source, target),) = steps
    if (other.source, other.target) != (run.source + run.count * source, run.target + run.count * target):
        return None
    return Run(run.source, run.target, run.count + other.count, source, target)


def _same(targets: Sequence[Target], dim: int | None, what: str, *, equal: bool = False) -> None:
    """Raise SyncError unless shapes agree (but for `dim`) and dtypes do."""
    if not targets:
        raise SyncError(f"{what}: no leaves")
    for target in targets:
        if dim is not None:
            _check_dim(target, dim)
    first = targets[0]
    for target in targets[1:]:
        shapes = [list(t.shape) for t in (first, target)]
        if dim is not None and not equal and len(shapes[0]) == len(shapes[1]):
            shapes[1][dim] = shapes[0][dim]
        if shapes[0] != shapes[1] or first.dtype != target.dtype:
            raise SyncError(
                f"{what}: {first.path} is {first.dtype} {first.shape}, {target.path} is {target.dtype} {target.shape}; "
                f"declare the operation that makes them agree first"
            )


def _divides(target: Target, dim: int, count: int, what: str) -> None:
    _check_dim(target, dim)
    if count < 1 or target.shape[dim] % count:
        raise SyncError(f"{target.path} {target.shape}: {what} wants dim {dim} to be a multiple of {count}")


def _check_dim(target: Target, dim: int) -> None:
    if not 0 <= dim < len(target.shape):
        raise SyncError(f"{target.path} {target.shape} has no dim {dim}")


def _short(target: Target) -> str:
    """The last part of a leaf's name that says something."""
    return target.path.removesuffix(".weight").rsplit(".", 1)[-1]
