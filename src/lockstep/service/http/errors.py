"""What went wrong, as an HTTP status and a body, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from lockstep.errors import (
    CapacityError,
    ConfigError,
    DataError,
    FingerprintError,
    LockstepError,
    ModelError,
    NumericsError,
    QueueFullError,
    ServiceError,
    SyncError,
    TokenizerError,
)
from lockstep.text import did_you_mean

RETRY_AFTER = {"retry-after": "1"}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

# Each class of ours: its status and its code, by which the client raises the same class again.
MEANINGS: dict[type[LockstepError], tuple[int, str]] = {
    ConfigError: (400, "config_error"),
    ModelError: (400, "model_error"),
    TokenizerError: (400, "tokenizer_error"),
    CapacityError: (400, "context_length_exceeded"),
    DataError: (409, "data_error"),
    SyncError: (409, "sync_error"),
    FingerprintError: (409, "fingerprint_error"),
    QueueFullError: (429, "queue_full"),
    ServiceError: (503, "service_error"),
    NumericsError: (500, "numerics_error"),
    LockstepError: (500, "lockstep_error"),
}
CLASSES = {code: kind for kind, (_, code) in MEANINGS.items()}


class HttpError(Exception):
    """An answer that is an error. code: for programs; param: the field that is wrong."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers = RETRY_AFTER | self.headers

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message, "type": TYPES[self.status], "param": self.param, "code": self.code,
            }
        }  # fmt: skip


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> HttpError:
    return HttpError(400, code, message, param)


def http_error(error: LockstepError) -> HttpError:
    """The answer for an error of ours, by its nearest class in `MEANINGS`."""
    status, code = next(MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS)
    return HttpError(status, code, str(error))


def lockstep_error(status: int, body: Any) -> LockstepError:
    """The error that an answer stands for; ServiceError where it is none of ours (a proxy's, another server's)."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return ServiceError(f"the server answered {status}: {str(body)[:300]}")
    code, message = str(error.get("code")), str(error.get("message"))
    if code in CLASSES:
        return CLASSES[code](message)
    kind = {400: ConfigError, 429: QueueFullError}.get(status, ServiceError)
    return kind(f"the server answered {status} {code}: {message}")


def invalid(problems: Sequence[ErrorDetails], known: Sequence[str]) -> HttpError:
    """What pydantic found wrong in a body. known: the fields there are, to name the nearest to an unknown one."""
    said, first = [], None
    for problem in problems[:5]:
        # The branches of a union are ours, not the caller's: only names of fields and indices are his.
        where = _path(problem["loc"])
        first = first or where
        if problem["type"] == "extra_forbidden":
            said.append(f"unknown field {where[:100]!r}{did_you_mean(where[:100], known, show=repr)}")
        elif problem["type"] == "missing":
            said.append(f"{where}: it is required")
        else:
            said.append(f"{where or 'the body'}: {problem['msg']}")
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return bad("; ".join(dict.fromkeys(said)) + more, first[:100] if first else None, "invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    parts = [str(p) for p in loc if isinstance(p, int) or not any(c in p for c in "[](){}")]
    return ".".join(parts)
