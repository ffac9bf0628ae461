"""Step logs: exact values back, one torn line tolerated and named, resume leaves the same bytes as no interruption."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import metrics
from lockstep.errors import CheckpointError, DataError
from lockstep.metrics import StepLog, decode, encode, read_jsonl, truncate_after

JSON_VALUES = st.one_of(
    st.floats(), st.integers(-(2**70), 2**70), st.booleans(), st.none(), st.text(), st.lists(st.integers()), st.just({})
)
KEYS = st.text().filter(lambda key: key not in ("step", metrics.NON_FINITE))


def same(a: object, b: object) -> bool:
    """Equality in which NaN equals NaN, 1 differs from 1.0 and -0.0 from 0.0."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and a == b


@given(st.dictionaries(KEYS, JSON_VALUES))
def test_what_is_written_is_what_is_read(record: dict) -> None:
    line = encode({"step": 1, **record})
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    back = decode(line)
    assert list(back)[: len(record) + 1] == ["step", *record]
    assert all(same(back[key], value) for key, value in record.items())


def test_non_finite_is_null_and_named() -> None:
    line = encode({"step": 1, "loss": float("nan"), "kl/k3": float("-inf"), "lr": 1e-3, "skipped": None})
    assert json.loads(line) == {
        "step": 1,
        "loss": None,
        "kl/k3": None,
        "lr": 1e-3,
        "skipped": None,
        "non_finite": {"loss": "nan", "kl/k3": "-inf"},
    }
    back = decode(line)
    assert math.isnan(back["loss"]) and back["kl/k3"] == -math.inf and back["skipped"] is None


def test_numpy_scalars_keep_their_value() -> None:
    value = np.float32(0.1)
    back = decode(encode({"step": np.int64(2), "loss": value, "nan": np.float32("nan")}))
    assert back["step"] == 2 and np.float32(back["loss"]) == value and math.isnan(back["nan"])


@pytest.mark.parametrize("value", [np.zeros(2), {1, 2}, object(), [float("nan")], {"a": float("inf")}])
def test_what_is_not_json_is_refused_by_name(value: object) -> None:
    with pytest.raises(DataError, match="'odd'"):
        encode({"step": 1, "odd": value})


def test_reserved_key_is_refused() -> None:
    with pytest.raises(DataError, match="non_finite"):
        encode({"step": 1, "non_finite": 3})


@pytest.mark.parametrize("step", [None, -1, 1.0, True, "1"])
def test_a_record_needs_a_step(tmp_path: Path, step: object) -> None:
    with StepLog(tmp_path / "m.jsonl") as log, pytest.raises(DataError, match="whole number"):
        log.write({"step": step})
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_steps_grow(tmp_path: Path) -> None:
    with StepLog(tmp_path / "m.jsonl") as log:
        log.write({"step": 1})
        with pytest.raises(DataError, match="step 1 after step 1"):
            log.write({"step": 1})
    with StepLog(tmp_path / "m.jsonl") as log, pytest.raises(DataError, match="step 1 after step 1"):
        log.write({"step": 1})  # also across a reopening


def test_receipts_may_share_a_step(tmp_path: Path) -> None:
    with StepLog(tmp_path / "r.jsonl", once_per_step=False) as log:
        log.write({"step": 1, "n": 0})
        log.write({"step": 1, "n": 1})
        with pytest.raises(DataError, match="not fall"):
            log.write({"step": 0})
    assert [r["n"] for r in read_jsonl(tmp_path / "r.jsonl").records] == [0, 1]


def written(path: Path, steps: range) -> bytes:
    with StepLog(path) as log:
        for step in steps:
            log.write({"step": step, "reward": step / 7, "loss": float("nan") if step % 3 == 0 else 0.5})
    return path.read_bytes()


def test_every_torn_last_line_is_dropped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = written(path, range(1, 4))
    second_ends = len(b"\n".join(whole.split(b"\n")[:2])) + 1
    for cut in range(second_ends, len(whole)):
        path.write_bytes(whole[:cut])
        read = read_jsonl(path)
        assert [r["step"] for r in read.records] == [1, 2]
        assert read.torn == (whole[second_ends:cut].decode() or None)


def test_zeros_after_a_power_cut_are_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"\0" * 20)
    assert len(read_jsonl(path).records) == 1 and read_jsonl(path).torn is not None


@pytest.mark.parametrize("bad", [b'{"step": 2', b"[1]", b'{"step": 2, "x": NaN}', b"", b"\xff\xfe"])
def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        read_jsonl(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_jsonl(tmp_path / "m.jsonl")
    with pytest.raises(CheckpointError, match="does not exist"):
        truncate_after(tmp_path / "m.jsonl", 3)
    assert truncate_after(tmp_path / "m.jsonl", 0).kept == 0


def test_opening_a_torn_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    with pytest.raises(CheckpointError, match=r'unfinished line.*"st.*resume'):
        StepLog(path)


@given(cut=st.integers(0, 10_000), step=st.integers(0, 5))
def test_resumed_log_equals_the_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int, step: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "m.jsonl"
    whole = written(path, range(1, 9))
    five = len(b"\n".join(whole.split(b"\n")[:5])) + 1
    cut = five + cut % (len(whole) - five + 1)
    path.write_bytes(whole[:cut])  # killed somewhere after step 5, resumed from a checkpoint at `step`
    done = truncate_after(path, step)
    assert done.kept == step and (done.torn is None) == (whole[cut - 1 : cut] == b"\n")
    assert written(path, range(step + 1, 9)) == whole


def test_a_log_that_does_not_reach_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    before = written(path, range(1, 4))
    with pytest.raises(CheckpointError, match=r"no record of step 7.*ends at step 3"):
        truncate_after(path, 7)
    assert path.read_bytes() == before
    assert truncate_after(path, 7, reaches=False).kept == 3


def test_kill_minus_nine_loses_at_most_the_line_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from pathlib import Path; from lockstep.metrics import StepLog\n"
        "log = StepLog(Path(sys.argv[1]))\n"
        "for step in range(1, 10**9):\n"
        "    log.write({'step': step, 'pad': 'x' * 5000}); print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 20:
            break
    child.send_signal(signal.SIGKILL)
    acknowledged = [20, *(int(line) for line in child.stdout.read().split())][-1]
    child.stdout.close()
    child.wait()
    read = read_jsonl(path)
    assert [r["step"] for r in read.records] == list(range(1, len(read.records) + 1))
    assert acknowledged <= len(read.records) <= acknowledged + 1


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with StepLog(path) as log:
            log.write({"step": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            with pytest.raises(OSError, match="File too large"):
                log.write({"step": 2, "pad": "x" * 1000})
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert os.path.getsize(path) == len(b'{"step": 1}\n')
            log.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [r["step"] for r in read_jsonl(path).records] == [1, 2]
