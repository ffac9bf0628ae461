"""A worker's promises, with real engines: order, exactly one end for each request, and nothing left behind."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lockstep.errors import CapacityError, ConfigError, ServiceError, SyncError
from lockstep.rollout.engine import Engine
from lockstep.service.requests import (
    Cancelled,
    Finished,
    Lost,
    Progress,
    Refused,
    Retired,
    RolloutRequest,
    WorkerEvent,
)
from lockstep.service.worker import NOTE_S, WINDOW_S, EngineWorker, Rate
from lockstep.types import PolicyVersion, Prompt, SamplingParams, Trajectory

PATIENCE_S = 120  # until a test gives up; nothing is asserted of a time


class Heard:
    """What a worker said, and a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: WorkerEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, enough: Callable[[list[WorkerEvent]], Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self.events), PATIENCE_S), self.events
            return enough(self.events)

    def end_of(self, request_id: str) -> Finished | Cancelled | Refused:
        return self.wait(lambda events: ends(events).get(request_id, [None])[0])

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def ends(events: list[WorkerEvent]) -> dict[str, list[Finished | Cancelled | Refused]]:
    found: dict[str, list] = defaultdict(list)
    for e in events:
        if isinstance(e, Finished | Cancelled | Refused):
            found[e.request_id].append(e)
    return found


def request(name: str, samples: int = 2, new: int = 6, stream: bool = False, **params: Any) -> RolloutRequest:
    ids = tuple(np.random.default_rng(len(name) + sum(map(ord, name))).integers(0, 262, 7).tolist())
    seeds = tuple(range(100, 100 + samples))
    return RolloutRequest(Prompt(name, "", ids), seeds, SamplingParams(1.0, new, frozenset(), **params), stream=stream)


def bits(t: Trajectory) -> tuple:
    return t.index, t.completion_ids.tolist(), t.logprobs.tobytes(), t.versions.tolist(), t.finish_reason


@pytest.fixture
def serve(make_engine) -> Iterator[Callable[..., tuple[EngineWorker, Heard]]]:
    """serve(engine=None, start=True, **options of the engine): a worker, and what it says."""
    made: list[EngineWorker] = []

    def make(engine: Engine | None = None, start: bool = True, decode=None, **options: Any):
        worker, heard = EngineWorker("w0", engine or make_engine(**options), decode=decode), Heard()
        made.append(worker)
        if start:
            worker.start(heard)
        return worker, heard

    yield make
    for worker in made:
        worker.close()


def alone(make_engine, r: RolloutRequest) -> list[tuple]:
    return [bits(t) for t in make_engine().generate([r.prompt], {r.id: r.seeds}, r.params)]


def slow(engine: Engine, gate: threading.Event) -> list[int]:
    """The engine's next steps wait for the gate. Returns the count of steps begun."""
    begun: list[int] = []
    step = engine.step

    def wait() -> list[Trajectory]:
        begun.append(1)
        assert gate.wait(PATIENCE_S)
        return step()

    engine.step = wait  # type: ignore[method-assign]
    return begun


# -- requests ----------------------------------------------------------------------------------------------------------


def test_what_comes_back_is_what_the_engine_gives(serve, make_engine) -> None:
    worker, heard = serve(decode=lambda ids: f"{len(ids)} tokens")
    asked = [request("a", 3), request("b", 1, 17), request("c", 4, 2)]
    for r in asked:
        worker.submit(r)
    for r in asked:
        end = heard.end_of(r.id)
        assert isinstance(end, Finished) and [bits(t) for t in end.trajectories] == alone(make_engine, r)
        assert all(t.text == f"{r.params.max_new_tokens} tokens" for t in end.trajectories)
    assert len(heard.events) == 3, "nobody asked for a stream"
    status = worker.status()
    assert status.versions == (PolicyVersion(4, "four"),) and (status.running, status.waiting) == (0, 0)
    assert status.tokens == 3 * 6 + 17 + 8 and status.counts["passes"] > 0 and worker.capacity == 32
    assert sum(status.pages[:3]) == status.pages[3] == 24


