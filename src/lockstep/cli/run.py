"""`lockstep run` and `lockstep keys`: recipes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.words import Add, run_directory, say
from lockstep.errors import ConfigError
from lockstep.text import did_you_mean

if TYPE_CHECKING:
    from lockstep.supervised_recipe import SupervisedRecipe

_RUN_FLAGS = ("--dry-run", "--traceback", "--help", "-h")
_RUN_VALUES = ("--resume", "--name")
AUDIT_VALUES = ("--json",)


def split_run_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Take the overrides out of the words of `run`, before argparse meets them: it would take `1e-3` of `--optim.lr
    1e-3` for the recipe, and `-1` for an option. Every `--word` that is not an option of `run`, or of `audit`, is an
    override; to `plan`, which has many options, only a `--section.key` is one."""
    command = next((word for word in words if word != "--traceback"), None)
    if command not in ("run", "plan", "audit"):  # what another command does not know, argparse refuses
        return words, []
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    values = AUDIT_VALUES if command == "audit" else _RUN_VALUES
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in _RUN_FLAGS or (command == "plan" and "." not in name):
            own.append(word)
        else:
            kept = own if name in values else overrides
            kept.append(word)
            if not equals and rest:
                kept.append(rest.pop(0))
    return own, overrides


def _run(options: argparse.Namespace) -> None:
    from lockstep.config import Config, load_config
    from lockstep.overrides import apply_overrides
    from lockstep.supervised_recipe import recipe_kind

    overrides = list(options.overrides)
    at = options.recipe if options.resume is None else Path(options.resume) / "recipe.toml"
    if at is not None and (kind := recipe_kind(Path(at))) is not None:
        _run_supervised(options, overrides, kind)
        return
    refuse_mistyped_options(overrides, list(Config.model_fields), (*_RUN_FLAGS, *_RUN_VALUES))
    apply_overrides(Config, {}, overrides, Path.cwd())  # a mistyped key first: it may have swallowed the recipe
    if options.resume is not None:
        _refuse_beside_resume(options)
        resume = run_directory(options.resume)
        config = load_config(resume / "recipe.toml", overrides)
    elif options.recipe is None:
        raise ConfigError("which recipe? expected `lockstep run RECIPE` or `lockstep run --resume DIR`")
    else:
        resume = None
        config = load_config(
            options.recipe, overrides + ([] if options.name is None else [f"--run.name={options.name}"])
        )
    if options.dry_run:
        from lockstep.models.catalog import KNOWN_MODELS
        from lockstep.models.fetch import verified
        from lockstep.train.dry_run import describe

        if config.model.name in KNOWN_MODELS:
            verified(KNOWN_MODELS[config.model.name], say)  # here, where it can say that it downloads
        print(describe(config))
        return
    from lockstep.train.loop import run

    print(f"run directory: {run(config, resume=resume)}")


def _run_supervised(options: argparse.Namespace, overrides: list[str], kind: type[SupervisedRecipe]) -> None:
    """A recipe with a `[reward_model]`, `[sft]` or `[dpo]` table."""
    from lockstep.supervised_recipe import load_supervised

    refuse_mistyped_options(overrides, list(kind.model_fields), (*_RUN_FLAGS, *_RUN_VALUES))
    resume = None
    if options.resume is not None:
        _refuse_beside_resume(options)
        resume = run_directory(options.resume)
    named = [] if options.name is None else [f"--run.name={options.name}"]
    at = options.recipe if resume is None else resume / "recipe.toml"
    recipe = load_supervised(kind, at, overrides + named)
    if options.dry_run:
        from lockstep.train.supervised.run import describe

        print(describe(recipe, say))
        return
    from lockstep.train.supervised.run import run_supervised

    print(f"run directory: {run_supervised(recipe, resume=resume)}")


def _refuse_beside_resume(options: argparse.Namespace) -> None:
    if options.recipe is not None or options.name is not None:
        given = f"recipe {options.recipe}" if options.recipe is not None else f"--name {options.name}"
        raise ConfigError(f"--resume goes on with the run's own recipe and folder; leave out the {given}")


def refuse_mistyped_options(overrides: list[str], sections: list[str], options: Sequence[str]) -> None:
    """`--dryrun` is an option mistyped rather than an unknown key."""
    for word in overrides:
        name = word.partition("=")[0]
        if not name.startswith("--") or "." in name or name.removeprefix("--") in sections:
            continue
        near = did_you_mean(name, options, cutoff=0.75)
        if near:
            raise ConfigError(f"unknown option {name}{near}")


def _keys(options: argparse.Namespace) -> None:
    from lockstep.config import Config
    from lockstep.keydocs import listing, markdown
    from lockstep.schema import Section, keys, suggest
    from lockstep.supervised_recipe import RECIPES

    recipe: type[Section] = Config if options.table is None else RECIPES[options.table]
    if options.markdown:
        print(markdown(recipe), end="")
        return
    shown = [k for k in keys(recipe) if not options.word or options.word in k.path]
    if not shown:
        raise ConfigError(f"no key contains {options.word!r}; {suggest(recipe, options.word)}")
    print(listing(shown))


def add_run(add: Add) -> None:
    run = add(
        "run",
        _run,
        "train",
        usage="lockstep run RECIPE [--section.key VALUE ...] [--name N] [--dry-run]\n"
        "       lockstep run --resume DIR [--section.key VALUE ...]",
        epilog="Any key of the recipe can be given as --section.key VALUE, with the value as in TOML:\n"
        "  lockstep run recipes/addition.toml --optim.lr 1e-3 --rollout.samples 16 --lora none\n"
        "`lockstep keys` explains the keys. A recipe with a [reward_model], [sft] or [dpo] table trains on a file\n"
        "of examples (docs/reward-model.md, docs/sft.md, docs/dpo.md); `lockstep keys --sft` and so on explain them.",
    )
    run.add_argument("recipe", nargs="?", metavar="RECIPE", help="TOML file")
    run.add_argument("--dry-run", action="store_true", help="print what would run, and what it costs; run nothing")
    run.add_argument("--resume", metavar="DIR", help="go on with the run in this directory, bit for bit")
    run.add_argument("--name", metavar="N", help="short for --run.name N")


def add_keys(add: Add) -> None:
    keys = add("keys", _keys, "explain the keys of a recipe")
    keys.add_argument("word", nargs="?", metavar="WORD", help="only keys that contain this, such as optim or tokens")
    keys.add_argument("--markdown", action="store_true", help="as the tables of docs/recipes.md")
    of = keys.add_mutually_exclusive_group()
    of.set_defaults(table=None)
    for option, table, what in (
        ("--reward-model", "reward_model", "a reward model"),
        ("--sft", "sft", "a policy on completions"),
        ("--dpo", "dpo", "a policy on preference pairs"),
    ):
        of.add_argument(option, action="store_const", const=table, dest="table", help=f"of a recipe that trains {what}")
