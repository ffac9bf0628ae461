"""What crosses between processes comes back to the bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fakes import FINGERPRINT, request
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ServiceError
from lockstep.service import codec
from lockstep.service.requests import (
    Cancelled,
    EngineStatus,
    Finished,
    Lost,
    Progress,
    Refused,
    Retired,
    RolloutRequest,
    Tokens,
)
from lockstep.types import Details, PolicyVersion, Prompt, SamplingParams, Trajectory

FLOATS = st.floats(-1e3, 0, width=32) | st.sampled_from([float("nan"), float("-inf"), float("inf")])


def through(value: object) -> object:
    return json.loads(json.dumps(value, allow_nan=False))


@st.composite
def trajectories(draw) -> Trajectory:
    n = draw(st.integers(0, 5))
    floats = st.lists(FLOATS, min_size=n, max_size=n).map(lambda v: np.asarray(v, np.float32))
    prompt = np.asarray(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)), np.int32)
    details = None
    if draw(st.booleans()):
        scored = np.concatenate([[np.nan], draw(st.lists(FLOATS, min_size=len(prompt) - 1, max_size=len(prompt) - 1))])
        top = n > 0 and draw(st.booleans())
        details = Details(
            scored.astype(np.float32),
            np.arange(2 * n, dtype=np.int32).reshape(n, 2) if top else None,
            np.full((n, 2), -0.1, np.float32) if top else None,
        )
    return Trajectory(
        prompt, np.arange(n, dtype=np.int32), draw(floats), np.full(n, 3, np.int32),
        draw(st.sampled_from(["stop", "length", "abort"])), draw(st.integers(0, 2**64 - 1)), draw(st.text(max_size=5)),
        1,
        FINGERPRINT, 0.25, kept_logmass=draw(st.none() | floats), details=details,
    )  # fmt: skip


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, Trajectory | Details):
        return type(a) is type(b) and all(same(v, getattr(b, k)) for k, v in vars(a).items() if k != "reward")
    return a == b


@given(trajectories())
def test_a_trajectory_comes_back_to_the_bit(t: Trajectory) -> None:
    for kind in (Finished, Cancelled):
        back = codec.event_from_json(through(codec.event_to_json(kind("r", (t,)))))
        assert type(back) is kind and back.request_id == "r" and same(back.trajectories[0], t)


@given(
    st.builds(
        SamplingParams,
        st.floats(0, 2),
        st.integers(1, 9),
        st.frozensets(st.integers(0, 9)),
        st.lists(st.text(min_size=1), max_size=2).map(tuple),
        logit_bias=st.just(((3, 0.5),)),
        allowed_ids=st.none() | st.frozensets(st.integers(0, 9)),
    ),
    st.booleans(),
)
def test_a_request_comes_back(params: SamplingParams, hurried: bool) -> None:
    asked = RolloutRequest(Prompt("a", "text", (1, 2)), (5, 2**64 - 1), params, "g", 3, True, "key")
    asked = asked if not hurried else RolloutRequest(asked.prompt, asked.seeds, params, queue_s=2.5)
    assert codec.request_from_json(through(codec.request_to_json(asked))) == asked


@pytest.mark.parametrize(
    "event",
    [
        Progress("a", Tokens(1, (4, 5), (float(np.float32(-0.1)), -2.0))),
        Progress("a", Tokens(0, (4,), (float("-inf"),), (((4, float("-inf")), (5, -1.5)),))),
        Refused("a", "why"),
        Retired(PolicyVersion(1, "d"), 10, 2),
        Lost("gone"),
    ],
)
def test_events_come_back(event) -> None:
    assert codec.event_from_json(through(codec.event_to_json(event))) == event


def test_a_status_comes_back() -> None:
    status = EngineStatus((PolicyVersion(1, "d"),), 1, 2, (3, 4, 5, 12), 6, 7.5, {"passes": 8})
    assert codec.status_from_json(through(codec.status_to_json(status))) == status


@pytest.mark.parametrize("value", [None, {}, {"prompt": 3}, {**codec.request_to_json(request("a")), "seeds": "x"}])
def test_what_is_no_request_is_said(value) -> None:
    with pytest.raises(ServiceError, match="a request cannot be read"):
        codec.request_from_json(value)


@pytest.mark.parametrize("value", [{"kind": "Other"}, {"kind": "Lost"}, {"kind": "Finished", "trajectories": [{}]}])
def test_what_is_no_event_is_said(value) -> None:
    with pytest.raises(ServiceError):
        codec.event_from_json(value)
