"""One HTTP call's requests to the service, and what comes of them, in the event loop.

Events are made in the service's threads. They are carried over in bursts: the loop is woken once for all that came
since it last looked, whichever call they belong to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lockstep.service.requests import ClientEvent, Ended, OnEvent, RolloutRequest, Rollouts

T = TypeVar("T")
log = logging.getLogger(__name__)


class Bridge:
    """From the service's threads into one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queue: deque[tuple[Job, int, ClientEvent]] = deque()
        self._waking = False

    def listener(self, job: Job, number: int) -> OnEvent:
        """What is told the events of the job's request of that number."""

        def on_event(event: ClientEvent) -> None:
            self._queue.append((job, number, event))
            if self._waking:
                return
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: the server is gone, and with it everybody who waits
                log.debug("an event came after the end of the server")

        return on_event

    def _deliver(self) -> None:
        # In this order: an event that is queued after the last look finds the flag down and wakes the loop again.
        self._waking = False
        while self._queue:
            job, number, event = self._queue.popleft()
            job.receive(number, event)


class Job:
    """Some requests, admitted together or not at all."""

    def __init__(self, requests: Sequence[RolloutRequest]):
        self.requests = tuple(requests)
        self._pending: list[tuple[int, ClientEvent]] = []
        self._some = asyncio.Event()
        self._open: set[int] = set()
        self._admission: asyncio.Future[None] | None = None

    def receive(self, number: int, event: ClientEvent) -> None:
        if isinstance(event, Ended):
            self._open.discard(number)
        self._pending.append((number, event))
        self._some.set()

    async def admit(self, workers: Workers) -> None:
        """Submit every request. Raises as `Rollouts.submit`, with those admitted before cancelled."""
        listeners = [workers.bridge.listener(self, i) for i in range(len(self.requests))]
        self._open = set(range(len(self.requests)))

        def submit() -> None:
            admitted: list[RolloutRequest] = []
            try:
                for request, listener in zip(self.requests, listeners, strict=True):
                    workers.service.submit(request, listener)
                    admitted.append(request)
            except BaseException:
                for request in admitted:
                    workers.service.cancel(request.id, "another prompt of its call was refused")
                raise

        self._admission = workers.start(submit)
        try:
            # Shielded: what was submitted has to be known, to be cancelled.
            await asyncio.shield(self._admission)
        except Exception:
            self._open.clear()
            raise

    async def take(self, patience_s: float | None = None) -> list[tuple[int, ClientEvent]]:
        """(request, event) of all that came since the last time, at least one; none after patience_s."""
        if not self._pending:
            self._some.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._some.wait()
            except TimeoutError:
                return []
        taken, self._pending = self._pending, []
        return taken

    async def close(self, workers: Workers, reason: str) -> None:
        """Cancel what has not ended."""
        if self._admission is not None:
            await asyncio.wait([self._admission])
            if self._admission.exception() is not None:
                return
        for number in sorted(self._open):
            await workers.start(workers.service.cancel, self.requests[number].id, reason)


class Workers:
    """The service as the event loop uses it: its calls run in threads, for they may wait for locks, or compute.

    quick: preparing and submitting; slow: scoring and what changes versions, so that these never hold up those.
    """

    def __init__(self, service: Rollouts, loop: asyncio.AbstractEventLoop):
        self.service, self.bridge, self._loop = service, Bridge(loop), loop
        self._quick = ThreadPoolExecutor(4, "http-quick")
        self._slow = ThreadPoolExecutor(8, "http-slow")
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, f: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._quick, f, *args)

    def start_slow(self, f: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._slow, f, *args)

    def aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this whatever becomes of the call that wants it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cleaning up after a call failed", exc_info=error)

    async def settle(self) -> None:
        """Wait for what was begun with `aside`."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def close(self) -> None:
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
