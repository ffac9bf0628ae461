"""What an audit says: one `Check` per question, and the `Report` of them all as text and JSON. Imports no jax."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.text import duration, sanitize

Status = Literal["pass", "fail", "n/a"]
FORMAT = 1
WIDTH = 120
NAME_WIDTH = 24


@dataclass(frozen=True)
class Finding:
    """An answer without its question; the fields are those of `Check`."""

    status: Status
    figure: str = ""
    cause: str = ""
    remedy: str = ""


def passed(figure: str) -> Finding:
    """It is as it should be; figure: what was measured, over how much."""
    return Finding("pass", figure)


def failed(figure: str, cause: str, remedy: str) -> Finding:
    """It is not. cause: the likely one. remedy: what to do about it."""
    return Finding("fail", figure, cause, remedy)


def not_applicable(why: str) -> Finding:
    """The question has no meaning here."""
    return Finding("n/a", "", why)


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    name: stable, as in docs/audit.md. figure: what was measured, in words; empty if nothing was. cause: of a failure
    the likely one; of n/a why the question has no meaning here; empty where it passed. remedy: of a failure what to do.
    """

    name: str
    status: Status
    figure: str
    cause: str
    remedy: str

    @classmethod
    def of(cls, name: str, finding: Finding) -> Check:
        return cls(name, finding.status, finding.figure, finding.cause, finding.remedy)

    def text(self) -> str:
        """One line; cause and remedy of a failure below it. What models wrote is shown, never obeyed."""
        mark = {"pass": "pass", "fail": "FAIL", "n/a": "n/a "}[self.status]
        lines = [f"{mark}  {self.name:<{NAME_WIDTH}}  {sanitize(self.figure or self.cause)}".rstrip()]
        if self.status == "fail":
            lines += _indented("cause", self.cause) + _indented("remedy", self.remedy)
        return "\n".join(lines)


def _indented(label: str, text: str) -> list[str]:
    first = f"      {label:<6}  "
    return textwrap.wrap(
        sanitize(text), WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )


@dataclass(frozen=True)
class Report:
    """All checks of one audit. subject: what was audited. sizes: how much was sampled and trained to find out."""

    subject: str
    sizes: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "fail")

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def summary(self) -> str:
        """The last line: how many passed, failed, did not apply."""
        counts = {status: sum(c.status == status for c in self.checks) for status in ("pass", "fail", "n/a")}
        said = f"{counts['pass']} passed, {counts['fail']} failed, {counts['n/a']} not applicable"
        return f"{said}, in {duration(self.seconds)}"

    def text(self) -> str:
        return "\n".join([self.subject, self.sizes, *(check.text() for check in self.checks), self.summary()])

    def to_json(self) -> str:
        """One object, ending in a newline: docs/audit.md describes its fields."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "subject": self.subject,
            "sizes": self.sizes,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "checks": [asdict(check) for check in self.checks],
        }
        return json.dumps(content, indent=1) + "\n"
