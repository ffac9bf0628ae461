"""Kill -9 at random: a replica, the server, the trainer. Every request is accounted for, the run comes out the same.

    python benchmarks/chaos.py --seconds 600 --out benchmarks/results/chaos.json

A server with two replicas and a journal; a trainer that samples over it; clients with idempotency keys. Every few
seconds one of the processes is killed: the server starts replicas again by itself, this script starts the server and
resumes the trainer, as an operator (or systemd) would. At the end the trainer finishes its steps in peace, and:

- every request of the clients has one answer; a key that was answered twice was answered alike;
- the journal has one end for each admission;
- the run's metrics are those of a run that nobody disturbed, bit for bit (unless --no-twin).

Exit code 1 if any of this does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from lockstep.metrics import read_jsonl

SECRETS = {kind: secrets.token_hex(16) for kind in ("inference", "control", "sync")}
TIMES = ("time/", "idle/", "timeline", "tokens_per_s", "warmup/", "engine/", "syncs")
"""What a run may differ in: how long things took, and what was in the prefix cache."""


class Machine:
    """The server and the trainer, started again whenever they are gone. folder: for everything that they write."""

    def __init__(self, recipe: str, overrides: list[str], steps: int, folder: Path, replicas: int) -> None:
        self.folder, self.steps, self._recipe, self._overrides, self._replicas = (
            folder,
            steps,
            recipe,
            overrides,
            replicas,
        )
        tokens = folder / "tokens"
        tokens.touch(0o600)
        tokens.write_text("".join(f"{kind} {secret}\n" for kind, secret in SECRETS.items()))
        self.port, self.starts = 0, Counter[str]()
        self._over = threading.Event()
        self.server = self._start_server()
        self.trainer = self._start_trainer()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run_dir(self) -> Path:
        return self.folder / "chaos"

    def _start_server(self) -> subprocess.Popen[bytes]:
        self.starts["server"] += 1
        log = (self.folder / "server.log").open("ab")
        words = ["serve", "--recipe", self._recipe, "--port", str(self.port), "--replicas", str(self._replicas)]
        words += ["--token-file", str(self.folder / "tokens"), "--journal", str(self.folder / "journal.jsonl")]
        words += ["--policy", "dual", "--queue-s", "60"]
        at = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words], stdout=log, stderr=log, start_new_session=True
        )
        while self.port == 0:
            for line in (self.folder / "server.log").read_bytes()[at:].decode().splitlines():
                if line.startswith("listening on "):
                    self.port = int(line.rpartition(":")[2])
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start: see {self.folder / 'server.log'}")
            time.sleep(0.05)
        return process

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        self.starts["trainer"] += 1
        resumable = any((self.run_dir / "checkpoints").glob("*")) if self.run_dir.exists() else False
        if resumable:
            words = ["run", "--resume", str(self.run_dir)]
        else:
            subprocess.run(["rm", "-rf", str(self.run_dir)], check=True)  # killed before its first checkpoint
            words = ["run", self._recipe, f"--run.dir={self.folder}", "--run.name=chaos", f"--run.steps={self.steps}"]
            words += ["--run.checkpoint_every=1", "--sync.on_failure=evict", *self._overrides]
        words += [
            f"--rollout.url={self.url}",
            f"--rollout.token_file={self.folder / 'tokens'}",
            "--rollout.patience_s=10",
        ]
        log = (self.folder / "trainer.log").open("ab")
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words], stdout=log, stderr=log, start_new_session=True
        )

    def _keep(self) -> None:
        while not self._over.wait(0.2):
            if self.server.poll() is not None:
                self.server = self._start_server()
            if self.trainer.poll() not in (None, 0):
                time.sleep(1.0)
                if self.answers():
                    self.trainer = self._start_trainer()

    def answers(self) -> bool:
        """Whether the server is ready."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def replicas(self) -> list[int]:
        """Their processes' ids."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == self.server.pid:
                found.append(int(path.name))
        return found

    def kill(self, what: str) -> bool:
        """Kill -9, whatever it is doing; False if there is none."""
        pids = {
            "replica": self.replicas(),
            "server": [self.server.pid] if self.server.poll() is None else [],
            "trainer": [self.trainer.pid] if self.trainer.poll() is None else [],
        }[what]
        if pids:
            os.kill(random.choice(pids), signal.SIGKILL)
        return bool(pids)

    def finish(self, seconds: float) -> bool:
        """Whether the trainer comes to its end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.trainer.poll() != 0:
            time.sleep(0.5)
        return self.trainer.poll() == 0

    def close(self) -> None:
        self._over.set()
        self._keeper.join()
        for process in (self.trainer, self.server):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Client(threading.Thread):
    """One request after the other, each tried until it is answered. answers: key -> what it was answered, each time."""

    def __init__(self, machine: Machine, number: int, vocabulary: int) -> None:
        super().__init__(daemon=True)
        self._machine, self._random, self._vocabulary = machine, random.Random(number), vocabulary
        self.answers: dict[str, list[Any]] = {}
        self.failures: Counter[str] = Counter()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            key, dice = secrets.token_hex(8), self._random
            body = {
                "prompt_ids": [dice.randrange(3, self._vocabulary) for _ in range(dice.randrange(2, 6))],
                "seeds": [dice.randrange(2**63) for _ in range(dice.choice([1, 2, 4]))],
                "max_new_tokens": dice.randrange(1, 6),
                "temperature": 1.0,
            }
            self.answers[key] = []
            wanted = 2 if dice.random() < 0.3 else 1  # some ask again though they were answered
            while len(self.answers[key]) < wanted:
                self._ask(key, body)
                self.over.wait(0.05)

    def _ask(self, key: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {SECRETS['inference']}", "Idempotency-Key": key}
        try:
            answer = httpx.post(f"{self._machine.url}/v1/rl/generate", json=body, headers=headers, timeout=120)
        except httpx.HTTPError as error:
            self.failures[type(error).__name__] += 1
            time.sleep(0.5)
            return
        if answer.status_code == 200:
            self.answers[key].append(answer.json())
        else:
            self.failures[f"{answer.status_code} {answer.json()['error']['message'].split(':')[0][:60]}"] += 1
            time.sleep(0.5)


def drawn(answer: dict[str, Any]) -> Any:
    """What must be alike in two answers to one key."""
    return [(s["ids"], s["logprobs"], s["versions"], s["seed"]) for s in answer["samples"]]


def journal(path: Path) -> dict[str, int]:
    """Admissions and ends in the journal, and those that do not fit."""
    admitted, ended = Counter[str](), Counter[str]()
    outcomes = Counter[str]()
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "admitted":
            admitted[record["id"]] += 1
        elif record["kind"] == "ended":
            ended[record["id"]] += 1
            outcomes[record["outcome"]] += 1
    wrong = sum(1 for i in admitted | ended if admitted[i] != ended[i] or admitted[i] > 1)
    return {"admitted": sum(admitted.values()), "ended": sum(ended.values()), "not once": wrong, **outcomes}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    records = read_jsonl(run_dir / "metrics.jsonl").records
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in records]


