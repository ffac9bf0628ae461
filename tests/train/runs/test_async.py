"""Sampling ahead of the trainer: by as many versions as the recipe allows, and never by more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.config import load_config
from lockstep.errors import LockstepError, MismatchError, ServiceError
from lockstep.metrics import read_jsonl
from lockstep.rollout.engine import request_seed
from lockstep.service.requests import Ended, RolloutRequest
from lockstep.types import PolicyVersion

APART = "--cluster={actor = {}, rollout = {data = 2}, reference = {data = 2}}"


def timeline(run: Path) -> list[dict]:
    return list(read_jsonl(run / "timeline.jsonl").records)


def spans(line: dict, role: str, what: str) -> list[tuple[float, float]]:
    """Of one step, in seconds since the run's start."""
    at = line["start"]
    return [
        (at + i["from"], at + i["to"]) for i in line["intervals"] if i["role"] == role and i["what"].startswith(what)
    ]


def overlap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


WAYS = {
    "drain": (2, ["--rollout.update=drain"]),
    "abort": (2, ["--rollout.update=abort"]),
    "dual": (2, ["--rollout.update=dual"]),
    "apart": (1, [APART]),
}


@pytest.fixture(scope="module", params=[pytest.param(w, marks=[pytest.mark.slow] * (w == "apart")) for w in WAYS])
def run(request, kit, train, left, tmp_path_factory):
    """(bound, run) under each way of taking new weights over, and with each role on devices of its own."""
    bound, words = WAYS[request.param]
    config = kit.config(tmp_path_factory.mktemp("ahead"), f"--rollout.staleness={bound}", "--run.steps=7", *words)
    return bound, left(train(config))


# ---------------------------------------------------------------- the bound


def test_no_token_is_older_than_the_bound_allows(run) -> None:
    bound, run = run
    for m in run.metrics():
        step = m["step"]
        behind = step - 1 - np.concatenate([t.versions for t in run.step(step).trajectories])
        assert behind.min() >= 0 and behind.max() <= bound
        assert m["staleness/max"] == behind.max() and m["staleness/mean"] == pytest.approx(behind.mean())
        assert m["staleness/tokens"] == pytest.approx((behind > 0).mean())
        assert m["dropped/stale"] == m["dropped/aborted"] == m["dropped/failed"] == 0 and m["groups/total"] == 3


def test_a_group_is_of_one_version(run) -> None:
    _, run = run
    for m in run.metrics():
        groups: dict[str, set[int]] = {}
        for t in run.step(m["step"]).trajectories:
            groups.setdefault(t.group_id, set()).update(t.versions.tolist())
        assert all(len(versions) == 1 for versions in groups.values())


def test_every_record_is_verified_under_the_weights_that_made_it(run) -> None:
    """Bit for bit; and what is old differs from what is trained, so that there was something to verify."""
    _, run = run
    stale = 0
    for m in run.metrics():
        assert m["mismatch/unequal_tokens"] == 0 and m["mismatch/max_abs"] == 0
        if not m["staleness/tokens"]:
            assert m["ratio"] == 1
        record = run.step(m["step"])
        for t, trained in zip(record.trajectories, record.extra["trainer_logprobs"], strict=True):
            old = t.versions < m["step"] - 1
            assert t.logprobs[~old].tobytes() == np.asarray(trained, np.float32)[~old].tobytes()
            stale += int((t.logprobs[old] != np.asarray(trained, np.float32)[old]).sum())
    assert stale > 0 or max(m["staleness/max"] for m in run.metrics()) == 0


def test_samples_ahead_have_the_prompts_and_seeds_of_their_step(run, finished) -> None:
    _, run = run
    for m in run.metrics():
        mine, theirs = run.step(m["step"]).trajectories, finished.step(m["step"]).trajectories
        assert [(t.group_id, t.index) for t in mine] == [(t.group_id, t.index) for t in theirs]
        assert all(t.seed == request_seed(3, m["step"], t.group_id, t.index) for t in mine)


