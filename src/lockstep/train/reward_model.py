"""The reward role: a trained reward model that scores completions, on its own mesh.

    model.score(prompts, completions) -> one float per completion

The score is the scalar head's value at the last token of prompt and completion. Where the reward model has the policy's
own tokenizer and no chat template is asked for, it reads the very ids that the policy was given as prompt; else the
prompt's text is made into ids of its own tokenizer (`scored_text`). The completion's text is always encoded anew: what
a reward is given is text. In exact mode a score's bits do not depend on the batch that it was computed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.config import Config
from lockstep.envs.outcome import Outcome
from lockstep.errors import ConfigError, DataError, ModelError, RewardError
from lockstep.models.catalog import LoadedModel, load_spec, load_value_model
from lockstep.models.decoder import Numerics
from lockstep.models.fetch import Say
from lockstep.models.spec import leaf_table
from lockstep.models.tokenizer import Tokenizer
from lockstep.sync.verify import leaf_digests, tree_digest
from lockstep.train.batching import Geometry
from lockstep.train.scored_text import ScoredText
from lockstep.train.sequences import last_of, sequence_batches
from lockstep.train.trained_model import outputs_of
from lockstep.types import Prompt
from lockstep.value_sections import RewardModelConfig


@dataclass(frozen=True)
class RewardModel:
    """name: of the reward; weight: its factor in the sum. same_tokens: whether a prompt's ids are those of the reward
    model's tokenizer. digest: of the weights."""

    name: str
    weight: float
    programs: Programs
    weights: SplitWeights
    text: ScoredText
    geometry: Geometry
    same_tokens: bool
    digest: str

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        """One score per completion; prompts[i] is the prompt of completions[i] (repeated for a group's samples).

        Raises RewardError, naming the prompt, for a sequence that is too long and for a score that is not finite.
        """
        found = self.outcomes(prompts, completions, until_failure=False)
        if failed := next((outcome for outcome in found if outcome.kind is not None), None):
            raise RewardError(failed.why)
        return [outcome.value for outcome in found]

    def outcomes(self, prompts: Sequence[Prompt], completions: Sequence[str], *, until_failure: bool) -> list[Outcome]:
        """The same, with what cannot be scored as an outcome of its own (`envs.rewards.Scorer`)."""
        assert len(prompts) == len(completions), (len(prompts), len(completions))
        made = [self._ids(p, text) for p, text in zip(prompts, completions, strict=True)]
        right = [i for i, ids in enumerate(made) if isinstance(ids, np.ndarray)]
        sequences, groups = [ids for ids in made if isinstance(ids, np.ndarray)], [prompts[i].id for i in right]
        scores = np.zeros(len(sequences), np.float32)
        for batch in sequence_batches(sequences, groups, self.geometry):
            last_of(batch, outputs_of(self.programs, self.weights, batch), scores)
        found = dict(zip(right, scores.tolist(), strict=True))
        return [ids if isinstance(ids, Outcome) else self._outcome(found[i], prompts[i]) for i, ids in enumerate(made)]

    def _outcome(self, score: float, prompt: Prompt) -> Outcome:
        if math.isfinite(score):
            return Outcome(score)
        return Outcome(
            kind="not_a_number",
            why=f"reward model {self.name!r} scored a completion of prompt {prompt.id!r} as {score}: its weights hold "
            f"NaN or infinity, or {self.programs.num.dtype} overflowed",
        )

    def _ids(self, prompt: Prompt, completion: str) -> np.ndarray | Outcome:
        where = f"reward model {self.name!r}, prompt {prompt.id!r}"
        try:
            if self.same_tokens and self.text.template == "plain":
                return self.text.continued(prompt.ids, completion, where)
            return self.text.ids(prompt.text, completion, where)
        except DataError as error:
            return Outcome(kind="exception", why=str(error))


def make_reward_models(
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

    def make(wanted: RewardModelConfig) -> RewardModel:
        model = _load(wanted, config.model.dtype, say)
        table, mesh = leaf_table(model.spec), dial.mesh("reward")
        programs = shared_programs(model.spec, replace(num, lora_scale=0.0), mesh, table)
        rows = geometry(config, programs)
        most = min(model.spec.max_position, rows.max_rows)
        if wanted.max_tokens > most:
            raise ConfigError(
                f"reward.models {wanted.name!r}: max_tokens = {wanted.max_tokens}, but the model was made for "
                f"{model.spec.max_position} positions, and a pass holds train.micro_batch_rows = {rows.max_rows}; "
                "lower it"
            )
        placed = place(model.params, table, mesh)
        return RewardModel(
            name=wanted.name,
            weight=wanted.weight,
            programs=programs,
            weights=SplitWeights.of(placed, model.spec.num_layers),
            text=ScoredText(model.tokenizer, wanted.template, wanted.end, wanted.max_tokens or most),
            geometry=rows,
            same_tokens=model.tokenizer.fingerprint == policy.fingerprint,
            digest=tree_digest(leaf_digests(placed)),
        )

    return [make(wanted) for wanted in config.reward.models]


def _load(wanted: RewardModelConfig, dtype: str, say: Say | None) -> LoadedModel:
    if not load_spec(wanted.model).scalar_head:
        raise ModelError(
            f"reward.models {wanted.name!r}: {wanted.model} has a head over tokens, not a scalar one; expected a "
            "ForSequenceClassification folder with one label, such as a [reward_model] recipe exports"
        )
    return load_value_model(wanted.model, dtype, std=0.0, seed=0, say=say)
