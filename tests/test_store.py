"""Trajectories in Parquet: bit for bit back, described, atomic; what does not fit is named."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep import store
from lockstep.errors import CheckpointError, DataError
from lockstep.types import Fingerprint, Prompt, Trajectory

FINGERPRINT = Fingerprint("aa", "bb", "cc", "dd")


def trajectory(n: int = 3, group: str = "task/0/0", index: int = 0, **changes: Any) -> Trajectory:
    base = Trajectory(
        prompt_ids=np.arange(4, dtype=np.int32),
        completion_ids=np.arange(n, dtype=np.int32),
        logprobs=-np.arange(n, dtype=np.float32) / 3,
        versions=np.full(n, 2, np.int32),
        finish_reason="stop",
        seed=2**63 + 1,
        group_id=group,
        index=index,
        fingerprint=FINGERPRINT,
        generate_s=0.1,
        text="57",
        rewards={"exact": 1.0},
        reward=1.0,
        reference_logprobs=-np.ones(n, np.float32),
    )
    return dataclasses.replace(base, **changes)


def bits(value: Any) -> Any:
    """A value as something that is equal only when every bit is."""
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    return value


def fields(t: Trajectory) -> dict[str, Any]:
    return {f.name: bits(getattr(t, f.name)) for f in dataclasses.fields(t)}


def float32s(n: int) -> st.SearchStrategy[np.ndarray]:
    """Any float32 bit pattern, NaNs with payloads included."""
    return hnp.arrays(np.uint32, n, elements=st.integers(0, 2**32 - 1)).map(lambda a: a.view(np.float32))


def int32s(n: int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int32, n, elements=st.integers(-(2**31), 2**31 - 1))


ANY_DOUBLE = st.integers(0, 2**64 - 1).map(lambda i: struct.unpack("<d", struct.pack("<Q", i))[0])


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(0, 5))
    return Trajectory(
        prompt_ids=draw(int32s(draw(st.integers(0, 4)))),
        completion_ids=draw(int32s(n)),
        logprobs=draw(float32s(n)),
        versions=draw(int32s(n)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        seed=draw(st.integers(0, 2**64 - 1)),
        group_id=draw(st.text(max_size=4)),
        index=draw(st.integers(0, 9)),
        fingerprint=Fingerprint(*draw(st.tuples(*[st.text(max_size=3)] * 4))),
        generate_s=draw(st.floats()),
        text=draw(st.text(max_size=6)),
        rewards=draw(st.dictionaries(st.text(max_size=3), ANY_DOUBLE, max_size=3)),
        reward=draw(ANY_DOUBLE),
        failed=draw(st.none() | st.text(max_size=3)),
        reference_logprobs=draw(st.none() | float32s(n)),
        kept_logmass=draw(st.none() | float32s(n)),
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(trajectories(), max_size=6), data=st.data())
def test_everything_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, rows: list, data: Any) -> None:
    folder = tmp_path_factory.mktemp("t") / "trajectories"
    prompts = [Prompt(g, f"text of {g}", (1,)) for g in {t.group_id for t in rows}]
    extra = {
        "advantage": [data.draw(ANY_DOUBLE) for _ in rows],
        "trainer_logprobs": [data.draw(st.none() | float32s(len(t.logprobs))) for t in rows],
        "note": [data.draw(st.none() | st.text(max_size=3)) for _ in rows],
    }
    store.write_step(folder, 7, rows, extra, prompts=prompts)
    back = store.read_step(folder, 7)
    assert [fields(t) for t in back.trajectories] == [fields(t) for t in rows]
    assert {k: [bits(v) for v in vs] for k, vs in back.extra.items()} == {
        k: [bits(v) for v in vs] for k, vs in extra.items()
    }
    assert back.prompts == {p.id: p.text for p in prompts} and back.step == 7


def write(folder: Path, rows: list[Trajectory], extra: dict[str, Any] | None = None, step: int = 1) -> Path:
    return store.write_step(folder, step, rows, extra or {}, prompts=[Prompt("task/0/0", "1 + 1 = ", (1, 2))])


def test_every_field_of_trajectory_is_a_described_column(tmp_path: Path) -> None:
    path = write(tmp_path, [trajectory()], {"advantage": [0.5]})
    assert path.name == "step-000001.parquet"
    schema = pq.read_schema(path)
    assert all(field.metadata[b"description"] for field in schema)
    expected = {f.name for f in dataclasses.fields(Trajectory)} - {"fingerprint", "rewards", "details"}
    expected |= {f"fingerprint_{f.name}" for f in dataclasses.fields(Fingerprint)}
    assert set(schema.names) == expected | {"prompt", "reward/exact", "advantage"}
    assert str(schema.field("logprobs").type) == "list<element: float not null>"
    assert str(schema.field("completion_ids").type) == "list<element: int32 not null>"


def test_arrays_read_are_the_readers_own(tmp_path: Path) -> None:
    write(tmp_path, [trajectory(), trajectory(index=1)])
    first, second = store.read_step(tmp_path, 1).trajectories
    first.logprobs[:] = 9
    assert second.logprobs[0] == 0


def test_only_whole_files_and_ours_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    assert store.steps(folder) == []
    for step in (3, 1, 1_234_567):
        write(folder, [trajectory()], step=step)
    (folder / ".step-000002.parquet.tmp").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    assert store.steps(folder) == [1, 3, 1_234_567]
    assert store.truncate_after(folder, 1) == [3, 1_234_567]
    assert store.steps(folder) == [1] and (folder / "notes.txt").exists()
    assert store.truncate_after(folder, 1) == []


def test_a_run_folder_that_looks_like_a_partition(tmp_path: Path) -> None:
    write(tmp_path / "lr=0.1" / "trajectories", [trajectory()])
    assert store.read_step(tmp_path / "lr=0.1" / "trajectories", 1).extra == {}


def test_writing_again_replaces(tmp_path: Path) -> None:
    write(tmp_path, [trajectory(text="old")])
    write(tmp_path, [trajectory(text="new")])
    assert store.read_step(tmp_path, 1).trajectories[0].text == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001.parquet"]


@pytest.mark.parametrize(
    ("rows", "extra", "match"),
    [
        ([trajectory(group="other")], {}, "no prompt with id 'other'"),
        ([trajectory()], {"advantage": [1.0, 2.0]}, "'advantage' has 2 values for 1 rows"),
        ([trajectory()], {"seed": [1]}, "'seed' has the name of a column"),
        ([trajectory()], {"reward/x": [1.0]}, "'reward/x' has the name of a column"),
        ([trajectory(), trajectory()], {"mixed": [1, "a"]}, r"'mixed': expected values of one type.*int.*str"),
        ([trajectory()], {"odd": [object()]}, "'odd': expected values of one type"),
        (
            [trajectory()],
            {"odd": [np.zeros((2, 2), np.float32)]},
            r"'odd' row 0: expected a 1-D float32 array.*\[2, 2\]",
        ),
        ([trajectory(seed=-1)], {}, "'seed': a value does not fit uint64"),
        ([trajectory(seed=2**64)], {}, "'seed': a value does not fit uint64"),
        ([trajectory(text="\ud800")], {}, "'text': a value does not fit string"),
        ([trajectory(text=None)], {}, "'text': got None"),
        ([trajectory(versions=np.zeros(3, np.int64))], {}, "'versions' row 0: expected a 1-D int32 array, got int64"),
        ([trajectory(prompt_ids=(1, 2))], {}, "'prompt_ids' row 0: expected a 1-D int32 array, got tuple"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path, rows: list, extra: dict, match: str) -> None:
    with pytest.raises(DataError, match=match):
        write(tmp_path, rows, extra)
    assert store.steps(tmp_path) == []


def test_reading_what_is_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist.*no steps"):
        store.read_step(tmp_path, 4)
    path = write(tmp_path, [trajectory()])
    with pytest.raises(CheckpointError, match=r"does not exist.*steps 1 to 1"):
        store.read_step(tmp_path, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not a readable Parquet file"):
        store.read_step(tmp_path, 1)
    table = pq.read_table(write(tmp_path, [trajectory()]))
    pq.write_table(table.replace_schema_metadata({"lockstep.format": "99"}), path)
    with pytest.raises(CheckpointError, match=r"expected trajectory format 1, got b'99'"):
        store.read_step(tmp_path, 1)
