"""The two ends of a transport between processes: is what is here what was planned with?

A plan's device numbers are jax's ids only within one process. Between two, the sampler's devices are numbered apart:
from `first` on, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax
from jax.sharding import Sharding

from lockstep.cluster.sharding import describe_layout
from lockstep.errors import SyncError
from lockstep.sync.arrays import device_numbers, layout_of, placed, require_live
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.plan import Placed, SyncPlan

Numbers = Mapping[int, jax.Device]


def numbers_from(first: int, shardings: Iterable[Sharding]) -> dict[int, jax.Device]:
    """Plan number -> device, of all devices of the shardings: `first` plus jax's id."""
    return {first + number: device for number, device in device_numbers(shardings).items()}


def renumbered(places: Mapping[str, Placed], numbers: Numbers) -> dict[str, Placed]:
    """`places`, whose devices are jax's ids, in the plan's numbers. Raises SyncError for a device that has none."""
    layouts: dict[Layout, Layout] = {}
    found = {}
    for path, place in places.items():
        if place.layout not in layouts:
            layouts[place.layout] = _renumbered(place.layout, numbers)
        found[path] = replace(place, layout=layouts[place.layout])
    return found


def _renumbered(layout: Layout, numbers: Numbers) -> Layout:
    number_of = {device.id: number for number, device in numbers.items()}
    lacking = [device for device in layout.mesh.devices if device not in number_of]
    if lacking:
        raise SyncError(f"sync: device {lacking[0]} has no number in the plan; those that have: {sorted(number_of)}")
    mesh = MeshShape(layout.mesh.axes, tuple(number_of[device] for device in layout.mesh.devices))
    return replace(layout, mesh=mesh)


def checked_source(plan: SyncPlan, source: Mapping[str, jax.Array], version: int) -> dict[str, jax.Array]:
    """The leaves that the plan reads. Raises SyncError if they are not what was planned for: missing, of another form
    or layout, deleted."""
    missing = [path for path in plan.source if path not in source]
    if missing:
        raise SyncError(f"sync: version {version} was planned with {missing[0]}, which the source lacks")
    leaves = {path: source[path] for path in plan.source}
    require_live(leaves, "the source", "send before the step that donates them")
    for path, leaf in leaves.items():
        if placed(leaf) != plan.source[path]:
            raise SyncError(
                f"sync: {path} is {leaf.dtype.name}{list(leaf.shape)} ({describe_layout(leaf.sharding)}), but was "
                f"planned as {plan.source[path].dtype}{list(plan.source[path].shape)} "
                f"({plan.source[path].layout.describe()}); make a new plan for the layouts there are"
            )
    return leaves


def check_destination(plan: SyncPlan, destination: Mapping[str, Sharding], numbers: Numbers, name: str) -> None:
    """Raise SyncError unless the plan writes what is declared here, and its two sides share no device.

    name: of the transport, which cannot hand over a buffer and so has no leaves in place.
    """
    known: dict[Layout, Layout] = {}
    for path, leaf in plan.leaves.items():
        if path not in destination:
            raise SyncError(f"sync: the plan writes {path}, for which the destination names no sharding")
        if leaf.in_place or leaf.bytes_local:
            raise SyncError(
                f"sync: the plan finds parts of {path} on their destination devices already; the transport {name!r} "
                f"takes everything to another process: number the two sides' devices apart"
            )
        layout = layout_of(destination[path], leaf.shape)
        if layout not in known:
            known[layout] = _renumbered(layout, numbers)
        here = known[layout]
        if here != leaf.target_layout:
            raise SyncError(
                f"sync: {path} {leaf.dtype}{list(leaf.shape)} is wanted as {here.describe()}, but was planned as "
                f"{leaf.target_layout.describe()}; make a new plan"
            )
