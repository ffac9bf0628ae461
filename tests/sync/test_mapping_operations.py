"""Every declared operation against plain numpy, alone and composed at random."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import SyncError
from lockstep.sync import operations as op
from lockstep.sync.mapping import Target, check_total, materialise, whole


def values(*shape: int, offset: int = 1) -> np.ndarray:
    """No two elements are equal and none is zero, so nothing that is misplaced can look right."""
    return (np.arange(np.prod(shape, dtype=int)) + offset).reshape(shape).astype(np.float32)


X, Y, Z = values(6, 8), values(6, 8, offset=1000), values(6, 8, offset=2000)
ARRAYS = {"x": X, "y": Y, "z": Z}
x, y, z = (whole(name, (6, 8), "float32") for name in "xyz")


def check(target: Target, expected: np.ndarray) -> None:
    assert target.shape == expected.shape
    np.testing.assert_array_equal(materialise(target, ARRAYS), expected, strict=True)


OPERATIONS: dict[str, tuple[Target, np.ndarray, str]] = {
    "identity": (x, X, ""),
    "rename": (op.rename(x, "other"), X, ""),
    "tie": (op.tie(x, "head"), X, "tied to x"),
    "transpose": (op.transpose(x), X.T, "transpose"),
    "transpose of three": (
        op.transpose(op.stack([x, y, z]), (1, 0, 2)),
        np.stack([X, Y, Z]).transpose(1, 0, 2),
        "transpose [1, 0, 2]",
    ),
    "fuse": (op.fuse([x, y, z], 1), np.concatenate([X, Y, Z], 1), "fuse x, y, z"),
    "fuse rows": (op.fuse([x, y], 0), np.concatenate([X, Y], 0), "fuse x, y"),
    "fuse by ranks": (
        op.fuse([x, y], 1, ranks=4),
        np.concatenate([np.concatenate([X[:, 2 * r : 2 * r + 2], Y[:, 2 * r : 2 * r + 2]], 1) for r in range(4)], 1),
        "fuse x, y by 4 ranks",
    ),
    "interleave": (op.interleave([x, y], 1), np.stack([X, Y], 2).reshape(6, 16), "interleave x, y"),
    "interleave rows": (op.interleave([x, y, z], 0), np.stack([X, Y, Z], 1).reshape(18, 8), "interleave x, y, z"),
    "deinterleave": (op.deinterleave(x, 1, 2)[1], X[:, 1::2], "deinterleave 1 of 2"),
    "split": (op.split(x, 1, [3, 5])[1], X[:, 3:], "split 3:8 of 8"),
    "stack": (op.stack([x, y]), np.stack([X, Y]), "stack 2"),
    "stack inside": (op.stack([x, y], 1), np.stack([X, Y], 1), "stack 2"),
    "unstack": (op.unstack(x)[4], X[4], "unstack 4 of 6"),
    "unstack columns": (op.unstack(x, 1)[7], X[:, 7], "unstack 7 of 8"),
    "unfold": (op.unfold(x, 1, 4), X.reshape(6, 4, 2), "unfold 4 heads"),
    "fold": (op.fold(op.stack([x, y], 1), 1), np.stack([X, Y], 1).reshape(6, 16), "fold 2 heads"),
    "pad": (op.pad(x, 0, 9, "vocab"), np.pad(X, ((0, 3), (0, 0))), "pad vocab 6 -> 9"),
    "pad heads": (
        op.pad_heads(x, 1, heads=4, head_dim=3),
        np.pad(X.reshape(6, 4, 2), ((0, 0), (0, 0), (0, 1))).reshape(6, 12),
        "pad head dim 2 -> 3 (4 heads)",
    ),
    "repeat-kv": (
        op.repeat_kv(x, 1, heads=2, times=3),
        np.repeat(X.reshape(6, 2, 4), 3, axis=1).reshape(6, 24),
        "repeat-kv x3",
    ),
    "cast": (op.cast(x, "bfloat16"), X.astype(ml_dtypes.bfloat16), "cast float32 -> bfloat16"),
    "cast to half": (op.cast(op.transpose(x), "float16"), X.T.astype(np.float16), "cast float32 -> float16"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_numpys(name: str) -> None:
    target, expected, words = OPERATIONS[name]
    check(target, expected)
    assert (target.operations or ("",))[-1] == words
    forms = dict.fromkeys({piece.source for piece in target.pieces}, ((6, 8), "float32"))
    # An operation that takes a part leaves the rest to other targets.
    partial = words.split(" ")[0] in ("split", "unstack", "deinterleave")
    unused = dict.fromkeys(forms, "the other parts") if partial else {}
    check_total(op.format_map("one", [target], unused=unused), forms, {target.path: (target.shape, target.dtype)})


def test_inverse_is_the_leaf_as_it_was() -> None:
    """Not only the same values: the same single piece, so that the planner sees that nothing needs to move."""
    assert op.fuse(op.split(x, 1, [3, 5]), 1).pieces == x.pieces
    assert op.stack(op.unstack(x)).pieces == x.pieces
    assert op.stack(op.unstack(x, 1), 1).pieces == x.pieces
    assert op.fold(op.unfold(x, 1, 4), 1).pieces == x.pieces
    assert op.transpose(op.transpose(x)).pieces == x.pieces
    check(op.interleave(op.deinterleave(x, 1, 4), 1), X)
    check(op.split(op.fuse([x, y], 0), 0, [6, 6])[1], Y)
    assert op.split(op.fuse([x, y], 0), 0, [6, 6])[1].pieces == y.pieces
    assert op.pad(x, 0, 6, "vocab") == x
    assert op.repeat_kv(x, 1, 2, 1) == x
    assert op.pad_heads(x, 1, 4, 2) == x
    assert op.cast(x, "float32") == x


def test_padding_survives_what_follows_it() -> None:
    padded = op.pad(x, 0, 9, "vocab")
    assert op.transpose(padded).filled and op.fuse([padded, padded], 1).filled and op.cast(padded, "bfloat16").filled
    check(op.fuse([padded, padded], 1), np.pad(np.concatenate([X, X], 1), ((0, 3), (0, 0))))
    check(op.split(op.transpose(padded), 1, [4, 5])[1], np.pad(X, ((0, 3), (0, 0))).T[:, 4:])


def test_a_slice_of_a_slice_with_steps() -> None:
    long = whole("x", (60,), "float32")
    arrays = {"x": np.arange(60, dtype=np.float32)}
    for first, second in ((2, 3), (3, 2), (4, 5), (6, 5), (1, 12)):
        for at in range(first):
            for then in range(second):
                taken = op.deinterleave(op.deinterleave(long, 0, first)[at], 0, second)[then]
                np.testing.assert_array_equal(materialise(taken, arrays), arrays["x"][at::first][then::second])
    shuffled = op.deinterleave(op.interleave([*op.split(long, 0, [20, 20, 20])], 0), 0, 4)[3]
    np.testing.assert_array_equal(
        materialise(shuffled, arrays), arrays["x"].reshape(3, 20).T.reshape(-1)[3::4], strict=True
    )


@st.composite
def compositions(draw: st.DrawFn) -> tuple[Target, np.ndarray]:
    """Operations applied at random to a target and to its array."""
    target, array = draw(st.sampled_from([(x, X), (y, Y), (op.stack([x, y, z], 1), np.stack([X, Y, Z], 1))]))
    for _ in range(draw(st.integers(1, 5))):
        dim = draw(st.integers(0, array.ndim - 1))
        size = array.shape[dim]
        kind = draw(
            st.sampled_from(["transpose", "fuse", "mix", "split", "stack", "unstack", "pad", "repeat", "every"])
        )
        if array.size > 4000 and kind in ("fuse", "mix", "stack", "repeat"):
            continue
        if kind == "transpose":
            order = draw(st.permutations(range(array.ndim)))
            target, array = op.transpose(target, order), array.transpose(order)
        elif kind == "fuse":
            ranks = draw(st.sampled_from([n for n in range(1, 5) if size % n == 0]))
            cut = [np.split(array, ranks, dim)] * 2
            target = op.fuse([target, target], dim, ranks=ranks)
            array = np.concatenate([parts[r] for r in range(ranks) for parts in cut], dim)
        elif kind == "mix":
            target = op.interleave([target, target], dim)
            array = np.repeat(array, 2, dim)
        elif kind == "split" and size > 1:
            cut = draw(st.integers(1, size - 1))
            target, array = op.split(target, dim, [cut, size - cut])[1], np.split(array, [cut], dim)[1]
        elif kind == "stack" and array.ndim < 4:
            target, array = op.stack([target, target], dim), np.stack([array, array], dim)
        elif kind == "unstack" and array.ndim > 1:
            at = draw(st.integers(0, size - 1))
            target, array = op.unstack(target, dim)[at], array.take(at, dim)
        elif kind == "pad":
            target = op.pad(target, dim, size + 3, "rows")
            array = np.pad(array, [(0, 3 if d == dim else 0) for d in range(array.ndim)])
        elif kind == "repeat":
            heads = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            cut = [part for part in np.split(array, heads, dim) for _ in range(2)]
            target, array = op.repeat_kv(target, dim, heads, 2), np.concatenate(cut, dim)
        elif kind == "every":
            count = draw(st.sampled_from([n for n in range(1, 6) if size % n == 0]))
            at = draw(st.integers(0, count - 1))
            index = [slice(None)] * array.ndim
            index[dim] = slice(at, None, count)
            target, array = op.deinterleave(target, dim, count)[at], array[tuple(index)]
    return target, array


@settings(max_examples=150)
@given(compositions())
def test_composition_is_numpys(made: tuple[Target, np.ndarray]) -> None:
    target, array = made
    check(target, array)
    forms = dict.fromkeys({piece.source for piece in target.pieces}, ((6, 8), "float32"))
    unused = {}
    for name in forms:  # listed exactly where some element is really dropped
        if not np.isin(ARRAYS[name], array).all():
            unused[name] = "dropped on purpose"
    check_total(op.format_map("made", [target], unused=unused), forms, {target.path: (target.shape, target.dtype)})


MISFITS: dict[str, tuple[Callable[[], object], str]] = {
    "fuse of other rows": (lambda: op.fuse([x, whole("k", (5, 8), "float32")], 1), r"x is float32 \(6, 8\), k is"),
    "fuse of another dtype": (lambda: op.fuse([x, whole("k", (6, 8), "bfloat16")], 1), "k is bfloat16"),
    "fuse of another rank": (lambda: op.fuse([x, whole("k", (8,), "float32")], 0), r"k is float32 \(8,\)"),
    "fuse of nothing": (lambda: op.fuse([], 0), "fuse: no leaves"),
    "fuse by ranks that do not divide": (lambda: op.fuse([x, y], 1, ranks=3), "not a multiple of 3 tensor ranks"),
    "fuse by no ranks": (lambda: op.fuse([x, y], 1, ranks=0), "0 tensor ranks"),
    "interleave of other sizes": (lambda: op.interleave([x, whole("k", (6, 4), "float32")], 1), "interleave: x is"),
    "deinterleave that does not divide": (lambda: op.deinterleave(x, 1, 3), "multiple of 3"),
    "split that does not add up": (lambda: op.split(x, 1, [3, 4]), r"cannot split dim 1 into \[3, 4\] \(sum 7\)"),
    "split with a negative part": (lambda: op.split(x, 1, [9, -1]), "cannot split"),
    "stack of other shapes": (lambda: op.stack([x, whole("k", (6, 4), "float32")]), "stack: x is"),
    "no such dim": (lambda: op.unstack(x, 2), r"x \(6, 8\) has no dim 2"),
    "pad to less": (lambda: op.pad(x, 0, 5, "vocab"), "cannot pad vocab .dim 0. to 5, which is less"),
    "pad heads to less": (lambda: op.pad_heads(x, 1, 4, 1), "cannot pad head dim"),
    "heads that do not divide": (lambda: op.repeat_kv(x, 1, 3, 2), "repeat-kv wants dim 1 to be a multiple of 3"),
    "repeat no times": (lambda: op.repeat_kv(x, 1, 2, 0), "repeat-kv x0"),
    "no order": (lambda: op.transpose(x, (0, 0)), "no order of the dims"),
    "cast twice": (lambda: op.cast(op.cast(x, "bfloat16"), "float32"), "cast once"),
    "fold of one dim": (lambda: op.fold(x, 1), "no dim 2"),
    "two targets of one name": (lambda: op.format_map("m", [x, x]), "two targets are called 'x'"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_an_error(name: str) -> None:
    act, message = MISFITS[name]
    with pytest.raises(SyncError, match=message):
        act()
