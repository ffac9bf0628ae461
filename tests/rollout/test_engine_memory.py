"""Cache hits, preemption, swapping, chunks: they decide when a row is computed, never what comes out.

Every case is compared, bit for bit, with the same requests each alone on an engine with room for everything.
"""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import QueueFullError
from lockstep.rollout.engine import Engine, request_seed
from lockstep.rollout.swap import SwapCosts
from lockstep.types import Prompt, SamplingParams, Trajectory

PARAMS = SamplingParams(1.0, 24, frozenset())
# Prompt length and samples; prompts 0 to 2 begin alike, beyond a page.
SHAPES = [(20, 3), (23, 2), (18, 2), (5, 3), (16, 1), (1, 2)]


@cache
def prompts() -> list[Prompt]:
    rng = np.random.default_rng(5)
    alike = rng.integers(0, 262, 17).tolist()
    made = []
    for number, (length, _) in enumerate(SHAPES):
        ids = rng.integers(0, 262, length).tolist()
        made.append(Prompt(f"m{number}", "", tuple(alike + ids[17:] if number < 3 else ids)))
    return made


def seeds(number: int) -> list[int]:
    return [request_seed(0, 1, f"m{number}", i) for i in range(SHAPES[number][1])]


def bits(t: Trajectory) -> tuple:
    return t.completion_ids.tolist(), t.logprobs.tobytes(), t.finish_reason


@pytest.fixture(scope="module")
def alone(make_engine) -> dict[tuple[str, int], tuple]:
    found = {}
    for number, p in enumerate(prompts()):
        engine = make_engine()
        found |= {(t.group_id, t.index): bits(t) for t in engine.generate([p], {p.id: seeds(number)}, PARAMS)}
        assert engine.stats.cached_tokens == engine.stats.preemptions == 0
    return found


@settings(max_examples=4)
@given(
    order=st.permutations(range(len(SHAPES))),
    slots=st.sampled_from([2, 5, 32]),
    num_pages=st.sampled_from([4, 6, 9, 24]),
    prefill_rows=st.sampled_from([1, 9, 32]),
    swap=st.sampled_from(["auto", "always", "never"]),
    waits=st.lists(st.integers(0, 4), min_size=len(SHAPES), max_size=len(SHAPES)),
)
def test_completions_do_not_depend_on_memory(
    make_engine, alone, order: list[int], slots: int, num_pages: int, prefill_rows: int, swap: str, waits: list[int]
) -> None:
    engine: Engine = make_engine(slots=slots, num_pages=num_pages, prefill_rows=prefill_rows, swap=swap)
    done: list[Trajectory] = []
    for number, wait in zip(order, waits, strict=True):
        engine.submit(prompts()[number], seeds(number), PARAMS)
        for _ in range(wait):
            done += engine.step()
            engine.check_integrity()
    while engine.busy:
        done += engine.step()
        engine.check_integrity()
    assert len(done) == sum(samples for _, samples in SHAPES)
    assert {(t.group_id, t.index): bits(t) for t in done} == alone


@pytest.mark.parametrize(("devices", "swap"), [(1, "always"), (1, "never"), (2, "always")])
def test_preempted_samples_come_back_as_if_nothing_had_happened(make_engine, alone, devices: int, swap: str) -> None:
    engine: Engine = make_engine(devices, num_pages=5, swap=swap)
    done = engine.generate(prompts(), {p.id: seeds(n) for n, p in enumerate(prompts())}, PARAMS)
    assert {(t.group_id, t.index): bits(t) for t in done} == alone
    assert engine.stats.preemptions > 0 and (engine.stats.swaps > 0) == (swap == "always")


def test_equal_prompts_and_next_turns_are_found_in_the_cache(make_engine) -> None:
    engine: Engine = make_engine()
    p = prompts()[0]
    first = engine.generate([p], {p.id: [1, 2]}, PARAMS)
    computed = engine.stats.prompt_tokens
    again = engine.generate([p], {p.id: [1, 2]}, PARAMS)
    assert [bits(t) for t in again] == [bits(t) for t in first]
    assert engine.stats.prompt_tokens - computed == 20 - 16 and engine.stats.cached_tokens == 16
    turn = Prompt("turn", "", (*first[1].prompt_ids.tolist(), *first[1].completion_ids.tolist()[:20], 7, 8))
    params = SamplingParams(1.0, 5, frozenset())
    warm = engine.generate([turn], {"turn": [3]}, params)
    assert engine.stats.cached_tokens == 16 + 32, "42 ids: two whole pages and the rest is computed"
    cold = make_engine().generate([turn], {"turn": [3]}, params)
    assert bits(warm[0]) == bits(cold[0])


def test_a_new_version_starts_from_nothing(make_engine, tiny_params) -> None:
    engine: Engine = make_engine()
    p = prompts()[0]
    engine.generate([p], {p.id: [1]}, PARAMS)
    assert engine.check_integrity()[0][1] > 0
    assert engine.version is not None
    engine.install(engine.version, tiny_params(1, 8))  # whatever it is called: other weights may be behind it
    assert engine.check_integrity() == [(24, 0, 0, 24)]
    new = engine.generate([p], {p.id: [1]}, PARAMS)
    assert engine.stats.cached_tokens == 0
    fresh: Engine = make_engine()
    fresh.install(engine.version, tiny_params(1, 8))
    assert bits(new[0]) == bits(fresh.generate([p], {p.id: [1]}, PARAMS)[0])


def test_the_queue_is_bounded_and_generate_waits(make_engine) -> None:
    engine: Engine = make_engine(slots=2, max_waiting=3)
    engine.submit(prompts()[0], [1, 2, 3, 4], PARAMS)
    with pytest.raises(QueueFullError, match="'m1': 4 samples wait to be started, 1 more exceed the bound of 3"):
        engine.submit(prompts()[1], [1], PARAMS)
    assert len(engine.abort("m0")) == 4 and not engine.busy
    done = engine.generate(prompts(), {p.id: [1, 2] for p in prompts()}, SamplingParams(1.0, 2, frozenset()))
    assert [(t.group_id, t.index) for t in done] == [(p.id, i) for p in prompts() for i in (0, 1)]


def test_swapping_is_chosen_when_it_is_cheaper() -> None:
    costs = SwapCosts(bytes_per_row=1000)
    assert costs.pays(5), "nothing is known of a pass: it may take for ever"
    costs.ran(rows=10, seconds=1e-5)
    assert not costs.pays(5), "1 us to compute a row, 2 us to copy it there and back by assumption"
    costs.copied(100, 2e-5, out=True)
    assert not costs.pays(5), "one direction is not known yet"
    costs.copied(100, 2e-5, out=False)
    assert costs.pays(5) and not costs.pays(0)
    costs.ran(rows=0, seconds=1.0)
    costs.ran(rows=1, seconds=5.0)
    assert costs.pays(5), "a slow pass, which may have compiled, changes nothing"
