"""From a data row to what the policy sees: the recipe's prompt format, then plain text or the model's chat template.

    plain:  text = prompt.format(fields), after the model's beginning-of-sequence token if it expects one
    chat:   messages = [system?, user: prompt.format(fields)], in the model's template, up to where it is to answer

Only the recipe's `prompt` is a format string; braces in the data stay what they are, and so does the text of a special
token: it is encoded as text, while in a plain `prompt` it is the token. `{question}` stands for the problem
(reasoning-gym's question, or the value of `prompt_column`), every other name for the row's field of that name (for
reasoning-gym: of its metadata). `{answer}` is refused, since it is what the reward compares with.

Imports no jax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.envs.base import PromptTokenizer
from lockstep.errors import ConfigError, DataError, TokenizerError
from lockstep.loading import nearest

if TYPE_CHECKING:
    from lockstep.config import TaskConfig

PASS_THROUGH = "{question}"


@dataclass(frozen=True)
class Rendered:
    """A prompt as text and as token ids (at least one). messages: what a chat template made it from."""

    text: str
    ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()


class Piece(NamedTuple):
    """A part of a prompt format: literal text, then a field (None at the end) with its format spec and conversion."""

    literal: str
    name: str | None
    spec: str
    conversion: str | None


class Template:
    """The recipe's `template`, `prompt` and `system`, checked once, then applied to every row."""

    def __init__(self, config: TaskConfig, tokenizer: PromptTokenizer):
        """Raises: ConfigError for a prompt format that cannot be used, or a chat template that the model lacks."""
        self._format = config.prompt
        self._pieces = format_pieces(config.prompt)
        self._chat = config.template == "chat"
        self._system = config.system
        self._tokenizer = tokenizer
        if self._chat and not tokenizer.has_template:
            raise ConfigError('task.template = "chat", but the model has no chat template; use template = "plain"')
        self._bos = "" if self._chat else _missing_bos(tokenizer, config.prompt)
        # The same format with fields "0", "1", ... that are text already, which is what a tokenizer can tell apart.
        self._numbered = _escape(self._bos) + "".join(
            _escape(piece.literal) + ("" if piece.name is None else f"{{f{i}}}") for i, piece in enumerate(self._pieces)
        )

    def describe(self) -> str:
        return "chat prompts" if self._chat else f"plain prompts{f' after {self._bos}' if self._bos else ''}"

    def render(self, question: Any, fields: Mapping[str, Any], where: str) -> Rendered:
        """One row as a prompt.

        question: text, or (chat only) a list of {"role", "content"} messages, which is used as it is.
        fields: what the prompt format may name besides {question}. where: names the row in errors.
        Raises: DataError when the row does not fit the template.
        """
        if not isinstance(question, str) and not (self._chat and isinstance(question, list)):
            wanted = "text, or a list of messages" if self._chat else "text"
            hint = '; messages need task.template = "chat"' if isinstance(question, list) else ""
            raise DataError(
                f"{where}: the prompt must be {wanted}, got {type(question).__name__} {question!r:.80}{hint}"
            )
        try:
            if isinstance(question, str) and not self._chat:
                messages: tuple[Mapping[str, Any], ...] = ()
                text, ids = self._plain(question, fields, where)
            else:
                messages = self._messages(question, fields, where)
                text, ids = self._tokenizer.render([*messages]), self._tokenizer.apply_template([*messages])
        except TokenizerError as exc:
            raise DataError(f"{where}: {exc}") from exc
        if not ids:
            raise DataError(f"{where}: the prompt is empty (no token); the policy needs at least one token to continue")
        return Rendered(text, tuple(ids), messages)

    def _plain(self, question: str, fields: Mapping[str, Any], where: str) -> tuple[str, list[int]]:
        values = self._values({**fields, "question": question}, where)
        return self._numbered.format(**values), self._tokenizer.encode_filled(self._numbered, values)

    def _messages(
        self, question: str | list[Any], fields: Mapping[str, Any], where: str
    ) -> tuple[Mapping[str, Any], ...]:
        if isinstance(question, list):
            messages = self._own_messages(question, where)
        else:
            values = self._values({**fields, "question": question}, where)
            messages = [{"role": "user", "content": self._numbered.format(**values)}]
        if self._system is not None:
            messages = [{"role": "system", "content": self._system}, *messages]
        return tuple(messages)

    def _values(self, fields: Mapping[str, Any], where: str) -> dict[str, str]:
        """The row's part of the prompt: field "i" is what piece i puts after its literal text."""
        values = {}
        for i, (_, name, spec, conversion) in enumerate(self._pieces):
            if name is None:
                continue
            if name not in fields:
                raise DataError(
                    f"{where}: task.prompt names {{{name}}}, which this row does not have; {nearest(name, fields)}. "
                    "A literal brace is written {{ or }}"
                )
            if not isinstance(fields[name], (str, int, float)):
                raise DataError(
                    f"{where}: task.prompt names {{{name}}}, which is {fields[name]!r:.80} here; "
                    "only text and numbers can be put into a prompt"
                )
            try:
                values[f"f{i}"] = format(Formatter().convert_field(fields[name], conversion), spec)
            except ValueError as exc:
                raise DataError(f"{where}: {{{name}}} in task.prompt does not fit {fields[name]!r:.80}: {exc}") from exc
        return values

    def _own_messages(self, messages: list[Any], where: str) -> list[dict[str, Any]]:
        if self._format != PASS_THROUGH:
            raise DataError(
                f"{where}: the prompt is a list of messages, to which the format task.prompt = {self._format!r} "
                "cannot be applied; leave task.prompt out, or give the prompt as text"
            )
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise DataError(f"{where}: message {i} must have 'role' and 'content', got {message!r:.120}")
            if not isinstance(message["role"], str) or not isinstance(message["content"], str):
                raise DataError(f"{where}: role and content of message {i} must be text, got {message!r:.120}")
        if not messages or messages[-1]["role"] == "assistant":
            found = "the last one is the assistant's" if messages else "there is none"
            raise DataError(f"{where}: the messages must end with one that the policy is to answer; {found}")
        if self._system is not None and messages[0]["role"] == "system":
            raise DataError(f"{where}: the messages bring their own system message; leave task.system out")
        return [dict(message) for message in messages]


