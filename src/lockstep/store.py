"""Trajectories on disk: one Parquet file per step, `trajectories/step-000001.parquet`, one row per trajectory.

Every field of `Trajectory` is a column, arrays as lists of their own dtype, so that what is read is what was sampled,
bit for bit (NaN payloads included). Rewards are one column per name, `reward/<name>`; a null there means that the
trajectory has no reward of that name. What the trainer knows besides (`advantage`, `trainer_logprobs`, ...) follows as
extra columns. Each column says what it is in its field metadata (`description`, and `unit` where it has one).

A file appears under its name in one rename, after its bytes are on disk: a killed writer leaves no half file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import CheckpointError, DataError
from lockstep.files import fsync_dir, write_atomic
from lockstep.types import Fingerprint, Prompt, Trajectory

FORMAT = 1
REWARD_PREFIX = "reward/"
_NAME = re.compile(r"step-(\d{6,})\.parquet")
_INT32S = pa.list_(pa.field("element", pa.int32(), nullable=False))
_BOOLS = pa.list_(pa.field("element", pa.bool_(), nullable=False))
_FLOAT64S = pa.list_(pa.field("element", pa.float64(), nullable=False))
_FLOAT32S = pa.list_(pa.field("element", pa.float32(), nullable=False))


@dataclass(frozen=True)
class Column:
    """One fixed column. of: its value in a trajectory (None = null)."""

    name: str
    type: pa.DataType
    nullable: bool
    description: str
    of: Callable[[Trajectory], Any]


COLUMNS: tuple[Column, ...] = (
    Column("group_id", pa.string(), False, "id of the prompt; the group's id", lambda t: t.group_id),
    Column("index", pa.int32(), False, "number of the sample within its group, from 0", lambda t: t.index),
    Column("prompt_ids", _INT32S, False, "token ids the policy was given", lambda t: t.prompt_ids),
    Column(
        "completion_ids",
        _INT32S,
        False,
        "token ids after the prompt, a final stop id included; sampled, where `sampled` is null",
        lambda t: t.completion_ids,
    ),
    Column(
        "sampled",
        _BOOLS,
        True,
        "which of completion_ids the policy drew, the others being an environment's; null = all. Columns of one value "
        "per token (logprobs, versions, ...) have one per token drawn",
        lambda t: t.sampled,
    ),
    Column(
        "turn_rewards",
        _FLOAT64S,
        True,
        "what the environment gave for each run of sampled ids, parts of `reward`; null = there is no environment",
        lambda t: t.turn_rewards,
    ),
    Column(
        "logprobs",
        _FLOAT32S,
        False,
        "log-probability of each sampled id under the whole softmax at the temperature; nats",
        lambda t: t.logprobs,
    ),
    Column(
        "kept_logmass",
        _FLOAT32S,
        True,
        "logprobs less the log-probability under the distribution drawn from (ids cut off); nats; null = nothing cut",
        lambda t: t.kept_logmass,
    ),
    Column("versions", _INT32S, False, "policy number that computed each log-probability", lambda t: t.versions),
    Column(
        "reference_logprobs",
        _FLOAT32S,
        True,
        "log-probability of each id under the frozen reference policy; nats; null = not computed",
        lambda t: t.reference_logprobs,
    ),
    Column(
        "values",
        _FLOAT32S,
        True,
        "the critic's value of the state before each id was drawn; null = there is no critic",
        lambda t: t.values,
    ),
    Column("finish_reason", pa.string(), False, "stop, length or abort", lambda t: t.finish_reason),
    Column("seed", pa.uint64(), False, "seed of this request", lambda t: t.seed),
    Column("text", pa.string(), False, "completion decoded, special tokens skipped", lambda t: t.text),
    Column("reward", pa.float64(), False, "weighted sum of the rewards; NaN when scoring failed", lambda t: t.reward),
    Column("failed", pa.string(), True, "why there is no reward; null = there is one", lambda t: t.failed),
    Column("generate_s", pa.float64(), False, "seconds from submission to finish", lambda t: t.generate_s),
    Column("fingerprint_tokenizer", pa.string(), False, "hash of the tokenizer", lambda t: t.fingerprint.tokenizer),
    Column("fingerprint_template", pa.string(), False, "hash of the chat template", lambda t: t.fingerprint.template),
    Column("fingerprint_decoding", pa.string(), False, "hash of the decoding rules", lambda t: t.fingerprint.decoding),
    Column(
        "fingerprint_numerics", pa.string(), False, "hash of mode, dtypes and tiles", lambda t: t.fingerprint.numerics
    ),
)
PROMPT = pa.field("prompt", pa.string(), False, {"description": "the prompt as text, for people and rewards"})
_OWN = frozenset(c.name for c in COLUMNS) | {"prompt"}


@dataclass(frozen=True)
class StepRecord:
    """What one step's file holds.

    trajectories: in the order they were written. prompts: group id -> prompt text. extra: column -> one value per
    trajectory (1-D numpy array, float, int, str or None).
    """

    step: int
    trajectories: tuple[Trajectory, ...]
    prompts: Mapping[str, str]
    extra: Mapping[str, list[Any]]


def step_path(folder: Path, step: int) -> Path:
    """Where a step's trajectories are."""
    return folder / f"step-{step:06d}.parquet"


