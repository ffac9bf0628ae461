"""The report: right numbers, whole page at any moment of a run, nothing loaded, nothing from a model obeyed."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import store
from lockstep.config import load_config
from lockstep.environment import write_environment
from lockstep.errors import CheckpointError
from lockstep.metrics import StepLog
from lockstep.report import write_report
from lockstep.types import Fingerprint, Prompt, Trajectory

RECIPE = load_config(Path(__file__).parents[1] / "recipes" / "addition.toml", ["--run.steps=25"]).to_toml()
NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e &amp; {{ 7 * 7 }}"


def record(step: int, **changes: Any) -> dict[str, Any]:
    noise = random.Random(step)
    reward = 0.03 + 0.45 / (1 + math.exp(-(step - 13) / 3)) + noise.uniform(-0.03, 0.03)
    generate, train = noise.uniform(2.6, 3.2), noise.uniform(4.0, 4.6)
    return {
        "step": step,
        "reward": reward,
        "reward_std": 0.3,
        "reward/first_line_exact": reward,
        "kl/k3": 0.002 * step + noise.uniform(0, 0.005),
        "completion_length": 3.6 - 0.02 * step + noise.uniform(-0.1, 0.1),
        "policy_version": step - 1,
        "syncs": 0,
        "mismatch/max_abs": 0.0,
        "mismatch/k1": 0.0,
        "mismatch/k3": 0.0,
        "mismatch/ess": 1.0,
        "loss": noise.uniform(-0.02, 0.02),
        "clip_fraction": noise.uniform(0, 0.01),
        "grad_norm": noise.uniform(0.2, 1.6),
        "lr": 2e-3,
        "groups/zero_variance": max(0, 9 - step // 2),
        "rewards/failed": 0,
        "tokens/generated": 440 + step,
        "tokens/trained": 440 + step,
        "finish/stop": 120,
        "finish/length": 8,
        "time/generate_s": generate,
        "time/score_s": 0.3,
        "time/train_s": train,
        "time/sync_s": 0.04,
        "time/wait_s": 0.0,
        "time/step_s": generate + train + 0.45,
    } | changes


def receipt(step: int, version: int, moved: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "version": version,
        "digest": hashlib.sha256(str(version).encode()).hexdigest()[:32],
        "plan": hashlib.sha256(str(moved).encode()).hexdigest(),
        "source": "actor",
        "destination": "rollout",
        "evicted": {},
        "bytes_planned": moved,
        "bytes_moved": moved,
        "bytes_crossing": moved // 2,
        "same_buffers": moved == 0,
        "seconds": {"select": 0.001, "map": 0.001, "stage": 0.002, "transfer": 0.1, "verify": 0.03, "flip": 0.0},
        "probed": 2,
        "transport": "local",
        "density": None,
        "stored": {},
    }


def trajectories(step: int, texts: list[str], rewards: list[float], failed: str | None = None) -> list[Trajectory]:
    return [
        Trajectory(
            prompt_ids=np.arange(5, dtype=np.int32),
            completion_ids=np.arange(4, dtype=np.int32),
            logprobs=np.zeros(4, np.float32),
            versions=np.full(4, step - 1, np.int32),
            finish_reason="stop",
            seed=i,
            group_id="chain_sum/0/0",
            index=i,
            fingerprint=Fingerprint("a", "b", "c", "d"),
            text=text,
            rewards={} if math.isnan(reward) else {"first_line_exact": reward},
            reward=reward,
            failed=failed if math.isnan(reward) else None,
        )
        for i, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]


DIAL = {
    "roles": {
        "actor": {"axes": {"data": 1, "fsdp": 4, "tensor": 1}, "devices": [0, 1, 2, 3], "same_as": None}
        | {"bytes": {"parameters": 135_000_000, "optimizer": 11_000_000}},
        "rollout": {"axes": {"data": 2, "fsdp": 1, "tensor": 2}, "devices": [4, 5, 6, 7], "same_as": None}
        | {"bytes": {"parameters": 270_000_000, "kv": 48_000_000}},
        "reference": {"axes": {"fsdp": 4}, "devices": [0, 1, 2, 3], "same_as": "actor", "bytes": {}},
    }
}


def build(
    run: Path, steps: int, prompt: str = "1 + 1 = 2\n5 + 2 = 7\n36 + 21 = ", texts: list[str] | None = None
) -> Path:
    """A run directory as the loop leaves it after `steps` steps."""
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text(RECIPE)
    (run / "dial.json").write_text(json.dumps(DIAL))
    write_environment(run)
    with StepLog(run / "receipts.jsonl", once_per_step=False) as receipts:
        receipts.write(receipt(0, 0))
        for step in range(1, steps + 1):
            receipts.write(receipt(step, step))
    with StepLog(run / "metrics.jsonl") as log:
        for step in range(1, steps + 1):
            log.write(record(step))
    for step in range(1, steps + 1):
        rows = trajectories(step, texts or ["57\n", "I think it is 58", "5.7\n", "47\n"], [1.0, 0.0, 0.0, 0.0])
        extra = {"advantage": [1.73, -0.58, -0.58, -0.57]}
        store.write_step(run / "trajectories", step, rows, extra, prompts=[Prompt("chain_sum/0/0", prompt, (1,))])
    return run


def report(run: Path) -> str:
    return write_report(run).read_text()


def text_of(page: str) -> str:
    """What a reader sees: tags removed, entities resolved, spaces folded."""
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_data = seen.append  # type: ignore[method-assign]
    parser.feed(re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.S))
    return " ".join(" ".join(seen).split())


class Balance(HTMLParser):
    """Checks that every element is closed, in order; collects tags and attributes."""

    VOID = frozenset({"meta", "br", "img", "line", "circle", "path", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def parsed(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("finished") / "addition", 25)


def test_headline_numbers_are_those_of_the_records(finished: Path) -> None:
    text = text_of(report(finished))
    rewards = [record(s)["reward"] for s in range(1, 26)]
    assert f"{sum(rewards[:5]) / 5:.3f} → {sum(rewards[-5:]) / 5:.3f}" in text
    assert "25 / 25" in text and "finished, 25 of 25 steps" in text
    seconds = sum(record(s)["time/step_s"] for s in range(1, 26))
    assert f"Wall-clock {int(seconds // 60)}m{int(seconds % 60):02d}s" in text
    assert "Mismatch 0 trainer = sampler" in text
    assert "Policy versions 26" in text
    assert f"{sum(440 + s for s in range(1, 26)):,}" in text
    assert "26 published, 26 on the same buffers (nothing runs), 0 moved, 0 B in all" in text


def test_everything_asked_for_is_on_the_page(finished: Path) -> None:
    page = report(finished)
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    for title in ("Reward", "KL to the reference", "Completion length", "Mismatch", "Loss", "Gradient norm"):
        assert title in titles
    assert {"Clip fraction", "Groups without signal", "Where the time went"} <= set(titles)
    text = text_of(page)
    for fact in (
        "estimator k3",
        "clipped at 1",
        "the arrays of actor",
        "257.5 MiB",
        "data 2 × tensor 2",
        "jaxlib",
        "device kind",
    ):
        assert fact in text, fact
    assert "36 + 21 =" in page and "I think it is 58" in page and "+1.73" in page
    assert 'name = "smollm2-135m"' in text, "the resolved recipe"
    assert receipt(25, 25)["digest"][:12] in page
    assert text.count("best reward 1") == 6 and "worst reward 0" in text


def test_nothing_is_loaded_and_only_our_script_runs(finished: Path) -> None:
    page = report(finished)
    parser = parsed(page)
    assert parser.scripts == 1
    for tag, name, value in parser.attributes:
        assert name not in {"src", "srcset", "data", "action", "background"} and not name.startswith("on"), (tag, name)
        assert name != "href" or (value or "").startswith("#"), (tag, value)
    assert not re.search(r"https?://|@import|url\(", page)
    script = re.search(r"<script>(.*?)</script>", page, re.S)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_text_from_models_data_and_rewards_is_inert(tmp_path: Path) -> None:
    run = build(tmp_path / "run", 1, prompt=NASTY, texts=[NASTY, "fine"] * 2)
    rows = trajectories(2, [NASTY, "x"], [math.nan, 0.5], failed=NASTY)
    store.write_step(run / "trajectories", 2, rows, {}, prompts=[Prompt("chain_sum/0/0", NASTY, (1,))])
    with StepLog(run / "metrics.jsonl") as log:
        log.write(record(2) | {f"reward/{NASTY}": 1.0, f"kl/{NASTY}": 2.0})
    (run / "log.txt").write_text(f"2026-01-01T00:00:00Z {NASTY}\n")
    (run / "recipe.toml").write_text(RECIPE + f"\n# {NASTY}".replace("\x1b", "").replace("\u202e", ""))
    page = report(run)
    parser = parsed(page)
    assert parser.scripts == 1 and "img" not in {tag for tag, _, _ in parser.attributes}
    assert "<script>alert" not in page and "<img" not in page
    assert "\x1b" not in page and "\u202e" not in page
    assert r"&lt;script&gt;alert(1)&lt;/script&gt;" in page and r"\x1b[31m\u202e &amp;amp; {{ 7 * 7 }}" in page
    assert "failed" in text_of(page)


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_a_killed_run_has_a_whole_page(tmp_path: Path, steps: int) -> None:
    run = build(tmp_path / "run", steps)
    page = report(run)
    parsed(page)
    text = text_of(page)
    assert f"{steps} of 25 steps done" in text
    assert ("No step has finished" in text) == (steps == 0)
    assert page.count("<svg") >= (8 if steps else 0)
    assert report(run) == page, "the same run gives the same page"


def test_torn_and_missing_files_are_said(tmp_path: Path) -> None:
    run = build(tmp_path / "run", 3)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 4, "rew')
    for name in ("receipts.jsonl", "dial.json", "environment.json"):
        (run / name).unlink()
    (run / "trajectories" / "step-000003.parquet").write_bytes(b"PAR1")
    text = text_of(report(run))
    assert "metrics.jsonl ends in an unfinished line" in text and "3 of 25 steps done" in text
    for name in ("receipts.jsonl", "dial.json", "environment.json"):
        assert f"{name} is missing" in text
    assert "The trajectories of step 3 cannot be read" in text and "Step 2" in text
    assert "Policy versions 3" in text, "counted from the metrics then"


def test_damaged_files_are_said(tmp_path: Path) -> None:
    run = build(tmp_path / "run", 2)
    (run / "metrics.jsonl").write_text('{"step": 1}\nhello\n')
    (run / "recipe.toml").write_text("[run")
    (run / "dial.json").write_text("[1]")
    (run / "environment.json").write_text("{")
    text = text_of(report(run))
    for said in (
        "metrics.jsonl is damaged and left out",
        "line 2",
        "recipe.toml cannot be read",
        "dial.json cannot be read: expected an object, got list",
        "environment.json cannot be read",
        "No step has finished",
    ):
        assert said in text, said


def test_only_metrics_or_only_a_recipe_is_enough(tmp_path: Path) -> None:
    for name, content in (("metrics.jsonl", '{"step": 1, "reward": 0.5}\n'), ("recipe.toml", RECIPE)):
        run = tmp_path / name
        run.mkdir()
        (run / name).write_text(content)
        parsed(report(run))
    with pytest.raises(CheckpointError, match=r"not a run directory.*recipe\.toml nor metrics\.jsonl"):
        write_report(tmp_path)


def test_values_that_are_not_finite_are_gaps_and_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with StepLog(run / "metrics.jsonl") as log:
        for step, (loss, mismatch) in enumerate([(1.0, 0.0), (math.nan, 0.0), (math.inf, math.nan), (2.0, 0.0)], 1):
            log.write(record(step, loss=loss) | {"mismatch/max_abs": mismatch})
    page = report(run)
    parsed(page)
    assert "loss: 1 to 2, 2 missing or not finite" in page
    assert "Mismatch nan" in text_of(page), "a NaN mismatch is not hidden by a maximum"
    assert all("NaN" not in s and "Infinity" not in s for s in re.findall(r'data-series="[^"]*"', page))


def test_a_dial_may_bring_the_environment(tmp_path: Path) -> None:
    run = build(tmp_path / "run", 1)
    (run / "environment.json").unlink()
    (run / "dial.json").write_text(
        json.dumps(DIAL | {"environment": {"jax": "1.2.3", "fingerprint": {"decoding": "d0d0"}}})
    )
    text = text_of(report(run))
    assert "jax 1.2.3 fingerprint decoding d0d0" in text and "environment.json is missing" not in text


def test_a_mismatch_is_shown(tmp_path: Path) -> None:
    run = build(tmp_path / "run", 0)
    with StepLog(run / "metrics.jsonl") as log:
        for step in (1, 2, 3):
            log.write(record(step) | {"mismatch/max_abs": 1.5e-6 if step == 2 else 0.0})
    page = report(run)
    assert "Mismatch 1.5e-06 largest" in text_of(page) and 'value bad">1.5e-06' in page
    assert "Exactly 0 at every step" not in page


def test_moved_bytes_are_summed(tmp_path: Path) -> None:
    run = build(tmp_path / "run", 0)
    with StepLog(run / "receipts.jsonl", once_per_step=False) as log:
        log.write(receipt(1, 1, moved=3 * 2**20))
        log.write(receipt(2, 2, moved=2**20))
    text = text_of(report(run))
    assert "3 published, 1 on the same buffers (nothing runs), 2 moved, 4 MiB in all" in text
    assert (
        "moved local 3 MiB 3 MiB 1.5 MiB - - 2 0.134 -" in text and receipt(1, 1, moved=3 * 2**20)["plan"][:12] in text
    )


def test_syncs_are_drawn(tmp_path: Path) -> None:
    run = build(tmp_path / "run", 0)
    with StepLog(run / "receipts.jsonl", once_per_step=False) as log:
        log.write(receipt(1, 1, moved=2**20))
        log.write(receipt(2, 2, moved=2**20) | {
            "density": 0.031,
            "evicted": {"rollout-1": "hung"},
            "transport": "local+files",
            "stored": {"folder": {"kind": "delta", "bytes": 2**19, "density": 0.031, "why": "delta: small"}},
        })  # fmt: skip
    page = report(run)
    text = text_of(page)
    for title in ("Where a sync's time went", "Bytes per sync", "Density of the delta"):
        assert title in text
    assert "Every sync wrote just what its plan said." in text and "Replicas dropped on the way: rollout-1." in text
    assert "last 3.1" in text and "rollout-1: hung" in text  # with the reason
    assert "local+files" in text and "delta, 512 KiB 3.1" in text
    with StepLog(run / "receipts.jsonl", once_per_step=False) as log:
        log.write(receipt(3, 3, moved=2**20) | {"bytes_planned": 2**19})
    assert "1 sync wrote other bytes than planned!" in text_of(report(run))


def test_receipts_of_another_time_are_no_trouble(tmp_path: Path) -> None:
    """Fields missing, of other types, or numbers no chart can show."""
    run = build(tmp_path / "run", 0)
    with StepLog(run / "receipts.jsonl", once_per_step=False) as log:
        log.write({"step": 1, "version": 1})
        log.write(
            {"step": 2, "version": "2", "seconds": 0.5, "evicted": "nobody", "bytes_moved": 5, "stored": {"x": 1}}
        )
        log.write(receipt(3, 3) | {"density": 1e308, "seconds": {"map": 1e308, "odd": 1.0}, "bytes_planned": None})
    assert "4 published" in text_of(report(run))


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [
        json.dumps({"step": s, "reward": s / 5000, "time/train_s": 1.0, "time/step_s": 1.0}) for s in range(1, 5001)
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = report(run)
    assert "means of 9 steps" in page and "the last 2000 of 5000 steps" in text_of(page)
    assert len(page) < 700_000