def twin(recipe: str, overrides: list[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """The metrics of the same run with its sampler in its own process, undisturbed."""
    words = ["run", recipe, f"--run.dir={folder}", "--run.name=twin", f"--run.steps={steps}", *overrides]
    with (folder / "twin.log").open("wb") as log:
        subprocess.run([sys.executable, "-m", "lockstep", *words], check=True, stdout=log, stderr=log)
    return metrics(folder / "twin")


def run(
    recipe: str, overrides: list[str], *, seconds: float, steps: int, folder: Path, clients: int = 4, replicas: int = 2,
    every_s: tuple[float, float] = (3.0, 20.0), vocabulary: int = 40_000, with_twin: bool = True, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    dice = random.Random(seed)
    machine = Machine(recipe, overrides, steps, folder, replicas)
    load = [Client(machine, i, vocabulary) for i in range(clients)]
    for client in load:
        client.start()
    kills, start = Counter[str](), time.monotonic()
    while time.monotonic() - start < seconds:
        time.sleep(dice.uniform(*every_s))
        what = dice.choices(["replica", "server", "trainer"], [3, 1, 2])[0]
        if machine.kill(what):
            kills[what] += 1
            print(f"{time.monotonic() - start:6.1f} s: killed {what}", flush=True)
    for client in load:
        client.over.set()
    for client in load:
        client.join(300)
    finished = machine.finish(3600)
    starts = dict(machine.starts)
    machine.close()
    answers = {key: found for client in load for key, found in client.answers.items()}
    failures = sum((client.failures for client in load), Counter[str]())
    there = metrics(machine.run_dir)
    result = {
        "seconds": seconds,
        "kills": dict(kills),
        "starts": starts,
        "requests": len(answers),
        "unanswered": sum(not found for found in answers.values()),
        "asked twice": sum(len(found) > 1 for found in answers.values()),
        "answered otherwise": sum(
            any(drawn(a) != drawn(found[0]) for a in found) for found in answers.values() if found
        ),
        "refusals on the way": dict(failures),
        "journal": journal(folder / "journal.jsonl"),
        "run finished": finished,
        "steps": [r["step"] for r in there] == list(range(1, steps + 1)),
    }
    if with_twin:
        result["the same run as undisturbed"] = there == twin(recipe, overrides, steps, folder)
    return result


def broken(result: dict[str, Any]) -> list[str]:
    """What does not hold."""
    wrong = [name for name in ("unanswered", "answered otherwise") if result[name]]
    wrong += [name for name in ("run finished", "steps") if not result[name]]
    wrong += ["the journal"] if result["journal"]["not once"] else []
    return wrong + ([] if result.get("the same run as undisturbed", True) else ["the run differs from its twin"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/addition.toml")
    parser.add_argument("--seconds", type=float, default=600.0, help="of killing")
    parser.add_argument("--steps", type=int, default=8, help="of the run")
    parser.add_argument(
        "--every", type=float, nargs=2, default=(10.0, 40.0), help="seconds between two kills, from, to"
    )
    parser.add_argument("--vocabulary", type=int, default=40_000, help="clients' prompts are of ids below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-twin", action="store_true", help="do not compare with an undisturbed run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder:
        result = run(
            options.recipe, [], seconds=options.seconds, steps=options.steps, folder=Path(folder), seed=options.seed,
            every_s=tuple(options.every), vocabulary=options.vocabulary, with_twin=not options.no_twin,
        )  # fmt: skip
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if broken(result) else 0


if __name__ == "__main__":
    sys.exit(main())
