"""A run directory under audit: clean as it was left, and with each of its files wrong in one way."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lockstep import store
from lockstep.audit import runs
from lockstep.audit.check import Finding
from lockstep.audit.runs import StoredRun
from lockstep.audit.subject import Subject
from lockstep.cli import main
from lockstep.config import load_config
from lockstep.train.loop import run
from lockstep.types import Prompt, Trajectory


@pytest.fixture(scope="module")
def finished(kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, with a checkpoint after 2 and 3. Not to be written to."""
    where = tmp_path_factory.mktemp("runs")
    return run(kit.config(f"--run.dir={where}"), console=Console(file=StringIO(), width=200))


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def subject(with_adapter, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(with_adapter.cluster(), tmp_path_factory.mktemp("subject"), with_adapter.recipe)


def stored(path: Path) -> StoredRun:
    return StoredRun(path, load_config(path / "recipe.toml"))


def content(path: Path) -> dict[str, str]:
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def rewrite(path: Path, name: str, line: int, **values: object) -> None:
    """Change values of one line of a log."""
    lines = (path / name).read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | values)
    (path / name).write_text("\n".join(lines) + "\n")


def resample(path: Path, step: int, change: Callable[[Trajectory], Trajectory]) -> None:
    """Change the first trajectory of a step."""
    folder = path / "trajectories"
    record = store.read_step(folder, step)
    first, *others = record.trajectories
    prompts = [Prompt(name, text, (0,)) for name, text in record.prompts.items()]
    store.write_step(folder, step, [change(first), *others], record.extra, prompts=prompts)


def test_the_command_on_a_clean_run(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(finished)
    code = main(["audit", str(finished), "--json", str(tmp_path / "audit.json")])
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "audit.json").read_text())
    assert code == 0, shown
    assert found["ok"] and {c["status"] for c in found["checks"]} == {"pass"}
    assert all(c["name"] in shown for c in found["checks"]) and "35 passed, 0 failed, 0 not applicable" in shown
    assert content(finished) == before


def test_what_a_clean_run_is_recomputed_from(subject: Subject, finished: Path) -> None:
    found = runs.run_recompute(subject, stored(finished))
    assert found.status == "pass" and "step 3 under checkpoint 2: max |d| 0 nats" in found.figure


TAMPERED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a reward that is not the mean": (
        lambda p: rewrite(p, "metrics.jsonl", 1, reward=0.25), "run_metrics", "step 2: reward: logged 0.25"
    ),
    "a number that is missing": (
        lambda p: rewrite(p, "metrics.jsonl", 0, **{"kl/k3": None}), "run_metrics", "step 1: kl/k3: logged None"
    ),
    "a version that was skipped": (
        lambda p: rewrite(p, "receipts.jsonl", 2, version=7), "run_receipts", "published before it was 7"
    ),
    "bytes that were not planned": (
        lambda p: rewrite(p, "receipts.jsonl", 2, bytes_planned=5), "run_receipts", "5 bytes were planned, 0 moved"
    ),
    "a sample of an older policy": (
        lambda p: resample(p, 2, lambda t: replace(t, versions=t.versions - 1)), "run_versions", "versions [0]"
    ),
    "a record that is not the trainer's": (
        lambda p: resample(p, 2, lambda t: replace(t, logprobs=t.logprobs + np.float32(0.5))),
        "run_record",
        "max |d| 0.5 nats",
    ),
    "a sample that others drew": (
        lambda p: resample(p, 3, lambda t: replace(t, logprobs=t.logprobs - np.float32(1))),
        "run_recompute",
        "step 3 under checkpoint 2: max |d| 1 nats",
    ),
    "a sample with another template": (
        lambda p: resample(p, 2, lambda t: replace(t, fingerprint=replace(t.fingerprint, template="other"))),
        "run_fingerprints",
        "differ in template",
    ),
    "a checkpoint of another version": (
        lambda p: rewrite(p, "receipts.jsonl", 3, digest="0" * 32), "run_checkpoint", "was published as 00000000"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TAMPERED))
def test_what_was_tampered_with_is_named(name: str, copied: Path, subject: Subject) -> None:
    tamper, check, words = TAMPERED[name]
    tamper(copied)
    ask = getattr(runs, check)
    needs_subject = check in ("run_recompute", "run_fingerprints", "run_checkpoint")
    found: Finding = ask(subject, stored(copied)) if needs_subject else ask(stored(copied))
    assert found.status == "fail" and words in found.figure, found
    assert found.cause and found.remedy


def test_a_damaged_checkpoint_is_named(copied: Path, subject: Subject) -> None:
    manifest = copied / "checkpoints" / "3" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    next(iter(content["leaves"].values()))[-1] = "0" * 64
    manifest.write_text(json.dumps(content))
    found = runs.run_checkpoint(subject, stored(copied))
    assert found.status == "fail" and "checkpoint of step 3 cannot be used" in found.figure


def test_a_run_without_files_does_not_apply(copied: Path, subject: Subject) -> None:
    for name in ("trajectories", "checkpoints"):
        shutil.rmtree(copied / name)
    (copied / "receipts.jsonl").unlink()
    run = stored(copied)
    found = [runs.run_metrics(run), runs.run_versions(run), runs.run_record(run), runs.run_receipts(run)]
    found += [f(subject, run) for f in (runs.run_recompute, runs.run_fingerprints, runs.run_checkpoint)]
    assert {f.status for f in found} == {"n/a"} and all(f.cause for f in found)


@pytest.mark.slow
def test_a_failed_audit_has_a_status_of_its_own(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(copied, "metrics.jsonl", 1, reward=0.25)
    assert main(["audit", str(copied), "--json", "-"]) == 3
    found = json.loads(capsys.readouterr().out)
    failed = [c for c in found["checks"] if c["status"] == "fail"]
    assert not found["ok"] and [c["name"] for c in failed] == ["run-metrics"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which recipe or run?"),
        (["nowhere.toml"], "there is no recipe nowhere.toml"),
        (["model"], "is not a run directory"),
        (["recipe.toml", "--json", "nowhere/audit.json"], "there is no folder nowhere"),
        (["recipe.toml", "--optim.lrr", "1"], "optim.lrr"),
        (["recipe.toml", "--jsn", "a.json"], "unknown option --jsn; did you mean --json?"),
    ],
)
def test_words_that_cannot_be_used(words, said, kit, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(kit.folder)
    assert main(["audit", *words]) == 2
    assert said in capsys.readouterr().err


def test_no_json_into_the_run(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(copied), "--json", str(copied / "audit.json")]) == 2
    assert "only read" in capsys.readouterr().err
