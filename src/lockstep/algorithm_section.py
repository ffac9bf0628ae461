"""The `[algorithm]` table of a recipe: how rewards become a loss. See `sections`.

Algorithms share most keys and differ in their defaults: `OWN` is that table, and the one that `docs/algorithms.md`
shows. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from lockstep.schema import Bool, Expects, Float, Int, Section, key, literal, toml_value
from lockstep.text import did_you_mean

KLEstimator = Literal["k1", "k2", "k3"]
RatioLevel = Literal["token", "sequence", "trajectory"]
Aggregate = Literal["token_mean", "sequence_mean", "constant"]
Correction = Literal["none", "token_truncated", "token_masked", "sequence_truncated", "sequence_masked"]
RewardScale = Literal["group", "batch", "none"]

_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "ratio": "token"}
_GROUP = {"scale_rewards": "group", "std_epsilon": 1e-4}

OWN: dict[str, dict[str, Any]] = {
    "grpo": {**_CLIP, **_GROUP, "aggregate": "token_mean"},
    "dr_grpo": {**_CLIP, "aggregate": "constant"},
    "dapo": {**_CLIP, **_GROUP, "clip_high": 0.28, "aggregate": "token_mean", "dynamic_rounds": 3},
    "gspo": {**_CLIP, **_GROUP, "clip_low": 3e-4, "clip_high": 4e-4, "ratio": "sequence", "aggregate": "sequence_mean"},
    "cispo": {**_GROUP, "clip_low": 1.0, "clip_high": 4.0, "ratio": "token", "aggregate": "token_mean"},
    "rloo": {**_CLIP, "ratio": "trajectory", "aggregate": "sequence_mean", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp": {
        **_CLIP, "aggregate": "token_mean", "kl_in": "reward", "kl_estimator": "k1", "gamma": 1.0,
        "group_baseline": False, "std_epsilon": 1e-8,
    },
    "ppo": {
        **_CLIP, "aggregate": "token_mean", "kl_in": "reward", "kl_estimator": "k1", "gamma": 1.0, "lam": 0.95,
        "whiten": True, "std_epsilon": 1e-8,
    },
    "raft": {"aggregate": "token_mean", "best_of": 1},
}  # fmt: skip
"""Per algorithm, the keys that only some have, and where its default is not the table's."""

SHARED = (
    "name", "options", "folder", "aggregate", "aggregate_length", "kl_coef", "kl_estimator", "kl_in", "measure_kl",
    "reference_every", "reference_mix", "entropy_coef", "measure_entropy", "correction", "correction_cap",
    "mask_truncated", "overlong_tokens", "overlong_penalty", "dynamic_rounds",
)  # fmt: skip


