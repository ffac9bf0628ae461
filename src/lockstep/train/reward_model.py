"""The reward role: a trained reward model that scores completions, on its own mesh.

    model.score(prompts, completions) -> one float per completion

The score is the scalar head's value at the last token of prompt and completion. Where the reward model has the policy's
own tokenizer and no chat template is asked for, it reads the very ids that the policy was given as prompt; else the
prompt's text is made into ids of its own tokenizer (`scored_text`). The completion's text is always encoded anew: what
a reward is given is text. In exact mode a score's bits do not depend on the batch that it was computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.config import Config
from lockstep.errors import ConfigError, DataError, ModelError, RewardError
from lockstep.models.catalog import load_spec, load_value_model
from lockstep.models.decoder import Numerics
from lockstep.models.fetch import Say
from lockstep.models.spec import leaf_table
from lockstep.models.tokenizer import Tokenizer
from lockstep.train.batching import Geometry
from lockstep.train.scored_text import ScoredText
from lockstep.train.sequences import last_of, sequence_batches
from lockstep.train.value_model import values_of
from lockstep.types import Prompt
from lockstep.value_sections import RewardModelConfig


@dataclass(frozen=True)
class RewardModel:
    """name: of the reward. same_tokens: whether a prompt's ids are those of the reward model's tokenizer."""

    name: str
    programs: Programs
    weights: SplitWeights
    text: ScoredText
    geometry: Geometry
    same_tokens: bool

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        """One score per completion; prompts[i] is the prompt of completions[i] (repeated for a group's samples).

        Raises RewardError, naming the sample, for a sequence that is too long and for a score that is not finite.
        """
        assert len(prompts) == len(completions), (len(prompts), len(completions))
        sequences = [self._ids(p, text) for p, text in zip(prompts, completions, strict=True)]
        batches = sequence_batches(sequences, [p.id for p in prompts], self.geometry)
        scores = np.zeros(len(sequences), np.float32)
        for batch in batches:
            last_of(batch, values_of(self.programs, self.weights, batch), scores)
        if not np.isfinite(scores).all():
            at = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise RewardError(
                f"reward model {self.name!r} scored a completion of prompt {prompts[at].id!r} as {scores[at]}: its "
                f"weights hold NaN or infinity, or {self.programs.num.dtype} overflowed"
            )
        return [float(s) for s in scores]

    def _ids(self, prompt: Prompt, completion: str) -> np.ndarray:
        where = f"reward model {self.name!r}, prompt {prompt.id!r}"
        try:
            if self.same_tokens and self.text.template == "plain":
                return self.text.continued(prompt.ids, completion, where)
            return self.text.ids(prompt.text, completion, where)
        except DataError as error:
            raise RewardError(str(error)) from error


def make_reward_models(
    models: Sequence[RewardModelConfig],
    config: Config,
    dial: Dial,
    policy: Tokenizer,
    num: Numerics,
    geometry: Callable[[Config, Programs], Geometry],
    say: Say | None = None,
) -> list[RewardModel]:
    """The reward models of a recipe, all on the mesh `cluster.reward`. policy: its tokenizer. num: the run's numerics.

    Raises ModelError for a folder without a scalar head, ConfigError for a chat template that is not there or a
    `max_tokens` beyond what the model was made for.
    """
    made = []
    for wanted in models:
        if not load_spec(wanted.model).scalar_head:
            raise ModelError(
                f"reward.models {wanted.name!r}: {wanted.model} has a head over tokens, not a scalar one; expected a "
                "ForSequenceClassification folder with one label, such as a [reward_model] recipe exports"
            )
        model = load_value_model(wanted.model, config.model.dtype, std=0.0, seed=0, say=say)
        table, mesh = leaf_table(model.spec), dial.mesh("reward")
        programs = Programs(model.spec, replace(num, lora_scale=0.0), mesh, table)
        rows = geometry(config, programs)
        most = wanted.max_tokens or min(model.spec.max_position, rows.max_rows)
        if most > min(model.spec.max_position, rows.max_rows):
            raise ConfigError(
                f"reward.models {wanted.name!r}: max_tokens = {most}, but the model was made for "
                f"{model.spec.max_position} positions, and a pass holds train.micro_batch_rows = {rows.max_rows}; "
                "lower it"
            )
        weights = SplitWeights.of(place(model.params, table, mesh), model.spec.num_layers)
        text = ScoredText(model.tokenizer, wanted.template, wanted.end, most)
        same = model.tokenizer.fingerprint == policy.fingerprint
        made.append(RewardModel(wanted.name, programs, weights, text, rows, same))
    return made
