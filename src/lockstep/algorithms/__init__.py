"""Algorithms by name. One file each; a new one is a class with `advantages`, `loss` and `needs_reference`."""

from __future__ import annotations

from typing import Any

from lockstep.algorithms.grpo import GRPO

ALGORITHMS = {"grpo": GRPO}


def make_algorithm(config: Any) -> GRPO:
    """The algorithm that a recipe's [algorithm] table names, with its settings."""
    return GRPO(config.clip_low, config.clip_high, config.kl_coef, config.kl_estimator, config.std_epsilon)
