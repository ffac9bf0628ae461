"""The tables of a recipe, one class each; every key with its type, limits, default and meaning.

Checks in here concern one table; `config.py` puts the tables together and checks what spans them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Strict, model_validator

from lockstep.cluster_section import ClusterConfig
from lockstep.schema import REQUIRED, Bool, Expects, Float, Int, Section, key, literal, toml_value

Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
PositiveOrInf = Annotated[float, Strict(), Expects("a number > 0, or inf")]


class NamedRun(Section):
    name: Annotated[str, Expects("a folder name (letters, digits, `_`, `.` and `-`)")] = key(
        REQUIRED, "Name of the run: its folder below `dir`.", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )
    dir: str = key("runs", "Folder that holds the runs; relative to where the command is run.", also=("output_dir",))
    seed: Int = key(0, "Every random draw of the run is derived from it.", ge=0, lt=2**31)
    checkpoint_every: Int = key(
        10,
        "Steps between checkpoints: a run that is killed loses at most so many. 0: only at the end.",
        ge=0,
        also=("save_steps",),
    )

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.dir) / self.name


class RunConfig(NamedRun):
    steps: Int = key(REQUIRED, "Training steps.", ge=1, also=("max_steps", "num_steps", "total_steps"))


class ModelConfig(Section):
    name: str = key(
        REQUIRED,
        "A known name (`lockstep models`), a folder in Hugging Face layout or a `.gguf` file: a value with a `/` or a "
        "leading `.` or `~` is a path, relative to the recipe.",
        path="marked",
        min_length=1,
        also=("path", "model_name_or_path", "model_path"),
    )
    dtype: Literal["float32", "bfloat16"] = key("float32", "Type of the weights and of the arithmetic on them.")


class LoraConfig(Section):
    rank: Int = key(8, "Rank of the update of each matrix.", ge=1, also=("r", "lora_rank"))
    alpha: Float = key(16.0, "The update is scaled by alpha / rank.", gt=0, also=("lora_alpha",))
    last_layers: Int = key(
        0, "Adapt the last so many layers (no backward pass below them); 0: every layer.", ge=0, also=("layers",)
    )
    targets: tuple[Target, ...] = key(
        ("q", "k", "v", "o", "gate", "up", "down"),
        "Matrices of a layer that are adapted.",
        min_length=1,
        also=("target_modules",),
    )

    @model_validator(mode="after")
    def _each_target_once(self) -> LoraConfig:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"`lora.targets` = {literal(self.targets)} names a matrix twice; a matrix has one adapter")
        return self


# Which keys of [task] belong to which kinds; the others belong to all.
_KIND_KEYS: dict[str, tuple[str, ...]] = {
    "dataset": ("reasoning_gym",),
    "options": ("reasoning_gym",),
    "path": ("file",),
    "function": ("function",),
    "prompt_column": ("file", "function"),
    "shuffle": ("file",),
}
_KIND_NEEDS = {"reasoning_gym": "dataset", "file": "path", "function": "function"}


def _patterns(table: Mapping[str, str]) -> Mapping[str, str]:
    """The table, if each value is a regular expression."""
    for name, pattern in table.items():
        try:
            re.compile(pattern)
        except re.error as e:
            raise ValueError(f"`task.keep.{name}` = {literal(pattern)} is not a regular expression: {e}") from None
    return table


class TaskConfig(Section):
    kind: Literal["reasoning_gym", "file", "function"] = key(REQUIRED, "Where prompts come from.", also=("type",))
    dataset: str | None = key(None, "reasoning_gym: name of the data set, such as `chain_sum`.")
    options: Annotated[Mapping[str, Any], AfterValidator(toml_value), Expects("a table")] = key(
        {}, "reasoning_gym: settings of the data set, handed on as they are."
    )
    path: str | None = key(
        None,
        "file: a `.jsonl` or `.parquet` file, relative to the recipe.",
        path="always",
        also=("data", "train_files"),
    )
    prompt_column: str = key(
        "prompt", "file, function: the column that holds the question.", min_length=1, also=("prompt_key", "column")
    )
    shuffle: Bool = key(True, "file: a new order in each epoch, drawn from `run.seed`; false: the order of the file.")
    function: Annotated[str | None, Expects("module:function")] = key(
        None,
        "function: `module:function`, a `def rows(index: int, seed: int) -> dict` without end.",
        pattern=r"^[\w.]+:\w+$",
    )
    template: Literal["plain", "chat"] = key(
        "plain", "plain: the model sees the formatted prompt as it is. chat: as a user's turn in its own chat template."
    )
    prompt: str = key(
        "{question}", "Format of the prompt: `{question}`, or `{column}` for another field of the row; `{{` is a brace."
    )
    system: str | None = key(None, "chat: text of the system turn.", also=("system_prompt",))
    max_prompt_tokens: Int = key(
        512, "Tokens of a prompt at most; none is ever cut.", ge=1, also=("max_prompt_length",)
    )
    too_long: Literal["error", "skip"] = key(
        "error", "What a longer prompt is: an error that names it, or skipped and counted.", also=("filter_overlong",)
    )
    keep: Annotated[Mapping[str, str], AfterValidator(_patterns), Expects("a table of field = regular expression")] = (
        key(
            {},
            "Use only rows whose fields match these regular expressions from end to end, as in "
            '`{ expression = ".* \\\\+ .*" }`; the others are passed over, counted.',
        )
    )
    folder: str | None = key(
        None, "Where `module:function` is looked for before Python's own path. Default: the recipe's.", path="always"
    )

    def keys_of_other_kinds(self) -> list[str]:
        """Names of the keys that have no effect with this `kind`."""
        return [name for name, kinds in _KIND_KEYS.items() if self.kind not in kinds]

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> TaskConfig:
        needed = _KIND_NEEDS[self.kind]
        if not getattr(self, needed):
            description = (type(self).model_fields[needed].description or "").removeprefix(f"{self.kind}: ")
            raise ValueError(f"`task.{needed}` is missing, which kind = {literal(self.kind)} needs: {description}")
        for name in self.keys_of_other_kinds():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"`task.{name}` has no effect with kind = {literal(self.kind)}: it belongs to kind = "
                    f"{' or '.join(map(literal, _KIND_KEYS[name]))}; leave it out or change the kind"
                )
        if self.system is not None and self.template != "chat":
            raise ValueError(
                '`task.system` has no effect with template = "plain", which has no turns; use template = "chat", or '
                "write the text into `task.prompt`"
            )
        return self

    @model_validator(mode="after")
    def _prompt_differs_by_row(self) -> TaskConfig:
        try:
            names = [name for _, name, _, _ in Formatter().parse(self.prompt) if name is not None]
        except ValueError as e:
            raise ValueError(
                f"`task.prompt` = {literal(self.prompt)} is not a format: {e}; a brace of the text is written "
                "{{ or }}"
            ) from None
        if not names:
            raise ValueError(
                f"`task.prompt` = {literal(self.prompt)} has no placeholder, so every prompt would be the same; put "
                "{question} where the problem goes"
            )
        return self


class OptimConfig(Section):
    lr: Float = key(1e-6, "Peak learning rate (Adam).", ge=0, also=("learning_rate",))
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "After the warm-up; linear and cosine fall towards 0, which the update after the last would have.",
        also=("lr_scheduler_type",),
    )
    warmup_steps: Int = key(0, "Steps over which the learning rate rises to `lr`.", ge=0)
    weight_decay: Float = key(0.0, "Decoupled weight decay (AdamW).", ge=0)
    betas: tuple[Annotated[Float, Expects("a number >= 0 and < 1")], Float] = key(
        (0.9, 0.999), "Decay of the two moments of Adam.", also=("adam_beta1", "b1", "beta1", "beta2")
    )
    eps: Float = key(1e-8, "Added to the root of the second moment.", gt=0, also=("adam_epsilon",))
    max_grad_norm: PositiveOrInf = key(
        1.0,
        "Gradients of larger global norm are scaled down to it; `inf`: none are.",
        gt=0,
        also=("grad_clip", "max_norm", "clip_grad"),
    )

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimConfig:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(
                f"`optim.betas` = {literal(self.betas)}: each must be >= 0 and < 1 (it is the share that is "
                "kept of the past); usual values are [0.9, 0.999]"
            )
        return self


class TrainConfig(Section):
    micro_batch_rows: Int = key(
        4096, "Token rows per device and forward pass; less memory, more passes.", ge=1, also=("micro_batch_size",)
    )
    epochs: Int = key(
        1, "How often a step's samples are trained on.", ge=1, also=("num_iterations", "ppo_epochs", "mu")
    )
    mini_batches: Int = key(
        1,
        "Parts, of samples drawn anew in each epoch, that a step's samples are cut into; each is an optimizer update.",
        ge=1,
        also=("num_mini_batches", "ppo_mini_batch_size"),
    )
    select: Literal["all", "informative"] = key(
        "all", "informative: train only on the `select_count` rollouts of largest |advantage| (changes the objective)."
    )
    select_count: Int = key(0, "informative: how many rollouts; 0 with `all`.", ge=0)
    save_trajectories: Bool = key(True, "Write every step's trajectories to `trajectories/` (Parquet).")

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.mini_batches


class SyncConfig(Section):
    """How the trained weights get to the sampler. None of it changes a number of the run: what arrives is verified bit
    for bit."""

    staging_mib: Int = key(256, "Most that a device sends, or receives, at a time (MiB).", ge=1)
    deadline_s: Float = key(600.0, "Seconds that one sync may take; then it fails, and says who waited for whom.", gt=0)
    on_failure: Literal["abort", "evict"] = key(
        "abort", "A replica that fails: abort publishes nothing; evict drops it, says so, and publishes to the others."
    )
    probe_sequences: Int = key(
        2, "Token sequences that trainer and sampler must score alike before a version is served; 0: none.", ge=0
    )
    folder: str | None = key(
        None,
        "Also write every published version, in `model.dtype`, below this folder for other processes to follow. "
        "Relative to the run directory; no two runs may share one.",
        min_length=1,
    )
    folder_format: Literal["native", "hf"] = key(
        "native", "Names and shapes in `folder`. native: as in checkpoints. hf: as Hugging Face (every weight trains)."
    )
    folder_delta: Bool = key(False, "Write only what changed since the last version into `folder` where that is less.")
    folder_keep: Int = key(2, "Published versions that stay in `folder`, and what their deltas start from.", ge=1)


class NumericsConfig(Section):
    mode: Literal["exact", "fast"] = key(
        "exact",
        "exact: sampled and recomputed log-probabilities are bitwise equal. fast: they differ a little, measured.",
    )
    tile_rows: Int = key(32, "exact: every matrix product runs on tiles of so many token rows.", ge=1)
    tensor_parts: Int = key(
        0, "Parts that matrix products are cut into: a multiple of every mesh's `tensor`. 0: the smallest one.", ge=0
    )

    def parts_on(self, cluster: ClusterConfig) -> int:
        """In how many parts every mesh computes."""
        return self.tensor_parts or cluster.fewest_parts
