"""The recipe that trains a reward model: a `[reward_model]` table instead of `[task]`, `[reward]` and `[rollout]`.

Read, checked and written like any recipe (`config.py`); `lockstep keys --reward-model` explains the keys. Imports no
jax.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import tomli_w
from pydantic import model_validator

from lockstep.cluster_section import Mesh, MeshConfig
from lockstep.config import read_recipe
from lockstep.overrides import apply_overrides, make_paths_absolute
from lockstep.schema import REQUIRED, Float, Int, Problems, Section, key, plain, validate
from lockstep.sections import LoraConfig, ModelConfig, NamedRun, NumericsConfig, OptimConfig

TABLE = "reward_model"


class PreferencesConfig(Section):
    data: str = key(
        REQUIRED,
        "A `.jsonl` or `.parquet` file of preference pairs, relative to the recipe.",
        path="always",
        min_length=1,
        also=("path", "train_files"),
    )
    eval_data: str | None = key(
        None, "Pairs to measure on, never trained on. Default: `eval_fraction` of `data`.", path="always"
    )
    eval_fraction: Float = key(
        0.1, "Share of the pairs in `data` that are held out, drawn from `run.seed`; 0: none.", ge=0, lt=1
    )
    prompt_column: str = key(
        "prompt", "Column of the prompt: text, or (template chat) a list of messages.", min_length=1
    )
    chosen_column: str = key("chosen", "Column of the better completion, text.", min_length=1)
    rejected_column: str = key("rejected", "Column of the worse completion, text.", min_length=1)
    margin_column: str | None = key(
        None, "Column of a number by how much the better score should be higher, at least. Default: 0.", min_length=1
    )
    template: Literal["plain", "chat"] = key(
        "plain",
        "plain: prompt and completion one after the other. chat: as a user's and an assistant's turn in the model's "
        "chat template.",
    )
    end: str = key(
        "",
        "Text put at the end, special tokens allowed, such as `<|im_end|>`: the last token is the one that is scored.",
    )
    max_tokens: Int = key(512, "Tokens of prompt and completion at most; none is ever cut.", ge=1)
    head_std: Float = key(0.0, "Standard deviation of a fresh head's weights; 0: every score starts as 0.", ge=0)
    epochs: Int = key(1, "How often every pair is trained on.", ge=1, also=("num_train_epochs",))
    batch_pairs: Int = key(32, "Pairs per update.", ge=1, also=("batch_size", "train_batch_size"))
    micro_batch_rows: Int = key(4096, "Token rows per device and forward pass; less memory, more passes.", ge=1)


class RewardClusterConfig(Section):
    reward: Mesh = key(MeshConfig(), "Mesh of the reward model.")
    cpu_devices: Int | None = key(None, "Simulate so many CPU devices (for trying meshes out on one machine).", ge=1)


class RewardRecipe(Section):
    """One training of a reward model."""

    run: NamedRun = key(REQUIRED, "The run as a whole.")
    model: ModelConfig = key(REQUIRED, "What training starts from: any model; one with a scalar head keeps it.")
    lora: LoraConfig | None = key(
        None, "Train an adapter and the head only. Without the table every weight is trained."
    )
    cluster: RewardClusterConfig = key(RewardClusterConfig(), "The devices.")
    reward_model: PreferencesConfig = key(REQUIRED, "The preference pairs, and how they are trained on.")
    optim: OptimConfig = key(OptimConfig(), "How gradients become weights.")
    numerics: NumericsConfig = key(NumericsConfig(), "How exactly a score is the same in every batch.")

    @model_validator(mode="after")
    def _sections_fit(self) -> RewardRecipe:
        if problems := list(_misfits(self)):
            raise Problems(problems)
        return self

    @property
    def tensor_parts(self) -> int:
        """In how many parts the mesh computes."""
        return self.numerics.tensor_parts or self.cluster.reward.tensor

    def to_toml(self) -> str:
        """The resolved recipe. Read again, it is equal to this one."""
        return tomli_w.dumps(plain(self))


def _misfits(recipe: RewardRecipe) -> Iterator[str]:
    wanted, mesh = recipe.reward_model, recipe.cluster.reward
    if wanted.micro_batch_rows < wanted.max_tokens:
        yield (
            f"`reward_model.micro_batch_rows` = {wanted.micro_batch_rows} cannot hold one sequence of "
            f"`reward_model.max_tokens` = {wanted.max_tokens} rows, and a sequence is never cut; use at least as many"
        )
    if recipe.tensor_parts % mesh.tensor:
        yield (
            f"`numerics.tensor_parts` = {recipe.tensor_parts} is not a multiple of `cluster.reward.tensor` = "
            f"{mesh.tensor}: every device computes as many parts; use a multiple of it, or 0"
        )
    if recipe.cluster.cpu_devices is not None and mesh.size > recipe.cluster.cpu_devices:
        yield (
            f"`cluster.cpu_devices` = {recipe.cluster.cpu_devices}, but `cluster.reward` has {mesh.size} devices; use "
            f"at least {mesh.size}"
        )


def is_reward_recipe(path: Path) -> bool:
    """Whether the recipe has a `[reward_model]` table. False for a file that cannot be read: its reader says why."""
    try:
        return TABLE in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def load_reward_recipe(path: str | Path, overrides: list[str] | None = None) -> RewardRecipe:
    """Read a recipe with a `[reward_model]` table; arguments and errors as `config.load_config`."""
    path = Path(path)
    data = read_recipe(path)
    make_paths_absolute(RewardRecipe, data, path.parent.resolve())
    overridden = apply_overrides(RewardRecipe, data, overrides or [], Path.cwd())
    return validate(RewardRecipe, data, str(path), overridden)
