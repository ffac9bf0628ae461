"""Many clients at once, and many requests one after the other, against `lockstep serve`.

    python benchmarks/load.py --out benchmarks/results/load.json

First `--clients` clients, each with one streamed completion under way all the time, `--rounds` of them each: every one
must come whole, without an error. Then `--requests` short completions by a few clients: what the server's processes
hold (memory, threads, open files) after the second half is set against what they held after the first.

Exit code 1 if a client met an error, or a stream was not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx


def start(words: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "serve", *words, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("listening on "):
        raise RuntimeError(f"the server did not start: {line!r}")
    return process, line.split()[-1]


def family(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def held(pid: int) -> dict[str, int]:
    """Bytes in memory, threads, open files of a process and its children."""
    total: Counter[str] = Counter()
    for one in family(pid):
        status = Path(f"/proc/{one}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        total["bytes"] += int(fields["VmRSS"].split()[0]) << 10
        total["threads"] += int(fields["Threads"])
        total["files"] += len(os.listdir(f"/proc/{one}/fd"))
    return dict(total)


async def stream(client: httpx.AsyncClient, number: int, tokens: int, seen: Counter[str], first: list[float]) -> None:
    """One streamed completion; what came of it is counted."""
    body = {
        "prompt": f"Question {number}: what is {number % 97} plus {number % 89}? Answer:",
        "max_tokens": tokens, "stream": True, "seed": number, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    asked, usage, began, done = time.perf_counter(), None, False, False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                seen[f"{answer.status_code} {answer.text[:80]}"] += 1
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and not began:
                    began = True
                    first.append(time.perf_counter() - asked)
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    usage = json.loads(line[6:]).get("usage") or usage
    except httpx.HTTPError as error:
        seen[type(error).__name__] += 1
        return
    whole = done and usage is not None and usage["completion_tokens"] == tokens
    seen["whole" if whole else "not whole"] += 1


async def crowd(url: str, clients: int, rounds: int, tokens: int, pid: int) -> dict[str, Any]:
    seen: Counter[str] = Counter()
    first: list[float] = []
    most = held(pid)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(number: int) -> None:
            for turn in range(rounds):
                await stream(client, number + turn * clients, tokens, seen, first)

        begun = time.perf_counter()
        tasks = [asyncio.create_task(one(i)) for i in range(clients)]
        while any(not t.done() for t in tasks):
            await asyncio.sleep(0.5)
            now = held(pid)
            most = {k: max(v, most[k]) for k, v in now.items()}
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begun
    return {
        "clients": clients, "rounds": rounds, "tokens": tokens, "seconds": seconds, **seen, "most held": most,
        "tokens_per_s": seen["whole"] * tokens / seconds,
        "first_token_s": {"median": statistics.median(first), "last": max(first)} if first else {},
    }  # fmt: skip


async def long_day(url: str, requests: int, pid: int) -> dict[str, Any]:
    """Short completions, some of them given up halfway; what is held after each quarter."""
    seen: Counter[str] = Counter()
    after = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(number: int) -> None:
            body = {"prompt": f"{number}", "max_tokens": 1 + number % 6, "n": 1 + number % 3, "ignore_eos": True}
            if number % 10 == 9:
                with contextlib.suppress(TimeoutError, httpx.HTTPError):
                    await asyncio.wait_for(client.post("/v1/completions", json=body | {"max_tokens": 24}), 0.02)
                seen["given up"] += 1
                return
            answer = await client.post("/v1/completions", json=body)
            seen["answered" if answer.status_code == 200 else str(answer.status_code)] += 1

        numbers = iter(range(requests))

        async def worker() -> None:
            for number in numbers:
                await one(number)
                if number % (requests // 4) == requests // 4 - 1:
                    after.append(held(pid))

        await asyncio.gather(*(worker() for _ in range(16)))
        await asyncio.sleep(1)
        after.append(held(pid))
    return {"requests": requests, **seen, "held after each quarter, and at rest": after}


def run(words: list[str], *, clients: int, rounds: int, tokens: int, requests: int) -> dict[str, Any]:
    process, url = start(words)
    with process:
        try:
            result = {"crowd": asyncio.run(crowd(url, clients, rounds, tokens, process.pid))}
            if requests:
                result["long day"] = asyncio.run(long_day(url, requests, process.pid))
        finally:
            process.terminate()
            process.wait(60)
    return result


def broken(result: dict[str, Any]) -> bool:
    crowd, day = result["crowd"], result.get("long day")
    whole = crowd.get("whole", 0) == crowd["clients"] * crowd["rounds"]
    return not whole or (day is not None and day.get("answered", 0) + day.get("given up", 0) != day["requests"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = run(
        [options.model, "--max-positions", "128", "--slots", "64"],
        clients=options.clients, rounds=options.rounds, tokens=options.tokens, requests=options.requests,
    )  # fmt: skip
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if broken(result) else 0


if __name__ == "__main__":
    sys.exit(main())
