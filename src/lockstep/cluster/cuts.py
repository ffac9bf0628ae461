"""How a leaf is cut: logical axis -> mesh axis, decided by one function, for every role, every part and every plan.

    embed                           -> fsdp
    heads, kv_heads, mlp, vocab     -> tensor
    expert                          -> expert
    rank, and dims without a name   -> whole on every device

`data` never cuts a weight. A mesh axis that does not divide a dim evenly leaves it whole (`unsharded` lists these).
An axis that a mesh does not have counts as size 1.

Imports no jax: cuts for any number of devices cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.models.spec import Leaf

Rules = Mapping[str, str | None]

RULES: Rules = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",
    "rank": None,
}


@dataclass(frozen=True)
class Unsharded:
    """A dim that its rule would cut but that stays whole. why: `does not divide` or `axis already used`."""

    path: str
    dim: int
    logical: str
    size: int
    axis: str
    axis_size: int
    why: str

    def __str__(self) -> str:
        return (
            f"{self.path} dim {self.dim} ({self.logical} = {self.size}) stays whole: {self.axis} = {self.axis_size} "
            f"{self.why}"
        )


def cut(
    leaf: Leaf, axis_sizes: Mapping[str, int], rules: Rules = RULES
) -> tuple[tuple[str | None, ...], list[Unsharded]]:
    """Mesh axis that cuts each dim of `leaf` (None: whole), and the dims whose rule could not be followed.

    Pure in the leaf and the sizes of the mesh axes. Axes of size 1 cut nothing and are not named.
    """
    axes: list[str | None] = []
    whole = []
    for dim, (logical, size) in enumerate(zip(leaf.axes, leaf.shape, strict=True)):
        axis = None
        if logical is not None:
            assert logical in rules, f"{leaf.path}: logical axis {logical!r} has no rule"
            axis = rules[logical]
        parts = 1 if axis is None else axis_sizes.get(axis, 1)
        if parts == 1:
            axis = None
        if axis is not None and logical is not None:
            why = "is already used by another dim" if axis in axes else "does not divide it" if size % parts else ""
            if why:
                whole.append(Unsharded(leaf.path, dim, logical, size, axis, parts, why))
                axis = None
        axes.append(axis)
    return tuple(axes), whole


def unsharded(leaves: Mapping[str, Leaf], axis_sizes: Mapping[str, int], rules: Rules = RULES) -> list[Unsharded]:
    """Every dim in `leaves` that its rule would cut but that stays whole on such a mesh."""
    return [item for leaf in leaves.values() for item in cut(leaf, axis_sizes, rules)[1]]


def bytes_per_device(
    leaves: Mapping[str, Leaf], axis_sizes: Mapping[str, int], itemsize: int, rules: Rules = RULES
) -> int:
    """Bytes that one device holds of all `leaves`, at `itemsize` bytes per element."""
    total = 0
    for leaf in leaves.values():
        total += (
            itemsize * leaf.size // math.prod(axis_sizes[a] for a in cut(leaf, axis_sizes, rules)[0] if a is not None)
        )
    return total