class AlgorithmConfig(Section):
    name: Annotated[str, Expects("an algorithm, or `module:Class` of your own")] = key(
        "grpo",
        f"{', '.join(f'`{name}`' for name in OWN)}, or `module:Class` of your own; docs/algorithms.md has papers, "
        "formulas and each one's defaults.",
        min_length=1,
    )
    options: Annotated[Mapping[str, Any], AfterValidator(toml_value), Expects("a table")] = key(
        {}, "`module:Class`: settings of its own, as the class names them in its `options`."
    )
    folder: str | None = key(
        None, "Where `module:Class` is looked for before Python's own path. Default: the recipe's.", path="always"
    )
    clip_low: Float = key(
        0.2, "The ratio is clipped below at 1 - clip_low.", ge=0, le=1, also=("epsilon", "clip", "cliprange")
    )
    clip_high: Float = key(0.2, "The ratio is clipped above at 1 + clip_high.", gt=0, also=("epsilon_high",))
    dual_clip: Float = key(
        0.0,
        "Where the advantage is negative, the objective is at least so many times it (arXiv:1912.09729; 3 is usual); "
        "0: unbounded.",
        ge=0,
        also=("delta", "clip_ratio_c"),
    )
    ratio: RatioLevel = key(
        "token",
        "The ratio of policies that is clipped. token: each token's. sequence: its geometric mean over the completion "
        "(GSPO). trajectory: its product over the completion (RLOO).",
        also=("importance_sampling_level",),
    )
    aggregate: Aggregate = key(
        "token_mean",
        "token_mean: mean over all tokens of the batch. sequence_mean: mean over completions of each one's token mean. "
        "constant: sum over tokens, divided by completions x aggregate_length.",
        also=("loss_type", "loss_agg_mode"),
    )
    aggregate_length: Int = key(0, "constant: tokens that a completion counts for; 0: as many as one can have.", ge=0)
    scale_rewards: RewardScale = key(
        "group", "What the advantage is divided by: the standard deviation of its group, of the batch, or nothing."
    )
    std_epsilon: Float = key(1e-4, "Added to a standard deviation before dividing by it.", gt=0)
    gamma: Float = key(1.0, "Discount per token of later rewards.", ge=0, le=1, also=("discount",))
    lam: Float = key(
        0.95, "GAE's lambda: 1 trusts the rewards, 0 the critic (arXiv:1506.02438).", ge=0, le=1, also=("lambda",)
    )
    whiten: Bool = key(True, "Shift and scale the advantages of a batch's tokens to mean 0 and deviation 1.")
    group_baseline: Bool = key(False, "Subtract the mean reward of the group before the batch is normalised.")
    best_of: Int = key(1, "Best completions of each group that are trained on.", ge=1)
    kl_coef: Float = key(0.0, "Weight of the KL to the reference; 0: none.", ge=0, also=("beta", "kl_weight"))
    kl_in: Literal["loss", "reward"] = key(
        "loss",
        "loss: added to the loss, differentiated (k2 or k3). reward: taken off the rewards, token by token (k1). The "
        "others are refused there: their gradient is no KL's.",
    )
    kl_estimator: KLEstimator = key("k3", "Which estimate of the KL, per token (Schulman 2020).", also=("kl_type",))
    measure_kl: Bool = key(True, "Measure the KL each step, used or not (a forward pass of the reference).")
    reference_every: Int = key(
        0,
        "The reference moves towards the policy after every so many steps; 0: it stays as it was at the start.",
        ge=0,
        also=("ref_model_sync_steps", "sync_ref_model"),
    )
    reference_mix: Float = key(
        1.0,
        "How far it moves then: reference = mix * policy + (1 - mix) * reference. 1: it becomes the policy; every step "
        "with a small one: a moving average.",
        gt=0,
        le=1,
        also=("ref_model_mixup_alpha",),
    )
    entropy_coef: Float = key(
        0.0, "Weight of the policy's entropy, a bonus in the loss; 0: none.", ge=0, also=("entropy_weight", "ent_coef")
    )
    measure_entropy: Bool = key(False, "Measure the entropy each step, used or not (the head once more).")
    correction: Correction = key(
        "none",
        "For tokens that other arithmetic (numerics fast) or older weights sampled: weigh them with the probability "
        "under the weights that train over the recorded one, per token or per completion (product), truncated at "
        "correction_cap, or masked where above it or below 1 / correction_cap.",
        also=("importance_sampling_correction", "tis"),
    )
    correction_cap: Float = key(2.0, "Largest weight of the correction.", gt=0, also=("tis_threshold",))
    mask_truncated: Bool = key(
        False,
        "Leave out of the loss what a limit ended: rollout.max_new_tokens, in an environment also its max_turns and "
        "max_total_tokens.",
        also=("mask_truncated_completions",),
    )
    overlong_tokens: Int = key(
        0,
        "Over the last so many tokens before max_new_tokens the reward falls by up to overlong_penalty (DAPO's soft "
        "punishment); 0: not at all.",
        ge=0,
        also=("overlong_buffer",),
    )
    overlong_penalty: Float = key(1.0, "What a completion of max_new_tokens loses.", gt=0)
    dynamic_rounds: Int = key(
        0,
        "Groups whose rewards are all equal are replaced by groups of further prompts, sampled in at most so many "
        "more rounds; 0: they stay in the batch, with advantage 0.",
        ge=0,
        also=("dynamic_sampling", "filter_groups", "max_num_gen_batches"),
    )

    @property
    def built_in(self) -> bool:
        return self.name in OWN

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    def keys_of_others(self) -> list[str]:
        """Names of the keys that have no effect with this algorithm."""
        if not self.built_in:
            return []
        used = {*SHARED, *OWN[self.name]} - {"options", "folder"}  # of a `module:Class`
        return [name for name in type(self).model_fields if name not in used]

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_algorithm(cls, data: Any) -> Any:
        name = data.get("name", "grpo") if isinstance(data, Mapping) else None
        return {**OWN[name], **data} if isinstance(name, str) and name in OWN else data

    @model_validator(mode="after")
    def _fits(self) -> AlgorithmConfig:
        if not self.built_in and ":" not in self.name:
            raise ValueError(
                f"`algorithm.name` = {literal(self.name)} is no algorithm{did_you_mean(self.name, OWN)}; there are "
                f"{', '.join(OWN)}; one of your own is written `module:Class`"
            )
        for name in self.keys_of_others():
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                users = [other for other in OWN if name in OWN[other]]
                raise ValueError(
                    f"`algorithm.{name}` has no effect with name = {literal(self.name)}: it belongs to "
                    f"{', '.join(users) or 'a `module:Class` of your own'}; leave it out or change the name"
                )
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"`algorithm.dual_clip` = {self.dual_clip} must be > 1, or 0 for none; 3 is usual")
        if self.correction != "none" and self.correction.endswith("masked") and self.correction_cap <= 1:
            raise ValueError(
                f"`algorithm.correction_cap` = {self.correction_cap} would mask about half of all tokens, those more "
                "likely now than when they were drawn; use more than 1"
            )
        return self
