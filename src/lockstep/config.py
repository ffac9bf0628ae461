"""The whole run as frozen typed values, read from a TOML recipe and dotted overrides.

    config = load_config("recipes/addition.toml", ["--optim.lr", "1e-3"])
    config.optim.lr, config.cluster.mesh("rollout").size, config.run.path

Every key is described once, in `sections.py`; errors, `lockstep keys` and `docs/recipes.md` are made from the
descriptions. Checks that involve several tables are in `misfits.py`. Imports no jax.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import model_validator

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.cluster_section import ROLES, ClusterConfig, MeshConfig, Role
from lockstep.environment_section import EnvironmentConfig
from lockstep.errors import ConfigError
from lockstep.misfits import misfits
from lockstep.overrides import apply_overrides, make_paths_absolute
from lockstep.reward_section import RewardConfig, RewardFunction, RewardJudge
from lockstep.rollout_section import RolloutConfig
from lockstep.schema import REQUIRED, Problems, Section, key, plain, validate
from lockstep.sections import (
    LoraConfig,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    RunConfig,
    SyncConfig,
    TaskConfig,
    TrainConfig,
)
from lockstep.value_sections import CriticConfig

__all__ = [
    "ROLES",
    "AlgorithmConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "EnvironmentConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "NumericsConfig",
    "OptimConfig",
    "RewardConfig",
    "RewardFunction",
    "RewardJudge",
    "Role",
    "RolloutConfig",
    "RunConfig",
    "SyncConfig",
    "TaskConfig",
    "TrainConfig",
    "load_config",
    "parse_config",
]


class Config(Section):
    """One run. Equal configs make equal runs on equal machines."""

    run: RunConfig = key(REQUIRED, "The run as a whole.")
    model: ModelConfig = key(REQUIRED, "The policy that is trained, and where it starts.")
    lora: LoraConfig | None = key(None, "Train low-rank adapters only. Without the table every weight is trained.")
    cluster: ClusterConfig = key(ClusterConfig(), "The dial: which role runs on which mesh of devices.")
    task: TaskConfig = key(REQUIRED, "The prompts.")
    environment: EnvironmentConfig | None = key(
        None,
        "What answers the policy between its turns. Without the table a completion is one turn (docs/multi-turn.md).",
    )
    reward: RewardConfig = key(REQUIRED, "What makes a completion good; may be left out where an environment says it.")
    rollout: RolloutConfig = key(RolloutConfig(), "How completions are generated.")
    algorithm: AlgorithmConfig = key(AlgorithmConfig(), "How rewards become a loss.")
    optim: OptimConfig = key(OptimConfig(), "How gradients become weights.")
    train: TrainConfig = key(TrainConfig(), "What a training step trains on, and in what pieces.")
    critic: CriticConfig | None = key(None, "The value baseline of PPO. Without the table there is none.")
    numerics: NumericsConfig = key(NumericsConfig(), "How exactly trainer and sampler agree.")
    sync: SyncConfig = key(SyncConfig(), "How the trained weights get to the sampler.")

    @model_validator(mode="before")
    @classmethod
    def _roles_have_a_place(cls, data: Any) -> Any:
        """A critic and reward models are on the actor's mesh unless `[cluster]` says otherwise."""
        if not (isinstance(data, dict) and isinstance(data.get("cluster", {}), dict)):
            return data
        reward, cluster = data.get("reward"), dict(data.get("cluster", {}))
        there = {"critic": data.get("critic") is not None, "reward": isinstance(reward, dict) and reward.get("models")}
        for role in (role for role, wanted in there.items() if wanted):
            cluster[role] = "actor" if cluster.get(role) is None else cluster[role]
        return {**data, "cluster": cluster} if cluster else data

    @model_validator(mode="before")
    @classmethod
    def _environments_reward(cls, data: Any) -> Any:
        """`[reward]` is for what comes on top of what an environment gives."""
        if isinstance(data, dict) and data.get("environment") and "reward" not in data:
            return {**data, "reward": {}}
        return data

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        problems = list(misfits(self))
        if problems:
            raise Problems(problems)
        return self

    @property
    def actor_steps(self) -> int:
        """Steps that train the policy: all but those of a critic's warm-up."""
        return self.run.steps - (0 if self.critic is None else self.critic.warmup_steps)

    @property
    def max_completion_tokens(self) -> int:
        """Tokens of a completion at most: of its one turn, or of all turns and what is said between them."""
        return self.rollout.max_new_tokens if self.environment is None else self.environment.max_total_tokens

    @property
    def completion_key(self) -> str:
        """The key that says so."""
        return "rollout.max_new_tokens" if self.environment is None else "environment.max_total_tokens"

    def to_toml(self) -> str:
        """The resolved recipe: every key that has an effect, with its value. Read again, it is equal to this config."""
        tables = plain(self)
        for name in self.task.keys_of_other_kinds():
            tables["task"].pop(name, None)
        for name in self.algorithm.keys_of_others():
            tables["algorithm"].pop(name, None)
        return tomli_w.dumps(tables)


