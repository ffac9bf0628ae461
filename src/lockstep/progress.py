"""What a run shows while it runs: one live panel on a terminal, elsewhere one plain line per step, the same numbers.

    with Progress(config, run_dir) as progress:
        progress.phase("generate")
        progress.event("3 of 128 samples dropped: reward raised ValueError", warning=True)
        progress.step(record, sample="36 + 21 = 57")

Colour is off under `NO_COLOR`, on dumb terminals and in pipes; blocks become ASCII where the output cannot encode them.
Events stay on screen above the panel and are appended to `log.txt` in the run directory.

Text that a model or a data set wrote is shown with every control, format and surrogate character spelled out (`\\x1b`),
and never as markup: it cannot move the cursor, change colours, or reverse the reading direction.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.config import Config
from lockstep.text import duration, sanitize

PHASES = ("generate", "score", "train", "sync", "wait")
_COLORS = {"generate": "cyan", "score": "magenta", "train": "green", "sync": "yellow", "wait": "bright_black"}
_GLYPHS = {"generate": "█", "score": "▓", "train": "▒", "sync": "░", "wait": "·"}
_ASCII_GLYPHS = {"generate": "#", "score": "%", "train": "=", "sync": "-", "wait": "."}
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_LABEL = len("sample")


class Progress:
    """Shows a run.

    run_dir: where `log.txt` goes (it must exist by the first event) and what the panel names. console: rich's; by
    default standard output. history: the records of the steps before a resume, so that the curve is the whole run's.
    """

    def __init__(
        self, config: Config, run_dir: Path, console: Console | None = None, history: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._console = console or Console()
        self._name, self._steps, self._run_dir = config.run.name, config.run.steps, run_dir
        self._records = list(history)
        self._sample: str | None = None
        self._phase: tuple[str, float] | None = None
        self._started = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=2)
            self._live.start()
        else:
            self._say(f"lockstep {self._name}: {self._steps} steps, run directory {run_dir}")

    def step(self, record: Mapping[str, Any], sample: str | None = None) -> None:
        """Show a finished step. record: its metrics as in `metrics.jsonl`; what is absent shows as `-`. sample: a
        completion to read, of any content."""
        self._records.append(record)
        self._sample, self._phase = sample, None
        if self._live:
            self._live.refresh()
        else:
            self._say(plain_line(record, self._steps, self._remaining()))

    def phase(self, name: str) -> None:
        """What the run is doing from now on, for the panel."""
        self._phase = (name, time.monotonic())

    def event(self, message: str, *, warning: bool = False) -> None:
        """Show something, keep it in `log.txt`: what the data is, a resume; as a warning: dropped samples, what stopped
        the run."""
        line = sanitize(message)
        with open(self._run_dir / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}\n")
        self._say(f"! {line}" if warning else f"* {line}", style="yellow" if warning else "")

    def close(self) -> None:
        """Leave the last panel on screen and give the terminal back; a second call does nothing."""
        if self._live:
            self._phase = None
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The panel."""
        record = self._records[-1] if self._records else {}
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True, min_width=_LABEL)
        grid.add_column(ratio=1)
        for label, value in self._rows(record, options):
            if isinstance(value, Text):
                value.no_wrap, value.overflow = True, "ellipsis"
            grid.add_row(label, value)
        title = Text.assemble(("lockstep ", "bold"), encodable(sanitize(self._name), options))
        step = f"step {record.get('step', 0)}/{self._steps}"
        yield Panel(grid, title=title, title_align="left", subtitle=step, subtitle_align="right", padding=(0, 1))

    def _rows(self, record: Mapping[str, Any], options: ConsoleOptions) -> list[tuple[str, RenderableType]]:
        width = max(20, options.max_width - _LABEL - 6)  # frame, its padding and the gap behind the label
        ascii_only = options.ascii_only
        rewards = [r.get("reward") for r in self._records]
        first = f"first {_fixed(rewards[0])}   last 5 {_fixed(_mean(rewards[-5:]))}" if rewards else "no step done yet"
        curve = f"  {sparkline(rewards, min(40, max(8, width - 40)), ascii_only)}  " if rewards else "  "
        kl_name, kl = kl_of(record)
        policy = (
            f"v{record.get('policy_version', '-')}   {kl_name} {_short(kl)}   "
            f"length {_short(record.get('completion_length'))}   loss {_short(record.get('loss'))}"
        )
        rows: list[tuple[str, RenderableType]] = [
            ("reward", Text.assemble((_fixed(record.get("reward")), "bold green"), curve, (first, "dim"))),
            ("policy", Text.assemble(policy, "   ", (mismatch_text(record), _mismatch_style(record)))),
            *([("groups", Text(groups))] if (groups := groups_text(record)) else []),
            ("time", Group(*self._time_rows(record, width, ascii_only))),
            (
                "speed",
                Text(f"{tokens_per_second(record)}   step {duration(record.get('time/step_s'))}   {self._clock()}"),
            ),
        ]
        if self._sample is not None:
            sample = sanitize(self._sample, limit=width)
            rows.append(("sample", Text(encodable(sample, options), style="italic")))
        rows.append(("run", Text(encodable(sanitize(str(self._run_dir)), options))))
        return rows

    def _time_rows(self, record: Mapping[str, Any], width: int, ascii_only: bool) -> list[Text]:
        parts = {p: s for p in PHASES if (s := record.get(f"time/{p}_s")) is not None and math.isfinite(s)}
        total = sum(parts.values())
        if not total:
            return [Text("-")]
        glyphs = _ASCII_GLYPHS if ascii_only else _GLYPHS
        plain = self._console.no_color or ascii_only
        bar, legend = Text(), Text()
        for phase, cells in zip(parts, shares(list(parts.values()), width), strict=True):
            bar.append((glyphs[phase] if plain else "█") * cells, style=_COLORS[phase])
            legend.append(glyphs[phase] if plain else ("#" if ascii_only else "■"), style=_COLORS[phase])
            legend.append(f" {phase} {duration(parts[phase])}  ")
        return [bar, legend]

    def _clock(self) -> str:
        text = f"elapsed {duration(time.monotonic() - self._started)}   ETA {duration(self._remaining())}"
        if self._phase:
            name, since = self._phase
            text += f"   now: {sanitize(name)} {duration(time.monotonic() - since)}"
        return text

    def _remaining(self) -> float | None:
        """Seconds to go, from the median of the last ten steps."""
        seconds = [s for r in self._records[-10:] if (s := r.get("time/step_s")) is not None]
        if not seconds:
            return None
        return statistics.median(seconds) * max(0, self._steps - self._records[-1].get("step", 0))

    def _say(self, line: str, style: str = "") -> None:
        text = Text(encodable(sanitize(line), self._console.options), style=style)
        self._console.print(text, soft_wrap=True, highlight=False)


