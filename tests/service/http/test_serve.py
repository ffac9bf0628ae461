"""`lockstep serve` with a real model, in its own processes, as a user has it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from lockstep.cli import main
from lockstep.cli.serve import _limits
from lockstep.errors import ConfigError, SyncError
from lockstep.models.hf import load_folder, save_folder
from lockstep.service.blocking import run_all
from lockstep.service.client import RemoteRollouts
from lockstep.service.controls import Source
from lockstep.service.offers import offer
from lockstep.service.requests import RolloutRequest
from lockstep.types import Prompt, SamplingParams

INFERENCE, CONTROL = "i" * 24, "c" * 24


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    said: list[str]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=INFERENCE, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("versions")
    spec, params = load_folder(tiny_folder)
    save_folder(
        root / "v1", spec, {k: v * np.float32(1.02) for k, v in params.items()}, tokenizer_files_from=tiny_folder
    )
    return root


@pytest.fixture(scope="module")
def served(tiny_folder: Path, weights_dir: Path) -> Iterator[Served]:
    tokens = weights_dir / "tokens"
    tokens.write_text(f"inference {INFERENCE}\ncontrol {CONTROL}\n")
    tokens.chmod(0o600)
    words = [
        str(tiny_folder), "--name", "tiny", "--port", "0", "--token-file", str(tokens), "--weights-dir",
        str(weights_dir), "--slots", "8", "--max-positions", "96", "--grace-s", "20", "--flips", "together",
    ]  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "serve", *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    said = [process.stdout.readline()]
    assert said[0].startswith("listening on http://127.0.0.1:"), said
    said += [process.stdout.readline() for _ in range(3)]
    yield Served(process, said[0].split()[-1], said)
    process.kill()
    process.wait()
    process.stdout.close()


PARAMS = SamplingParams(0.8, 12, frozenset(), top_k=50)


def test_the_limits_that_are_said_are_those_that_hold(served: Served) -> None:
    assert served.said[2].startswith("limits: 96 positions, 96 prompt tokens, "), served.said
    with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 97, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_a_limit_that_cannot_hold_is_said() -> None:
    given = argparse.Namespace(max_prompt_tokens=97, max_concurrency=None, queue_s=None)
    with pytest.raises(ConfigError, match="97 is more than the 96 positions"):
        _limits(given, 96)
    given.max_prompt_tokens = 9
    assert _limits(given, 96).prompt_tokens == 9


def test_a_sequence_that_fills_every_position_is_scored(served: Served) -> None:
    """Over the RL verb and as OpenAI's echo; scored as without its last token, as far as that goes."""
    ids = [int(i) for i in np.random.default_rng(3).integers(3, 250, 96)]
    with RemoteRollouts(served.url, INFERENCE) as client, served.openai() as other:
        (_, whole), (_, part) = client.score([ids, ids[:-1]], 1.0)
        assert len(whole) == 96 and whole[1:95] == part[1:] and np.isfinite(whole[95])
        echo = other.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=0)
        assert echo.usage is not None and echo.usage.completion_tokens == 0
        assert echo.choices[0].logprobs is not None and echo.choices[0].logprobs.token_logprobs == [None, *whole[1:]]


def test_the_record_is_the_score_bit_for_bit_across_a_version(served: Served) -> None:
    """What was sampled over HTTP, scored over HTTP under the version that sampled it: the same float32 values."""
    plain = SamplingParams(1.0, 12, frozenset())
    with RemoteRollouts(served.url, INFERENCE, control_token=CONTROL) as client:
        digests = set()
        for number in (0, 1):
            if number:
                assert client.stage(Source("files", "v1"), 1)["version"] == 1
                client.commit(1)
            asked = [RolloutRequest(Prompt(f"{number}/{i}", "", (5, 6, 7 + i)), (1, 2), plain) for i in range(3)]
            for request, ended in zip(asked, run_all(client, asked), strict=True):
                assert ended.outcome == "finished" and ended.policy is not None and ended.policy.number == number
                digests.add(ended.policy.digest)
                rows = [[*request.prompt.ids, *t.completion_ids.tolist()] for t in ended.trajectories]
                for t, (version, scores) in zip(ended.trajectories, client.score(rows, 1.0), strict=True):
                    assert version == ended.policy and t.versions.tolist() == [number] * 12
                    assert np.asarray(scores[3:], np.float32).tobytes() == t.logprobs.tobytes()
        assert len(digests) == 2
        status = client.status()
        assert status.published is not None and status.published.number == 1 and status.replicas[0].alive


