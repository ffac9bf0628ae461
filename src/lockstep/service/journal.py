"""What the service admitted and how it ended, and the answers that clients may ask for again: across a crash.

    {"kind": "admitted", "id": "a", "key": "k", "prompt_ids": [1, 2], "seeds": [7], "group": "a", "min_version": 0}
    {"kind": "ended", "id": "a", "outcome": "finished", "version": 3, "reason": ""}
    {"kind": "answer", "key": "k", "digest": "5e...", "status": 200, "media": "application/json", ...}

One JSON object per line, appended by one write each: a process that is killed leaves at most one unfinished line, which
the next one cuts off, saying so. Every admission has exactly one end: those that a killed process left open are ended
by the next one, as failed. What a write has handed to the operating system survives the death of the process; with
`fsync` it survives that of the machine too, at the price of a wait for the disk per request.
"""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, ServiceError
from lockstep.files import write_atomic
from lockstep.service.controls import KeyConflict, Stored
from lockstep.service.requests import Ended, RolloutRequest

LOG = logging.getLogger("lockstep.service")
STOPPED = "the server stopped while it was under way"
COMPACT_BYTES = 64 << 20  # of lines that nobody will ask for, beside the answers that are kept


class Journal:
    """Implements `service.Ledger` and `controls.Replay`. For one process at a time, any thread.

    path: the file; its folder must exist. answers: how many of the newest are kept for keys, with at most answer_bytes
    in all. recovered: how many requests the process before left open. say: told what was found.
    """

    def __init__(
        self,
        path: Path,
        *,
        answers: int = 10_000,
        answer_bytes: int = 64 << 20,
        fsync: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Raises ServiceError where another process has the journal, DataError for a file that is damaged."""
        self.path, self._most, self._most_bytes, self._fsync = path, answers, answer_bytes, fsync
        self._lock = threading.Lock()
        self._open: dict[str, str] = {}  # id -> line, of what has not ended
        self._answers: OrderedDict[str, tuple[str, Stored, int]] = OrderedDict()  # key -> digest, answer, bytes
        self._taken: dict[str, str] = {}  # key -> digest, of what is being answered
        self._unwritten: list[str] = []  # ends that found the disk full
        self._held = 0
        self._fd = -1
        try:
            self._guard = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ServiceError(f"journal {path}: {error.strerror}; its folder must exist and be writable") from error
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._guard)
            raise ServiceError(
                f"journal {path} is in use by another process; stop that one, or give each its own journal"
            ) from error
        try:
            self._read(say or LOG.warning)
            self.recovered = len(self._open)
            self._compact([_ended(i, "failed", STOPPED, None) for i in self._open])
            self._open.clear()
        except BaseException:
            os.close(self._guard)
            raise

    def close(self) -> None:
        """Give the file up; a second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                os.close(self._guard)  # and with it the lock
                self._fd = -1

    # -- Ledger ------------------------------------------------------------------------------------------------------

    def admitted(self, request: RolloutRequest) -> None:
        """Raises ServiceError, with nothing written, where the journal cannot be written."""
        line = json.dumps(
            {
                "kind": "admitted",
                "id": request.id,
                "key": request.key,
                "prompt_ids": list(request.prompt.ids),
                "seeds": list(request.seeds),
                "group": request.pin,
                "min_version": request.min_version,
            }
        )
        with self._lock:
            try:
                self._flush()
                self._write(line)
            except OSError as error:
                raise ServiceError(
                    f"request {request.id!r} is not admitted: journal {self.path} cannot be written: {error.strerror}"
                ) from error
            self._open[request.id] = line

    def ended(self, request_id: str, end: Ended) -> None:
        """An end that cannot be written is written later; until then no request is admitted."""
        number = None if end.policy is None else end.policy.number
        with self._lock:
            self._unwritten.append(_ended(request_id, end.outcome, end.reason, number))
            try:
                self._flush()
            except OSError as error:
                LOG.error("journal %s: %d ends are not written: %s", self.path, len(self._unwritten), error)
            self._open.pop(request_id, None)
            if self._size > self._compact_at:
                try:
                    self._compact()  # what has ended, and its end, are left out together
                except OSError as error:
                    LOG.error("journal %s cannot be made smaller: %s", self.path, error)
                    self._compact_at *= 2

    # -- Replay ------------------------------------------------------------------------------------------------------

    def begin(self, key: str, digest: str) -> Stored | None:
        """As `Replay.begin`."""
        with self._lock:
            known = self._taken.get(key) or (self._answers[key][0] if key in self._answers else None)
            if known is not None and known != digest:
                raise KeyConflict(f"idempotency key {key!r} was used for another request; use a new key", False)
            if key in self._taken:
                raise KeyConflict(f"the request with idempotency key {key!r} is still under way; ask again later", True)
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key][1]
            self._taken[key] = digest
            return None

    def keep(self, key: str, answer: Stored) -> None:
        """As `Replay.keep`. Raises ServiceError where it cannot be written: then the client must not be told either."""
        with self._lock:
            digest = self._taken[key]
            line = _answered(key, digest, answer)
            try:
                self._write(line)
            except OSError as error:
                raise ServiceError(
                    f"the answer to idempotency key {key!r} cannot be written to journal {self.path}: {error.strerror}"
                ) from error
            del self._taken[key]
            self._remember(key, digest, answer, len(line))

    def release(self, key: str) -> None:
        """As `Replay.release`."""
        with self._lock:
            self._taken.pop(key, None)

    # -- the file ----------------------------------------------------------------------------------------------------

    def _write(self, line: str) -> None:
        """Append, whole or not at all."""
        data = line.encode() + b"\n"
        try:
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
            if self._fsync:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)  # half a line must not be glued to the next one
            raise
        self._size += len(data)

    def _flush(self) -> None:
        while self._unwritten:
            self._write(self._unwritten[0])
            self._unwritten.pop(0)

    def _remember(self, key: str, digest: str, answer: Stored, size: int) -> None:
        if key in self._answers:
            self._held -= self._answers.pop(key)[2]
        self._answers[key] = (digest, answer, size)
        self._held += size
        while len(self._answers) > self._most or self._held > self._most_bytes:
            self._held -= self._answers.popitem(last=False)[1][2]

    def _read(self, say: Callable[[str], None]) -> None:
        """Take in what is there."""
        data = self.path.read_bytes() if self.path.exists() else b""
        *lines, torn = data.split(b"\n")
        if torn:
            say(f"journal {self.path} ends in an unfinished line, which is dropped: its writer was killed")
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self._take_in(record, line.decode())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"journal {self.path}, line {number}: {error!r}; it is damaged. Move the file away to start anew; "
                    "what it holds of keys that clients may still use is lost then"
                ) from error

    def _take_in(self, record: dict[str, Any], line: str) -> None:
        match record["kind"]:
            case "admitted":
                if record["id"] in self._open:
                    raise ValueError(f"{record['id']!r} was admitted twice")
                self._open[record["id"]] = line
            case "ended":
                if self._open.pop(record["id"], None) is None:
                    raise ValueError(f"{record['id']!r} ended, and was not under way")
            case "answer":
                self._remember(record["key"], record["digest"], _stored(record), len(line))
            case kind:
                raise ValueError(f"a record of kind {kind!r}")

    def _compact(self, ends: Iterable[str] = ()) -> None:
        """Write the file anew: what is open (with the ends that are due) and the answers that are kept."""
        lines = [*self._open.values(), *ends]
        lines += [_answered(key, digest, answer) for key, (digest, answer, _) in self._answers.items()]
        write_atomic(self.path, "".join(f"{line}\n" for line in lines).encode())
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = COMPACT_BYTES + 2 * self._held
        self._unwritten = []


def _ended(request_id: str, outcome: str, reason: str, version: int | None) -> str:
    return json.dumps({"kind": "ended", "id": request_id, "outcome": outcome, "version": version, "reason": reason})


def _answered(key: str, digest: str, answer: Stored) -> str:
    body = base64.b64encode(answer.body).decode()
    head = {"status": answer.status, "media": answer.media, "headers": [list(h) for h in answer.headers]}
    return json.dumps({"kind": "answer", "key": key, "digest": digest, **head, "body": body})


def _stored(record: dict[str, Any]) -> Stored:
    headers = tuple((str(name), str(value)) for name, value in record["headers"])
    return Stored(int(record["status"]), str(record["media"]), headers, base64.b64decode(record["body"], validate=True))
