"""`lockstep models` and `lockstep generate`."""

from __future__ import annotations

import argparse
import json
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
        temperature=0.0 if options.greedy else options.temperature,
        seed=options.seed,
        stop=options.stop,
        numerics_mode=options.numerics,
        ignore_eos=options.ignore_eos,
        sampling={
            name: getattr(options, name)
            for name in (*_DISTRIBUTION, "min_new_tokens", "top_logprobs")
            if getattr(options, name) is not None
        },
        speculation="draft" if options.draft_model else options.speculation,
        draft_model=options.draft_model,
        draft_tokens=options.draft_tokens,
        say=say,
    )
    if options.json:
        for index, trajectory in enumerate(trajectories):
            print(_as_json(trajectory, options.prompt[index // options.samples]))
        return
    alone = len(trajectories) == 1
    for index, trajectory in enumerate(trajectories):
        if not alone:
            prompt, sample = divmod(index, options.samples)
            print(_heading(trajectory, prompt, sample))
        print(shown(trajectory.text))


def _as_json(trajectory: Trajectory, prompt: str) -> str:
    """One completion as a line of JSON: what was recorded, by token; NaN as null."""
    record = {
        "prompt": prompt,
        "sample": trajectory.index,
        "text": trajectory.text,
        "finish_reason": trajectory.finish_reason,
        "seed": trajectory.seed,
        "prompt_ids": trajectory.prompt_ids.tolist(),
        "completion_ids": trajectory.completion_ids.tolist(),
        "logprobs": trajectory.logprobs.tolist(),
        "kept_logmass": None if trajectory.kept_logmass is None else trajectory.kept_logmass.tolist(),
    }
    details = trajectory.details
    if details is not None and details.top_ids is not None and details.top_logprobs is not None:
        record |= {"top_ids": details.top_ids.tolist(), "top_logprobs": details.top_logprobs.tolist()}
    return json.dumps(record)


def _heading(trajectory: Trajectory, prompt: int, sample: int) -> str:
    """The line above one of several completions."""
    mean = float(trajectory.logprobs.mean()) if len(trajectory.logprobs) else math.nan
    return (
        f"--- prompt {prompt + 1}, sample {sample + 1}: {len(trajectory.completion_ids)} tokens, "
        f"{trajectory.finish_reason}, mean log-probability {mean:.3f} ---"
    )


_DISTRIBUTION = {
    "top_k": ("count", "draw from the N likeliest tokens only"),
    "top_p": ("share", "draw from the fewest likeliest tokens that have this mass together"),
    "min_p": ("share", "draw from tokens at least this many times as likely as the likeliest"),
    "repetition_penalty": ("share", "divide positive logits of tokens seen, multiply negative ones"),
    "presence_penalty": ("any", "taken off the logits of tokens in the completion"),
    "frequency_penalty": ("any", "the same, per occurrence"),
}


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
        help=r"end at this text; one that is a single token stands for that token; \n is a line break; can be repeated",
    )  # fmt: skip
    generate.add_argument("--greedy", action="store_true", help="the likeliest token each time, as --temperature 0")
    share = number(float, 0, "a number >= 0")
    for name, (kind, help) in _DISTRIBUTION.items():
        parse = {"count": count, "share": share, "any": number(float, -math.inf, "a number")}[kind]
        generate.add_argument("--" + name.replace("_", "-"), metavar="N", type=parse, default=None, help=help)
    generate.add_argument("--min-new-tokens", metavar="N", type=count, default=None, help="no stop token before")
    generate.add_argument("--ignore-eos", action="store_true", help="the model's end tokens do not stop")
    generate.add_argument(
        "--top-logprobs", metavar="N", type=count, default=None, help="with --json: list the N likeliest ids per token"
    )
    generate.add_argument(
        "--speculation",
        choices=("off", "ngram"),
        default="off",
        help="guess tokens ahead from text seen (default: off)",
    )
    generate.add_argument("--draft-model", metavar="MODEL", default=None, help="guess tokens ahead by a smaller model")
    generate.add_argument("--draft-tokens", metavar="N", type=count, default=4, help="guesses at most (default: 4)")
    generate.add_argument("--json", action="store_true", help="one JSON object per completion, with its record")
    generate.add_argument("--numerics", choices=("exact", "fast"), default="exact", help="default: exact")
