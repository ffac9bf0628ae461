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


def trained_leaves(lora: LoraConfig | None, spec: ModelSpec) -> LeafSplit:
    """What of a model trains, and what does not: an adapter, and a scalar head where there is one, or everything.
    Raises ConfigError as `lora_spec` does."""
    adapter, table = lora_spec(lora, spec), leaf_table(spec)
    if adapter is None:
        return LeafSplit(None, trainable_leaves(table, None), {})
    head = {VALUE_HEAD: table.pop(VALUE_HEAD)} if spec.scalar_head else {}
    return LeafSplit(adapter, trainable_leaves(table, adapter_table(spec, adapter)) | head, table)


def split_leaves(config: Config, spec: ModelSpec) -> LeafSplit:
    """`trained_leaves` of a recipe's policy."""
    return trained_leaves(config.lora, spec)


def sampler_dtype(config: Config) -> str:
    """Type in which the sampler holds what trains. On a mesh of its own it is the type it computes in: every leaf is
    cast to that wherever it is used, so the function is the same bit for bit, and fewer bytes cross."""
    together = config.cluster.owner("actor") == config.cluster.owner("rollout")
    return TRAINABLE_DTYPE if together else config.model.dtype
