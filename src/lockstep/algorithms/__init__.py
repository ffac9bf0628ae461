"""Algorithms by name. One file each, one line here; docs/algorithms.md shows how to add one of your own."""

from __future__ import annotations

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.algorithms.base import Algorithm
from lockstep.algorithms.cispo import CISPO
from lockstep.algorithms.dapo import DAPO
from lockstep.algorithms.dr_grpo import DrGRPO
from lockstep.algorithms.grpo import GRPO
from lockstep.algorithms.gspo import GSPO
from lockstep.algorithms.ppo import PPO
from lockstep.algorithms.raft import RAFT
from lockstep.algorithms.reinforce_pp import ReinforcePP
from lockstep.algorithms.rloo import RLOO
from lockstep.errors import ConfigError
from lockstep.loading import load_object
from lockstep.text import did_you_mean

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "ppo": PPO,
    "raft": RAFT,
}


def make_algorithm(settings: AlgorithmConfig, max_new_tokens: int, *, critic: bool | None = None) -> Algorithm:
    """As the recipe's [algorithm] says; max_new_tokens is what `aggregate_length` = 0 stands for. critic: whether the
    run has one; None: not asked.

    Raises ConfigError: no such `module:Class`, a class that is no `Algorithm`, an option that it does not have, a
    need of a critic's values where there is none, or a critic without that need.
    """
    length = float(settings.aggregate_length or max_new_tokens)
    if settings.built_in:
        return ALGORITHMS[settings.name](settings, length)
    made = load_object(settings.name, settings.folder, "class", lambda value: isinstance(value, type))
    if not (isinstance(made, type) and issubclass(made, Algorithm)):
        raise ConfigError(
            f"algorithm.name: {settings.name} is {made!r}; expected a class derived from "
            "lockstep.algorithms.base.Algorithm"
        )
    for name in settings.options:
        if name not in made.options:
            raise ConfigError(
                f"algorithm.options: {settings.name} has no option {name!r}{did_you_mean(name, made.options)}; its "
                f"`options` are {', '.join(made.options) or 'none'}"
            )
    if critic is not None and critic != made.needs_values:
        raise ConfigError(
            f"algorithm.name: {settings.name} needs a critic's values (`needs_values`): add a `[critic]` table"
            if made.needs_values
            else f"`[critic]` has no effect with {settings.name}, whose `needs_values` is False: leave the table out"
        )
    return made(settings, length)