@pytest.mark.parametrize("decode_steps", [1, 8])
def test_streamed_tokens_are_the_trajectory_and_all_come_before_its_end(serve, decode_steps: int) -> None:
    worker, heard = serve(decode_steps=decode_steps, num_pages=6)  # few pages: samples are preempted on the way
    worker.submit(request("s", 4, 30, stream=True))
    worker.submit(request("quiet", 2, 30))
    worker.submit(request("t", 1, 30, stream=True, stop_strings=()))
    for name in ("s", "t", "quiet"):
        heard.end_of(name)
    for name in ("s", "t"):
        at = next(i for i, e in enumerate(heard.events) if isinstance(e, Finished) and e.request_id == name)
        said = [(i, e.tokens) for i, e in enumerate(heard.events) if isinstance(e, Progress) and e.request_id == name]
        assert all(i < at and tokens.ids and len(tokens.ids) == len(tokens.logprobs) for i, tokens in said)
        for t in heard.events[at].trajectories:
            mine = [tokens for _, tokens in said if tokens.index == t.index]
            assert [i for tokens in mine for i in tokens.ids] == t.completion_ids.tolist()
            assert (
                np.asarray([p for tokens in mine for p in tokens.logprobs], np.float32).tobytes()
                == t.logprobs.tobytes()
            )
            assert len(mine) > 3, "not all at the end"
    assert {e.request_id for e in heard.of(Progress)} == {"s", "t"}


def test_what_cannot_run_is_refused_and_nothing_else_is_touched(serve) -> None:
    worker, heard = serve(slots=2, max_waiting=2)
    too_long = request("long", new=99)
    with pytest.raises(CapacityError, match="sized for 48"):
        worker.check(too_long)
    with pytest.raises(ConfigError, match="temperature"):
        worker.check(RolloutRequest(request("x").prompt, (1,), SamplingParams(-1.0, 3, frozenset())))
    gate = threading.Event()
    begun = slow(worker.call(lambda engine: engine), gate)
    worker.submit(request("runs", 2, 20))
    while not begun:
        time.sleep(0.001)
    for r in (too_long, request("waits", 2, 3), request("runs", 1), request("full", 2), request("odd", new="many")):
        worker.submit(r)
    gate.set()
    reasons = {name: heard.wait(lambda e, n=name: [x for x in ends(e)[n] if isinstance(x, Refused)])[0].reason
               for name in ("long", "runs", "full", "odd")}  # fmt: skip
    assert "sized for 48" in reasons["long"] and "under way already" in reasons["runs"]
    assert "exceed the bound of 2" in reasons["full"] and reasons["odd"].startswith("TypeError")
    for name in ("runs", "waits"):
        heard.wait(lambda e, n=name: [x for x in ends(e)[n] if isinstance(x, Finished)])


