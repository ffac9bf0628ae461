"""Tokens per second of lockstep's engine against tunix, transformers, vLLM and llama.cpp, in one run on one machine.

    python benchmarks/decode.py [--peers lockstep,vllm] [--rounds 3] [--shapes 1,8,32,64,rl] [--quick]

The same float32 weights of SmolLM2-135M, the same prompts, the same number of tokens. Shapes `1` to `64`: so many
prompts of 64 tokens, 128 new ones each, greedy. Shape `rl`: 16 prompts x 8 samples drawn at temperature 1, lengths
long-tailed (median 40, at most 256). End-of-sequence ids are ignored: each peer is told how long a sample is to be, and
stops it there if it can.

Every peer is loaded once, in a process and an environment of its own (`.venvs/`, made on first use; see
peers/environments.py), warmed up on every shape (on the whole of it where it compiles), and then takes its turn in
every round. Who is not at work is stopped (SIGSTOP), so it cannot spin. Medians over the rounds count, ratios are those
of medians in the same run. Greedy completions are compared with lockstep's: peers that were given other weights would
show. The limit is what the machine's measured bandwidth and multiply rate allow (`decode_work.machine_limit`).

All peers stay in memory. Most of a round goes to static batches of the RL shape, where every row runs to the longest
sample's end; the result is written after every round.

A peer that cannot be made, loaded or run is reported with its error, the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decode_peers import PEERS, Failed, Worker
from decode_work import Shape, agreement, brief, job, machine_limit, shapes, summarise, table
from limits import child_environment, machine_facts, usable_cores, use_cores
from limits import markdown as limits_table
from loop import model_folder
from loop import versions as own_versions

ROOT = Path(__file__).resolve().parent.parent
CALM = 0.5  # load average above which times mean little
AGREES = 0.8  # agreement below which a peer is taken to compute another model


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. SystemExit with a message when a value makes no sense."""
    parser = argparse.ArgumentParser(description="Generation speed of lockstep and its peers, in one run.")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"which, by comma (default: {','.join(PEERS)})")
    parser.add_argument("--rounds", type=int, help="times every peer does every shape (default: 3; 1 with --quick)")
    parser.add_argument("--shapes", help="which, by comma (default: all: 1,8,32,64,rl; 1,8,rl with --quick)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that every peer works; no result")
    parser.add_argument("--threads", type=int, default=min(2, usable_cores()), help="cores for each peer")
    parser.add_argument("--model", default="smollm2-135m", help="a known name (`lockstep models`) or a folder")
    parser.add_argument("--timeout", type=int, default=900, help="seconds that a peer may take to load, or for a job")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "benchmarks", help="model files and peers' logs")
    parser.add_argument("--out", type=Path, help="the JSON result (default: benchmarks/results/decode.json)")
    args = parser.parse_args(argv)
    if args.rounds is None:
        args.rounds = 1 if args.quick else 3
    known = shapes(args.quick)
    args.peers, args.shapes = args.peers.split(","), (args.shapes or ",".join(known)).split(",")
    for option, wanted, all_ in (("peers", args.peers, PEERS), ("shapes", args.shapes, known)):
        for name in wanted:
            if name not in all_:
                parser.error(f"--{option}: {name!r} is not one of {', '.join(all_)}")
    for name in ("rounds", "threads", "timeout"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.threads > usable_cores():
        parser.error(f"--threads is {args.threads}, this process may use {usable_cores()} cores")
    # A quick run must not replace a result.
    name = "decode-quick.json" if args.quick else "decode.json"
    args.out = args.out or (args.work if args.quick else ROOT / "benchmarks" / "results") / name
    return args


def gguf_of(model: str) -> str:
    """The GGUF file that a known model's weights come from; "" for a folder."""
    from lockstep.models.catalog import KNOWN_MODELS
    from lockstep.models.fetch import verified

    return str(verified(KNOWN_MODELS[model], None)) if model in KNOWN_MODELS else ""


def measure_limits(threads: int, quick: bool) -> dict[str, Any]:
    """`limits.py` in its own process, on the same cores."""
    command = [sys.executable, str(ROOT / "benchmarks" / "limits.py"), "--threads", str(threads)]
    command += ["--repeats", "1", "--megabytes", "8"] if quick else []
    done = subprocess.run(command, env=child_environment(threads), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


class Run:
    """The workers, what they answered, and what went wrong."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        from lockstep.models.catalog import load_spec

        self.args, self.spec = args, load_spec(model)
        self.shapes = {name: shapes(args.quick)[name] for name in args.shapes}
        largest = max(s.sequences for s in self.shapes.values())
        positions = max(s.prompt_tokens + s.new_tokens for s in self.shapes.values())
        self.setup = {
            "model": str(model),
            "gguf": gguf_of(args.model),
            "threads": args.threads,
            "max_sequences": largest,
            "max_positions": positions,
        }
        self.workers: dict[str, Worker] = {}
        self.answers: dict[str, dict[str, list[dict[str, Any]]]] = {s: {} for s in self.shapes}
        self.peers: dict[str, dict[str, Any]] = {name: {"errors": []} for name in args.peers}

    def start(self) -> None:
        """Load every peer and let it do every shape once."""
        for name in self.args.peers:
            began = time.perf_counter()
            try:
                worker = Worker(name, self.setup, self.args.work, self.args.timeout)
            except Failed as error:
                self.failed(name, "load", error)
                continue
            self.workers[name] = worker
            self.peers[name] |= {"versions": worker.ready["versions"], "load_s": worker.ready["load_s"], "warm_s": {}}
            for shape in self.shapes:
                wanted = self.shapes[shape] if PEERS[name].compiles else brief(self.shapes[shape])
                if (answer := self.do(name, shape, -1, wanted)) is not None:
                    self.peers[name]["warm_s"][shape] = answer["seconds"]
            say(f"{name}: ready after {time.perf_counter() - began:.0f} s")

    def do(self, name: str, shape: str, round_: int, wanted: Shape | None = None) -> dict[str, Any] | None:
        """One job, of the shape or of what is `wanted` instead; None, and the failure on record, where it fails. A
        worker that died takes no further part."""
        worker = self.workers.get(name)
        if worker is None:
            return None
        try:
            return worker.do(job(wanted or self.shapes[shape], self.spec.vocab_size, round_))
        except Failed as error:
            self.failed(name, shape, error)
            if not worker.alive:
                del self.workers[name]
            return None

    def failed(self, name: str, where: str, error: Failed) -> None:
        if not self.peers[name]["errors"]:
            say(f"{name}: failed at {where}: {error}")
        self.peers[name]["errors"].append({"where": where, "error": str(error)})

    def rounds(self, after: Callable[[], None] = lambda: None) -> None:
        """Everybody does every shape, `rounds` times; after() each time."""
        for round_ in range(self.args.rounds):
            for shape in self.shapes:
                # Every round begins with another peer: nobody always follows the same one.
                names = list(self.args.peers)
                names = names[round_ % len(names) :] + names[: round_ % len(names)]
                found = {name: self.do(name, shape, round_) for name in names}
                self.take(shape, {n: a for n, a in found.items() if a is not None})
                speeds = ", ".join(f"{n} {a['tokens'] / a['seconds']:.0f}" for n, a in found.items() if a)
                say(f"round {round_ + 1}, shape {shape}: {speeds} tokens/s")
            after()

    def take(self, shape: str, found: dict[str, dict[str, Any]]) -> None:
        """Keep a round's answers; of completions only how far they agree with lockstep's."""
        ours = found["lockstep"]["completions"] if "lockstep" in found else None
        for name, answer in found.items():
            theirs = answer.pop("completions")
            if ours is not None and self.shapes[shape].temperature == 0:
                answer["agreement"] = agreement(ours, theirs)
            self.answers[shape].setdefault(name, []).append(answer)

    def judge(self) -> None:
        """A failure for every peer whose greedy tokens are not those of the same model."""
        for shape, by_peer in self.answers.items():
            for name, answers in by_peer.items():
                least = min((a["agreement"] for a in answers if "agreement" in a), default=1.0)
                if least < AGREES:
                    message = f"only {least:.0%} of its greedy tokens agree with lockstep's: not the same model"
                    self.failed(name, shape, Failed(message))

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    machine = machine_facts()
    if machine.get("load_average", 0) > CALM and not args.quick:
        say(f"the load average is {machine['load_average']}: other work is running, the times will mean little")
    use_cores(args.threads)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    limits = measure_limits(args.threads, args.quick)
    run = Run(args, model_folder(args.model, args.work))
    least = {name: machine_limit(shape, run.spec, limits) for name, shape in run.shapes.items()}

    def write() -> list[dict[str, Any]]:
        machine["load_average_at_end"] = round(os.getloadavg()[0], 2)
        rows = summarise(run.answers, least)
        result = {
            "machine": machine,
            "versions": own_versions(),
            "settings": {"model": args.model, "threads": args.threads, "rounds": args.rounds, "quick": args.quick},
            "shapes": {n: vars(s) | {"limit": least[n]} for n, s in run.shapes.items()},
            "limits": limits,
            "peers": run.peers,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return rows

    try:
        run.start()
        run.rounds(after=write)
    finally:
        run.stop()
    run.judge()
    say(f"\n{table(write(), least, args.peers)}\n\n{limits_table(limits)}\n\n{os.path.relpath(args.out)}")
    failed = {n: p["errors"] for n, p in run.peers.items() if p["errors"]}
    for name, errors in failed.items():
        for where in dict.fromkeys(e["where"] for e in errors):
            print(f"{name}, {where}: {next(e['error'] for e in errors if e['where'] == where)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
