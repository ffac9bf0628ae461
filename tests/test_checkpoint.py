"""Checkpoints: bitwise back on any mesh, complete or absent under kill -9, every misfit named."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep import checkpoint
from lockstep.errors import CheckpointError

META = {"policy_version": [3, "ab12"], "syncs": 4, "cursor": 48, "recipe": "c0ffee", "lr": 0.1}


def state(seed: int = 0) -> dict[str, Any]:
    """An adapter and its AdamW state after one update; a bfloat16 leaf, a NaN and a scalar among them."""
    random = np.random.default_rng(seed)
    params = {
        "layers.0.q.lora_a": jnp.asarray(random.standard_normal((5, 2)), jnp.float32),
        "layers.0.q.lora_b": jnp.asarray([[np.nan, 1, 2], random.standard_normal(3)], jnp.float32),
        "layers.1.up.lora_a": jnp.asarray(random.standard_normal((7, 2)), jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    gradients = jax.tree.map(np.ones_like, params)
    _, opt_state = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    return {"params": params, "optimizer": opt_state}


def assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_arrays_optimizer_and_meta_come_back_bitwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = state()
    assert checkpoint.latest(tmp_path) is None
    with caplog.at_level(logging.WARNING):
        checkpoint.save(tmp_path, 10, saved, META)
        assert checkpoint.latest(tmp_path) == 10
        back, meta = checkpoint.restore(tmp_path, 10, state(seed=1))
        hosted, _ = checkpoint.restore(tmp_path, 10, jax.tree.map(np.asarray, saved))
    assert not caplog.records
    assert_same_bits(back, saved)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(back))
    assert_same_bits(hosted, saved)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(hosted))
    assert meta == META == checkpoint.read_meta(tmp_path, 10)


def test_numpy_in_jax_out(tmp_path: Path) -> None:
    saved = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int32(4)}
    checkpoint.save(tmp_path, 1, saved, {})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding) for k, v in saved.items()}
    back, _ = checkpoint.restore(tmp_path, 1, like)
    assert_same_bits(back, saved)
    assert back["w"].sharding == sharding


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": np.zeros(3)}, {})
    with pytest.raises(CheckpointError, match=r"exists already, .*delete it to save"):
        checkpoint.save(tmp_path, 1, {"w": np.ones(3)}, {})


def test_other_steps_and_other_things_are_not_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "notes").mkdir(parents=True)
    (folder / "7").write_text("a file")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, 3, {"w": np.zeros(3)}, {})
    with pytest.raises(CheckpointError, match=r"4 is not a checkpoint.*\[3\]"):
        checkpoint.restore(tmp_path, 4, {"w": np.zeros(3)})


@pytest.mark.parametrize(
    ("like", "match"),
    [
        (
            {"a/b": np.zeros((2, 3), np.float32)},
            r"leaf 'a/b': expected float32\[2, 3\], the checkpoint has float32\[3, 2\]",
        ),
        (
            {"a/b": np.zeros((3, 2), np.float16)},
            r"leaf 'a/b': expected float16\[3, 2\], the checkpoint has float32\[3, 2\]",
        ),
        ({"a/c": np.zeros((3, 2), np.float32)}, r"lacks 1 leaves: 'a/c'.*recipe"),
        ({}, "distinct paths"),
        (
            {"a/b": np.zeros((3, 2), np.float32), **{k: np.zeros(1) for k in "wxyz"}},
            r"lacks 4 leaves: 'w', 'x', 'y', \.\.\.",
        ),
    ],
)
def test_misfits_are_named(tmp_path: Path, like: dict, match: str) -> None:
    checkpoint.save(tmp_path, 1, {"a": {"b": np.zeros((3, 2), np.float32)}}, {})
    with pytest.raises(CheckpointError, match=match):
        checkpoint.restore(tmp_path, 1, like)


def test_left_over_leaves_are_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"a": np.zeros(2), "b": np.zeros(2)}, {})
    with pytest.raises(CheckpointError, match="also has 1 leaves: 'b'"):
        checkpoint.restore(tmp_path, 1, {"a": np.zeros(2)})


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"w": 3}, "'w': expected an array, got int"),
        ({"k": jax.random.key(0)}, "'k': dtype key<fry>.*key_data"),
        ({"e": np.zeros((0, 3))}, r"'e': shape \[0, 3\] has no elements"),
        ({"o": np.array([object()])}, "'o': dtype object"),
        ({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}, "2 leaves under 1 paths"),
        ({}, "0 leaves"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, arrays: dict, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        checkpoint.save(tmp_path, 1, arrays, {})
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), np.int32(1), object(), {"a": (1,)}])
def test_meta_that_json_would_change_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"meta\['odd'\]: expected a value that JSON keeps"):
        checkpoint.save(tmp_path, 1, {"w": np.zeros(3)}, {"odd": value})
    assert checkpoint.latest(tmp_path) is None


def test_any_damaged_file_is_found_or_harmless(tmp_path: Path) -> None:
    saved = {"w": np.random.default_rng(0).standard_normal(3000)}
    whole = checkpoint.save(tmp_path, 1, saved, {"a": 1})
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    found = 0
    for damaged in [p for p in copy.rglob("*") if p.is_file() and p.stat().st_size]:
        for bad in (damaged.read_bytes()[: damaged.stat().st_size // 2], flipped(damaged.read_bytes())):
            shutil.rmtree(whole)
            shutil.copytree(copy, whole)
            (whole / damaged.relative_to(copy)).write_bytes(bad)
            try:
                back, meta = checkpoint.restore(tmp_path, 1, saved)
            except CheckpointError:
                found += 1
            else:
                assert_same_bits(back, saved)
                assert meta == {"a": 1}
    assert found >= 6


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def test_another_format_is_refused(tmp_path: Path) -> None:
    manifest = checkpoint.save(tmp_path, 1, {"w": np.zeros(3)}, {}) / "checkpoint.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="expected checkpoint format 1, got 99"):
        checkpoint.restore(tmp_path, 1, {"w": np.zeros(3)})


ON_EIGHT_DEVICES = """
import sys, warnings; warnings.simplefilter("error")
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from lockstep import checkpoint
devices = np.array(jax.devices()); assert devices.size == 8
def on(shape, names, spec, which=devices): return NamedSharding(Mesh(which.reshape(shape), names), spec)
eight = np.arange(8, dtype=np.float32) / 3
value = {"w": np.arange(16 * 24, dtype=np.float32).reshape(16, 24), "v": eight, "n": np.int32(5)}
first = {"w": on((4, 2), ("fsdp", "tensor"), P("fsdp", "tensor")), "v": on((8,), ("fsdp",), P("fsdp")),
         "n": on((8,), ("data",), P())}
