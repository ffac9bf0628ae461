"""As a user: processes that are started, killed, interrupted and resumed, and the commands on what they left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.metrics import read_jsonl

APART = ("--cluster={actor = {fsdp = 2}, rollout = {fsdp = 2}, reference = {tensor = 2}, cpu_devices = 8}",)


def words(*args: object) -> list[str]:
    return [sys.executable, "-m", "lockstep", *map(str, args)]


def lockstep(*args: object, code: int = 0) -> tuple[str, str]:
    """Run a command to its end: stdout, stderr."""
    done = subprocess.run(words(*args), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def stopped(args: Sequence[object], run_dir: Path, lines: int, kind: signal.Signals, delay_s: float) -> int:
    """Start a run, stop it by a signal some time after its log has so many lines; its exit code."""
    process = subprocess.Popen(
        words(*args), env=os.environ | {"REWARD_DELAY_S": "0.4"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 240
    log = run_dir / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1].decode()
        time.sleep(0.02)
    time.sleep(delay_s)
    process.send_signal(kind)
    code = process.wait(timeout=60)
    process.communicate()
    return code


def chance() -> random.Random:
    """For moments to kill at: anew each time, and those of a failed test again with its LOCKSTEP_KILL_SEED."""
    seed = int(os.environ.get("LOCKSTEP_KILL_SEED", time.time_ns()))
    print(f"LOCKSTEP_KILL_SEED={seed}")
    return random.Random(seed)


def same(run, whole) -> None:
    assert run.metrics() == whole.metrics()
    assert run.receipts() == whole.receipts()
    assert run.trajectories() == whole.trajectories()
    last = checkpoint.latest(whole.path)
    assert checkpoint.latest(run.path) == last and run.state(last) == whole.state(last)


@pytest.mark.slow
def test_killed_then_interrupted_then_finished(kit, finished, left, tmp_path) -> None:
    """kill -9 after step 4, Control-C after step 6, and the run is the one that nothing stopped."""
    recipe, run_dir = kit.folder / "recipe.toml", tmp_path / "run"
    delay = chance().uniform(0, 0.3)
    print(f"killed {delay:.3f} s after the line of step 4")
    first = ("run", recipe, "--run.dir", tmp_path)
    assert stopped(first, run_dir, 4, signal.SIGKILL, delay) == -signal.SIGKILL
    assert checkpoint.latest(run_dir) == 3
    again = ("run", "--resume", run_dir)
    assert stopped(again, run_dir, 6, signal.SIGINT, delay) == 130
    newest = checkpoint.latest(run_dir)  # of step 6, unless the interrupt came between its record and its checkpoint
    stop = f"stopped (lockstep run --resume {run_dir} goes on from step {newest}) by KeyboardInterrupt\n"
    assert newest in (3, 6) and stop in (run_dir / "log.txt").read_text()
    out, err = lockstep(*again)
    assert err == "" and out.splitlines()[0].startswith("lockstep run: 8 steps, run directory")
    assert f"* resumed at step {newest}, policy version {newest}" in out and "step 8/8  reward 0." in out
    assert out.endswith(f"* report: {run_dir}/report.html\nrun directory: {run_dir}\n")
    same(left(run_dir), finished)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [(), APART], ids=["together", "apart"])
def test_killed_at_random_moments(kit, train, left, tmp_path, placement) -> None:
    """Five kills, anywhere from the first checkpoint on, loading and saving included; twelve steps in all."""
    overrides = (*placement, "--run.steps=12", "--run.checkpoint_every=1")
    whole = left(train(kit.config(tmp_path / "whole", *overrides)))
    moments, run_dir = chance(), tmp_path / "run"
    args: tuple[object, ...] = ("run", kit.folder / "recipe.toml", "--run.dir", tmp_path, *overrides)
    for _ in range(5):
        done = len(read_jsonl(run_dir / "metrics.jsonl").records) if run_dir.exists() else 0
        lines, delay = (min(done + moments.randint(0, 2), 11), moments.uniform(0, 1.5)) if done else (1, 0.3)
        print(f"{done} steps done, killed {delay:.3f} s after {lines}")
        code = stopped(args, run_dir, lines, signal.SIGKILL, delay)
        if code == 0:  # it was faster than the kill
            break
        assert code == -signal.SIGKILL
        args = ("run", "--resume", run_dir)
    lockstep("run", "--resume", run_dir)
    same(left(run_dir), whole)


def test_the_commands_on_a_finished_run(kit, finished, tmp_path) -> None:
    report = finished.path / "report.html"
    report.unlink()
    assert lockstep("report", finished.path) == (f"{report}\n", "")
    assert "run_rewards:even" in report.read_text()
    assert lockstep("export", finished.path, "--to", tmp_path / "out") == (f"{tmp_path}/out\n", "")
    out, err = lockstep("generate", tmp_path / "out", "--prompt", "01+1=", "--max-new-tokens", 3, "--samples", 2)
    assert err == "" and out.count("--- prompt 1, sample") == 2 and "log-probability" in out
    out, err = lockstep("run", "--resume", finished.path, "--run.steps", 20, "--dry-run")
    assert err == "" and "steps = 20" in out and "0 B cross" in out


@pytest.mark.slow
def test_a_run_that_cannot_go_on_ends_with_one_message(kit, tmp_path) -> None:
    reward = f'{{functions = [{{name = "run_rewards:raises"}}], folder = "{kit.folder}"}}'
    out, err = lockstep("run", kit.folder / "recipe.toml", "--run.dir", tmp_path, "--reward", reward, code=2)
    assert err.startswith("error: reward 'run_rewards:raises' raised ValueError: no idea (") and err.count("\n") == 1
    assert "Traceback" not in out + err
    out, err = lockstep("run", "--resume", tmp_path / "run", code=2)
    assert out == "" and err.startswith(f"error: {tmp_path}/run has no checkpoint to resume from")
