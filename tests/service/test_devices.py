"""Which devices whose process gets: the replicas each their own, the front none."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.cluster.devices import cpu_only
from lockstep.errors import ConfigError
from lockstep.serve import server
from lockstep.serve.devices import accelerators, replica_environments


def dev(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@given(replicas=st.integers(1, 6), each=st.sampled_from([1, 2, 4]), more=st.integers(0, 3), kind=st.booleans())
def test_each_replica_has_its_own_devices(replicas: int, each: int, more: int, kind: bool) -> None:
    names = [f"GPU-{i}" if kind else str(i) for i in range(replicas * each + more)]
    variable = "CUDA_VISIBLE_DEVICES" if kind else "TPU_VISIBLE_CHIPS"
    made = replica_environments(replicas, each, {variable: ",".join(names)})
    given = [env[variable].split(",") for env in made]
    assert [len(one) for one in given] == [each] * replicas
    assert list(chain(*given)) == names[: replicas * each], "none twice, and only those that there are"
    with pytest.raises(ConfigError, match=f"{replicas + more + 1} replicas need"):
        replica_environments(replicas + more + 1, each, {variable: ",".join(names)})


def test_processes_on_one_tpu_host_do_not_meet() -> None:
    """The variables that jax's users set for several processes on a TPU VM."""
    first, second = replica_environments(2, 2, {"TPU_VISIBLE_CHIPS": "0,1,2,3"})
    assert first == {
        "TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1", "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": "localhost:8476", "TPU_PROCESS_PORT": "8476", "CLOUD_TPU_TASK_ID": "0",
    }  # fmt: skip
    assert second["TPU_VISIBLE_CHIPS"] == "2,3" and second["TPU_PROCESS_PORT"] == "8477"
    with pytest.raises(ConfigError, match="parts of 1, 2, 4, 8 chips"):
        replica_environments(1, 3, {"TPU_VISIBLE_CHIPS": "0,1,2,3"})


def test_devices_are_found_without_being_taken(tmp_path: Path) -> None:
    both = dev(tmp_path, "nvidia4", "nvidia7", "nvidiactl", "nvidia-uvm", "accel0", "vfio/vfio")
    assert accelerators({}, both) == ("cuda", ["0", "1"])
    assert accelerators({"JAX_PLATFORMS": "tpu,cpu"}, both) == ("tpu", ["0"])
    assert accelerators({"CUDA_VISIBLE_DEVICES": "3,-1,5"}, both) == ("cuda", ["3"])
    assert accelerators({"CUDA_VISIBLE_DEVICES": ""}, both) == ("tpu", ["0"])
    for environment in ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": "", "TPU_VISIBLE_CHIPS": ""}):
        with pytest.raises(ConfigError, match="no accelerators are found here"):
            accelerators(environment, both)
    with pytest.raises(ConfigError, match="no accelerators"):
        accelerators({}, tmp_path / "nothing")


class Made(Exception):
    """Instead of a server."""


def test_the_command_gives_devices_to_replicas_and_none_to_the_front(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def make(spec, **options):
        asked.update(options)
        raise Made

    monkeypatch.setattr(server, "Server", make)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    words = ["serve", str(tiny_folder), "--port", "0", "--devices-per-replica", "1", "--transport", "transfer"]
    with pytest.raises(Made):
        main(
            [*words, "--replicas", "3", "--sync-host", "10.0.0.1", "--offers-from", "10.1.0.0/16", "--offers-from", "t"]
        )
    assert [asked["environments"](i) for i in range(3)] == [{"CUDA_VISIBLE_DEVICES": d} for d in "456"]
    assert (asked["transport"], asked["sync_host"], asked["offers_from"]) == (
        "transfer", "10.0.0.1", ["10.1.0.0/16", "t"],
    )  # fmt: skip
    assert main([*words, "--replicas", "4"]) != 0
    assert main([*words[:-4], "--devices-per-replica", "2"]) != 0, "a model by itself runs on one"


def test_the_front_computes_on_the_cpu_whatever_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from lockstep.cluster.devices import cpu_only; cpu_only(); import jax, os; "
        "print(jax.numpy.ones(1).devices(), os.environ['JAX_PLATFORMS'])"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "CpuDevice" in done.stdout and done.stdout.split()[-1] == "cuda", "what it starts is told what it was told"
    monkeypatch.setattr(jax, "default_backend", lambda: "cuda")
    with pytest.raises(ConfigError, match="has taken a cuda device already"):
        cpu_only()
