"""`lockstep report` and `lockstep export`: what a run left behind."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.words import Add, run_directory, say


def _report(options: argparse.Namespace) -> None:
    run_dir = run_directory(options.dir)
    from lockstep.report import write_report

    print(write_report(run_dir))


def _export(options: argparse.Namespace) -> None:
    run_dir = run_directory(options.dir)
    from lockstep.train.export import export_run

    export_run(run_dir, Path(options.to), say=say)
    print(options.to)


def add_results(add: Add) -> None:
    report = add("report", _report, "write report.html of a run again")
    report.add_argument("dir", metavar="DIR", help="run directory")
    export = add("export", _export, "write a run's latest weights as a Hugging Face folder")
    export.add_argument("dir", metavar="DIR", help="run directory")
    export.add_argument("--to", metavar="FOLDER", required=True, help="folder to write")
