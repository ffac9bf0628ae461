"""Who may ask, and what a body may hold.

On loopback without tokens every program of this machine may ask. A web page in its browser may not: it cannot send JSON
to another site without an Origin, and a name of its own that it lets point here (DNS rebinding) is not one of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from lockstep.errors import ConfigError
from lockstep.service.http.errors import HttpError, bad, invalid
from lockstep.service.http.exchange import JSON
from lockstep.service.http.settings import Access, AccessTokens
from lockstep.sync.channel import is_loopback

LOCAL = ("localhost", "127.0.0.1", "::1")
MOST_KEY = 255
BodyT = TypeVar("BodyT", bound=BaseModel)


def check_host(host: str, tokens: AccessTokens) -> None:
    """ConfigError for an address that others can reach, where nothing says who may."""
    if not is_loopback(host) and not tokens:
        raise ConfigError(
            f"--host {host} can be reached from other machines, so callers must show a token; pass --token-file, or "
            f"serve on 127.0.0.1"
        )


class Guard:
    """host: what the server listens on."""

    def __init__(self, host: str, tokens: AccessTokens):
        self._tokens = tokens
        self._hosts = {*LOCAL, host} if is_loopback(host) else None

    def check(self, headers: Mapping[str, str], access: Access) -> None:
        """HttpError unless a call with these headers may do what needs this access."""
        host = _hostname(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise HttpError(403, "wrong_host", f"this server is {' or '.join(sorted(self._hosts))}, not {host!r:.100}")
        origin = headers.get("origin")
        if origin is not None and urlsplit(f"//{headers.get('host', '')}").netloc != _netloc(origin):
            raise HttpError(403, "cross_origin", f"pages of {origin!r:.100} may not ask this server")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HttpError(403, "cross_origin", "pages of other sites may not ask this server")
        if access != "open" and self._tokens:
            self._check_token(headers.get("authorization", ""), access)

    def _check_token(self, authorization: str, access: Access) -> None:
        kind, _, token = authorization.partition(" ")
        challenge = {"www-authenticate": "Bearer"}
        if kind.lower() != "bearer" or not token.strip():
            raise HttpError(401, "missing_token", "expected a header `Authorization: Bearer TOKEN`", headers=challenge)
        opened = self._tokens.opens(token.strip())
        if opened == "open":
            raise HttpError(401, "invalid_token", "the token is not one of this server's", headers=challenge)
        if access == "control" and opened != "control":
            raise HttpError(
                403, "control_token_needed", "the inference token does not open this; use the control token"
            )


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def check_media(headers: Mapping[str, str]) -> None:
    """Only JSON: what a form on a web page can send is none."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != JSON:
        raise HttpError(415, "unsupported_media_type", f"expected content-type {JSON}, got {media[:100]!r}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "unsupported_media_type", "expected a body that is not compressed")


def idempotency_key(headers: Mapping[str, str]) -> str:
    key = headers.get("idempotency-key")
    if key is None:
        return ""
    if not 1 <= len(key) <= MOST_KEY or not key.isascii() or not key.isprintable():
        raise bad(f"Idempotency-Key: expected 1 to {MOST_KEY} printable ASCII characters", "Idempotency-Key")
    return key


def parse(body: bytes, model: type[BodyT]) -> BodyT:
    """The body as a request. Raises HttpError for what is not JSON (numbers that are none, half a surrogate pair,
    nesting without end) and for fields that are unknown or wrong."""
    try:
        value: Any = from_json(body or b"{}", allow_inf_nan=False, cache_strings="keys")
    except ValueError as e:
        raise bad(f"the body is not valid JSON: {e}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad(f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as e:
        raise invalid(
            e.errors(include_url=False, include_context=False, include_input=False), list(model.model_fields)
        ) from None
