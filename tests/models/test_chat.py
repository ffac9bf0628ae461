"""The chat template language: what templates expect is there; no clock, no randomness, no way out of the sandbox."""

import datetime
from pathlib import Path

import pytest

from lockstep.errors import TokenizerError
from lockstep.models.chat import ChatTemplate
from lockstep.models.tokenizer import Tokenizer


def render(source, content="x", date=None, **options):
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, variables, date).render([{"role": "user", "content": content}], **options)


def test_templates_get_what_they_expect():
    assert render("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}") == "<s>x</s>"
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"  # trim_blocks, lstrip_blocks
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "x!"
    assert render("{{ messages | tojson }}", "<é&") == '[{"role": "user", "content": "<é&"}]'
    assert render("{{ tools | tojson(indent=1) }}", tools=[{"a": 1}]) == '[\n {\n  "a": 1\n }\n]'
    assert render("{% if tools is none and documents is none %}y{% endif %}") == "y"
    assert render("{% if add_generation_prompt %}a{% endif %}b", add_generation_prompt=False) == "b"


def test_a_template_can_refuse():
    with pytest.raises(TokenizerError, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_there_is_no_clock_in_a_prompt():
    date = datetime.date(2025, 3, 9)
    guarded = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}"
    assert render(guarded) == "26 Jul 2024"
    assert render(guarded, date=date) == "09 Mar 2025"
    insisting = "{{ strftime_now('%Y-%m-%d %H:%M') }}"
    assert render(insisting, date=date) == "2025-03-09 00:00"
    with pytest.raises(TokenizerError, match="would change prompts from day to day: give a fixed `date`"):
        render(insisting)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ 'a' + 1 }}", "refused"),
    ],
)
def test_the_sandbox_holds_and_nothing_is_random(source, message):
    with pytest.raises(TokenizerError, match=message):
        render(source)


# ---------------------------------------------------------------- what comes behind a sampled turn


def with_template(tiny_folder: Path, source: str) -> Tokenizer:
    tokenizer = Tokenizer.from_hf(tiny_folder)
    tokenizer.template = ChatTemplate(source, {})
    return tokenizer


CHAT = (
    "{% for m in messages %}<{{ m.role }}>CONTENT<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_continuation_is_what_the_template_writes_behind_a_reply(tiny_folder: Path) -> None:
    history, after = [{"role": "user", "content": "hi"}], [{"role": "tool", "content": "7<|im_end|>"}]
    plain = with_template(tiny_folder, CHAT.replace("CONTENT", "{{ m.content }}"))
    ids, text = plain.continuation(history, " yes ", after, "<|im_end|>")
    assert text == "<tool>7<|im_end|><|im_end|><assistant>"
    ends = [i for i in ids if i == plain.single_id("<|im_end|>")]
    assert len(ends) == 1 and plain.decode(ids, skip_special=False) == text  # in the data it is text
    ids, text = plain.continuation(history, "yes", after)  # stopped by something else: the turn's end is written
    assert text.startswith("<|im_end|><tool>")


def test_trimmed_edges_are_kept_and_a_rewritten_turn_is_refused(tiny_folder: Path) -> None:
    history, after = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "go"}]
    trims = with_template(tiny_folder, CHAT.replace("CONTENT", "{{ m.content | trim }}"))
    assert trims.continuation(history, " yes\n", after, "<|im_end|>")[1] == "<user>go<|im_end|><assistant>"
    strips = with_template(tiny_folder, CHAT.replace("CONTENT", "{{ m.content.split('</think>')[-1] }}"))
    assert strips.continuation(history, "yes", after, "<|im_end|>")[1] == "<user>go<|im_end|><assistant>"
    with pytest.raises(TokenizerError, match=r"rewrites the conversation .* has '<user>hi<\|im_end\|><assistant>yes"):
        strips.continuation(history, "<think>hm</think>yes", after, "<|im_end|>")
    grows = with_template(tiny_folder, "{{ messages | length }}" + CHAT.replace("CONTENT", "{{ m.content }}"))
    with pytest.raises(TokenizerError, match="rewrites the conversation"):
        grows.continuation(history, "yes", after)
