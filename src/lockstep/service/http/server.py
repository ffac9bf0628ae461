"""Listening, and an orderly end: uvicorn with deadlines of our own and a close that finishes what is in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.errors import ConfigError
from lockstep.service.http.app import make_app
from lockstep.service.http.guard import check_host
from lockstep.service.http.settings import Limits
from lockstep.service.http.surface import Surface
from lockstep.service.requests import Outcome

log = logging.getLogger(__name__)
Ends = Mapping[Outcome, Sequence[str]]
MOST_HEADERS = 32 << 10
LAST_WRITES_S = 5.0  # answers that are ready when the service has closed are sent in this time


def _protocol(limits: Limits) -> type[H11Protocol]:
    """HTTP/1.1 whose connections cannot be held open by sending slowly, or nothing."""

    class Protocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            self.app_state = {**self.app_state, "abort": transport.abort}
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._headers_came()
            elif self._late is None:
                self._expect_headers()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._headers_came()  # of the next request nothing came yet: keep-alive has its own limit

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)

        def _expect_headers(self) -> None:
            # From the first byte to the last: a byte now and then buys no time.
            self._late = self.loop.call_later(limits.header_s, self.transport.abort)

        def _headers_came(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Protocol


class _Uvicorn(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket to listen with. port 0: any that is free. Raises ConfigError."""
    if not 0 <= port <= 65535:  # the C library would take the remainder
        raise ConfigError(f"port {port}: expected 0 (any that is free) to 65535; choose another --port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}, port {port}: {e.strerror or e}; choose another --port") from e
    return listener


class HttpServer:
    """listener: from `bind`, closed when it has served. grace_s: what is in flight may finish in this time when the
    server is told to stop. version: of this package. Raises ConfigError for an address that others can reach without a
    token."""

    def __init__(self, surface: Surface, listener: socket.socket, grace_s: float, version: str):
        check_host(surface.host, surface.tokens)
        self._surface, self._grace_s, self._listener = surface, grace_s, listener
        limits = surface.limits
        self._server = _Uvicorn(
            uvicorn.Config(
                make_app(surface, version),
                http=_protocol(limits),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MOST_HEADERS,
                timeout_keep_alive=max(1, round(limits.keep_alive_s)),
                timeout_graceful_shutdown=1,
                backlog=limits.connections,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._forced: asyncio.Event | None = None
        self.forced = False

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve(self, on_ready: Callable[[], None] | None = None) -> Ends:
        """Until `stop`, SIGTERM or SIGINT (heeded in the main thread). Returns what `Controls.close` reports."""
        self._loop, self._stopping, self._forced = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        with self._signals():
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                while not self._server.started and not serving.done():
                    await asyncio.sleep(0.01)
                if on_ready is not None and self._server.started:
                    on_ready()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                report: Ends = await self._wind_down() if not serving.done() else {}
                self._server.should_exit = True
                await serving
            finally:
                stopping.cancel()
                self._listener.close()
        return report

    def stop(self) -> None:
        """Once: finish what is in flight. Again: at once. From any thread."""
        loop = self._loop
        assert loop is not None, "the server was not started"
        loop.call_soon_threadsafe(self._told_to_stop)

    def _told_to_stop(self) -> None:
        assert self._stopping is not None and self._forced is not None
        if self._stopping.is_set():
            self.forced = True
            self._forced.set()
        self._surface.closing = True
        self._stopping.set()

    async def _wind_down(self) -> Ends:
        """It still listens meanwhile, and answers that it is not ready."""
        assert self._forced is not None
        surface = self._surface
        surface.closing = True
        closing = surface.workers.start_slow(surface.controls.close, self._grace_s)
        forced = asyncio.ensure_future(self._forced.wait())
        waited: set[asyncio.Future[Any]] = {closing, forced}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not closing.done():
            await self._break_off()
            return {}
        with contextlib.suppress(TimeoutError):  # then they are broken off
            async with asyncio.timeout(LAST_WRITES_S):
                while surface.active and not self._forced.is_set():
                    await asyncio.sleep(0.02)
        return closing.result()

    async def _break_off(self) -> None:
        """Every connection; what was asked over them is cancelled, as far as the service answers."""
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while self._surface.active:
                    await asyncio.sleep(0.01)
                await self._surface.workers.settle()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        assert self._loop is not None
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            self._loop.add_signal_handler(number, self._told_to_stop)
        try:
            yield
        finally:
            for number in handled:
                self._loop.remove_signal_handler(number)


class ServerThread:
    """A server in a thread of this process: for tests, and for a program that serves beside its own work."""

    def __init__(self, server: HttpServer):
        self.server = server
        self.report: Ends = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._thread.is_alive():
            self.server.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.report = asyncio.run(self.server.serve(self._ready.set))
        finally:
            self._ready.set()
