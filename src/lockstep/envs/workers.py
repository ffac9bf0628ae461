"""Processes that reward functions run in: started fresh (never forked from a process that runs JAX), kept over the run.

A call has a deadline. A process that passes it, or ends, is killed with all that it started, another takes its place,
and only the completions of that call have failed. Results are in the order of the jobs, whichever process did them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from lockstep.envs import frames
from lockstep.envs.outcome import Kind, Outcome, failures
from lockstep.envs.scorers import Named
from lockstep.envs.worker_main import Done, Job, Ready, Refused, Setup
from lockstep.errors import ConfigError, RewardError

START_S = 300.0  # a function's module may import much, on a busy machine


class Lost(Exception):
    """A worker process did not answer. kind: why it did not. how: in words."""

    def __init__(self, kind: Kind, how: str) -> None:
        super().__init__(how)
        self.kind, self.how = kind, how


class Process:
    """One worker process, which may be starting still. Used by one thread at a time."""

    def __init__(self, setup: bytes) -> None:
        self._sock, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                # -P: no folder goes before the path that is handed on, which is this process's own.
                [sys.executable, "-P", "-m", "lockstep.envs.worker_main", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
                start_new_session=True,  # what a function starts ends with it; Ctrl-C is the run's affair
            )
        self._ready = False
        with contextlib.suppress(OSError):  # it died at once: the first answer says so
            frames.send(self._sock, setup, START_S)

    def wait_ready(self) -> None:
        """Raises ConfigError for a function that cannot be used, RewardError for a process that does not come up."""
        if self._ready:
            return
        try:
            answer = self._receive(START_S)
        except Lost as lost:
            raise RewardError(
                f"a reward worker did not come up: it {lost.how}; importing the module of a reward function may have "
                "done that. Its messages are above"
            ) from lost
        if isinstance(answer, Refused):
            raise ConfigError(answer.why)
        assert isinstance(answer, Ready)
        self._ready = True

    def ask(self, payload: bytes, seconds: float) -> Any:
        """The answer to one message. Raises Lost, after which the process must be killed."""
        end = time.monotonic() + seconds
        try:
            frames.send(self._sock, payload, seconds)
        except TimeoutError as error:
            raise Lost("timeout", f"had not taken the sample after {seconds:g} s") from error
        except OSError as error:
            raise Lost("crashed", self._ended()) from error
        return self._receive(max(0.0, end - time.monotonic()), seconds)

    @property
    def ended(self) -> bool:
        return self._ready and self._process.poll() is not None

    def _receive(self, seconds: float, allowed: float | None = None) -> Any:
        try:
            return frames.receive(self._sock, seconds)
        except TimeoutError as error:
            if self._process.poll() is not None:  # its end went unnoticed: something that it started holds the socket
                raise Lost("crashed", self._ended()) from error
            raise Lost("timeout", f"had not answered after {allowed or seconds:g} s") from error
        except EOFError as error:
            raise Lost("crashed", self._ended()) from error

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        words = "out of memory, perhaps" if -code == signal.SIGKILL else signal.strsignal(-code)
        return f"was killed by signal {-code} ({words})"

    def kill(self) -> None:
        """At once, with all that it started; a second call does nothing."""
        self._sock.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Pool:
    """`count` worker processes that have loaded `functions`.

    deadline_s: of a call, for each of its completions.
    """

    def __init__(self, functions: Sequence[Named], folder: str | None, count: int, deadline_s: float) -> None:
        """Returns when one process has loaded the functions. Raises: ConfigError when they cannot be used."""
        self._deadline_s = deadline_s
        self._setup = pickle.dumps(Setup(folder, tuple(functions)))
        self._processes: list[Process | None] = [Process(self._setup) for _ in range(count)]
        weakref.finalize(self, _end, self._processes)  # where nobody closes it, they end with it
        self.restarts = 0
        first = self._processes[0]
        assert first is not None
        try:
            first.wait_ready()
        except BaseException:
            self.close()
            raise

    def run(
        self, name: str, batches: Sequence[tuple[list[str], list[str], list[Any]]], *, until_failure: bool
    ) -> list[list[Outcome] | None]:
        """One list of outcomes per batch of (prompts, completions, rows), in their order.

        until_failure: begin no further batch after a failure; those that were not begun are None. Batches begin in
        order, so the first that failed is the same, however many processes there are.
        Raises: RewardError where a function breaks its contract, or a process cannot be replaced.
        """
        return _Round(self, name, batches, until_failure).results()

    def one(self, slot: int, name: str, batch: tuple[list[str], list[str], list[Any]]) -> list[Outcome]:
        """The outcomes of one batch, by the process in a slot. Raises: as `run`."""
        texts = batch[1]
        try:
            # Each row by itself: two completions of a prompt must not share one that a function may change.
            payload = pickle.dumps(
                Job(name, len(texts), pickle.dumps((*batch[:2], [pickle.dumps(r) for r in batch[2]])))
            )
        except Exception as error:  # whatever the row's own classes raise
            why = (
                f"reward {name!r}: the data row cannot be sent to a worker process ({type(error).__name__}: {error}); "
                "rows should be plain data: text, numbers, lists, dicts"
            )
            return [Outcome(kind="exception", why=why)] * len(texts)
        process = self._processes[slot]
        if process is not None and process.ended:  # between two samples: neither of them is at fault
            process.kill()
            process = None
        if process is None:
            process = self._processes[slot] = Process(self._setup)
            self.restarts += 1
        process.wait_ready()
        try:
            answer = process.ask(payload, self._deadline_s * len(texts))
        except Lost as lost:
            self._processes[slot] = None
            process.kill()
            limit = f" (reward.deadline_s = {self._deadline_s:g})" if lost.kind == "timeout" else ""
            return [Outcome(kind=lost.kind, why=f"reward {name!r}: its process {lost.how}{limit}")] * len(texts)
        if isinstance(answer, Refused):
            raise RewardError(answer.why)
        assert isinstance(answer, Done)
        return answer.outcomes

    @property
    def count(self) -> int:
        return len(self._processes)

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        _end(self._processes)


def _end(processes: list[Process | None]) -> None:
    for slot, process in enumerate(processes):
        if process is not None:
            process.kill()
            processes[slot] = None


class _Round:
    """One `Pool.run`: a thread for each process takes the next batch."""

    def __init__(self, pool: Pool, name: str, batches: Sequence[Any], until_failure: bool) -> None:
        self._pool, self._name, self._batches, self._until_failure = pool, name, batches, until_failure
        self._found: list[list[Outcome] | None] = [None] * len(batches)
        self._errors: dict[int, Exception] = {}
        self._lock = threading.Lock()
        self._next, self._stop = 0, False

    def results(self) -> list[list[Outcome] | None]:
        slots = range(min(self._pool.count, len(self._batches)))
        threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"reward worker {slot}", daemon=True)
            for slot in slots
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: what is under way is ended, not waited for
            self._stop = True
            self._pool.close()
            raise
        if self._errors:
            raise self._errors[min(self._errors)]
        return self._found

    def _take(self) -> int | None:
        with self._lock:
            if self._stop or self._next == len(self._batches):
                return None
            self._next += 1
            return self._next - 1

    def _work(self, slot: int) -> None:
        while (index := self._take()) is not None:
            try:
                outcomes = self._pool.one(slot, self._name, self._batches[index])
            except Exception as error:  # told to the caller's thread, which raises it
                self._errors[index], self._stop = error, True
                return
            self._found[index] = outcomes
            if self._until_failure and failures(outcomes):
                self._stop = True
