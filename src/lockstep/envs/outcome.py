"""What became of one function for one completion: a number, or why there is none. And how a function is called.

The same code runs in lockstep's own process and in the workers; it imports no jax and no numpy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from lockstep.loading import describe_exception

RewardFunction = Callable[[list[str], list[str], list[dict[str, Any]]], Any]
Kind = Literal["exception", "timeout", "crashed", "not_a_number", "no_answer", "unparsed"]
"""exception: it raised. timeout: its deadline passed. crashed: its process ended. not_a_number: what it returned is not
a finite number. no_answer: a judge could not be asked, or refused. unparsed: a judge's answer holds no verdict."""


@dataclass(frozen=True)
class Outcome:
    """A finite value; or the kind of failure and, in words, what failed and how."""

    value: float = math.nan
    kind: Kind | None = None
    why: str = ""


class WrongCount(Exception):
    """A function returned something else than one value per completion: no sample is at fault, the function is."""


def call(
    name: str, function: RewardFunction, batch: tuple[list[str], list[str], list[dict[str, Any]]]
) -> list[Outcome]:
    """One outcome per completion of (prompts, completions, rows). What it returns is iterated to its end: a generator's
    code runs only then. An `async def` is awaited. Raises: WrongCount."""
    count = len(batch[1])
    try:
        result = function(*batch)
        if inspect.isawaitable(result):
            import asyncio  # late: a worker starts faster without it

            result = asyncio.run(_wait_for(result))
        if isinstance(result, Iterable) and not isinstance(result, _NOT_LISTS):
            result = list(result)
    except (Exception, SystemExit) as exc:
        return [Outcome(kind="exception", why=f"reward {name!r} raised {describe_exception(exc)}")] * count
    if not isinstance(result, list):
        raise WrongCount(
            f"reward {name!r} returned {short(result)} ({type(result).__name__}); expected a list of {count} numbers, "
            "one per completion"
        )
    if len(result) != count:
        raise WrongCount(
            f"reward {name!r} returned {len(result)} values for {count} completions; expected exactly one per "
            "completion, in their order"
        )
    return [number(name, value) for value in result]


_NOT_LISTS = (str, bytes, Mapping)  # iterable, but never a list of rewards


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def number(name: str, value: object) -> Outcome:
    """A finite number of any kind (bool, int, float, NumPy or array scalar); anything else fails with a reason."""
    if not isinstance(value, SupportsFloat):
        return Outcome(
            kind="not_a_number",
            why=f"reward {name!r} returned {short(value)} ({type(value).__name__}), which is not a number",
        )
    try:
        found = float(value)
    except Exception as exc:  # a class of the user's may raise anything
        return Outcome(
            kind="not_a_number", why=f"reward {name!r} returned {short(value)}, which is not one number ({exc})"
        )
    if math.isfinite(found):
        return Outcome(found)
    return Outcome(kind="not_a_number", why=f"reward {name!r} returned {found}, which is not a finite number")


def short(value: object) -> str:
    """A value for an error: its repr, cut in the middle."""
    try:
        text = repr(value)
    except Exception as exc:
        return f"<{type(value).__name__} whose repr raised {type(exc).__name__}>"
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"


def failures(outcomes: Sequence[Outcome]) -> bool:
    """Whether one of them failed."""
    return any(outcome.kind is not None for outcome in outcomes)
