"""The processes of `benchmarks/decode.py`: a peer each, loaded once, stopped while others work."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limits import child_environment

HERE = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True)
class PeerKind:
    """script: of peers/; environment: of peers/environments.py, "" for the one that runs this; option: see the script;
    variables: environment variables that make the peer fast or let it run at all. compiles: whether a shape's first
    time costs more than its later ones, so that it has to be run whole once before it counts."""

    script: str
    environment: str
    option: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    compiles: bool = False


# A thread of an OpenMP library that waits goes to sleep, where otherwise it spins: with one other busy process on the
# machine a spinning vLLM is 20 times slower.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it leaves one of two cores idle
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
PEERS = {
    "lockstep": PeerKind("decode_lockstep.py", "", "exact", compiles=True),
    "lockstep-fast": PeerKind("decode_lockstep.py", "", "fast", compiles=True),
    "tunix": PeerKind("decode_tunix.py", "tunix", compiles=True),
    "transformers": PeerKind("decode_transformers.py", "transformers", variables={**PASSIVE, "HF_HUB_OFFLINE": "1"}),
    "vllm": PeerKind("decode_vllm.py", "vllm", variables={**PASSIVE, **VLLM}),
    "llamacpp": PeerKind("decode_llamacpp.py", "llamacpp", variables=PASSIVE),
}


class Failed(Exception):
    """A peer could not be made, loaded or run."""


class Worker:
    """A peer's process. It runs only while it is asked something; in between it is stopped, with all its threads."""

    def __init__(self, name: str, setup: dict[str, Any], work: Path, timeout_s: int) -> None:
        """Start it and wait until it has loaded. Raises Failed."""
        kind = PEERS[name]
        self.timeout_s, self.log = timeout_s, work / f"decode-{name}.log"
        command = [str(python_of(kind)), str(HERE / kind.script), json.dumps(setup | {"option": kind.option})]
        env = child_environment(setup["threads"]) | dict(kind.variables)
        with self.log.open("w", encoding="utf-8") as log:
            # A process group of its own: its children are stopped and ended with it. In the same session, so that
            # the system ends it, stopped or not, when this process is gone.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=work,
                process_group=0,
            )  # fmt: skip
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        try:
            self.ready = self._answer()
        except Failed:
            self.stop()
            raise
        self._suspend()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.answers.put(line)
        self.answers.put(None)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to a job. Raises Failed; the worker is gone afterwards if it hung or died."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            return self._answer()
        except OSError as error:
            raise self._dead() from error
        finally:
            self._suspend()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self.answers.get(timeout=self.timeout_s)
        except queue.Empty:
            self.stop()
            raise Failed(f"no answer within {self.timeout_s} s; the end of {self.log}:\n{self._tail()}") from None
        if line is None:
            raise self._dead()
        answer = json.loads(line)
        if answer["event"] == "failed":
            raise Failed(answer["error"])
        return answer

    def _dead(self) -> Failed:
        self.stop()
        return Failed(f"ended with code {self.process.returncode}; the end of {self.log}:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _suspend(self) -> None:
        """Stop all its threads, and wait until they are."""
        self._signal(signal.SIGSTOP)
        if self.alive and hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def stop(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def python_of(kind: PeerKind) -> Path:
    """The interpreter of a peer. Raises Failed where its environment cannot be made."""
    if not kind.environment:
        return Path(sys.executable)
    sys.path.insert(0, str(HERE))
    try:
        from environments import EnvironmentFailed, peer_python
    finally:
        sys.path.remove(str(HERE))
    try:
        return peer_python(kind.environment)
    except (EnvironmentFailed, OSError) as error:
        raise Failed(str(error)) from error
