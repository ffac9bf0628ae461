"""Step logs: one JSON object per line, durable line by line (`metrics.jsonl`, `receipts.jsonl`).

A line is strict JSON. JSON has no NaN and no infinity, so such a value is written as null and named under `non_finite`:

    {"step": 3, "reward": 0.25, "loss": null, "non_finite": {"loss": "nan"}}

The reader puts the value back and takes the listing away: what `StepLog.write` was given is what `read_jsonl` returns,
bit for bit (Python writes the shortest decimal that reads back as the same double). A plain null means "not measured".

A line reaches the file in one write, newline last, and is synced to disk before `write` returns. A writer killed
halfway leaves at most one line without its newline; readers drop exactly that line and say so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lockstep.errors import CheckpointError, DataError
from lockstep.files import fsync_dir

NON_FINITE = "non_finite"


@dataclass(frozen=True)
class JsonLines:
    """What a step log holds. records: one dict per complete line, in order. torn: the text of an unfinished last line,
    which is not among the records, or None."""

    records: tuple[dict[str, Any], ...]
    torn: str | None


@dataclass(frozen=True)
class Truncation:
    """What `truncate_after` did. kept: lines that stay. removed: lines taken off the end. torn: as in `JsonLines`."""

    kept: int
    removed: int
    torn: str | None


class StepLog:
    """Appends records to a step log.

    path: the file; its folder must exist. once_per_step: each record's `step` must be larger than the one before
    (metrics); otherwise it may repeat but not fall (receipts: several syncs can belong to one step).

    Raises CheckpointError when the file ends in an unfinished line: call `truncate_after` first; it says what it drops.
    """

    def __init__(self, path: Path, *, once_per_step: bool = True) -> None:
        self.path = path
        self._once = once_per_step
        existing = read_jsonl(path) if path.exists() else JsonLines((), None)
        if existing.torn is not None:
            raise CheckpointError(
                f"{path} ends in an unfinished line ({existing.torn[:60]!r}); its writer was killed. Continue the run "
                f"with --resume, which drops that line, or write to another run directory"
            )
        self._last = _step_of(existing.records[-1], str(path)) if existing.records else None
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        fsync_dir(path.parent)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record and wait until it is on disk.

        record: string keys; values are JSON values or numpy scalars. NaN and infinities are allowed at the top level.
        Raises DataError when the record has no whole `step`, steps run backwards, or a value is not JSON.
        """
        step = _step_of(record, str(self.path))
        if self._last is not None and (step < self._last or (self._once and step == self._last)):
            raise DataError(
                f"{self.path}: record for step {step} after step {self._last}; steps must "
                f"{'grow' if self._once else 'not fall'}. On resume call truncate_after before opening the log"
            )
        line = encode(record).encode() + b"\n"
        end = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
            os.fsync(self._fd)
        except OSError:
            # A full disk must not leave half a line for the next record to be glued to.
            os.ftruncate(self._fd, end)
            raise
        self._last = step

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def encode(record: Mapping[str, Any]) -> str:
    """One record as one line of strict JSON, without the newline. Raises DataError naming a field that does not fit."""
    out: dict[str, Any] = {}
    non_finite: dict[str, str] = {}
    for key, value in record.items():
        if not isinstance(key, str) or key == NON_FINITE:
            raise DataError(f"record key {key!r}: keys are strings, and {NON_FINITE!r} is the writer's own")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            non_finite[key] = repr(value)
            value = None
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"record field {key!r}: expected a JSON value, got {type(value).__name__} {value!r:.80} ({error}). "
                f"Turn arrays into numbers with float() before writing"
            ) from error
        out[key] = value
    if non_finite:
        out[NON_FINITE] = non_finite
    return json.dumps(out, allow_nan=False)


def decode(line: str | bytes) -> dict[str, Any]:
    """The record that `encode` was given. Raises ValueError when the line is not one."""
    record = json.loads(line, parse_constant=_reject_constant)
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    for key, value in record.pop(NON_FINITE, {}).items():
        record[key] = float(value)
    return record


def read_jsonl(path: Path) -> JsonLines:
    """Read a step log.

    Raises CheckpointError when the file is missing, or when a line other than an unfinished last one is not a record:
    that is damage, not a killed writer.
    """
    records, _, torn = _scan(path)
    return JsonLines(tuple(records), torn)


def truncate_after(path: Path, step: int, *, reaches: bool = True) -> Truncation:
    """Cut a step log back to the records of steps <= `step`, for a resume from that step's checkpoint.

    The bytes that stay are untouched, so the log of a resumed run equals that of an uninterrupted one.
    reaches: the log must have a record of `step` itself (metrics do; a step need not have a receipt).
    Raises CheckpointError when the log is damaged, missing, or does not reach `step`.
    """
    if not path.exists() and (step == 0 or not reaches):
        return Truncation(0, 0, None)
    records, ends, torn = _scan(path)
    kept = sum(_step_of(record, str(path)) <= step for record in records)
    if any(record["step"] > step for record in records[:kept]):
        raise CheckpointError(
            f"{path}: steps run backwards, so it cannot be cut after step {step}; it was edited or mixed"
        )
    if reaches and step > 0 and (not kept or records[kept - 1]["step"] != step):
        raise CheckpointError(
            f"{path} has no record of step {step}, where the checkpoint is; it ends at step "
            f"{records[kept - 1]['step'] if kept else 0}. Restore the log from a copy or resume an earlier checkpoint"
        )
    fd = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, ends[kept - 1] if kept else 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    return Truncation(kept, len(records) - kept, torn)


def _scan(path: Path) -> tuple[list[dict[str, Any]], list[int], str | None]:
    """(records, byte offset behind each record's newline, text of an unfinished last line or None)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; expected the step log of a run there") from error
    *lines, rest = data.split(b"\n")
    records: list[dict[str, Any]] = []
    ends: list[int] = []
    end = 0
    for number, line in enumerate(lines, 1):
        end += len(line) + 1
        try:
            records.append(decode(line))
        except ValueError as error:
            raise CheckpointError(
                f"{path} line {number}: expected one JSON object, got {line[:60]!r} ({error}). A killed run leaves at "
                f"most an unfinished last line, so this file was damaged or edited; restore it from a copy"
            ) from error
        ends.append(end)
    return records, ends, rest.decode(errors="backslashreplace") if rest else None


def _step_of(record: Mapping[str, Any], where: str) -> int:
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise DataError(f"{where}: a record needs `step`, a whole number >= 0, got {step!r}")
    return int(step)


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