def steps(folder: Path) -> list[int]:
    """The steps that have a file, ascending; none when the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


def write_step(
    folder: Path,
    step: int,
    trajectories: Sequence[Trajectory],
    extra: Mapping[str, Sequence[Any]],
    *,
    prompts: Sequence[Prompt],
) -> Path:
    """Write one step's trajectories and return the file.

    folder: the run's `trajectories` folder, made when missing. extra: column -> one value per trajectory: 1-D numpy
    arrays of one dtype, numbers or strings; None is null. prompts: the prompts the trajectories answer.
    Raises DataError naming the column when lengths differ, a prompt is missing or values do not fit a column.
    """
    texts = {p.id: p.text for p in prompts}
    missing = sorted({t.group_id for t in trajectories} - texts.keys())
    if missing:
        raise DataError(f"step {step}: no prompt with id {missing[0]!r} among the {len(texts)} given")
    fields, arrays = [], []
    for column in COLUMNS:
        fields.append(pa.field(column.name, column.type, column.nullable, {"description": column.description}))
        arrays.append(_array(column.name, [column.of(t) for t in trajectories], column.type, column.nullable))
    fields.insert(2, PROMPT)
    arrays.insert(2, _array("prompt", [texts[t.group_id] for t in trajectories], pa.string(), False))
    for name in sorted({name for t in trajectories for name in t.rewards}):
        fields.append(
            pa.field(REWARD_PREFIX + name, pa.float64(), True, {"description": f"reward {name!r}, before its weight"})
        )
        arrays.append(_array(REWARD_PREFIX + name, [t.rewards.get(name) for t in trajectories], pa.float64(), True))
    for name, values in extra.items():
        if name in _OWN or name.startswith(REWARD_PREFIX):
            raise DataError(f"step {step}: extra column {name!r} has the name of a column of Trajectory; rename it")
        if len(values) != len(trajectories):
            raise DataError(f"step {step}: extra column {name!r} has {len(values)} values for {len(trajectories)} rows")
        kind = _extra_type(name, values)
        fields.append(pa.field(name, kind, True, {"description": "given by the trainer", "extra": "yes"}))
        arrays.append(_array(name, values, kind, True))
    schema = pa.schema(fields, {"lockstep.format": str(FORMAT), "lockstep.step": str(step)})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    folder.mkdir(parents=True, exist_ok=True)
    path = step_path(folder, step)
    write_atomic(path, sink.getvalue().to_pybytes())
    return path


def read_step(folder: Path, step: int) -> StepRecord:
    """Read what `write_step` wrote. Raises CheckpointError when the file is missing, damaged or of another format."""
    path = step_path(folder, step)
    try:
        # Not pq.read_table: that reads columns out of folder names such as `lr=0.1/`.
        with pq.ParquetFile(path) as file:
            table = file.read()
    except FileNotFoundError as error:
        have = steps(folder)
        raise CheckpointError(
            f"{path} does not exist; {folder} has {f'steps {have[0]} to {have[-1]}' if have else 'no steps'}"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(f"{path} is not a readable Parquet file ({error}); restore it from a copy") from error
    found = (table.schema.metadata or {}).get(b"lockstep.format")
    if found != str(FORMAT).encode():
        raise CheckpointError(
            f"{path}: expected trajectory format {FORMAT}, got {found!r}; read it with its own version"
        )
    columns = {name: _values(table.column(name)) for name in table.column_names}
    reward_names = [n for n in columns if n.startswith(REWARD_PREFIX)]
    extras = [f.name for f in table.schema if b"extra" in (f.metadata or {})]
    trajectories = tuple(_trajectory(columns, reward_names, row) for row in range(table.num_rows))
    return StepRecord(
        step=step,
        trajectories=trajectories,
        prompts=dict(zip(columns["group_id"], columns["prompt"], strict=True)),
        extra={name: columns[name] for name in extras},
    )


def truncate_after(folder: Path, step: int) -> list[int]:
    """Delete the files of steps after `step`, for a resume from its checkpoint; returns the steps deleted."""
    gone = [s for s in steps(folder) if s > step]
    for later in gone:
        step_path(folder, later).unlink()
    if gone:
        fsync_dir(folder)
    return gone


def _trajectory(columns: Mapping[str, list[Any]], reward_names: list[str], row: int) -> Trajectory:
    get = {name: values[row] for name, values in columns.items()}
    return Trajectory(
        prompt_ids=get["prompt_ids"],
        completion_ids=get["completion_ids"],
        logprobs=get["logprobs"],
        versions=get["versions"],
        finish_reason=get["finish_reason"],
        seed=get["seed"],
        group_id=get["group_id"],
        index=get["index"],
        fingerprint=Fingerprint(
            **{name: get[f"fingerprint_{name}"] for name in ("tokenizer", "template", "decoding", "numerics")}
        ),
        generate_s=get["generate_s"],
        text=get["text"],
        rewards={n.removeprefix(REWARD_PREFIX): get[n] for n in reward_names if get[n] is not None},
        reward=get["reward"],
        failed=get["failed"],
        reference_logprobs=get["reference_logprobs"],
        kept_logmass=get.get("kept_logmass"),  # files of earlier versions have none, and no values
        values=get.get("values"),
        sampled=get.get("sampled"),
        turn_rewards=get.get("turn_rewards"),
    )


def _array(name: str, values: Sequence[Any], kind: pa.DataType, nullable: bool) -> pa.Array:
    """A column. Arrays must already have the column's dtype: a cast here would hide that the record is not exact."""
    if not nullable and any(v is None for v in values):
        raise DataError(f"column {name!r}: got None; expected {kind}")
    try:
        if pa.types.is_list(kind):
            return _list_array(name, values, kind)
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise DataError(f"column {name!r}: a value does not fit {kind}: {error}") from error


