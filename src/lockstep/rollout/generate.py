"""Completions from a model without a training run: `lockstep generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax

from lockstep.cluster.devices import device_kinds
from lockstep.cluster.mesh import Dial
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.errors import ConfigError
from lockstep.models import load_model
from lockstep.models.decoder import Numerics
from lockstep.models.spec import leaf_table
from lockstep.rollout.draft_model import make_drafts
from lockstep.rollout.engine import Engine, make_fingerprint, request_seed
from lockstep.rollout.stops import split_stops
from lockstep.sync.verify import leaf_digests, policy_digest
from lockstep.types import PolicyVersion, Prompt, SamplingParams, Trajectory

TILE_ROWS, PAGE_SIZE = 32, 16


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    chat: bool,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop: Sequence[str],
    numerics_mode: str,
    dtype: str = "float32",
    ignore_eos: bool = False,
    sampling: Mapping[str, Any] | None = None,
    speculation: Literal["off", "ngram", "draft"] = "off",
    draft_model: str | None = None,
    draft_tokens: int = 4,
    say: Callable[[str], None] | None = None,
) -> list[Trajectory]:
    """`samples` completions of every prompt, in order, with text and recorded log-probabilities.

    model: a known name, a folder or a .gguf file. chat: each prompt is a user turn in the model's own template. stop:
    texts that end a completion (see `stops.split_stops`), as the model's end-of-sequence ids do unless ignore_eos.
    numerics_mode: `exact` or `fast`. sampling: further fields of `SamplingParams`. speculation, draft_model,
    draft_tokens: as in a recipe. say: told what takes long, such as a download. Raises a LockstepError for a model, a
    prompt or parameters that cannot be used.
    """
    if not prompts:
        raise ConfigError("generate: no prompts were given; pass at least one")
    if samples < 1:
        raise ConfigError(f"generate: {samples} samples of each prompt leave nothing to do; ask for at least one")
    if numerics_mode not in ("exact", "fast"):
        raise ConfigError(f"generate: numerics mode {numerics_mode!r} is not known; use exact or fast")
    loaded = load_model(model, dtype, say=say)
    tokenizer, spec = loaded.tokenizer, loaded.spec
    made = []
    for number, text in enumerate(prompts):
        ids = tokenizer.apply_template([{"role": "user", "content": text}]) if chat else tokenizer.encode_prompt(text)
        made.append(Prompt(f"prompt/{number}", text, tuple(ids)))
    longest = max(len(p.ids) for p in made) + max_new_tokens
    if longest > spec.max_position:
        raise ConfigError(
            f"the longest prompt and {max_new_tokens} new tokens need {longest} positions, {model} was made for "
            f"{spec.max_position}; shorten the prompt or lower --max-new-tokens"
        )
    stop_ids, texts = split_stops(tokenizer, stop)
    if not ignore_eos:
        stop_ids |= tokenizer.eos_ids
    params = SamplingParams(temperature, max_new_tokens, stop_ids, texts, **(sampling or {}))
    mesh = Dial.build({"actor": {}, "rollout": "actor"}, jax.devices()[:1]).mesh("rollout")
    table = leaf_table(spec)
    programs = shared_programs(
        spec, Numerics(dtype, TILE_ROWS if numerics_mode == "exact" else 0, PAGE_SIZE), mesh, table
    )
    weights = place(loaded.params, table, mesh)
    slots = min(128, -(-len(made) * samples // TILE_ROWS) * TILE_ROWS)
    fingerprint = make_fingerprint(tokenizer, params, programs.num, device_kinds(list(mesh.devices.flat)))
    drafts = make_drafts(speculation, draft_model, tokenizer, programs, slots=slots, max_positions=longest, say=say)
    decode = partial(tokenizer.decode, skip_special=False)
    engine = Engine(
        programs, slots=slots, max_positions=longest, decode=decode, drafts=drafts, draft_tokens=draft_tokens,
        fingerprint=fingerprint,
    )  # fmt: skip
    engine.install(PolicyVersion(0, policy_digest({}, leaf_digests(weights))), weights)
    seeds = {p.id: [request_seed(seed, 0, p.id, i) for i in range(samples)] for p in made}
    done = engine.generate(made, seeds, params)
    return [replace(t, text=tokenizer.decode(t.completion_ids.tolist())) for t in done]
