"""Who may ask, how much, and how slowly."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from lockstep.errors import ConfigError
from lockstep.service.http.guard import check_host
from lockstep.service.http.settings import AccessTokens, Limits, read_tokens

from .conftest import Running, Start
from .fake import FakeService

INFERENCE, CONTROL = "i" * 20, "c" * 20
TOKENS = AccessTokens.of([INFERENCE], [CONTROL])
ASK = {"prompt": "abc", "max_tokens": 3}


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


# -- tokens


def test_each_token_opens_its_own(start: Start) -> None:
    with start(tokens=TOKENS) as server:
        http = server.http()

        def status(method: str, path: str, headers: dict[str, str], body: Any = None) -> int:
            return http.request(method, path, headers=headers, json=body).status_code

        for method, path, body in [
            ("POST", "/v1/completions", ASK),
            ("GET", "/v1/models", None),
            ("GET", "/v1/rl/status", None),
            ("GET", "/metrics", None),
            ("GET", "/openapi.json", None),
        ]:
            assert status(method, path, {}, body) == 401
            assert status(method, path, bearer("x" * 20), body) == 401
            assert status(method, path, {"authorization": f"Basic {INFERENCE}"}, body) == 401
            assert status(method, path, bearer(INFERENCE), body) == status(method, path, bearer(CONTROL), body) == 200
        for path in ("/v1/rl/pause", "/v1/rl/resume"):
            assert [status("POST", path, h, {}) for h in ({}, bearer(INFERENCE), bearer(CONTROL))] == [401, 403, 200]
        assert status("GET", "/health", {}) == status("GET", "/ready", {}) == 200
        assert server.openai(INFERENCE).models.list().data
        with pytest.raises(openai.AuthenticationError):
            server.openai("wrong").models.list()


FILES = {
    "tokens": f"# ours\ninference {INFERENCE}\ncontrol {CONTROL}\nsync {'s' * 16}\n",
    "tokens.json": f'{{"inference": ["{INFERENCE}"], "control": "{CONTROL}"}}',
    "tokens.toml": f'inference = "{INFERENCE}"\ncontrol = ["{CONTROL}"]\n',
}


@pytest.mark.parametrize("name", FILES)
def test_token_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    path.chmod(0o600)
    tokens = read_tokens(path)
    assert [tokens.opens(t) for t in (INFERENCE, CONTROL, "x")] == ["inference", "control", "open"]
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_tokens(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t", "sync short", "the sync token must be at least 16"),
        ("t", f"both {INFERENCE}", "line 1"),
        ("t", f"inference {INFERENCE}\ncontrol {INFERENCE}", "the same"),
        ("t", "", "no token"),
        ("t.json", "[1]", "table"),
        ("t.json", "{", "not valid JSON"),
        ("t.json", '{"inference": 5}', "a text"),
        ("t.toml", f'infernce = "{INFERENCE}"', "unknown 'infernce'"),
    ],
)
def test_wrong_token_files(tmp_path: Path, name: str, content: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=words) as caught:
        read_tokens(path)
    assert INFERENCE not in str(caught.value)


def test_another_host_needs_tokens() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="--token-file"):
            check_host(host, AccessTokens())
        check_host(host, TOKENS)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_host(host, AccessTokens())


# -- web pages


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:80"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[::bad"}, 403),
        ({"host": "localhost:1"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-encoding": "gzip"}, 415),
    ],
)
def test_a_web_page_cannot_ask(server: Running, headers: dict[str, str], status: int) -> None:
    own = {"content-type": "application/json"}
    for path in ("/v1/rl/resume", "/v1/completions"):
        body = b"{}" if "resume" in path else b'{"prompt": "a"}'
        answer = server.http().post(path, content=body, headers=own | headers)
        assert answer.status_code == status and (status == 200 or answer.json()["error"]["message"])
    if status == 403:
        assert server.http().get("/v1/rl/status", headers=headers).status_code == 403


def test_its_own_origin_may(server: Running) -> None:
    headers = {"origin": server.url}
    assert server.http().get("/v1/models", headers=headers).status_code == 200


# -- bodies


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "prompt"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "JSON"),
        (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 3000 + b"}", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 9000 + b"}", "JSON"),
        (b'{"prompt": "a", "max_tokens": 3.5}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": "3"}', "max_tokens"),
        (b'{"prompt": "a", "n": true}', "n"),
        (b'{"prompt": ' + b"[" * 100_000, "JSON"),
        (b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", "prompt"),
        (b'{"prompt": [1, "a"]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": {"a": 1}}', "prompt"),
        (b'{"prompt": "a", "\\u0000": 1}', "unknown field"),
        ('{"prompt": "\ufdd0<|im_end|>"}'.encode(), "FDD0"),
    ],
)
def test_bodies_that_are_no_requests(server: Running, body: bytes, words: str) -> None:
    answer = server.http().post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert len(answer.text) < 2000


def test_a_body_over_the_limit_is_refused_however_it_is_sent(start: Start) -> None:
    with start(limits=Limits(body_bytes=1000)) as server:
        http, headers = server.http(), {"content-type": "application/json"}
        long = b'{"prompt": "' + b"a" * 2000 + b'"}'
        said = http.post("/v1/completions", content=long, headers=headers)
        streamed = http.post("/v1/completions", content=iter([long[:700], long[700:]]), headers=headers)
        assert said.status_code == streamed.status_code == 413
        assert http.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers).status_code == 200


def test_prompts_over_the_limit(start: Start) -> None:
    with start(limits=Limits(prompt_tokens=4)) as server:
        http = server.http()
        for prompt in ("abcde", [1] * 5, ["a", "abcde"], "x" * 600):
            answer = http.post("/v1/completions", json={"prompt": prompt})
            assert (answer.status_code == 400 and "at most 4" in answer.text) or "over the limit" in answer.text
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert http.post("/v1/chat/completions", json=chat).status_code == 400
        assert (
            http.post("/v1/rl/generate", json={"prompt_ids": [1] * 5, "seeds": [1], "max_new_tokens": 1}).status_code
            == 400
        )
        assert http.post("/v1/completions", json={"prompt": "abcd"}).status_code == 200


def test_too_many_calls_at_a_time(start: Start) -> None:
    hold = threading.Event()
    with start(limits=Limits(concurrent=2)) as server:
        server.service.before_token = lambda *unused: hold.wait(20)
        threads = [
            threading.Thread(target=server.http().post, args=("/v1/completions",), kwargs={"json": ASK}) for _ in "12"
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: server.surface.active == 2)
        third = server.http().post("/v1/completions", json=ASK)
        assert third.status_code == 429 and third.headers["retry-after"] == "1"
        assert server.http().get("/health").status_code == 200
        hold.set()
        for thread in threads:
            thread.join()
        assert server.http().post("/v1/completions", json=ASK).status_code == 200


def test_a_request_does_not_wait_for_ever(start: Start) -> None:
    with start(limits=Limits(queue_s=0.05)) as server:
        server.service.pause()
        answer = server.http().post("/v1/completions", json=ASK)
        assert answer.status_code == 503 and answer.headers["retry-after"] and "waited" in answer.text
        assert server.http().get("/ready").status_code == 503
        server.service.resume()
        assert server.http().get("/ready").status_code == 200


# -- slow and half-closed clients


def connect(server: Running, data: bytes = b"") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(data)
    return connection


def head(length: int | None, path: str = "/v1/completions") -> bytes:
    said = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{said}\r\n\r\n".encode()


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


QUICK = Limits(header_s=0.15, body_s=0.15, stall_s=0.15, beat_s=0.05)


def test_a_connection_that_says_nothing_or_little_is_closed(start: Start) -> None:
    with start(limits=QUICK) as server:
        for data in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: local"):
            with connect(server, data) as connection:
                assert read_all(connection) == b""
        with connect(server, head(100) + b'{"prompt"') as connection:
            assert b"408" in read_all(connection)
        with connect(server, head(None) + b'5\r\n{"pro\r\n') as connection:
            assert b"408" in read_all(connection)
        # One that was served is held to the same for its next request.
        with connect(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea") as connection:
            answer = read_all(connection)
            assert answer.count(b"HTTP/1.1 200") == 1
        assert server.service.seen == []


def body(**more: Any) -> bytes:
    content = json.dumps({"prompt": "abc", "max_tokens": 4000, **more}).encode()
    return head(len(content)) + content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_client_that_leaves_is_cancelled(start: Start, how: str, stream: bool) -> None:
    with start(FakeService(step_s=0.005), limits=Limits(beat_s=0.05)) as server:
        with connect(server, body(stream=stream, n=2)) as connection:
            eventually(lambda: len(server.service.under_way) == 1)
            if stream:
                while b"data: " not in connection.recv(65536):
                    pass
            if how == "half-close":
                connection.shutdown(socket.SHUT_WR)
            elif how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if how != "half-close":
                connection.close()
            eventually(lambda: not server.service.under_way)
        assert server.service.ended == {"finished": 0, "aborted": 1, "failed": 0}
        eventually(lambda: server.surface.active == 0)


def test_a_client_that_does_not_read_is_cancelled(start: Start) -> None:
    """It has sent its request and keeps the connection; what it is sent piles up only so far."""
    with start(FakeService(step_s=0.0005, max_positions=10**6, threads=2), limits=QUICK) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        with connection:
            connection.sendall(body(stream=True, n=1, max_tokens=900_000, logprobs=5))
            eventually(lambda: len(server.service.under_way) == 1)
            eventually(lambda: not server.service.under_way)
            eventually(lambda: server.surface.active == 0)
        assert server.service.ended["aborted"] == 1


def test_one_that_leaves_while_its_prompts_are_submitted_leaves_nothing_behind(start: Start) -> None:
    service = FakeService(step_s=0.005)
    inside, submit = threading.Event(), service.submit

    def slow_submit(request: Any, on_event: Any) -> None:
        inside.set()
        time.sleep(0.02)
        submit(request, on_event)

    service.submit = slow_submit  # type: ignore[method-assign]
    with start(service) as server:
        with connect(server, body(prompt=["abc"] * 5)):
            assert inside.wait(20)
        eventually(lambda: len(service.seen) == 5 and not service.under_way)
        assert service.ended["aborted"] == 5


# -- paths


def test_an_offer_needs_its_secret_and_its_digest(start: Start) -> None:
    offer = {"kind": "transfer", "place": "host.example:5000", "token": "t" * 32, "digest": "0" * 32}
    with start() as server:

        def stage(**source: Any) -> tuple[int, str]:
            body = {"source": {k: v for k, v in source.items() if v is not None}, "number": 2}
            answer = server.http().post("/v1/rl/versions/stage", json=body)
            return answer.status_code, answer.text

        assert stage(**offer)[0] == stage(**offer | {"place": "[::1]:5000"})[0] == 200
        for wrong in (
            {"token": None}, {"digest": None}, {"token": "short"}, {"digest": "0" * 31}, {"digest": "X" * 32},
            {"place": "nowhere"}, {"place": "http://host:1"}, {"place": "host:1/x"}, {"place": "user@host:1"},
        ):  # fmt: skip
            status, said = stage(**offer | wrong)
            (field,) = wrong
            assert status == 400 and f"source.{field}" in said and "t" * 32 not in said, wrong
        assert stage(kind="shared_memory", place="segment_1", token="t" * 32)[0] == 400


def test_staged_files_are_inside_the_folder(start: Start, tmp_path: Path) -> None:
    inside, outside = tmp_path / "weights", tmp_path / "weights-other"
    for folder in (inside / "v2", outside / "v2"):
        folder.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "file").write_text("x")
    with start(weights_dir=inside) as server:

        def stage(place: str, kind: str = "files", number: int = 2) -> int:
            request = {"source": {"kind": kind, "place": place}, "number": number}
            return server.http().post("/v1/rl/versions/stage", json=request).status_code

        assert stage("v2") == stage(str(inside / "v2")) == stage("x/../v2" if (inside / "x").exists() else "v2") == 200
        assert [s.place for s in server.service.sources] == [str(inside / "v2")] * 3
        out = ["../weights-other/v2", str(outside / "v2"), "link/v2", "link/none", "../none"]
        out += ["/", "..", ".", "loop", "a\0b"]
        for place in out:
            assert stage(place) == 403, place
        for place, status, said in (
            (
                "v22",
                404,
                "no folder 'v22' in the server's --weights-dir; write the version there first; did you mean 'v2'?",
            ),
            ("v2/none", 404, "no folder 'v2/none'"),
            ("file", 400, "'file' of the server's --weights-dir is a file"),
        ):
            request = {"source": {"kind": "files", "place": place}, "number": 2}
            answer = server.http().post("/v1/rl/versions/stage", json=request)
            assert answer.status_code == status and said in answer.json()["error"]["message"]
            assert str(tmp_path) not in answer.text, "nothing is said of where the folder lies"
        assert stage("segment_1", "shared_memory") == 200
        for place, kind in (("../x", "shared_memory"), ("/x", "shared_memory")):
            assert stage(place, kind) == 400
    with start() as server:
        answer = server.http().post(
            "/v1/rl/versions/stage", json={"source": {"kind": "files", "place": "/"}, "number": 2}
        )
        assert answer.status_code == 403 and "--weights-dir" in answer.text
