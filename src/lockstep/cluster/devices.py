"""The one place that knows what kind of device the process runs on.

Everything else asks here: which devices there are, whether they have host memory that they can read directly, where
compiled programs are kept. A new accelerator needs a look at this file and at no other.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lockstep.errors import ConfigError

PINNED_HOST = "pinned_host"
_ALIGNMENT = 64  # bytes; host memory aligned so is adopted by the CPU client, other memory is copied

# XLA's CPU client aborts the whole process when one device waits 40 s for another in a collective. Simulated devices
# share few cores, so a large step on a busy machine gets there without anything being wrong.
_CPU_FLAGS = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "1200",
}


def simulate_cpu_devices(count: int) -> None:
    """Make the process run on `count` simulated CPU devices, whatever accelerators the machine has.

    Call it before anything touches a device. Calling it later is fine while there are at least `count` CPU devices.
    Raises ConfigError when the devices exist already and are fewer, or are not CPU devices.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        # The backend is up; jax refuses to change the number, even to a smaller one.
        found = jax.devices()
        if found[0].platform != "cpu" or len(found) < count:
            raise ConfigError(
                f"{count} simulated CPU devices wanted (cluster.cpu_devices), but the process already runs on "
                f"{len(found)} {found[0].platform} device(s) and their number is fixed by now; set it before the "
                f"first use of a device, or start a new process"
            ) from error
        return
    jax.config.update("jax_platforms", "cpu")
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in flags}
    # Read once, when the first program is compiled; a value set by the user stays.
    os.environ["XLA_FLAGS"] = " ".join([*flags, *(f"{k}={v}" for k, v in _CPU_FLAGS.items() if k not in names)])


def cpu_only() -> None:
    """Make this process compute on its CPU and leave accelerators to others. Processes that it starts are not bound.

    Call it before anything touches a device. Raises ConfigError when an accelerator has been taken already.
    """
    jax.config.update("jax_platforms", "cpu")
    if (platform_name := jax.default_backend()) != "cpu":
        raise ConfigError(
            f"this process must compute on the CPU only, but has taken a {platform_name} device already; do it in a "
            "process of its own, before the first use of a device"
        )


def cpu_device() -> jax.Device:
    """The first CPU device, also where arrays are made on an accelerator by default. Raises ConfigError without one."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ConfigError(
            f"a CPU device is needed beside those of JAX_PLATFORMS = {platforms!r} ({error}); "
            "add cpu to it, as in JAX_PLATFORMS=cuda,cpu"
        ) from error


def available_devices(cpu_devices: int | None = None) -> list[jax.Device]:
    """The devices to build meshes from, in jax's order; `cpu_devices` many simulated ones if given.

    Raises ConfigError as `simulate_cpu_devices` does.
    """
    if cpu_devices is None:
        return jax.devices()
    simulate_cpu_devices(cpu_devices)
    return jax.devices()[:cpu_devices]


def device_kinds(devices: Sequence[jax.Device]) -> str:
    """The kinds of the devices, each once, for fingerprints and reports: `cpu`, `NVIDIA H100 80GB HBM3`."""
    return ", ".join(sorted({d.device_kind for d in devices}))


def host_processor() -> str:
    """What decides the machine code that XLA makes for the CPU: architecture, instruction set, cores that may be used.

    The instruction set is a digest of the flags that the system lists (Linux), else the processor's name.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} {digest} {cores} cores"


def memory_kinds(device: jax.Device) -> tuple[str, ...]:
    """Names of the memories that the device can address."""
    return tuple(memory.kind for memory in device.addressable_memories())


def default_memory(device: jax.Device) -> str:
    """Name of the memory that arrays live in unless placed elsewhere."""
    return device.default_memory().kind


def snapshot_memory(device: jax.Device) -> str:
    """Where copies that nothing computes on are kept: pinned host memory if the device lists it, else its default."""
    return PINNED_HOST if PINNED_HOST in memory_kinds(device) else default_memory(device)