def test_commands_from_many_threads_each_end_once(serve, make_engine) -> None:
    worker, heard = serve(slots=8, num_pages=12)
    asked = [request(f"r{i}", 1 + i % 3, 1 + i % 12, stream=i % 4 == 0) for i in range(48)]

    def use(mine: list[RolloutRequest], seed: int) -> None:
        rng = random.Random(seed)
        for r in mine:
            worker.submit(r)
            if rng.random() < 0.4:
                worker.cancel(rng.choice(asked).id)
            if rng.random() < 0.2:
                assert worker.call(lambda engine: sum(engine.pages[:3])) == 12
            worker.status()

    threads = [threading.Thread(target=use, args=(asked[k::4], k)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard.wait(lambda events: len(ends(events)) == len(asked))
    worker.call(lambda engine: engine.check_integrity())
    found = ends(heard.events)
    assert all(len(e) == 1 for e in found.values())
    assert not worker.call(lambda engine: engine.busy) and worker.status().pages[2] == 0
    finished = [r for r in asked if isinstance(found[r.id][0], Finished)]
    for r in random.Random(0).sample(finished, min(6, len(finished))):
        assert [bits(t) for t in found[r.id][0].trajectories] == alone(make_engine, r)


# -- cancel ------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_carries_what_there_is_of_it(serve, make_engine) -> None:
    worker, heard = serve(slots=2, decode_steps=1)
    r = request("c", 3, 24, stream=True)
    worker.submit(r)
    heard.wait(lambda events: len([e for e in events if isinstance(e, Progress)]) > 6)
    worker.cancel("c")
    worker.cancel("c")
    end = heard.end_of("c")
    assert isinstance(end, Cancelled) and [t.index for t in end.trajectories] == [0, 1, 2]
    whole = {t[0]: t for t in alone(make_engine, r)}
    for t in end.trajectories:
        n = len(t.completion_ids)
        assert t.completion_ids.tolist() == whole[t.index][1][:n] and t.logprobs.tobytes() == whole[t.index][2][: 4 * n]
        assert t.finish_reason == "abort"
        assert n == sum(len(e.tokens.ids) for e in heard.of(Progress) if e.tokens.index == t.index)
    assert len(end.trajectories[2].completion_ids) == 0, "it had no slot yet"
    worker.call(lambda engine: engine.check_integrity())
    assert len(ends(heard.events)["c"]) == 1 and worker.status().pages[2] == 0


def test_cancelling_what_is_not_under_way_says_nothing(serve) -> None:
    worker, heard = serve()
    worker.cancel("never heard of")
    worker.submit(request("a"))
    heard.end_of("a")
    worker.cancel("a")
    worker.submit(request("b"))
    heard.end_of("b")
    assert [type(e) for e in heard.events] == [Finished, Finished]


def test_samples_that_had_finished_are_part_of_what_is_cancelled(serve) -> None:
    worker, heard = serve(slots=1, decode_steps=1)
    worker.submit(request("c", 2, 12, stream=True))
    heard.wait(lambda events: [e for e in events if isinstance(e, Progress) and e.tokens.index == 1])
    worker.cancel("c")
    first, second = heard.end_of("c").trajectories
    assert (first.finish_reason, second.finish_reason) == ("length", "abort")
    assert len(first.completion_ids) == 12 > len(second.completion_ids) > 0


# -- versions ----------------------------------------------------------------------------------------------------------


def test_an_install_divides_what_was_submitted_before_from_what_comes_after(serve, make_engine, tiny_params) -> None:
    worker, heard = serve()
    before, after = request("before", 2, 20), request("after", 2, 20)
    worker.submit(before)
    worker.install(PolicyVersion(5, "five"), tiny_params(1, 8))
    worker.submit(after)
    assert worker.status().versions[-1] == PolicyVersion(5, "five")
    old, new = heard.end_of("before"), heard.end_of("after")
    assert [bits(t) for t in old.trajectories] == alone(make_engine, before)
    fresh = make_engine()
    fresh.install(PolicyVersion(5, "five"), tiny_params(1, 8))
    wanted = fresh.generate([after.prompt], {"after": after.seeds}, after.params)
    assert [bits(t) for t in new.trajectories] == [bits(t) for t in wanted]
    (retired,) = heard.wait(lambda events: [e for e in events if isinstance(e, Retired)])
    assert retired.version == PolicyVersion(4, "four") and retired.weight_bytes > 0
    assert heard.events.index(retired) > heard.events.index(old)
    assert worker.status().versions == (PolicyVersion(5, "five"),)


def test_what_an_install_or_a_call_raises_reaches_its_caller(serve, tiny_params) -> None:
    for start in (False, True):
        worker, heard = serve(start=start)
        with pytest.raises(SyncError, match="v5:five does not fit"):
            worker.install(PolicyVersion(5, "five"), {})
        with pytest.raises(ZeroDivisionError):
            worker.call(lambda engine: 1 / 0)
        assert worker.call(lambda engine: engine.version) == PolicyVersion(4, "four")
        worker.install(PolicyVersion(6, "six"), tiny_params(1, 8))
        assert worker.status().versions == (PolicyVersion(6, "six"),)
        assert not heard.of(Lost)


def test_weights_that_are_not_finite_cost_their_own_requests_only(serve, tiny_params, make_engine) -> None:
    worker, heard = serve()
    gate = threading.Event()
    slow(worker.call(lambda engine: engine), gate)
    good = request("good", 2, 24)
    worker.submit(good)
    broken = {**tiny_params(1), "layers.1.up": tiny_params(1)["layers.1.up"] * np.float32(np.nan)}
    installs = threading.Thread(target=worker.install, args=(PolicyVersion(5, "five"), broken))
    installs.start()
    gate.set()
    installs.join()
    for name in ("bad", "worse"):
        worker.submit(request(name))
        end = heard.end_of(name)
        assert isinstance(end, Refused) and "policy v5:five: the model's output is not finite" in end.reason
    end = heard.end_of("good")
    assert [bits(t) for t in end.trajectories] == alone(make_engine, good)
    worker.install(PolicyVersion(6, "six"), tiny_params(1))
    worker.submit(request("again"))
    assert isinstance(heard.end_of("again"), Finished) and not heard.of(Lost)
    worker.call(lambda engine: engine.check_integrity())


# -- the end -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_breaks_loses_the_worker(serve) -> None:
    worker, heard = serve()

    def broken() -> list[Trajectory]:
        raise RuntimeError("the device is gone")

    worker.call(lambda engine: setattr(engine, "step", broken))
    worker.submit(request("a"))
    lost = heard.wait(lambda events: [e for e in events if isinstance(e, Lost)])
    assert lost[0].reason.startswith("RuntimeError: the device is gone (") and "test_worker.py" in lost[0].reason
    worker.submit(request("b"))
    worker.cancel("a")
    for ask in (lambda: worker.install(PolicyVersion(5, "five"), {}), lambda: worker.call(lambda engine: 1)):
        with pytest.raises(ServiceError, match="worker w0 is gone: RuntimeError: the device is gone"):
            ask()
    worker.close()
    assert heard.events == lost and worker.status().versions == (PolicyVersion(4, "four"),)


def test_calls_that_wait_when_the_engine_breaks_are_told(serve) -> None:
    worker, heard = serve()
    gate = threading.Event()
    engine = worker.call(lambda engine: engine)

    def broken() -> list[Trajectory]:
        assert gate.wait(PATIENCE_S)
        raise RuntimeError("the device is gone")

    engine.step = broken
    worker.submit(request("a"))
    told: list[str] = []

    def ask() -> None:
        with pytest.raises(ServiceError) as error:
            worker.call(lambda engine: 1)
        told.append(str(error.value))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    heard.wait(lambda events: True)
    while worker._commands.qsize() < 3:
        time.sleep(0.001)
    gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(told) == 3 and all("the device is gone" in t for t in told)


def test_close_does_what_was_asked_before_and_cancels_the_rest(serve) -> None:
    worker, heard = serve(slots=2)
    for i in range(4):
        worker.submit(request(f"r{i}", 2, 30))
    worker.close()
    found = ends(heard.events)
    assert len(found) == 4 and all(len(e) == 1 for e in found.values())
    assert {type(e[0]) for e in found.values()} <= {Cancelled, Finished}
    assert not worker._thread.is_alive() and not heard.of(Lost)
    worker.submit(request("late"))
    worker.close()
    with pytest.raises(ServiceError, match="is gone: it was closed"):
        worker.call(lambda engine: 1)
    assert "late" not in ends(heard.events)


def test_a_worker_that_was_never_started(serve) -> None:
    worker, heard = serve(start=False)
    with pytest.raises(AssertionError, match="start worker w0 first"):
        worker.submit(request("a"))
    worker.close()
    with pytest.raises(ServiceError, match="it was closed"):
        worker.call(lambda engine: 1)
    assert heard.events == []


def test_its_own_thread_cannot_wait_for_itself(serve) -> None:
    worker, _heard = serve()
    with pytest.raises(AssertionError, match="would wait for itself"):
        worker.call(lambda engine: worker.call(lambda engine: 1))


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_an_idle_worker_sleeps(serve) -> None:
    worker, heard = serve()
    worker.submit(request("a"))
    heard.end_of("a")
    before = worker.call(lambda engine: time.thread_time())
    time.sleep(0.5)
    used = worker.call(lambda engine: time.thread_time()) - before
    assert used < 0.1, f"{used:.3f} s of processor time in half a second of nothing"


def test_status_does_not_wait_for_a_pass(serve) -> None:
    worker, heard = serve()
    gate = threading.Event()
    begun = slow(worker.call(lambda engine: engine), gate)
    worker.submit(request("a"))
    while not begun:
        time.sleep(0.001)
    assert worker.status().versions == (PolicyVersion(4, "four"),)  # would wait for ever
    gate.set()
    assert isinstance(heard.end_of("a"), Finished)


def test_nothing_of_old_versions_and_ended_requests_is_kept(serve, tiny_params) -> None:
    worker, heard = serve()
    kept = []
    for number in range(5, 8):
        params = {k: v + 0 for k, v in tiny_params(1, 8).items()}
        kept += [weakref.ref(v) for v in params.values()]
        worker.install(PolicyVersion(number, "n"), params)
        del params
        worker.submit(request(f"r{number}", stream=True))
        heard.end_of(f"r{number}")
    worker.install(PolicyVersion(8, "eight"), tiny_params(1, 8))
    gc.collect()
    assert not any(ref() is not None for ref in kept), "a policy that is retired is still held"
    assert not worker._open and not worker._streamed and worker._commands.empty()
    assert [e.version.number for e in heard.of(Retired)] == [4, 5, 6, 7]


def test_the_rate_is_over_the_last_seconds() -> None:
    rate = Rate()
    assert rate.per_s(10.0) == 0
    rate.note(100.0, 50)
    assert rate.per_s(100.0) == 0, "what was before the first look is of no known time"
    for i in range(1, 1001):
        rate.note(100 + i * 0.01, 50 + i)
    assert rate.per_s(110.0) == pytest.approx(100, rel=0.1)
    assert len(rate._noted) <= WINDOW_S / NOTE_S + 3
    assert rate.per_s(112.5) == pytest.approx(50, rel=0.1)
    assert rate.per_s(115.3) == 0
