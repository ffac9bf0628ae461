"""Version swaps under load: what the service promises, tried, and what it costs.

    python benchmarks/hammer.py --swaps 1000 --update dual --out benchmarks/results/hammer.json

A server with replicas in processes of their own; clients that ask for streams and not, one sample and several, long and
short, and give some up; a trainer that publishes one version after the other through the front, over shared memory,
never waiting for anybody. Every completion, aborted ones too, is scored afterwards by the trainer's own programs under
the version that it claims, and must come out alike to the bit. Tokens per second while versions are swapped are set
against those before and after, of the same clients.

Exit code 1 if anything was lost, mixed, or not alike.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.models.decoder import Numerics
from lockstep.rollout.generate import PAGE_SIZE, TILE_ROWS
from lockstep.serve.server import Server
from lockstep.serve.spec import ServeSpec
from lockstep.service.requests import Ended, RolloutRequest, Started, Tokens
from lockstep.sync.remote import RemoteReplica
from lockstep.sync.shared_memory import SharedMemoryTransport
from lockstep.sync.sync import WeightSync
from lockstep.train.assembly import make_numerics
from lockstep.train.batching import Geometry, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.policy import split_leaves
from lockstep.types import PolicyVersion, Prompt, SamplingParams, Trajectory

TOKEN = "the hammer's own secret"
MEDIAN_TOKENS, SPREAD = 14, 0.7  # of the lengths asked for, log-normal


@dataclass
class Heard:
    """What one request's client heard, in order."""

    asked: RolloutRequest
    events: list[Any] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, Ended):
            self.over.set()


class Clients:
    """So many threads, each with one request at a time. heard: of all requests so far."""

    def __init__(self, server: Server, count: int, most_tokens: int, temperatures: Sequence[float]) -> None:
        self._server, self._most, self._temperatures = server, most_tokens, list(temperatures)
        self._stop = threading.Event()
        self.heard: list[Heard] = []
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, client: int) -> None:
        rng = np.random.default_rng(client)
        vocabulary = self._server.served.model.spec.vocab_size
        made = 0
        while not self._stop.is_set():
            made += 1
            tokens = int(np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD), 1, self._most))
            prompt = tuple(map(int, rng.integers(3, vocabulary, int(rng.integers(4, 40)))))
            seeds = tuple(map(int, rng.integers(0, 2**63, int(rng.choice([1, 1, 2, 4])))))
            asked = RolloutRequest(
                Prompt(f"{client}/{made}", "", prompt),
                seeds,
                SamplingParams(float(rng.choice(self._temperatures)), tokens, frozenset()),
                stream=bool(rng.integers(2)),
            )
            heard = Heard(asked)
            self.heard.append(heard)
            self._server.service.submit(asked, heard)
            if rng.random() < 0.1:
                heard.over.wait(float(rng.random()) * 0.5)
                self._server.service.cancel(asked.id, "the client has lost interest")
            heard.over.wait()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Trainer:
    """Publishes versions whose weights follow from their numbers."""

    def __init__(self, server: Server) -> None:
        self._served, self.published = server.served, [server.policy]
        mesh = Dial.build({"actor": {}, "rollout": "actor"}, jax.devices()[:1]).mesh("actor")
        served = server.served
        if served.config is None:
            numerics = Numerics(served.dtype, TILE_ROWS, PAGE_SIZE)
        else:
            numerics = make_numerics(served.config, split_leaves(served.config, served.model.spec).lora)
        self._programs = Programs(served.model.spec, numerics, mesh, {**served.frozen, **served.trains})
        self._frozen = place({p: served.model.params[p] for p in served.frozen}, served.frozen, mesh)
        self._first = server.served.first_weights()
        self._mesh = mesh
        self._remotes = [
            RemoteReplica(r.name, r.sync_address, TOKEN, SharedMemoryTransport(f"hammer{i}"))
            for i, r in enumerate(server.service.status().replicas)
        ]
        base = server.versions._base
        routes = [remote.route() for remote in self._remotes]
        self._sync = WeightSync(served.trains, routes, base=base, deadline_s=600)
        self.seconds: list[float] = []

    def weights(self, number: int) -> dict[str, jax.Array]:
        if not number:
            return place(self._first, self._served.trains, self._mesh)
        rng = np.random.default_rng(number)
        changed = {
            path: (a + rng.standard_normal(a.shape, np.float32) * np.float32(0.02)).astype(a.dtype)
            for path, a in self._first.items()
        }
        return place(changed, self._served.trains, self._mesh)

    def push(self) -> None:
        number = self.published[-1].number + 1
        start = time.perf_counter()
        receipt = self._sync.push(number, self.weights(number))
        self.seconds.append(time.perf_counter() - start)
        assert not receipt.evicted, receipt.evicted
        self.published.append(receipt.policy)

    def close(self) -> None:
        for remote in self._remotes:
            remote.close()

    def wrong(self, policy: PolicyVersion, samples: list[Trajectory], temperature: float) -> int:
        """How many tokens' records are not what the trainer computes under this version."""
        weights = SplitWeights.of({**self._frozen, **self.weights(policy.number)}, self._served.model.spec.num_layers)
        geometry = Geometry(1, 2048, self._programs.num.tile_rows, self._programs.num.page_size)
        micro = make_micro_batches(samples, np.zeros(len(samples)), temperature, geometry)
        found: list[np.ndarray | None] = [None] * len(samples)
        for batch, flat in zip(micro, score(self._programs, weights, micro), strict=True):
            batch.scatter(flat, found)
        return sum(
            int((np.asarray(own).view(np.uint32) != t.logprobs.view(np.uint32)).sum())
            for own, t in zip(found, samples, strict=True)
        )


