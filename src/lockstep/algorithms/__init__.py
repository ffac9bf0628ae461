"""Algorithms by name: `ALGORITHMS[config.name].from_config(config)`. One file each, one line here."""

from __future__ import annotations

from lockstep.algorithms.base import Algorithm
from lockstep.algorithms.grpo import GRPO

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO}
