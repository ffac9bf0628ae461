"""A worker in a process of its own, as the front sees it: commands out, events in, a sign of life every second."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import CapacityError, LockstepError, ServiceError, SyncError
from lockstep.rollout.checks import check_request
from lockstep.serve.spec import BIRTH, READY, Birth, Ready, ServeSpec
from lockstep.service.codec import event_from_json, request_to_json, status_from_json
from lockstep.service.requests import EngineStatus, Lost, RolloutRequest, WorkerEvent
from lockstep.sync.channel import Channel, Listener, new_token
from lockstep.sync.choice import Way
from lockstep.sync.transport import Deadline

BOOT_S = 300.0  # to load the model; the front has fetched it
SILENT_S = 60.0  # without a sign of life, after which a replica counts as lost
STOP_S = 20.0  # to stop of its own accord
NO_STATUS = EngineStatus((), 0, 0, (0, 0, 0, 0), 0, 0.0)


class ProcessWorker:
    """Implements `requests.Worker`. Made with `spawn`; use `ready` before it joins a service. sync_address, sync_token:
    of its weight sync (a unix socket). pid: of the process."""

    def __init__(
        self,
        name: str,
        spec: ServeSpec,
        folder: Path,
        *,
        way: Way = Way(),  # noqa: B008  (frozen)
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        """Start the process. folder: for its sockets, ours alone. way, host: how weights come to it, and its address
        for that. environment: beside this process's. say: told what takes long there."""
        self.name, self._say, self._silent_s = name, say or (lambda line: None), silent_s
        token = new_token()
        self.sync_token = new_token()
        self._listener = Listener(f"unix:{folder / f'{name}.front'}", token, here="the front")
        self.sync_address = f"unix:{folder / f'{name}.sync'}"
        birth = Birth(name, spec, self._listener.address, token, self.sync_address, self.sync_token, way, host)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.serve.replica_main"],
            stdin=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # it died at once: `ready` says so
            pipe.write(BIRTH.dump_json(birth))
        self.pid = self._process.pid
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._status = NO_STATUS
        self._on_event: Callable[[WorkerEvent], None] | None = None
        self._closing = False
        self._losing = threading.Lock()  # held from the loss on: one of the two threads tells
        self._marking = threading.Condition()
        self._marks = self._marked = 0
        self._threads: list[threading.Thread] = []
        self._channels: list[Channel] = []
        self.limits: Ready | None = None

    def ready(self, seconds: float = BOOT_S) -> Ready:
        """Wait until it can take weights, at most so long. Raises ServiceError, with the process gone, if it cannot, or
        was killed meanwhile."""
        deadline = Deadline.after(seconds)
        try:
            self._channels = self._meet(deadline, seconds)
            self._events, self._commands = self._channels
            while True:
                message = self._events.receive("to be ready", -1, deadline)
                for event in message.get("events", [message]):
                    if event.get("kind") == "Broken":
                        raise ServiceError(f"replica {self.name} cannot be set up: {event.get('reason')}")
                    if event.get("kind") == "Said":
                        self._say(f"{self.name}: {event.get('line')}")
                    if event.get("kind") == "Ready":
                        self.limits = READY.validate_python(event["ready"])
                        self.capacity = self.limits.capacity
                        return self.limits
        except SyncError as error:
            ended = self._ended()
            self.kill()
            if not deadline.remaining():
                raise self._too_late(seconds, ended) from error
            raise ServiceError(f"replica {self.name} did not come up ({ended}): {error}") from error
        except BaseException:
            self.kill()
            raise

    def _too_late(self, seconds: float, ended: str) -> ServiceError:
        return ServiceError(
            f"replica {self.name} was not ready within {seconds:g} s ({ended}), and was ended; if its model takes "
            "longer to load, raise --boot-deadline"
        )

    def _meet(self, deadline: Deadline, seconds: float) -> list[Channel]:
        """Its two connections, events first, once both are there."""
        found: list[Channel] = []
        failed: list[SyncError] = []

        def accept() -> None:
            try:
                while len(found) < 2 and (sock := self._listener.accept()) is not None:
                    found.append(self._listener.authenticate(sock))
            except SyncError as error:
                failed.append(error)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        while thread.is_alive() and deadline.remaining() and self._process.poll() is None:
            thread.join(0.05)
        self._listener.close()
        thread.join(5)
        if len(found) < 2:
            for channel in found:
                channel.close()
            if not failed and not deadline.remaining():
                raise self._too_late(seconds, self._ended())
            why = failed[0] if failed else self._ended()
            raise ServiceError(f"replica {self.name} did not connect: {why}; its messages are above")
        return sorted(found, key=lambda channel: channel.there.endswith("commands"))

    # -- Worker --------------------------------------------------------------------------------------------------------

    def start(self, on_event: Callable[[WorkerEvent], None]) -> None:
        self._on_event = on_event
        for what, run in (("events", self._hear), ("commands", self._command)):
            thread = threading.Thread(target=run, name=f"{self.name} {what}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def check(self, request: RolloutRequest) -> None:
        limits = self.limits
        assert limits is not None
        check_request(request.prompt, request.seeds, request.params, limits.vocab_size, limits.max_positions, True)
        tokens = len(request.prompt.ids) + request.params.max_new_tokens
        if -(-tokens // limits.page_size) + 1 > limits.num_pages:
            raise CapacityError(
                f"prompt {request.id!r}: {tokens} tokens need more than the {limits.num_pages} cache pages of "
                f"{limits.page_size} tokens that a replica has; shorten it, or serve with more --kv-memory-mib"
            )

    def submit(self, request: RolloutRequest) -> None:
        self._outbox.put({"do": "submit", "request": request_to_json(request)})

    def cancel(self, request_id: str) -> None:
        self._outbox.put({"do": "cancel", "request_id": request_id})

    def barrier(self, seconds: float) -> None:
        """As `Worker.barrier`: installs come over the weight sync's own connection, and may overtake commands."""
        with self._marking:
            self._marks += 1
            number, end = self._marks, time.monotonic() + seconds
            self._outbox.put({"do": "mark", "number": number})
            while self._marked < number:
                self._marking.wait(0.5)
                if self._process.poll() is not None:
                    raise ServiceError(f"replica {self.name} is gone: {self._ended()}")
                if time.monotonic() > end:
                    raise ServiceError(f"replica {self.name} did not take its commands within {seconds:.1f} s")

    def status(self) -> EngineStatus:
        return self._status

    def close(self) -> None:
        """Ask it to stop; after some seconds, make it. What it answers on the way is still heard."""
        self._closing = True
        self._outbox.put({"do": "stop"})
        self._outbox.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S if self._threads else 0)
        self.kill()

    def end(self) -> None:
        """End the process, from any thread: whoever waits in `ready` hears of it, and clears up."""
        self._process.kill()

    def kill(self) -> None:
        """At once, with everything that belongs to it."""
        self._process.kill()
        self._process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(STOP_S)  # it hears the last of what was said
        self._listener.close()
        for channel in self._channels:
            channel.close()

    # -- both directions -----------------------------------------------------------------------------------------------

    def _command(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._commands.send(message, Deadline.after(self._silent_s))
            except SyncError as error:
                self._lost(f"it takes no commands: {error}")
                return

    def _hear(self) -> None:
        assert self._on_event is not None
        try:
            while True:
                message = self._events.receive("a sign of life", -1, Deadline.after(self._silent_s))
                self._status = status_from_json(message["status"])
                for event in message["events"]:
                    if event["kind"] == "Said":
                        self._say(f"{self.name}: {event['line']}")
                    elif event["kind"] == "Marked":
                        with self._marking:
                            self._marked = event["number"]
                            self._marking.notify_all()
                    else:
                        self._on_event(event_from_json(event))
        except LockstepError as error:
            self._lost(str(error))

    def _lost(self, why: str) -> None:
        """It is gone, or as good as gone: a process that is not heard must not go on by itself."""
        if not self._closing and self._losing.acquire(blocking=False):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)  # to tell how it ended
            ended = self._ended()
            self.kill()
            assert self._on_event is not None
            self._on_event(Lost(f"{ended}; {why}"))

    def _ended(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it is running"
        return f"killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
