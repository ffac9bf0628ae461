"""Roles, and which devices each gets: the dial as plain numbers.

    actor      trains: owns the weights and the optimizer
    rollout    samples from the same policy: the actor's arrays (an alias) or its own copy in its own layout
    reference  the frozen policy before training; log-probabilities only
    reward     a trained reward model (a plain scoring function has no mesh)
    critic     the value baseline of PPO

Imports no jax: assignments for any number of devices can be made, printed and tested without having them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError
from lockstep.text import did_you_mean

ROLES = ("actor", "rollout", "reference", "reward", "critic")
AXES = ("data", "fsdp", "tensor")

Shape = Mapping[str, int | Sequence[int]]
"""A role's own mesh: axis -> size, and optionally `devices`, the numbers of the devices to use, in mesh order."""


@dataclass(frozen=True)
class Role:
    """One role's place. axes: size of each of `AXES`, in that order. devices: numbers into the list of devices, in
    row-major mesh order. same_as: the role whose mesh and arrays this one shares, None if it has its own."""

    name: str
    axes: Mapping[str, int]
    devices: tuple[int, ...]
    same_as: str | None = None

    @property
    def axes_text(self) -> str:
        """`fsdp=4 tensor=2`: the axes that are larger than one; `1 device` if none is."""
        return " ".join(f"{axis}={size}" for axis, size in self.axes.items() if size > 1) or "1 device"


def assign(cluster: Mapping[str, Shape | str], available: int) -> dict[str, Role]:
    """Give every role its devices, out of `available` ones.

    Roles with a shape take the next free devices, in the order of the mapping; devices that any role names explicitly
    are not free. Explicit devices may overlap those of other explicit roles. An alias shares its target's place.

    Raises ConfigError: unknown role or axis, a size that is not a positive integer, an alias that leads nowhere or in
    a circle, explicit devices that are repeated, missing or of the wrong number, too few devices.
    """
    for name in cluster:
        if name not in ROLES:
            raise ConfigError(f"cluster.{name} is not a role; roles: {', '.join(ROLES)}{did_you_mean(name, ROLES)}")
    shapes = {name: shape for name, shape in cluster.items() if not isinstance(shape, str)}
    axes = {name: _axes(name, shape) for name, shape in shapes.items()}
    explicit = {
        name: _explicit(name, shape, axes[name], available) for name, shape in shapes.items() if "devices" in shape
    }
    taken = {device for devices in explicit.values() for device in devices}
    free = [device for device in range(available) if device not in taken]
    needed = sum(math.prod(axes[name].values()) for name in shapes if name not in explicit)
    if needed > len(free):
        raise ConfigError(_too_few(axes, explicit, available, len(free), needed))
    own: dict[str, Role] = {}
    for name in shapes:
        devices = explicit.get(name)
        if devices is None:
            count = math.prod(axes[name].values())
            devices, free = tuple(free[:count]), free[count:]
        own[name] = Role(name, axes[name], devices)
    roles = {}
    for name in cluster:
        root = own[_root(name, cluster)]
        roles[name] = root if root.name == name else Role(name, root.axes, root.devices, same_as=root.name)
    return roles


def _axes(name: str, shape: Shape) -> dict[str, int]:
    """Sizes of all of `AXES`; those not named are 1."""
    for axis, size in shape.items():
        if axis == "devices":
            continue
        if axis not in AXES:
            raise ConfigError(
                f"cluster.{name}.{axis} is not a mesh axis; "
                f"axes: {', '.join(AXES)}; besides them only `devices`{did_you_mean(axis, AXES)}"
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"cluster.{name}.{axis} must be a whole number of devices, at least 1; got {size!r}")
    return {axis: int(shape.get(axis, 1)) for axis in AXES}  # type: ignore[arg-type]


def _explicit(name: str, shape: Shape, axes: Mapping[str, int], available: int) -> tuple[int, ...]:
    """The role's own list of devices, checked."""
    listed = shape["devices"]
    if isinstance(listed, int) or not all(isinstance(d, int) and not isinstance(d, bool) for d in listed):
        raise ConfigError(f"cluster.{name}.devices must be a list of device numbers; got {listed!r}")
    devices = tuple(listed)
    size = math.prod(axes.values())
    if len(devices) != size:
        product = " x ".join(f"{axis}={n}" for axis, n in axes.items())
        raise ConfigError(f"cluster.{name}.devices names {len(devices)} devices, but its mesh has {size} ({product})")
    repeated = sorted({d for d in devices if devices.count(d) > 1})
    if repeated:
        raise ConfigError(f"cluster.{name}.devices names device {repeated[0]} more than once: {list(devices)}")
    outside = [d for d in devices if not 0 <= d < available]
    if outside:
        raise ConfigError(
            f"cluster.{name}.devices names device {outside[0]}, but there are {available} (0 to {available - 1}); "
            f"to simulate more, set cluster.cpu_devices = {max(devices) + 1}"
        )
    return devices


def _root(name: str, cluster: Mapping[str, Shape | str]) -> str:
    """The role with a shape of its own at the end of the chain of aliases."""
    seen = [name]
    while isinstance(target := cluster[seen[-1]], str):
        if target in seen:
            raise ConfigError(f"cluster.{name}: {' -> '.join([*seen, target])} is a circle; give one of them a mesh")
        if target not in cluster:
            raise ConfigError(
                f'cluster.{seen[-1]} = "{target}" names a role that has no mesh; roles with one here: '
                f"{', '.join(k for k, v in cluster.items() if not isinstance(v, str)) or 'none'}"
                f"{did_you_mean(target, cluster)}"
            )
        seen.append(target)
    return seen[-1]


def _too_few(
    axes: Mapping[str, Mapping[str, int]],
    explicit: Mapping[str, tuple[int, ...]],
    available: int,
    free: int,
    needed: int,
) -> str:
    """What each role wants, what there is, and how to get there."""
    wants = ", ".join(f"{name} {math.prod(sizes.values())}" for name, sizes in axes.items() if name not in explicit)
    # Simulated devices are added at the end, so the explicit ones stay where they are.
    total = available + needed - free
    reserved = f", of which {available - free} are named explicitly" if explicit else ""
    return (
        f"cluster: the meshes need {needed} devices ({wants}); {available} available{reserved}. Make a mesh smaller, "
        f'let roles share one (rollout = "actor"), or simulate on the CPU: cluster.cpu_devices = {total}'
    )


def device_ranges(ids: Sequence[int]) -> str:
    """`device 3`, `devices 0-3`, `devices 0-3,8-11`, `devices 0,2,1,3`: in the order given, runs of three or more
    folded."""
    words: list[str] = []
    at = 0
    while at < len(ids):
        stop = at + 1
        while stop < len(ids) and ids[stop] == ids[stop - 1] + 1:
            stop += 1
        words += (
            [f"{ids[at]}-{ids[stop - 1]}"] if stop - at > 2 or stop - at == len(ids) > 1 else map(str, ids[at:stop])
        )
        at = stop
    return f"device{'s' if len(ids) != 1 else ''} {','.join(words)}"
