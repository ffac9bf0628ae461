"""docs/rewards.md: its recipes parse, its code runs, and its kinds of failure are those that there are."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from lockstep.config import RewardConfig
from lockstep.envs.outcome import Kind
from lockstep.envs.scorers import BUILT_IN

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.S))
def test_a_recipe_on_the_page_is_one(block):
    RewardConfig(**tomllib.loads(block)["reward"])


def test_the_code_on_the_page_runs(capsys):
    *_, block = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(block, {})
    assert capsys.readouterr().out == "1.0 {'exact': 1.0} {}\n"


def test_the_tables_are_complete():
    def first_column(heading):
        table = PAGE.partition(heading)[2].partition("|---|---|\n")[2].partition("\n\n")[0]
        return [re.match(r"\| `(\w+)`", row)[1] for row in table.splitlines()]

    assert sorted(first_column("## What a failure is")) == sorted(get_args(Kind))
    assert tuple(first_column("### Built in")) == BUILT_IN
