"""The rollout service over HTTP: OpenAI-compatible for everybody, token-in token-out verbs for training.

settings     limits, tokens, what is served
guard        who may ask: hosts, origins, tokens; bodies within limits, JSON without surprises
openai_requests, rl_requests    what may be asked, field by field
answers      what comes back, for the OpenAPI document
sampling     from fields to `SamplingParams` and seeds
detokenise   text of tokens as they come, cut at stop texts
jobs         a call's requests to the service, and its events in the event loop
completions, chat, rl    the verbs
replay       idempotency keys
exchange     one call: reading, answering, streaming, noticing that the other side is gone
app          all verbs as one ASGI application; openapi: its description; metrics: its figures
server       listening, signals, an orderly end
"""

from __future__ import annotations

import importlib.util

from lockstep.errors import ConfigError

NEEDED = ("starlette", "uvicorn", "httpx", "prometheus_client")


def require_serve_extra() -> None:
    """ConfigError naming the extra where a library that serving needs is missing."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"serving needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"install with: pip install 'lockstep-rl[serve]'"
        )
