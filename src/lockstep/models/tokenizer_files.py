"""Tokenizers from files: a folder in Hugging Face layout, or the metadata of a GGUF file.

Hugging Face folder:
    tokenizer.json            required: vocabulary, merges, normaliser, pre-tokenizer, added tokens
    tokenizer_config.json     bos_token, eos_token, add_bos_token, chat_template (text, or a list of named ones)
    special_tokens_map.json   bos_token, eos_token, ... where tokenizer_config.json does not say
    generation_config.json    eos_token_id (one or several)
    config.json               eos_token_id, bos_token_id (also under text_config)
    chat_template.jinja, additional_chat_templates/NAME.jinja, chat_template.json
End-of-sequence ids are the union of what all of them declare. A chat template is looked for in chat_template.jinja,
then tokenizer_config.json, then chat_template.json.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from lockstep.errors import TokenizerError
from lockstep.models.chat import ChatTemplate
from lockstep.models.tokenizer import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_hf(folder: Path, template: str, date: datetime.date | None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises TokenizerError naming the file that is missing or wrong."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        found = sorted(p.name for p in folder.glob("*token*")) if folder.is_dir() else []
        raise TokenizerError(
            f"{path} is missing (found {found or 'no tokenizer files'}). Expected the one-file format; write it from "
            "tokenizer.model or vocab.json once with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    settings = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    config, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
    names = _token_names(settings)
    # What the settings name as special is special even where tokenizer.json holds it as an ordinary entry.
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    known = [t for t in names.values() if t not in special and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in known])

    declared = {
        name: _id_of(backend, names[name], name, folder) for name in ("bos_token", "eos_token") if name in names
    }
    eos_ids = {declared["eos_token"]} if "eos_token" in declared else set()
    for where, source in (("generation_config.json", generation), ("config.json", config)):
        for scope in (source, source.get("text_config") or {}):
            eos_ids |= _ids_in(scope.get("eos_token_id"), f"{folder / where}: eos_token_id")
    bos_id = declared.get("bos_token")
    if bos_id is None and not settings:
        bos_id = next(iter(_ids_in(config.get("bos_token_id"), f"{folder / 'config.json'}: bos_token_id")), None)
    adds_bos = settings.get("add_bos_token")
    if adds_bos is None:
        adds_bos = backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    source_text = _find_template(folder, settings, template)
    chat = None if source_text is None else _compile(folder, source_text, names, date)
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        bos_id=bos_id,
        adds_bos=bool(adds_bos) and bos_id is not None,
        names=names,
        template=chat,
        source=str(folder),
    )


def save_hf(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what `load_hf` reads back as the same tokenizer, and what transformers and the inference engines read."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        **tokenizer.names,
    }
    generation: dict[str, Any] = {"eos_token_id": sorted(tokenizer.eos_ids)}
    if tokenizer.bos_id is not None:
        generation["bos_token_id"] = tokenizer.bos_id
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if tokenizer.template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.template.source, encoding="utf-8", newline="")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file (all but tokenizer.json are optional)."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def _token_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; each is written as text, or as an object with its text under `content`."""
    texts = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str) and text:
            texts[name] = text
    return texts


def _id_of(backend: tokenizers.Tokenizer, text: str, name: str, where: Path | str) -> int:
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise TokenizerError(f"{where}: {name} is {text!r}, which is not in the vocabulary")
    return token_id


