"""One call over one connection: its body read within limits, its answer sent, its other side watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from lockstep.service.controls import Stored
from lockstep.service.http.errors import HttpError
from lockstep.service.http.settings import Limits
from lockstep.types import PolicyVersion

JSON = "application/json"
MOST_RECORDED = 4 << 20


class Gone(Exception):
    """The other side has left, or does not read what it asked for: there is nobody to answer."""


def policy_headers(version: PolicyVersion) -> dict[str, str]:
    return {"lockstep-policy-version": str(version.number), "lockstep-policy-digest": version.digest}


class Exchange:
    """id: of the call. key: its idempotency key, empty: none. status: what was answered, 0 before. finished: all of the
    answer is on its way."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits):
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.id = uuid4().hex
        self.key = ""
        self.status = 0
        self.finished = False
        self._on_answer: Callable[[Stored], None] | None = None
        self._recorded: list[bytes] | None = None
        self._room = MOST_RECORDED
        self._media = JSON
        self._kept_headers: tuple[tuple[str, str], ...] = ()

    @property
    def path_params(self) -> Mapping[str, str]:
        return self._scope.get("path_params", {})

    async def read_body(self) -> bytes:
        """Counted as it comes: a Content-Length is only what the other side says. Raises HttpError, Gone."""
        most, said = self._limits.body_bytes, self.headers.get("content-length", "")
        over = HttpError(
            413, "body_too_large", f"the body is over the limit of {most} bytes", headers={"connection": "close"}
        )
        if said.isascii() and said.isdigit() and (len(said) > 18 or int(said) > most):
            raise over
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Gone("while its body was read")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise over
                    more = message.get("more_body", False)
        except TimeoutError:
            raise HttpError(
                408, "body_timeout", f"the body did not come within {self._limits.body_s:g} seconds",
                headers={"connection": "close"},
            ) from None  # fmt: skip
        return bytes(body)

    async def left(self) -> None:
        """Returns when the other side has closed the connection, or half of it. Only once the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def record(self, on_answer: Callable[[Stored], None]) -> None:
        """Hand over the whole answer before its last part is sent, where it succeeded and is not too long to keep."""
        self._recorded, self._on_answer = [], on_answer

    def forget(self) -> None:
        """The answer will say that nothing came of it: it is not handed over."""
        self._recorded = None

    async def reply(self, stored: Stored, headers: Mapping[str, str] | None = None) -> None:
        # Handed over before anything is sent: where it cannot be kept, the error is still an answer of its own.
        self._hand_over(stored)
        await self.start(stored.status, stored.media, dict(stored.headers) | dict(headers or {}), len(stored.body))
        await self.end(stored.body)

    async def json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.reply(Stored(status, JSON, tuple((headers or {}).items()), to_json(value, inf_nan_mode="null")))

    async def error(self, error: HttpError) -> None:
        await self.json(error.body(), error.status, error.headers)

    async def start(self, status: int, media: str, headers: Mapping[str, str], length: int | None = None) -> None:
        """Begin an answer. length: None for a stream."""
        self.status = status
        own = {"content-type": media, "x-request-id": self.id, "cache-control": "no-store"}
        if length is not None:
            own["content-length"] = str(length)
        self._media, self._kept_headers = media, tuple(headers.items())
        raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in (own | dict(headers)).items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the answer; waits while the other side reads nothing. Raises Gone once that is too long."""
        if self._recorded is not None:
            self._room -= len(data)
            if self._room < 0:
                self._recorded = None
            else:
                self._recorded.append(data)
        if not more:
            self.finished = True
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def end(self, data: bytes = b"") -> None:
        if self._recorded is not None:
            body = b"".join([*self._recorded, data])
            self._hand_over(Stored(self.status, self._media, self._kept_headers, body))
        await self.write(data, more=False)

    def _hand_over(self, answer: Stored) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is not None and answer.status == 200 and len(answer.body) <= MOST_RECORDED:
            assert self._on_answer is not None
            self._on_answer(answer)

    def abort(self) -> None:
        """Break the connection off, what is still to be read with it: the answer cannot be taken for a whole one."""
        if (break_off := self._scope.get("state", {}).get("abort")) is not None:
            break_off()

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.stall_s):
                await self._send(message)
        except TimeoutError:
            self.abort()
            raise Gone(f"it read nothing for {self._limits.stall_s:g} seconds") from None
