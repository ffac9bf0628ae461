"""`benchmarks/learning.py` and the recipe it runs: words are recipes, the task is what it says, the table adds up."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.algorithms import ALGORITHMS
from lockstep.config import load_config
from lockstep.models import load_model

ROOT = Path(__file__).parents[1]


def module(folder: str, name: str) -> ModuleType:
    path = str(ROOT / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)


SIDES = ("lockstep", "trl")
learning, sorting = module("benchmarks", "learning"), module("recipes/sort", "sorting")


def test_beside_trl_the_pairs_of_the_loops_benchmark_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    sides = {side: {"reward": {"by_step": [0.5], "by_seed": [[0.5]], "mean": 0.5, "last_5": 0.5}} for side in SIDES}

    def compared(args: argparse.Namespace) -> dict[str, dict[str, object]]:
        asked.append((args.steps, args.rounds, args.seeds, args.out, args.model))
        return {"summary": sides}

    monkeypatch.setattr(learning.loop, "compared", compared)
    assert learning.main(["--trl", "--steps", "14", "--out", str(tmp_path / "o.json")]) == 0
    assert asked == [(14, 1, 3, tmp_path / "o.json", "smollm2-135m")]
    assert learning.main(["--trl"]) == 0 and asked[-1][:3] == (15, 1, 3)
    with pytest.raises(SystemExit):
        learning.parse_arguments(["--trl", "--only", "ppo"])

    def broken(args: argparse.Namespace) -> None:
        raise learning.loop.BenchmarkError("the two sides differ")

    monkeypatch.setattr(learning.loop, "compared", broken)
    with pytest.raises(SystemExit, match="the two sides differ"):
        learning.main(["--trl"])


def test_every_algorithm_is_measured_and_every_word_is_a_recipe() -> None:
    assert set(learning.WORDS) == {*ALGORITHMS, learning.CONTROL}
    for recipe, words in learning.TASKS.items():
        for name, given in words.items():
            config = load_config(ROOT / "recipes" / f"{recipe}.toml", given)
            assert config.algorithm.name == ("grpo" if name == learning.CONTROL else name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "grpo,a2c"], "--only names a2c; sort has grpo"),
        (["--task", "addition", "--only", "rloo"], "--only names rloo; addition has grpo, ppo"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--steps", "1"], "--steps at least 2"),
    ],
)
def test_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning.parse_arguments(words)
    assert message in capsys.readouterr().err


def test_the_table_and_the_figure_are_of_the_curves() -> None:
    curves = [{"seed": s, "seconds": 1.0 + s, "reward": [0.1 * s] + [0.5 + 0.1 * s] * 20} for s in range(3)]
    results = {"grpo": {"curves": curves, "summary": learning.summary(curves)}}
    assert "| grpo | 0.10 | **0.60** | 0.50, 0.60, 0.70 | 2 |" in learning.table(results)
    drawn = ET.fromstring(learning.figure(results))
    lines = [e for e in drawn.iter("{http://www.w3.org/2000/svg}path") if "line" in e.get("class", "")]
    assert len(lines) == 3


def test_the_task_is_sorting() -> None:
    for index in range(50):
        row = sorting.rows(index, 7)
        assert row == sorting.rows(index, 7) and sorted(row["prompt"][:-1]) == list(row["answer"])
    row = {"answer": "aabd"}
    assert sorting.in_order([""] * 5, ["aabd", "abad", "aab", "aabdd", ""], [row] * 5) == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert len({sorting.rows(0, seed)["prompt"] for seed in range(20)}) > 10


def test_the_control_says_nothing_about_the_answer() -> None:
    values = [sorting.at_random([""], ["aabd"], [{"answer": "aabd"}])[0] for _ in range(200)]
    assert len(set(values)) == 200 and 0.4 < sum(values) / 200 < 0.6


def test_its_model_reads_and_writes_letters(tmp_path: Path) -> None:
    sorting.write_model(tmp_path / "model")
    model = load_model(str(tmp_path / "model"))
    text = "".join(random.Random(0).choices("abcdefgh>", k=20))
    ids = model.tokenizer.encode(text)
    assert len(ids) == 20 and model.tokenizer.decode(ids) == text and len(model.tokenizer.eos_ids) == 1


def test_a_quarter_of_the_examples_is_right() -> None:
    examples = list(sorting.examples())
    right = sum("".join(sorted(e["prompt"][:-1])) == e["completion"] for e in examples)
    assert len(examples) == 2000 and 500 <= right < 650
    assert all(sorted(e["prompt"][:-1]) == sorted(e["completion"]) for e in examples) and json.dumps(examples[0])


@pytest.mark.parametrize("task", learning.TASKS)
def test_the_page_shows_what_was_measured(task: str) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / f"learning_{task}.json").read_text())["results"]
    assert set(found) == set(learning.TASKS[task])
    page = (ROOT / "docs" / "learning.md").read_text()
    written = page.partition(f"<!-- {task} -->\n")[2].partition(f"<!-- /{task} -->")[0]
    assert written == learning.table(found) + "\n"
