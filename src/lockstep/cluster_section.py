"""The `[cluster]` table: which role runs on which mesh. Each key with its type, limits, default and meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Tag, model_validator

from lockstep.schema import Expects, Int, Section, key, literal

Role = Literal["actor", "rollout", "reference", "reward", "critic"]
ROLES: tuple[Role, ...] = ("actor", "rollout", "reference", "reward", "critic")


class MeshConfig(Section):
    """The shape of a mesh: the product of its axes is the number of its devices. The axes may be mixed freely. `data`
    and `fsdp` split the batch: each device computes its own rows, with matrices that `fsdp` splits in storage and
    gathers where they are used. `tensor` splits the matrix products: its devices compute the same rows together."""

    data: Int = key(1, "Devices that hold copies of the weights; they split the batch.", ge=1)
    fsdp: Int = key(1, "Devices that split the storage of the weights by model width; they split the batch.", ge=1)
    tensor: Int = key(
        1,
        "Devices that split weights, their products and the cache by heads, MLP width and vocabulary.",
        ge=1,
    )

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> number of devices, in mesh order."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}


Mesh = Annotated[MeshConfig, Expects('a mesh such as {fsdp = 4, tensor = 2} (axes "data", "fsdp", "tensor")')]
MeshOrRole = Annotated[
    Annotated[str, Tag("<role>")] | Annotated[MeshConfig, Tag("<mesh>")],
    Discriminator(lambda value: "<role>" if isinstance(value, str) else "<mesh>"),
    Expects(
        'the name of a role that has a mesh, or a mesh such as {fsdp = 4, tensor = 2} (axes "data", "fsdp", "tensor")'
    ),
]


class ClusterConfig(Section):
    actor: Mesh = key(MeshConfig(), "Mesh of the role that trains: it owns the weights and the optimizer.")
    rollout: MeshOrRole = key("actor", "Mesh of the role that samples. A role's name: the same mesh, the same arrays.")
    reference: MeshOrRole = key("actor", "Mesh of the frozen policy that the KL is measured against.")
    reward: MeshOrRole | None = key(
        None, "Mesh of the reward models (`[[reward.models]]`). Default, where there are any: the actor's."
    )
    critic: MeshOrRole | None = key(None, "Mesh of the critic (`[critic]`). Default, where there is one: the actor's.")
    cpu_devices: Int | None = key(None, "Simulate so many CPU devices (for trying meshes out on one machine).", ge=1)

    @model_validator(mode="after")
    def _aliases(self) -> ClusterConfig:
        for role in self.roles:
            alias = getattr(self, role)
            if not isinstance(alias, str):
                continue
            owners = [r for r in self.roles if isinstance(getattr(self, r), MeshConfig)]
            choices = " or ".join(literal(r) for r in owners)
            if alias not in ROLES:
                raise ValueError(f"`cluster.{role}` = {literal(alias)} is not a role; use {choices}, or a mesh")
            if alias not in self.roles:
                raise ValueError(f"`cluster.{role}` = {literal(alias)}, but the run has no {alias}; use {choices}")
            if alias not in owners:
                raise ValueError(
                    f"`cluster.{role}` = {literal(alias)}, but {alias} has no mesh of its own "
                    f"(it is {literal(getattr(self, alias))}): an alias names the role that has the mesh; use {choices}"
                )
        if self.cpu_devices is not None and self.num_devices > self.cpu_devices:
            shapes = ", ".join(f"{r} {getattr(self, r).size}" for r in self.roles if self.owner(r) == r)
            raise ValueError(
                f"`cluster.cpu_devices` = {self.cpu_devices}, but the meshes need {self.num_devices} devices "
                f"({shapes}; separate meshes never share devices); use cpu_devices = {self.num_devices}, or an alias"
            )
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that have a place: a reward model and a critic only where the run has one."""
        return tuple(role for role in ROLES if getattr(self, role) is not None)

    def owner(self, role: Role) -> Role:
        """The role whose mesh and arrays `role` uses: itself unless it is an alias."""
        value = getattr(self, role)
        return value if isinstance(value, str) else role  # type: ignore[return-value]

    def mesh(self, role: Role) -> MeshConfig:
        """The mesh that `role` runs on."""
        mesh = getattr(self, self.owner(role))
        assert isinstance(mesh, MeshConfig)
        return mesh

    @property
    def shapes(self) -> dict[str, Mapping[str, int] | str]:
        """Role -> its mesh's axes, or the role whose mesh it uses: what `cluster.roles.assign` takes."""
        values = {role: getattr(self, role) for role in self.roles}
        return {role: value if isinstance(value, str) else value.axes for role, value in values.items()}

    @property
    def num_devices(self) -> int:
        """Devices over all meshes."""
        return sum(self.mesh(r).size for r in self.roles if self.owner(r) == r)

    @property
    def fewest_parts(self) -> int:
        """The smallest number that every mesh's `tensor` divides."""
        return math.lcm(*(self.mesh(r).tensor for r in self.roles))
