"""A whole run whose rewards fail, and where the policy judges itself."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from lockstep.config import load_config
from lockstep.models import load_model
from lockstep.models.decoder import reference_logits

pytestmark = pytest.mark.slow  # the parts by themselves: tests/envs, tests/train/test_judging.py

RUBRIC = "Judge {completion}:"
TOKENS = 4


@pytest.fixture(scope="module")
def judged(kit, train, left, tmp_path_factory):
    """Two steps. A function that refuses some completions; a judge that is the policy, and too small to say a number
    unless by chance: what fails has the error score."""
    config = kit.config(
        tmp_path_factory.mktemp("judged"),
        "--run.steps=2",
        '--reward={functions = [{name = "run_rewards:picky", weight = 2.0}], on_error = "score", error_score = -1.0, '
        f'folder = "{kit.folder}", judges = [{{name = "self", rubric = "{RUBRIC}", engine = "rollout", '
        f'template = "plain", max_tokens = {TOKENS}, max_prompt_tokens = 40, pattern = "([0-9])", high = 9.0}}]}}',
    )
    return config, left(train(config))


def test_failures_are_scored_counted_and_shown(judged) -> None:
    config, run = judged
    assert load_config(run.path / "recipe.toml") == config
    log, report = ((run.path / name).read_text() for name in ("log.txt", "report.html"))
    refused = 0
    for m in run.metrics():
        everything = run.step(m["step"]).trajectories
        assert m["rewards/failed"] == 0 and all(t.failed is None for t in everything)
        assert all(t.reward == 2 * t.rewards["run_rewards:picky"] + t.rewards["self"] for t in everything)
        picky = [t for t in everything if t.rewards["run_rewards:picky"] == -1]
        assert m.get("failures/run_rewards:picky/exception", 0) == len(picky)
        failed = [t for t in everything if -1 in t.rewards.values()]
        assert m["rewards/error_scored"] == len(failed)
        assert f"{len(failed)} of 12 samples have reward.error_score for what failed: " in log
        assert m["judge/self/asked"] + m["judge/self/cached"] == 12 and m["judge/self/retried"] == 0
        refused += len(picky)
    assert refused and "failures: run_rewards:picky/exception" in log
    assert "Failures of run_rewards:picky" in report and "Judge self" in report


def test_the_judge_is_the_policy_decoding_greedily(judged, kit) -> None:
    config, run = judged
    with sqlite3.connect(run.path / "verdicts.sqlite") as file:
        answers = {digest: (text, cut) for digest, text, cut in file.execute("SELECT digest, text, cut FROM answers")}
    file.close()
    assert len(answers) == sum(m["judge/self/asked"] for m in run.metrics())
    model = load_model(config.model.name, config.model.dtype)
    first = run.step(1).trajectories[0]
    ids = model.tokenizer.encode(RUBRIC.format(completion=first.text))
    if model.tokenizer.adds_bos:
        ids = [model.tokenizer.bos_id, *ids]
    said: list[int] = []
    while len(said) < TOKENS and not set(said) & model.tokenizer.eos_ids:
        logits = reference_logits(model.spec, model.params, np.array([[*ids, *said]]))
        said.append(int(np.argmax(np.asarray(logits)[0, -1])))
    assert (model.tokenizer.decode(said), int(len(said) == TOKENS)) in answers.values()
