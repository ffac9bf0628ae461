"""Segments of shared memory: readable with numpy alone, owned, never torn."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import SyncError
from lockstep.sync import foreign, shared_memory
from lockstep.sync.foreign import HEADER, Segment, WeightsError
from lockstep.sync.mapping import FormatMap, whole
from lockstep.sync.shared_memory import Owned, SharedMemoryTransport, clean, write_segment

SHAPES = {"w": (6, 5), "half": (4, 3), "norm": (5,), "scale": (), "none": (0, 3)}


def source(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    made = {path: jnp.asarray(rng.standard_normal(shape, np.float32)) for path, shape in SHAPES.items()}
    return {**made, "half": made["half"].astype(jnp.bfloat16)}


def mapping() -> FormatMap:
    targets = {path: whole(path, leaf.shape, leaf.dtype.name) for path, leaf in source().items()}
    return FormatMap("identity", targets, {}, {})


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Owned]:
    owned = write_segment(tmp_path / "segment", 7, mapping(), source(), plan="p", policy_digest="d")
    yield owned
    owned.withdraw()


def test_what_is_read_is_what_was_written(segment):
    with Segment(segment.path) as opened:
        opened.check()
        assert opened.version == 7 and opened.manifest["policy_digest"] == "d" and opened.manifest["plan"] == "p"
        for path, leaf in source().items():
            view = opened.array(path)
            np.testing.assert_array_equal(view, np.asarray(leaf))
            assert view.dtype == leaf.dtype and not view.flags.writeable and view.ctypes.data % 64 == 0
            with pytest.raises(WeightsError, match="arrays of it are still in use"):
                opened.close()
            del view
            with pytest.raises(WeightsError, match="has no leaf 'other'"):
                opened.array("other")
    assert segment.path.stat().st_mode & 0o777 == 0o600


READER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("reader", sys.argv[1])
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)
with reader.Segment(sys.argv[2]) as segment:
    segment.check()
    print(segment.version, segment.array("w").sum(), segment.array("half").dtype)
foreign = [name for name in ("jax", "lockstep", "ml_dtypes", "safetensors", "multiprocessing") if name in sys.modules]
assert not foreign, foreign
"""