def _list_array(name: str, values: Sequence[Any], kind: pa.ListType) -> pa.Array:
    dtype = kind.value_type.to_pandas_dtype()
    for row, value in enumerate(values):
        if value is not None and (not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1):
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise DataError(f"column {name!r} row {row}: expected a 1-D {np.dtype(dtype)} array, got {got}")
    lengths = np.array([0 if v is None else len(v) for v in values], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, dtype), *(v for v in values if v is not None)])
    missing = pa.array([v is None for v in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=kind, mask=missing)


def _extra_type(name: str, values: Sequence[Any]) -> pa.DataType:
    """The Arrow type of an extra column: what its values are, all alike; nulls do not count."""
    kinds = {
        pa.list_(pa.field("element", pa.from_numpy_dtype(v.dtype), nullable=False))
        if isinstance(v, np.ndarray)
        else pa.from_numpy_dtype(v.dtype)
        if isinstance(v, np.generic)
        else {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}.get(type(v))
        for v in values
        if v is not None
    }
    if len(kinds) > 1 or None in kinds:
        got = sorted({type(v).__name__ for v in values})
        raise DataError(
            f"extra column {name!r}: expected values of one type (1-D numpy array of one dtype, bool, int, "
            f"float, str), got {got}"
        )
    return kinds.pop() if kinds else pa.null()


def _values(column: pa.ChunkedArray) -> list[Any]:
    """A column as Python values; lists as numpy arrays of their own dtype, copied by buffer so that bits survive."""
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    return [
        cell.values.to_numpy(zero_copy_only=False).copy() if cell.is_valid else None
        for chunk in column.chunks
        for cell in chunk
    ]