@pytest.mark.parametrize("update", ["drain", "dual"])
def test_sampling_goes_on_while_the_trainer_trains(kit, opened, finished, tmp_path, update: str) -> None:
    """The engine takes no step of the next batch before the update has begun."""
    with opened(kit.config(tmp_path, "--rollout.staleness=1", f"--rollout.update={update}")) as loop:
        loop.start()
        loop.step()
        cluster, training = loop.cluster, threading.Event()
        look, update_weights = cluster.engine.step, cluster.trainer.step

        def patient():
            assert training.wait(60), "the loop waits for the sampler, where the sampler may be behind"
            return look()

        def announced(*args):
            training.set()
            return update_weights(*args)

        cluster.engine.step, cluster.trainer.step = patient, announced
        for _ in range(3):
            loop.step()
            training.clear()
        training.set()
    for number, line in list(enumerate(timeline(loop.run_dir), 1))[1:]:
        assert overlap(spans(line, "rollout", f"generate {number + 1}"), spans(line, "actor", "train")) > 0, line
    for line in timeline(finished.path):
        assert overlap(spans(line, "rollout", "generate"), spans(line, "actor", "train")) == 0


def test_time_lines_agree_with_the_metrics(run) -> None:
    _, run = run
    records = read_jsonl(run.path / "metrics.jsonl").records
    for m, line in zip(records, timeline(run.path), strict=True):
        assert line["step"] == m["step"] and line["seconds"] == m["time/step_s"]
        for i in line["intervals"]:
            assert 0 <= i["from"] <= i["to"] <= line["seconds"] + 1e-9
        trained = sum(b - a for a, b in spans(line, "actor", "train"))
        assert trained == pytest.approx(m["time/train_s"])
        for role in ("actor", "rollout", "reward"):
            busy = sum(b - a for a, b in spans(line, role, "") if role != "rollout")
            assert 0 <= m[f"idle/{role}"] <= 1
            if role == "reward":
                assert m["idle/reward"] == pytest.approx(1 - busy / line["seconds"], abs=1e-6)


# ---------------------------------------------------------------- stopped and resumed


def test_killed_and_resumed(kit, train, left, tmp_path) -> None:
    """What was in flight is sampled again: the same prompts and seeds, under the weights of the checkpoint."""
    run = train(kit.config(tmp_path, "--rollout.staleness=1", "--run.steps=3", "--run.checkpoint_every=3"))
    before = left(run)
    kept = before.metrics(), before.trajectories()
    train(load_config(run / "recipe.toml", ["--run.steps=6"]), resume=run)
    after = left(run)
    assert (after.metrics()[:3], {n: t for n, t in after.trajectories().items() if n <= 3}) == kept
    assert [m["step"] for m in after.metrics()] == [line["step"] for line in timeline(run)] == list(range(1, 7))
    ids = [t.group_id for n in range(1, 7) for t in after.step(n).trajectories[::4]]
    assert len(set(ids[:10])) == 10, "no prompt is skipped and none comes twice"
    for n in (4, 5, 6):
        for t in after.step(n).trajectories:
            assert t.seed == request_seed(3, n, t.group_id, t.index) and t.versions.min() >= max(3, n - 2)
    assert after.metrics()[3]["staleness/max"] == 0, "older weights are gone with the process that had them"
    assert after.meta(6)["cursor"] == 18


def test_bound_0_is_the_loop_that_takes_turns(finished, kit, train, left, tmp_path) -> None:
    """Every way to take weights over is the same where nothing is under way."""
    again = left(train(kit.config(tmp_path, "--run.steps=2", "--rollout.update=dual", "--rollout.patience_s=0.01")))
    assert again.metrics() == finished.metrics()[:2]
    assert again.trajectories() == {n: t for n, t in finished.trajectories().items() if n <= 2}


# ---------------------------------------------------------------- records that are not right


