"""The recipes that train on a file of examples: a `[reward_model]`, `[sft]` or `[dpo]` table instead of `[task]`,
`[reward]` and `[rollout]`.

Read, checked and written like any recipe (`config.py`); `lockstep keys --reward-model`, `--sft` and `--dpo` explain the
keys. Imports no jax.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import tomli_w
from pydantic import model_validator

from lockstep.cluster_section import Mesh, MeshConfig
from lockstep.config import read_recipe
from lockstep.overrides import apply_overrides, make_paths_absolute
from lockstep.schema import REQUIRED, Float, Int, Problems, Section, key, plain, validate
from lockstep.sections import LoraConfig, ModelConfig, NamedRun, NumericsConfig, OptimConfig

_END_OF_COMPLETION = key(
    None,
    "Text put at the end of every completion, special tokens allowed. Default: the model's end-of-sequence token, so "
    "that it learns to stop.",
)


class ExamplesConfig(Section):
    """What the three tables have in common."""

    data: str = key(
        REQUIRED,
        "A `.jsonl` or `.parquet` file, a row per example, relative to the recipe.",
        path="always",
        min_length=1,
        also=("path", "train_files"),
    )
    eval_data: str | None = key(
        None, "Examples to measure on, never trained on. Default: `eval_fraction` of `data`.", path="always"
    )
    eval_fraction: Float = key(
        0.1, "Share of the examples in `data` that are held out, drawn from `run.seed`; 0: none.", ge=0, lt=1
    )
    prompt_column: str = key(
        "prompt", "Column of the prompt: text, or (template chat) a list of messages.", min_length=1
    )
    template: Literal["plain", "chat"] = key(
        "plain",
        "plain: prompt and completion one after the other. chat: the prompt as a user's turn in the model's chat "
        "template, the completion as the assistant's answer.",
    )
    max_tokens: Int = key(512, "Tokens of prompt and completion at most; none is ever cut.", ge=1)
    epochs: Int = key(1, "How often every example is trained on.", ge=1, also=("num_train_epochs",))
    micro_batch_rows: Int = key(4096, "Token rows per device and forward pass; less memory, more passes.", ge=1)

    @property
    def batch(self) -> int:
        """Examples per update."""
        raise NotImplementedError


class PairsConfig(ExamplesConfig):
    chosen_column: str = key("chosen", "Column of the better completion, text.", min_length=1)
    rejected_column: str = key("rejected", "Column of the worse completion, text.", min_length=1)
    batch_pairs: Int = key(32, "Pairs per update.", ge=1, also=("batch_size", "train_batch_size"))

    @property
    def batch(self) -> int:
        return self.batch_pairs


class PreferencesConfig(PairsConfig):
    margin_column: str | None = key(
        None, "Column of a number by how much the better score should be higher, at least. Default: 0.", min_length=1
    )
    end: str = key(
        "",
        "Text put at the end, special tokens allowed, such as `<|im_end|>`: the last token is the one that is scored.",
    )
    head_std: Float = key(0.0, "Standard deviation of a fresh head's weights; 0: every score starts as 0.", ge=0)


class SftConfig(ExamplesConfig):
    completion_column: str = key("completion", "Column of the completion, text.", min_length=1)
    end: str | None = _END_OF_COMPLETION
    batch_examples: Int = key(32, "Examples per update.", ge=1, also=("batch_size", "train_batch_size"))

    @property
    def batch(self) -> int:
        return self.batch_examples


class DpoConfig(PairsConfig):
    end: str | None = _END_OF_COMPLETION
    beta: Float = key(0.1, "How much a nat away from the start weights counts; less lets the policy go further.", gt=0)


class RewardClusterConfig(Section):
    reward: Mesh = key(MeshConfig(), "Mesh of the reward model.")
    cpu_devices: Int | None = key(None, "Simulate so many CPU devices (for trying meshes out on one machine).", ge=1)


class ActorClusterConfig(Section):
    actor: Mesh = key(MeshConfig(), "Mesh of the policy that trains.")
    cpu_devices: Int | None = key(None, "Simulate so many CPU devices (for trying meshes out on one machine).", ge=1)


class SupervisedRecipe(Section):
    """One training on a file of examples. TABLE: the table that says which kind. ROLE: what is on the mesh."""

    TABLE: ClassVar[str]
    ROLE: ClassVar[Literal["reward", "actor"]]

    run: NamedRun = key(REQUIRED, "The run as a whole.")
    model: ModelConfig = key(REQUIRED, "What training starts from.")
    lora: LoraConfig | None = key(None, "Train an adapter only. Without the table every weight is trained.")
    optim: OptimConfig = key(OptimConfig(), "How gradients become weights.")
    numerics: NumericsConfig = key(NumericsConfig(), "How exactly a number is the same in every batch.")

    @model_validator(mode="after")
    def _sections_fit(self) -> SupervisedRecipe:
        if problems := list(_misfits(self)):
            raise Problems(problems)
        return self

    @property
    def examples(self) -> ExamplesConfig:
        """The table `TABLE`."""
        found = getattr(self, self.TABLE)
        assert isinstance(found, ExamplesConfig)
        return found

    @property
    def mesh(self) -> MeshConfig:
        """Of the one role."""
        found = getattr(self.cluster, self.ROLE)  # type: ignore[attr-defined]
        assert isinstance(found, MeshConfig)
        return found

    @property
    def cpu_devices(self) -> int | None:
        found: int | None = self.cluster.cpu_devices  # type: ignore[attr-defined]
        return found

    @property
    def tensor_parts(self) -> int:
        """In how many parts the mesh computes."""
        return self.numerics.tensor_parts or self.mesh.tensor

    def to_toml(self) -> str:
        """The resolved recipe. Read again, it is equal to this one."""
        return tomli_w.dumps(plain(self))


class RewardRecipe(SupervisedRecipe):
    """One training of a reward model."""

    TABLE: ClassVar[str] = "reward_model"
    ROLE: ClassVar[Literal["reward", "actor"]] = "reward"

    model: ModelConfig = key(REQUIRED, "What training starts from: any model; one with a scalar head keeps it.")
    lora: LoraConfig | None = key(
        None, "Train an adapter and the head only. Without the table every weight is trained."
    )
    cluster: RewardClusterConfig = key(RewardClusterConfig(), "The devices.")
    reward_model: PreferencesConfig = key(REQUIRED, "The preference pairs, and how they are trained on.")


class SftRecipe(SupervisedRecipe):
    """One supervised fine-tuning."""

    TABLE: ClassVar[str] = "sft"
    ROLE: ClassVar[Literal["reward", "actor"]] = "actor"

    cluster: ActorClusterConfig = key(ActorClusterConfig(), "The devices.")
    sft: SftConfig = key(REQUIRED, "The examples, and how they are trained on.")


class DpoRecipe(SupervisedRecipe):
    """One direct preference optimization."""

    TABLE: ClassVar[str] = "dpo"
    ROLE: ClassVar[Literal["reward", "actor"]] = "actor"

    cluster: ActorClusterConfig = key(ActorClusterConfig(), "The devices.")
    dpo: DpoConfig = key(REQUIRED, "The preference pairs, and how they are trained on.")


RECIPES: Mapping[str, type[SupervisedRecipe]] = {r.TABLE: r for r in (RewardRecipe, SftRecipe, DpoRecipe)}


def _misfits(recipe: SupervisedRecipe) -> Iterator[str]:
    wanted, mesh, table = recipe.examples, recipe.mesh, recipe.TABLE
    if wanted.micro_batch_rows < wanted.max_tokens:
        yield (
            f"`{table}.micro_batch_rows` = {wanted.micro_batch_rows} cannot hold one sequence of `{table}.max_tokens` "
            f"= {wanted.max_tokens} rows, and a sequence is never cut; use at least as many"
        )
    if recipe.tensor_parts % mesh.tensor:
        yield (
            f"`numerics.tensor_parts` = {recipe.tensor_parts} is not a multiple of `cluster.{recipe.ROLE}.tensor` = "
            f"{mesh.tensor}: every device computes as many parts; use a multiple of it, or 0"
        )
    if recipe.cpu_devices is not None and mesh.size > recipe.cpu_devices:
        yield (
            f"`cluster.cpu_devices` = {recipe.cpu_devices}, but `cluster.{recipe.ROLE}` has {mesh.size} devices; use "
            f"at least {mesh.size}"
        )


def recipe_kind(path: Path) -> type[SupervisedRecipe] | None:
    """The kind of recipe, by its table; None for any other recipe, and for a file that cannot be read: its reader says
    why."""
    try:
        found: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return next((kind for table, kind in RECIPES.items() if table in found), None)


def load_supervised(
    kind: type[SupervisedRecipe], path: str | Path, overrides: list[str] | None = None
) -> SupervisedRecipe:
    """Read a recipe of a kind; the other arguments and errors as `config.load_config`."""
    path = Path(path)
    data = read_recipe(path)
    make_paths_absolute(kind, data, path.parent.resolve())
    overridden = apply_overrides(kind, data, overrides or [], Path.cwd())
    return validate(kind, data, str(path), overridden)
