"""Batches of rollouts: what is consumed of them, in what order they are asked for, and who says what is missing."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import QueueFullError
from lockstep.rollout.engine import request_seed
from lockstep.service.requests import Ended, RolloutRequest, Started
from lockstep.train.rollouts import Batch, Batches, consumable, dropped_counts
from lockstep.train.watchdog import Watchdog
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

IDS = np.arange(2, dtype=np.int32)


def test_the_watchdog_says_nothing_to_those_who_are_quick() -> None:
    said: list[str] = []
    with Watchdog(said.append, 60).watching(lambda: "x"):
        pass
    with Watchdog(said.append, 0.01).watching(lambda: "step 9"):
        until = time.monotonic() + 30
        while len(said) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(said) >= 2 and said[0].startswith("step 9 (for ")


# ---------------------------------------------------------------- parts


def batch_of(*ends: Ended) -> Batch:
    prompts = [Prompt(str(i), "", (1,)) for i in range(len(ends))]
    return Batch(1, prompts, 0, {p.id: end for p, end in zip(prompts, ends, strict=True)})


def test_reasons_are_counted() -> None:
    good = Trajectory(IDS, IDS, np.zeros(2, np.float32), IDS, "stop", 0, "3", 0, Fingerprint("", "", "", ""))
    ends = [Ended("failed", reason="x: y"), Ended("aborted", reason="z"), Ended("failed"), Ended("finished", (good,))]
    kept, dropped = consumable(batch_of(*ends), 0, "drop")
    assert kept == [good] and list(dropped) == ["0", "1", "2"]
    assert dropped_counts(dropped) == {"dropped/stale": 0, "dropped/aborted": 1, "dropped/failed": 2}
    kept, dropped = consumable(batch_of(*ends), 1, "drop")  # its first token is of version 0
    assert not kept and len(dropped) == 4


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_a_group_is_consumed_whole_or_not_at_all(groups: list[list[list[int]]], oldest: int) -> None:
    """groups: versions of the tokens of each sample of each group."""
    ends = [
        Ended("finished", tuple(made(versions, str(g), i) for i, versions in enumerate(samples))[::-1])
        for g, samples in enumerate(groups)
    ]
    wanted = [g for g, samples in enumerate(groups) if all(v >= oldest for versions in samples for v in versions)]
    kept, dropped = consumable(batch_of(*ends), oldest, "fail")
    assert [(t.group_id, t.index) for t in kept] == [(str(g), i) for g in wanted for i in range(len(groups[g]))]
    assert sorted([*dropped, *map(str, wanted)]) == [str(g) for g in range(len(groups))]
    assert dropped_counts(dropped)["dropped/stale"] == len(dropped)


def made(versions: list[int], group: str, index: int) -> Trajectory:
    ids, zeros = np.zeros(len(versions), np.int32), np.zeros(len(versions), np.float32)
    return Trajectory(
        IDS, ids, zeros, np.array(versions, np.int32), "stop", 0, group, index, Fingerprint("", "", "", "")
    )


class Full:
    """A service that refuses every second request at first, and answers at once."""

    def __init__(self) -> None:
        self.asked: list[RolloutRequest] = []
        self.refuse = True

    def submit(self, request: RolloutRequest, on_event) -> None:
        self.refuse = not self.refuse
        if self.refuse:
            raise QueueFullError("too many wait")
        self.asked.append(request)
        on_event(Started(PolicyVersion(0, "0"), "one"))
        on_event(Ended("finished"))


def test_what_a_full_queue_refuses_is_sent_again_in_order() -> None:
    service = Full()
    batches = Batches(service, SamplingParams(1.0, 2, frozenset()), seed=3, samples=2)
    prompts = [Prompt(str(i), "", (1,)) for i in range(5)]
    batches.ask([Batch(1, prompts, 7)])
    batch = batches.collect(1, 60)
    assert [r.id for r in service.asked] == list(batch.ends) == ["0", "1", "2", "3", "4"]
    assert {r.min_version for r in service.asked} == {7} and batch.first <= batch.last and batches.open == 0
    assert service.asked[4].seeds == tuple(request_seed(3, 1, "4", i) for i in range(2))
