"""The demo does what the README says: the shipped recipe, the real model, the real task. Minutes long."""

import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from lockstep.metrics import read_jsonl

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_demo_learns_sums_with_the_record_exact(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "run", "recipes/addition.toml", "--run.dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_jsonl(tmp_path / "addition" / "metrics.jsonl").records
    rewards = [r["reward"] for r in records]
    assert rewards[0] <= 0.10 and mean(rewards[-5:]) >= 0.40, rewards
    assert all(r["mismatch/unequal_tokens"] == 0 and r["mismatch/max_abs"] == 0 for r in records)
    assert (tmp_path / "addition" / "report.html").stat().st_size > 10_000
