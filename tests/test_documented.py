"""Nothing written down is wrong: every command in the docs is one, every key of a recipe is read by something."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lockstep.cli import _parser, _split_run_words
from lockstep.config import Config, load_config
from lockstep.overrides import apply_overrides
from lockstep.schema import keys, sections_in

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*.toml")]


def commands() -> list[tuple[str, str]]:
    """(page, line) for every line of a page that runs lockstep: in a block of the docs, in a comment of a recipe."""
    return [
        (page.name, match[1])
        for page in PAGES
        for match in re.finditer(r"^(?:#  +|\$ )?(lockstep .*)$", page.read_text(), re.MULTILINE)
        if page.suffix == ".toml" or page.read_text()[: match.start()].count("```") % 2
    ]


def test_there_are_commands_to_check() -> None:
    assert {page for page, _ in commands()} >= {"recipes.md", "own-data.md", "addition.toml", "own-data.toml"}


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_documented_command_is_one(page: str, line: str) -> None:
    words, overrides = _split_run_words(shlex.split(line, comments=True)[1:])
    options = _parser().parse_args(words)
    recipe = getattr(options, "recipe", None)
    if recipe is not None and (ROOT / recipe).is_file():
        load_config(ROOT / recipe, overrides)
    else:
        apply_overrides(Config, {}, overrides, ROOT)


def test_every_key_is_read_by_something() -> None:
    """A key that nothing reads is a promise that nothing keeps."""
    described = {"sections.py", "schema.py", "keydocs.py", "overrides.py"}
    sources = [p.read_text() for p in (ROOT / "src").rglob("*.py") if p.name not in described]
    read = {name for text in sources for name in re.findall(r"\.([a-z_]+)\b", text)}
    axes = {"data", "fsdp", "tensor"}  # read through `MeshConfig.axes`
    unread = [k.path for k in keys(Config) if not sections_in(k.field.annotation) and k.name not in read | axes]
    assert unread == []
