"""Drafts from a smaller model: a second engine with weights of its own, on the same mesh.

It is asked to go on from a sequence's ids by the same seed, from the same token number: both models then draw by
inversion with the same uniforms, so where their distributions are close they draw the same token, at any temperature.
Its own prefix cache keeps what it has read, so that a turn costs it the rows since the last whole page and one per
draft.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Literal

from jax.sharding import Mesh

from lockstep.cluster.programs import Programs
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.errors import ConfigError
from lockstep.models import load_model
from lockstep.models.decoder import Numerics
from lockstep.models.spec import leaf_table
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.drafts import Drafts, SeenDrafts
from lockstep.rollout.engine import Engine
from lockstep.rollout.warm_up import WarmUp
from lockstep.rollout.work import Request, Sequence
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams


class ModelDrafts:
    """engine: of the draft model, with nothing else to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def propose(self, sequences: List[Sequence], counts: List[int]) -> list[list[int]]:
        """For each sequence at most so many ids that the draft model would draw next."""
        for number, (seq, count) in enumerate(zip(sequences, counts, strict=True)):
            if count and len(seq.tokens) + seq.group.prompt_length + count <= self.engine.max_positions:
                asked = seq.group.request
                params = _as_asked(asked.params, count)
                prompt, first = Prompt(str(number), "", seq.ids), asked.first + len(seq.tokens)
                self.engine.enqueue(Request(prompt, (asked.seeds[seq.index],), params, first))
        found: list[list[int]] = [[] for _ in sequences]
        while self.engine.busy:
            for t in self.engine.step():
                found[int(t.group_id)] = t.completion_ids.tolist()
        return found

    def drawn(self, seq: Sequence, first: int) -> None:
        """It reads everything anew."""

    def warm_up(self, params: SamplingParams) -> WarmUp:
        """Compile what the draft model's engine needs."""
        return self.engine.warm_up(_as_asked(params, 1))


def _as_asked(params: SamplingParams, count: int) -> SamplingParams:
    """What is asked of the draft model for a request: its next `count` tokens, drawn as the request draws."""
    return replace(
        params, max_new_tokens=count, stop_ids=frozenset(), stop_strings=(), min_new_tokens=0, top_logprobs=0,
        prompt_logprobs=False,
    )  # fmt: skip


def make_drafts(
    kind: Literal["off", "ngram", "draft"],
    name: str | None,
    tokenizer: Tokenizer,
    programs: Programs,
    *,
    slots: int,
    max_positions: int,
    say: Callable[[str], None] | None = None,
) -> Drafts | None:
    """Where guesses come from; None where there are to be none. programs: of the model that is sampled from; name: of
    the draft model. Raises as `load_drafts`."""
    if kind == "draft":
        assert name is not None
        sizes = {"slots": slots, "max_positions": max_positions}
        return load_drafts(name, tokenizer, programs.num, programs.mesh, **sizes, say=say)
    return SeenDrafts() if kind == "ngram" else None


def load_drafts(
    name: str,
    tokenizer: Tokenizer,
    num: Numerics,
    mesh: Mesh,
    *,
    slots: int,
    max_positions: int,
    say: Callable[[str], None] | None = None,
) -> ModelDrafts:
    """The draft model of this name, folder or file, ready to propose. num: of the target.

    Raises ConfigError if its tokens are not the target's: then none of its drafts would mean anything.
    """
    model = load_model(name, num.dtype, say=say)
    if model.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"rollout.draft_model = {name!r} has another tokenizer than the model that is sampled from "
            f"({model.tokenizer.vocab_size} and {tokenizer.vocab_size} tokens); use a smaller model of the same family"
        )
    table = leaf_table(model.spec)
    programs = shared_programs(model.spec, replace(num, lora_scale=0.0), mesh, table)
    longest = min(max_positions, model.spec.max_position)
    unused = Fingerprint("draft", "draft", "draft", "draft")
    engine = Engine(programs, slots=slots, max_positions=longest, fingerprint=unused)
    engine.install(PolicyVersion(0, "draft"), place(model.params, table, mesh))
    return ModelDrafts(engine)
