"""The command line. Thin: each command reads its words, calls one function of the package, prints what comes back.

Exit codes: 0 done; 2 the user can mend it (a `LockstepError`, printed without a traceback, or wrong words);
130 interrupted; 1 anything else, which is a fault of ours and shows its traceback.

Everything heavy is imported inside the command that needs it, so `lockstep --help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError, ConfigError, LockstepError, ModelError
from lockstep.text import did_you_mean, visible

if TYPE_CHECKING:
    from lockstep.types import Trajectory

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. argv: the words after `lockstep`; default: those of the process. Returns: the exit code.

    Raises: SystemExit from argparse (0 after help, 2 for wrong words).
    """
    words, overrides = _split_run_words(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(words)
    options.overrides = overrides
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a model wrote may hold characters that the terminal's encoding has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left (`| head`): nothing is wrong, and nobody is there to be told. Python would flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except LockstepError as e:
        return _failed(options, str(e), EXIT_USER_ERROR)
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        return _failed(options, f"{where}{e.strerror or e} (--traceback shows where)", EXIT_USER_ERROR)
    except KeyboardInterrupt:
        return _failed(options, None, EXIT_INTERRUPTED)
    return 0


def _failed(options: argparse.Namespace, message: str | None, code: int) -> int:
    """Say why on standard error; None: it was interrupted. Messages quote data and models: shown, never obeyed."""
    if getattr(options, "traceback", False):
        traceback.print_exc()
    else:
        print("interrupted" if message is None else f"error: {visible(message)}", file=sys.stderr)
    return code


# ---------------------------------------------------------------- run

_RUN_FLAGS = ("--dry-run", "--traceback", "--help", "-h")
_RUN_VALUES = ("--resume", "--name")


def _split_run_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Take the overrides out of the words of `run`, before argparse meets them: it would take `1e-3` of `--optim.lr
    1e-3` for the recipe, and `-1` for an option. Every `--word` that is not an option of `run` is an override."""
    command = next((word for word in words if word != "--traceback"), None)
    if command != "run":  # what another command does not know, argparse refuses
        return words, []
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in _RUN_FLAGS:
            own.append(word)
        else:
            kept = own if name in _RUN_VALUES else overrides
            kept.append(word)
            if not equals and rest:
                kept.append(rest.pop(0))
    return own, overrides


def _run(options: argparse.Namespace) -> None:
    from lockstep.config import Config, load_config
    from lockstep.overrides import apply_overrides

    overrides = list(options.overrides)
    _refuse_mistyped_options(overrides, list(Config.model_fields))
    apply_overrides(Config, {}, overrides, Path.cwd())  # a mistyped key first: it may have swallowed the recipe
    if options.resume is not None:
        if options.recipe is not None or options.name is not None:
            given = f"recipe {options.recipe}" if options.recipe is not None else f"--name {options.name}"
            raise ConfigError(f"--resume goes on with the run's own recipe and folder; leave out the {given}")
        resume = _run_directory(options.resume)
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
        from lockstep.train.plan import describe

        if config.model.name in KNOWN_MODELS:
            verified(KNOWN_MODELS[config.model.name], _say)  # here, where it can say that it downloads
        print(describe(config))
        return
    from lockstep.train.loop import run

    print(f"run directory: {run(config, resume=resume)}")


def _refuse_mistyped_options(overrides: list[str], sections: list[str]) -> None:
    """`--dryrun` is an option mistyped rather than an unknown key."""
    for word in overrides:
        name = word.partition("=")[0]
        if not name.startswith("--") or "." in name or name.removeprefix("--") in sections:
            continue
        near = did_you_mean(name, [*_RUN_FLAGS, *_RUN_VALUES], cutoff=0.75)
        if near:
            raise ConfigError(f"unknown option {name}{near}")


def _run_directory(text: str) -> Path:
    """A folder that a run was written into. Raises: CheckpointError naming the runs that are there."""
    path = Path(text)
    if (path / "recipe.toml").is_file():
        return path
    what = "is not a run directory (it has no recipe.toml)" if path.is_dir() else "does not exist"
    for folder in dict.fromkeys([path, path.parent, Path("runs")]):
        runs = sorted(str(p.parent) for p in folder.glob("*/recipe.toml"))
        if runs:
            raise CheckpointError(f"{path} {what}; runs in {folder}: {', '.join(runs[:10])}")
    raise CheckpointError(f"{path} {what}; expected the folder of a run, such as runs/addition")


# ---------------------------------------------------------------- the other commands


def _keys(options: argparse.Namespace) -> None:
    from lockstep.config import Config
    from lockstep.keydocs import listing, markdown
    from lockstep.schema import keys, suggest

    if options.markdown:
        print(markdown(Config), end="")
        return
    shown = [k for k in keys(Config) if not options.word or options.word in k.path]
    if not shown:
        raise ConfigError(f"no key contains {options.word!r}; {suggest(Config, options.word)}")
    print(listing(shown))


def _models_list(options: argparse.Namespace) -> None:
    from lockstep.models.catalog import list_models

    for model in list_models():
        print(model)


def _models_fetch(options: argparse.Namespace) -> None:
    from lockstep.models.catalog import known_model
    from lockstep.models.fetch import fetch

    print(fetch(known_model(options.name), say=_say))


def _models_check(options: argparse.Namespace) -> None:
    from lockstep.models.catalog import known_model
    from lockstep.models.fetch import check

    result = check(known_model(options.name))
    if result.status != "ok":
        raise ModelError(str(result))
    print(result)


def _generate(options: argparse.Namespace) -> None:
    from lockstep.rollout.generate import generate

    trajectories = generate(
        options.model,
        options.prompt,
        chat=options.chat,
        samples=options.samples,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop=options.stop,
        numerics_mode=options.numerics,
        say=_say,
    )
    alone = len(trajectories) == 1
    for number, trajectory in enumerate(trajectories):
        if not alone:
            prompt, sample = divmod(number, options.samples)
            print(_heading(trajectory, prompt, sample))
        print(_shown(trajectory.text))


def _shown(text: str) -> str:
    """What a model wrote: on a terminal it cannot move the cursor or change colours; a pipe gets it as it is."""
    return visible(text) if sys.stdout.isatty() else text


def _say(line: str) -> None:
    """Tell the user what takes long, apart from the output."""
    print(line, file=sys.stderr, flush=True)


def _heading(trajectory: Trajectory, prompt: int, sample: int) -> str:
    """The line above one of several completions."""
    mean = float(trajectory.logprobs.mean()) if len(trajectory.logprobs) else math.nan
    return (
        f"--- prompt {prompt + 1}, sample {sample + 1}: {len(trajectory.completion_ids)} tokens, "
        f"{trajectory.finish_reason}, mean log-probability {mean:.3f} ---"
    )


def _report(options: argparse.Namespace) -> None:
    run_dir = _run_directory(options.dir)
    from lockstep.report import write_report

    print(write_report(run_dir))


def _export(options: argparse.Namespace) -> None:
    run_dir = _run_directory(options.dir)
    from lockstep.train.export import export_run

    export_run(run_dir, Path(options.to), say=_say)
    print(options.to)


# ---------------------------------------------------------------- words


class _Version(argparse.Action):
    """`--version`: the version is looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> None:
        import lockstep

        print(f"lockstep {lockstep.__version__}")
        parser.exit()


def _number(kind: Callable[[str], Any], minimum: float, words: str) -> Callable[[str], Any]:
    """An argparse type: a finite number that is at least `minimum`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= minimum):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}")
        return value

    return parse


def _escaped(text: str) -> str:
    r"""A text in which \n, \t and \\ stand for what they stand for in a recipe: shells hand them on as they are."""
    parts = text.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\t", "\t") for part in parts)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error was raised"
    )
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="RL post-training for language models on JAX: sampler and trainer agree bit for bit.",
        parents=[common],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, command: Callable[[argparse.Namespace], None], help: str, **more: Any
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=help, description=help, parents=[common], allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter, **more,
        )  # fmt: skip
        sub.set_defaults(command=command)
        return sub

    _add_run(add)
    _add_models(add, common)
    _add_generate(add)
    keys = add("keys", _keys, "explain the keys of a recipe")
    keys.add_argument("word", nargs="?", metavar="WORD", help="only keys that contain this, such as optim or tokens")
    keys.add_argument("--markdown", action="store_true", help="as the tables of docs/recipes.md")
    report = add("report", _report, "write report.html of a run again")
    report.add_argument("dir", metavar="DIR", help="run directory")
    export = add("export", _export, "write a run's latest weights as a Hugging Face folder")
    export.add_argument("dir", metavar="DIR", help="run directory")
    export.add_argument("--to", metavar="FOLDER", required=True, help="folder to write")
    return parser


_Add = Callable[..., argparse.ArgumentParser]


def _add_run(add: _Add) -> None:
    run = add(
        "run",
        _run,
        "train",
        usage="lockstep run RECIPE [--section.key VALUE ...] [--name N] [--dry-run]\n"
        "       lockstep run --resume DIR [--section.key VALUE ...]",
        epilog="Any key of the recipe can be given as --section.key VALUE, with the value as in TOML:\n"
        "  lockstep run recipes/addition.toml --optim.lr 1e-3 --rollout.samples 16 --lora none\n"
        "`lockstep keys` explains the keys.",
    )
    run.add_argument("recipe", nargs="?", metavar="RECIPE", help="TOML file")
    run.add_argument("--dry-run", action="store_true", help="print what would run, and what it costs; run nothing")
    run.add_argument("--resume", metavar="DIR", help="go on with the run in this directory, bit for bit")
    run.add_argument("--name", metavar="N", help="short for --run.name N")


def _add_models(add: _Add, common: argparse.ArgumentParser) -> None:
    models = add("models", _models_list, "list, fetch and check the models that have a name")
    actions = models.add_subparsers(title="actions", metavar="ACTION")
    actions.add_parser("list", help="the known names (also without an action)", parents=[common])
    for name, command, help in (
        ("fetch", _models_fetch, "download a model and verify it"),
        ("check", _models_check, "verify the files of a model that was fetched"),
    ):
        action = actions.add_parser(name, help=help, description=help, parents=[common])
        action.add_argument("name", metavar="NAME")
        action.set_defaults(command=command)


def _add_generate(add: _Add) -> None:
    generate = add("generate", _generate, "sample completions from a model")
    generate.add_argument(
        "model", metavar="MODEL", help="a known name, a folder in Hugging Face layout, or a .gguf file"
    )
    generate.add_argument("--prompt", metavar="TEXT", action="append", required=True, help="can be repeated")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    count = _number(int, 1, "a whole number >= 1")
    generate.add_argument("--max-new-tokens", metavar="N", type=count, default=128, help="at most (default: 128)")
    generate.add_argument(
        "--temperature",
        metavar="T",
        type=_number(float, 0, "a number >= 0"),
        default=1.0,
        help="0: greedy (default: 1)",
    )
    generate.add_argument("--samples", metavar="N", type=count, default=1, help="completions per prompt (default: 1)")
    generate.add_argument(
        "--seed", metavar="N", type=_number(int, 0, "a whole number >= 0"), default=0, help="default: 0"
    )
    generate.add_argument(
        "--stop", metavar="TEXT", type=_escaped, action="append", default=[],
        help=r"end at this text, one token; \n is a line break; can be repeated",
    )  # fmt: skip
    generate.add_argument("--numerics", choices=("exact", "fast"), default="exact", help="default: exact")