def _ids_in(value: Any, what: str) -> set[int]:
    """Ids written as one integer, a list of them, or null."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise TokenizerError(f"{what} must be an integer or a list of integers, found {value!r}")
    return set(values)


def _find_template(folder: Path, settings: Mapping[str, Any], name: str) -> str | None:
    """The chat template called `name`, None when the folder has none at all."""
    found: dict[str, str] = {}
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    for where, value in (("chat_template.json", legacy), ("tokenizer_config.json", settings.get("chat_template"))):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list) and all(isinstance(v, dict) and {"name", "template"} <= set(v) for v in value):
            found |= {v["name"]: v["template"] for v in value}
        elif value is not None:
            raise TokenizerError(f"{folder / where}: chat_template must be text or a list of named texts")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = _read_text(path)
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _read_text(folder / "chat_template.jinja")
    if not found and name == "default":
        return None
    if name not in found:
        raise TokenizerError(f"{folder}: no chat template named {name!r}; there are {sorted(found) or 'none'}")
    return found[name]


def _read_text(path: Path) -> str:
    """The file's text with its line ends as they are: they reach the prompt."""
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def _compile(where: Path | str, source: str, names: Mapping[str, str], date: datetime.date | None) -> ChatTemplate:
    try:
        return ChatTemplate(source, names, date)
    except TokenizerError as error:
        raise TokenizerError(f"{where}: {error}") from error


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_then_bytes(numbers: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)])


def _smollm(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)])


def _llama3(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = _split_then_bytes(r"\p{N}{1,3}")
    backend.model.ignore_merges = True  # a word that is a token is that token, whatever the merges give


def _qwen2(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _split_then_bytes(r"\p{N}")


# Name in `tokenizer.ggml.pre` -> how text is cut before merging, as in that family's own tokenizer.json.
PRE_TOKENIZERS: dict[str, Callable[[tokenizers.Tokenizer], None]] = {
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
}


def load_gguf(metadata: Mapping[str, Any], date: datetime.date | None) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata: byte-level BPE with one of `PRE_TOKENIZERS`.

    End-of-sequence ids are the declared eos, eot (end of turn) and eom (end of message). Raises TokenizerError for any
    other kind, by name, and for inconsistent tables.
    """
    where = f"GGUF {metadata.get('general.name', 'file')!r}"
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise TokenizerError(
            f"{where}: tokenizer model {kind!r} is not supported in GGUF, byte-level BPE ('gpt2') is. "
            "Use the model's Hugging Face folder"
        )
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{where}: pre-tokenizer {pre!r} is not supported in GGUF; {sorted(PRE_TOKENIZERS)} are. "
            "Use the model's Hugging Face folder"
        )
    tokens, types, merges = (metadata.get(f"tokenizer.ggml.{k}") for k in ("tokens", "token_type", "merges"))
    if not isinstance(tokens, list) or not isinstance(merges, list) or types is None or len(types) != len(tokens):
        raise TokenizerError(f"{where}: expected tokenizer.ggml.tokens, token_type (equally long) and merges")
    backend = _bpe(where, tokens, merges)
    PRE_TOKENIZERS[pre](backend)
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])

    ids = {k: _gguf_id(where, metadata, k, len(tokens)) for k in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    short = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    names = {name: tokens[i] for name, key in short.items() if (i := ids[key]) is not None}
    template = metadata.get("tokenizer.chat_template")
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False)) and ids["bos"] is not None
    if adds_bos:  # what a saved tokenizer.json says of it; `encode` never adds anything
        backend.post_processor = processors.TemplateProcessing(
            single=[names["bos_token"], "$A"], special_tokens=[(names["bos_token"], ids["bos"])]
        )
    return Tokenizer(
        backend,
        eos_ids={i for k in ("eos", "eot", "eom") if (i := ids[k]) is not None},
        bos_id=ids["bos"],
        adds_bos=adds_bos,
        names=names,
        template=None if template is None else _compile(where, template, names, date),
        source=where,
    )


def _bpe(where: str, tokens: list[str], merges: list[str]) -> tokenizers.Tokenizer:
    vocab = {t: i for i, t in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"{where}: {len(tokens) - len(vocab)} tokens appear twice in tokenizer.ggml.tokens")
    pairs = []
    for merge in merges:
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            raise TokenizerError(f"{where}: merge {merge!r} in tokenizer.ggml.merges is not a pair")
        pairs.append((first, second))
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{where}: tokens and merges do not fit together: {error}") from error


def _gguf_id(where: str, metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
        raise TokenizerError(f"{where}: tokenizer.ggml.{name}_token_id is {value!r}, the file has {num_tokens} tokens")
    return value
