"""The tables of what gives values to completions: the critic and reward models. Each key with its meaning."""

from __future__ import annotations

from typing import Literal

from lockstep.schema import REQUIRED, Float, Int, Section, key
from lockstep.sections import LoraConfig, OptimConfig, PositiveOrInf


class CriticConfig(Section):
    model: str | None = key(
        None,
        "What the critic starts from: a model with a scalar head (a reward model), or any other, which gets a fresh "
        "head. Default: the policy's model.",
        path="marked",
        min_length=1,
        also=("path", "name", "critic_model"),
    )
    head_std: Float = key(
        0.0, "Standard deviation of a fresh head's weights; 0: every value starts as exactly 0.", ge=0
    )
    lora: LoraConfig | None = key(
        None, "Train an adapter and the head only. Without the table every weight of the critic is trained."
    )
    optim: OptimConfig = key(
        OptimConfig(), "The critic's own optimizer; its `lr` is usually several times the actor's."
    )
    clip: PositiveOrInf = key(
        0.2,
        "How far a value may move from the recorded one before the loss stops pulling; `inf`: as far as it likes.",
        gt=0,
        also=("cliprange_value", "value_clip", "clip_range_vf"),
    )
    warmup_steps: Int = key(
        0, "So many first steps train the critic alone; the policy stays as it is.", ge=0, also=("critic_warmup",)
    )


class RewardModelConfig(Section):
    """One trained reward model of the sum: it scores a prompt with its completion, one number."""

    name: str = key(REQUIRED, "What the reward is called in the record.", min_length=1)
    model: str = key(
        REQUIRED,
        "A `ForSequenceClassification` folder with one label, such as a `[reward_model]` recipe exports.",
        path="marked",
        min_length=1,
        also=("path", "model_name_or_path"),
    )
    weight: Float = key(1.0, "Factor of this reward in the sum.")
    template: Literal["plain", "chat"] = key(
        "plain",
        "plain: the text of the prompt and of the completion, one after the other. chat: as a user's and an "
        "assistant's turn in the reward model's own chat template.",
    )
    end: str = key(
        "",
        "Text put at the end, special tokens allowed, such as `<|im_end|>`: the last token is the one that is scored.",
    )
    max_tokens: Int = key(
        0, "Tokens of prompt and completion at most, an error beyond; 0: as many as the model was made for.", ge=0
    )
