"""Tokens in, tokens out: the RL verbs and the client that is `Rollouts` over HTTP."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import CapacityError, ConfigError, DataError, QueueFullError, ServiceError, SyncError
from lockstep.service.client import RemoteRollouts
from lockstep.service.controls import Source
from lockstep.service.http import wire
from lockstep.service.http.settings import AccessTokens, Limits
from lockstep.service.journal import Journal
from lockstep.service.requests import ClientEvent, Ended, RolloutRequest, Rollouts, Started, Tokens
from lockstep.types import Prompt, SamplingParams, Trajectory

from .conftest import Running, Start
from .fake import FINGERPRINT, FakeService, logprob, version_of

PARAMS = SamplingParams(0.5, 6, frozenset({3}), top_k=9, top_logprobs=2, prompt_logprobs=True, logit_bias=((5, 0.25),))


def request(name: str = "task/0/1", **more: Any) -> RolloutRequest:
    return RolloutRequest(
        **{"prompt": Prompt(name, "", (10, 11, 12)), "seeds": (7, 2**64 - 1), "params": PARAMS} | more
    )


class Heard:
    """Events of one request."""

    def __init__(self) -> None:
        self.events: list[ClientEvent] = []
        self._queue: queue.Queue[ClientEvent] = queue.Queue()

    def __call__(self, event: ClientEvent) -> None:
        self.events.append(event)
        self._queue.put(event)

    def next(self) -> ClientEvent:
        return self._queue.get(timeout=20)

    def end(self) -> Ended:
        while not isinstance(event := self.next(), Ended):
            pass
        return event

    def ids(self, index: int) -> list[int]:
        return [i for e in self.events if isinstance(e, Tokens) and e.index == index for i in e.ids]


def same(a: Trajectory, b: Trajectory) -> None:
    """Bit for bit."""

    def bits(value: Any) -> Any:
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    for name in ("prompt_ids", "completion_ids", "logprobs", "versions", "kept_logmass", "finish_reason", "seed"):
        assert bits(getattr(a, name)) == bits(getattr(b, name)), name
    assert (a.group_id, a.index, a.fingerprint, a.generate_s) == (b.group_id, b.index, b.fingerprint, b.generate_s)
    assert (a.details is None) == (b.details is None)
    if a.details is not None:
        for name in ("prompt_logprobs", "top_ids", "top_logprobs"):
            assert bits(getattr(a.details, name)) == bits(getattr(b.details, name)), name


def ask(rollouts: Rollouts, asked: RolloutRequest) -> Heard:
    heard = Heard()
    rollouts.submit(asked, heard)
    heard.end()
    return heard


@pytest.fixture(scope="module")
def remote(server: Running) -> Iterator[RemoteRollouts]:
    with RemoteRollouts(server.url) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("params", [PARAMS, SamplingParams(1.0, 3, frozenset())])
def test_over_http_it_is_what_it_is_in_process(
    server: Running, remote: RemoteRollouts, stream: bool, params: SamplingParams
) -> None:
    asked = request(params=params, stream=stream)
    near, far = ask(server.service, asked), ask(remote, asked)
    assert [type(e) for e in near.events if not isinstance(e, Tokens)] == [Started, Ended]
    assert [type(e) for e in far.events if not isinstance(e, Tokens)] == [Started, Ended]
    assert far.events[0] == near.events[0]
    tokens = [[e for e in h.events if isinstance(e, Tokens)] for h in (near, far)]
    assert tokens[0] == tokens[1] and bool(tokens[0]) == stream
    ends = [h.events[-1] for h in (near, far)]
    assert isinstance(ends[0], Ended) and isinstance(ends[1], Ended) and ends[1].outcome == "finished"
    for a, b in zip(ends[0].trajectories, ends[1].trajectories, strict=True):
        same(a, b)
    sent = server.service.seen[-1]
    assert (sent.params, sent.seeds, sent.prompt.ids) == (params, asked.seeds, asked.prompt.ids)


FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5)


@given(FLOATS, st.booleans())
def test_a_record_reads_back_as_the_very_floats(values: list[float], kept: bool) -> None:
    asked = request()
    n, logprobs = len(values), np.asarray(values, np.float32)
    t = Trajectory(
        np.asarray(asked.prompt.ids, np.int32), np.arange(n, dtype=np.int32), logprobs, np.full(n, 4, np.int32),
        "stop", 2**64 - 1, asked.id, 1, FINGERPRINT, 0.1, kept_logmass=logprobs if kept else None,
    )  # fmt: skip
    sent = json.loads(json.dumps(wire.event(Ended("aborted", (t,), "why", version_of(4))), allow_nan=False))
    ended = wire.client_event(sent, asked)
    assert isinstance(ended, Ended) and (ended.outcome, ended.reason) == ("aborted", "why")
    assert ended.policy == version_of(4)
    same(ended.trajectories[0], t)


def test_scores(remote: RemoteRollouts) -> None:
    ((version, scores),) = remote.score([[1, 2, 3]], 1.0)
    assert version == version_of(1) and math.isnan(scores[0])
    assert scores[1:] == [logprob(1, 2, 1), logprob(1, 3, 2)]


def test_status_reads_back(server: Running, remote: RemoteRollouts) -> None:
    assert remote.status() == server.service.status()


def test_unstreamed_generate_has_everything(server: Running) -> None:
    body = {"prompt_ids": [10, 11, 12], "seeds": [7, 8], "max_new_tokens": 4, "top_k": 3, "id": "mine", "stop_ids": []}
    raw = server.http().post("/v1/rl/generate", json=body)
    answer = raw.json()
    assert (answer["outcome"], answer["id"], answer["replica"]) == ("finished", "mine", "replica/0")
    assert answer["policy"] == {"number": 1, "digest": version_of(1).digest}
    assert raw.headers["lockstep-policy-digest"] == version_of(1).digest
    for i, s in enumerate(answer["samples"]):
        assert (s["index"], s["seed"], s["finish_reason"], s["versions"]) == (i, 7 + i, "length", [1] * 4)
        assert len(s["ids"]) == len(s["logprobs"]) == len(s["kept_logmass"]) == 4 and s["fingerprint"]["numerics"]


# -- errors, cancelling


def test_refusals_are_the_same_errors(start: Start) -> None:
    with start(FakeService(max_waiting=1, max_positions=20)) as server, RemoteRollouts(server.url) as client:
        with pytest.raises(CapacityError, match="positions"):
            client.submit(request(params=replace(PARAMS, max_new_tokens=50)), Heard())
        for rollouts in (server.service, client):  # one rule on both sides
            with pytest.raises(ConfigError, match=r"temperature 0\.0005 is below 0\.001"):
                rollouts.submit(request(params=replace(PARAMS, temperature=5e-4)), Heard())
        with pytest.raises(ConfigError, match="262"):
            client.submit(request(params=replace(PARAMS, logit_bias=((262, 1.0),))), Heard())
        hold = threading.Event()
        server.service.before_token = lambda *unused: hold.wait(20)
        first = Heard()
        client.submit(request("a"), first)
        with pytest.raises(QueueFullError):
            client.submit(request("b"), Heard())
        with pytest.raises(DataError, match="'a' is under way"):
            client.submit(request("a"), Heard())
        hold.set()
        assert first.end().outcome == "finished"
        server.service.fail_with = "no replica is left"
        ended = ask(client, request("c")).events[-1]
        assert isinstance(ended, Ended) and (ended.outcome, ended.reason) == ("failed", "no replica is left")
        with pytest.raises(SyncError, match="not staged"):
            client.commit(9)
        server.service.closing = True
        with pytest.raises(ServiceError, match="closing"):
            client.submit(request(), Heard())


def test_control_verbs(start: Start) -> None:
    tokens = AccessTokens.of(["i" * 20], ["c" * 20])
    with start(tokens=tokens) as server:
        with RemoteRollouts(server.url, "i" * 20) as client, pytest.raises(ServiceError, match="control_token_needed"):
            client.pause()
        with RemoteRollouts(server.url, "i" * 20, control_token="c" * 20) as client:
            client.pause()
            assert client.status().paused
            client.resume()
            assert client.stage(Source("transfer", "host:1", "t" * 16, "0" * 32), 2)["version"] == 2
            assert client.status().replicas[0].staged == version_of(2)
            client.abort_version(2)
            assert server.service.sources[-1] == Source("transfer", "host:1", "t" * 16, "0" * 32)
            client.stage(Source("shared_memory", "name"), 3)
            assert client.commit(3, "drain") == {"version": 3}
            assert client.status().published == version_of(3)


def test_cancelling_gives_what_there_is(start: Start) -> None:
    with start(FakeService(step_s=0.003)) as server, RemoteRollouts(server.url) as client:
        heard = Heard()
        long = request(stream=True, params=SamplingParams(1.0, 4000, frozenset()))
        client.submit(long, heard)
        while not heard.ids(0):
            heard.next()
        client.cancel(long.id, "not wanted")
        client.cancel("unknown", "nothing happens")
        end = heard.end()
        assert (end.outcome, end.reason) == ("aborted", "not wanted") and len(end.trajectories) == 2
        assert end.trajectories[0].completion_ids.tolist() == heard.ids(0)


def test_a_client_that_closes_leaves_nothing_behind(start: Start) -> None:
    with start(FakeService(step_s=0.003)) as server:
        client, heard = RemoteRollouts(server.url), Heard()
        client.submit(request(params=SamplingParams(1.0, 4000, frozenset())), heard)
        client.close()
        assert heard.end().outcome == "aborted"
        while server.service.under_way:
            threading.Event().wait(0.01)


def test_a_replaced_version_starts_anew(start: Start) -> None:
    with start() as server, RemoteRollouts(server.url) as client:
        hold, reached = threading.Event(), threading.Event()

        def before(asked: RolloutRequest, index: int, at: int) -> None:
            if at == 3 and not hold.is_set():
                reached.set()
                hold.wait(20)

        server.service.before_token = before
        heard = Heard()
        client.submit(request(stream=True), heard)
        assert reached.wait(20)
        server.service.version = version_of(2)
        hold.set()
        end = heard.end()
        starts = [i for i, e in enumerate(heard.events) if isinstance(e, Started)]
        assert len(starts) == 2 and end.trajectories[0].versions.tolist() == [2] * 6
        after = [i for e in heard.events[starts[1] :] if isinstance(e, Tokens) and e.index == 0 for i in e.ids]
        assert after == end.trajectories[0].completion_ids.tolist()


# -- lost connections


class Cut:
    """A relay that breaks connections off after so many bytes of the answer, in turn; None: never."""

    def __init__(self, url: str, cuts: list[int | None]):
        host, port = url.removeprefix("http://").split(":")
        self._target, self._cuts = (host, int(port)), cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Cut:
        self._start(self._accept)
        return self

    def __exit__(self, *unused: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _start(self, f: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=f, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            left = self._cuts[self.connections] if self.connections < len(self._cuts) else None
            self.connections += 1
            far = socket.create_connection(self._target)
            self._start(self._copy, near, far, None)
            self._start(self._copy, far, near, left)

    def _copy(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096 if left is None else max(1, min(4096, left))):
                sink.sendall(data)
                if left is not None and (left := left - len(data)) <= 0:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if left is not None:
            source.close()
            sink.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cuts", [[0], [100], [500, 900, 0], [1500]])
def test_a_lost_connection_is_made_again_and_nothing_comes_twice(start: Start, cuts: list[int | None]) -> None:
    said: list[str] = []
    with start(FakeService(step_s=0.001)) as server, Cut(server.url, cuts) as relay:
        asked = request(stream=True)
        wanted = ask(server.service, asked)
        with RemoteRollouts(relay.url, say=said.append) as client:
            found = ask(client, asked)
        assert relay.connections > len(cuts) and len(said) >= len(cuts)
    for index in (0, 1):
        assert found.ids(index) == wanted.ids(index)
    end, expected = found.events[-1], wanted.events[-1]
    assert isinstance(end, Ended) and isinstance(expected, Ended)
    for a, b in zip(expected.trajectories, end.trajectories, strict=True):
        same(a, b)


def test_a_server_that_is_not_there_is_given_up(tokenizer: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said: list[str] = []
    with RemoteRollouts(f"http://127.0.0.1:{port}", retry_s=0.2, say=said.append) as client:
        with pytest.raises(ServiceError, match="cannot be reached"):
            client.submit(request(), Heard())
        with pytest.raises(ServiceError, match="cannot be reached"):
            client.status()
        with pytest.raises(ServiceError, match="whether it was done"):
            client.commit(3)
    assert said


# -- idempotency keys


def test_the_same_key_gives_the_same_answer_once(server: Running) -> None:
    http, body = server.http(), {"prompt": "abcdef", "max_tokens": 5}
    post = partial(http.post, headers={"idempotency-key": "k1"})
    before = len(server.service.seen)
    first, again = post("/v1/completions", json=body), post("/v1/completions", json=body)
    assert first.content == again.content and again.headers["idempotent-replayed"] == "true"
    assert again.headers["lockstep-policy-digest"] == first.headers["lockstep-policy-digest"]
    assert len(server.service.seen) == before + 1 and server.service.seen[-1].key == "k1/0"
    other = post("/v1/completions", json=body | {"max_tokens": 6})
    assert other.status_code == 409 and other.json()["error"]["code"] == "key_reused"
    stream = {"prompt_ids": [1, 2], "seeds": [3], "max_new_tokens": 4, "stream": True}
    lines = [http.post("/v1/rl/generate", json=stream, headers={"idempotency-key": "k2"}).content for _ in "12"]
    assert lines[0] == lines[1] and lines[0].count(b"\n") >= 3
    assert http.post("/v1/completions", json=body, headers={"idempotency-key": "x" * 256}).status_code == 400


def test_a_key_under_way_can_be_used_later(start: Start) -> None:
    hold = threading.Event()
    with start(limits=Limits(beat_s=0.05)) as server:
        server.service.before_token = lambda *unused: hold.wait(20)
        found: list[int] = []
        post = partial(server.http().post, "/v1/completions", json={"prompt": "a"}, headers={"idempotency-key": "k"})
        thread = threading.Thread(target=lambda: found.append(post().status_code))
        thread.start()
        while not server.service.under_way:
            threading.Event().wait(0.01)
        second = post()
        assert second.status_code == 409 and second.json()["error"]["code"] == "key_under_way"
        assert second.headers["retry-after"]
        hold.set()
        thread.join()
        assert found == [200] and post().headers["idempotent-replayed"] == "true"
        server.service.fail_with = "lost"
        failed = server.http().post("/v1/completions", json={"prompt": "a"}, headers={"idempotency-key": "k3"})
        server.service.fail_with = None
        again = server.http().post("/v1/completions", json={"prompt": "a"}, headers={"idempotency-key": "k3"})
        assert (failed.status_code, again.status_code) == (503, 200), "what failed may be tried again"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/rl/generate"])
def test_an_answer_that_cannot_be_kept_is_not_given(start: Start, tmp_path: Path, path: str) -> None:
    """Its key is free again: made again once there is room, the request gets its answer, and keeps it."""

    class Full(Journal):
        room = False

        def _write(self, line: str) -> None:
            if not self.room:
                raise OSError(28, "No space left on device")
            super()._write(line)

    body = {"prompt": "abc"} if "completions" in path else {"prompt_ids": [1, 2], "seeds": [3], "max_new_tokens": 4}
    journal = Full(tmp_path / "journal", say=lambda line: None)
    with start() as server:
        server.surface.replay = journal
        post = partial(server.http().post, path, json=body | {"seed": 1} if "prompt" in body else body)
        for _ in range(2):
            failed = post(headers={"idempotency-key": "k"})
            assert failed.status_code == 503 and "No space left on device" in failed.json()["error"]["message"]
        journal.room = True
        kept, again = (post(headers={"idempotency-key": "k"}) for _ in range(2))
        assert kept.status_code == 200 and kept.content == again.content
        assert "idempotent-replayed" not in kept.headers and again.headers["idempotent-replayed"] == "true"
    journal.close()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nothing_came_of_is_not_given_again(start: Start, stream: bool) -> None:
    """It is status 200 that says so: aborted by a server that was shut down, or failed once a stream had begun."""
    body = {"prompt_ids": [1, 2], "seeds": [3], "max_new_tokens": 4, "stream": stream}
    hold, found = threading.Event(), []
    with start(limits=Limits(beat_s=0.05)) as server:
        post = partial(server.http().post, "/v1/rl/generate", json=body, headers={"idempotency-key": "k"})
        server.service.before_token = lambda *unused: hold.wait(20)
        thread = threading.Thread(target=lambda: found.append(post()))
        thread.start()
        while not server.service.under_way:
            threading.Event().wait(0.01)
        server.service.cancel(next(iter(server.service.under_way)), "the service was shut down")
        hold.set()
        thread.join()
        assert found[0].status_code == 200 and '"outcome":"aborted"' in found[0].text
        if stream:
            server.service.fail_with = "lost"
            assert '"outcome":"failed"' in post().text
            server.service.fail_with = None
        again = post()
        assert '"outcome":"finished"' in again.text and "idempotent-replayed" not in again.headers
        assert post().headers["idempotent-replayed"] == "true"
