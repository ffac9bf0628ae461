"""Stop ids, stop texts and lengths, token by token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.stops import completes, finish_reason
from lockstep.types import SamplingParams


def decode(ids) -> str:
    """Tokens are bytes; what is not UTF-8 shows as U+FFFD, as tokenizers do."""
    return bytes(ids).decode(errors="replace")


texts = st.text(st.sampled_from("ab\n é漢"), max_size=30)


@settings(max_examples=200)
@given(texts, st.lists(st.text(st.sampled_from("ab\n é漢"), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_text_stops_at_the_byte_that_completes_it(text: str, stops: list[str]) -> None:
    ids = list(text.encode())
    first = next((n for n in range(1, len(ids) + 1) if completes(ids[:n], stops, decode)), None)
    whole = [text.find(s) for s in stops]
    ends = [len(text[: at + len(s)].encode()) for at, s in zip(whole, stops, strict=True) if at >= 0]
    assert first == (min(ends) if ends else None)


def test_a_text_may_begin_anywhere_in_the_tokens_before(tiny_folder) -> None:
    tokenizer = Tokenizer.from_hf(tiny_folder)

    def text(ids) -> str:
        return tokenizer.decode(ids, skip_special=False)

    ids = tokenizer.encode("one\n\nQuestion: two")
    stopped = [n for n in range(1, len(ids) + 1) if completes(ids[:n], ["\n\nQ", "n:"], text)]
    assert stopped == [len("one\n\nQ"), len("one\n\nQuestion:")]
    end = tokenizer.encode("<|im_end|>", allow_special=True)
    assert completes([*ids, *end], ["two<|im_end|>"], text), "special tokens are seen, and do not join what they part"
    assert not completes([*tokenizer.encode("tw"), *end, *tokenizer.encode("o")], ["two"], text)


def test_reasons_in_their_order() -> None:
    params = SamplingParams(1.0, 4, frozenset({10}), stop_strings=("ab",), min_new_tokens=2)
    a, b, end = ord("a"), ord("b"), 10
    assert finish_reason([a], params, decode) is None
    assert finish_reason([end], params, decode) is None, "not before min_new_tokens"
    assert finish_reason([b, end], params, decode) == "stop"
    assert finish_reason([a, b], params, decode) == "stop"
    assert finish_reason([a, a, a, b], params, decode) == "stop", "at the last place too"
    assert finish_reason([a, a, a, a], params, decode) == "length"
    assert finish_reason([a, b, a], params, decode) is None, "only what the newest token completes"
