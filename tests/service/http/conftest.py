"""A real server on a free port, in a thread, before a service without a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lockstep.models.tokenizer import Tokenizer
from lockstep.service.http.server import HttpServer, ServerThread, bind
from lockstep.service.http.settings import AccessTokens, Limits, Served
from lockstep.service.http.surface import Surface

from .fake import FakeService


@dataclass
class Running:
    url: str
    service: Any
    surface: Surface
    thread: ServerThread
    clients: contextlib.ExitStack

    def http(self, **options: Any) -> httpx.Client:
        return self.clients.enter_context(httpx.Client(base_url=self.url, timeout=20, **options))

    def openai(self, token: str = "none", **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=20, **options)
        return self.clients.enter_context(client)


Start = Callable[..., contextlib.AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_hf(tiny_folder)


@contextlib.contextmanager
def running(
    tokenizer: Tokenizer,
    service: Any = None,
    *,
    limits: Limits | None = None,
    tokens: AccessTokens | None = None,
    weights_dir: Path | None = None,
    grace_s: float = 0.2,
) -> Iterator[Running]:
    decode = partial(tokenizer.decode, skip_special=False)
    service = service or FakeService(decode=decode)
    served = Served("tiny", tokenizer, tokenizer.vocab_size, service.max_positions, weights_dir=weights_dir)
    surface = Surface(service, service, served, limits or Limits(), tokens or AccessTokens())
    server = HttpServer(surface, bind("127.0.0.1", 0), grace_s, "0.0.0")
    with ServerThread(server) as thread, contextlib.ExitStack() as clients:
        yield Running(server.url, service, surface, thread, clients)


@pytest.fixture(scope="session")
def start(tokenizer: Tokenizer) -> Start:
    return partial(running, tokenizer)


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Running]:
    with start() as found:
        yield found
