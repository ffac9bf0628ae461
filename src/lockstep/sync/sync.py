"""One weight sync: select -> map -> plan -> stage -> transfer -> verify -> probe -> flip, all or nothing.

    sync = WeightSync(trainable, [Route.local(replica)], base=leaf_digests(base))
    receipt = sync.push(counters.version + 1, actor_adapter)
    counters = counters.published(receipt)

The new weights are staged beside those being served. They are served only after every leaf's digest, computed from the
staged arrays on the destination devices, equals the sender's, the bytes that moved are those of the plan, and the probe
came out alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import jax

from lockstep.cluster.sharding import describe_layout, device_ranges
from lockstep.errors import SyncError
from lockstep.models.spec import Leaf
from lockstep.sync.arrays import in_default_memory, placed, require_live
from lockstep.sync.certificate import check as check_plan
from lockstep.sync.layout import Layout
from lockstep.sync.mapping import FormatMap, whole
from lockstep.sync.plan import LinkModel, Placed, SyncPlan
from lockstep.sync.planner import make_plan
from lockstep.sync.publish import Offer, OnFailure, Probe, Published, Publisher
from lockstep.sync.receipt import SyncReceipt
from lockstep.sync.route import Route, Sending, check_transports
from lockstep.sync.select import check_names, select
from lockstep.sync.transport import Deadline, Stored
from lockstep.sync.verify import kind_of, leaf_digests, policy_digest, start_source_digests, tree_digest
from lockstep.types import PolicyVersion

PHASES = ("select", "map", "stage", "transfer", "verify", "probe", "flip")
LINKS_SHOWN = 16  # on a receipt; the plan has them all


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
        drain_s: float = 0.0,
        staging_bytes: int = 256 << 20,
        link: LinkModel | None = None,
        probe: Callable[[Mapping[str, jax.Array]], Probe] | None = None,
    ) -> None:
        """leaves: the table of what trains (`select.trainable_leaves`). base: leaf digests of the frozen weights, which
        every policy digest covers; empty when all weights train. on_failure: as `Publisher`. deadline_s: for one push.
        drain_s: what comes to it because replicas may finish requests before they flip.
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
        check_transports(routes)
        keepers = [route.replica.name for route in routes if not route.serves]
        replicas = [route.replica for route in routes]
        self.publisher = Publisher(
            replicas, on_failure=on_failure, source=source_role, keepers=keepers, drain_s=drain_s
        )
        self._base = dict(base)
        self._deadline_s = deadline_s + drain_s
        self._staging_bytes, self._link = staging_bytes, link or LinkModel()
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

    def admit(self, route: Route) -> None:
        """Take a replica (back) in: one that was dropped, one that stands in for it under its name, or a new one. It
        serves from the next push on, which brings it everything, however the transport may save bytes otherwise.

        Raises SyncError if a replica of this name is there already, if two share a transport that cannot be shared, or
        if one without a map holds other leaves than those that train.
        """
        name = route.replica.name
        if name in self.publisher.replicas:
            raise SyncError(f"sync: a replica called {name!r} is there already; names must differ")
        if route.mapping is None:
            check_names(route.destination(), self._leaves, f"table of destination shardings of {name}")
        check_transports([*(self._routes[other] for other in self.publisher.replicas), route])
        route.transport.forget()
        self._planned.pop(name, None)
        self._routes[name] = route
        self.publisher.admit(route.replica, keeps=not route.serves)

    def push(
        self,
        version_number: int,
        trainable: Mapping[str, jax.Array],
        *,
        before_flip: Callable[[PolicyVersion], None] | None = None,
    ) -> SyncReceipt:
        """Make every replica serve `trainable` as `version_number`.

        version_number: one more than the last one published by this object (the first may be any); the last number
        again is accepted for the very same content, to repair a destination. trainable: the source's arrays, in any
        layout; they must not be donated before this returns. before_flip: called when every replica has staged and
        verified the version; what it raises is raised, with nothing published.

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
            return self._push(version_number, trainable, before_flip)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _push(
        self,
        number: int,
        trainable: Mapping[str, jax.Array],
        before_flip: Callable[[PolicyVersion], None] | None,
    ) -> SyncReceipt:
        clock, deadline = _Clock(), Deadline.after(self._deadline_s)
        self._check_number(number)
        source = self._select(trainable)
        clock.lap("select")
        routes, failed = self._current(), dict[str, str]()
        plans = self.publisher.each(
            "say what it holds, and plan",
            {name: partial(self._plan, route, source) for name, route in routes.items()},
            number,
            deadline.sooner(2 / 3 * deadline.remaining()),
            failed,
        )
        routes = {name: routes[name] for name in plans}
        clock.lap("map")
        here = {path: in_default_memory(leaf) for path, leaf in source.items()}  # nothing computes on offloaded ones
        digests = leaf_digests(here)
        policy = PolicyVersion(number, policy_digest(self._base, digests))
        self._check_repeat(policy)
        offered = {name: offered_digests(plan.mapping, here, digests) for name, plan in plans.items()}
        clock.lap("verify")
        moves = any(plans[name].bytes_written for name, route in routes.items() if route.serves)
        probe = self._probe(here) if self._probe and moves else None
        del here
        if probe is not None:
            clock.lap("probe")
        base = tree_digest(self._base) if self._base else ""
        offers = {
            name: Offer(policy, plans[name], offered[name], base, probe if route.serves else None)
            for name, route in routes.items()
        }
        sending = Sending(routes, source, number, policy.digest, self._roles[0])
        try:
            published = self.publisher.publish(
                offers, deadline, stages=sending.stages, failed=failed, before_flip=before_flip
            )
        except BaseException as error:
            for name, why in sending.release((), deadline).items():
                error.add_note(f"the transport to {name} failed to release version {number}: {why}")
            raise
        # From here on the version is published, whatever else happens.
        self._published = policy
        self._syncs += any(published.reports[name].bytes_written for name in self._counted(published))
        unreleased = sending.release(published.reports, deadline)
        self._count(clock, published)
        return self._receipt(source, offers, published, sending.stored, unreleased, clock)

    def _current(self) -> dict[str, Route]:
        """The routes to the replicas that there are. Raises SyncError for one that came in without a route."""
        for name, replica in self.publisher.replicas.items():
            if name not in self._routes or self._routes[name].replica is not replica:
                raise SyncError(
                    f"sync: the publisher was given another replica called {name!r} than this object has a route to; "
                    f"take it in with WeightSync.admit(route)"
                )
        return {name: self._routes[name] for name in self.publisher.replicas}

    # -- before anything is written ----------------------------------------------------------------------------------

    def _check_number(self, number: int) -> None:
        """Version numbers grow by one; the last one may be pushed again. One that some replica may serve though it was
        not published may be skipped."""
        last, doubted = self._published, self.publisher.in_doubt
        allowed = set() if last is None else {last.number, last.number + 1}
        if last is not None and doubted is not None:
            allowed |= {doubted.number, doubted.number + 1}
        if number < 0 or (allowed and number not in allowed):
            wanted = "0 or more" if last is None else f"{last.number + 1} (or {last.number} again, unchanged)"
            raise SyncError(f"sync: version {number} is out of order; expected {wanted}, last published: {last}")

    def _check_repeat(self, policy: PolicyVersion) -> None:
        """One number, one content."""
        for last, was in ((self._published, "was published"), (self.publisher.in_doubt, "may be served somewhere")):
            if last is not None and last.number == policy.number and last.digest != policy.digest:
                raise SyncError(
                    f"sync: version {policy.number} {was} with digest {last.digest} and now has {policy.digest}; "
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

    def _counted(self, published: Published) -> list[str]:
        """The replicas whose bytes are what moved: those that serve; where there are only keepers, they."""
        return [name for name in published.reports if self._routes[name].serves] or list(published.reports)

    @staticmethod
    def _count(clock: _Clock, published: Published) -> None:
        """Replicas work side by side: of each phase the slowest counts, what is left is the staging around them."""
        clock.lap("stage")
        clock.seconds["flip"] = published.seconds["flip"]
        clock.seconds["stage"] -= published.seconds["flip"]
        for phase in ("transfer", "verify", "probe"):
            spent = max((r.seconds.get(phase, 0.0) for r in published.reports.values()), default=0.0)
            if spent or phase != "probe":
                clock.seconds[phase] = clock.seconds.get(phase, 0.0) + spent
            clock.seconds["stage"] = max(0.0, clock.seconds["stage"] - spent)

    def _receipt(
        self,
        source: Mapping[str, jax.Array],
        offers: Mapping[str, Offer],
        published: Published,
        stored: Mapping[str, Stored],
        unreleased: Mapping[str, str],
        clock: _Clock,
    ) -> SyncReceipt:
        # What is only kept counts as stored, not as moved.
        policy, reports = published.policy, {name: published.reports[name] for name in self._counted(published)}
        plans = {name: offers[name].plan for name in reports}
        links = sorted(
            ((a, b, size) for report in reports.values() for (a, b), size in report.link_bytes.items() if size),
            key=lambda link: (-link[2], link),
        )
        moved = sum(report.bytes_written for report in reports.values())
        first = next(iter(reports))
        return SyncReceipt(
            version=policy.number,
            digest=policy.digest,
            plan="+".join(dict.fromkeys(plan.hash for plan in plans.values())),
            source=self._roles[0],
            destination=self._roles[1],
            source_layout=mesh_words(next(iter(plans[first].source.values())).layout),
            destination_layout=mesh_words(next(iter(plans[first].destination.values())).layout),
            transport="+".join(dict.fromkeys(self._routes[name].transport.name for name in published.reports)),
            replicas=tuple(reports),
            evicted=dict(published.evicted),
            syncs=self._syncs,
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
            unreleased=dict(unreleased),
            density=next((s.density for s in stored.values() if s.density is not None), None),
            stored={name: asdict(stored[name]) for name in published.reports if name in stored},
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


def mesh_words(layout: Layout) -> str:
    """`fsdp=4 tensor=2 (devices 0-7) in device`."""
    sizes = " ".join(f"{axis}={size}" for axis, size in layout.mesh.axes if size > 1) or "1 device"
    return f"{sizes} ({device_ranges(layout.mesh.devices)}) in {layout.memory}"
