"""Which accelerators each replica's process may use: environment variables, set before it starts. Imports no jax, which
would take the devices that are to be given away."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError

Kind = Literal["cuda", "tpu"]
TPU_PORT = 8476  # of the first replica's runtime; libtpu's own default
# Chips of one process by how many they are: the shapes that libtpu can cut off a host (x, y, z).
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def accelerators(environment: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[Kind, list[str]]:
    """The accelerators that this process's children could use: their kind, and how each is named to the runtime.

    environment: JAX_PLATFORMS decides where there are two kinds; CUDA_VISIBLE_DEVICES and TPU_VISIBLE_CHIPS name them,
    else the device files in `dev` are counted. Raises ConfigError where there are none.
    """
    wanted = [word.strip() for word in environment.get("JAX_PLATFORMS", "").split(",") if word.strip()]
    cuda = _listed(environment, "CUDA_VISIBLE_DEVICES")
    tpu = _listed(environment, "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
    found: dict[Kind, list[str]] = {
        "cuda": _numbered(dev, r"nvidia(\d+)") if cuda is None else cuda,
        "tpu": (_numbered(dev, r"accel(\d+)") or _numbered(dev / "vfio", r"(\d+)")) if tpu is None else tpu,
    }
    for kind, names in found.items():
        if names and (not wanted or kind in wanted or (kind == "cuda" and "gpu" in wanted)):
            return kind, names
    raise ConfigError(
        "--devices-per-replica: no accelerators are found here (NVIDIA: CUDA_VISIBLE_DEVICES, /dev/nvidia*; TPU: "
        f"TPU_VISIBLE_CHIPS, /dev/accel*, /dev/vfio/*; JAX_PLATFORMS is {environment.get('JAX_PLATFORMS', '')!r}); "
        "leave the option out, and replicas share what there is"
    )


def replica_environments(
    replicas: int, each: int, environment: Mapping[str, str], dev: Path = Path("/dev")
) -> list[dict[str, str]]:
    """Per replica, what its environment has besides `environment`: its own `each` accelerators and no other's.

    Raises ConfigError where there are too few, or a TPU host cannot be cut so.
    """
    kind, names = accelerators(environment, dev)
    if replicas * each > len(names):
        raise ConfigError(
            f"--devices-per-replica {each}: {replicas} replicas need {replicas * each} accelerators, {len(names)} are "
            f"found ({kind}: {', '.join(names)}); use fewer replicas, or fewer devices for each"
        )
    if kind == "tpu" and each not in _TPU_BOUNDS:
        raise ConfigError(
            f"--devices-per-replica {each}: a TPU host is cut into parts of {', '.join(map(str, _TPU_BOUNDS))} chips"
        )
    own = [",".join(names[i * each : (i + 1) * each]) for i in range(replicas)]
    if kind == "cuda":
        return [{"CUDA_VISIBLE_DEVICES": devices} for devices in own]
    return [
        {
            "TPU_VISIBLE_CHIPS": devices,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[each],
            # Each is a world of one process, with a port of its own.
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": f"localhost:{TPU_PORT + i}",
            "TPU_PROCESS_PORT": str(TPU_PORT + i),
            "CLOUD_TPU_TASK_ID": "0",
        }
        for i, devices in enumerate(own)
    ]


def _listed(environment: Mapping[str, str], *names: str) -> list[str] | None:
    """What the first of these variables that is set names; None where none is."""
    for name in names:
        if name in environment:
            words = (word.strip() for word in environment[name].split(","))
            return list(takewhile(lambda word: word not in ("", "-1"), words))  # none of those that follow is seen
    return None


def _numbered(folder: Path, pattern: str) -> list[str]:
    """Devices are counted from 0, whatever their files are called: in a container only some are there."""
    count = sum(re.fullmatch(pattern, path.name) is not None for path in folder.iterdir()) if folder.is_dir() else 0
    return [str(i) for i in range(count)]
