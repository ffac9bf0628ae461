"""Identity, totality on both sides, and the numpy oracle: what fits passes, every misfit is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from lockstep.errors import SyncError
from lockstep.sync import operations as op
from lockstep.sync.mapping import (
    Form,
    FormatMap,
    Piece,
    Run,
    Target,
    check_total,
    identity_map,
    materialise,
    whole,
)

FORMS: dict[str, Form] = {"embed": ((6, 4), "float32"), "q": ((4, 8), "float32"), "norm": ((4,), "bfloat16")}


def test_identity_reads_every_leaf_whole() -> None:
    mapping = identity_map(FORMS, FORMS)
    check_total(mapping, FORMS, FORMS)
    assert set(mapping.targets) == set(FORMS)
    assert all(not target.operations and not target.filled for target in mapping.targets.values())
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    made = materialise(mapping.targets["embed"], {"embed": array})
    np.testing.assert_array_equal(made, array, strict=True)
    assert not np.shares_memory(made, array)


def test_identity_casts_only_when_declared() -> None:
    halves = {path: (shape, "bfloat16") for path, (shape, _) in FORMS.items()}
    mapping = identity_map(FORMS, halves, cast=True)
    check_total(mapping, FORMS, halves)
    assert mapping.targets["q"].operations == ("cast float32 -> bfloat16",)
    assert mapping.targets["norm"].operations == ()
    with pytest.raises(SyncError, match=r"embed is float32 at the source and bfloat16 at the destination.*cast=True"):
        identity_map(FORMS, halves)


def test_cast_rounds_to_nearest_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.4e38, np.nan, -0.0, 1e-40], np.float32)
    made = materialise(op.cast(whole("w", (7,), "float32"), "bfloat16"), {"w": values})
    expected = np.array([1.0, 1 + 2**-6, -1.0, np.inf, np.nan, -0.0, 1e-40], np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(made.view(np.uint16), expected.view(np.uint16))


def test_identity_names_what_does_not_correspond() -> None:
    with pytest.raises(SyncError, match=r"q is float32\[4,8\] at the source and float32\[8,4\] at the destination"):
        identity_map(FORMS, FORMS | {"q": ((8, 4), "float32")})
    with pytest.raises(SyncError, match=r"destination leaf head float32\[6,4\] has no source leaf"):
        identity_map(FORMS, FORMS | {"head": ((6, 4), "float32")})
    with pytest.raises(SyncError, match=r"source leaf norm bfloat16\[4\] has no destination"):
        identity_map(FORMS, {path: FORMS[path] for path in ("embed", "q")})


def test_frozen_leaves_are_listed_not_forgotten() -> None:
    adapter = {"q": FORMS["q"]}
    mapping = identity_map(adapter, FORMS, unchanged={"embed": "base weights", "norm": "base weights"})
    check_total(mapping, adapter, FORMS)
    with pytest.raises(SyncError, match="nothing writes the destination leaf embed"):
        check_total(replace(mapping, unchanged={"norm": "base weights"}), adapter, FORMS)


def test_scalars_and_empty_leaves() -> None:
    forms: dict[str, Form] = {"scale": ((), "float32"), "none": ((0, 4), "float32")}
    mapping = identity_map(forms, forms)
    check_total(mapping, forms, forms)
    assert materialise(mapping.targets["scale"], {"scale": np.float32(3.5).reshape(())}) == 3.5
    assert materialise(mapping.targets["none"], {"none": np.zeros((0, 4), np.float32)}).shape == (0, 4)


def tied(*, head: bool = True) -> FormatMap:
    embed, norm = whole("embed", (6, 4), "float32"), whole("norm", (4,), "bfloat16")
    return op.format_map("tied", [embed, norm, whole("q", (4, 8), "float32"), *([op.tie(embed, "head")] * head)])


def test_a_tied_head_both_ways() -> None:
    """A destination that keeps a head of its own gets it from the embedding; forgetting it is an error. A source that
    keeps one for a destination that ties has to say that its copy is dropped."""
    with_head = FORMS | {"head": ((6, 4), "float32")}
    check_total(tied(), FORMS, with_head)
    with pytest.raises(SyncError, match="nothing writes the destination leaf head"):
        check_total(tied(head=False), FORMS, with_head)
    with pytest.raises(SyncError, match="the target head is no leaf of the destination"):
        check_total(tied(), FORMS, FORMS)
    with pytest.raises(SyncError, match=r"nothing uses the source leaf head float32\[6,4\]"):
        check_total(tied(head=False), with_head, FORMS)
    check_total(replace(tied(head=False), unused={"head": "tied to embed at both"}), with_head, FORMS)


def with_target(leaf: str, **changes: object) -> FormatMap:
    mapping = identity_map(FORMS, FORMS)
    return replace(mapping, targets={**mapping.targets, leaf: replace(mapping.targets[leaf], **changes)})  # type: ignore[arg-type]


def q_pieces(*runs: tuple[Run, Run], **changes: object) -> FormatMap:
    return with_target("q", pieces=tuple(Piece("q", (0, 1), pair) for pair in runs), **changes)


ROWS = Run(0, 0, 4)
BROKEN: dict[str, tuple[Callable[[], FormatMap], str]] = {
    "gap": (lambda: q_pieces((ROWS, Run(0, 0, 7))), r"q \(4, 8\) made of q: element \(0, 7\) is written or read by no"),
    "hole of a stride": (
        lambda: q_pieces((ROWS, Run(0, 0, 4, 2, 2)), (ROWS, Run(1, 1, 3, 2, 2))),
        r"element \(0, 7\) is written or read by no piece; add what is missing",
    ),
    "overlap": (lambda: q_pieces((ROWS, Run(0, 0, 5)), (ROWS, Run(4, 4, 4))), r"element \(0, 4\) is written twice"),
    "overlap of strides": (
        lambda: q_pieces((ROWS, Run(0, 0, 4, 2, 2)), (ROWS, Run(1, 0, 4, 2, 2)), filled=True),
        r"element \(0, 0\) is written twice",
    ),
    "overlap in a filled leaf": (
        lambda: q_pieces((ROWS, Run(0, 0, 8)), (Run(0, 3, 1), Run(0, 7, 1)), filled=True),
        r"element \(3, 7\) is written twice",
    ),
    "beyond the source": (lambda: q_pieces((ROWS, Run(1, 0, 8))), r"reads beyond dim 1 of the source's shape \(4, 8\)"),
    "beyond the target": (lambda: q_pieces((ROWS, Run(0, 1, 8))), r"writes beyond dim 1 of shape \(4, 8\)"),
    "before the source": (lambda: q_pieces((ROWS, Run(-1, 0, 8))), "reads beyond dim 1"),
    "before the target": (lambda: q_pieces((ROWS, Run(0, -1, 8))), "writes beyond dim 1"),
    "stride beyond": (lambda: q_pieces((ROWS, Run(0, 0, 8, 2))), "reads beyond dim 1"),
    "an empty run": (lambda: q_pieces((ROWS, Run(0, 0, 0))), "a piece has the run"),
    "a step back": (lambda: q_pieces((ROWS, Run(7, 0, 8, -1))), "a piece has the run"),
    "a dim read twice": (
        lambda: with_target("q", pieces=(Piece("q", (0, 0), (ROWS, Run(0, 0, 8))),)),
        r"reads the dims \[0, 0\] of a leaf of shape \(4, 8\)",
    ),
    "a dim not read": (
        lambda: with_target("q", pieces=(Piece("q", (0, None), (ROWS, Run(0, 0, 1))),)),
        r"reads the dims \[0\]",
    ),
    "a fixed index beyond": (
        lambda: with_target("q", pieces=(Piece("q", (1, None), (ROWS, Run(0, 0, 1)), ((0, 4),)),)),
        "takes index 4 of dim 0",
    ),
    "a run along no dim": (
        lambda: with_target("q", pieces=(Piece("q", (1, None), (ROWS, Run(0, 0, 8)), ((0, 3),)),)),
        "a piece has the run",
    ),
    "too few runs": (lambda: with_target("q", pieces=(Piece("q", (0,), (ROWS,)),)), "1 dims and 1 runs"),
    "transposed without saying": (
        lambda: with_target("q", shape=(8, 4)),
        r"q becomes float32\[8,4\] by \[\], the destination has float32\[4,8\]",
    ),
    "undeclared cast": (
        lambda: replace(
            with_target("norm", pieces=(Piece("q", (1,), (ROWS,), ((0, 0),)),)), unused={"norm": "replaced"}
        ),
        "norm is bfloat16 and its source q is float32; declare 'cast float32 -> bfloat16'",
    ),
    "unknown source": (lambda: with_target("q", pieces=whole("w", (4, 8), "float32").pieces), "q reads w, which is no"),
    "unused source": (
        lambda: with_target("q", pieces=(Piece("embed", (1, None), (ROWS, Run(0, 0, 1)), ((0, 0),)),), filled=True),
        r"nothing uses the source leaf q float32\[4,8\]",
    ),
    "half of a source unused": (
        lambda: q_pieces((ROWS, Run(0, 0, 4)), filled=True),
        r"source leaf q \(4, 8\): element \(0, 4\) is written or read by no piece; give it a place",
    ),
    "listed and written": (
        lambda: replace(identity_map(FORMS, FORMS), unchanged={"q": "frozen"}),
        "q is a target and listed as unchanged",
    ),
    "listed and used": (
        lambda: replace(identity_map(FORMS, FORMS), unused={"q": "stale"}),
        r"source leaf q \(4, 8\) is listed as unused, yet all of it is used",
    ),
    "listed and unknown": (
        lambda: replace(identity_map(FORMS, FORMS), unused={"w": "?"}, unchanged={"v": "?"}),
        "the unchanged v is no leaf of the destination; the unused leaf w is no leaf of the source",
    ),
    "a target under another name": (lambda: with_target("q", path="r"), "the target listed as q calls itself r"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_misfit_is_refused_by_name(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(SyncError, match=message):
        check_total(make(), FORMS, FORMS)


def test_many_problems_are_counted() -> None:
    many: dict[str, Form] = {f"w{i}": ((2,), "float32") for i in range(20)}
    with pytest.raises(SyncError, match="and 15 more"):
        check_total(FormatMap("empty", {}, dict.fromkeys(many, "none"), {}), many, many)


def test_the_oracle_refuses_what_it_cannot_make() -> None:
    half = Target("half", (4, 8), "float32", (Piece("q", (0, 1), (ROWS, Run(0, 0, 4))),))
    with pytest.raises(SyncError, match=r"half .* leave elements out"):
        materialise(half, {"q": np.ones((4, 8), np.float32)})
    q = whole("q", (4, 8), "float32")
    with pytest.raises(SyncError, match="made of q, which the source does not hold"):
        materialise(q, {})
    # numpy would cut the slice short and then stretch one column over all of them.
    with pytest.raises(SyncError, match="reads beyond dim 1"):
        materialise(q, {"q": np.ones((4, 1), np.float32)})


def test_deepseek_like_experts_are_checked_in_classes() -> None:
    """61 layers of 256 experts as one stacked leaf each, split into a tensor per expert: 15,616 targets."""
    stacked: dict[str, Form] = {f"layers.{i}.up": ((256, 64, 32), "bfloat16") for i in range(61)}
    targets = []
    for path, (shape, dtype) in stacked.items():
        for at, expert in enumerate(op.unstack(whole(path, shape, dtype))):
            targets.append(op.rename(op.transpose(expert), f"{path}.{at}"))
    mapping = op.format_map("experts", targets)
    check_total(mapping, stacked, {t.path: (t.shape, t.dtype) for t in targets})
    lost = dict(mapping.targets)
    del lost["layers.60.up.255"]
    destination = {path: (t.shape, t.dtype) for path, t in lost.items()}
    with pytest.raises(SyncError, match=r"layers.60.up \(256, 64, 32\): element \(255, 0, 0\)"):
        check_total(replace(mapping, targets=lost), stacked, destination)
