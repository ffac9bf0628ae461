"""Where requests go: to the device that knows their beginning, where that costs little; and nobody can tell."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.engine import Engine
from lockstep.rollout.routing import SLACK, best_device
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.work import Request
from lockstep.types import Prompt, SamplingParams, Trajectory

PARAMS = SamplingParams(1.0, 6, frozenset())


def prompt(name: str, ids: list[int]) -> Prompt:
    return Prompt(name, "", tuple(ids))


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 262, length).tolist()


def bits(t: Trajectory) -> tuple:
    return t.completion_ids.tolist(), t.logprobs.tobytes()


def scheduler(load: int = 0, known: int = 0, *, slots: int = 32, waiting: int = 64) -> Scheduler:
    """With so many samples to do and so many positions of the ids 0, 1, 2 .. in its cache."""
    made = Scheduler(slots, 64, 4, 32, max_waiting=waiting)
    memory = made.memory
    pages = memory._take(0, known // 4)
    memory.cache.insert(0, range(known), memory._rows_of(pages, 0))
    memory.pages.release(pages)
    if load:
        made.submit(Request(prompt("load", [9]), tuple(range(load)), PARAMS))
    return made


ASKED = Request(prompt("asked", list(range(18))), (1, 2), PARAMS)


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ([(0, 0), (0, 0)], 0),  # nothing to tell them apart
        ([(3, 0), (2, 0)], 1),  # nothing known: the least busy
        ([(0, 0), (0, 8)], 1),  # equally busy: the one that knows more
        ([(0, 8), (4, 16)], 1),  # 4 = 32 / 8 samples busier, and it knows more
        ([(0, 8), (5, 16)], 0),  # one too many
        ([(0, 8), (4, 8)], 0),  # knows no more
        ([(0, 0), (4, 3)], 0),  # less than a page is nothing
        ([(9, 16), (0, 0), (3, 4), (2, 4)], 3),
    ],
)
def test_the_rule(devices: list[tuple[int, int]], chosen: int) -> None:
    shards = [scheduler(*d) for d in devices]
    assert SLACK == 8 and best_device(shards, ASKED) is shards[chosen]


def test_the_last_position_is_never_taken_from_the_cache_nor_any_that_is_scored() -> None:
    shard = scheduler(0, 16)
    scored = SamplingParams(1.0, 6, frozenset(), prompt_logprobs=True)
    asked = [(16, PARAMS), (17, PARAMS), (3, PARAMS), (17, scored)]
    known = [shard.known_positions(Request(prompt("a", list(range(n))), (1,), params)) for n, params in asked]
    assert known == [12, 16, 0, 0]


def test_only_devices_with_room_are_asked() -> None:
    full, free = scheduler(2, 16, waiting=2), scheduler(4, 0, waiting=64)
    assert best_device([full, free], ASKED) is free
    assert best_device([full], ASKED) is full, "it will say why not"


def test_looking_is_no_use_of_what_is_looked_at() -> None:
    shard = scheduler(0, 16)
    cache = shard.memory.cache
    before = [(used, entry.used) for used, _, entry in cache._leaves]
    best_device([shard, scheduler()], ASKED)
    assert [(used, entry.used) for used, _, entry in cache._leaves] == before


def test_the_next_turn_goes_to_the_device_that_holds_its_beginning(make_engine) -> None:
    engine: Engine = make_engine(2)
    first = [prompt("a", random_ids(1, 18)), prompt("b", random_ids(2, 18))]
    done = engine.generate(first, {p.id: [1] for p in first}, PARAMS)
    for t in reversed(done):  # not in the order in which the devices would be asked
        turn = prompt(f"{t.group_id}/2", [*t.prompt_ids.tolist(), *t.completion_ids.tolist(), 3, 4, 5])
        holder = [s.known_positions(Request(turn, (1,), PARAMS)) for s in engine._shards].index(16)
        engine.submit(turn, [1], PARAMS)
        assert engine._shards[holder].holds(turn.id)
    while engine.busy:
        engine.step()
    assert engine.stats.cached_tokens == 2 * 16


BEGINNINGS = [random_ids(n, 17) for n in range(3)]
TURNS = [prompt(f"c{n}", BEGINNINGS[n % 3] + random_ids(10 + n, 4)) for n in range(6)]


@pytest.fixture(scope="module")
def alone(make_engine) -> dict[str, list[tuple]]:
    """Each by itself on a fresh engine of one device."""
    return {p.id: [bits(t) for t in make_engine().generate([p], {p.id: [1, 2]}, PARAMS)] for p in TURNS}


@settings(max_examples=8)
@given(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_completions_do_not_depend_on_the_device(make_engine, alone, order: list[int], waits: list[int]) -> None:
    """On two devices, in any order of arrival, so with any routing."""
    engine: Engine = make_engine(2)
    done: list[Trajectory] = []
    for n, wait in zip(order, waits, strict=True):
        engine.submit(TURNS[n], [1, 2], PARAMS)
        for _ in range(wait):
            done += engine.step()
    while engine.busy:
        done += engine.step()
    done.sort(key=lambda t: t.index)
    assert {p.id: [bits(t) for t in done if t.group_id == p.id] for p in TURNS} == alone
