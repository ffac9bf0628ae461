"""A process that runs reward functions: `python -m lockstep.envs.worker_main FD`, started by `workers.Pool`.

It hears first which functions there are, loads them, and answers `Ready` or `Refused`; then each `Job` with its
outcomes. A thread listens, so that the process ends with the run that started it, even while a function hangs.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.envs import frames
from lockstep.envs.outcome import Outcome, RewardFunction, WrongCount, call
from lockstep.envs.scorers import Named, load
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Setup:
    """The first message. folder: where modules are looked for. functions: what the jobs may name."""

    folder: str | None
    functions: tuple[Named, ...]


@dataclass(frozen=True)
class Ready:
    """Every function is there."""


@dataclass(frozen=True)
class Refused:
    """A function cannot be used, or broke the rules; the run is told why."""

    why: str


@dataclass(frozen=True)
class Job:
    """One call: function, number of completions, and (prompts, completions, each row pickled), pickled on their own: a
    row that cannot be unpickled here is a failure of its call, not of the worker."""

    name: str
    count: int
    batch: bytes


@dataclass(frozen=True)
class Done:
    outcomes: list[Outcome]


def main(fd: int) -> None:
    """Serve until the other end is closed."""
    sock = socket.socket(fileno=fd)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sock, messages), daemon=True).start()
    setup: Setup = messages.get()
    try:
        functions = {named.name: load(named, setup.folder) for named in setup.functions}
    except ConfigError as error:
        _answer(sock, Refused(str(error)))
        return
    _answer(sock, Ready())
    while True:
        _answer(sock, _done(functions, messages.get()))


def _listen(sock: socket.socket, messages: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            messages.put(frames.receive(sock))
    except EOFError:
        os._exit(0)  # the run is over; what a function may still be doing is of no use


def _done(functions: dict[str, Callable[..., Any]], job: Job) -> Done | Refused:
    function: RewardFunction = functions[job.name]
    try:
        prompts, completions, pickled = pickle.loads(job.batch)
        rows = [pickle.loads(row) for row in pickled]
    except Exception as error:  # whatever a class of the row raises; the sample has failed, not the worker
        why = (
            f"reward {job.name!r}: the data row cannot be read in a worker process ({type(error).__name__}: {error}); "
            "rows should be plain data: text, numbers, lists, dicts"
        )
        return Done([Outcome(kind="exception", why=why)] * job.count)
    try:
        return Done(call(job.name, function, (prompts, completions, rows)))
    except WrongCount as error:
        return Refused(str(error))


def _answer(sock: socket.socket, message: Ready | Refused | Done) -> None:
    try:
        frames.send(sock, pickle.dumps(message))
    except OSError:
        os._exit(0)  # as above: nobody listens


if __name__ == "__main__":
    # As `lockstep.envs.worker_main`, not `__main__`: messages are pickled under the names of their classes.
    from lockstep.envs import worker_main

    worker_main.main(int(sys.argv[1]))
