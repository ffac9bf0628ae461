"""What the server says of itself, and how it ends."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from typing import Any

import httpx
import pytest
import schemathesis
from pydantic import BaseModel
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lockstep.errors import ConfigError
from lockstep.service.http import answers, fields, require_serve_extra
from lockstep.service.http.jobs import Bridge, Job
from lockstep.service.http.openapi import statuses
from lockstep.service.http.server import bind
from lockstep.service.http.settings import AccessTokens, Limits
from lockstep.service.http.verbs import VERBS
from lockstep.service.requests import Ended, Started

from .conftest import Running, Start
from .fake import FakeService, version_of


def test_figures_for_prometheus(start: Start) -> None:
    with start() as server:
        http = server.http()
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        http.post("/v1/completions", json={"prompt": "abc", "temperature": -1})
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        lines = answer.text.splitlines()
        for line in (
            'lockstep_http_calls_total{path="/v1/completions",status="200"} 1.0',
            'lockstep_http_calls_total{path="/v1/completions",status="400"} 1.0',
            'lockstep_http_tokens_total{kind="completion"} 4.0',
            'lockstep_requests_ended_total{outcome="finished"} 1.0',
            "lockstep_published_version 1.0",
            'lockstep_replica_pages{replica="replica/0",state="total"} 15.0',
            "lockstep_retired_versions_total 2.0",
            "lockstep_retired_weight_bytes_total 4096.0",
            "lockstep_retired_pages_total 5.0",
            "lockstep_lost_version -1.0",
        ):
            assert line in lines, line
        names = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
        assert all(name.startswith("lockstep_") and not name.endswith("_created") for name in names)
        assert "_created" not in answer.text


def test_a_lost_version_is_not_ready_and_is_named(start: Start) -> None:
    with start() as server:
        server.service.lost = version_of(7)
        answer = server.http().get("/ready")
        assert answer.status_code == 503 and str(version_of(7)) in answer.json()["error"]["message"]
        assert "lockstep_lost_version 7.0" in server.http().get("/metrics").text.splitlines()


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_is_none_is_not_taken_for_another(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port}: expected 0 .* to 65535"):
        bind("127.0.0.1", port).close()


def test_unknown_paths_and_methods(server: Running) -> None:
    http = server.http()
    assert http.get("/v2/x").json()["error"]["code"] == "unknown_path"
    wrong = http.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "wrong_method" and wrong.headers["allow"]


# -- the document


@pytest.fixture(scope="module")
def document(server: Running) -> Any:
    return server.http().get("/openapi.json").json()


def test_every_verb_is_described_with_every_status(document: Any) -> None:
    assert document["openapi"].startswith("3.1")
    for verb in VERBS:
        operation = document["paths"][verb.path][verb.method.lower()]
        assert set(operation["responses"]) == {"200", *map(str, statuses(verb, False))}
    names = {k.__name__ for m in (fields, answers) for k in vars(m).values() if isinstance(k, type)}
    referred = set(document["components"]["schemas"])
    assert {"CompletionRequest", "ChatRequest", "GenerateRequest", "Completion", "Error"} <= referred & names
    assert issubclass(answers.Error, BaseModel)


def test_with_tokens_the_document_says_so(start: Start) -> None:
    with start(tokens=AccessTokens.of(["i" * 20], ["c" * 20])) as server:
        made = server.http().get("/openapi.json", headers={"authorization": f"Bearer {'i' * 20}"}).json()
    assert made["components"]["securitySchemes"] and "401" in made["paths"]["/v1/rl/pause"]["post"]["responses"]


CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)
NOT_NOW = ("/v1/rl/pause",)  # it would stop all others


def test_nothing_that_the_document_allows_makes_the_server_fail(start: Start) -> None:
    """And every answer is one that the document has."""
    from hypothesis import HealthCheck, Phase, given, settings

    with start(FakeService(threads=4), limits=Limits(queue_s=5)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path in NOT_NOW:
                continue

            @given(case=operation.as_strategy())
            @settings(
                max_examples=15, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def call(case: Any) -> None:
                case.call_and_validate(checks=CHECKS)

            call()
        assert server.http().get("/ready").status_code == 200


# -- the end


def test_what_is_in_flight_finishes_and_nothing_new_begins(start: Start) -> None:
    service = FakeService()
    hold, found = threading.Event(), list[Any]()
    service.before_token = lambda *unused: hold.wait(20)
    with start(service, grace_s=20) as server:
        http = server.http()
        ask = {"prompt": "abc", "max_tokens": 3}
        whole = threading.Thread(target=lambda: found.append(http.post("/v1/completions", json=ask)))
        streamed = threading.Thread(
            target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json={**ask, "stream": True}))
        )
        for thread in (whole, streamed):
            thread.start()
        while len(service.under_way) < 2:
            time.sleep(0.01)
        server.thread.server.stop()
        while not service.closing:
            time.sleep(0.01)
        refused = httpx.post(f"{server.url}/v1/completions", json=ask)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        hold.set()
        for thread in (whole, streamed):
            thread.join()
        while server.thread._thread.is_alive():
            time.sleep(0.01)
    assert [a.status_code for a in found] == [200, 200]
    assert any(a.text.endswith("data: [DONE]\n\n") for a in found)
    assert {k: len(v) for k, v in server.thread.report.items()} == {"finished": 2, "aborted": 0, "failed": 0}


def test_what_does_not_finish_in_time_is_told_so(start: Start) -> None:
    service = FakeService(step_s=0.01)
    found: list[Any] = []
    with start(service, grace_s=0.05) as server:
        for stream in (False, True):
            body = {"prompt": "abc", "max_tokens": 4000, "stream": stream}
            post = threading.Thread(
                target=lambda body=body: found.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=20))
            )
            post.start()
        while len(service.under_way) < 2:
            time.sleep(0.01)
    while len(found) < 2:
        time.sleep(0.01)
    assert len(server.thread.report["aborted"]) == 2
    streamed = next(a for a in found if a.status_code == 200)
    refused = next(a for a in found if a.status_code == 503)
    assert refused.json()["error"]["code"] == "aborted"
    assert '"finish_reason":"abort"' in streamed.text and '"code":"aborted"' in streamed.text
    assert "[DONE]" not in streamed.text


def test_told_twice_it_stops_at_once(start: Start) -> None:
    service, hold = FakeService(), threading.Event()
    service.before_token = lambda *unused: hold.wait(20)
    with start(service, grace_s=60) as server:
        connection = httpx.Client()

        def ask() -> None:
            with pytest.raises(httpx.TransportError):
                connection.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)

        post = threading.Thread(target=ask)
        post.start()
        while not service.under_way:
            time.sleep(0.01)
        server.thread.server.stop()
        while not service.closing:
            time.sleep(0.01)
        server.thread.server.stop()
        while server.thread._thread.is_alive():
            time.sleep(0.01)
        assert server.thread.server.forced and service.under_way
        hold.set()
        post.join()
        connection.close()


def test_an_address_that_is_taken(server: Running) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port}"), bind("127.0.0.1", port):
        pass


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_serve_extra()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(ConfigError, match=r"uvicorn, which is not installed.*lockstep-rl\[serve\]"):
        require_serve_extra()


# -- many at a time


def test_events_of_many_are_carried_over_in_bursts() -> None:
    """One waking of the loop for all that came since; in order; none lost."""

    async def run() -> tuple[int, list[list[int]]]:
        loop, wakes = asyncio.get_running_loop(), 0
        jobs = [Job([]) for _ in range(50)]
        bridge = Bridge(loop)
        call_soon = loop.call_soon_threadsafe

        def counted(*args: Any, **more: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return call_soon(*args, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        listeners = [bridge.listener(job, 0) for job in jobs]

        def speak() -> None:
            for number in range(100):
                for listener in listeners:
                    listener(Started(version_of(number), "r"))

        thread = threading.Thread(target=speak)
        thread.start()
        thread.join()  # the loop is not looking meanwhile
        listeners[0](Ended("finished"))
        burst = wakes
        heard = []
        for job in jobs:
            events = await job.take(20)
            heard.append([e.version.number for _, e in events if isinstance(e, Started)])
        return burst, heard

    wakes, heard = asyncio.run(run())
    assert wakes == 1 and heard == [list(range(100))] * 50


@pytest.mark.parametrize("clients", [60])
def test_many_streams_at_once_are_all_whole(start: Start, clients: int) -> None:
    async def run(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            body = {"prompt": "abc", "max_tokens": 20, "stream": True, "seed": 1}
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(clients)))
            return [a.text for a in answers]

    with start(FakeService(threads=clients, step_s=0.001)) as server:
        texts = asyncio.run(run(server.url))
        assert all(t.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in t for t in texts)
        assert server.surface.active == 0 and not server.service.under_way
