"""The text of tokens as they come is the text of all of them; stop texts are cut where a slow twin cuts them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.models.tokenizer import Tokenizer
from lockstep.service.http.calls import one_line
from lockstep.service.http.detokenise import LONGEST_HELD, Detokeniser, StopCutter


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, and a special one."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(backend, eos_ids=[256], bos_id=None, adds_bos=False, names={}, template=None, source="bytes")


def metaspace_tokenizer() -> Tokenizer:
    """Words with their space before them, and bytes for what is no word: as SentencePiece models are."""
    vocab = {"<s>": 0, "▁": 1, "▁a": 2, "b": 3, "▁cd": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    d = tokenizers.decoders
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    backend.add_special_tokens([tokenizers.AddedToken("<s>", special=True, normalized=False)])
    return Tokenizer(backend, eos_ids=[0], bos_id=None, adds_bos=False, names={}, template=None, source="metaspace")


BYTES, META = byte_tokenizer(), metaspace_tokenizer()


def pieces(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    d = Detokeniser(tokenizer, before)
    return [*(d.push(i) for i in ids), d.finish()]


def of(text: str) -> list[int]:
    return BYTES.encode(text)


@given(st.text(max_size=30))
def test_text_comes_out_as_it_is_and_as_soon_as_it_can(text: str) -> None:
    ids = of(text)
    found = pieces(BYTES, ids)
    assert "".join(found) == text
    assert "\ufffd" in text or found[-1] == "", "nothing is held back once its bytes are there"


@given(st.lists(st.integers(0, 256), max_size=40), st.lists(st.integers(0, 256), max_size=6))
@example([*of("é")[:1], 256, *of("é")[1:]], [])
@example(of("é")[1:], of("é")[:1])
@example([*of("€")[:2], *of("€")], [])
def test_any_bytes_come_out_as_all_of_them_do(ids: list[int], before: list[int]) -> None:
    """Unless the prompt ends within a character: that one belongs to nobody."""
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)
    if not BYTES.decode(before[-5:]).endswith("\ufffd") and not BYTES.decode(before).endswith("\ufffd"):
        assert "".join(pieces(BYTES, ids, before)) == BYTES.decode(before + ids)[len(BYTES.decode(before)) :]


def test_bytes_that_become_nothing_are_not_decoded_again_and_again() -> None:
    d = Detokeniser(BYTES)
    ids = of("é")[1:] * 1000
    text = "".join(d.push(i) for i in ids)
    assert len(text) >= 1000 - 3 and len(d._ids) <= LONGEST_HELD + 1
    specials = Detokeniser(BYTES)
    assert "".join(specials.push(256) for _ in range(1000)) == "" and len(specials._ids) <= LONGEST_HELD + 1


@given(st.lists(st.integers(1, 4), max_size=20))
def test_words_with_spaces_before_them(ids: list[int]) -> None:
    assert "".join(pieces(META, ids)) == META.decode(ids)
    # After a prompt the first space belongs to the completion.
    assert "".join(pieces(META, ids, [4])) == META.decode([4, *ids])[2:]


@given(st.text("aé€😀", max_size=8))
def test_bytes_of_characters_among_words(text: str) -> None:
    ids = [2, *(5 + b for b in text.encode()), 4]
    assert "".join(pieces(META, ids)) == META.decode(ids) == f"a{text} cd"


def cut_slowly(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Character by character: the first stop text that is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


LETTERS = st.text("ab", min_size=1, max_size=5)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(LETTERS, max_size=4))
@example(["ab", "a", "b"], ["aab", "ab"])
@example(["aXb".replace("X", "a"), "b"], ["aabb", "ab"])
def test_stop_texts_are_cut_wherever_pieces_begin_and_end(parts: list[str], stops: list[str]) -> None:
    cutter = StopCutter(stops)
    found = [cutter.push(p) for p in parts]
    found.append(cutter.finish())
    text, stopped = cut_slowly("".join(parts), stops)
    assert ("".join(found), cutter.stopped) == (text, stopped)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(LETTERS, min_size=1, max_size=4))
def test_no_more_is_held_back_than_could_begin_a_stop_text(parts: list[str], stops: list[str]) -> None:
    cutter, given_out, seen = StopCutter(stops), "", ""
    for part in parts:
        given_out += cutter.push(part)
        seen += part
        if not cutter.stopped:
            held = seen[len(given_out) :]
            assert seen.startswith(given_out) and (not held or any(s.startswith(held) for s in stops))


@given(st.text())
def test_an_event_is_one_line_to_every_reader(text: str) -> None:
    line = one_line({"text": text})
    assert json.loads(line) == {"text": text} and len(line.decode().splitlines()) == 1
