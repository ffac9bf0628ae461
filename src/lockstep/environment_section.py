"""The `[environment]` table of a recipe: what answers the policy between its turns. See `sections`."""

from __future__ import annotations

from typing import Annotated, Literal

from lockstep.schema import REQUIRED, Expects, Float, Int, Section, key


class EnvironmentConfig(Section):
    function: Annotated[str, Expects("module:function")] = key(
        REQUIRED,
        "`module:function`, a `def make(row: dict, seed: int) -> Environment`, called for each sample.",
        pattern=r"^[\w.]+:\w+$",
    )
    max_turns: Int = key(8, "Turns of the policy at most; `rollout.max_new_tokens` is the limit of each.", ge=1)
    max_total_tokens: Int = key(
        REQUIRED, "Tokens after the prompt at most: all turns, and what the environment says between them.", ge=1
    )
    step_deadline_s: Float = key(
        30.0, "Seconds that the environment may take to start, and for each step; then the sample has failed.", gt=0
    )
    on_error: Literal["fail", "drop"] = key(
        "fail",
        "An environment that raises, hangs or breaks its contract. fail: stop the run. drop: leave the sample out, "
        "counted.",
    )
    folder: str | None = key(
        None, "Where `module:function` is looked for before Python's own path. Default: the recipe's.", path="always"
    )
