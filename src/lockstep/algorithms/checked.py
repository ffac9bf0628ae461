"""What an algorithm said about a step's samples, held against what it may say: the class may be anybody's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    per_sample = _numbers(algorithm, "per_sample", found.per_sample, count)
    per_token, returns = (
        None if arrays is None else _per_token(algorithm, name, arrays, lengths)
        for name, arrays in (("per_token", found.per_token), ("returns", found.returns))
    )
    for name in ("zero_variance", "groups"):
        if not isinstance(getattr(found, name), int | np.integer):
            raise _wrong(algorithm, f"gave {name} = {getattr(found, name)!r:.40}, expected how many groups")
    used = None
    if found.used is not None:
        used = np.asarray(found.used)
        if used.shape != (count,) or used.dtype != bool:
            raise _wrong(algorithm, f"gave used {used.shape} {used.dtype}, expected [{count}] bool")
    if samples.values is not None and found.returns is None:
        raise _wrong(algorithm, "gave no `returns`, and there is a critic, which learns from them")
    return replace(found, per_sample=per_sample, per_token=per_token, returns=returns, used=used)


def _per_token(algorithm: Algorithm, name: str, arrays: Sequence[Any], lengths: Sequence[int]) -> list[np.ndarray]:
    if len(arrays) != len(lengths):
        raise _wrong(algorithm, f"gave {name} of {len(arrays)} samples, expected {len(lengths)}")
    each = enumerate(zip(arrays, lengths, strict=True))
    return [_numbers(algorithm, f"{name}[{i}]", array, length) for i, (array, length) in each]


def _numbers(algorithm: Algorithm, name: str, array: Any, length: int) -> np.ndarray:
    values = np.asarray(array)
    if values.shape != (length,) or values.dtype.kind not in "fiu":
        raise _wrong(algorithm, f"gave {name} {values.shape} {values.dtype}, expected [{length}] numbers")
    finite = np.isfinite(values) & (np.abs(values.astype(np.float64)) <= np.finfo(np.float32).max)
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        raise _wrong(
            algorithm,
            f"gave {name}[{at}] = {values[at]}, expected what float32 holds; a group without spread is the usual cause",
        )
    return values.astype(np.float64)


def _wrong(algorithm: Algorithm, what: str) -> AlgorithmError:
    return AlgorithmError(
        f"algorithm {algorithm.settings.name}: advantages {what} (docs/algorithms.md). Nothing of "
        "the step was trained on"
    )