def check(
    heard: list[Heard], published: list[PolicyVersion], trainer: Trainer, say: Callable[[str], None]
) -> dict[str, int]:
    """Counts of what came of every request; what must be 0 is named `lost_...`, `mixed_...`, `wrong_...`."""
    counts: Counter[str] = Counter(dict.fromkeys(("lost", "mixed", "wrong_stream", "wrong_tokens", "failed"), 0))
    by_version: dict[tuple[int, float], list[Trajectory]] = defaultdict(list)
    for one in heard:
        ends = [e for e in one.events if isinstance(e, Ended)]
        if len(ends) != 1 or one.events[-1] is not ends[0]:
            counts["lost"] += 1
            continue
        end = ends[0]
        counts[end.outcome] += 1
        for t in end.trajectories:
            counts["tokens"] += len(t.completion_ids)
            if not len(t.completion_ids):
                continue
            if end.policy not in published or set(t.versions.tolist()) != {end.policy.number}:
                counts["mixed"] += 1
                continue
            by_version[end.policy.number, one.asked.params.temperature].append(t)
            shown = [i for e in one.events if isinstance(e, Tokens) and e.index == t.index for i in e.ids]
            if one.asked.stream and end.outcome == "finished" and shown != t.completion_ids.tolist():
                counts["wrong_stream"] += 1
        if end.outcome == "finished" and [t.seed for t in end.trajectories] != list(one.asked.seeds):
            counts["mixed"] += 1
        counts["sent again"] += sum(isinstance(e, Started) for e in one.events) > 1
    policies = {policy.number: policy for policy in published}
    for done, ((number, temperature), samples) in enumerate(sorted(by_version.items())):
        counts["wrong_tokens"] += trainer.wrong(policies[number], samples, temperature)
        counts["scored_tokens"] += sum(len(t.completion_ids) for t in samples)
        if done % 100 == 0:
            say(f"scored {done} of {len(by_version)} batches")
    counts["versions"] = len({number for number, _ in by_version})
    return dict(counts)


def tokens(server: Server) -> int:
    return sum(r.engine.tokens for r in server.service.status().replicas if r.engine is not None)


def speed(server: Server, seconds: float) -> float:
    """Tokens per second over so many seconds."""
    before, start = tokens(server), time.perf_counter()
    time.sleep(seconds)
    return (tokens(server) - before) / (time.perf_counter() - start)


def run(
    spec: ServeSpec,
    *,
    swaps: int,
    update: str,
    replicas: int = 1,
    clients: int = 12,
    every_s: float = 0.0,
    quiet_s: float = 2.0,
    most_tokens: int = 64,
    temperatures: Sequence[float] = (1.0,),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """One hammering; see above. every_s: between two swaps at least. quiet_s: without swaps, before and after."""
    with Server(spec, replicas=replicas, update=update, sync_token=TOKEN, say=say) as server:
        trainer, load = Trainer(server), Clients(server, clients, most_tokens, temperatures)
        speed(server, quiet_s)  # everything is compiled then
        quiet = [speed(server, quiet_s)]
        before, start = tokens(server), time.perf_counter()
        for number in range(swaps):
            due = start + number * every_s
            time.sleep(max(0.0, due - time.perf_counter()))
            trainer.push()
            if number % 50 == 49:
                say(f"{number + 1} swaps, {len(load.heard)} requests")
        took = time.perf_counter() - start
        during = (tokens(server) - before) / took
        quiet.append(speed(server, quiet_s))
        load.stop()
        trainer.close()
        counts = check(load.heard, trainer.published, trainer, say)
        retired = server.service.status().retired
        return {
            "update": update,
            "model": spec.model or spec.recipe,
            "replicas": replicas,
            "clients": clients,
            "swaps": swaps,
            "swaps_per_s": swaps / took,
            "push_s": statistics.median(trainer.seconds),
            "requests": len(load.heard),
            **counts,
            "reasons": server.service.status().reasons,
            "retired_last_bytes": retired[-1].weight_bytes if retired else 0,
            "tokens_per_s": {
                "quiet": quiet,
                "during": during,
                "ratio": during / statistics.mean(quiet) if any(quiet) else math.nan,
            },
        }


def broken(result: dict[str, Any]) -> list[str]:
    """Which of the counts that must be 0 are not."""
    return [name for name in ("lost", "mixed", "wrong_stream", "wrong_tokens", "failed") if result[name]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/addition.toml", help="whose rollout role is served")
    parser.add_argument("--model", default="", help="a model instead, all of whose weights are swapped")
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--update", choices=["drain", "abort", "dual"], nargs="+", default=["dual", "drain"])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two swaps at least")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds without swaps, before and after")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    longer = ("--task.max_prompt_tokens=48", "--rollout.max_new_tokens=64")
    spec = ServeSpec(model=options.model) if options.model else ServeSpec(recipe=options.recipe, overrides=longer)
    results = []
    for update in options.update:
        results.append(
            run(
                spec, swaps=options.swaps, update=update, replicas=options.replicas, clients=options.clients,
                every_s=options.every, quiet_s=options.quiet,
            )
        )  # fmt: skip
        print(json.dumps(results[-1], indent=2), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if any(map(broken, results)) else 0


if __name__ == "__main__":
    sys.exit(main())
