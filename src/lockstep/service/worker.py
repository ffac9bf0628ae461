"""One engine in a thread of its own: commands come in through a queue, what comes of them goes out as events.

The thread carries out commands between two looks at the engine, in order; it steps while there is work and sleeps on
the queue while there is none. Nobody else touches the engine, so the engine needs no lock.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax

from lockstep.errors import LockstepError, NumericsError, ServiceError
from lockstep.rollout.engine import Engine
from lockstep.rollout.stops import Decode
from lockstep.service.requests import (
    Cancelled,
    EngineStatus,
    Finished,
    Lost,
    Progress,
    Refused,
    Retired,
    RolloutRequest,
    Tokens,
    Top,
    WorkerEvent,
    likeliest,
)
from lockstep.types import PolicyVersion, Trajectory

T = TypeVar("T")
WINDOW_S, NOTE_S = 5.0, 0.25  # of `tokens_per_s`: how far it looks back, and how finely


class Rate:
    """Tokens per second over the last WINDOW_S seconds. One thread notes, any may read."""

    def __init__(self) -> None:
        self._noted: tuple[tuple[float, int], ...] = ()  # (time, tokens in all), the last one as new as can be

    def note(self, now: float, tokens: int) -> None:
        """So many tokens in all until `now`, in seconds."""
        noted = self._noted
        if len(noted) > 1 and noted[-1][0] - noted[-2][0] < NOTE_S:
            noted = noted[:-1]
        self._noted = (*noted[-round(WINDOW_S / NOTE_S) - 1 :], (now, tokens))

    def per_s(self, now: float) -> float:
        noted, start = self._noted, now - WINDOW_S
        if not noted:
            return 0.0
        since, tokens = next((note for note in reversed(noted) if note[0] <= start), noted[0])
        return (noted[-1][1] - tokens) / max(now - max(since, start), NOTE_S)


@dataclass(eq=False)
class _Open:
    """A request in the engine. done: finished samples by index; sent: tokens of each that were streamed."""

    request: RolloutRequest
    done: dict[int, Trajectory] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Command:
    """do: in the thread. drop(why): instead, when the thread has ended."""

    do: Callable[[], None]
    drop: Callable[[str], None] = lambda why: None


def _wait(event: threading.Event) -> None:
    event.wait()


class EngineWorker:
    """`requests.Worker` over an engine that is nobody else's from now on.

    decode: text of ids; where it is given, trajectories carry their completion's text. A look at the engine takes as
    many steps as its `decode_steps` allow: make that 1 where streamed tokens have to come one by one.

    A policy installed while samples are under way leaves them on theirs (`rollout.lanes`). Where a policy's output is
    not finite, its requests are refused and all others go on. Any other exception of the engine loses the worker. When
    it is lost or closed, `submit` and `cancel` come to nothing, `install` and `call` raise ServiceError.
    """

    def __init__(self, name: str, engine: Engine, *, decode: Decode | None = None) -> None:
        self.name, self.capacity = name, engine.capacity
        self._engine, self._decode = engine, decode
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._streamed: dict[str, _Open] = {}  # those of `_open` that want Progress
        self._emit: Callable[[WorkerEvent], None] = lambda event: None
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()  # no command comes after `_gone` was set
        self._gone = ""  # why nothing is carried out any more
        self._closing = False
        self._rate = Rate()
        self._publish()

    # -- from any thread ---------------------------------------------------------------------------------------------

    def start(self, on_event: Callable[[WorkerEvent], None]) -> None:
        """Start the thread, from which all events come."""
        with self._gate:
            assert self._thread is None, f"worker {self.name} was started already"
            self._emit = on_event
            self._thread = threading.Thread(target=self._run, name=f"engine {self.name}", daemon=True)
            self._thread.start()

    def check(self, request: RolloutRequest) -> None:
        """Raise CapacityError or ConfigError for a request that can never run."""
        self._engine.check(request.prompt, request.seeds, request.params)

    def submit(self, request: RolloutRequest) -> None:
        """Run a request, under the policy that is installed when the thread takes it."""
        self._put(_Command(lambda: self._submit(request), lambda why: self._refuse_dropped(request.id, why)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is submitted inside starts at once: no pass is made in between, so it is made of the same rows each
        time. Ask for nothing that the thread has to answer."""
        over = threading.Event()
        self._put(_Command(lambda: _wait(over)))
        try:
            yield
        finally:
            over.set()

    def cancel(self, request_id: str) -> None:
        """End a request with `Cancelled`. Nothing comes of it where the request is not under way any more."""
        self._put(_Command(lambda: self._cancel(request_id)))

    def install(self, policy: PolicyVersion, params: Mapping[str, jax.Array]) -> None:
        """Serve `params` to all that is submitted later; returns when that is so. Raises as `call` and
        `Engine.install`."""
        self.call(lambda engine: engine.install(policy, params))

    def call(self, use: Callable[[Engine], T]) -> T:
        """What `use` returns or raises, run between two looks at the engine; it must leave nothing under way that it
        submitted, and nothing cancelled that it did not. Before `start` it is run at once, in the caller's thread.

        Raises ServiceError when the worker is gone. It waits for the thread, which may be in `on_event`: hold no lock
        that `on_event` takes.
        """
        answer: Future[T] = Future()
        command = _Command(lambda: self._answer(use, answer), lambda why: answer.set_exception(self._gone_error()))
        with self._gate:
            started = self._thread is not None
            if not started and not self._gone:
                command.do()
        if started:
            assert threading.current_thread() is not self._thread, "the engine's thread would wait for itself"
            if not self._put(command):
                raise self._gone_error()
        elif not answer.done():
            raise self._gone_error()
        return answer.result()

    def barrier(self, seconds: float) -> None:
        """As `Worker.barrier`: an install is a command among the others, so there is nothing to wait for."""

    def status(self) -> EngineStatus:
        """As of the last look at the engine; waits for nothing."""
        return replace(self._status, tokens_per_s=self._rate.per_s(time.monotonic()))

    def close(self) -> None:
        """Do what was asked for before, cancel what is under way then, and end the thread."""
        with self._gate:
            if self._thread is None:
                self._gone = "it was closed"
                return
        self._put(_Command(self._close))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, command: _Command) -> bool:
        """Whether the command will be carried out, or else dropped by the thread."""
        with self._gate:
            assert self._thread is not None or self._gone, f"start worker {self.name} first: nobody hears its events"
            if not self._gone:
                self._commands.put(command)
            return not self._gone

    def _gone_error(self) -> ServiceError:
        return ServiceError(f"worker {self.name} is gone: {self._gone}; use another replica")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._carry_out()
                if self._engine.busy:
                    self._step()
                self._publish()
                for version, weight_bytes, pages in self._engine.take_retired():
                    self._emit(Retired(version, weight_bytes, pages))
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            self._end(reason)
            self._emit(Lost(reason))
        else:
            self._end("it was closed")

    def _carry_out(self) -> None:
        """The commands that are there; where the engine has nothing to do, wait for one."""
        count = self._commands.qsize()
        for _ in range(count if self._engine.busy else max(count, 1)):
            if self._closing:
                return
            self._commands.get().do()

    def _end(self, why: str) -> None:
        with self._gate:
            self._gone = why
        while not self._commands.empty():
            self._commands.get().drop(why)

    def _publish(self) -> None:
        engine, stats = self._engine, self._engine.stats
        (running, waiting), counts = engine.samples, dict(vars(stats))
        self._rate.note(time.monotonic(), stats.completion_tokens)
        self._status = EngineStatus(
            engine.versions, running, waiting, engine.pages, stats.completion_tokens, 0.0, counts
        )  # `status` fills in the rate of its own moment

    def _answer(self, use: Callable[[Engine], T], answer: Future[T]) -> None:
        try:
            result = use(self._engine)
        except Exception as error:
            self._publish()
            answer.set_exception(error)
        else:
            self._publish()
            answer.set_result(result)

    def _submit(self, request: RolloutRequest) -> None:
        try:
            self._engine.submit(request.prompt, request.seeds, request.params)
        except LockstepError as error:
            self._emit(Refused(request.id, str(error)))
        except Exception as error:  # of arguments of a wrong type, say; the engine queues nothing before it has checked
            self._emit(Refused(request.id, f"{type(error).__name__}: {error}"))
        else:
            self._open[request.id] = _Open(request)
            if request.stream:
                self._streamed[request.id] = self._open[request.id]

    def _refuse_dropped(self, request_id: str, why: str) -> None:
        if self._closing:  # else it is lost, and `Lost` answers for everything
            self._emit(Refused(request_id, f"worker {self.name}: {why}"))

    def _cancel(self, request_id: str) -> None:
        if request_id in self._open:
            ended = [*self._forget(request_id).done.values(), *map(self._read, self._engine.abort(request_id))]
            self._emit(Cancelled(request_id, tuple(sorted(ended, key=lambda t: t.index))))

    def _close(self) -> None:
        for request_id in list(self._open):
            self._cancel(request_id)
        self._closing = True

    def _forget(self, request_id: str) -> _Open:
        self._streamed.pop(request_id, None)
        return self._open.pop(request_id)

    def _step(self) -> None:
        """One look at the engine."""
        try:
            finished = self._engine.step()
        except NumericsError as error:
            for request_id in self._engine.abort_broken():
                self._forget(request_id)
                self._emit(Refused(request_id, str(error)))
            return
        for request_id, going in self._streamed.items():
            for sample in self._engine.open_samples(request_id):
                first = going.sent.get(sample.index, 0)
                top = tuple(tuple(zip(i.tolist(), p.tolist(), strict=True)) for i, p in sample.top[first:])
                self._stream(going, sample.index, sample.tokens, sample.logprobs, top)
        for t in finished:
            self._sample_ended(t)

    def _sample_ended(self, t: Trajectory) -> None:
        request_id = t.group_id
        going = self._open[request_id]
        if request_id in self._streamed:
            top = likeliest(t, going.sent.get(t.index, 0))
            self._stream(going, t.index, t.completion_ids.tolist(), t.logprobs.tolist(), top)
        going.done[t.index] = self._read(t)
        if len(going.done) == len(going.request.seeds):
            self._forget(request_id)
            self._emit(Finished(request_id, tuple(going.done[i] for i in sorted(going.done))))

    def _stream(self, going: _Open, index: int, ids: Sequence[int], logprobs: Sequence[float], top: Top) -> None:
        """Emit what of a sample's tokens was not emitted yet. top: of those only."""
        first = going.sent.get(index, 0)
        if len(ids) > first:
            going.sent[index] = len(ids)
            self._emit(Progress(going.request.id, Tokens(index, tuple(ids[first:]), tuple(logprobs[first:]), top)))

    def _read(self, t: Trajectory) -> Trajectory:
        return t if self._decode is None else replace(t, text=self._decode(t.completion_ids.tolist()))
