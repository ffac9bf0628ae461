"""What is compiled is made once in a process, and shared by all that asks for the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jax.sharding import Mesh

from lockstep.cluster.programs import Programs
from lockstep.models.decoder import Numerics
from lockstep.models.spec import Leaf, ModelSpec

Made = TypeVar("Made")


@functools.lru_cache(maxsize=64)
def shared(kind: Callable[..., Made], *arguments: Any) -> Made:
    """kind(*arguments), the same object for the same arguments: compiled functions that hold nothing else. Roles on one
    mesh, and runs that follow each other in a process, then trace and lower each program once, which takes up to a
    second each also where the compiled one is on disk."""
    return kind(*arguments)


def _programs(spec: ModelSpec, num: Numerics, mesh: Mesh, leaves: tuple[tuple[str, Leaf], ...]) -> Programs:
    return Programs(spec, num, mesh, dict(leaves))


def shared_programs(spec: ModelSpec, num: Numerics, mesh: Mesh, leaves: Mapping[str, Leaf]) -> Programs:
    """`Programs`, `shared`."""
    return shared(_programs, spec, num, mesh, tuple(leaves.items()))
