"""What the report says of weight syncs: where their seconds and bytes went, and a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.report.charts import Series, line_chart, stacked_bars
from lockstep.report.data import RunData, finite
from lockstep.report.figures import Figure, last
from lockstep.text import format_bytes

# In the order in which a sync goes through them, with the class that colours each.
PHASES = {
    "select": "s6", "map": "s4", "stage": "s2", "transfer": "s1", "verify": "s3", "probe": "s5", "flip": "p-wait",
}  # fmt: skip


def sync_figures(run: RunData) -> list[Figure]:
    """Charts over published versions; those of what was never measured are left out."""
    receipts = _by_version(run)
    figures = [_seconds_figure(receipts), _bytes_figure(receipts), _density_figure(receipts)]
    return [figure for figure in figures if figure is not None]


def _by_version(run: RunData) -> list[Mapping[str, Any]]:
    """The last receipt of each version, by version; a resume publishes the checkpoint's again."""
    found = {r["version"]: r for r in run.receipts if isinstance(r.get("version"), int)}
    return [found[version] for version in sorted(found)]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _seconds_figure(receipts: list[Mapping[str, Any]]) -> Figure | None:
    spent = [r["seconds"] if isinstance(r.get("seconds"), Mapping) else {} for r in receipts]
    columns = {phase: [_number(seconds.get(phase)) for seconds in spent] for phase in PHASES}
    parts = [Series(phase, column, PHASES[phase]) for phase, column in columns.items() if finite(column)]
    if not parts:
        return None
    chart = stacked_bars("Seconds per sync by phase", [r["version"] for r in receipts], parts, size=(560, 190))
    totals = [sum(finite([part.values[i] for part in parts])) for i in range(len(receipts))]
    legend = tuple((f"bar {part.style}", part.label) for part in parts)
    return Figure("Where a sync's time went", "seconds, by published version", last(totals), chart, legend)


def _bytes_figure(receipts: list[Mapping[str, Any]]) -> Figure | None:
    columns = {name: [_number(r.get(f"bytes_{name}")) for r in receipts] for name in ("planned", "moved", "crossing")}
    if not any(finite(columns["moved"])):
        return None
    mib = {name: [None if v is None else v / 2**20 for v in column] for name, column in columns.items()}
    series = [
        Series("moved", mib["moved"], "s1"),
        Series("planned", mib["planned"], "s2", "points"),
        Series("crossed links", mib["crossing"], "s3"),
    ]
    chart = line_chart("Bytes per sync", [r["version"] for r in receipts], series)
    legend = (("s1", "written"), ("s2 dot", "planned to be written"), ("s3", "crossed links"))
    pairs = [(a, b) for a, b in zip(columns["planned"], columns["moved"], strict=True) if a is not None]
    apart = sum(a != b for a, b in pairs)
    note = "Every sync wrote just what its plan said."
    if apart:
        note = f"{apart} {'sync' if apart == 1 else 'syncs'} wrote other bytes than planned!"
    return Figure(
        "Bytes per sync", "MiB, by published version", last(mib["moved"]), chart, legend, note if pairs else ""
    )


def _density_figure(receipts: list[Mapping[str, Any]]) -> Figure | None:
    density = [_number(r.get("density")) for r in receipts]
    if not finite(density):
        return None
    percent = [None if v is None else 100 * v for v in density]
    chart = line_chart("Density of the delta", [r["version"] for r in receipts], [Series("changed", percent, "s1")])
    return Figure("Density of the delta", "% of elements that changed", last(percent), chart)


def receipt_row(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    seconds = receipt.get("seconds")
    total = sum(seconds.values()) if isinstance(seconds, Mapping) else seconds
    evicted, stored = receipt.get("evicted"), receipt.get("stored")
    density = _number(receipt.get("density"))
    return {
        "step": receipt.get("step"),
        "version": receipt.get("version"),
        "digest": str(receipt.get("digest", ""))[:12],
        "plan": str(receipt.get("plan") or "")[:12],
        "how": {True: "same buffers", False: "moved", None: "-"}[receipt.get("same_buffers")],
        "planned": receipt.get("bytes_planned"),
        "moved": receipt.get("bytes_moved"),
        "crossing": receipt.get("bytes_crossing"),
        "probed": receipt.get("probed"),
        "seconds": total,
        "transport": str(receipt.get("transport") or ""),
        "stored": "; ".join(map(_stored_words, stored.values())) if isinstance(stored, Mapping) else "",
        "density": None if density is None else 100 * density,
        "evicted": "; ".join(f"{name}: {why}" for name, why in evicted.items()) if isinstance(evicted, Mapping) else "",
    }


def _stored_words(stored: Any) -> str:
    """`delta, 2.6 MiB`: of one replica."""
    if not isinstance(stored, Mapping) or _number(stored.get("bytes")) is None:
        return "-"
    return f"{stored.get('kind', '?')}, {format_bytes(int(stored['bytes']))}"


def sync_summary(run: RunData) -> str:
    """All of them in a sentence."""
    if not run.receipts:
        return "No sync is recorded."
    same = sum(bool(r.get("same_buffers")) for r in run.receipts)
    moved = sum(r.get("bytes_moved") or 0 for r in run.receipts)
    newest = run.receipts[-1]
    ends = f"{newest.get('source', 'trainer')} → {newest.get('destination', 'sampler')}"
    dropped = sorted({name for r in run.receipts if isinstance(r.get("evicted"), Mapping) for name in r["evicted"]})
    return (
        f"{ends}: {len(run.receipts)} published, {same} on the same buffers (nothing runs), "
        f"{len(run.receipts) - same} moved, {format_bytes(moved)} in all."
        + (f" Replicas dropped on the way: {', '.join(dropped)}." if dropped else "")
    )
