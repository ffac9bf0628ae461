"""The application: every verb behind the same checks, every failure as an error in OpenAI's form."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lockstep.errors import LockstepError
from lockstep.service.controls import KeyConflict
from lockstep.service.http.errors import HttpError, http_error
from lockstep.service.http.exchange import JSON, Exchange, Gone
from lockstep.service.http.guard import check_media, idempotency_key, parse
from lockstep.service.http.openapi import document
from lockstep.service.http.surface import Surface
from lockstep.service.http.verbs import VERBS, Verb

log = logging.getLogger(__name__)
CLIENT_GONE = 499  # for the figures only; nobody is there to be told
LONG_BODY = 64 << 10  # bytes above which reading it as JSON is not done in the event loop


def make_app(surface: Surface, version: str) -> Starlette:
    """The ASGI application. version: of this package, for the OpenAPI document."""
    described = document(version, bool(surface.tokens))

    async def openapi(surface: Surface, body: None, exchange: Exchange) -> None:
        await exchange.json(described)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        surface.start()
        yield
        await surface.stop()

    own = Verb("GET", "/openapi.json", openapi, "This document", "inference", None)
    app = Starlette(
        routes=[Route(_route(v.path), Endpoint(v, surface), methods=[v.method]) for v in (*VERBS, own)],
        exception_handlers={404: _not_found, 405: _wrong_method},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _route(path: str) -> str:
    return path.replace("{id}", "{id:path}")  # names of models have slashes


async def _not_found(request: Request, error: Exception) -> Response:
    return _json(HttpError(404, "unknown_path", f"there is nothing at {request.url.path!r:.200}; see /openapi.json"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    allowed = headers.get("Allow", headers.get("allow", ""))
    message = f"{request.method:.20} is not a method of {request.url.path!r:.200}; it has {allowed}"
    return _json(HttpError(405, "wrong_method", message, headers=headers))


def _json(error: HttpError) -> Response:
    return Response(to_json(error.body()), error.status, error.headers, JSON)


class Endpoint:
    """One verb as an ASGI application."""

    def __init__(self, verb: Verb, surface: Surface):
        self._verb, self._surface = verb, surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        surface = self._surface
        exchange = Exchange(scope, receive, send, surface.limits)
        begun = time.perf_counter()
        try:
            await self._answer(exchange)
        except Gone as gone:
            log.info("call %s: its client is gone: %s", exchange.id, gone)
            exchange.status = exchange.status or CLIENT_GONE
            surface.metrics.gone()
        except HttpError as error:
            await self._fail(exchange, error)
        except LockstepError as error:
            await self._fail(exchange, http_error(error))
        except Exception as error:
            log.error("call %s to %s failed", exchange.id, self._verb.path, exc_info=error)
            message = f"the server failed on this call; its log has the reason under {exchange.id}"
            await self._fail(exchange, HttpError(500, "internal_error", message))
        finally:
            surface.metrics.called(self._verb.path, exchange.status, time.perf_counter() - begun)

    async def _fail(self, exchange: Exchange, error: HttpError) -> None:
        """Answer with an error; where an answer was begun already, break it off."""
        if exchange.status:
            exchange.abort()
            return
        try:
            await exchange.error(error)
        except Gone:
            self._surface.metrics.gone()

    async def _answer(self, exchange: Exchange) -> None:
        verb, surface = self._verb, self._surface
        surface.guard.check(exchange.headers, verb.access)
        if not verb.works:
            await self._handle(exchange)
            return
        if surface.closing:
            raise HttpError(503, "closing", "the server is closing; ask another one", headers={"connection": "close"})
        if surface.active >= surface.limits.concurrent:
            raise HttpError(429, "too_many_calls", f"{surface.active} calls are under way, as many as are allowed")
        surface.active += 1
        surface.metrics.active(surface.active)
        try:
            await self._handle(exchange)
        finally:
            surface.active -= 1
            surface.metrics.active(surface.active)

    async def _handle(self, exchange: Exchange) -> None:
        verb = self._verb
        if verb.body is None:
            await self._watched(None, exchange)
            return
        check_media(exchange.headers)
        if verb.keyed:
            exchange.key = idempotency_key(exchange.headers)
        content = await exchange.read_body()
        if len(content) > LONG_BODY:
            body: Any = await self._surface.workers.start(parse, content, verb.body)
        else:
            body = parse(content, verb.body)
        if exchange.key:
            await self._once(content, body, exchange)
        else:
            await self._watched(body, exchange)

    async def _once(self, content: bytes, body: Any, exchange: Exchange) -> None:
        """With an idempotency key: answered before, or answered now and kept."""
        replay, key = self._surface.replay, exchange.key
        digest = hashlib.sha256(self._verb.path.encode() + b"\0" + content).hexdigest()
        try:
            stored = replay.begin(key, digest)
        except KeyConflict as conflict:
            headers = {"retry-after": "1"} if conflict.under_way else {}
            code = "key_under_way" if conflict.under_way else "key_reused"
            raise HttpError(409, code, str(conflict), "Idempotency-Key", headers) from None
        if stored is not None:
            await exchange.reply(stored, {"idempotent-replayed": "true"})
            return
        # Kept before the client has all of it: a server that is killed in between has nothing to take back.
        exchange.record(partial(replay.keep, key))
        try:
            await self._watched(body, exchange)
        finally:
            replay.release(key)

    async def _watched(self, body: Any, exchange: Exchange) -> None:
        """Carry the verb out; stop at once when the other side leaves."""
        work = asyncio.ensure_future(self._verb.handle(self._surface, body, exchange))
        watch = asyncio.ensure_future(exchange.left())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not exchange.finished:
                work.cancel()
                await asyncio.wait({work})
            if work.cancelled():
                raise Gone("it left")
            await work
        finally:
            watch.cancel()
            work.cancel()
