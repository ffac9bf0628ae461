"""Several decode steps for one look of the host give what the same steps one by one give, and hold and return the same
pages."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.errors import NumericsError
from lockstep.models.spec import leaf_table
from lockstep.rollout import ahead
from lockstep.rollout.engine import Engine, request_seed
from lockstep.types import PolicyVersion, Prompt, SamplingParams, Trajectory


@pytest.fixture(scope="module")
def engines(make_engine: Any) -> dict[tuple[int, int], Engine]:
    """By (devices, decode steps at once)."""
    return {(d, n): make_engine(d, decode_steps=n) for d in (1, 2) for n in (1, 8)}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many steps were taken at once, by look of the host."""
    found: list[int] = []
    plain = ahead.steps_ahead

    def spy(*arguments: Any) -> int:
        found.append(plain(*arguments))
        return found[-1]

    monkeypatch.setattr(ahead, "steps_ahead", spy)
    yield found


def bits(done: list[Trajectory]) -> list[tuple[Any, ...]]:
    return [(t.group_id, t.index, t.finish_reason, t.completion_ids.tolist(), t.logprobs.tobytes()) for t in done]


def request(number: int, length: int, samples: int, params: SamplingParams) -> tuple[Prompt, list[int], SamplingParams]:
    ids = np.random.default_rng(number).integers(0, 262, length)
    p = Prompt(f"p{number}", "", tuple(ids.tolist()))
    return p, [request_seed(3, 1, p.id, i) for i in range(samples)], params


def serve(engine: Engine, requests: list[tuple[Prompt, list[int], SamplingParams]]) -> list[Trajectory]:
    for r in requests:
        engine.submit(*r)
    done: list[Trajectory] = []
    while engine.busy:
        done += engine.step()
        engine.check_integrity()
    free, cached, used, total = map(sum, zip(*engine.check_integrity(), strict=True))
    assert not used and free + cached == total
    return sorted(done, key=lambda t: (t.group_id, t.index))


@st.composite
def work(draw: st.DrawFn) -> list[tuple[Prompt, list[int], SamplingParams]]:
    """Prompts of several lengths, and samples that end by an id (half of the vocabulary stops), by length, or late."""
    requests = []
    for number in range(draw(st.integers(1, 4))):
        stops = draw(st.sampled_from([frozenset[int](), frozenset(range(0, 262, 2)), frozenset({7})]))
        temperature = draw(st.sampled_from([0.0, 0.7, 1.0]))
        params = SamplingParams(temperature, draw(st.integers(1, 18)), stops)
        requests.append(request(number, draw(st.integers(1, 20)), draw(st.integers(1, 5)), params))
    return requests


@settings(max_examples=8)
@given(st.sampled_from([1, 2]), work())
def test_steps_at_once_are_the_steps_one_by_one(engines: Any, devices: int, requests: Any) -> None:
    assert bits(serve(engines[devices, 8], requests)) == bits(serve(engines[devices, 1], requests))


def test_the_host_looks_once_for_eight_steps(engines: Any, taken: list[int]) -> None:
    """17 tokens: the first with the prompt's pass, then 8 + 8; a stop id that is never drawn keeps nobody."""
    serve(engines[1, 8], [request(0, 5, 3, SamplingParams(1.0, 17, frozenset()))])
    assert taken == [1, 8, 8]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, 9, frozenset(), top_p=0.5),
        SamplingParams(1.0, 9, frozenset(), presence_penalty=0.5),
        SamplingParams(1.0, 9, frozenset(), min_new_tokens=3),
        SamplingParams(1.0, 9, frozenset(), top_logprobs=2),
        SamplingParams(1.0, 9, frozenset(), stop_strings=("ab",)),
    ],
    ids=["top_p", "penalty", "min", "top", "text"],
)
def test_it_looks_every_time_where_it_has_to(make_engine: Any, taken: list[int], params: SamplingParams) -> None:
    engine = make_engine(decode=lambda ids: "".join(chr(33 + i % 90) for i in ids))
    serve(engine, [request(0, 5, 2, params), request(1, 5, 2, SamplingParams(1.0, 9, frozenset()))])
    assert set(taken) == {1}


def test_it_looks_every_time_while_somebody_waits(make_engine: Any, taken: list[int]) -> None:
    """33 samples on 32 slots: nothing is taken at once before the last one has its slot."""
    engine = make_engine(num_pages=40)
    serve(engine, [request(0, 5, 33, SamplingParams(1.0, 9, frozenset()))])
    assert taken[0] == 1 and max(taken) > 1
    first = next(i for i, n in enumerate(taken) if n > 1)
    assert first >= 9, "a slot is free after 9 tokens"


def test_pages_that_cannot_be_had_shorten_it(make_engine: Any, taken: list[int]) -> None:
    """Two samples, 5 + 40 tokens each, on 5 pages: pages run out, a sample gives way, and all is as with many pages."""
    requests = [request(0, 5, 2, SamplingParams(1.0, 40, frozenset()))]
    few, many = make_engine(num_pages=5), make_engine(num_pages=24)
    assert bits(serve(few, requests)) == bits(serve(many, requests))
    assert few.stats.preemptions and 8 in taken


def test_a_step_that_draws_for_a_sample_that_is_over_is_noticed(make_engine: Any, monkeypatch: Any) -> None:
    """The device's own count of tokens is held against the host's."""
    engine = make_engine()
    plain = ahead.decoding

    def late(*arguments: Any) -> Any:
        state = plain(*arguments)
        return state._replace(index=np.where(state.index >= 0, state.index + 1, -1))

    monkeypatch.setattr(ahead, "decoding", late)
    with pytest.raises(AssertionError, match="was next"):
        serve(engine, [request(0, 5, 2, SamplingParams(1.0, 9, frozenset()))])


def test_nothing_of_steps_that_are_not_finite_is_recorded(
    make_engine: Any, tiny_programs: Any, tiny_spec: Any, tiny_params: Any
) -> None:
    programs: Programs = tiny_programs(1)
    host = {k: np.array(v) for k, v in tiny_params(1).items()}
    engine = make_engine()
    engine.submit(*request(0, 5, 2, SamplingParams(1.0, 17, frozenset())))
    engine.step()
    before = [list(s.tokens) for s in engine._shards[0].running]
    host["layers.2.down"][0, 0] = np.nan
    broken = SplitWeights.of(place(host, leaf_table(tiny_spec), programs.mesh), tiny_spec.num_layers)
    engine._lanes.newest.weights = broken
    with pytest.raises(NumericsError, match="not finite"):
        engine.step()
    assert [s.tokens for s in engine._shards[0].running] == before
    assert len(engine.abort("p0")) == 2
    engine.check_integrity()
    assert engine.version == PolicyVersion(4, "four")
