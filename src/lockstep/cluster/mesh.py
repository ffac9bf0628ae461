"""The dial: role -> mesh of devices, with every axis present, and what it says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lockstep.cluster.cuts import unsharded
from lockstep.cluster.devices import available_devices, device_kinds
from lockstep.cluster.roles import AXES, Role, Shape, assign, device_ranges
from lockstep.config import ClusterConfig
from lockstep.errors import ConfigError
from lockstep.models.spec import Leaf
from lockstep.text import format_bytes

Bytes = Mapping[str, Mapping[str, int]]
"""role -> what (`parameters`, `optimizer`, `kv`, ...) -> bytes on each device."""


@dataclass(frozen=True)
class Dial:
    """Which role runs where. Make it with `Dial.build` or `Dial.from_config`.

    devices: all the devices that were offered, in order; a role's device numbers point into it. Roles that share a
    place share the very same mesh object.
    """

    roles: Mapping[str, Role]
    devices: tuple[jax.Device, ...]
    meshes: Mapping[str, Mesh]

    @classmethod
    def build(cls, cluster: Mapping[str, Shape | str], devices: Sequence[jax.Device] | None = None) -> Dial:
        """From a mapping role -> {axis: size} (and optionally `devices`: their numbers), or role -> other role's name.

        devices: what to build from; default all that jax sees. Raises ConfigError as `roles.assign` does.
        """
        offered = tuple(jax.devices() if devices is None else devices)
        roles = assign(cluster, len(offered))
        meshes: dict[str, Mesh] = {}
        for name, role in roles.items():
            if role.same_as is None:
                grid = np.array([offered[d] for d in role.devices]).reshape([role.axes[axis] for axis in AXES])
                meshes[name] = Mesh(grid, AXES)
        return cls(roles, offered, {name: meshes[role.same_as or name] for name, role in roles.items()})

    @classmethod
    def from_config(cls, cluster: ClusterConfig) -> Dial:
        """From the `[cluster]` section of a recipe, on simulated devices if it asks for them."""
        return cls.build(cluster.shapes, available_devices(cluster.cpu_devices))

    def role(self, name: str) -> Role:
        """The role's place. Raises ConfigError if the dial has no such role."""
        if name not in self.roles:
            raise ConfigError(f"cluster.{name} is needed here but has no mesh; the recipe has: {', '.join(self.roles)}")
        return self.roles[name]

    def mesh(self, role: str) -> Mesh:
        """The role's mesh; axes `data`, `fsdp`, `tensor`, always all three. Raises ConfigError if it has none."""
        return self.meshes[self.role(role).name]

    def colocated(self, a: str, b: str) -> bool:
        """Whether the two have one mesh: the same devices, in the same order, with the same axes."""
        return self.mesh(a) == self.mesh(b)

    def to_json(self, bytes_per_role: Bytes | None = None) -> dict[str, Any]:
        """The dial for reports: {"roles": {role: {"axes", "devices", "same_as", "bytes"}}}; bytes are per device."""
        sizes = bytes_per_role or {}
        return {
            "roles": {
                name: {
                    "axes": dict(role.axes),
                    "devices": list(role.devices),
                    "same_as": role.same_as,
                    "bytes": dict(sizes.get(name, {})),
                }
                for name, role in self.roles.items()
            }
        }

    def describe(self, bytes_per_role: Bytes, leaves: Mapping[str, Leaf] | None = None) -> str:
        """A table: role, mesh, devices, bytes per device. With `leaves`, also the dims that no axis could cut.

        An alias holds nothing of its own: give it bytes only for what it adds (a cache, say).
        """
        kinds = list(dict.fromkeys(kind for sizes in bytes_per_role.values() for kind in sizes))
        rows = [["role", "mesh", "devices", *(f"{kind}/device" for kind in kinds)]]
        for name, role in self.roles.items():
            sizes = bytes_per_role.get(name, {})
            mesh = f"same as {role.same_as}" if role.same_as else role.axes_text
            where = device_ranges(role.devices).partition(" ")[2]
            rows.append([name, mesh, where, *(format_bytes(sizes[k]) if k in sizes else "-" for k in kinds)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        used = len({device for role in self.roles.values() for device in role.devices})
        lines.append(f"{used} of {len(self.devices)} devices used ({device_kinds(self.devices)})")
        if leaves is not None:
            lines += self._whole_dims(leaves)
        return "\n".join(lines)

    def _whole_dims(self, leaves: Mapping[str, Leaf]) -> list[str]:
        """One line per mesh and kind of leaf (layers folded together) that an axis leaves whole."""
        lines = []
        for name, role in self.roles.items():
            if role.same_as:
                continue
            counts: dict[str, int] = {}
            for item in unsharded(leaves, role.axes):
                kind = ".".join("*" if part.isdigit() else part for part in item.path.split("."))
                text = str(item).replace(item.path, kind, 1)
                counts[text] = counts.get(text, 0) + 1
            lines += [f"{name}: {text} ({n} {'leaf' if n == 1 else 'leaves'})" for text, n in counts.items()]
        return lines