def test_a_stale_record_that_its_weights_did_not_make_is_found(kit, opened, tmp_path) -> None:
    with opened(kit.config(tmp_path, "--rollout.staleness=1")) as loop:
        loop.start()
        loop.step()
        wrong = loop.snapshots.kept[0]
        loop.snapshots.kept[0] = Relabelled(loop.snapshots.newest, wrong.version)
        with pytest.raises(MismatchError, match=r"\(policy version 0\) was recorded"):
            loop.step()
        loop.snapshots.kept[0] = wrong


class Relabelled:
    """Weights under another version's name."""

    def __init__(self, inner, version: PolicyVersion) -> None:
        self.restore, self.free, self.version = inner.restore, lambda: None, version


def test_verification_can_be_left_out(kit, train, left, tmp_path) -> None:
    run = left(train(kit.config(tmp_path, "--rollout.staleness=1", "--rollout.verify_stale=false", "--run.steps=3")))
    first, *others = run.metrics()
    assert first["mismatch/max_abs"] == 0
    for m in others:
        assert m["staleness/tokens"] == 1 and not any(k.startswith("mismatch/") for k in m)


# ---------------------------------------------------------------- a service that is not right


class Between:
    """A service, and what is changed between it and the loop. end: of each request's end, what the loop hears."""

    def __init__(self, inner, end: Callable[[RolloutRequest, Ended], Ended | None]) -> None:
        self.inner, self.end = inner, end
        self.status, self.cancel = inner.status, inner.cancel

    def submit(self, request: RolloutRequest, on_event) -> None:
        def hear(event) -> None:
            event = self.end(request, event) if isinstance(event, Ended) else event
            if event is not None:
                on_event(event)

        self.inner.submit(request, hear)


@contextmanager
def between(opened, config, end) -> Iterator:
    with opened(config) as loop:
        loop.batches._rollouts = Between(loop.cluster.rollouts, end)
        loop.start()
        yield loop


def aged(request: RolloutRequest, end: Ended) -> Ended:
    """The first group of every step was sampled longer ago than allowed."""
    if request.prompt.row["number"] % 3:
        return end
    return replace(end, trajectories=tuple(replace(t, versions=t.versions - 1) for t in end.trajectories))


def test_what_is_too_old_is_dropped_whole_and_counted(kit, opened, left, tmp_path) -> None:
    with between(opened, kit.config(tmp_path), aged) as loop:
        for _ in range(3):
            loop.step()
        run = left(loop.run_dir)
    log = (loop.run_dir / "log.txt").read_text()
    assert sum(m["dropped/stale"] for m in run.metrics()) > 0
    for m in run.metrics():
        record = run.step(m["step"])
        assert m["groups/total"] == 3 - m["dropped/stale"] and len(record.trajectories) == 4 * m["groups/total"]
        assert m["staleness/max"] == 0 and m["mismatch/unequal_tokens"] == 0
        gone = f"is left out: stale: it holds tokens of policy version {m['step'] - 2}, {m['step'] - 1} is the oldest"
        assert log.count(gone) == m["dropped/stale"]


def test_when_everything_is_too_old_the_run_says_so(kit, opened, tmp_path) -> None:
    def end(request, end):
        return replace(end, trajectories=tuple(replace(t, versions=t.versions - 1) for t in end.trajectories))

    with (
        between(opened, kit.config(tmp_path), end) as loop,
        pytest.raises(ServiceError, match=r"step 1 has nothing to train on, all 3 groups were dropped; .* stale: "),
    ):
        loop.step()


