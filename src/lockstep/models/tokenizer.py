"""Text to token ids and back, and chat messages to token ids, exactly as the model was tuned.

Three rules keep a prompt's identity:
  * `encode` adds nothing. A chat template writes its own beginning-of-sequence token, so none is ever doubled.
  * Ids that were sampled are never re-made from text; `decode` is for people and rewards.
  * Text is data. The text of a special token (`<|im_end|>`) inside a prompt, a data row or a message is encoded as
    ordinary text and cannot end a turn or open another role; only the template, or a caller who says
    `allow_special=True`, writes real ones.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any

import tokenizers

from lockstep.errors import TokenizerError
from lockstep.models.chat import ChatTemplate, Message

# Marks text that is data. A Unicode noncharacter: never in well-formed interchange text, and no tokenizer has it.
_MARK = "\ufdd0"
# Control tokens by their looks, whether or not the tokenizer flags them special.
_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_BRACKETED = re.compile(r"<.*>|\[.*\]", re.DOTALL)


class Tokenizer:
    """A tokenizer with its end-of-sequence ids and its chat template.

    eos_ids: every id that ends a sequence. bos_id: the beginning-of-sequence id, if the model has one. adds_bos: the
    model expects `bos_id` before plain text (`encode` does not write it). vocab_size: the largest id plus one.
    has_template: whether `render` and `apply_template` can be used. names: texts of the named special tokens
    (`bos_token`, `eos_token`, `unk_token`, `pad_token`, as far as there are any).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        bos_id: int | None,
        adds_bos: bool,
        names: Mapping[str, str],
        template: ChatTemplate | None,
        source: str,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.names, self.template, self.source = backend, dict(names), template, source
        ids = set(backend.get_vocab(with_added_tokens=True).values())
        if not ids:
            raise TokenizerError(f"{source}: the vocabulary is empty")
        self.vocab_size = max(ids) + 1
        self._holes = frozenset(range(self.vocab_size)) - ids
        self.eos_ids, self.bos_id, self.adds_bos = frozenset(eos_ids), bos_id, adds_bos
        if not self.eos_ids:
            raise TokenizerError(
                f"{source}: no end-of-sequence token is declared, so nothing would ever stop. "
                "Expected eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json"
            )
        outside = sorted(i for i in self.eos_ids | ({bos_id} if bos_id is not None else set()) if i not in ids)
        if outside:
            raise TokenizerError(
                f"{source}: declared bos/eos ids {outside} are not in the vocabulary of {self.vocab_size} tokens"
            )
        self._protected = self._protected_texts()
        texts = "|".join(re.escape(t) for t in sorted(self._protected, key=len, reverse=True))
        self._protected_at = re.compile(f"(?={texts})" if texts else r"(?!)")
        self._unmarked = re.compile(f"(?<!{_MARK})({texts})" if texts else r"(?!)()")
        # What the end of one piece of data may hold of a protected text that the next piece completes.
        self._beginnings = frozenset(t[:n] for t in self._protected for n in range(1, len(t)))

    @classmethod
    def from_hf(cls, folder: str | Path, template: str = "default", date: datetime.date | None = None) -> Tokenizer:
        """From a folder in Hugging Face layout. See `lockstep.models.tokenizer_files.load_hf` for the files it reads.

        template: which of several named chat templates. date: see `ChatTemplate`.
        """
        from lockstep.models.tokenizer_files import load_hf

        return load_hf(Path(folder), template, date)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], date: datetime.date | None = None) -> Tokenizer:
        """From the metadata of a GGUF file. See `lockstep.models.tokenizer_files.load_gguf` for what is supported."""
        from lockstep.models.tokenizer_files import load_gguf

        return load_gguf(metadata, date)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer, template and end-of-sequence ids into a folder in Hugging Face layout."""
        from lockstep.models.tokenizer_files import save_hf

        save_hf(self, Path(folder))

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        return self._backend.to_str(pretty=True)

    @property
    def has_template(self) -> bool:
        return self.template is not None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides ids: vocabulary, merges, added tokens, normaliser, pre-tokenizer, decoder."""
        content = json.loads(self._backend.to_str())
        for unused in ("truncation", "padding", "post_processor"):
            content.pop(unused, None)
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def template_fingerprint(self) -> str:
        """SHA-256 (hex) of the chat template, its variables and its date; of a fixed text when there is no template."""
        return self.template.fingerprint if self.template else hashlib.sha256(b"no chat template").hexdigest()

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`, nothing added.

        allow_special: the text of a special token becomes that token. Only for text that you wrote yourself.

        Raises TokenizerError for text that is not valid Unicode.
        """
        if allow_special or not isinstance(text, str) or not self._protected_at.search(text):
            return self._ids(self._backend, text)
        return self._ids(self._literal, self._without_mark(text))

    def encode_prompt(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of a prompt's text, the beginning-of-sequence token before them where the model expects one."""
        ids = self.encode(text, allow_special=allow_special)
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_filled(self, template: str, fields: Mapping[str, str]) -> list[int]:
        """Ids of `template.format(**fields)`: special tokens written in the template are tokens, their text in the
        fields is text.

        Raises TokenizerError when the template names a field that `fields` lacks.
        """
        parts = []
        try:
            for literal, field, spec, conversion in Formatter().parse(template):
                parts.append(self._wrap_unmarked(self._without_mark(literal)))
                if field is not None:
                    slot = f"{{{field}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"
                    parts.append(self._without_mark(slot.format(**fields)))
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise TokenizerError(
                f"the template {template!r} cannot be filled from the fields {sorted(fields)}: {error!r}. "
                "A literal brace is written twice"
            ) from error
        wrapped = "".join(parts)
        if _MARK in wrapped or self._protected_at.search(wrapped):
            return self._ids(self._literal, wrapped)
        return self._ids(self._backend, wrapped)

    def single_id(self, text: str) -> int:
        """The id of a text that must be exactly one token, special or not (a stop token).

        Raises TokenizerError showing how the text is cut otherwise.
        """
        ids = self.encode(text, allow_special=True)
        if len(ids) != 1:
            pieces = [self.decode([i], skip_special=False) for i in ids]
            raise TokenizerError(f"{text!r} must be exactly one token of this model, it is {len(ids)}: {pieces}")
        return ids[0]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`, for people and rewards. skip_special: leave special tokens out.

        An id without a token (models pad their embedding beyond the vocabulary) decodes to U+FFFD, as bytes that are
        not UTF-8 do. Raises TokenizerError for a negative id.
        """
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise TokenizerError(f"token ids must not be negative, found {min(ids)}")
        parts = []
        for unknown, run in groupby(ids, key=lambda i: i >= self.vocab_size or i in self._holes):
            run_ids = list(run)
            decoded = self._backend.decode(run_ids, skip_special_tokens=skip_special) if not unknown else ""
            parts.append("\ufffd" * len(run_ids) if unknown else decoded)
        return "".join(parts)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text, by the model's chat template. For ids use `apply_template`, not `encode` of this.

        Raises TokenizerError when there is no template or it refuses the messages.
        """
        if self.template is None:
            raise TokenizerError(
                f"{self.source} has no chat template: expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json. Use the task template 'plain', or an instruction-tuned model"
            )
        return self.template.render(messages, add_generation_prompt, tools)

    def apply_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        allow_special: bool = False,
    ) -> list[int]:
        """Ids of the conversation. Special tokens come from the template alone; their text in a message is text.

        allow_special: trust the messages, as `encode` does. Raises as `render`.
        """
        plain = self.render(messages, add_generation_prompt, tools)
        marked_messages, marked_tools = self._mark(messages), self._mark(tools)
        if allow_special or (marked_messages == messages and marked_tools == tools):
            return self._ids(self._backend, plain)
        return self._encode_marked(self.render(marked_messages, add_generation_prompt, marked_tools), plain)

    def continuation(
        self, history: Sequence[Message], reply: str, after: Sequence[Message], ended: str = ""
    ) -> tuple[list[int], str]:
        """(ids, text) of what the template puts behind a reply: its end, the messages `after` it, and the header of the
        assistant's next turn. The reply itself keeps the ids that it was sampled as.

        history: the messages before the reply. ended: text of the stop token that the reply was sampled with, which is
        not written twice. Raises TokenizerError where the template does not extend what was there: it rewrites an
        earlier turn (strips its thinking, say), so that no continuation of the sampled ids is the conversation. White
        space at either end of the reply may be trimmed.
        """
        turns = [*history, {"role": "assistant", "content": reply}, *after]
        text = self._behind(self.render(history), self.render(turns), reply).removeprefix(ended)
        marked_turns: list[Message] = self._mark(turns)
        if marked_turns == turns:
            return self._ids(self._backend, text), text
        before, marked_reply = self.render(self._mark(history)), self._mark(reply)
        marked = self._behind(before, self.render(marked_turns), marked_reply).removeprefix(ended)
        return self._encode_marked(marked, text), text

    def _behind(self, before: str, whole: str, reply: str) -> str:
        """What comes after `before` and the reply in `whole`."""
        for written in (reply, reply.strip()):
            if whole.startswith(before + written):
                return whole[len(before) + len(written) :]
        wanted = before + reply
        at = next((i for i, (a, b) in enumerate(zip(wanted, whole, strict=False)) if a != b), len(whole))
        raise TokenizerError(
            f"the chat template of {self.source} rewrites the conversation when a turn is added: where the policy read "
            f"and wrote {wanted[max(0, at - 40) : at + 40]!r}, it has {whole[max(0, at - 40) : at + 40]!r}. So the "
            "sampled tokens would not be what the next turn reads. Use a template that keeps every turn as it was, or "
            'task.template = "plain"'
        )

    def with_date(self, date: datetime.date | None) -> Tokenizer:
        """The same tokenizer with its template's date set (see `ChatTemplate`)."""
        template = self.template and ChatTemplate(self.template.source, self.template.variables, date)
        return Tokenizer(
            self._backend,
            eos_ids=self.eos_ids,
            bos_id=self.bos_id,
            adds_bos=self.adds_bos,
            names=self.names,
            template=template,
            source=self.source,
        )

    def _protected_texts(self) -> frozenset[str]:
        """Texts that data must not be able to turn into tokens: special tokens, `<|...|>`, and bracketed added tokens
        that the template writes (some families do not flag their role markers special)."""
        added = self._backend.get_added_tokens_decoder().values()
        written = self.template.source if self.template else ""
        return frozenset(
            t.content
            for t in added
            if t.special or _CONTROL.fullmatch(t.content) or (t.content in written and _BRACKETED.fullmatch(t.content))
        )

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, except that a protected token is written between two marks. In unmarked text it finds
        none, and everything else (normaliser, spaces around tokens, merges) is the same code with the same ids."""
        content = json.loads(self._backend.to_str())
        content["post_processor"] = None  # names special tokens, and adds only what `encode` never adds

        def wrap(text: str) -> str:
            return f"{_MARK}{text}{_MARK}" if text in self._protected else text

        for token in content["added_tokens"]:
            token["content"] = wrap(token["content"])
        model = content["model"]
        if model.get("unk_token") is not None:
            model["unk_token"] = wrap(model["unk_token"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {wrap(text): i for text, i in model["vocab"].items()}
        else:
            model["vocab"] = [[wrap(text), score] for text, score in model["vocab"]]
        if "merges" in model:  # a special token that is also a word must not come out of merging that word
            model["merges"] = [(a, b) for a, b in model["merges"] if not self._protected & {a, b, a + b}]
        try:
            literal = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{self.source}: special tokens cannot be encoded as plain text: {error}") from error
        moved = [t for t in self._protected if literal.token_to_id(wrap(t)) != self._backend.token_to_id(t)]
        if moved:
            raise TokenizerError(f"{self.source}: special tokens {sorted(moved)} cannot be encoded as plain text")
        return literal

    def _mark(self, value: Any, key: str = "") -> Any:
        """`value` (messages, tools: nested lists and mappings) with a mark before every protected text in it, and
        before an ending that could grow into one (not in a role, which templates compare)."""
        if isinstance(value, str):
            at = {m.start() for m in self._protected_at.finditer(value)}
            if key != "role":
                longest = max(map(len, self._beginnings), default=0)
                at |= {i for i in range(max(0, len(value) - longest), len(value)) if value[i:] in self._beginnings}
            if at:
                self._without_mark(value)
            return "".join(_MARK + c if i in at else c for i, c in enumerate(value)) if at else value
        if isinstance(value, Mapping):
            return {self._mark(k): self._mark(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(v) for v in value]
        return value

    def _encode_marked(self, marked: str, plain: str) -> list[int]:
        """Ids of `plain`, where protected texts that `marked` marks are text and the others are tokens."""
        # A template that looks into the data (cuts it, counts it, escapes it) may have treated marked text differently.
        if marked.replace(_MARK, "") != plain:
            raise TokenizerError(
                "the messages hold the text of special tokens, and the template changes it so that it cannot be told "
                "from tokens. Remove it from the data, or pass allow_special=True if the data is trusted"
            )
        return self._ids(self._literal, self._wrap_unmarked(marked))

    def _wrap_unmarked(self, text: str) -> str:
        """`text` with every protected text that has no mark before it wrapped for `_literal`, and no marks."""
        pieces = self._unmarked.split(text)  # text, token, text, token, ..., text
        return "".join(f"{_MARK}{p}{_MARK}" if i % 2 else p.replace(_MARK, "") for i, p in enumerate(pieces))

    def _without_mark(self, text: str) -> str:
        if _MARK in text:
            raise TokenizerError(f"text holds both a special token's text and the noncharacter U+FDD0: {text[:80]!r}")
        return text

    def _ids(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            return backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise TokenizerError(f"expected text that is valid Unicode, got {text!r:.80}") from error
