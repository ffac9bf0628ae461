"""From a data row to what the policy sees: the recipe's prompt format, then plain text or the model's chat template.

    plain:  text = prompt.format(fields);                    ids = encode(text), nothing added
    chat:   messages = [system?, user: prompt.format(fields)] ids = the model's template, ready for its answer

Only the recipe's `prompt` is a format string; braces in the data stay what they are. `{question}` stands for the
problem (reasoning-gym's question, or the value of `prompt_column`), every other name for the row's field of that name
(for reasoning-gym: of its metadata). `{answer}` is refused, since it is what the reward compares with.

Imports no jax.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

from lockstep.envs.base import PromptTokenizer, nearest
from lockstep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lockstep.config import TaskConfig

PASS_THROUGH = "{question}"


@dataclass(frozen=True)
class Rendered:
    """A prompt as text and as token ids (at least one)."""

    text: str
    ids: tuple[int, ...]


class Template:
    """The recipe's `template`, `prompt` and `system`, checked once, then applied to every row."""

    def __init__(self, config: TaskConfig, tokenizer: PromptTokenizer):
        """Raises: ConfigError for a prompt format that cannot be used, or a chat template that the model lacks."""
        self._format = config.prompt
        self._names = format_names(config.prompt)
        self._chat = config.template == "chat"
        self._system = config.system
        self._tokenizer = tokenizer
        if self._chat and not tokenizer.has_template:
            raise ConfigError('task.template = "chat", but the model has no chat template; use template = "plain"')

    def describe(self) -> str:
        return "chat prompts" if self._chat else "plain prompts"

    def render(self, question: Any, fields: Mapping[str, Any], where: str) -> Rendered:
        """One row as a prompt.

        question: text, or (chat only) a list of {"role", "content"} messages, which is used as it is.
        fields: what the prompt format may name besides {question}. where: names the row in errors.
        Raises: DataError when the row does not fit the template.
        """
        if isinstance(question, list) and self._chat:
            if self._format != PASS_THROUGH:
                raise DataError(
                    f"{where}: the prompt is a list of messages, to which the format task.prompt = {self._format!r} "
                    "cannot be applied; leave task.prompt out, or give the prompt as text"
                )
            messages = self._messages(question, where)
        elif isinstance(question, str):
            text = self._fill({**fields, "question": question}, where)
            messages = [{"role": "user", "content": text}]
        else:
            wanted = "text, or a list of messages" if self._chat else "text"
            hint = '; messages need task.template = "chat"' if isinstance(question, list) else ""
            raise DataError(
                f"{where}: the prompt must be {wanted}, got {type(question).__name__} {question!r:.80}{hint}"
            )
        if self._chat:
            if self._system is not None:
                messages = [{"role": "system", "content": self._system}, *messages]
            text = self._tokenizer.render(messages)
            ids = tuple(self._tokenizer.apply_template(messages))
        else:
            ids = tuple(self._tokenizer.encode(text))
        if not ids:
            raise DataError(f"{where}: the prompt is empty (no token); the policy needs at least one token to continue")
        return Rendered(text, ids)

    def _fill(self, fields: Mapping[str, Any], where: str) -> str:
        for name in self._names:
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
            return self._format.format_map(fields)
        except (ValueError, TypeError) as exc:
            raise DataError(f"{where}: task.prompt = {self._format!r} does not fit the row: {exc}") from exc

    def _messages(self, messages: list[Any], where: str) -> list[dict[str, Any]]:
        for i, message in enumerate(messages):
            shape = {"role", "content"}
            if not isinstance(message, Mapping) or not shape <= message.keys():
                raise DataError(f"{where}: message {i} must have 'role' and 'content', got {message!r:.120}")
            if not isinstance(message["role"], str) or not isinstance(message["content"], str):
                raise DataError(f"{where}: role and content of message {i} must be text, got {message!r:.120}")
        if not messages or messages[-1]["role"] == "assistant":
            found = "the last one is the assistant's" if messages else "there is none"
            raise DataError(f"{where}: the messages must end with one that the policy is to answer; {found}")
        if self._system is not None and messages[0]["role"] == "system":
            raise DataError(f"{where}: the messages bring their own system message; leave task.system out")
        return [dict(message) for message in messages]


def format_names(template: str) -> Collection[str]:
    """Names of the fields of a prompt format, in order.

    Raises: ConfigError when it is malformed or uses more than plain names (`{a.b}`, `{a[0]}`, `{}`, `{answer}`).
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as exc:
        raise ConfigError(f"task.prompt = {template!r}: {exc}; a literal brace is written {{{{ or }}}}") from exc
    names = [(name, spec or "") for _, name, spec, _ in pieces if name is not None]
    for name, spec in names:
        if not name.isidentifier() or "{" in spec:
            raise ConfigError(
                f"task.prompt = {template!r}: {{{name}}} is not a plain field name; write {{question}} or the name of "
                "a field of the row, and a literal brace as {{ or }}"
            )
        if name == "answer":
            raise ConfigError(
                "task.prompt names {answer}, which would show the policy what the reward compares with; "
                "take it out (a column that is the problem itself is task.prompt_column, and then {question})"
            )
    return list(dict.fromkeys(name for name, _ in names))
