"""docs/run-directory.md says what is there: its code runs, its tables name what the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lockstep import checkpoint, store
from lockstep.metrics import StepLog
from lockstep.types import Fingerprint, Prompt, Trajectory

PAGE = (Path(__file__).parents[1] / "docs" / "run-directory.md").read_text()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/addition below the current folder, as the page has it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "addition"
    run.mkdir(parents=True)
    with StepLog(run / "metrics.jsonl") as log:
        log.write({"step": 1, "reward": 0.5})
    ids = np.arange(2, dtype=np.int32)
    one = Trajectory(
        ids, ids, np.zeros(2, np.float32), ids, "stop", 0, "g", 0, Fingerprint("a", "b", "c", "d"), rewards={"x": 1.0}
    )
    store.write_step(run / "trajectories", 1, [one], {}, prompts=[Prompt("g", "1 + 1 =", (1,))])
    checkpoint.save(run, 1, {"params": {"w": np.ones(2)}}, {"step": 1})
    return run


def test_the_code_on_the_page_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})
    assert capsys.readouterr().out.splitlines()[0] == "0.5 None"


def test_the_columns_on_the_page_are_those_of_the_file(run: Path) -> None:
    table = PAGE[PAGE.index("| column | type | content |") : PAGE.index("What the trainer adds")]
    documented = {
        name for row in table.strip().splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    written = {
        "reward/NAME" if n.startswith("reward/") else n
        for n in pq.read_schema(store.step_path(run / "trajectories", 1)).names
    }
    assert documented == written
