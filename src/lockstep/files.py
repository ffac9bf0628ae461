"""Writing files so that a reader never meets half of one, whatever kills the writer.

A new file appears under its final name in one rename, after its bytes have reached the disk; the rename itself is made
durable by an fsync of the folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable (renames and creations done before this call)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: Path) -> None:
    """Make every file and every name under a folder durable; the folder's own name is its parent's business."""
    for folder, _, names in os.walk(path):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_dir(Path(folder))


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`, replacing what is there: a reader sees the old file or the new one, complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_dir(path.parent)
