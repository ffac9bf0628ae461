"""The worker's side of `benchmarks/decode.py`: a peer that is loaded once and then does job after job.

Standard library only, because every peer runs in an environment of its own. A worker is started with one argument, the
JSON of a `Setup`; it answers `ready`, then reads a job per line and answers each with a line: `done` with seconds, or
`failed` with the error. Answers go to the standard output that it was started with; whatever the peer's libraries print
goes to standard error, so it cannot get in between.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Setup:
    """What a peer is loaded for. model: a float32 folder in Hugging Face layout; gguf: the file that it was made from,
    "" where there is none. Sequences at once and positions of one, at most. option: for a peer with variants."""

    model: str
    gguf: str
    threads: int
    max_sequences: int
    max_positions: int
    option: str = ""


@dataclass(frozen=True)
class Job:
    """Complete prompts[p] len(lengths[p]) times, sample i by exactly lengths[p][i] tokens, whatever they are.
    temperature 0: greedy, else drawn from the whole softmax at it. All prompts are equally long."""

    prompts: list[list[int]]
    lengths: list[list[int]]
    temperature: float
    seed: int

    @property
    def samples(self) -> list[tuple[list[int], int]]:
        """(prompt, length) of every sample, prompt by prompt."""
        return [(p, n) for p, own in zip(self.prompts, self.lengths, strict=True) for n in own]


class Peer(Protocol):
    """packages: whose versions are reported. prepare: what a user does once for jobs of a size; not timed."""

    packages: Sequence[str]

    def prepare(self, job: Job) -> None: ...

    def generate(self, job: Job) -> list[list[int]]:
        """Token ids of every sample, prompt by prompt."""

    def details(self) -> dict[str, Any]:
        """What is worth telling of the last job."""


def check(job: Job, completions: list[list[int]]) -> None:
    """ValueError unless every sample has the length that was asked for: speeds of unequal work are not compared."""
    wanted, got = [n for _, n in job.samples], [len(c) for c in completions]
    if wanted != got:
        at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
        raise ValueError(
            f"{len(got)} completions, {len(wanted)} expected; the first that is off is sample {at}: expected "
            f"{wanted[at : at + 1]} tokens, got {got[at : at + 1]}"
        )


def do(peer: Peer, job: Job) -> dict[str, Any]:
    """The answer to a job. seconds: wall-clock from token ids to token ids; cpu_s: of all threads."""
    peer.prepare(job)
    cpu, start = time.process_time(), time.perf_counter()
    completions = [list(map(int, c)) for c in peer.generate(job)]
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    check(job, completions)
    tokens = sum(map(len, completions))
    return {
        "event": "done", "seconds": seconds, "cpu_s": cpu_s, "tokens": tokens, "completions": completions,
        "details": peer.details(),
    }  # fmt: skip


def versions(packages: Sequence[str]) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


def failure(error: Exception) -> dict[str, Any]:
    """An answer that says what went wrong and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    return {"event": "failed", "error": f"{type(error).__name__} at {where}: {str(error)[:2000]}"}


def serve(load: Callable[[Setup], Peer], argv: Sequence[str] | None = None) -> None:
    """Load the peer and do jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # what a library prints stands in the log where it belongs

    def answer(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=answers, flush=True)

    setup = Setup(**json.loads((sys.argv[1:] if argv is None else argv)[0]))
    start = time.perf_counter()
    try:
        peer = load(setup)
        answer({"event": "ready", "load_s": time.perf_counter() - start, "versions": versions(peer.packages)})
    except Exception as error:
        traceback.print_exc()
        answer(failure(error))
        return
    for line in sys.stdin:
        try:
            answer(do(peer, Job(**json.loads(line))))
        except Exception as error:
            traceback.print_exc()
            answer(failure(error))
