"""Equal leaves of different layers as one line: `layers.*.gate x32`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from lockstep.sync.plan import LeafPlan

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a path
_NUMBERS = re.compile(r"\b\d+\b")  # `expert 5`; the 16 of `bfloat16` stays


@dataclass(frozen=True)
class LeafClass:
    """Leaves that differ only in the numbers in their paths. leaves: in the plan's order, at least one."""

    pattern: str
    leaves: tuple[LeafPlan, ...]

    @property
    def first(self) -> LeafPlan:
        return self.leaves[0]

    @property
    def count(self) -> int:
        return len(self.leaves)

    @property
    def name(self) -> str:
        """`layers.*.gate x32`; a single leaf has its own path."""
        return f"{self.pattern} x{self.count}" if self.count > 1 else self.first.path

    @property
    def bytes(self) -> int:
        """Of all its leaves, each counted once."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def bytes_crossing(self) -> int:
        return sum(leaf.bytes_crossing for leaf in self.leaves)

    @property
    def fate(self) -> str:
        """What becomes of them: `in place`, `local` (copied on their devices), `over links`."""
        return fate(self.first)


def fate(leaf: LeafPlan) -> str:
    """`in place`: buffers are reused. `local`: written anew, yet nothing crosses a link. `over links`: some does."""
    return "in place" if leaf.in_place else "over links" if leaf.crosses else "local"


def fold(leaves: Iterable[LeafPlan], *, by_place: bool = False) -> list[LeafClass]:
    """Classes in order of their first leaf: equal but for numbers in the path, shapes, types, cuts, operations and byte
    counts included. by_place: the devices too (pipeline stages come apart)."""
    classes: dict[object, list[LeafPlan]] = {}
    for leaf in leaves:
        sides = (leaf.source_layout, leaf.target_layout)
        key = (
            _pattern(leaf.path), leaf.shape, leaf.dtype, leaf.wire_dtype, tuple(map(_pattern, leaf.sources)),
            tuple(_NUMBERS.sub("*", name) for name in leaf.operations), leaf.in_place, leaf.bytes, leaf.bytes_written,
            leaf.bytes_local, leaf.bytes_filled, leaf.bytes_crossing,
            sides if by_place else tuple((s.spec, s.mesh.axes, s.memory) for s in sides),
        )  # fmt: skip
        classes.setdefault(key, []).append(leaf)
    patterns = Counter(_pattern(found[0].path) for found in classes.values())
    return [
        LeafClass(_pattern(found[0].path) if patterns[_pattern(found[0].path)] == 1 else _narrowed(found), tuple(found))
        for found in classes.values()
    ]


@lru_cache(maxsize=1 << 16)
def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path)


def _narrowed(leaves: list[LeafPlan]) -> str:
    """`layers.0-3.gate`: the pattern with the numbers that occur, where another class has the same pattern."""
    numbers = [list(map(int, _NUMBER.findall(leaf.path))) for leaf in leaves]
    texts = iter(
        str(min(column)) if min(column) == max(column) else f"{min(column)}-{max(column)}"
        for column in zip(*numbers, strict=True)
    )
    return _NUMBER.sub(lambda _: next(texts), leaves[0].path)
