"""Workers without an engine: what they draw is a function of (version, seed, position), as a real one's is."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable

import numpy as np

from lockstep.errors import CapacityError
from lockstep.service.requests import (
    Cancelled,
    EngineStatus,
    Finished,
    Lost,
    Progress,
    Retired,
    RolloutRequest,
    Tokens,
    WorkerEvent,
)
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

FINGERPRINT = Fingerprint("t", "c", "d", "n")


def draw(version: PolicyVersion, seed: int, position: int) -> int:
    """Below 1000; another one for every version."""
    text = f"{version.number}/{seed}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % 1000


def expected(request: RolloutRequest, version: PolicyVersion) -> list[list[int]]:
    return [[draw(version, s, i) for i in range(request.params.max_new_tokens)] for s in request.seeds]


def request(id: str, tokens: int = 3, seeds: tuple[int, ...] = (1,), **more) -> RolloutRequest:
    return RolloutRequest(Prompt(id, "", (1, 2)), seeds, SamplingParams(1.0, tokens, frozenset()), **more)


class ManualWorker:
    """Does nothing by itself: `step` draws a token of every sample under way, `settle` answers cancellations."""

    def __init__(self, name: str, capacity: int = 8) -> None:
        self.name, self.capacity = name, capacity
        self.version: PolicyVersion | None = None
        self.open: dict[str, tuple[RolloutRequest, PolicyVersion, list[list[int]]]] = {}
        self.cancels: list[str] = []
        self.installs: list[tuple[PolicyVersion, list[str]]] = []
        self.closed = False

    def start(self, on_event: Callable[[WorkerEvent], None]) -> None:
        self.emit = on_event

    def check(self, request: RolloutRequest) -> None:
        if len(request.prompt.ids) > 100:
            raise CapacityError(f"{request.id}: too long")

    def submit(self, request: RolloutRequest) -> None:
        assert self.version is not None, "nothing is served yet"
        self.open[request.id] = (request, self.version, [[] for _ in request.seeds])

    def cancel(self, request_id: str) -> None:
        self.cancels.append(request_id)

    def install(self, policy: PolicyVersion, tree: object = None) -> None:
        self.installs.append((policy, list(self.open)))
        before, self.version = self.version, policy
        if before is not None and not self.open:
            self.emit(Retired(before, 32, 0))

    def settle(self) -> None:
        for request_id in self.cancels:
            if request_id in self.open:
                self.emit(Cancelled(request_id, self.trajectories(request_id, "abort")))
        self.cancels = []

    def barrier(self, seconds: float) -> None:
        pass

    def step(self, *ids: str, by: PolicyVersion | None = None) -> None:
        for request_id in ids or list(self.open):
            request, version, drawn = self.open[request_id]
            for i, seed in enumerate(request.seeds if request.params.max_new_tokens else ()):
                token = draw(by or version, seed, len(drawn[i]))
                drawn[i].append(token)
                if request.stream:
                    self.emit(Progress(request_id, Tokens(i, (token,), (-0.5,))))
            if len(drawn[0]) == request.params.max_new_tokens:
                self.emit(Finished(request_id, self.trajectories(request_id, "length")))

    def finish(self, *ids: str) -> None:
        for request_id in ids or list(self.open):
            while request_id in self.open:
                self.step(request_id)

    def trajectories(self, request_id: str, reason: str) -> tuple[Trajectory, ...]:
        request, version, drawn = self.open.pop(request_id)
        return tuple(
            Trajectory(
                np.asarray(request.prompt.ids, np.int32),
                np.asarray(ids, np.int32),
                np.full(len(ids), -0.5, np.float32),
                np.full(len(ids), version.number, np.int32),
                reason,
                request.seeds[i],
                request.id,
                i,
                FINGERPRINT,
            )
            for i, ids in enumerate(drawn)
        )

    def lose(self) -> None:
        self.open.clear()
        self.emit(Lost("killed"))

    def status(self) -> EngineStatus:
        held = {version for _, version, _ in self.open.values()} | {self.version}
        return EngineStatus(tuple(v for v in held if v), len(self.open), 0, (1, 0, 0, 1), 0, 0.0)

    def close(self) -> None:
        self.closed = True
        for request_id in list(self.open):
            self.emit(Cancelled(request_id, self.trajectories(request_id, "abort")))


class BusyWorker(ManualWorker):
    """The same in a thread: a token of everything under way per `pause_s` seconds."""

    def __init__(self, name: str, capacity: int = 8, pause_s: float = 0.001) -> None:
        super().__init__(name, capacity)
        self.commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.pause_s, self.thread = pause_s, threading.Thread(target=self._run, daemon=True)

    def start(self, on_event: Callable[[WorkerEvent], None]) -> None:
        super().start(on_event)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                command = self.commands.get(timeout=self.pause_s if self.open else 60)
            except queue.Empty:
                if self.open:
                    self.step()
                continue
            if command is None:
                return
            command()

    def submit(self, request: RolloutRequest) -> None:
        self.commands.put(lambda: ManualWorker.submit(self, request))

    def cancel(self, request_id: str) -> None:
        def now() -> None:
            if request_id in self.open:
                self.emit(Cancelled(request_id, self.trajectories(request_id, "abort")))

        self.commands.put(now)

    def install(self, policy: PolicyVersion, tree: object = None) -> None:
        done = threading.Event()
        self.commands.put(lambda: (ManualWorker.install(self, policy), done.set()))
        assert done.wait(60)

    def close(self) -> None:
        def now() -> None:
            ManualWorker.close(self)
            self.commands.put(None)

        self.commands.put(now)
        self.thread.join(60)