checkpoint.save(Path(sys.argv[1]), 1, jax.tree.map(jax.device_put, value, first), {})
others = [
    first,
    {"w": on((2, 4), ("fsdp", "tensor"), P("tensor", "fsdp")), "v": on((2, 4), ("a", "b"), P("b")),
     "n": on((8,), ("x",), P())},
    {k: on((2,), ("fsdp",), P(), devices[5:7]) for k in value},
    {k: jax.sharding.SingleDeviceSharding(devices[7]) for k in value},
]
for shardings in others:
    like = {k: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=shardings[k]) for k, x in value.items()}
    back, _ = checkpoint.restore(Path(sys.argv[1]), 1, like)
    for k, x in value.items():
        assert back[k].sharding == shardings[k], (k, back[k].sharding)
        assert np.asarray(back[k]).tobytes() == x.tobytes(), k
like = {k: jax.ShapeDtypeStruct(np.shape(x), x.dtype) for k, x in value.items()}
assert all(type(x) is np.ndarray for x in checkpoint.restore(Path(sys.argv[1]), 1, like)[0].values())
print("done")
"""


def test_sharded_over_eight_devices_and_restored_onto_other_meshes(tmp_path: Path) -> None:
    done = run_python(ON_EIGHT_DEVICES, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert done.communicate(timeout=120)[0] == "done\n"
    assert done.returncode == 0


def run_python(code: str, run_dir: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


SAVE_FOR_EVER = """
import sys
from pathlib import Path
import numpy as np
from lockstep import checkpoint
run = Path(sys.argv[1])
step = (checkpoint.latest(run) or 0) + 1
while True:
    print(step, flush=True)
    arrays = {f"w{i}": np.full((64, 64), step + i, np.float32) for i in range(20)}
    checkpoint.save(run, step, arrays, {"step": step})
    step += 1
"""


def test_kill_minus_nine_never_leaves_half_a_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(2)
    like = {f"w{i}": np.zeros((64, 64), np.float32) for i in range(20)}
    before = 0
    for _ in range(4):
        child = run_python(SAVE_FOR_EVER, tmp_path)
        assert child.stdout is not None
        started = [int(child.stdout.readline()) for _ in range(3)]
        time.sleep(moments.uniform(0, 0.25))
        child.send_signal(signal.SIGKILL)
        started += [int(line) for line in child.stdout.read().split()]
        child.stdout.close()
        child.wait()
        last = checkpoint.latest(tmp_path)
        # Every save that returned is there (the next was announced after it); the one in flight is whole or absent.
        assert last in (started[-1] - 1, started[-1]) and last > before
        for step in checkpoint.steps(tmp_path):
            back, meta = checkpoint.restore(tmp_path, step, like)
            assert meta == {"step": step}
            assert all((back[f"w{i}"] == step + i).all() for i in range(20))
        before = last
    checkpoint.save(tmp_path, before + 1, like, {})
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
