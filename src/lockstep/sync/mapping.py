"""The format map: which parts of which source leaves make up each destination leaf.

Every declared operation - rename, transpose, fuse, split, stack, pad, repeat-kv, interleave, cast - comes down to
pieces: a rectangular (possibly strided) part of one source leaf, dims possibly permuted, is one part of one destination
leaf. What no piece writes is filled with zeros, and only where a rule says so. Values are never computed, so a digest
of a destination leaf can be taken from the source.

Imports no jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Target:
    """One destination leaf. pieces: disjoint, in any order. filled: whether what they leave out is zero (else they
    must cover the leaf). operations: names of the declared operations, in words, for people and receipts (`transpose`,
    `fuse q, k, v`, `repeat-kv x2`, `pad vocab 151936 -> 152064`, `cast float32 -> bfloat16`); empty for identity."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    filled: bool = False
    operations: tuple[str, ...] = ()


@dataclass(frozen=True)
class FormatMap:
    """The whole table, total on both sides: every source leaf is used by a piece, or listed in `unused` with the
    reason; every destination leaf is a target, or listed in `unchanged` with the reason (frozen base weights, say)."""

    name: str
    targets: Mapping[str, Target]
    unused: Mapping[str, str]
    unchanged: Mapping[str, str]