def test_another_process_reads_it_with_numpy_alone(segment, tmp_path):
    """`-I`: an environment without lockstep; `ml_dtypes` is hidden, as an engine need not have it."""
    hide = "import sys; sys.modules['ml_dtypes'] = None\n"
    reader = hide + READER.replace('"ml_dtypes", ', "")
    done = subprocess.run(
        [sys.executable, "-I", "-c", reader, foreign.__file__, str(segment.path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    version, total, dtype = done.stdout.split()
    assert (version, dtype) == ("7", "uint16") and np.float32(total) == np.asarray(source()["w"]).sum()
    assert not done.stderr


def altered(segment: Owned, at: int, data: bytes) -> Path:
    text = bytearray(segment.path.read_bytes())
    text[at : at + len(data)] = data
    other = segment.path.with_name("altered")
    other.write_bytes(text)
    return other


def test_every_flipped_byte_is_noticed(segment):
    """Alignment gaps, which hold nothing, excepted."""
    text = segment.path.read_bytes()
    _, _, manifest_at, *_ = HEADER.unpack_from(text)
    with Segment(segment.path) as opened:
        used = [range(leaf["offset"], leaf["offset"] + leaf["bytes"]) for leaf in opened.manifest["leaves"].values()]
    places = [*range(HEADER.size), *(at for part in used for at in part), *range(manifest_at, len(text))]
    for at in [*places[: HEADER.size], *places[HEADER.size :: 5]]:
        path = altered(segment, at, bytes([text[at] ^ (1 << at % 8)]))
        with pytest.raises(WeightsError), Segment(path) as opened:
            opened.check()


@pytest.mark.parametrize(
    ("at", "data", "match"),
    [
        (0, b"SOMETHING", "is no segment of weights"),
        (8, (0).to_bytes(8, "little"), "is still being written"),
        (8, (2).to_bytes(8, "little"), "is withdrawn"),
        (16, (2**63).to_bytes(8, "little"), "torn"),
        (24, (2**64 - 1).to_bytes(8, "little"), "torn"),
        (32, (64).to_bytes(8, "little"), "torn"),
        (40, b"\0" * 16, "its manifest was altered"),
    ],
)
def test_headers_that_are_wrong_are_refused(segment, at, data, match):
    with pytest.raises(WeightsError, match=match):
        Segment(altered(segment, at, data))


@pytest.mark.parametrize("size", [0, 10, 63, 64, 200])
def test_a_segment_cut_short_is_refused(segment, size):
    short = segment.path.with_name("short")
    short.write_bytes(segment.path.read_bytes()[:size])
    with pytest.raises(WeightsError, match="torn"):
        Segment(short)


def test_withdrawing_tells_readers_and_leaves_what_they_have(segment):
    with Segment(segment.path) as opened:
        view = opened.array("w")
        assert not opened.withdrawn()
        segment.withdraw()
        segment.withdraw()
        assert opened.withdrawn() and not segment.path.exists()
        np.testing.assert_array_equal(view, source()["w"])
        del view
    with pytest.raises(WeightsError, match="was it withdrawn"):
        Segment(segment.path)


def test_a_write_that_breaks_leaves_nothing(tmp_path):
    def no_time() -> None:
        raise SyncError("no time left")

    with pytest.raises(SyncError, match="no time left"):
        write_segment(tmp_path / "segment", 1, mapping(), source(), check=no_time)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SyncError, match=r"the shared memory of version 1, .*No such file"):
        write_segment(tmp_path / "none" / "segment", 1, mapping(), source())


@pytest.mark.skipif(not Path("/dev/full").exists() or os.geteuid() != 0, reason="needs to mount a small tmpfs: root")
def test_a_full_shared_memory_is_an_error_and_not_a_signal(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        big = {"w": jnp.zeros((1 << 16,), jnp.float32)}
        one = FormatMap("identity", {"w": whole("w", (1 << 16,), "float32")}, {}, {})
        with pytest.raises(SyncError, match=r"bytes of shared memory for version 1 in .*is it full"):
            write_segment(small / "segment", 1, one, big)
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)


OWNER = """
import sys, os, signal
from pathlib import Path
import jax.numpy as jnp
from lockstep.sync.mapping import FormatMap, whole
from lockstep.sync.shared_memory import write_segment
one = FormatMap("identity", {"w": whole("w", (4,), "float32")}, {}, {})
write_segment(Path(sys.argv[1]), 1, one, {"w": jnp.zeros(4)})
print("written", flush=True)
sys.stdin.read()
"""


def test_a_killed_owners_segments_are_removed_by_the_next_and_a_living_ones_are_not(tmp_path):
    names = [tmp_path / f"lockstep-actor-v00000{n}-x" for n in (1, 2)]
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in names
    ]
    try:
        assert [owner.stdout.readline() for owner in owners] == ["written\n"] * 2
        assert clean("actor", tmp_path) == []
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        with Segment(names[0]):  # somebody reads it still
            assert clean("actor", tmp_path) == []
        shutil.copy(names[0], tmp_path / "lockstep-another-v000001-x")
        SharedMemoryTransport("actor", directory=tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "lockstep-actor-v000002-x",
            "lockstep-another-v000001-x",
        ]
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()


@pytest.mark.parametrize("owner", ["", "a/b", "a-v1", "*"])
def test_owners_whose_names_could_be_anothers_are_refused(owner):
    with pytest.raises(SyncError, match="is no name for an owner"):
        SharedMemoryTransport(owner)


def test_released_versions_are_kept_by_count(tmp_path):
    transport = SharedMemoryTransport("actor", directory=tmp_path, keep=2)
    for version in (1, 2, 3, 4):
        path = tmp_path / f"lockstep-actor-v{version:06d}-x"
        transport._owned[version] = write_segment(path, version, mapping(), source())
        transport.release(version, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"lockstep-actor-v00000{n}-x" for n in (3, 4)]
    refused = tmp_path / "lockstep-actor-v000005-x"
    transport._owned[5] = write_segment(refused, 5, mapping(), source())
    for _ in range(2):
        transport.release(5, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"lockstep-actor-v00000{n}-x" for n in (3, 4)]
    transport.close()
    transport.close()
    assert not list(tmp_path.iterdir())


def test_large_leaves_are_checked_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "BLOCK_BYTES", 32)
    owned = write_segment(tmp_path / "s", 1, mapping(), source())
    with Segment(owned.path) as opened:
        assert len(opened.manifest["leaves"]["w"]["crc32"]) == 4  # 120 bytes
        opened.check()
    owned.withdraw()