def lost(request: RolloutRequest, end: Ended) -> Ended:
    number = request.prompt.row["number"]
    return end if number % 4 else Ended(("failed", "aborted")[number // 4 % 2], reason="the replica burnt down")


def test_lost_groups_stop_the_run_or_are_left_out(kit, opened, left, tmp_path) -> None:
    message = r"group 'data/0/\d' of step \d (failed|aborted): the replica burnt down.*`rollout.on_lost` = \"drop\""
    with between(opened, kit.config(tmp_path), lost) as loop, pytest.raises(ServiceError, match=message):
        for _ in range(3):
            loop.step()
    with between(opened, kit.config(tmp_path, "--rollout.on_lost=drop"), lost) as loop:
        for _ in range(3):
            loop.step()
    records = left(loop.run_dir).metrics()
    gone = [m["dropped/failed"] + m["dropped/aborted"] for m in records]
    assert sum(gone) >= 2 and [m["groups/total"] for m in records] == [3 - n for n in gone]
    assert "is left out: failed: the replica burnt down" in (loop.run_dir / "log.txt").read_text()


def test_a_replica_that_is_lost_stops_the_run(kit, opened, tmp_path) -> None:
    """It was the only one, and nobody starts it again."""
    with opened(kit.config(tmp_path)) as loop:
        loop.start()
        loop.step()
        loop.cluster.local.service.lose("rollout", "its power was cut")
        with pytest.raises(ServiceError, match="no replica is left"):
            loop.step()


def test_a_replica_that_is_lost_while_it_samples(kit, opened, tmp_path) -> None:
    """There is no other one, and nobody brings its version back: the run says so and stops at once."""
    with opened(kit.config(tmp_path, "--rollout.patience_s=0.1")) as loop:
        loop.start()
        loop.step()
        shorter(loop)
        engine = loop.cluster.engine

        def breaks():
            raise ZeroDivisionError("a cosmic ray")

        engine.step = breaks
        with pytest.raises(
            ServiceError, match=r"of step 2 failed: v1:\w+, which was served last, is lost: no replica has it"
        ):
            loop.step()


# ---------------------------------------------------------------- waiting


def shorter(loop, seconds: float = 0.5) -> None:
    """Deadlines, once everything is compiled."""
    rollout = loop.config.rollout.model_copy(update={"deadline_s": seconds})
    loop.config = loop.collector.config = loop.config.model_copy(update={"rollout": rollout})


def test_who_is_waited_for_is_said_and_after_the_deadline_the_run_fails(kit, opened, tmp_path) -> None:
    with between(opened, kit.config(tmp_path, "--rollout.patience_s=0.1"), until_step_2) as loop:
        loop.step()
        shorter(loop)
        message = (
            r"step 2 waits for its rollouts: 0 of 3 groups are here, the first that is missing is 'data/0/\d', at "
        )
        with pytest.raises(
            ServiceError, match=message + r"replica rollout, after 0.5 s \(rollout.deadline_s\); service"
        ):
            loop.step()
    log = (loop.run_dir / "log.txt").read_text()
    assert log.count("step 2 waits for its rollouts: ") >= 2 and "replicas: rollout serves v1:" in log
    assert "Thread 0x" in (loop.run_dir / "stacks.txt").read_text()


def until_step_2(request: RolloutRequest, end: Ended) -> Ended | None:
    return end if request.min_version == 0 else None


def test_a_sampler_that_does_not_finish_before_a_flip_is_named(kit, opened, tmp_path) -> None:
    """drain: the next version waits for the batches ahead. The engine hangs; the sync says for whom it waited."""
    with opened(kit.config(tmp_path, "--rollout.staleness=1", "--rollout.patience_s=0.1")) as loop:
        loop.start()
        loop.step()
        cluster, freed = loop.cluster, threading.Event()
        cluster.sync._deadline_s, cluster.sync.publisher._drain_s = 2.0, 1.0
        step = cluster.engine.step

        def stuck():
            freed.wait()
            return step()

        cluster.engine.step = stuck  # the batch of step 2 is here already: the last flip waited for it
        try:
            with pytest.raises(LockstepError, match="version 2"):
                loop.step()
        finally:
            freed.set()
    log = (loop.run_dir / "log.txt").read_text()
    assert "version 2 is not served yet: 3 groups of later steps are under way; service: " in log
