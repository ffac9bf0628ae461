"""Tokenizers from folders in Hugging Face layout: every declaration counts, every wrong file is named."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from lockstep.errors import TokenizerError
from lockstep.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny(tiny_metadata):
    return Tokenizer.from_gguf(tiny_metadata())


@pytest.fixture
def folder(tiny, tmp_path):
    """write(file name -> content or None) -> folder with the tiny tokenizer.json and those files."""

    def write(**files):
        (tmp_path / "tokenizer.json").write_text(tiny.to_json(), encoding="utf-8")
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            target = tmp_path / name.replace("__", ".")
            target.write_text(text, encoding="utf-8", newline="")
        return tmp_path

    return write


EOS = {"eos_token": "<|im_end|>"}


def test_a_saved_tokenizer_is_the_same_one(tiny, tmp_path):
    tiny.save(tmp_path / "new")
    loaded = Tokenizer.from_hf(tmp_path / "new")
    assert (loaded.fingerprint, loaded.template_fingerprint) == (tiny.fingerprint, tiny.template_fingerprint)
    for name in ("eos_ids", "bos_id", "adds_bos", "names", "vocab_size"):
        assert getattr(loaded, name) == getattr(tiny, name), name
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_model_that_expects_a_beginning_says_so_after_saving(tiny_metadata, tmp_path):
    Tokenizer.from_gguf(tiny_metadata(**{"tokenizer.ggml.add_bos_token": True})).save(tmp_path)
    assert Tokenizer.from_hf(tmp_path).adds_bos
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.encode("hello").ids[0] == 1  # so other programs add it


@given(st.text(max_size=20))
@settings(max_examples=40)
def test_folder_and_gguf_give_the_same_ids(tiny, tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "same"
    if not path.exists():
        tiny.save(path)
    assert Tokenizer.from_hf(path).encode(text) == tiny.encode(text)


def test_every_declared_end_of_sequence_counts(folder):
    path = folder(
        tokenizer_config__json={"eos_token": {"content": "<|im_end|>", "lstrip": False}},
        generation_config__json={"eos_token_id": [0, 2]},
        config__json={"eos_token_id": 5, "text_config": {"eos_token_id": [6]}},
    )
    assert Tokenizer.from_hf(path).eos_ids == {0, 2, 5, 6}


def test_one_declaration_is_enough(folder):
    assert Tokenizer.from_hf(folder(generation_config__json={"eos_token_id": 0})).eos_ids == {0}
    assert Tokenizer.from_hf(folder(generation_config__json={}, special_tokens_map__json=EOS)).eos_ids == {2}


def test_the_beginning_is_what_the_tokenizer_says(folder):
    config = {"eos_token_id": 2, "bos_token_id": 0}
    assert Tokenizer.from_hf(folder(config__json=config)).bos_id == 0  # nothing else says anything
    named = {"bos_token": "<|im_start|>", **EOS}
    assert Tokenizer.from_hf(folder(config__json=config, tokenizer_config__json=named)).bos_id == 1
    without = {"bos_token": None, **EOS}
    assert Tokenizer.from_hf(folder(config__json=config, tokenizer_config__json=without)).bos_id is None


def test_beginning_of_sequence_is_written_once(tiny, folder):
    backend = tokenizers.Tokenizer.from_str(tiny.to_json())
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    path = folder(
        tokenizer_config__json={"bos_token": "<|im_start|>", **EOS},
        chat_template__jinja="{{ bos_token }}{{ messages[0].content }}",
        tokenizer__json=backend.to_str(),
    )
    tokenizer = Tokenizer.from_hf(path)
    assert tokenizer.adds_bos and tokenizer.encode("hello").count(1) == 0
    assert tokenizer.apply_template([{"role": "user", "content": "hello"}]) == [1, tokenizer.single_id("hello")]
    settings_say_no = {"bos_token": "<|im_start|>", "add_bos_token": False, **EOS}
    assert not Tokenizer.from_hf(
        folder(tokenizer__json=backend.to_str(), tokenizer_config__json=settings_say_no)
    ).adds_bos


def test_a_named_token_is_special_even_where_the_vocabulary_does_not_say(folder):
    tokenizer = Tokenizer.from_hf(folder(tokenizer_config__json={"eos_token": "<think>", "pad_token": "hello"}))
    assert tokenizer.decode([263, tokenizer.single_id("hello")]) == ""
    assert 263 not in tokenizer.encode("<think>")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("hello")] == ["hell", "o"]


def test_padding_and_truncation_in_the_file_do_nothing(tiny, folder):
    backend = tokenizers.Tokenizer.from_str(tiny.to_json())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.from_hf(folder(tokenizer__json=backend.to_str(), tokenizer_config__json=EOS))
    assert tokenizer.encode("abcde") == tiny.encode("abcde") and tokenizer.fingerprint == tiny.fingerprint


def test_ids_need_not_be_dense(tiny, folder):
    content = json.loads(tiny.to_json())
    content["model"]["vocab"]["hello"] = 400
    content["added_tokens"] = content["added_tokens"][:3]
    del content["model"]["vocab"]["<think>"]
    tokenizer = Tokenizer.from_hf(folder(tokenizer__json=content, tokenizer_config__json=EOS))
    assert tokenizer.vocab_size == 401 and tokenizer.encode("hello") == [400]
    assert tokenizer.decode([400, 300]) == "hello\ufffd"


# --- templates ------------------------------------------------------------------------------------------------------


def rendered(path, **options):
    return Tokenizer.from_hf(path, **options).render([{"role": "user", "content": "x"}])


def test_where_a_template_is_found_and_which_wins(folder):
    assert not Tokenizer.from_hf(folder(tokenizer_config__json=EOS)).has_template
    assert rendered(folder(chat_template__json={"chat_template": "json"})) == "json"
    assert rendered(folder(tokenizer_config__json={"chat_template": "config", **EOS})) == "config"
    assert rendered(folder(chat_template__jinja="jinja\r\n{{ eos_token }}")) == "jinja\n<|im_end|>"


def test_named_templates(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    path = folder(tokenizer_config__json={"chat_template": named, **EOS})
    assert rendered(path) == "plain" and rendered(path, template="tool_use") == "tools"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert rendered(path, template="rag") == "rag"
    with pytest.raises(TokenizerError, match=r"no chat template named 'x'; there are \['default', 'rag', 'tool_use'\]"):
        Tokenizer.from_hf(path, template="x")
    only = folder(tokenizer_config__json={"chat_template": named[1:], **EOS})
    with pytest.raises(TokenizerError, match="no chat template named 'default'"):
        Tokenizer.from_hf(only)


# --- wrong files ----------------------------------------------------------------------------------------------------

WRONG = {
    "no eos": ({}, "no end-of-sequence token.*generation_config.json"),
    "eos is no token": ({"tokenizer_config__json": {"eos_token": "</s>"}}, "eos_token is '</s>', which is not in"),
    "eos beyond": ({"config__json": {"eos_token_id": 9999}}, r"ids \[9999\] are not in the vocabulary of 264"),
    "eos is text": ({"config__json": {"eos_token_id": "2"}}, "config.json: eos_token_id must be an integer or a list"),
    "bad JSON": ({"config__json": "{"}, "config.json is not valid JSON"),
    "JSON of another kind": (
        {"generation_config__json": []},
        "generation_config.json must hold a JSON object, found list",
    ),
    "template of another kind": (
        {"tokenizer_config__json": {"chat_template": [1], **EOS}},
        "tokenizer_config.json: chat_template must be text or a list of named texts",
    ),
    "template that does not compile": (
        {"chat_template__jinja": "{% if %}", "config__json": {"eos_token_id": 2}},
        "line 1",
    ),
    "tokenizer.json of another kind": ({"tokenizer__json": "{}"}, "tokenizer.json cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named(folder, case):
    files, message = WRONG[case]
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_hf(folder(**files))


def test_a_missing_tokenizer_says_what_is_needed(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json is missing \(found \['tokenizer.model'\]\).*save_pretrained"
    ):
        Tokenizer.from_hf(tmp_path)
    with pytest.raises(TokenizerError, match="no tokenizer files"):
        Tokenizer.from_hf(tmp_path / "nowhere")


def test_an_added_token_keeps_its_id(tiny, folder):
    backend = tokenizers.Tokenizer.from_str(tiny.to_json())
    backend.add_special_tokens([AddedToken("<|new|>", special=True, normalized=False)])
    tokenizer = Tokenizer.from_hf(folder(tokenizer__json=backend.to_str(), tokenizer_config__json=EOS))
    assert tokenizer.single_id("<|new|>") == 264 and 264 not in tokenizer.encode("<|new|>")
    assert tokenizer.encode_filled("<|new|>{a}", {"a": "<|new|>"}).count(264) == 1