def _missing_bos(tokenizer: PromptTokenizer, prompt: str) -> str:
    """Text of the token that the model expects before plain text, unless the recipe's prompt begins with it itself."""
    if not tokenizer.adds_bos or tokenizer.bos_id is None:
        return ""
    bos = tokenizer.decode([tokenizer.bos_id], skip_special=False)
    return "" if prompt.startswith(bos) else bos


def _escape(literal: str) -> str:
    return literal.replace("{", "{{").replace("}", "}}")


def format_pieces(template: str) -> Sequence[Piece]:
    """A prompt format taken apart.

    Raises: ConfigError when it is malformed or uses more than plain names (`{a.b}`, `{a[0]}`, `{}`), or `{answer}`.
    """
    try:
        pieces = [
            Piece(text, name, spec or "", conversion) for text, name, spec, conversion in Formatter().parse(template)
        ]
    except ValueError as exc:
        raise ConfigError(f"task.prompt = {template!r}: {exc}; a literal brace is written {{{{ or }}}}") from exc
    for _, name, spec, conversion in pieces:
        if name is None:
            continue
        if not name.isidentifier() or "{" in spec or conversion not in (None, "r", "s", "a"):
            raise ConfigError(
                f"task.prompt = {template!r}: {{{name}}} is not a plain field name; write {{question}} or the name of "
                "a field of the row, and a literal brace as {{ or }}"
            )
        if name == "answer":
            raise ConfigError(
                "task.prompt names {answer}, which would show the policy what the reward compares with; "
                "take it out (a column that is the problem itself is task.prompt_column, and then {question})"
            )
    return pieces
