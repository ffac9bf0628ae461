"""What judges said, kept on disk: a question that was answered once costs nothing again, in this run or after a resume.

One SQLite file; a row is the digest of the question (judge model and version, system, rubric as filled, limits) and the
answer as text. Verdicts are read out of the text anew each time, so another `pattern` or scale asks nobody.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path

from lockstep.envs.asking import Answer
from lockstep.errors import CheckpointError


def digest(*parts: object) -> str:
    """Of a question: SHA-256 over its parts."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


class Verdicts:
    """Answers by digest. path: None keeps them in memory. Used by one thread at a time."""

    def __init__(self, path: Path | None) -> None:
        """Raises: CheckpointError for a file that is not one of these."""
        self._path = path
        self._file = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        try:
            # A power cut may take the last answers, never the file: they would be asked for again.
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (digest TEXT PRIMARY KEY, judge TEXT, text TEXT, cut INTEGER)"
            )
        except sqlite3.DatabaseError as error:
            self._file.close()
            raise CheckpointError(
                f"{path} does not hold the verdicts of a run ({error}); take it away, and the judges are asked anew"
            ) from error

    def get(self, key: str) -> Answer | None:
        row = self._file.execute("SELECT text, cut FROM answers WHERE digest = ?", (key,)).fetchone()
        return None if row is None else Answer(row[0], bool(row[1]))

    def put(self, key: str, judge: str, answer: Answer) -> None:
        """On disk when this returns, as far as this process may fail. A full disk raises, as everywhere."""
        self._file.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (key, judge, answer.text, int(answer.cut))
        )

    def close(self) -> None:
        """A second call does nothing."""
        self._file.close()
