"""The nouns of a sync as JSON: what a trainer tells a sampler in another process.

A plan does not cross, its inputs do: the other side makes the plan anew and the two hashes must agree. So a plan that
two releases would make differently is found before anything moves.

Everything read is checked against the types of the nouns (by pydantic, strictly); what does not fit is a SyncError that
says where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lockstep.errors import SyncError
from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.mapping import FormatMap
from lockstep.sync.plan import LinkModel, Placed, SyncPlan
from lockstep.sync.planner import make_plan
from lockstep.sync.publish import Offer, Probe, StageReport
from lockstep.types import PolicyVersion

T = TypeVar("T")
Spec = tuple[tuple[str, ...], ...]
Leaf = tuple[tuple[int, ...], str, int]
"""Shape, dtype, number of the layout."""


@dataclass(frozen=True)
class Places:
    """One side of a plan. meshes, layouts: each different one once; a layout is (number of its mesh, spec, memory)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    meshes: tuple[MeshShape, ...]
    layouts: tuple[tuple[int, Spec, str], ...]
    leaves: dict[str, Leaf]


@dataclass(frozen=True)
class PlanInputs:
    """What `planner.make_plan` is called with, and the hash of what it made. relayed: whether it has relays (a plan
    without any is made alike whether or not they are allowed)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    source: Places
    destination: Places
    mapping: FormatMap
    link: LinkModel
    staging_bytes: int
    relayed: bool
    hash: str


@dataclass(frozen=True)
class OfferHead:
    """An offer whose plan is known by its hash."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    policy: PolicyVersion
    plan: str
    digests: dict[str, str]
    base_digest: str
    probe: Probe | None


@dataclass(frozen=True)
class ReportForm:
    """A stage report; link_bytes as (sender, receiver, bytes)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    replica: str
    digests: dict[str, str]
    link_bytes: tuple[tuple[int, int, int], ...]
    bytes_written: int
    probed: int
    seconds: dict[str, float]


_PLAN, _OFFER, _REPORT = TypeAdapter(PlanInputs), TypeAdapter(OfferHead), TypeAdapter(ReportForm)
_PLACES, _POLICY = TypeAdapter(Places), TypeAdapter(PolicyVersion)


def places_to_json(places: Mapping[str, Placed]) -> dict[str, Any]:
    """path -> Placed, layouts listed once."""
    return _PLACES.dump_python(_places(places), mode="json")


def places_from_json(value: object) -> dict[str, Placed]:
    """The same, read."""
    return _placed(_checked(_PLACES, value, "a description of places"))


def plan_to_json(plan: SyncPlan) -> dict[str, Any]:
    """The plan's inputs and its hash."""
    inputs = PlanInputs(
        _places(plan.source),
        _places(plan.destination),
        plan.mapping,
        plan.link,
        plan.staging_bytes,
        plan.relayed,
        plan.hash,
    )
    return _PLAN.dump_python(inputs, mode="json")


def plan_from_json(value: object) -> SyncPlan:
    """The plan, made here. Raises SyncError when its hash is not the one that came with it."""
    inputs = _checked(_PLAN, value, "a plan's description")
    source, destination = _placed(inputs.source), _placed(inputs.destination)
    plan = make_plan(source, destination, inputs.mapping, inputs.link, inputs.staging_bytes, inputs.relayed)
    if plan.hash != inputs.hash:
        raise SyncError(
            f"sync: from the same description the trainer made plan {inputs.hash} and this side {plan.hash}; both "
            f"sides must run the same release"
        )
    return plan


def _places(places: Mapping[str, Placed]) -> Places:
    meshes: dict[MeshShape, int] = {}
    layouts: dict[Layout, int] = {}
    leaves: dict[str, Leaf] = {}
    for path, place in places.items():
        meshes.setdefault(place.layout.mesh, len(meshes))
        leaves[path] = tuple(place.shape), place.dtype, layouts.setdefault(place.layout, len(layouts))
    forms = tuple((meshes[layout.mesh], layout.spec, layout.memory) for layout in layouts)
    return Places(tuple(meshes), forms, leaves)


def _placed(places: Places) -> dict[str, Placed]:
    try:
        layouts = [Layout(places.meshes[mesh], spec, memory) for mesh, spec, memory in places.layouts]
        return {path: Placed(shape, dtype, layouts[number]) for path, (shape, dtype, number) in places.leaves.items()}
    except (IndexError, AssertionError) as error:
        raise SyncError(f"sync: a description from the other side has layouts that cannot be: {error}") from error


def offer_to_json(offer: Offer) -> dict[str, Any]:
    """The offer, its plan as a hash."""
    head = OfferHead(offer.policy, offer.plan.hash, dict(offer.digests), offer.base_digest, offer.probe)
    return _OFFER.dump_python(head, mode="json")


def offer_from_json(value: object, plan_of: Callable[[str], SyncPlan]) -> Offer:
    """plan_of: the plan that has this hash, or raises."""
    head = _checked(_OFFER, value, "an offer")
    return Offer(head.policy, plan_of(head.plan), head.digests, head.base_digest, head.probe)


def report_to_json(report: StageReport) -> dict[str, Any]:
    """The report as JSON."""
    links = tuple((*link, count) for link, count in report.link_bytes.items())
    form = ReportForm(
        report.replica, dict(report.digests), links, report.bytes_written, report.probed, dict(report.seconds)
    )
    return _REPORT.dump_python(form, mode="json")


def report_from_json(value: object) -> StageReport:
    """The report that the other side made."""
    form = _checked(_REPORT, value, "a stage report")
    links = {(sender, receiver): count for sender, receiver, count in form.link_bytes}
    return StageReport(form.replica, form.digests, links, form.bytes_written, form.probed, form.seconds)


def policy_to_json(policy: PolicyVersion | None) -> dict[str, Any] | None:
    """`{"number": 3, "digest": "..."}`, or null for none."""
    return None if policy is None else {"number": policy.number, "digest": policy.digest}


def policy_from_json(value: object) -> PolicyVersion | None:
    """The version, or None for null."""
    return None if value is None else _checked(_POLICY, value, "a policy version")


def _checked(adapter: TypeAdapter[T], value: object, what: str) -> T:
    try:
        # As JSON, where an array may be a tuple; as Python, strictly, it may not.
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole of it"
        raise SyncError(f"sync: {what} from the other side does not fit at {where}: {first['msg']}") from error
