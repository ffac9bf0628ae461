"""The command line. Thin: each command reads its words, calls one function of the package, prints what comes back.

Exit codes: 0 done; 2 the user can mend it (a `LockstepError`, printed without a traceback, or wrong words); 3 the
audit was carried out and found something; 130 interrupted; 1 anything else, which is a fault of ours and shows its
traceback.

Everything heavy is imported inside the command that needs it, so `lockstep --help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.cli.audit import add_audit
from lockstep.cli.models import add_generate, add_models
from lockstep.cli.plan import add_plan
from lockstep.cli.results import add_results
from lockstep.cli.run import add_keys, add_run, split_run_words
from lockstep.cli.serve import add_serve
from lockstep.errors import LockstepError
from lockstep.text import did_you_mean, visible

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. argv: the words after `lockstep`; default: those of the process. Returns: the exit code.

    Raises: SystemExit from argparse (0 after help, 2 for wrong words).
    """
    words, overrides = split_run_words(list(sys.argv[1:] if argv is None else argv))
    options, unknown = make_parser().parse_known_args(words)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_probably_meant(options.parser, unknown)}")
    options.overrides = overrides
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a model wrote may hold characters that the terminal's encoding has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int | None = options.command(options)
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
    return code or 0


def _probably_meant(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """What the first unknown option is nearest to, in words."""
    known = [word for action in parser._actions for word in action.option_strings if word.startswith("--")]
    first = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
    return did_you_mean(first, known, cutoff=0.75)


def _failed(options: argparse.Namespace, message: str | None, code: int) -> int:
    """Say why on standard error; None: it was interrupted. Messages quote data and models: shown, never obeyed."""
    if getattr(options, "traceback", False):
        traceback.print_exc()
    else:
        print("interrupted" if message is None else f"error: {visible(message)}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    """`--version`: the version is looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> None:
        import lockstep

        print(f"lockstep {lockstep.__version__}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The words of every command."""
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
        name: str, command: Callable[[argparse.Namespace], int | None], help: str, **more: Any
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=help, description=help, parents=[common], allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter, **more,
        )  # fmt: skip
        sub.set_defaults(command=command, parser=sub)
        return sub

    add_run(add)
    add_models(add, common)
    add_generate(add)
    add_serve(add)
    add_plan(add)
    add_audit(add)
    add_keys(add)
    add_results(add)
    return parser
