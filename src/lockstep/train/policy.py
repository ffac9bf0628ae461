"""Which leaves a recipe trains, in which type, and which stay as they were loaded. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config import Config, LoraConfig
from lockstep.errors import ConfigError
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import VALUE_HEAD, Leaf, ModelSpec, leaf_table
from lockstep.sync.select import trainable_leaves

TRAINABLE_DTYPE = "float32"  # master copies: a bfloat16 weight loses updates below 2^-8 of itself


def lora_spec(config: LoraConfig | None, spec: ModelSpec) -> LoraSpec | None:
    """The adapter's shape. Raises ConfigError when it asks for more layers than there are."""
    if config is None:
        return None
    if config.last_layers > spec.num_layers:
        raise ConfigError(
            f"lora.last_layers = {config.last_layers}, but the model has {spec.num_layers} layers; use 1 to "
            f"{spec.num_layers}, or 0 for all"
        )
    return LoraSpec(config.rank, config.alpha, tuple(config.targets), config.last_layers)


@dataclass(frozen=True)
class LeafSplit:
    """Every leaf of a run's policy. trains: held in float32. frozen: in the model's dtype; none without LoRA."""

    lora: LoraSpec | None
    trains: dict[str, Leaf]
    frozen: dict[str, Leaf]

    @property
    def all(self) -> dict[str, Leaf]:
        return {**self.frozen, **self.trains}


def split_leaves(config: Config, spec: ModelSpec) -> LeafSplit:
    """What trains under this recipe, and what does not. Raises ConfigError as `lora_spec` does."""
    lora, table = lora_spec(config.lora, spec), leaf_table(spec)
    trains = trainable_leaves(table, adapter_table(spec, lora) if lora else None)
    return LeafSplit(lora, trains, table if lora else {})


def value_leaves(lora: LoraConfig | None, spec: ModelSpec) -> LeafSplit:
    """What of a model with a scalar head trains: an adapter and the head, or everything. Raises ConfigError as
    `lora_spec` does."""
    adapter, table = lora_spec(lora, spec), leaf_table(spec)
    if adapter is None:
        return LeafSplit(None, table, {})
    head = {VALUE_HEAD: table.pop(VALUE_HEAD)}
    return LeafSplit(adapter, adapter_table(spec, adapter) | head, table)


def sampler_dtype(config: Config) -> str:
    """Type in which the sampler holds what trains. On a mesh of its own it is the type it computes in: every leaf is
    cast to that wherever it is used, so the function is the same bit for bit, and fewer bytes cross."""
    together = config.cluster.owner("actor") == config.cluster.owner("rollout")
    return TRAINABLE_DTYPE if together else config.model.dtype
