"""Imports go one way, and what answers fast imports nothing heavy.

    types, errors, files, text, ops; schema, sections, *_section(s), overrides, config, keydocs
      <- models <- cluster <- sync, rollout, algorithms, envs <- service
      <- audit, train, checkpoint, store, metrics, report, plan, progress, environment <- serve <- cli

A module imports from lower layers and from its own package; the one sideways arrow between packages is
rollout -> sync. Within a layer of single files there is no order, but there is never a circle.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
LAYERS = [
    {
        "errors",
        "types",
        "schema",
        "sections",
        "cluster_section",
        "rollout_section",
        "environment_section",
        "algorithm_section",
        "loading",
        "value_sections",
        "supervised_recipe",
        "reward_section",
        "overrides",
        "misfits",
        "config",
        "keydocs",
        "files",
        "text",
        "ops",
    },
    {"models"},
    {"cluster"},
    {"sync", "rollout", "algorithms", "envs"},
    {"service"},
    {"audit", "train", "checkpoint", "store", "metrics", "report", "plan", "progress", "environment"},
    {"serve"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
PACKAGES_OF_ONE_LEVEL = {"sync", "rollout", "algorithms", "envs"}  # no arrows between these, except:
SIDEWAYS = {("rollout", "sync")}
NO_JAX = (
    "config",
    "supervised_recipe",
    "types",
    "errors",
    "schema",
    "cli",
    "envs",
    "models.spec",
    "cluster.roles",
    "cluster.cuts",
    "sync.planner",
    "service.requests",
    "service.protocol",
    "plan",
)
HEAVY = {"jax", "jaxlib", "optax", "orbax"}


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text()) for path in sorted((SRC / "lockstep").rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, *, at_module_level: bool) -> set[str]:
    """Full names of what is imported; `from a import b` gives `a.b` when that is a module of ours, else `a`.

    at_module_level: only what importing the module runs (not in functions, not under TYPE_CHECKING).
    """
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if at_module_level and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node)
        ):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in full}
        found |= imports(node, at_module_level=at_module_level)
    return found


def part(module: str) -> str:
    """`lockstep.sync.plan` -> `sync`; the package itself is ``."""
    return [*module.split("."), ""][1]


def wrong_arrow(importer: str, imported: str) -> str | None:
    """Why one of our modules may not import another; None when it may."""
    here, there = part(importer), part(imported)
    if here in ("", "__main__"):
        return None  # the front doors: everything is behind them
    if there == "":
        return None if importer == "lockstep.cli" else "the package's front door is for users"
    unknown = {here, there} - LEVEL.keys()
    if unknown:
        return f"{unknown} has no layer: put it into LAYERS of this test and into the design"
    if here == there or (here, there) in SIDEWAYS or LEVEL[there] < LEVEL[here]:
        return None
    if LEVEL[there] > LEVEL[here]:
        return "it is in a higher layer"
    return "it is beside it" if here in PACKAGES_OF_ONE_LEVEL else None


@pytest.mark.parametrize("module", MODULES)
def test_arrows_go_one_way(module: str) -> None:
    ours = {name for name in imports(MODULES[module], at_module_level=False) if name.split(".")[0] == "lockstep"}
    wrong = {name: why for name in ours if (why := wrong_arrow(module, name))}
    assert not wrong, f"{module} imports {wrong}"


def test_the_rule_refuses_what_it_should() -> None:
    for importer, imported in [
        ("models.decoder", "cluster.mesh"),
        ("sync.plan", "rollout.engine"),
        ("config", "models.spec"),
        ("train.loop", "cli"),
        ("algorithms.grpo", "envs.base"),
        ("newthing", "errors"),
    ]:
        assert wrong_arrow(f"lockstep.{importer}", f"lockstep.{imported}"), (importer, imported)
    for importer, imported in [
        ("rollout.engine", "sync.plan"),
        ("train.loop", "metrics"),
        ("sync.plan", "sync.verify"),
    ]:
        assert wrong_arrow(f"lockstep.{importer}", f"lockstep.{imported}") is None
    assert wrong_arrow("lockstep.train.loop", "lockstep") is not None


def loaded_by(module: str) -> set[str]:
    """Our modules that run when `module` is imported: itself, its packages, and what they import at module level."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        todo += [name.rpartition(".")[0], *imports(MODULES[name], at_module_level=True)]
    return seen


def test_there_is_no_circle() -> None:
    graph = {
        name: {i for i in imports(tree, at_module_level=True) if i in MODULES and i != name}
        for name, tree in MODULES.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle


@pytest.mark.parametrize("module", NO_JAX)
def test_what_must_stay_light_imports_no_jax(module: str) -> None:
    roots = [name for name in MODULES if f"{name}.".startswith(f"lockstep.{module}.")]
    assert roots, f"lockstep.{module} does not exist"
    for root in roots:
        for name in loaded_by(root):
            heavy = {i for i in imports(MODULES[name], at_module_level=True) if i.split(".")[0] in HEAVY}
            assert not heavy, f"importing {root} runs {name}, which imports {heavy}"


def test_the_interpreter_agrees() -> None:
    """The same, by importing: what the walk over the sources cannot see (third parties) shows here."""
    names = [n for n in MODULES if any(f"{n}.".startswith(f"lockstep.{m}.") for m in NO_JAX)]
    code = (
        f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
