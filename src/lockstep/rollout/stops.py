"""When a completion is over: an id, a text, a length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lockstep.models.tokenizer import Tokenizer
from lockstep.types import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]
MARGIN = 8  # tokens before those that a stop text can span: what decoding does to the start of a text is far away


def split_stops(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """(ids, texts) that end a completion: a text that is exactly one token stands for that token, and only for it; any
    other ends a completion wherever it is completed."""
    encoded = {text: tokenizer.encode(text, allow_special=True) for text in texts}
    ids = frozenset(ids[0] for ids in encoded.values() if len(ids) == 1)
    return ids, tuple(text for text, ids in encoded.items() if len(ids) != 1)


def finish_reason(tokens: Sequence[int], params: SamplingParams, decode: Decode | None) -> FinishReason | None:
    """Why a completion ends with its newest token, or None. decode: text of ids, special tokens included."""
    if len(tokens) >= params.min_new_tokens:
        if tokens[-1] in params.stop_ids:
            return "stop"
        if params.stop_strings and completes(tokens, params.stop_strings, decode):
            return "stop"
    return "length" if len(tokens) >= params.max_new_tokens else None


def completes(tokens: Sequence[int], stops: Sequence[str], decode: Decode | None) -> bool:
    """Whether the newest token completes one of the texts, wherever it begins within the tokens before.

    A text of n bytes spans at most n tokens, so only the newest are decoded, however long the completion is. (A token
    of no text, such as an incomplete character, counts as one byte at least, once it is complete.)
    """
    assert decode is not None, "stop texts need a tokenizer"
    span = max(len(s.encode()) for s in stops)
    newest = tokens[-(span + MARGIN) :]
    text, before = decode(newest), decode(newest[:-1])
    # The newest token may complete a character of which the text before shows a replacement.
    known = len(before.rstrip("\ufffd"))
    return any(text.find(s, max(0, known - len(s) + 1)) >= 0 for s in stops)
