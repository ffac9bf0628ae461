"""A run whose rollout role is a `lockstep serve` of the same recipe: the same run, bit for bit, also when a replica is
killed on the way."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.config import load_config
from lockstep.errors import ConfigError, ServiceError
from lockstep.metrics import read_jsonl
from lockstep.service.client import RemoteRollouts

SECRETS = {"inference": "i" * 20, "control": "c" * 20, "sync": "s" * 20}
SAME = ("reward", "loss", "grad_norm", "completion_length", "policy_version", "mismatch/max_abs")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "tokens"
    path.write_text("".join(f"{kind} {secret}\n" for kind, secret in SECRETS.items()))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(kit, tokens: Path) -> Iterator[tuple[str, int]]:
    """Its address and the id of its process."""
    words = ["serve", "--recipe", str(kit.folder / "recipe.toml"), "--port", "0", "--replicas", "2"]
    words += ["--transport", "transfer"]  # as over a network
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words, "--token-file", str(tokens)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout:
        first = process.stdout.readline()
        assert first.startswith("listening on "), first
        name = Path(load_config(kit.folder / "recipe.toml").model.name).name
        assert process.stdout.readline().startswith(f"model {name}, policy v0:")
        yield first.split()[-1], process.pid
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert "closed: 0 requests were in flight" in rest and process.wait(30) == 0


@pytest.fixture
def url(server: tuple[str, int]) -> str:
    return server[0]


def numbers(run_dir: Path) -> list[dict[str, float]]:
    return [{k: r[k] for k in SAME if k in r} for r in read_jsonl(run_dir / "metrics.jsonl").records]


def test_it_is_the_same_run(kit, train, url: str, tokens: Path, tmp_path: Path) -> None:
    here = train(kit.config(tmp_path / "here", "--run.steps=4"))
    there = train(
        kit.config(tmp_path / "there", "--run.steps=4", f"--rollout.url={url}", f"--rollout.token_file={tokens}")
    )
    assert numbers(here) == numbers(there) and len(numbers(here)) == 4
    receipts = [read_jsonl(d / "receipts.jsonl").records for d in (here, there)]
    assert [r["digest"] for r in receipts[0]] == [r["digest"] for r in receipts[1]]
    assert sorted(receipts[1][-1]["replicas"]) == ["rollout-0", "rollout-1"] and receipts[1][-1]["bytes_moved"] > 0


ENVIRONMENT = """
from lockstep.envs.multi_turn import Environment, Step


class Twice(Environment):
    async def step(self, turn):
        return Step("!", 0.1 * len(turn.ids)) if turn.number == 0 else Step(reward=turn.text.count("a"), done=True)


def make(row, seed):
    return Twice()
"""


@pytest.mark.slow
def test_episodes_are_played_on_the_service(kit, train, url: str, tokens: Path, tmp_path: Path) -> None:
    """The environment is the run's own, every turn a request: the same run as with a sampler of its own."""
    (tmp_path / "http_environment.py").write_text(ENVIRONMENT)
    words = ["--run.steps=3", f"--environment={{function = 'http_environment:make', folder = '{tmp_path}'}}"]
    words += ["--environment.max_total_tokens=6", "--rollout.max_new_tokens=2"]
    here = train(kit.config(tmp_path / "here", *words))
    there = train(kit.config(tmp_path / "there", *words, f"--rollout.url={url}", f"--rollout.token_file={tokens}"))
    assert numbers(here) == numbers(there) and len(numbers(here)) == 3
    assert all(r["turns/max"] == 2 for r in read_jsonl(there / "metrics.jsonl").records)


@pytest.mark.slow
def test_a_killed_replica_costs_time_and_nothing_else(
    kit, train, url: str, server: tuple[str, int], tokens: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("REWARD_DELAY_S", "0.3")
    here = train(kit.config(tmp_path / "here", "--run.steps=6"))
    config = kit.config(
        tmp_path / "there",
        "--run.steps=6",
        f"--rollout.url={url}",
        f"--rollout.token_file={tokens}",
        "--sync.on_failure=evict",
    )
    with subprocess.Popen([sys.executable, "-c", KILLER, str(tmp_path / "there"), str(server[1])]) as killer:
        there = train(config)
    assert killer.returncode == 0
    assert numbers(here) == numbers(there) and len(numbers(here)) == 6
    client = RemoteRollouts(url, SECRETS["inference"], control_token=SECRETS["control"])
    try:
        for _ in range(600):  # the replica is there again, or the run was over too soon for it
            if all(r.alive for r in client.status().replicas):
                break
            time.sleep(0.1)
        assert all(r.alive for r in client.status().replicas)
    finally:
        client.close()


KILLER = """
import os, pathlib, signal, subprocess, sys, time
metrics = pathlib.Path(sys.argv[1]) / "run" / "metrics.jsonl"
for _ in range(3000):
    if metrics.exists() and metrics.read_text().count("\\n") >= 2:
        break
    time.sleep(0.02)
for pid in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        parent = (pid / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        continue
    if parent == sys.argv[2]:  # a replica: the server has no other children
        os.kill(int(pid.name), signal.SIGKILL)
        break
"""


def test_what_is_missing_is_said(kit, url: str, tokens: Path, tmp_path: Path, train) -> None:
    with pytest.raises(ConfigError, match="a line `sync TOKEN`"):
        train(kit.config(tmp_path, f"--rollout.url={url}"))
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9"):
        train(kit.config(tmp_path, "--rollout.url=http://127.0.0.1:9", f"--rollout.token_file={tokens}"))
    assert not list(tmp_path.iterdir())
