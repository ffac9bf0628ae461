"""The live panel and the plain lines: same numbers, honest zeros, and a model's text never obeyed."""

from __future__ import annotations

import io
import math
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.config import Config, load_config
from lockstep.progress import Progress, groups_text, mismatch_text, shares, sparkline
from lockstep.text import duration, sanitize

RECIPE = Path(__file__).parents[1] / "recipes" / "addition.toml"
NASTY = "57\n\x1b[2J\x1b]0;owned\x07[bold red]x[/bold red][/] \u202eevil\u2028\x9b31m\x00"
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(RECIPE, ["--run.steps=25"])


@pytest.fixture(autouse=True)
def colour_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same terminal whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward": step / 100,
        "kl/k3": 0.00123,
        "completion_length": 3.5,
        "policy_version": step + 40,
        "mismatch/max_abs": 0.0,
        "loss": -0.5,
        "time/generate_s": 2.0,
        "time/score_s": 0.25,
        "time/train_s": 4.0,
        "time/sync_s": 0.5,
        "time/wait_s": 0.0,
        "time/step_s": 7.0,
        "tokens/generated": 500,
    } | changes


def shown(config: Config, run_dir: Path, records: list[dict], sample: str | None = None, **console: Any) -> str:
    out = io.StringIO()
    with Progress(config, run_dir, Console(file=out, **console)) as progress:
        for r in records:
            progress.step(r, sample)
    return out.getvalue()


def last_panel(output: str) -> str:
    return SEQUENCE.sub("", output[output.rindex("lockstep") :])


NUMBERS = [
    "0.020",
    "0.00123",
    "3.5",
    "v42",
    "mismatch 0",
    "-0.5",
    "2.0s",
    "0.25s",
    "4.0s",
    "0.50s",
    "250 tok/s",
    "2m41s",
]


def test_panel_on_a_terminal(config: Config, tmp_path: Path) -> None:
    output = shown(config, tmp_path, [record(1), record(2)], "36 + 21 = 57", force_terminal=True, width=100)
    panel = last_panel(output)
    for text in [*NUMBERS, "kl/k3", "step 2/25", "36 + 21 = 57", "generate", "addition", "first 0.010"]:
        assert text in panel, text
    assert output.endswith("\x1b[?25h"), "the cursor is given back"


def test_one_plain_line_per_step_elsewhere(config: Config, tmp_path: Path) -> None:
    lines = shown(config, tmp_path, [record(1), record(2)], "unseen", width=40).splitlines()
    assert len(lines) == 3 and str(tmp_path) in lines[0]
    for text in [*NUMBERS, "kl/k3", "step 2/25", "7.0s"]:
        assert text in lines[2], text
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ({"groups/zero_variance": 9, "groups/total": 16, "rewards/failed": 2}, "flat groups 9/16  failed 2"),
        ({"groups/zero_variance": 0, "groups/total": 16, "rewards/failed": 0}, "flat groups 0/16"),
        ({"groups/zero_variance": 3}, "flat groups 3"),
        ({"rewards/failed": 1}, "failed 1"),
        ({}, ""),
    ],
)
def test_groups_without_signal_and_failures_are_shown(
    config: Config, tmp_path: Path, counted: dict[str, int], words: str
) -> None:
    assert groups_text(record(1, **counted)) == words
    line = shown(config, tmp_path, [record(1, **counted)]).splitlines()[1]
    panel = last_panel(shown(config, tmp_path, [record(1, **counted)], force_terminal=True, width=100))
    for text in (line, panel):
        assert words in text and ("flat" in text, "failed" in text) == ("flat" in words, "failed" in words)


