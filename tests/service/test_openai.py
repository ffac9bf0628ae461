"""The official client against a real server: what it sends is understood, what comes back is what it expects."""

from __future__ import annotations

from lockstep.models.tokenizer import Tokenizer

from .conftest import Running
from .fake import FINGERPRINT, version_of


def test_a_completion_has_text_usage_and_its_policy(server: Running, tokenizer: Tokenizer) -> None:
    raw = server.openai().completions.with_raw_response.create(model="tiny", prompt="Hello", seed=3, max_tokens=7)
    done = raw.parse()
    (choice,) = done.choices
    assert done.object == "text_completion" and choice.finish_reason == "length" and choice.logprobs is None
    assert set(choice.text) <= set("Hello") and len(choice.text) == 7
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (5, 7, 12)
    version = version_of(1)
    assert raw.headers["lockstep-policy-digest"] == version.digest and raw.headers["lockstep-policy-version"] == "1"
    said = done.model_dump()["lockstep"]
    assert (
        said["version"] == 1 and said["digest"] == version.digest and said["request_id"] == raw.headers["x-request-id"]
    )
    assert said["seed"] == 3 and len(said["seeds"]) == 1 and said["fingerprint"]["numerics"] == FINGERPRINT.numerics
    assert done.system_fingerprint == f"lockstep-1-{version.digest[:16]}"
