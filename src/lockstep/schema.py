"""From a table of plain values to frozen typed sections, with errors that say what, why and what instead.

Knows nothing of any particular recipe: `config.py` describes the sections, this file reads, overrides, checks,
documents and writes them. Keys are dotted (`optim.lr`); an item of a list is `reward.functions[0].name`.
"""

from __future__ import annotations

import datetime
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, Strict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from lockstep.errors import ConfigError
from lockstep.text import did_you_mean

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), AllowInfNan(False)]
Bool = Annotated[bool, Strict()]


class Section(BaseModel):
    """A table of a recipe: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


SectionT = TypeVar("SectionT", bound=Section)


class Problems(ValueError):
    """Raised by a validator that found several things wrong: each is reported as a problem of its own."""

    def __init__(self, problems: list[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Expects:
    """Annotation metadata: how to say, in an error or in the docs, what the value must be."""

    text: str


PathRule = Literal["no", "always", "marked"]
REQUIRED: Any = PydanticUndefined


def key(
    default: Any, description: str, *, also: tuple[str, ...] = (), path: PathRule = "no", why: str = "", **limits: Any
) -> Any:
    """A key of a section, for its class body.

    also: what other systems call it, for suggestions. path: made absolute on loading; `marked`: only when it contains
    a `/` or starts with `.` or `~`, else it is a name. why: said when a value is beyond the limits. limits: ge, gt, le,
    lt, min_length, pattern.
    """
    extra: dict[str, Any] = {"also": list(also), "path": path, "why": why}
    return Field(default, description=description, json_schema_extra=extra, **limits)


@dataclass(frozen=True)
class Key:
    """One documented key. path: dotted; section: its table; field: type, default, limits, description."""

    path: str
    field: FieldInfo

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def also(self) -> list[str]:
        return self._extra["also"]

    @property
    def path_rule(self) -> PathRule:
        return self._extra["path"]

    @property
    def _extra(self) -> dict[str, Any]:
        extra = self.field.json_schema_extra
        assert isinstance(extra, dict), f"{self.path} was not declared with key()"
        return extra

    @property
    def expected(self) -> str:
        return expected(self.field.annotation, self.field.metadata)

    @property
    def default(self) -> str:
        """As TOML; `required` and `unset` for the two kinds of keys without a value."""
        if self.field.is_required():
            return "required"
        value = self.field.get_default(call_default_factory=True)
        return "unset" if value is None else literal(value)


def keys(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key below `section`, sections first and then what they hold, in order of declaration."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield Key(path, field)
        for inner in sections_in(field.annotation):
            yield from keys(inner, f"{path}{'[]' if is_list(field.annotation) else ''}.")


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def members(annotation: Any) -> list[Any]:
    """The alternatives of a union, flattened; anything else is its only alternative. Annotations are peeled off."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if _is_union(annotation):
        return [m for a in get_args(annotation) for m in members(a)]
    return [annotation]


def sections_in(annotation: Any) -> list[type[Section]]:
    """The section types that a value of this type may be, or may list."""
    found = []
    for member in members(annotation):
        for item in get_args(member)[:1] if is_list(member) else [member]:
            if isinstance(item, type) and issubclass(item, Section):
                found.append(item)
    return found


def accepts_text(annotation: Any) -> bool:
    """Whether a text can be right for this type."""
    return any(m is str or (get_origin(m) is Literal and isinstance(get_args(m)[0], str)) for m in members(annotation))


def find(section: type[Section], path: str) -> FieldInfo | None:
    """The field a dotted path leads to; None where there is none. Below a free table (`options`) any name is right."""
    name, _, rest = path.partition(".")
    name, index, _ = name.partition("[")
    field = section.model_fields.get(name)
    if field is None or not rest:
        return field
    if any(get_origin(m) is get_origin(Mapping[str, Any]) for m in members(field.annotation)):
        return FieldInfo(annotation=object)
    if is_list(field.annotation) and not index:
        return None
    for inner in sections_in(field.annotation):
        return find(inner, rest)
    return None


# ---------------------------------------------------------------- saying things