# Keys whose value may be `module:function`: their section's `folder` says where the module is looked for.
def _set_folders(data: dict[str, Any], folder: Path) -> None:
    """Write the recipe's folder into the sections that name a `module:function` and no folder of their own."""
    task, reward, algorithm = data.get("task"), data.get("reward"), data.get("algorithm")
    environment = data.get("environment")
    if isinstance(environment, dict):
        environment.setdefault("folder", str(folder))
    if isinstance(task, dict) and "function" in task:
        task.setdefault("folder", str(folder))
    if isinstance(algorithm, dict) and ":" in str(algorithm.get("name")):
        algorithm.setdefault("folder", str(folder))
    if isinstance(reward, dict) and isinstance(reward.get("functions"), list):
        names = [f.get("name") for f in reward["functions"] if isinstance(f, dict)]
        if any(isinstance(name, str) and ":" in name for name in names):
            reward.setdefault("folder", str(folder))


def parse_config(text: str, *, overrides: list[str], folder: Path, where: str) -> Config:
    """A recipe's text, with overrides, as a `Config`.

    folder: what relative paths in the text, and `module:function` everywhere, start from; paths in overrides start from
    the working directory. where: names the recipe in errors. Raises: ConfigError that lists every problem.
    """
    data = _toml(text, where)
    if table := next((name for name in ("reward_model", "sft", "dpo") if name in data), None):
        raise ConfigError(
            f"{where}: a recipe with [{table}] trains on a file of examples and samples nothing; the command that "
            "takes it is `lockstep run`"
        )
    make_paths_absolute(Config, data, folder.resolve())
    overridden = apply_overrides(Config, data, overrides, Path.cwd())
    _set_folders(data, folder.resolve())
    return validate(Config, data, where, overridden)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a recipe.

    overrides: command-line words, `["--optim.lr", "1e-5", "--run.steps=3"]`; the last one for a key wins.
    Raises: ConfigError (no such file, not TOML, unknown key, wrong value, keys that do not go together).
    """
    path = Path(path)
    return parse_config(_text(path), overrides=overrides or [], folder=path.parent, where=str(path))


def read_recipe(path: Path) -> dict[str, Any]:
    """The tables of a recipe, unchecked. Raises: ConfigError (no such file, not TOML)."""
    return _toml(_text(path), str(path))


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{where}: not valid TOML: {e}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe {path}{_recipes_near(path)}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the recipe {path} cannot be read: {e}") from None


def _recipes_near(path: Path) -> str:
    """The end of `there is no recipe ...`: the recipes that are in its folder, or that there is no such folder."""
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent})"
    found = sorted(str(p) for p in path.parent.glob("*.toml") if p.name != "pyproject.toml")
    return f"; in that folder: {', '.join(found[:10])}" if found else f"; no recipes (*.toml) in {path.parent}"
