"""One weight sync: select -> map -> plan -> stage -> transfer -> verify -> probe -> flip, all or nothing.

    sync = WeightSync(trainable, [Route(replica, replica.transport, replica.placed)], base=leaf_digests(base))
    receipt = sync.push(counters.version + 1, actor_adapter)
    counters = counters.published(receipt)

The new weights are staged beside those being served. They are served only after every leaf's digest, computed from the
staged arrays on the destination devices, equals the sender's, the bytes that moved are those of the plan, and the probe
came out alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import jax

from lockstep.cluster.sharding import describe_layout, device_ranges
from lockstep.errors import SyncError
from lockstep.models.spec import Leaf
from lockstep.sync.arrays import device_numbers, in_default_memory, placed, require_live
from lockstep.sync.certificate import check as check_plan
from lockstep.sync.layout import Layout
from lockstep.sync.local import LocalTransport
from lockstep.sync.mapping import FormatMap, whole
from lockstep.sync.plan import LinkModel, Placed, SyncPlan
from lockstep.sync.planner import make_plan
from lockstep.sync.publish import Offer, OnFailure, Probe, Published, Publisher, Replica
from lockstep.sync.receipt import SyncReceipt
from lockstep.sync.replica import LocalReplica
from lockstep.sync.select import check_names, select
from lockstep.sync.transport import Deadline, Stored, Transport
from lockstep.sync.verify import kind_of, leaf_digests, policy_digest, start_source_digests, tree_digest
from lockstep.types import PolicyVersion

PHASES = ("select", "map", "stage", "transfer", "verify", "probe", "flip")
LINKS_SHOWN = 16  # on a receipt; the plan has them all


@dataclass(frozen=True)
class Route:
    """How the weights get to one replica. transport: the sending side's. destination: what the replica holds, asked on
    every push. mapping: what becomes what; None where names, shapes and dtypes are equal. serves: False for a replica
    that only keeps versions for others: it is not probed, and what it writes is not counted as moved."""

    replica: Replica
    transport: Transport
    destination: Callable[[], Mapping[str, Placed]]
    mapping: FormatMap | None = None
    serves: bool = True

    @classmethod
    def local(cls, replica: LocalReplica, mapping: FormatMap | None = None) -> Route:
        """To a replica in this process, over its own transport."""
        return cls(replica, replica.transport, replica.placed, mapping)


@dataclass
class _Planned:
    """The last plan of a route, and what it was made for."""

    source: Mapping[str, Placed]
    destination: Mapping[str, Placed]
    plan: SyncPlan


@dataclass
class _Clock:
    """Seconds per phase; time that no phase claims goes to the one that is on."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """What passed since the last call belongs to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class WeightSync:
    """Takes the trainable weights of one role to its replicas, version by version.

    Whether anything has to move is decided anew on every push, from the layouts that the arrays have then; the plan is
    made anew when these have changed.
    """

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        routes: Sequence[Route],
        *,
        base: Mapping[str, str],
        source_role: str = "actor",
        destination_role: str = "rollout",
        on_failure: OnFailure = "abort",
        deadline_s: float = 600.0,
        staging_bytes: int = 256 << 20,
        link: LinkModel | None = None,
        probe: Callable[[Mapping[str, jax.Array]], Probe] | None = None,
    ) -> None:
        """leaves: the table of what trains (`select.trainable_leaves`). base: leaf digests of the frozen weights, which
        every policy digest covers; empty when all weights train. on_failure: as `Publisher`. deadline_s: for one push.
        staging_bytes: most that a device sends or receives in one round. probe: makes one from the source's weights; it
        is asked only when bytes move, because the very same arrays need none.

        Raises SyncError without replicas, for a name twice, or if a replica without a map holds other leaves than
        those that train.
        """
        self._leaves = dict(leaves)
        self._roles = (source_role, destination_role)
        for route in routes:
            if route.mapping is None:
                check_names(route.destination(), leaves, f"table of destination shardings of {route.replica.name}")
        self._routes = {route.replica.name: route for route in routes}
        _check_transports(routes)
        keepers = [route.replica.name for route in routes if not route.serves]
        replicas = [route.replica for route in routes]
        self.publisher = Publisher(replicas, on_failure=on_failure, source=source_role, keepers=keepers)
        self._base = dict(base)
        self._deadline_s, self._staging_bytes, self._link = deadline_s, staging_bytes, link or LinkModel()
        self._probe = probe
        self._planned: dict[str, _Planned] = {}
        self._published: PolicyVersion | None = None
        self._failure: str | None = None
        self._syncs = 0

    @property
    def published(self) -> PolicyVersion | None:
        """The last version that a push published; None before the first."""
        return self._published

    def reset(self) -> None:
        """Make the object usable again after a failed push. The published version stays; push the weights anew."""
        self._failure = None

    def push(self, version_number: int, trainable: Mapping[str, jax.Array]) -> SyncReceipt:
        """Make every replica serve `trainable` as `version_number`.

        version_number: one more than the last one published by this object (the first may be any); the last number
        again is accepted for the very same content, to repair a destination. trainable: the source's arrays, in any
        layout; they must not be donated before this returns.

        Raises SyncError, with nothing published and the object unusable until `reset`: names, shapes, dtypes or layouts
        that do not fit, version numbers out of order, leaves that cannot be placed, content that differs after placing,
        a deadline that passed.
        """
        if self._failure is not None:
            raise SyncError(
                f"sync: an earlier push failed and this object has not been reset since; call reset() and push again. "
                f"The failure was: {self._failure}"
            )
        try:
            return self._push(version_number, trainable)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _push(self, number: int, trainable: Mapping[str, jax.Array]) -> SyncReceipt:
        clock, deadline = _Clock(), Deadline.after(self._deadline_s)
        self._check_number(number)
        source = self._select(trainable)
        clock.lap("select")
        routes = {name: self._routes[name] for name in self.publisher.replicas}
        plans = {name: self._plan(route, source) for name, route in routes.items()}
        clock.lap("map")
        here = {path: in_default_memory(leaf) for path, leaf in source.items()}  # nothing computes on offloaded ones
        digests = leaf_digests(here)
        policy = PolicyVersion(number, policy_digest(self._base, digests))
        self._check_repeat(policy)
        offered = {name: offered_digests(plan.mapping, here, digests) for name, plan in plans.items()}
        del here
        clock.lap("verify")
        moves = any(plans[name].bytes_written for name, route in routes.items() if route.serves)
        probe = self._probe(source) if self._probe and moves else None
        if probe is not None:
            clock.lap("probe")
        base = tree_digest(self._base)
        offers = {
            name: Offer(policy, plans[name], offered[name], base, probe if route.serves else None)
            for name, route in routes.items()
        }
        stored, published = self._stage_and_flip(routes, offers, source, deadline, clock)
        receipt = self._receipt(policy, source, offers, published, stored, clock)
        self._published, self._syncs = policy, receipt.syncs
        return receipt

    # -- before anything is written ----------------------------------------------------------------------------------

    def _check_number(self, number: int) -> None:
        """Version numbers grow by one; the last one may be pushed again."""
        last = self._published
        if number < 0 or (last is not None and number not in (last.number, last.number + 1)):
            wanted = "0 or more" if last is None else f"{last.number + 1} (or {last.number} again, unchanged)"
            raise SyncError(f"sync: version {number} is out of order; expected {wanted}, last published: {last}")

    def _check_repeat(self, policy: PolicyVersion) -> None:
        """One number, one content."""
        last = self._published
        if last is not None and last.number == policy.number and last.digest != policy.digest:
            raise SyncError(
                f"sync: version {policy.number} was published with digest {last.digest} and now has {policy.digest}; "
                f"weights that changed need a new version number"
            )

    def _select(self, trainable: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What trains, once it is known to be what the table says."""
        here = self._roles[0]
        check_names(trainable, self._leaves, f"source ({here})")
        require_live(trainable, here, "push before the step that donates them")
        source = select(trainable, self._leaves)
        for path, leaf in self._leaves.items():
            if source[path].shape != leaf.shape:
                raise SyncError(
                    f"sync: {path} has shape {source[path].shape} at {here}, the leaf table says {leaf.shape}; "
                    f"{here}: {describe_layout(source[path].sharding)}. Nothing was written"
                )
        return source

    def _plan(self, route: Route, source: Mapping[str, jax.Array]) -> SyncPlan:
        """The plan for the layouts that there are now: the last one where nothing has changed."""
        name = route.replica.name
        held = {path: placed(leaf) for path, leaf in source.items()}
        wanted = dict(route.destination())
        last = self._planned.get(name)
        if last is not None and last.source == held and last.destination == wanted:
            return last.plan
        if route.mapping is None:
            self._check_forms(route, source, wanted)
        plan = make_plan(held, wanted, route.mapping, link=self._link, staging_bytes=self._staging_bytes)
        check_plan(plan).require()
        self._planned[name] = _Planned(held, wanted, plan)
        return plan

    def _check_forms(self, route: Route, source: Mapping[str, jax.Array], wanted: Mapping[str, Placed]) -> None:
        """Without a map, both sides hold the same leaves in the same form."""
        here, there = self._roles[0], route.replica.name
        check_names(wanted, self._leaves, f"destination ({there})")
        for path, leaf in source.items():
            place = wanted[path]
            layouts = f"{here}: {describe_layout(leaf.sharding)}; {there}: {place.layout.describe()}"
            if leaf.shape != place.shape:
                raise SyncError(
                    f"sync: {path} has shape {leaf.shape} at {here} and {place.shape} at {there}; {layouts}. Nothing "
                    f"was written"
                )
            if leaf.dtype.name != place.dtype:
                raise SyncError(
                    f"sync: {path} is {kind_of(leaf)} at {here} and {place.dtype} at {there}, and no cast is declared; "
                    f"give both roles one dtype, or the route a map; {layouts}. Nothing was written"
                )

    # -- moving and publishing -----------------------------------------------------------------------------------------

    def _stage_and_flip(
        self,
        routes: Mapping[str, Route],
        offers: Mapping[str, Offer],
        source: Mapping[str, jax.Array],
        deadline: Deadline,
        clock: _Clock,
    ) -> tuple[dict[str, Stored], Published]:
        """(replica -> what its transport left in a store, what came of the publish)."""
        stored: dict[str, Stored] = {}
        numbers = device_numbers(leaf.sharding for leaf in source.values())
        policy = next(iter(offers.values())).policy
        local = [route.replica for route in routes.values() if isinstance(route.replica, LocalReplica)]
        try:
            for name, route in routes.items():
                sent = route.transport.send(policy.number, offers[name].plan, source, numbers, deadline, policy.digest)
                if sent.stored is not None:
                    stored[name] = sent.stored
            for replica in local:
                replica.digested = _untouched(offers[replica.name].plan, source)
            published = self.publisher.publish(offers, deadline)
        except BaseException:
            self._release(routes, policy, ())
            raise
        finally:
            for replica in local:
                replica.digested = {}
        self._release(routes, policy, published.reports)
        clock.lap("stage")
        # Replicas work side by side: of each phase the slowest counts, what is left is the staging around them.
        clock.seconds["flip"] = published.seconds["flip"]
        clock.seconds["stage"] -= published.seconds["flip"]
        for phase in ("transfer", "verify", "probe"):
            spent = max((r.seconds.get(phase, 0.0) for r in published.reports.values()), default=0.0)
            if spent or phase != "probe":
                clock.seconds[phase] = clock.seconds.get(phase, 0.0) + spent
            clock.seconds["stage"] = max(0.0, clock.seconds["stage"] - spent)
        return stored, published

    @staticmethod
    def _release(routes: Mapping[str, Route], policy: PolicyVersion, published: Collection[str]) -> None:
        """published: the replicas that have the version now."""
        for name, route in routes.items():
            route.transport.release(policy.number, name in published)

    def _receipt(
        self,
        policy: PolicyVersion,
        source: Mapping[str, jax.Array],
        offers: Mapping[str, Offer],
        published: Published,
        stored: Mapping[str, Stored],
        clock: _Clock,
    ) -> SyncReceipt:
        keep = [name for name in published.reports if not self._routes[name].serves]
        # What is only kept counts as stored, not as moved; where there is nothing else it is what moved.
        reports = {n: r for n, r in published.reports.items() if n not in keep} or published.reports
        plans = {name: offers[name].plan for name in reports}
        links = sorted(
            ((a, b, size) for report in reports.values() for (a, b), size in report.link_bytes.items() if size),
            key=lambda link: (-link[2], link),
        )
        moved = sum(report.bytes_written for report in reports.values())
        first = next(iter(reports))
        destination = self._routes[first].destination()
        return SyncReceipt(
            version=policy.number,
            digest=policy.digest,
            plan="+".join(dict.fromkeys(plan.hash for plan in plans.values())),
            source=self._roles[0],
            destination=self._roles[1],
            source_layout=mesh_words(placed(next(iter(source.values()))).layout),
            destination_layout=mesh_words(next(iter(destination.values())).layout),
            transport="+".join(dict.fromkeys(self._routes[name].transport.name for name in published.reports)),
            replicas=tuple(reports),
            evicted=dict(published.evicted),
            syncs=self._syncs + (moved > 0),
            leaves=len(source),
            bytes_selected=sum(leaf.nbytes for leaf in source.values()),
            bytes_planned=sum(plan.bytes_written for plan in plans.values()),
            bytes_moved=moved,
            bytes_crossing=sum(size for *_, size in links),
            num_links=len(links),
            links=tuple(links[:LINKS_SHOWN]),
            same_buffers=moved == 0,
            seconds={p: clock.seconds[p] for p in PHASES if p in clock.seconds},
            tree_digest=tree_digest(reports[first].digests),
            leaf_digests=dict(reports[first].digests),
            probed=reports[first].probed,
            density=next((s.density for s in stored.values() if s.density is not None), None),
            stored={name: asdict(stored[name]) for name in published.reports if name in stored},
        )


def _check_transports(routes: Sequence[Route]) -> None:
    """Raise SyncError where two replicas share what keeps one offer per version."""
    seen: dict[int, str] = {}
    for route in routes:
        name, transport = route.replica.name, route.transport
        if not isinstance(transport, LocalTransport) and (other := seen.setdefault(id(transport), name)) != name:
            raise SyncError(
                f"sync: replicas {other!r} and {name!r} share one transport of kind {transport.name!r}, which holds one "
                f"offer per version; give each replica a transport of its own"
            )


def offered_digests(mapping: FormatMap, source: Mapping[str, jax.Array], digests: Mapping[str, str]) -> dict[str, str]:
    """Target path -> the digest that it must have, from the source alone. digests: of the source's leaves, which are
    the answer wherever nothing but name and place changes."""
    same: dict[str, str] = {}
    for path, target in mapping.targets.items():
        name = target.pieces[0].source if target.pieces else ""
        if name and target.pieces == whole(name, target.shape, target.dtype).pieces:
            leaf = source[name]
            if (leaf.shape, leaf.dtype.name) == (target.shape, target.dtype):
                same[path] = digests[name]
    changed = {path: target for path, target in mapping.targets.items() if path not in same}
    return same | start_source_digests(source, replace(mapping, targets=changed))() if changed else same


def _untouched(plan: SyncPlan, source: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Target path -> the source's array, of the leaves that the plan leaves where they are."""
    return {path: source[leaf.sources[0]] for path, leaf in plan.leaves.items() if leaf.in_place}


def mesh_words(layout: Layout) -> str:
    """`fsdp=4 tensor=2 (devices 0-7) in device`."""
    sizes = " ".join(f"{axis}={size}" for axis, size in layout.mesh.axes if size > 1) or "1 device"
    return f"{sizes} ({device_ranges(layout.mesh.devices)}) in {layout.memory}"
