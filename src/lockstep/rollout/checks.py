"""What an engine refuses before anything is lost: requests that cannot be served, weights that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from lockstep.errors import CapacityError, ConfigError, NumericsError, SyncError
from lockstep.models.spec import Leaf
from lockstep.types import PolicyVersion, Prompt, SamplingParams


def check_sizes(least: Mapping[str, tuple[int, int]], swap: str) -> None:
    """ConfigError for an engine's options. least: name -> (given, the least that makes sense)."""
    for name, (given, allowed) in least.items():
        if isinstance(given, bool) or not isinstance(given, int) or given < allowed:
            raise ConfigError(f"Engine({name}={given!r}): expected an integer >= {allowed}")
    if swap not in ("auto", "always", "never"):
        raise ConfigError(f"Engine(swap={swap!r}): expected 'auto', 'always' or 'never'")


def check_request(
    prompt: Prompt, seeds: Sequence[int], params: SamplingParams, vocab_size: int, max_positions: int, decodes: bool
) -> None:
    """CapacityError for a prompt that is too long or holds an unknown id; ConfigError for parameters without meaning.
    decodes: whether the engine can turn ids into text, which stop texts need."""
    if params.max_new_tokens < (0 if params.prompt_logprobs else 1) or not seeds:
        raise ConfigError(
            f"prompt {prompt.id!r}: {len(seeds)} samples of up to {params.max_new_tokens} tokens leave nothing to "
            f"draw; ask for at least one sample (a seed each) and one new token (none only with prompt_logprobs)"
        )
    if problems := params.problems(vocab_size):
        raise ConfigError(f"prompt {prompt.id!r}: {'; '.join(problems)}")
    if params.stop_strings and not decodes:
        raise ConfigError(f"prompt {prompt.id!r}: the engine was made without `decode`, which stop texts need")
    wrong = [s for s in seeds if not 0 <= s < 1 << 64]
    if wrong:
        raise ConfigError(f"prompt {prompt.id!r}: seed {wrong[0]} is not in 0..2^64-1; derive it by request_seed")
    need = len(prompt.ids) + params.max_new_tokens
    if need > max_positions:
        raise CapacityError(
            f"prompt {prompt.id!r}: {len(prompt.ids)} prompt tokens + {params.max_new_tokens} new tokens = {need} "
            f"positions, the engine was sized for {max_positions}; shorten the prompt or ask for fewer tokens, or "
            f"make room: task.max_prompt_tokens of a recipe, or --max-positions of `lockstep serve`"
        )
    bad = [i for i in prompt.ids if not 0 <= i < vocab_size]
    if bad:
        raise CapacityError(
            f"prompt {prompt.id!r} holds token id {bad[0]}, the model's vocabulary has "
            f"{vocab_size} entries; the tokenizer is not this model's"
        )


def check_leaves(params: Mapping[str, jax.Array], leaves: Mapping[str, Leaf], version: PolicyVersion) -> None:
    """SyncError unless `params` are exactly `leaves`, adapter included, each of its shape."""
    wrong = [f"{path} is missing" for path in leaves if path not in params]
    wrong += [f"{path} is unknown" for path in params if path not in leaves]
    wrong += [
        f"{path} has shape {params[path].shape}, expected {leaf.shape}"
        for path, leaf in leaves.items()
        if path in params and params[path].shape != leaf.shape
    ]
    if wrong:
        raise SyncError(
            f"{version} does not fit the engine ({len(wrong)} of {len(leaves)} leaves): {'; '.join(wrong[:5])}. "
            f"Nothing was installed; pass the base's and the adapter's leaves together, named as in the leaf table"
        )


def require_finite(finite: bool, version: PolicyVersion, dtype: str) -> None:
    """NumericsError where a pass's log-probabilities are not `finite`."""
    if not finite:
        raise NumericsError(
            f"policy {version}: the model's output is not finite; its weights hold NaN or infinity, or overflow in "
            f"{dtype}. Nothing of this pass was recorded"
        )
