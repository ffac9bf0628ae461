"""Nothing written down is wrong: every command in the docs is one, every key of a recipe is read by something."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

import lockstep.cluster_section
import lockstep.environment_section
import lockstep.reward_section
import lockstep.sections
import lockstep.value_sections
from lockstep.algorithm_section import OWN
from lockstep.cli import make_parser
from lockstep.cli.run import split_run_words
from lockstep.config import ROLES, Config, RewardFunction, load_config
from lockstep.overrides import apply_overrides
from lockstep.schema import find, keys, literal, sections_in
from lockstep.supervised_recipe import load_supervised, recipe_kind

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
    words, overrides = split_run_words(shlex.split(line, comments=True)[1:])
    options = make_parser().parse_args(words)
    recipe = getattr(options, "recipe", None)
    if recipe is not None and (ROOT / recipe).is_file():
        kind = recipe_kind(ROOT / recipe)
        load_config(ROOT / recipe, overrides) if kind is None else load_supervised(kind, ROOT / recipe, overrides)
    else:
        apply_overrides(Config, {}, overrides, ROOT)


# ---------------------------------------------------------------- every link leads somewhere


def prose(page: Path) -> str:
    """A page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))


def anchors(page: Path) -> set[str]:
    """What can follow `#` in a link to the page: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def relative_links() -> list[tuple[Path, str]]:
    """(page, target) of every link and picture in Markdown that is not to another site."""
    return [
        (page, target)
        for page in PAGES
        if page.suffix == ".md"
        for target in re.findall(
            r"\]\(\s*<?([^)>\s]+)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\"", prose(page), re.M
        )
        for target in target
        if target and not re.match(r"[a-z][a-z0-9+.-]*:", target)
    ]


def test_relative_links_resolve() -> None:
    links = relative_links()
    assert {page.name for page, _ in links} >= {"README.md", "own-data.md", "dial.md"}
    broken = []
    for page, link in links:
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            broken.append(f"{page.name}: {link}")
    assert broken == []


def test_what_the_protocol_page_names_is_there() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert len(named) > 20
    roots = (ROOT, ROOT / "tests", ROOT / "src" / "lockstep")
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


# ---------------------------------------------------------------- every key is read

DESCRIBING = {
    "sections.py",
    "algorithm_section.py",
    "cluster_section.py",
    "value_sections.py",
    "environment_section.py",
    "reward_section.py",
    "schema.py",
    "keydocs.py",
    "overrides.py",
    "config.py",
}  # a check of a key is no use of it
BY_NAME = {f"cluster.{role}" for role in ROLES}  # `getattr(config.cluster, role)`
TABLES = [
    lockstep.sections,
    lockstep.cluster_section,
    lockstep.environment_section,
    lockstep.reward_section,
    lockstep.value_sections,
]
CLASSES = {cls.__name__: cls for tables in TABLES for cls in vars(tables).values() if isinstance(cls, type)}
SECTIONS = {name: kind for name, f in Config.model_fields.items() for kind in sections_in(f.annotation)}
SECTIONS["settings"] = SECTIONS["algorithm"]  # what an algorithm calls its own


def kind_of(path: str) -> type:
    """The class of the table that a dotted path leads to."""
    field = find(Config, path)
    assert field is not None
    (kind,) = sections_in(field.annotation)
    return kind


def last_name(node: ast.AST) -> str | None:
    """`optim` for `optim`, `config.optim` and `self.config.optim`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def holders(tree: ast.AST) -> dict[str, set[type]]:
    """Names in a module that may hold a section: sections by their own name, annotated names, assigned ones."""
    held: dict[str, set[type]] = {name: {kind} for name, kind in SECTIONS.items()}

    def note(name: str | None, kinds: Iterable[type]) -> None:
        if name is not None:
            held.setdefault(name, set()).update(kinds)

    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            named = {last_name(n) for n in ast.walk(node.annotation)}
            note(
                node.arg if isinstance(node, ast.arg) else last_name(node.target),
                [kind for name, kind in CLASSES.items() if name in named],
            )
        elif isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
            for target, value in pairs:
                note(last_name(target), sections_of(value))
        elif isinstance(node, ast.comprehension | ast.For) and last_name(node.iter) == "functions":
            note(last_name(node.target), [RewardFunction])
    return held


def sections_of(value: ast.AST) -> list[type]:
    """`optim = config.optim` holds [optim]."""
    return [SECTIONS[value.attr]] if isinstance(value, ast.Attribute) and value.attr in SECTIONS else []


def reads_of_properties() -> dict[tuple[type, str], set[str]]:
    """(section class, property or method) -> the keys that it reads of itself."""
    trees = [ast.parse(Path(str(tables.__file__)).read_text()) for tables in TABLES]
    return {
        (CLASSES[cls.name], f.name): {
            n.attr for n in ast.walk(f) if isinstance(n, ast.Attribute) and last_name(n.value) == "self"
        }
        for tree in trees
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for f in cls.body
        if isinstance(f, ast.FunctionDef)
    }


def test_every_key_is_read_by_something() -> None:
    """A key that nothing reads is a promise that nothing keeps. Read: as an attribute of what may hold its section."""
    inside = reads_of_properties()
    read: set[tuple[type, str]] = set()
    for path in (ROOT / "src").rglob("*.py"):
        if path.name in DESCRIBING:
            continue
        tree = ast.parse(path.read_text())
        held = holders(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                for kind in held.get(last_name(node.value) or "", ()):
                    read |= {(kind, node.attr)} | {(kind, name) for name in inside.get((kind, node.attr), ())}
    asked = [k for k in keys(Config) if k.section and not k.path.startswith(tuple(BY_NAME))]
    assert len(asked) > 50
    unread = [k.path for k in asked if not any((kind, k.name) in read for kind in kind_of(k.section).__mro__)]
    assert unread == []


def test_the_defaults_of_algorithms_on_the_page_are_the_code_s() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    written = page.partition("<!-- defaults -->\n")[2].partition("<!-- /defaults -->")[0]
    names = list(dict.fromkeys(key for own in OWN.values() for key in own))
    lines = [f"| key | {' | '.join(f'`{name}`' for name in OWN)} |", "|---" * (len(OWN) + 1) + "|"]
    for key in names:
        cells = (f"`{literal(own[key])}`" if key in own else "" for own in OWN.values())
        lines.append(f"| `{key}` | {' | '.join(cells)} |")
    wanted = "\n".join(lines) + "\n"
    assert written == wanted, f"put this between the marks of docs/algorithms.md:\n{wanted}"
