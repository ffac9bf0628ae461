"""Leaves on a mesh of jax devices: what `cuts` decided, as shardings and as collectives.

Mesh axes shard storage: inside a computation `gather` rebuilds a leaf on every device from the shards, and its
transpose scatters the gradient back (ZeRO stage 3, Rajbhandari et al. 2019, arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lockstep.cluster.cuts import RULES, Rules, cut
from lockstep.cluster.roles import device_ranges
from lockstep.errors import SyncError
from lockstep.models.spec import Leaf


def spec_for(leaf: Leaf, mesh: Mesh, rules: Rules = RULES) -> PartitionSpec:
    """The partition spec of `leaf` on `mesh`, one entry per dim."""
    return PartitionSpec(*cut(leaf, mesh.shape, rules)[0])


def shardings(leaves: Mapping[str, Leaf], mesh: Mesh, rules: Rules = RULES) -> dict[str, NamedSharding]:
    """path -> sharding, for every leaf, in the order of the table."""
    return {path: NamedSharding(mesh, spec_for(leaf, mesh, rules)) for path, leaf in leaves.items()}


def place(
    params: Mapping[str, np.ndarray | jax.Array], leaves: Mapping[str, Leaf], mesh: Mesh, rules: Rules = RULES
) -> dict[str, jax.Array]:
    """Put every leaf where its rule says. Returns path -> array in the order of `leaves`; dtypes stay.

    Device arrays that are there already keep their buffers; host arrays are copied. Raises SyncError, before anything
    is placed, for a leaf that is missing, not in the table, or of another shape.
    """
    where = shardings(leaves, mesh, rules)
    missing = [path for path in leaves if path not in params]
    extra = [path for path in params if path not in leaves]
    if missing or extra:
        names = ", ".join(
            [*(f"{p} is missing" for p in missing), *(f"{p} is not in the leaf table" for p in extra)][:5]
        )
        raise SyncError(
            f"place: the parameters do not match the leaf table ({len(missing) + len(extra)} leaves): {names}"
        )
    for path, leaf in leaves.items():
        if tuple(params[path].shape) != leaf.shape:
            raise SyncError(
                f"place: {path} has shape {tuple(params[path].shape)}, the leaf table says {leaf.shape}; "
                f"destination: {describe_layout(where[path])}"
            )
    return {path: jax.device_put(_private(params[path]), where[path]) for path in leaves}


def _private(array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """A host array's copy that nobody else can write to. On the CPU jax adopts aligned host memory instead of copying
    it, whatever `may_alias` says, and a write to the original would then change the weights."""
    return array if isinstance(array, jax.Array) else np.array(array, copy=True)


def describe_layout(sharding: Sharding) -> str:
    """A sharding in words, for errors and receipts: mesh, devices, cut, memory."""
    devices = device_ranges([d.id for d in mesh_order(sharding)])
    if not isinstance(sharding, NamedSharding):
        return f"{type(sharding).__name__} on {devices} in {sharding.memory_kind}"
    sizes = " ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1) or "1 device"
    cuts = ", ".join("whole" if axis is None else str(axis) for axis in sharding.spec) or "whole"
    return f"mesh {sizes} ({devices}), dims cut by [{cuts}], in {sharding.memory_kind}"


def describe_mesh(sharding: Sharding) -> str:
    """Mesh, devices and memory of a sharding, without the cut."""
    devices = device_ranges([d.id for d in mesh_order(sharding)])
    if not isinstance(sharding, NamedSharding):
        return f"{devices} in {sharding.memory_kind}"
    sizes = " ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1) or "1 device"
    return f"{sizes} ({devices}) in {sharding.memory_kind}"


def mesh_order(sharding: Sharding) -> list[jax.Device]:
    """Devices of a sharding: in mesh order where there is a mesh, else by number."""
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda d: d.id)


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a partition spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def gather(shard: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside `jax.shard_map`: the whole leaf on every device, from this device's shard.

    Its transpose reduce-scatters: the gradient of a shard is the sum, over the devices that share the cut, of their
    gradients of the whole leaf. Mesh axes outside the spec are `reduce_gradient`'s.
    """
    for dim, entry in enumerate(spec):
        axes = _axes_of(entry)
        if axes:
            shard = lax.all_gather(shard, axes, axis=dim, tiled=True)
    return shard


def reduce_gradient(gradient: jax.Array, spec: PartitionSpec, mesh_axes: Sequence[str]) -> jax.Array:
    """Inside `jax.shard_map`: complete a gradient taken through `gather`, where tokens are split over all `mesh_axes`.

    gradient: of one shard, summed so far over the axes in `spec` (by gather's transpose). Returns its sum over the
    other mesh axes too. Under `check_vma=True` autodiff itself has summed over the axes in which the
    shard does not vary; those sums are not done twice.
    """
    used = {axis for entry in spec for axis in _axes_of(entry)}
    rest = tuple(axis for axis in mesh_axes if axis not in used)
    # Empty without check_vma, where every value counts as varying.
    tracked = jax.typeof(lax.axis_index(mesh_axes[0])).mat.varying
    if tracked:
        rest = tuple(axis for axis in rest if axis in jax.typeof(gradient).mat.varying)
    return lax.psum(gradient, rest) if rest else gradient
