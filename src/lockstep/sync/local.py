"""The transport within one process: the plan carried out box by box, and measured as it is.

    transport = LocalTransport()
    transport.send(7, plan, actor, numbers, deadline)
    staged = transport.receive(7, plan, rollout_shardings, numbers, deadline)

A leaf is either *in place* - every destination device holds exactly its part already, so the destination uses the
source's buffers and nothing is allocated - or it is written whole into buffers of its own. There is nothing in
between: a leaf that shares only some of its shards with the trainer would be half gone after a donation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
from jax.sharding import Sharding

from lockstep.cluster.devices import HostMemory, in_host_memory
from lockstep.cluster.sharding import describe_layout
from lockstep.errors import SyncError
from lockstep.sync import local_device, local_host
from lockstep.sync.arrays import layout_of, require_live, reuse, shared_devices
from lockstep.sync.ends import checked_source
from lockstep.sync.moves import Move, Prepared, prepare
from lockstep.sync.plan import SyncPlan
from lockstep.sync.transport import Deadline, Sent, Staged

Way = Literal["host", "device"]
Carrier = Callable[..., dict[str, jax.Array]]


@dataclass(frozen=True)
class _Sent:
    """What `send` leaves for `receive`."""

    plan: SyncPlan
    source: dict[str, jax.Array]
    numbers: dict[int, jax.Device]


class LocalTransport:
    """Both sides in one process; device numbers are jax's ids. way: `host` copies regions from memory to memory where
    devices are the host's own memory, `device` works everywhere; default: what the devices allow. memory: buffers of
    the first way."""

    name = "local"

    def __init__(self, way: Way | None = None) -> None:
        self._way = way
        self._sent: dict[int, dict[str, _Sent]] = {}
        self.memory = HostMemory()
        self._prepared: tuple[str, Prepared] | None = None

    def send(
        self,
        version: int,
        plan: SyncPlan,
        source: Mapping[str, jax.Array],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
        digest: str = "",
    ) -> Sent:
        """As `Transport.send`; the moving is done by `receive`. Raises SyncError if `source` is not what was planned
        for: leaves missing, of another form or layout, deleted."""
        start = time.perf_counter()
        leaves = checked_source(plan, source, version)
        self._sent.setdefault(version, {})[plan.hash] = _Sent(plan, leaves, dict(numbers))
        return Sent({}, time.perf_counter() - start)

    def receive(
        self,
        version: int,
        plan: SyncPlan,
        destination: Mapping[str, Sharding],
        numbers: Mapping[int, jax.Device],
        deadline: Deadline,
    ) -> Staged:
        """As `Transport.receive`. The deadline is looked at between rounds: work on devices that is under way cannot be
        called back."""
        start = time.perf_counter()
        offers = self._sent.get(version, {})
        if plan.hash not in offers:
            known = f"plans {', '.join(offers)}" if offers else "nothing"
            raise SyncError(f"sync: plan {plan.hash} of version {version} was not sent here; what was: {known}")
        sent = offers[plan.hash]
        self._require_planned(plan, destination)
        prepared = self._prepare(plan)
        require_live(sent.source, "the source", "keep them until the sync has been released")
        staged = {path: reuse(sent.source[name], destination[path]) for path, name in prepared.in_place.items()}
        for path, name in prepared.in_place.items():
            on = shared_devices(sent.source[name], staged[path])
            assert len(on) == len(destination[path].device_set) or not staged[path].size, f"{path} was copied"
        links: dict[tuple[int, int], int] = {}

        def moved(move: Move, size: int) -> None:
            if move.sender != move.receiver:
                link = (move.sender, move.receiver)
                links[link] = links.get(link, 0) + size

        def check() -> None:
            if not deadline.remaining():
                raise deadline.missed("the sampler", "the trainer's weights", "rounds of copies", version)

        if prepared.parts:
            try:
                staged |= self._carrier(sent.source, destination)(
                    plan, prepared, sent.source, destination, {**sent.numbers, **numbers}, moved, check
                )
            # jax reports what does not fit as any of these, depending on the backend.
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise SyncError(f"sync: version {version} could not be placed ({plan.hash}): {error}") from error
        ordered = {path: staged[path] for path in plan.leaves}
        jax.block_until_ready(ordered)
        return Staged(ordered, links, time.perf_counter() - start)

    def forget(self) -> None:
        """As `Transport.forget`: every version is whole anyway."""

    def release(self, version: int, published: bool) -> None:
        """As `Transport.release`."""
        self._sent.pop(version, None)

    def _prepare(self, plan: SyncPlan) -> Prepared:
        if self._prepared is None or self._prepared[0] != plan.hash:
            self._prepared = plan.hash, prepare(plan)
        return self._prepared[1]

    def _carrier(self, source: Mapping[str, jax.Array], destination: Mapping[str, Sharding]) -> Carrier:
        way = self._way
        if way is None:
            used = {d for leaf in source.values() for d in leaf.sharding.device_set}
            used |= {d for sharding in destination.values() for d in sharding.device_set}
            way = "host" if in_host_memory(list(used)) else "device"
        return partial(local_host.carry_out, memory=self.memory) if way == "host" else local_device.carry_out

    @staticmethod
    def _require_planned(plan: SyncPlan, destination: Mapping[str, Sharding]) -> None:
        for path, leaf in plan.leaves.items():
            if path not in destination:
                raise SyncError(f"sync: the plan writes {path}, for which the destination names no sharding")
            if layout_of(destination[path], leaf.shape) != leaf.target_layout:
                raise SyncError(
                    f"sync: {path} {leaf.dtype}{list(leaf.shape)} is wanted as {describe_layout(destination[path])}, "
                    f"but was planned as {leaf.target_layout.describe()}; make a new plan"
                )
