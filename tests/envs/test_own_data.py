"""The worked example of docs/own-data.md, run as it is written there, and the shipped recipe of its kind."""

import dataclasses
import re
from pathlib import Path

import pytest

from lockstep.config import Config, load_config
from lockstep.envs.rewards import make_reward
from lockstep.envs.tasks import make_task

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Words:
    """A tokenizer with one token per word, and a chat template that can be read off the text."""

    has_template: bool = True
    bos_id: int | None = None
    adds_bos: bool = False

    def encode_filled(self, template, fields):
        return [hash(word) for word in template.format(**fields).split()]

    def decode(self, ids, skip_special=True):
        raise AssertionError("no special token is expected here")

    def render(self, messages):
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages)

    def apply_template(self, messages):
        return [hash(word) for word in self.render(messages).split()]


@pytest.fixture(scope="module")
def sorting(tmp_path_factory) -> Path:
    """The example's folder, its files cut from the page."""
    folder = tmp_path_factory.mktemp("example") / "sorting"
    folder.mkdir()
    for name, content in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_the_example_on_the_page_works(sorting):
    assert sorted(path.name for path in sorting.iterdir()) == [
        "problems.jsonl",
        "problems.py",
        "recipe.toml",
        "scoring.py",
    ]
    config = load_config(sorting / "recipe.toml")
    assert Path(config.model.name) == sorting.resolve().parent / "my-model"
    task = make_task(config.task, Words(), config.run.seed)
    prompts = task.prompts(0, 3)
    assert sorted(p.row["level"] for p in prompts) == [1, 2, 2]
    assert any(p.text.endswith("and nothing else: red, {blue}, amber") for p in prompts)
    assert all(p.text.startswith("<system> You sort words. <user> Write these words") for p in prompts)

    with make_reward(config.reward) as reward:
        right = reward.score(prompts, [p.row["answer"] for p in prompts])
        chatty = reward.score(prompts, ["Sure! " * 20] * 3)
    assert [score.value for score in right] == [1.0] * 3
    assert [score.value for score in chatty] == [-0.2] * 3
    assert chatty[0].parts == {"scoring:in_place": 0.0, "scoring:too_long": 1.0}


def test_the_function_on_the_page_works(sorting):
    overrides = ["--task.kind", "function", "--task.function", "problems:rows", "--task.path", "none"]
    config: Config = load_config(sorting / "recipe.toml", [*overrides, "--task.folder", str(sorting)])
    prompts = make_task(config.task, Words(), 1).prompts(0, 200)
    assert [p.row["index"] for p in prompts] == list(range(200))
    assert len({p.text for p in prompts}) > 100
    answers = [p.row["answer"] for p in prompts]
    with make_reward(config.reward) as reward:
        assert {s.value for s in reward.score(prompts, answers)} == {1.0}


def test_every_key_and_message_on_the_page_exists():
    """Messages of the table are cut from the sources; a message that changed there must change on the page."""
    code = ROOT / "src" / "lockstep"
    sources = "".join(path.read_text() for path in [*(code / "envs").glob("*.py"), code / "loading.py"])
    for part in (
        "broken JSON at column",
        "(task.prompt_column)",
        "tokens, task.max_prompt_tokens is",
        "is ambiguous",
        "which this row does not have",
        "in the folder",
        "two calls with the same index and seed differ",
        "values for",
    ):
        assert part in PAGE and part in sources, part


def test_the_shipped_recipe_of_this_kind_gives_prompts_and_rewards():
    config = load_config(ROOT / "recipes" / "own-data.toml")
    prompts = make_task(config.task, Words(), config.run.seed).prompts(0, 8)
    with make_reward(config.reward) as reward:
        scores = reward.score(prompts, [str(p.row["answer"]) for p in prompts])
    assert [score.value for score in scores] == [1.0] * 8
