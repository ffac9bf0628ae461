"""Where a model's leaves would lie on a mesh of so many devices: layouts for planning, made from a leaf table alone.

    axes = parse_axes("pipeline=16,expert=16")
    source = placed(leaf_table(spec), axes, 0, "bfloat16")          # devices 0-255
    destination = placed(leaf_table(spec), parse_axes("tensor=32,data=8"), 256, "bfloat16")

The cuts are those of `cluster.cuts`. `pipeline` cuts no leaf: it puts consecutive layers on consecutive parts of the
devices. Imports no jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from lockstep.cluster.cuts import RULES, Rules, cut
from lockstep.errors import ConfigError
from lockstep.models.spec import Leaf
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.plan import Placed
from lockstep.text import did_you_mean

AXES = ("pipeline", "data", "fsdp", "expert", "tensor")
"""Mesh axes in the order in which devices are numbered: the first varies slowest."""

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")  # foreign names have something before it


def parse_axes(text: str) -> dict[str, int]:
    """`tensor=4,data=2` -> {"tensor": 4, "data": 2}; `` or `1` is one device.

    Raises ConfigError for an unknown or repeated axis and for a size that is not a positive integer.
    """
    sizes: dict[str, int] = {}
    for word in [] if text.strip() in ("", "1") else text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in AXES:
            raise ConfigError(
                f"mesh {text!r}: {name!r} is not an axis; axes: {', '.join(AXES)}{did_you_mean(name, AXES)}"
            )
        if name in sizes:
            raise ConfigError(f"mesh {text!r} gives {name} twice")
        if not equals or not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise ConfigError(
                f"mesh {text!r}: {name} = {value!r} is not a positive integer; expected {name}=N with N at least 1"
            )
        sizes[name] = int(value)
    return sizes


def device_count(axes: Mapping[str, int]) -> int:
    """Devices of a mesh with these axes."""
    return math.prod(axes.values())


def placed(
    leaves: Mapping[str, Leaf],
    axes: Mapping[str, int],
    devices: Sequence[int] | int,
    dtype: str,
    rules: Rules = RULES,
    memory: str = "device",
) -> dict[str, Placed]:
    """path -> what a mesh with `axes` holds of each leaf, in the order of `leaves`.

    devices: numbers in mesh order, or the first of consecutive ones. With pipeline=S, layer i of L lies on the
    i * S // L-th of S equal parts of the devices, what comes before the layers (`embed`) on the first part, what comes
    after them (`final_norm`, `head`) on the last.

    Raises ConfigError for unknown axes, a wrong number of devices, and more pipeline stages than layers.
    """
    for name, size in axes.items():
        if name not in AXES:
            raise ConfigError(f"{name!r} is not a mesh axis; axes: {', '.join(AXES)}{did_you_mean(name, AXES)}")
        if size < 1:
            raise ConfigError(f"mesh axis {name} = {size}: expected at least 1")
    count = device_count(axes)
    numbers = tuple(range(devices, devices + count)) if isinstance(devices, int) else tuple(devices)
    if len(numbers) != count or len(set(numbers)) != count:
        sizes = " ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ConfigError(f"a mesh of {sizes} needs {count} different devices; got {len(numbers)}: {numbers[:9]}")
    meshes = _stages(axes, numbers)
    stages = _stage_of(leaves, len(meshes))
    layouts: dict[tuple[int, tuple[str | None, ...]], Layout] = {}
    found = {}
    for path, leaf in leaves.items():
        key = stages[path], cut(leaf, axes, rules)[0]
        if key not in layouts:
            spec = tuple(() if axis is None else (axis,) for axis in key[1])
            layouts[key] = Layout(meshes[key[0]], spec, memory)
        found[path] = Placed(leaf.shape, dtype, layouts[key])
    return found


def _stages(axes: Mapping[str, int], devices: tuple[int, ...]) -> list[MeshShape]:
    """One mesh per pipeline stage, of the other axes."""
    kept = tuple((axis, axes[axis]) for axis in AXES[1:] if axis in axes)
    stages = axes.get("pipeline", 1)
    size = len(devices) // stages
    return [MeshShape(kept, devices[at * size : (at + 1) * size]) for at in range(stages)]


def _stage_of(leaves: Mapping[str, Leaf], stages: int) -> dict[str, int]:
    """path -> pipeline stage."""
    layer = {path: int(match[1]) for path in leaves if (match := _LAYER.match(path))}
    layers = 1 + max(layer.values(), default=0)
    if stages > layers:
        raise ConfigError(f"pipeline = {stages} is more than the {layers} layers of the model; use at most {layers}")
    last = 0
    found = {}
    for path in leaves:
        if path in layer:
            last = stages - 1  # whatever follows in the table comes after the layers
        found[path] = layer[path] * stages // layers if path in layer else last
    return found
