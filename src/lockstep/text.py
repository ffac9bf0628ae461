"""Text for people: what models wrote made harmless, numbers made short, names that were probably meant.

Imports no jax.
"""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def sanitize(text: str, limit: int | None = None) -> str:
    """Text of any origin as printable characters of one line; cut to `limit` characters with an ellipsis.

    A character that is invisible or steers the terminal (controls, escapes, bidirectional and format characters, line
    separators, surrogates) is written as its Python escape.
    """
    kept = text if limit is None else text[: limit + 1]
    out = "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNSEEN else c for c in kept)
    return out if limit is None or len(out) <= limit else out[: max(0, limit - 3)] + "..."


def visible(text: str) -> str:
    """As `sanitize`, for text that keeps its lines: line breaks and tabs stay."""
    return "\n".join("\t".join(map(sanitize, line.split("\t"))) for line in text.split("\n"))


def closest(word: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names that `word` may be a misspelling of, nearest first, at most `count`. cutoff: the share of the
    characters, in order, that must agree; above 0, at most 1."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=cutoff)


def did_you_mean(word: str, known: Iterable[str], *, show: Callable[[str], str] = str, cutoff: float = 0.6) -> str:
    """The end of an error about an unknown name, `; did you mean X?`; nothing when no known name is near."""
    return "".join(f"; did you mean {show(name)}?" for name in closest(word, known, cutoff=cutoff))


def duration(seconds: float | None) -> str:
    """Seconds for people: `0.42s`, `7.9s`, `1m32s`, `2h05m`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if seconds >= 3600 else f"{minutes}m{int(seconds % 60):02d}s"


def number(value: Any) -> str:
    """A metric for people: four significant digits, whole numbers as they are, `-` for what is not there."""
    if value is None:
        return "-"
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e9):
        return f"{int(value)}"
    return f"{value:.4g}"


def format_bytes(count: int) -> str:
    """`512 B`, `1.5 KiB`, `14.96 GiB`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}" if unit != "B" else f"{count} B"
