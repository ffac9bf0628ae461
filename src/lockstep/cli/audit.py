"""`lockstep audit`: whether a recipe, or a run, is what it says."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from lockstep.cli.run import AUDIT_VALUES, refuse_mistyped_options
from lockstep.cli.words import Add, run_directory, say
from lockstep.errors import ConfigError

EXIT_FOUND = 3


def add_audit(add: Add) -> None:
    audit = add(
        "audit",
        _audit,
        "ask everything that can be wrong with a recipe, or a run: sync, record, tokens, loss",
        usage="lockstep audit RECIPE [--section.key VALUE ...] [--json FILE]\n"
        "       lockstep audit RUN [--section.key VALUE ...] [--json FILE]",
        epilog="RUN is a run directory; it is only read, and may be that of a run that is still going.\n"
        "  lockstep audit recipes/addition.toml --rollout.temperature 0.7\n"
        "  lockstep audit runs/addition --json audit.json\n"
        f"Exit status: 0 nothing failed, {EXIT_FOUND} something did, 2 there is nothing to audit.\n"
        "docs/audit.md explains every check.",
    )
    audit.add_argument("target", metavar="RECIPE|RUN", nargs="?", help="a TOML file, or the directory of a run")
    audit.add_argument("--json", metavar="FILE", help="write the checks as JSON; - : to standard output, not the table")


def _audit(options: argparse.Namespace) -> int:
    from lockstep.config import Config, load_config
    from lockstep.overrides import apply_overrides

    overrides = list(options.overrides)
    refuse_mistyped_options(overrides, list(Config.model_fields), ("--traceback", "--help", *AUDIT_VALUES))
    apply_overrides(Config, {}, overrides, Path.cwd())  # a mistyped key first: it may have swallowed the recipe
    if options.target is None:
        raise ConfigError("which recipe or run? expected `lockstep audit RECIPE` or `lockstep audit RUN`")
    target = Path(options.target)
    run = run_directory(options.target) if target.is_dir() else None
    file = _output(options.json, run)
    config = load_config(target if run is None else run / "recipe.toml", overrides)

    from lockstep.audit.examine import Watch, audit
    from lockstep.files import write_atomic
    from lockstep.train.rundir import keep_compiled_programs

    keep_compiled_programs()
    quiet = options.json == "-"
    watch = Watch(say) if quiet else Watch(say, _shown, lambda check: _shown(check.text()))
    report = audit(config, run, watch)
    if quiet:
        print(report.to_json(), end="")
    else:
        print(report.summary())
    if file is not None:
        if file.exists() and not file.is_file():
            file.write_text(report.to_json())  # a pipe or a device: nothing to replace
        else:
            write_atomic(file, report.to_json().encode())
    return 0 if report.ok else EXIT_FOUND


def _shown(text: str) -> None:
    print(text)
    sys.stdout.flush()


def _output(text: str | None, run: Path | None) -> Path | None:
    """The file to write, known to be writable before minutes are spent, and not in the run that is audited."""
    if text is None or text == "-":
        return None
    path = Path(text)
    if not text or path.is_dir():
        raise ConfigError(f"--json: expected a file to write; {text!r} is {'a folder' if text else 'no name'}")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"--json {path}: cannot be written; change its rights or choose another file")
    if run is not None and path.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"--json {path} is in the run that is audited, which is only read; choose another folder")
    return path