def literal(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, BaseModel):
        value = plain(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    try:
        return tomli_w.dumps({"v": value})[len("v = ") : -1]
    except TypeError:
        return repr(value)


_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def expected(annotation: Any, metadata: typing.Iterable[Any] = ()) -> str:
    """What a key accepts, in words: `a whole number >= 1`, `one of "constant", "linear", "cosine"`."""
    metadata = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata += more
    said = [m.text for m in metadata if isinstance(m, Expects)]
    if said:
        return said[0]
    return _type_words(annotation) + _limit_words(metadata)


def _type_words(annotation: Any) -> str:
    if annotation is object:
        return "any TOML value"
    if _is_union(annotation):
        return ", or ".join(expected(a) for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is Literal:
        values = [literal(v) for v in get_args(annotation)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if is_list(annotation):
        items = get_args(annotation)
        count = "" if items[-1] is Ellipsis else f" of {len(items)}"
        return f"a list{count}, each item {expected(items[0])}"
    return _WORDS.get(annotation, "a table")


def _limit_words(metadata: list[Any]) -> str:
    words = []
    for sign, attribute in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
        words += [f"{sign} {literal(getattr(m, attribute))}" for m in metadata if hasattr(m, attribute)]
    text = " " + " and ".join(words) if words else ""
    if any(getattr(m, "min_length", 0) for m in metadata):
        text += ", not empty"
    return text


def suggest(section: type[Section], unknown: str) -> str:
    """What an unknown key was probably meant to be, as the end of a sentence; else the keys of its section."""
    known = [k for k in keys(section) if not unknown.startswith(f"{k.path}.")]
    name = unknown.rpartition(".")[2]
    also = [k for k in known if name in k.also]
    near = also or _nearest(known, unknown)
    # A table that occurs inside another one as well (`optim`, `critic.optim`): the outer one's keys are meant.
    near = [k for k in near if not any(k.path.endswith(f".{other.path}") for other in near)]
    if near:
        return "did you mean " + " or ".join(f"`{k.path}`" for k in near) + "?"
    within = unknown.rpartition(".")[0]
    names = [k.name for k in known if k.section == within]
    return (
        f"[{within}] has the keys: {', '.join(names)}"
        if within and names
        else ("the sections are: " + ", ".join(k.name for k in known if not k.section))
    )


def _nearest(known: list[Key], unknown: str) -> list[Key]:
    """The same name in another section, else the closest spelling (in the same section first)."""
    section, _, name = unknown.rpartition(".")
    same = [k for k in known if k.name == name]
    if same:
        return same[:3]

    def score(k: Key) -> float:
        by_name = difflib.SequenceMatcher(None, name, k.name).ratio()
        by_path = difflib.SequenceMatcher(None, unknown, k.path).ratio()
        return by_name + 0.1 if k.section == section else max(by_name, by_path - 0.1)

    best = max(known, key=score)
    return [best] if score(best) >= 0.7 else []


# ---------------------------------------------------------------- checking


def validate(section: type[SectionT], data: Mapping[str, Any], where: str, overridden: Mapping[str, str]) -> SectionT:
    """The table as a section.

    where: named in errors. overridden: key -> the command-line option that set it, named in errors about that key.
    Raises: ConfigError that lists every problem found.
    """
    try:
        return section.model_validate(data)
    except ValidationError as e:
        details = e.errors()
    problems = []
    for detail in details:
        depth = len(detail["loc"])
        if any(len(d["loc"]) > depth and d["loc"][:depth] == detail["loc"] for d in details):
            continue  # a list that is too short only because an item of it was wrong says nothing new
        problems += _problems(section, detail, overridden)
    raise complaint(where, problems)


def complaint(where: str, problems: list[str]) -> ConfigError:
    """One error for one or more problems."""
    if len(problems) == 1:
        return ConfigError(f"{where}: {problems[0]}")
    return ConfigError(f"{where}: {len(problems)} problems\n" + "\n".join(f"  - {p}" for p in problems))


def _problems(section: type[Section], detail: ErrorDetails, overridden: Mapping[str, str]) -> list[str]:
    loc = [p for p in detail["loc"] if not str(p).startswith("<")]  # `<mesh>`: the branch of a union, not a key
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, Problems):
        return cause.problems
    if detail["type"] == "missing" and loc and isinstance(loc[-1], int):
        loc, detail = loc[:-1], {**detail, "type": "too_short"}
    path = _dotted(loc)
    set_by = [f" (set by {o})" for k, o in overridden.items() if path == k or path.startswith((f"{k}.", f"{k}["))]
    return [_sentence(section, loc, path, detail, cause) + "".join(set_by[:1])]


def _sentence(section: type[Section], loc: list[Any], path: str, detail: ErrorDetails, cause: Exception | None) -> str:
    if detail["type"] == "extra_forbidden":
        return f"unknown key `{path}`; {suggest(section, path)}"
    field = find(section, path)
    if detail["type"] == "missing":
        assert field is not None
        return f"`{path}` is required and missing: {field.description}"
    if cause is not None:  # a validator of ours: it says everything, but a field's does not know its own name
        return f"`{path}`: {cause}" if field and not sections_in(field.annotation) else str(cause)
    if field is None:
        return f"`{path}`: {detail['msg']}" if path else detail["msg"]
    annotation, metadata = field.annotation, list(field.metadata)
    if loc and isinstance(loc[-1], int):
        annotation, metadata = get_args(annotation)[0], []
    got = detail["input"]
    words = f"`{path}`: expected {expected(annotation, metadata)}; got {literal(got)}"
    if detail["type"] in _BEYOND:
        words += _why(field)
    allowed = [v for m in members(annotation) if get_origin(m) is Literal for v in get_args(m)]
    if isinstance(got, str) and allowed:
        return words + did_you_mean(got, allowed, show=literal)
    return words + (" (text)" if isinstance(got, str) and not accepts_text(annotation) else "")


_BEYOND = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short", "string_too_short")


def _why(field: FieldInfo) -> str:
    """Why the key has its limits, as the end of a sentence; nothing where that needs no words."""
    extra = field.json_schema_extra
    return f"; {extra['why']}" if isinstance(extra, dict) and extra.get("why") else ""


def _dotted(loc: list[Any]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def toml_value(value: Any) -> Any:
    """Check that a free value can be written as TOML. Raises: ValueError naming the part that cannot."""
    if isinstance(value, Mapping):
        for k, v in value.items():
            if not isinstance(k, str):
                raise ValueError(f"keys must be text, got {k!r}")
            toml_value(v)
    elif isinstance(value, list | tuple):
        for v in value:
            toml_value(v)
    elif isinstance(value, float) and math.isnan(value):
        raise ValueError("nan is not a usable value")
    elif not isinstance(value, str | bool | int | float | datetime.date | datetime.time):
        raise ValueError(f"{value!r} ({type(value).__name__}) cannot be written as TOML")
    return value


# ---------------------------------------------------------------- writing


def plain(section: BaseModel) -> dict[str, Any]:
    """The section as dicts, lists and scalars; keys without a value left out (TOML has no null)."""

    def convert(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return plain(value)
        if isinstance(value, Mapping):
            return {k: convert(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [convert(v) for v in value]
        return value

    values = {name: getattr(section, name) for name in type(section).model_fields}
    return {name: convert(value) for name, value in values.items() if value is not None}
