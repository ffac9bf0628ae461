"""Chat templates: a list of messages becomes the exact text that the model was tuned on.

A template is the model's own Jinja program, run in a sandbox with what such templates expect: `raise_exception`,
`tojson`, `break` and `continue`, `{% generation %}`, `bos_token` and friends. It must be a pure function of its
arguments, because a prompt's identity is part of a trajectory's fingerprint. So nothing in it is random, and there is
no clock: `strftime_now` exists only when a date was given, and always formats that date.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lockstep.errors import TokenizerError

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template.

    source: the Jinja text. variables: what it can refer to by name (`bos_token`, `eos_token`, ...). date: what
    `strftime_now` formats; None leaves `strftime_now` undefined, so a template that tests for it uses its own fixed
    default, and one that insists on it fails with the remedy.

    Raises TokenizerError when the source does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str], date: datetime.date | None = None):
        self.source, self.variables, self.date = source, dict(variables), date
        try:
            self._template = _environment(date).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides a rendering besides the messages: text, variables, date."""
        date = self.date.isoformat() if self.date else None
        content = json.dumps([self.source, sorted(self.variables.items()), date])
        return hashlib.sha256(content.encode()).hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text.

        messages: each has a `role` and usually `content` (text; a list of parts where the template takes them); other
        keys are the template's business. add_generation_prompt: end with the header of the assistant's next turn.

        Raises TokenizerError for malformed messages, and for whatever the template itself raises.
        """
        _check_messages(messages)
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self.variables,
            )
        # A template is a program of the model's author: it can raise anything, and every case means the same.
        except Exception as error:
            remedy = ""
            if "strftime_now" in str(error) and self.date is None:
                remedy = ". It prints today's date, which would change prompts from day to day: give a fixed `date`"
            raise TokenizerError(f"the chat template refused the messages: {error}{remedy}") from error


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not messages:
        raise TokenizerError(
            f"expected a non-empty list of messages ({{'role': ..., 'content': ...}}), got {messages!r}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(f"message {i} must be a mapping with a text 'role' and 'content', got {message!r}")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise TokenizerError(
                f"message {i} ({message['role']}): 'content' must be text, got {type(content).__name__} {content!r}"
            )


def _environment(date: datetime.date | None) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    # The two sources of randomness in Jinja.
    del environment.filters["random"], environment.globals["lipsum"]
    if date is not None:
        midnight = datetime.datetime.combine(date, datetime.time.min)
        environment.globals["strftime_now"] = midnight.strftime
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes `<`, `>`, `&` for HTML, which no model was tuned on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
