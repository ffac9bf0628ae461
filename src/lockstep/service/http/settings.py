"""What a server is set up with: its limits, its tokens, what it serves."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.models.tokenizer import Tokenizer

Access = Literal["open", "inference", "control"]
MIN_TOKEN = 16
KINDS = ("inference", "control", "sync")


@dataclass(frozen=True)
class Limits:
    """What one caller may ask, and for how long. Times are seconds.

    body_bytes: of a request. prompt_tokens: of one prompt. prompts: per call; samples: prompts x n per call. stops:
    stop texts, stop_chars: of one. bias: entries of logit_bias; ids: of allowed_ids or forbidden_ids. concurrent: calls
    that sample or score at a time. connections: open at a time. queue_s: a request of the OpenAI verbs may wait for a
    replica (one of the RL verbs says so itself). header_s: from opening to the end of the headers. body_s: from there
    to the end of the body. stall_s: a reader may leave what was sent to it unread. keep_alive_s: an idle connection
    stays. beat_s: a stream says that it lives where it has nothing else to say.
    """

    body_bytes: int = 8 << 20
    prompt_tokens: int = 1 << 20
    prompts: int = 256
    samples: int = 512
    stops: int = 16
    stop_chars: int = 256
    bias: int = 1024
    ids: int = 1 << 18
    concurrent: int = 1024
    connections: int = 2048
    queue_s: float = 120.0
    header_s: float = 10.0
    body_s: float = 30.0
    stall_s: float = 30.0
    keep_alive_s: float = 15.0
    beat_s: float = 10.0


@dataclass(frozen=True)
class Served:
    """The model behind the service. max_positions: prompt and completion tokens of one sequence at most. weights_dir:
    the only folder that versions may be staged from; None: none may be."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_positions: int
    created: int = field(default_factory=lambda: int(time.time()))
    weights_dir: Path | None = None


@dataclass(frozen=True)
class AccessTokens:
    """Secrets by what they open; no tokens: everything is open (on loopback only). Kept as digests. sync: of trainers
    that bring weights by their own sync, which proves it by keyed sums, so as it is; empty: nobody may."""

    inference: tuple[bytes, ...] = ()
    control: tuple[bytes, ...] = ()
    sync: str = field(default="", repr=False)

    @classmethod
    def of(cls, inference: list[str], control: list[str], sync: list[str] | None = None) -> AccessTokens:
        """Raises ConfigError for tokens that are short, doubled, or cannot stand in a header."""
        sync = sync or []
        kinds = zip(KINDS, (inference, control, sync), strict=True)
        for kind, token in [(kind, token) for kind, given in kinds for token in given]:
            if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
                raise ConfigError(
                    f"the {kind} token must be at least {MIN_TOKEN} printable ASCII characters without spaces, found "
                    f"one of {len(token)}; make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
                )
        if len({*inference, *control, *sync}) < len([*inference, *control, *sync]):
            raise ConfigError("two access tokens are the same; each must open its own only")
        if len(sync) > 1:
            raise ConfigError(f"expected one sync token, found {len(sync)}")
        return cls(tuple(map(_digest, inference)), tuple(map(_digest, control)), *sync)

    def __bool__(self) -> bool:
        return bool(self.inference or self.control)

    def opens(self, token: str) -> Access:
        """What a caller with this token may do: control includes inference. Takes the same time for any token."""
        given = _digest(token)
        control = [hmac.compare_digest(given, known) for known in self.control]
        inference = [hmac.compare_digest(given, known) for known in self.inference]
        return "control" if any(control) else "inference" if any(inference) else "open"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def read_tokens(path: Path) -> AccessTokens:
    """A server's tokens. Raises ConfigError as `read_secrets`, and for tokens that are no good."""
    table = read_secrets(path)
    tokens = AccessTokens.of(*(table.get(kind, []) for kind in KINDS))
    if not tokens:
        raise ConfigError(f"token file {path} holds no token; expected inference and control")
    return tokens


def read_secrets(path: Path) -> dict[str, list[str]]:
    """Tokens by kind, from a file only its owner can read: JSON or TOML with `inference`, `control` (a text or a list)
    and `sync` (a text), or lines such as `inference TOKEN`. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(1 << 20).decode()
    except OSError as e:
        raise ConfigError(f"token file {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"token file {path} is not text") from e
    if not stat.S_ISREG(mode):
        raise ConfigError(f"token file {path} is not a regular file")
    if mode & (stat.S_IRWXO | stat.S_IRWXG):
        raise ConfigError(f"token file {path} can be used by others (mode {mode & 0o777:o}); run: chmod 600 {path}")
    table = _parse(path, content)
    if unknown := sorted(set(table) - set(KINDS)):
        raise ConfigError(f"token file {path}: unknown {unknown[0]!r}; expected {', '.join(KINDS)}")
    return table


def _parse(path: Path, content: str) -> dict[str, list[str]]:
    """The messages quote nothing of the file: it holds secrets."""
    table: object
    try:
        if path.suffix == ".json":
            table = json.loads(content)
        elif path.suffix == ".toml":
            table = tomllib.loads(content)
        else:
            found: dict[str, list[str]] = {}
            for number, line in enumerate(content.splitlines(), 1):
                words = line.split()
                if not words or words[0].startswith("#"):
                    continue
                if len(words) != 2 or words[0] not in KINDS:
                    raise ConfigError(
                        f"token file {path}, line {number}: expected one of {', '.join(KINDS)}, and a token"
                    )
                found.setdefault(words[0], []).append(words[1])
            return found
    except (ValueError, RecursionError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"token file {path} is not valid {path.suffix[1:].upper()}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"token file {path}: expected a table with inference and control")
    lists = {k: [v] if isinstance(v, str) else v for k, v in table.items()}
    if not all(isinstance(v, list) and all(isinstance(t, str) for t in v) for v in lists.values()):
        raise ConfigError(f"token file {path}: a token must be a text, or a list of texts")
    return lists
