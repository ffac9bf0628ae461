"""Replicas' processes from their start to their first version: what hangs, fails or dies on the way leaves nothing
behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from lockstep.errors import ServiceError, SyncError
from lockstep.serve.server import Server
from lockstep.serve.spec import ServeSpec
from lockstep.serve.versions import Versions

BOOTS = """#!/bin/sh
birth=$(cat)
echo $$ > {folder}/$$
case "$birth" in *'"name":"{broken}"'*) exit 3;; esac
exec sleep 600
"""


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


@pytest.fixture
def spec(tiny_folder: Path) -> ServeSpec:
    return ServeSpec(model=str(tiny_folder), slots=8, max_positions=64)


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it: replicas' processes from now on hang before they connect, all but the one that is broken."""

    def hang(broken: str = "") -> None:
        script = tmp_path / "python"
        script.write_text(BOOTS.format(folder=tmp_path, broken=broken))
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    return hang


def alive(folder: Path) -> list[str]:
    """Ids of the processes that noted theirs in a folder and run."""
    return [p.name for p in folder.glob("[0-9]*") if Path(f"/proc/{p.name}").exists()]


def test_a_replica_that_hangs_while_it_boots_is_ended(spec: ServeSpec, hangs, tmp_path: Path) -> None:
    hangs()
    with pytest.raises(ServiceError, match=r"rollout-0 was not ready within 0\.5 s .*raise --boot-deadline"):
        Server(spec, boot_s=0.5)
    assert not alive(tmp_path)


def test_where_one_replica_cannot_be_started_the_others_are_not_waited_for(
    spec: ServeSpec, hangs, tmp_path: Path
) -> None:
    hangs(broken="rollout-1")
    with pytest.raises(ServiceError, match="rollout-1 did not connect: it ended with exit code 3"):
        Server(spec, replicas=2)
    assert not alive(tmp_path)


class Idle:
    """A worker that is ready at once. made, killed: by name."""

    made: ClassVar[list[str]] = []
    killed: ClassVar[list[str]] = []
    sync_address, sync_token, limits, capacity = "127.0.0.1:1", "t" * 20, None, 1

    def __init__(self, name: str, *unused: object, **more: object) -> None:
        self.name = name
        self.made.append(name)

    def ready(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        self.killed.append(self.name)


def test_a_replica_whose_sync_cannot_listen_is_ended(
    spec: ServeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.serve.server.ProcessWorker", Idle)
    with pytest.raises(SyncError, match=r"cannot listen at 192\.0\.2\.1:0"):
        Server(spec, sync_host="192.0.2.1", transport="files", transport_dir=tmp_path)
    assert Idle.made == Idle.killed == ["rollout-0"]


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    """One of its replicas died before the first version was published."""
    push_first = Versions.publish_first

    def lose_one_first(versions: Versions):
        worker = versions._service.workers["rollout-1"]
        os.kill(worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        until(lambda: versions._service.workers["rollout-1"] is not worker)
        return push_first(versions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Versions, "publish_first", lose_one_first)
        made = Server(ServeSpec(model=str(tiny_folder), slots=8, max_positions=64), replicas=2)
    yield made
    made.close(0.0)


@pytest.mark.slow
def test_a_replica_that_is_lost_before_the_first_version_is_started_again_and_gets_it(server: Server) -> None:
    until(lambda: {r.active for r in server.service.status().replicas} == {server.policy})


@pytest.mark.slow
def test_closing_ends_a_replica_that_is_being_started(server: Server, hangs, tmp_path: Path) -> None:
    """The last test that uses the server."""
    hangs()
    os.kill(server._replicas["rollout-1"].worker.pid, signal.SIGKILL)
    until(lambda: alive(tmp_path))
    server.close(0.0)
    until(lambda: not alive(tmp_path))
