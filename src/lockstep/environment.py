"""What a run ran on: versions, devices, machine. Written into the run directory once per start, shown by the report."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

from lockstep.files import write_atomic

FILE = "environment.json"
PACKAGES = ("lockstep-rl", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers")


def environment() -> dict[str, str | int]:
    """Name -> value of what decides how a run behaves besides its recipe. Starts the jax backend."""
    devices = jax.devices()
    return {
        "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "devices": len(devices),
        "device kind": devices[0].device_kind,
        "device platform": devices[0].platform,
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def write_environment(run_dir: Path) -> Path:
    """Write `environment()` to the run directory; of a resumed run, the last start counts."""
    path = run_dir / FILE
    write_atomic(path, json.dumps(environment(), indent=2).encode() + b"\n")
    return path
