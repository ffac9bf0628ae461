"""What an algorithm said about a step's samples, held against what it may say: the class may be anybody's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.algorithms.base import Advantages, Algorithm, Samples
from lockstep.errors import AlgorithmError


def judged(algorithm: Algorithm, samples: Samples) -> Advantages:
    """`algorithm.advantages(samples)`, checked.

    Raises AlgorithmError, naming the class: it raised, gave no `Advantages`, or one whose arrays have other lengths
    than the samples or hold what is not a number; no `returns` where a critic is to learn from them.
    """
    try:
        found = algorithm.advantages(samples)
    except Exception as error:
        raise _wrong(algorithm, f"raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Advantages):
        raise _wrong(algorithm, f"gave {type(found).__name__}, expected an `Advantages`")
    count, lengths = len(samples.rewards), [int(n) for n in samples.lengths]
    _require_numbers(algorithm, "per_sample", found.per_sample, count)
    for name, arrays in (("per_token", found.per_token), ("returns", found.returns)):
        if arrays is not None:
            _require_per_token(algorithm, name, arrays, lengths)
    if found.used is not None:
        used = np.asarray(found.used)
        if used.shape != (count,) or used.dtype != bool:
            raise _wrong(algorithm, f"gave used {used.shape} {used.dtype}, expected [{count}] bool")
    if samples.values is not None and found.returns is None:
        raise _wrong(algorithm, "gave no `returns`, and there is a critic, which learns from them")
    return found


def _require_per_token(algorithm: Algorithm, name: str, arrays: Sequence[Any], lengths: Sequence[int]) -> None:
    if len(arrays) != len(lengths):
        raise _wrong(algorithm, f"gave {name} of {len(arrays)} samples, expected {len(lengths)}")
    for i, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        _require_numbers(algorithm, f"{name}[{i}]", array, length)


def _require_numbers(algorithm: Algorithm, name: str, array: Any, length: int) -> None:
    values = np.asarray(array)
    if values.shape != (length,) or values.dtype.kind not in "fiu":
        raise _wrong(algorithm, f"gave {name} {values.shape} {values.dtype}, expected [{length}] numbers")
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise _wrong(algorithm, f"gave {name}[{at}] = {values[at]}; a group without spread is the usual cause")


def _wrong(algorithm: Algorithm, what: str) -> AlgorithmError:
    return AlgorithmError(
        f"algorithm {algorithm.settings.name}: advantages {what} (docs/algorithms.md). Nothing of "
        "the step was trained on"
    )
