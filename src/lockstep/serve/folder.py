"""A server's folder for its replicas' sockets: its own while it lives, removed by the next server if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "lockstep-serve-"
LOCK = "lock"


class SocketFolder:
    """path: a folder that only this user can enter. A lock on a file in it, which ends with the process however it
    ends, says that it is in use."""

    def __init__(self) -> None:
        _remove_left_behind(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has the name that others look for.
        new = self.path / f"{LOCK}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)

    def close(self) -> None:
        """Remove it; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_left_behind(root: Path) -> None:
    """Folders of servers that were killed. One without a lock is just being made."""
    for path in root.glob(f"{PREFIX}*"):
        # Another user's, or gone meanwhile: it is not ours to remove.
        with contextlib.suppress(OSError):
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
