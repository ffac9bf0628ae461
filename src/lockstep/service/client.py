"""The rollout service of another process, over HTTP: `Rollouts` as in process, and the control verbs.

A request whose connection is lost is asked again, with the same idempotency key: the server answers what it answered,
or samples the same again, for the seeds are the same. Tokens that were passed on are not passed on twice.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import uuid4

import httpx
from pydantic_core import from_json, to_json

from lockstep.errors import ConfigError, DataError, LockstepError, ServiceError
from lockstep.service import record
from lockstep.service.controls import Source
from lockstep.service.http import wire
from lockstep.service.http.errors import lockstep_error
from lockstep.service.requests import (
    ClientEvent,
    Ended,
    OnEvent,
    RolloutRequest,
    ServiceStatus,
    Started,
    Tokens,
    UpdatePolicy,
)
from lockstep.types import PolicyVersion

T = TypeVar("T")
log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
AGAIN = (429, 502, 503, 504)


class _Lost(Exception):
    """The connection, or the server behind it, went away: worth another attempt."""


class _Call:
    """One request under way. server_id: its name there. delivered: tokens passed on, by sample, of `version`."""

    def __init__(self, request: RolloutRequest, on_event: OnEvent):
        self.request, self.on_event = request, on_event
        self.key = request.key or uuid4().hex
        self.server_id = ""
        self.cancelled: str | None = None
        self._version: PolicyVersion | None = None
        self._delivered: dict[int, int] = {}
        self._at: dict[int, int] = {}

    def body(self) -> bytes:
        r = self.request
        fields = wire.sampling(r.params) | {
            "prompt_ids": list(r.prompt.ids),
            "seeds": list(r.seeds),
            "id": r.id,
            "group": r.pin,
            "min_version": r.min_version,
            "stream": True,
        }
        if r.queue_s != float("inf"):
            fields["queue_s"] = r.queue_s
        return to_json(fields)

    def opened(self, server_id: str) -> None:
        self.server_id, self._at = server_id, {}

    def receive(self, event: ClientEvent) -> bool:
        """Pass an event on, without what was passed on before. Returns whether it was the last."""
        if isinstance(event, Started):
            if event.version != self._version:
                self._version, self._delivered, self._at = event.version, {}, {}
            self.on_event(event)
        elif isinstance(event, Tokens):
            start, known = self._at.get(event.index, 0), self._delivered.get(event.index, 0)
            self._at[event.index] = start + len(event.ids)
            skip = max(0, known - start)
            if skip < len(event.ids):
                self._delivered[event.index] = self._at[event.index]
                if self.request.stream:
                    self.on_event(
                        Tokens(event.index, event.ids[skip:], event.logprobs[skip:], event.top[skip:])
                    )  # fmt: skip
        else:
            self.on_event(event)
            return True
        return False


class RemoteRollouts:
    """url: of `lockstep serve`. token: for inference; control_token: for versions and pauses (default: `token`).
    retry_s: a lost connection is tried again so long. silence_s: a server that says nothing for so long is lost.
    verb_s: scoring, staging and committing may take. say: told of every lost connection.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        control_token: str = "",
        retry_s: float = 60.0,
        silence_s: float = 60.0,
        verb_s: float = 3600.0,
        say: Callable[[str], None] = log.warning,
    ):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout service: expected a URL such as http://127.0.0.1:8000, got {url!r}")
        self.url = url.rstrip("/")
        self._token, self._control_token = token, control_token or token
        self.retry_s, self._silence_s, self._verb_s, self._say = retry_s, silence_s, verb_s, say
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts-client", daemon=True)
        self._thread.start()
        self._http = self._run(self._make_client())

    # -- Rollouts ------------------------------------------------------------------------------------------------------

    def submit(self, request: RolloutRequest, on_event: OnEvent) -> None:
        """As `Rollouts.submit`; ServiceError too where the server cannot be reached."""
        self._run(self._submit(_Call(request, on_event)))

    def cancel(self, request_id: str, reason: str) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(request_id, reason), self._loop)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[tuple[PolicyVersion, list[float]]]:
        answer = self._ask(
            "/v1/rl/score", {"sequences": [list(s) for s in sequences], "temperature": temperature}, True
        )
        return [(PolicyVersion(**r["policy"]), record.floats(r["logprobs"]).tolist()) for r in answer["results"]]

    def status(self) -> ServiceStatus:
        return wire.STATUS.validate_python(self._ask("/v1/rl/status", None, True))

    # -- controls ------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        self._ask("/v1/rl/pause", {}, True)

    def resume(self) -> None:
        self._ask("/v1/rl/resume", {}, True)

    def stage(self, source: Source, number: int) -> dict[str, Any]:
        return self._ask("/v1/rl/versions/stage", {"source": source.to_json(), "number": number}, False)

    def commit(self, number: int, policy: UpdatePolicy | None = None) -> dict[str, Any]:
        return self._ask("/v1/rl/versions/commit", {"number": number, "policy": policy}, False)

    def abort_version(self, number: int) -> dict[str, Any]:
        return self._ask("/v1/rl/versions/abort", {"number": number}, False)

    def close(self) -> None:
        """Leave: what is under way ends as aborted. The server goes on."""
        if self._closed:
            return
        self._closed = True
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> RemoteRollouts:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert threading.current_thread() is not self._thread, "an event handler must not wait for the service"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _make_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(self._silence_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )

    def _headers(self, token: str, **more: str) -> dict[str, str]:
        own = {"content-type": "application/json", **more}
        return own | {"authorization": f"Bearer {token}"} if token else own

    async def _submit(self, call: _Call) -> None:
        request_id = call.request.id
        if self._closed:
            raise ServiceError("the client was closed")
        if request_id in self._calls:
            raise DataError(f"request {request_id!r} is under way already; give each prompt its own id")
        self._calls[request_id] = call
        admitted: asyncio.Future[None] = self._loop.create_future()
        task = self._loop.create_task(self._carry(call, admitted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await admitted

    async def _carry(self, call: _Call, admitted: asyncio.Future[None]) -> None:
        """One request from its admission to its end, over as many connections as it takes."""
        try:
            await self._persist(call, admitted)
        except asyncio.CancelledError:
            self._end(call, admitted, ServiceError("the client was closed"), "aborted")
        except LockstepError as error:
            self._end(call, admitted, error, "failed")
        except Exception as error:
            log.error("request %s: the client failed", call.request.id, exc_info=error)
            self._end(call, admitted, ServiceError(f"the client failed: {error!r}"), "failed")
        finally:
            self._calls.pop(call.request.id, None)

    def _end(self, call: _Call, admitted: asyncio.Future[None], error: LockstepError, outcome: Any) -> None:
        if admitted.done():
            self._calls.pop(call.request.id, None)
            call.on_event(Ended(outcome, (), call.cancelled or str(error)))
        else:
            admitted.set_exception(error)

    async def _persist(self, call: _Call, admitted: asyncio.Future[None]) -> None:
        pause, gives_up_at = FIRST_PAUSE_S, None
        while True:
            before = call.server_id
            try:
                async with self._opened(call, first=not admitted.done() and gives_up_at is None) as lines:
                    if not admitted.done():
                        admitted.set_result(None)
                    pause, gives_up_at = FIRST_PAUSE_S, None
                    if await self._listen(call, lines):
                        return
                    raise _Lost("the stream ended before the request did")
            except (_Lost, httpx.TransportError) as lost:
                why = f"{type(lost).__name__}: {lost}" if str(lost) else type(lost).__name__
                if call.cancelled is not None and call.server_id == before:
                    raise ServiceError(call.cancelled) from lost
                now = self._loop.time()
                gives_up_at = now + self.retry_s if gives_up_at is None else gives_up_at
                if now + pause > gives_up_at:
                    raise ServiceError(f"{self.url} cannot be reached since {self.retry_s:g} s: {why}") from lost
                self._say(f"request {call.request.id}: {self.url} was lost ({why}); trying again in {pause:.1f} s")
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    @asynccontextmanager
    async def _opened(self, call: _Call, first: bool) -> AsyncIterator[AsyncIterator[bytes]]:
        """The request made, its admission read; gives the lines that follow. first: nothing was lost yet, so that a
        server that is full or closing is the caller's business."""
        headers = self._headers(self._token, **{"idempotency-key": call.key})
        async with self._http.stream("POST", "/v1/rl/generate", content=call.body(), headers=headers) as response:
            if response.status_code != 200:
                body = _json(await response.aread())
                code = (body.get("error") or {}).get("code") if isinstance(body, dict) else None
                if not first and (response.status_code in AGAIN or code == "key_under_way"):
                    raise _Lost(f"it answered {response.status_code} {code}")
                raise lockstep_error(response.status_code, body)
            lines = _lines(response)
            line = await anext(lines, None)
            if line is None:
                raise _Lost("it said nothing")
            call.opened(from_json(line)["request_id"])
            if call.cancelled is not None:  # in the time without a connection
                await self._cancel(call.request.id, call.cancelled)
            yield lines

    async def _listen(self, call: _Call, lines: AsyncIterator[bytes]) -> bool:
        async for line in lines:
            value = from_json(line)
            if value["event"] == "waiting":
                continue
            event = wire.client_event(value, call.request)
            if isinstance(event, Ended):  # before it is told: the same id may be submitted from there
                self._calls.pop(call.request.id, None)
            if call.receive(event):
                return True
        return False

    async def _cancel(self, request_id: str, reason: str) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return
        call.cancelled = reason
        if not call.server_id:
            return
        body = to_json({"request_id": call.server_id, "reason": reason[:256]})
        try:
            await self._http.post("/v1/rl/cancel", content=body, headers=self._headers(self._token))
        except httpx.TransportError as error:
            self._say(
                f"request {request_id}: cancelling it at {self.url} failed ({error!r}); leaving its stream ends it"
            )

    def _ask(self, path: str, body: dict[str, Any] | None, repeatable: bool) -> Any:
        return self._run(self._asked(path, body, repeatable))

    async def _asked(self, path: str, body: dict[str, Any] | None, repeatable: bool) -> Any:
        """The answer of a verb. repeatable: doing it twice is doing it once, so that it is tried again."""
        control = path.startswith(("/v1/rl/versions", "/v1/rl/pause", "/v1/rl/resume"))
        headers = self._headers(self._control_token if control else self._token)
        pause, gives_up_at = FIRST_PAUSE_S, self._loop.time() + self.retry_s
        while True:
            try:
                timeout = httpx.Timeout(self._verb_s, connect=10.0)
                method = "GET" if body is None else "POST"
                content = None if body is None else to_json(body)
                response = await self._http.request(method, path, content=content, headers=headers, timeout=timeout)
                break
            except httpx.TransportError as lost:
                if not repeatable:
                    raise ServiceError(
                        f"{self.url}{path}: the connection was lost ({lost!r}); whether it was done, `status` says"
                    ) from lost
                if self._loop.time() + pause > gives_up_at:
                    raise ServiceError(f"{self.url} cannot be reached since {self.retry_s:g} s: {lost!r}") from lost
                self._say(f"{path}: {self.url} was lost ({lost!r}); trying again in {pause:.1f} s")
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        answer = _json(response.content)
        if response.status_code != 200:
            raise lockstep_error(response.status_code, answer)
        return answer

    async def _close(self) -> None:
        for task in (tasks := set(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._http.aclose()


def _json(content: bytes) -> Any:
    try:
        return from_json(content)
    except ValueError:
        return content.decode("utf-8", "replace")


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """By line feeds only: texts hold other characters at which Python, too, would end a line."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
