"""`lockstep models` and `lockstep generate`."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from lockstep.cli.words import Add, escaped, number, say, shown
from lockstep.errors import ModelError

if TYPE_CHECKING:
    from lockstep.types import Trajectory


def _models_list(options: argparse.Namespace) -> None:
    from lockstep.models.catalog import list_configs, list_models

    for model in [*list_models(), *list_configs()]:
        print(model)


def _models_fetch(options: argparse.Namespace) -> None:
    from lockstep.models.catalog import known_model
    from lockstep.models.fetch import fetch

    print(fetch(known_model(options.name), say=say))


def _models_check(options: argparse.Namespace) -> None:
    from lockstep.models.catalog import known_model
    from lockstep.models.fetch import check

    result = check(known_model(options.name))
    if result.status != "ok":
        raise ModelError(str(result))
    print(result)


def _generate(options: argparse.Namespace) -> None:
    from lockstep.rollout.generate import generate

    trajectories = generate(
        options.model,
        options.prompt,
        chat=options.chat,
        samples=options.samples,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop=options.stop,
        numerics_mode=options.numerics,
        say=say,
    )
    alone = len(trajectories) == 1
    for index, trajectory in enumerate(trajectories):
        if not alone:
            prompt, sample = divmod(index, options.samples)
            print(_heading(trajectory, prompt, sample))
        print(shown(trajectory.text))


def _heading(trajectory: Trajectory, prompt: int, sample: int) -> str:
    """The line above one of several completions."""
    mean = float(trajectory.logprobs.mean()) if len(trajectory.logprobs) else math.nan
    return (
        f"--- prompt {prompt + 1}, sample {sample + 1}: {len(trajectory.completion_ids)} tokens, "
        f"{trajectory.finish_reason}, mean log-probability {mean:.3f} ---"
    )


def add_models(add: Add, common: argparse.ArgumentParser) -> None:
    models = add("models", _models_list, "list, fetch and check the models that have a name")
    actions = models.add_subparsers(title="actions", metavar="ACTION")
    actions.add_parser("list", help="the known names (also without an action)", parents=[common])
    for name, command, help in (
        ("fetch", _models_fetch, "download a model and verify it"),
        ("check", _models_check, "verify the files of a model that was fetched"),
    ):
        action = actions.add_parser(name, help=help, description=help, parents=[common])
        action.add_argument("name", metavar="NAME")
        action.set_defaults(command=command)


def add_generate(add: Add) -> None:
    generate = add("generate", _generate, "sample completions from a model")
    generate.add_argument(
        "model", metavar="MODEL", help="a known name, a folder in Hugging Face layout, or a .gguf file"
    )
    generate.add_argument("--prompt", metavar="TEXT", action="append", required=True, help="can be repeated")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    count = number(int, 1, "a whole number >= 1")
    generate.add_argument("--max-new-tokens", metavar="N", type=count, default=128, help="at most (default: 128)")
    generate.add_argument(
        "--temperature",
        metavar="T",
        type=number(float, 0, "a number >= 0"),
        default=1.0,
        help="0: greedy (default: 1)",
    )
    generate.add_argument("--samples", metavar="N", type=count, default=1, help="completions per prompt (default: 1)")
    generate.add_argument(
        "--seed", metavar="N", type=number(int, 0, "a whole number >= 0"), default=0, help="default: 0"
    )
    generate.add_argument(
        "--stop", metavar="TEXT", type=escaped, action="append", default=[],
        help=r"end at this text, one token; \n is a line break; can be repeated",
    )  # fmt: skip
    generate.add_argument("--numerics", choices=("exact", "fast"), default="exact", help="default: exact")