def plain_line(record: Mapping[str, Any], steps: int, remaining_s: float | None) -> str:
    """One step as one line of text, made of the panel's numbers."""
    kl_name, kl = kl_of(record)
    groups = groups_text(record)
    phases = " ".join(f"{p} {duration(record.get(f'time/{p}_s'))}" for p in PHASES)
    return (
        f"step {record.get('step', '-')}/{steps}  reward {_fixed(record.get('reward'))}  {kl_name} {_short(kl)}  "
        f"length {_short(record.get('completion_length'))}  policy v{record.get('policy_version', '-')}  "
        f"{mismatch_text(record)}  {groups + '  ' if groups else ''}loss {_short(record.get('loss'))}  "
        f"{duration(record.get('time/step_s'))} ({phases})  {tokens_per_second(record)}  ETA {duration(remaining_s)}"
    )


def encodable(text: str, options: ConsoleOptions) -> str:
    """`text` with the characters that the output cannot encode spelled out."""
    return text.encode(options.encoding, errors="backslashreplace").decode(options.encoding)


def sparkline(values: Sequence[float | None], width: int, ascii_only: bool = False) -> str:
    """The values as one row of bars, at most `width` wide (neighbours averaged), scaled from 0 (or a negative minimum)
    to their maximum; a blank where there is no number."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    means = [_mean(b) for b in _bins(values, min(max(1, width), len(values)))]
    known = [m for m in means if m is not None]
    if not known:
        return " " * len(means)
    low, high = min(0.0, *known), max(known)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if m is None else blocks[round((m - low) * scale)] for m in means)


def shares(values: Sequence[float], width: int) -> list[int]:
    """`width` cells divided in proportion to the values by largest remainder; all of them when a value is positive."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    exact = [v / total * width for v in values]
    cells = [math.floor(e) for e in exact]
    for i in sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])[: width - sum(cells)]:
        cells[i] += 1
    return cells


def kl_of(record: Mapping[str, Any]) -> tuple[str, float | None]:
    """(name with its estimator, value) of a record's KL to the reference."""
    return next(((k, v) for k, v in record.items() if k.startswith("kl/")), ("kl", None))


def mismatch_text(record: Mapping[str, Any]) -> str:
    """`mismatch 0` when trainer and sampler agree exactly, else how far apart they are."""
    value = record.get("mismatch/max_abs")
    if value is None:
        return "mismatch -"
    return "mismatch 0" if value == 0 else f"mismatch {value:.2g} nats at most"


def groups_text(record: Mapping[str, Any]) -> str:
    """`flat groups 9/16` (of equal rewards, which teach nothing) and, when there are any, `failed 2` (completions
    without a reward) and `error scored 2` (those with `reward.error_score`); empty when none was counted."""
    flat, total, failed = (record.get(k) for k in ("groups/zero_variance", "groups/total", "rewards/failed"))
    parts = []
    if flat is not None:
        parts.append(f"flat groups {flat}" if total is None else f"flat groups {flat}/{total}")
    if failed:
        parts.append(f"failed {failed}")
    if record.get("rewards/error_scored"):
        parts.append(f"error scored {record['rewards/error_scored']}")
    return "  ".join(parts)


def _mismatch_style(record: Mapping[str, Any]) -> str:
    value = record.get("mismatch/max_abs")
    return "" if value is None else "bold green" if value == 0 else "bold yellow"


def tokens_per_second(record: Mapping[str, Any]) -> str:
    """Tokens generated per second of generation, also where it goes on while the loop does something else."""
    tokens = record.get("tokens/generated")
    seconds = record.get("time/rollout_s", record.get("time/generate_s"))
    return f"{tokens / seconds:.0f} tok/s" if tokens is not None and seconds else "- tok/s"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else None


def _bins(values: Sequence[float | None], count: int) -> list[Sequence[float | None]]:
    edges = [i * len(values) // max(1, count) for i in range(count + 1)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
