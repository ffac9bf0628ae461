"""Rewards in worker processes: deadlines, crashes, and only the sample at fault fails. Faults are real ones."""

import contextlib
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from lockstep.config import RewardConfig
from lockstep.envs.rewards import make_reward
from lockstep.errors import ConfigError, RewardError
from lockstep.types import Prompt

MODULE = '''
import os, signal, subprocess, sys, time

class Local:
    def __reduce__(self):
        raise TypeError("cannot pickle me")

def told(prompts, completions, rows):
    """Does what each completion says."""
    out = []
    for text in completions:
        if text == "hang":
            while True: pass
        if text == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "exit":
            os._exit(3)
        if text == "child":  # a process that would outlive the worker, and holds nothing of ours
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(rows[0]["file"], "w").write(str(child.pid))
            while True: pass
        if text == "raise":
            raise ValueError("told to")
        if text == "big":
            9 ** 9 ** 9  # in C, deaf to signals that Python handles
        if text == "object":
            out.append(Local())
            continue
        out.append(float(len(text)))
    return out

def where(prompts, completions, rows):
    return [float(os.getpid())] * len(completions)

def heavy(prompts, completions, rows):
    return [float("jax" in sys.modules or "numpy" in sys.modules)] * len(completions)

def size(prompts, completions, rows):
    return [float(len(rows[0]["text"]))] * len(completions)

async def later(prompts, completions, rows):
    import asyncio
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def missing(prompts, completions, rows):
    return []

def rank(prompts, completions, rows):
    return [sorted(completions).index(text) for text in completions]

def spoil_all(prompts, completions, rows):
    for row in rows:
        row["list"].append(1)
    return [len(row["list"]) for row in rows]

def spoil(prompts, completions, rows):
    rows[0]["list"].append(1)
    return [len(rows[0]["list"])]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    (folder / "worker_rewards.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def make(folder):
    """Rewards by function names; closed at the end of the module, each kept by its arguments."""
    with contextlib.ExitStack() as stack:
        made = {}

        def of(*names, on_error="drop", workers=2, deadline_s=60.0, whole_batch=False):
            key = (names, on_error, workers, deadline_s, whole_batch)
            if key not in made:
                functions = [{"name": f"worker_rewards:{n}", "whole_batch": whole_batch} for n in names]
                config = RewardConfig(
                    functions=functions, folder=str(folder), on_error=on_error, workers=workers, deadline_s=deadline_s
                )
                made[key] = stack.enter_context(make_reward(config))
            return made[key]

        yield of


def sample(*completions, **row):
    return [Prompt(f"t/0/{i}", "q", (1,), dict(row)) for i in range(len(completions))], list(completions)


def test_order_is_that_of_the_samples_and_the_processes_stay(make):
    reward = make("where", "told", "heavy", "later", "size", "spoil", "missing", "rank")
    del reward.scorers["worker_rewards:missing"]
    texts = ["x" * (i % 7) for i in range(40)]
    first, second = (reward.score(*sample(*texts, text="", list=[])) for _ in range(2))
    assert [s.parts["worker_rewards:told"] for s in first] == [len(t) for t in texts]
    pids = {s.parts["worker_rewards:where"] for s in first}
    assert os.getpid() not in pids and pids | {s.parts["worker_rewards:where"] for s in second} <= live(reward)
    assert all(s.parts["worker_rewards:heavy"] == 0 for s in first)  # neither jax nor numpy was imported
    assert all(s.parts["worker_rewards:later"] == 2 for s in first)
    assert all(s.parts["worker_rewards:spoil"] == 1 for s in [*first, *second])  # rows are copies
    assert reward.pool.restarts == 0


def live(reward):
    return {float(p._process.pid) for p in reward.pool._processes}


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("segfault", "crashed", r"its process was killed by signal 11"),
        ("exit", "crashed", r"its process ended with exit code 3"),
        ("raise", "exception", r"raised ValueError: told to \(.*worker_rewards.py:\d+\)"),
        ("object", "not_a_number", r"returned <worker_rewards.Local object .* which is not a number"),
    ],
)
def test_only_the_sample_at_fault_fails(make, fault, kind, message):
    reward = make("told")
    scores = reward.score(*sample("a", fault, "bb", "ccc"))
    assert [s.value for s in scores if s.failed is None] == [1.0, 2.0, 3.0]
    assert scores[1].failed is not None and math.isnan(scores[1].value)
    assert re.search(message, scores[1].failed)
    assert reward.numbers() == {f"failures/worker_rewards:told/{kind}": 1}


def test_a_sample_that_hangs_is_killed_with_all_that_it_started(make, tmp_path):
    reward = make("told", deadline_s=1.5)
    scores = reward.score(*sample("a", "hang", "child", "big", "bb", file=str(tmp_path / "pid")))
    assert [s.failed is None for s in scores] == [True, False, False, False, True]
    assert [scores[0].value, scores[4].value] == [1.0, 2.0]
    assert "had not answered after 1.5 s (reward.deadline_s = 1.5)" in scores[1].failed
    assert reward.numbers() == {"failures/worker_rewards:told/timeout": 3}
    child = int((tmp_path / "pid").read_text())
    assert gone(child)


def gone(pid, patience=10.0):
    """Whether a process ends; a zombie that nobody has waited for has ended."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_worker_that_dies_while_idle_is_replaced_and_no_sample_fails(make):
    reward = make("told")
    for process in reward.pool._processes:
        if process is not None:
            os.kill(process._process.pid, signal.SIGKILL)
            process._process.wait()
    assert [s.value for s in reward.score(*sample(*["a"] * 6))] == [1.0] * 6
    assert reward.numbers() == {}


def test_fail_names_the_first_sample_however_many_workers(make):
    reward = make("told", on_error="fail")
    for _ in range(5):
        with pytest.raises(RewardError, match=r"told to .*with prompt t/0/3 "):
            reward.score(*sample("a", "b", "c", "raise", "d", "raise", "raise"))


@pytest.mark.parametrize("on_error", ["drop", "fail"])
def test_a_wrong_number_of_values_stops(make, on_error):
    with pytest.raises(RewardError, match="returned 0 values for 1 completions"):
        make("missing", on_error=on_error, workers=1).score(*sample("a", "b"))


def test_a_whole_batch_is_one_call_with_rows_that_are_copies_and_fails_as_a_whole(make):
    reward = make("rank", "spoil_all", "told", workers=1, whole_batch=True)
    prompt = Prompt("p", "q", (1,), {"list": []})
    scores = reward.score([prompt] * 3, ["b", "c", "a"])
    assert [s.parts["worker_rewards:rank"] for s in scores] == [1, 2, 0]
    assert [s.parts["worker_rewards:spoil_all"] for s in scores] == [1, 1, 1]
    assert all(s.failed for s in reward.score([prompt] * 2, ["exit", "a"]))
    assert reward.numbers() == {"failures/worker_rewards:told/crashed": 2}


def test_large_rows_travel_and_rows_that_cannot_are_failures(make):
    reward = make("size", workers=1)
    (score,) = reward.score(*sample("a", text="x" * 50_000_000))
    assert score.value == 50_000_000
    (score,) = reward.score(*sample("a", text=lambda: 0))
    assert "the data row cannot be sent to a worker process" in score.failed and "plain data" in score.failed
    (score,) = reward.score(*sample("a", text=Unreadable()))
    assert "the data row cannot be read in a worker process (ZeroDivisionError" in score.failed
    assert reward.numbers() == {"failures/worker_rewards:size/exception": 2}


class Unreadable:
    def __reduce__(self):
        return (divmod, (1, 0))


def test_functions_are_checked_where_they_run(folder):
    for name, message in [("absent", "has no function 'absent'"), ("gone:f", "no module 'gone'")]:
        name = name if ":" in name else f"worker_rewards:{name}"
        with pytest.raises(ConfigError, match=message):
            make_reward(RewardConfig(functions=[{"name": name}], folder=str(folder), workers=1))
    (folder / "dies_at_once.py").write_text("import os; os._exit(7)")
    with pytest.raises(RewardError, match="did not come up: it ended with exit code 7"):
        make_reward(RewardConfig(functions=[{"name": "dies_at_once:f"}], folder=str(folder), workers=1))


def test_workers_end_with_the_run_even_while_they_hang(folder, tmp_path):
    code = f"""
import sys, threading, time
from lockstep.config import RewardConfig
from lockstep.envs.rewards import make_reward
from lockstep.types import Prompt
if True:
    reward = make_reward(RewardConfig(functions=[{{"name": "worker_rewards:told"}}], folder={str(folder)!r}, workers=1))
    threading.Thread(target=reward.score, args=([Prompt("p", "q", (1,))], ["hang"]), daemon=True).start()
    time.sleep(0.3)
    print(reward.pool._processes[0]._process.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        pid = int(run.stdout.readline())
        run.kill()
    assert gone(pid)


def test_nothing_is_left_after_close(folder):
    with make_reward(RewardConfig(functions=[{"name": "worker_rewards:where"}], folder=str(folder))) as reward:
        pids = live(reward)
    assert all(gone(int(pid)) for pid in pids)
    reward.close()


def test_nothing_is_left_of_one_that_was_dropped(folder):
    reward = make_reward(RewardConfig(functions=[{"name": "worker_rewards:where"}], folder=str(folder)))
    pids = live(reward)
    del reward
    gc.collect()
    assert all(gone(int(pid)) for pid in pids)
