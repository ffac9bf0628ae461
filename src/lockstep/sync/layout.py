"""How one leaf lies on a mesh, as plain numbers: what the planner plans with instead of devices.

    mesh = MeshShape((("fsdp", 2), ("tensor", 2)), devices=(0, 1, 2, 3))
    layout = Layout(mesh, spec=(("fsdp",), ("tensor",)))
    layout.box(3, (10, 6))      # ((5, 10), (3, 6))

Imports no jax: a layout over ten thousand devices costs nothing and needs none of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lockstep.cluster.roles import device_ranges

Box = tuple[tuple[int, int], ...]
"""A part of an array: (start, stop) per dim."""


@dataclass(frozen=True)
class MeshShape:
    """A mesh without its devices. axes: (name, size), the first varies slowest. devices: their numbers, row-major."""

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        assert math.prod(size for _, size in self.axes) == len(self.devices), self
        assert len(set(self.devices)) == len(self.devices), f"a device twice: {self.devices}"
        assert len({name for name, _ in self.axes}) == len(self.axes), f"an axis twice: {self.axes}"

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)


@dataclass(frozen=True)
class Layout:
    """One leaf's place. spec: per dim, the mesh axes that cut it, slowest first (empty: whole). memory: `device` or
    `host`.

    A dim of n over k shards has shards of ceil(n / k); the last ones may be shorter or empty (as GSPMD cuts).
    """

    mesh: MeshShape
    spec: tuple[tuple[str, ...], ...]
    memory: str = "device"

    def __post_init__(self) -> None:
        used = [axis for axes in self.spec for axis in axes]
        assert len(set(used)) == len(used), f"an axis cuts two dims: {self.spec}"
        assert set(used) <= set(self.mesh.sizes), f"{self.spec} names axes that {self.mesh.axes} has not"

    def parts(self) -> tuple[int, ...]:
        """Number of shards per dim."""
        sizes = self.mesh.sizes
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in self.spec)

    def edges(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Per dim, where shards begin and end: parts + 1 increasing numbers from 0 to the dim's size."""
        return tuple(
            tuple(min(part * -(-size // parts), size) for part in range(parts + 1))
            for size, parts in zip(shape, self.parts(), strict=True)
        )

    def coordinates(self) -> np.ndarray:
        """[devices, dims] int64: which shard along every dim each device holds, devices in mesh order."""
        return _coordinates(self)

    def shards(self) -> np.ndarray:
        """[shards, copies] int64: the devices that hold each shard, increasing; shards row-major over `parts()`."""
        return _shards(self)

    def shard_of(self) -> dict[int, int]:
        """device -> row of `shards()`."""
        return {device: shard for shard, devices in enumerate(self.shards().tolist()) for device in devices}

    def box(self, device: int, shape: tuple[int, ...]) -> Box:
        """What `device` holds of a leaf of `shape`."""
        where = self.coordinates()[self.mesh.devices.index(device)]
        return tuple((edges[i], edges[i + 1]) for edges, i in zip(self.edges(shape), where, strict=True))

    def describe(self) -> str:
        """`fsdp=4 tensor=2 (devices 0-7), dims cut by [fsdp, tensor]`."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.mesh.axes if size > 1) or "1 device"
        cuts = ", ".join("+".join(axes) or "whole" for axes in self.spec) or "whole"
        place = "" if self.memory == "device" else f", in {self.memory} memory"
        return f"{sizes} ({device_ranges(self.mesh.devices)}), dims cut by [{cuts}]{place}"


@lru_cache(maxsize=4096)
def _coordinates(layout: Layout) -> np.ndarray:
    names = [name for name, _ in layout.mesh.axes]
    sizes = [size for _, size in layout.mesh.axes]
    grid = np.indices(sizes or [1]).reshape(max(1, len(sizes)), -1)
    found = np.zeros((len(layout.mesh.devices), len(layout.spec)), np.int64)
    for dim, axes in enumerate(layout.spec):
        for axis in axes:
            at = names.index(axis)
            found[:, dim] = found[:, dim] * sizes[at] + grid[at]
    return found


@lru_cache(maxsize=4096)
def _shards(layout: Layout) -> np.ndarray:
    parts, where = layout.parts(), layout.coordinates()
    number = np.ravel_multi_index(where.T, parts) if parts else np.zeros(len(where), np.int64)
    devices = np.array(layout.mesh.devices, np.int64)
    # Every shard is on as many devices as the axes that cut nothing have places.
    return devices[np.lexsort((devices, number))].reshape(math.prod(parts), -1)
