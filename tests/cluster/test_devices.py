import os
import subprocess
import sys

import jax
import pytest

from lockstep.cluster.devices import (
    available_devices,
    default_memory,
    device_kinds,
    enable_compilation_cache,
    memory_kinds,
    simulate_cpu_devices,
    snapshot_memory,
)
from lockstep.errors import ConfigError


def run_fresh(code: str) -> str:
    """Output of `code` in a process that has not touched jax yet."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_simulated_devices_before_and_after_first_use():
    out = run_fresh(
        "import jax\n"
        "from lockstep.cluster.devices import available_devices, simulate_cpu_devices\n"
        "from lockstep.errors import ConfigError\n"
        "print(len(available_devices(3)), len(available_devices(2)), len(available_devices()))\n"
        "try:\n    simulate_cpu_devices(4)\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    counts, error = out.split("\n", 1)
    assert counts == "3 2 3"
    assert "4 simulated CPU devices wanted (cluster.cpu_devices)" in error and "runs on 3 cpu device(s)" in error


def test_fewer_than_there_are_is_fine_and_more_is_an_error():
    assert len(available_devices(8)) == 8
    assert available_devices(5) == jax.devices()[:5]
    with pytest.raises(ConfigError, match=r"9 simulated CPU devices wanted .* 8 cpu device"):
        simulate_cpu_devices(9)


def test_memory_of_a_device():
    device = jax.devices()[0]
    assert default_memory(device) in memory_kinds(device)
    assert snapshot_memory(device) == (
        "pinned_host" if "pinned_host" in memory_kinds(device) else default_memory(device)
    )
    assert device_kinds(jax.devices()) == "cpu"


def test_compilation_cache_keeps_small_programs(tmp_path):
    folder = tmp_path / "made" / "by" / "it"
    out = run_fresh(
        "import jax\n"
        "from lockstep.cluster.devices import enable_compilation_cache\n"
        f"enable_compilation_cache({str(folder)!r})\n"
        "print(jax.jit(lambda x: x * 3 + 1)(2.0))\n"
    )
    assert out == "7.0"
    assert any(folder.iterdir())


def test_compilation_cache_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        enable_compilation_cache(tmp_path / "file" / "cache")