def in_host_memory(devices: Sequence[jax.Device]) -> bool:
    """Whether arrays on these devices are plain memory of this process, which `host_view` can read."""
    return all(device.platform == "cpu" for device in devices)


def host_view(array: jax.Array) -> np.ndarray:
    """The very memory of an array on one device for which `in_host_memory` holds, read-only; wait for the array first.

    The memory lives as long as the view, also when the array is deleted, and is not given to a donation. (A view that
    jax makes itself keeps it for as long as the array lives, so that the array could never be donated any more.)
    """
    if not array.size:
        return np.empty(array.shape, array.dtype)
    return np.asarray(_Held(array)).view(array.dtype).reshape(array.shape)


class _Held:
    """Owner of an array's memory, as numpy sees it: holds on to it by a DLPack capsule, which knows more types than
    numpy's own reading of one."""

    def __init__(self, array: jax.Array) -> None:
        self._capsule = array.__dlpack__()
        self.__array_interface__ = {
            "data": (array.unsafe_buffer_pointer(), True), "shape": (array.nbytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


class HostMemory:
    """Host memory that jax's CPU client adopts instead of copying it, used again once nothing reads it any more.

    Fresh memory costs more than the copy into it (the system clears every page). What a sampler installs is freed when
    the next version takes over, and serves the one after that: from the third on, nothing is allocated.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self.allocated = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A buffer of undefined content. Its memory comes back when the last view of it is gone."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free.get(size)
        if free:
            raw = free.pop()
        else:
            raw = np.empty(size + _ALIGNMENT, np.uint8)
            self.allocated += raw.nbytes
        lease = _Lease(raw, -raw.ctypes.data % _ALIGNMENT, size)
        # Views of an array refer to what owns its memory, past all arrays in between: that is the lease.
        weakref.finalize(lease, self._free.setdefault(size, []).append, raw).atexit = False
        return np.asarray(lease).view(dtype).reshape(shape)

    def trim(self) -> None:
        """Give what is free back to the system."""
        for buffers in self._free.values():
            self.allocated -= sum(raw.nbytes for raw in buffers)
            buffers.clear()


class _Lease:
    """Owner of a part of a buffer, as numpy sees it."""

    def __init__(self, raw: np.ndarray, start: int, size: int) -> None:
        self._raw = raw
        self.__array_interface__ = {
            "data": (raw.ctypes.data + start, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def adopt(shape: tuple[int, ...], sharding: Sharding, parts: Mapping[jax.Device, np.ndarray]) -> jax.Array:
    """The array whose shards are these buffers (all of one shape), in their very memory where it is aligned host memory
    and the devices are the host's."""
    devices = list(sharding.addressable_devices_indices_map(shape))
    part = parts[devices[0]].shape
    if not part or not math.prod(part):
        shards = jax.device_put([parts[device] for device in devices], devices)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)
    # Laid end to end, every part has an index of its own; under the real sharding replicas share one, and jax would
    # ask for only one of them.
    line = NamedSharding(Mesh(np.array(devices), ("part",)), PartitionSpec("part"))
    rows = part[0]

    def part_at(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return parts[devices[(index[0].start or 0) // rows]]

    stacked = jax.make_array_from_callback((len(devices) * rows, *part[1:]), line, part_at)
    shards = {shard.device: shard.data for shard in stacked.addressable_shards}
    return jax.make_array_from_single_device_arrays(shape, sharding, [shards[device] for device in devices])


def enable_compilation_cache(path: str | Path) -> None:
    """Keep compiled programs in the folder `path` (made if missing), and use those found there.

    Every program is kept, small ones too: reading one back is faster than compiling it. Do not share the folder
    between machines with different processors. Raises ConfigError when the folder cannot be made or written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compilation cache: the folder {folder} cannot be made ({error}); choose another") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"compilation cache: the folder {folder} cannot be written; change its rights or choose another"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
