"""A replica's process: `python -m lockstep.serve.replica_main`, started by `process.ProcessWorker`.

Its birth comes over standard input. It connects to the front twice: commands come over the one, events go over the
other, with a status every second, so that the front can tell silence from work. When the front is gone it ends itself.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lockstep.cluster.devices import device_kinds
from lockstep.errors import LockstepError, SyncError
from lockstep.rollout.engine import Engine
from lockstep.serve.role import BLANK, Role, make_role
from lockstep.serve.spec import BIRTH, READY, Birth, Ready
from lockstep.service.codec import event_to_json, request_from_json, status_to_json
from lockstep.service.requests import Refused
from lockstep.service.worker import EngineWorker
from lockstep.sync.channel import Channel, connect
from lockstep.sync.ends import numbers_from
from lockstep.sync.replica_server import ReplicaServer
from lockstep.sync.transport import Deadline
from lockstep.train.rundir import keep_compiled_programs
from lockstep.types import PolicyVersion

STATUS_S = 1.0  # between two signs of life
PATIENCE_S = 120.0  # until the front takes a message off our hands
FIRST_DEVICE = 1 << 20  # device numbers of a replica in plans: none of a trainer's
FOREVER_S = 10 * 365 * 86400.0


def main() -> int:
    """Exit code: 0 when told to stop, 1 when the front is gone, 2 when it could not be set up (the front says why)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front says when to stop
    birth: Birth = BIRTH.validate_json(sys.stdin.read())
    try:
        events, commands = (
            connect(
                birth.front, birth.token, here=f"{birth.name} {kind}", there="the front", deadline=Deadline.after(30)
            )
            for kind in ("events", "commands")
        )
    except SyncError as error:
        print(f"{birth.name}: {error}", file=sys.stderr)
        return 1
    try:
        return _serve(birth, commands, events)
    except LockstepError as error:
        events.send({"kind": "Broken", "reason": str(error)}, Deadline.after(PATIENCE_S))
        return 2


def _serve(birth: Birth, commands: Channel, events: Channel) -> int:
    outbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    keep_compiled_programs()
    role, worker, server = _set_up(birth, lambda line: outbox.put({"kind": "Said", "line": line}))
    worker.start(lambda event: outbox.put(event_to_json(event)))
    ready = _ready(role, worker)
    outbox.put({"kind": "Ready", "ready": READY.dump_python(ready, mode="json")})
    threading.Thread(target=_tell, args=(events, outbox, worker), name="events", daemon=True).start()
    with server:
        code = _obey(commands, worker, outbox.put)
    worker.close()
    return code


def _set_up(birth: Birth, say: Callable[[str], None]) -> tuple[Role, EngineWorker, ReplicaServer]:
    transport = birth.way.make(f"{birth.name}.{os.getpid()}", birth.host)
    made: list[EngineWorker] = []
    numbers: dict[int, jax.Device] = {}

    def numbers_of(where: Mapping[str, jax.sharding.Sharding]) -> dict[int, jax.Device]:
        numbers.update(numbers_from(FIRST_DEVICE, where.values()))
        return numbers

    role = make_role(
        birth.spec, birth.name, transport, numbers_of,
        lambda policy, params: made[0].call(lambda engine: _install(engine, policy, params)), say,
    )  # fmt: skip
    made.append(EngineWorker(birth.name, role.engine))
    return role, made[0], ReplicaServer(role.replica, transport, numbers, birth.sync, birth.sync_token)


def _install(engine: Engine, policy: PolicyVersion, params: Mapping[str, jax.Array]) -> None:
    warmed_up = engine.version == BLANK
    engine.install(policy, params)
    if warmed_up:
        engine.take_retired()  # the blank weights were no version: nobody is told


def _ready(role: Role, worker: EngineWorker) -> Ready:
    engine = role.engine
    leaf = next(iter(role.replica.destination.values()))
    return Ready(
        capacity=worker.capacity,
        shards=len(leaf.device_set),
        max_positions=engine.max_positions,
        vocab_size=engine.programs.spec.vocab_size,
        num_pages=engine.num_pages,
        page_size=engine.programs.num.page_size,
        base_digest=role.base_digest,
        fingerprint=role.fingerprint,
        device=device_kinds(list(leaf.device_set)),
    )


def _tell(events: Channel, outbox: queue.SimpleQueue[dict[str, Any]], worker: EngineWorker) -> None:
    """Send what happens, several at a time where they come fast. A front that takes nothing is a front that is gone."""
    try:
        while True:
            batch: list[dict[str, Any]] = []
            try:
                batch.append(outbox.get(timeout=STATUS_S))
                while len(batch) < 256:
                    batch.append(outbox.get_nowait())
            except queue.Empty:
                pass
            message = {"kind": "Batch", "events": batch, "status": status_to_json(worker.status())}
            events.send(message, Deadline.after(PATIENCE_S))
    except SyncError as error:
        print(f"replica: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _obey(commands: Channel, worker: EngineWorker, put: Callable[[dict[str, Any]], None]) -> int:
    calls: dict[str, Callable[[dict[str, Any]], None]] = {
        "submit": lambda m: _submit(worker, m["request"], put),
        "cancel": lambda m: worker.cancel(str(m["request_id"])),
        "mark": lambda m: put({"kind": "Marked", "number": m["number"]}),
    }
    while True:
        try:
            message = commands.receive("a command", -1, Deadline.after(FOREVER_S))
        except SyncError:
            return 1  # the front is gone, and nobody is left to be told
        if message.get("do") == "stop":
            return 0
        calls[message["do"]](message)


def _submit(worker: EngineWorker, value: Any, put: Callable[[dict[str, Any]], None]) -> None:
    try:
        worker.submit(request_from_json(value))
    except LockstepError as error:
        request_id = str(value.get("prompt", {}).get("id")) if isinstance(value, dict) else "?"
        put(event_to_json(Refused(request_id, str(error))))


if __name__ == "__main__":
    sys.exit(main())