def test_a_version_is_staged_from_an_offer(served: Served, weights_dir: Path) -> None:
    _, params = load_folder(weights_dir / "v1")
    with RemoteRollouts(served.url, INFERENCE, control_token=CONTROL) as client:
        number = client.status().published.number + 1
        with offer(params) as source:
            with pytest.raises(SyncError, match="the request says"):
                client.stage(replace(source, digest="0" * 32), number)
            assert client.status().replicas[0].staged is None
            offered = client.stage(source, number)["digest"]
        client.abort_version(number)
        assert client.stage(Source("files", "v1"), number)["digest"] == offered
        client.abort_version(number)


def test_streams_and_whole_answers_agree(served: Served) -> None:
    with served.openai() as client:
        asked: dict[str, Any] = {
            "model": "tiny", "prompt": "Hello", "n": 2, "seed": 11, "max_tokens": 24, "logprobs": 2, "temperature": 1.5,
            "presence_penalty": 0.5,
        }  # fmt: skip
        whole = client.completions.create(**asked)
        texts, tops = ["", ""], [[], []]  # type: ignore[var-annotated]
        chunks = list(client.completions.create(**asked, stream=True))
        for choice in (c for chunk in chunks for c in chunk.choices):
            texts[choice.index] += choice.text
            tops[choice.index] += (choice.logprobs.top_logprobs or []) if choice.logprobs else []
        assert texts == [c.text for c in whole.choices] and len(chunks) > 6, "tokens come as they are made"
        assert tops == [c.logprobs.top_logprobs for c in whole.choices if c.logprobs]
        text = whole.choices[0].text
        stop = next(text[i : i + 2] for i in range(2, len(text) - 2) if "\ufffd" not in text[i : i + 2])
        for stream in (False, True):
            cut: Any = client.completions.create(**asked | {"n": 1}, stop=stop, stream=stream)
            pieces = [c for chunk in (cut if stream else [cut]) for c in chunk.choices]
            assert "".join(c.text for c in pieces) == text[: text.index(stop)]
            assert pieces[-1].finish_reason == "stop"
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, seed=1
        )
        assert chat.usage is not None and chat.usage.completion_tokens <= 4


def test_it_finishes_what_is_in_flight_and_says_so(served: Served) -> None:
    """The last test of the module: it ends the server."""
    process, done = served.process, []
    with served.openai() as client:
        stream = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=80, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream))
        ending = threading.Thread(target=lambda: done.extend(stream))
        ending.start()
        process.send_signal(signal.SIGTERM)
        ending.join()
    assert first.choices and done[-1].choices[0].finish_reason == "length"
    assert process.stdout is not None
    assert process.stdout.read().splitlines()[-1] == "closed: 1 requests were in flight: 1 finished"
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m", "--host", "0.0.0.0"], "--token-file"),
        (["m", "--port", "99999"], "port 99999: expected 0 (any that is free) to 65535"),
        (["m", "--weights-dir", "/nowhere/at/all"], "is not a folder"),
        (["m", "--token-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (["/nowhere/at/all", "--port", "0"], "/nowhere/at/all"),
        (["--port", "0"], "name a model or a recipe"),
        (["--recipe", "r.toml", "--numerics", "fast"], "--numerics goes with a model"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err
