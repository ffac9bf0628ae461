"""Asking a judge: what is asked, what comes back, and the client of OpenAI-compatible servers.

Imports no jax; httpx when a recipe names a server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.envs.outcome import short
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config import RewardJudge


@dataclass(frozen=True)
class Answer:
    """text: what the judge said. cut: it was stopped at `max_tokens`, and would have said more."""

    text: str
    cut: bool


class AskError(Exception):
    """There is no answer. retry: another try may have one. after_s: not sooner, where the server said so."""

    def __init__(self, why: str, *, retry: bool, after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry, self.after_s = retry, after_s


class Asker(Protocol):
    """Who answers a judge's questions."""

    def identity(self) -> str:
        """What decides an answer besides the question: the model and, where it changes, its version."""
        ...

    async def ask(self, text: str) -> Answer:
        """The answer to a filled rubric, as greedy decoding gives it. Cancelled where it takes too long.

        Raises: AskError.
        """
        ...

    async def close(self) -> None: ...


BUSY = frozenset({408, 409, 425, 429})


class Endpoint:
    """The server at `judge.url`: `/chat/completions`, or `/completions` with template = "plain"."""

    def __init__(self, judge: RewardJudge) -> None:
        """Raises: ConfigError where httpx is not installed, or the API key is not in the environment."""
        try:
            import httpx
        except ImportError as exc:
            raise ConfigError(
                f"judge {judge.name!r} at a `url` needs the package httpx, which cannot be imported ({exc}); install "
                "it with: pip install 'lockstep-rl[judge]'"
            ) from exc
        assert judge.url is not None
        headers = {"Content-Type": "application/json"}
        if judge.api_key_env is not None:
            key = os.environ.get(judge.api_key_env)
            if not key:
                raise ConfigError(
                    f"judge {judge.name!r}: api_key_env names the environment variable {judge.api_key_env}, which is "
                    "not set; set it where the run is started"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._judge = judge
        self._chat = judge.template == "chat"
        self._url = f"{judge.url.rstrip('/')}/{'chat/completions' if self._chat else 'completions'}"
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        limits = httpx.Limits(max_connections=judge.concurrency)
        # No time limits here: the judge has one for everything.
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)

    def identity(self) -> str:
        # Not the address: the same model elsewhere says the same.
        return f"{self._judge.model} {sorted(self._judge.options.items())!r}"

    async def ask(self, text: str) -> Answer:
        try:
            # ASCII, with escapes: texts of models and data may hold surrogates, which UTF-8 cannot.
            response = await self._client.post(self._url, content=json.dumps(self._body(text)).encode())
        except self._errors as error:
            raise AskError(f"{self._url}: {type(error).__name__}: {error}", retry=True) from error
        if response.status_code != 200:
            status = response.status_code
            raise AskError(
                f"{self._url} answered {status}: {short(response.text)}",
                retry=status >= 500 or status in BUSY,
                after_s=_seconds(response.headers.get("Retry-After")),
            )
        try:
            return self._answer(response.json())
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise AskError(
                f"{self._url} sent no completion ({type(error).__name__}: {error}): {short(response.text)}", retry=True
            ) from error

    def _body(self, text: str) -> dict[str, Any]:
        judge = self._judge
        system = [] if judge.system is None else [{"role": "system", "content": judge.system}]
        asked = {"messages": [*system, {"role": "user", "content": text}]} if self._chat else {"prompt": text}
        return {
            "model": judge.model,
            "temperature": 0,
            "max_tokens": judge.max_tokens,
            **asked,
            **judge.options,
        }

    def _answer(self, body: Mapping[str, Any]) -> Answer:
        choice = body["choices"][0]
        text = choice["message"]["content"] if self._chat else choice["text"]
        if not isinstance(text, str):
            raise TypeError(f"the text of the answer is {text!r}")
        # What is not text (half a surrogate pair) cannot be kept, nor shown.
        return Answer(text.encode(errors="replace").decode(), choice.get("finish_reason") == "length")

    async def close(self) -> None:
        await self._client.aclose()


def _seconds(header: str | None) -> float | None:
    """Of a Retry-After header; None where it is absent, or a date."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