def test_dumb_terminals_get_lines(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "step 1/25" in shown(config, tmp_path, [record(1)], force_terminal=True).splitlines()[1]


def test_no_color_is_respected(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colors = re.compile(r"\x1b\[(\d+;)*(3[0-7]|9[0-7])m")
    assert colors.search(shown(config, tmp_path, [record(1)], force_terminal=True, width=100))
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(config, tmp_path, [record(1)], force_terminal=True, width=100)
    assert not colors.search(plain) and "▒" in plain, "phases are told apart by pattern instead"


@pytest.mark.parametrize("terminal", [True, False])
def test_model_text_reaches_the_terminal_only_as_text(config: Config, tmp_path: Path, terminal: bool) -> None:
    out = io.StringIO()
    with Progress(config, tmp_path, Console(file=out, force_terminal=terminal, width=200)) as progress:
        progress.event(f"reward failed on {NASTY}")
        progress.step(record(1), NASTY)
        progress.phase(NASTY)
    output = out.getvalue()
    for raw in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\x00", "\u202e", "\u2028"):
        assert raw not in output
    assert r"57\n\x1b[2J\x1b]0;owned\x07[bold red]x[/bold red][/] \u202eevil" in output
    log = (tmp_path / "log.txt").read_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ reward failed on 57\\n\\x1b.*\n", log)


@given(st.text(), st.integers(0, 50))
def test_sanitized_text_is_printable_and_fits(text: str, limit: int) -> None:
    out = sanitize(text, limit)
    assert len(out) <= max(limit, 3)
    assert not any(unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} for c in out)
    if all(c.isprintable() for c in text) and len(text) <= limit:
        assert out == text


def test_what_the_output_cannot_encode_is_spelled_out(config: Config, tmp_path: Path) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with Progress(config, tmp_path, Console(file=out, force_terminal=True, width=100)) as progress:
        progress.event("ü", warning=True)
        progress.event("resumed")
        progress.step(record(1), "π ≈ 3")
    assert rb"\u03c0 \u2248 3" in raw.getvalue() and rb"! \xfc" in raw.getvalue()
    assert b"* resumed" in raw.getvalue()


def test_missing_and_non_finite_numbers_are_shown_as_such(config: Config, tmp_path: Path) -> None:
    for terminal in (True, False):
        shown(config, tmp_path, [{"step": 1}], force_terminal=terminal)
    bad = record(2, reward=math.nan, loss=math.inf, **{"mismatch/max_abs": math.nan, "time/step_s": math.nan})
    line = shown(config, tmp_path, [{"step": 1}, bad]).splitlines()[-1]
    assert "reward nan" in line and "loss inf" in line and "mismatch nan" in line and "ETA -" in line


def test_history_continues_the_curve(config: Config, tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(config, tmp_path, console, history=[record(1), record(2)]) as progress:
        progress.step(record(3))
    assert "first 0.010" in last_panel(out.getvalue()) and "step 3/25" in last_panel(out.getvalue())


def test_an_exception_gives_the_terminal_back(config: Config, tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(ZeroDivisionError), Progress(config, tmp_path, Console(file=out, force_terminal=True)):
        _ = 1 / 0
    assert out.getvalue().endswith("\x1b[?25h")


def test_mismatch_zero_means_zero() -> None:
    assert mismatch_text({"mismatch/max_abs": 0.0}) == "mismatch 0"
    assert mismatch_text({"mismatch/max_abs": 1e-30}) == "mismatch 1e-30 nats at most"
    assert mismatch_text({}) == "mismatch -"


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, None, math.nan, 1.0], 8) == "▁  █"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([0, 1], 9, ascii_only=True) == "_#"
    assert sparkline([], 5) == "" and sparkline([0.0], 5) == "▁" and sparkline([None], 5) == " "


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(0, 80))
def test_shares_fill_the_width(values: list[float], width: int) -> None:
    cells = shares(values, width)
    assert sum(cells) == (width if sum(values) > 0 else 0) and min(cells) >= 0
    for value, count in zip(values, cells, strict=True):
        assert not sum(values) or abs(value / sum(values) * width - count) < 1 + 1e-6


def test_durations() -> None:
    shown = [duration(s) for s in (0.0, 0.421, 7.94, 59.94, 60, 92, 3600, 7505, None, math.nan)]
    assert shown == ["0.00s", "0.42s", "7.9s", "59.9s", "1m00s", "1m32s", "1h00m", "2h05m", "-", "-"]
