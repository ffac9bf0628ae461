"""Command-line words such as `--optim.lr 1e-5` as changes to a recipe's table, before it is checked.

A value is TOML; where a text is expected the quotes may be left out (`--run.name trial`). `none` takes an optional
key or table away (`--lora none`). Knows the sections only through `schema.py`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from lockstep.errors import ConfigError
from lockstep.schema import (
    Key,
    Section,
    accepts_text,
    complaint,
    expected,
    find,
    is_list,
    keys,
    literal,
    members,
    sections_in,
    suggest,
)


def split_overrides(words: list[str]) -> list[tuple[str, str]]:
    """[("optim.lr", "1e-5"), ...] from `--optim.lr 1e-5` or `--optim.lr=1e-5`; the dashes may be left out with `=`.

    Raises: ConfigError for a word that is neither a key nor a key's value, and for a key without a value.
    """
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not _is_text(word):
            raise ConfigError(f"override {word!r} is not UTF-8 text")
        if not all(name.split(".")) or name.startswith("-") or not (word.startswith("--") or equals):
            raise ConfigError(f"override {word!r}: expected `--section.key value` or `--section.key=value`")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"override --{name} has no value: expected `--{name} value` or `--{name}=value`")
            value = rest.pop(0)
            if not _is_text(value):
                raise ConfigError(f"the value {value!r} of --{name} is not UTF-8 text")
        pairs.append((name, value))
    return pairs


def _is_text(word: str) -> bool:
    """Bytes of a command line that are not UTF-8 arrive as surrogates, which no file could hold."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


def apply_overrides(section: type[Section], data: dict[str, Any], words: list[str], folder: Path) -> dict[str, str]:
    """Change `data` in place. folder: what relative paths in the overrides start from.

    Returns: key -> the option that set it, for errors about that key.
    Raises: ConfigError listing every unknown key and every value that is not TOML.
    """
    problems, overridden = [], {}
    for name, text in split_overrides(words):
        option = f"--{name}"
        field = find(section, name)
        if listed := _list_above(section, name):
            problems.append(
                f"`{name}`: items of a list cannot be set one by one; give the whole list, --{listed} '[...]'"
            )
            continue
        if field is None:
            problems.append(f"unknown key `{name}` (set by {option}); {suggest(section, name)}")
            continue
        try:
            value = _parse(field, name, text)
        except ConfigError as e:
            problems.append(str(e))
            continue
        overridden[name] = option
        path = name.split(".")
        change: dict[str, Any] = {}
        _set(change, path, value)
        make_paths_absolute(section, change, folder)
        _set(data, path, value if value is _REMOVE else reduce(getitem, path, change))
    if problems:
        raise complaint("command line", problems)
    return overridden


def _list_above(section: type[Section], name: str) -> str | None:
    """The list that a key such as `reward.functions[0].name` or `rollout.stop.0` reaches into."""
    parts = re.split(r"[.\[]", name)
    for i in range(1, len(parts)):
        field = find(section, ".".join(parts[:i]))
        if field is not None and any(is_list(m) for m in members(field.annotation)):
            return ".".join(parts[:i])
    return None


_REMOVE: Any = object()


def _parse(field: FieldInfo, name: str, text: str) -> Any:
    if text == "none" and type(None) in members(field.annotation):
        return _REMOVE
    try:
        table = tomllib.loads(f"value = {text}")
        parsed = list(table) == ["value"]  # a line break in the text could have added keys
    except tomllib.TOMLDecodeError:
        parsed = False
    if accepts_text(field.annotation):
        meant = str | dict if sections_in(field.annotation) else str
        if not parsed or not isinstance(table["value"], meant):
            return text  # 12, 2024-01-01 or true where a text is expected is a text without its quotes
    if not parsed:
        raise ConfigError(
            f"`{name}`: expected {expected(field.annotation, field.metadata)}; got {text}{_hint(field, text)} "
            f"(set by --{name})"
        )
    return table["value"]


def _hint(field: FieldInfo, text: str) -> str:
    """A remedy for what people write instead of TOML."""
    if any(is_list(m) for m in members(field.annotation)) and not text.startswith("["):
        items = (part.strip() for part in text.split(","))
        return f"; a list is written [{', '.join(i if i[:1].isdigit() else literal(i) for i in items)}]"
    if text.lower() in ("true", "false"):
        return f"; write {text.lower()}"
    if text.startswith((".", "-.", "+.")) or text.endswith("."):
        return "; a number has digits on both sides of its point"
    return f"; a text is written {literal(text)}" if field.annotation is object else ""


def _set(data: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for part in parents:
        if not isinstance(data.get(part), dict):
            data[part] = {}  # absent, or a role's name that a mesh replaces
        data = data[part]
    if value is _REMOVE:
        data.pop(last, None)
    else:
        data[last] = value


def make_paths_absolute(section: type[Section], data: Mapping[str, Any], folder: Path) -> None:
    """Make every path in `data` absolute, in place: relative ones start from `folder`. Values of the wrong type are
    left for the check that follows."""
    for k in keys(section):
        *parents, last = k.path.split(".")
        table: Any = data
        for part in parents:
            table = table.get(part) if isinstance(table, dict) else None
        if k.path_rule != "no" and isinstance(table, dict) and isinstance(table.get(last), str):
            table[last] = _absolute(k, table[last], folder)


def _absolute(k: Key, value: str, folder: Path) -> str:
    if k.path_rule == "marked" and not ("/" in value or value.startswith((".", "~"))):
        return value
    return os.path.abspath(folder / Path(value).expanduser())
