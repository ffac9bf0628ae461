"""How large the sampler's page pool is: pages from a budget, bytes from pages. Pure."""

from __future__ import annotations

import jax.numpy as jnp

from lockstep.config import Config, RolloutConfig
from lockstep.errors import ConfigError
from lockstep.models.parts import parts_of
from lockstep.models.quantise import DTYPES, SCALE_DTYPE, KVType
from lockstep.models.spec import ModelSpec
from lockstep.text import format_bytes

MIB = 1 << 20


def enough_pages(slots: int, max_positions: int, page_size: int) -> int:
    """Pages with which every slot can hold `max_positions` (prompt and completion each end in a page of their own)."""
    return slots * (-(-max_positions // page_size) + 1)


def full_sequences(num_pages: int, max_positions: int, page_size: int) -> int:
    """How many sequences of `max_positions` a pool holds at once."""
    return num_pages // enough_pages(1, max_positions, page_size)


def row_bytes(spec: ModelSpec, dtype: str, kv: KVType = "compute", shares: int = 1) -> int:
    """Bytes of one position: a key and a value of K heads in every layer; where quantised with a scale per head.

    shares: devices that the heads are split over."""
    head = spec.head_dim * (jnp.dtype(dtype) if kv == "compute" else DTYPES[kv]).itemsize
    return (
        2 * spec.num_layers * (spec.num_kv_heads // shares) * (head + (0 if kv == "compute" else SCALE_DTYPE.itemsize))
    )


def pool_bytes(num_pages: int, page_size: int, bytes_per_row: int) -> int:
    """Bytes of a pool on its device: its pages, and the one row that padding writes to."""
    return (num_pages * page_size + 1) * bytes_per_row


def pages_within(budget_bytes: int, page_size: int, bytes_per_row: int) -> int:
    """The most pages whose pool takes at most so many bytes."""
    return max(0, (budget_bytes // bytes_per_row - 1) // page_size)


def head_shares(config: Config, spec: ModelSpec) -> int:
    """Devices of the rollout mesh that a position's heads are split over."""
    cut = parts_of(spec, "attention", config.numerics.parts_on(config.cluster)) > 1
    return config.cluster.mesh("rollout").tensor if cut else 1


def pages_of_recipe(rollout: RolloutConfig, spec: ModelSpec, dtype: str, max_positions: int, shares: int = 1) -> int:
    """Pages of the pool on each device: as `rollout.kv_memory_mib` or `rollout.num_pages` says, else enough for every
    slot. shares: devices that the heads are split over. Raises ConfigError for a budget that does not hold one sequence
    of `max_positions`."""
    if not rollout.kv_memory_mib:
        return rollout.num_pages or enough_pages(rollout.slots, max_positions, rollout.page_size)
    row, page = row_bytes(spec, dtype, rollout.kv_dtype, shares), rollout.page_size
    pages = pages_within(rollout.kv_memory_mib * MIB, page, row)
    if not full_sequences(pages, max_positions, page):
        needed = -(-pool_bytes(enough_pages(1, max_positions, page), page, row) // MIB)
        raise ConfigError(
            f"rollout.kv_memory_mib = {rollout.kv_memory_mib} holds {pages} pages of {page} tokens, and one sequence "
            f"of full length ({max_positions} tokens) takes {enough_pages(1, max_positions, page)}; use at least "
            f"{needed}, or shorter prompts or completions"
        )
    return pages


def describe_pool(num_pages: int, page_size: int, max_positions: int, nbytes: int) -> str:
    """One line for the run's log: pages, bytes per device, how many full sequences fit."""
    return (
        f"key-value cache: {num_pages} pages of {page_size} tokens, {format_bytes(nbytes)} per device; "
        f"{full_sequences(num_pages, max_positions, page_size)} sequences of full length ({max_positions} tokens) fit"
    )


def longest_sequence(config: Config, spec: ModelSpec) -> int:
    """Positions of the longest prompt with its longest completion, those that the policy judges among them.

    Raises ConfigError if the model has fewer.
    """
    lengths = {
        f"task.max_prompt_tokens + {config.completion_key}": config.task.max_prompt_tokens
        + config.max_completion_tokens
    }
    for judge in config.reward.judges:
        if judge.engine == "rollout":
            lengths[f"max_prompt_tokens + max_tokens of judge {judge.name!r}"] = (
                judge.max_prompt_tokens + judge.max_tokens
            )
    for words, length in lengths.items():
        if length > spec.max_position:
            raise ConfigError(
                f"{words} = {length}, but {config.model.name} was made for {spec.max_position} positions; lower one of "
                "them"
            )
    return max(lengths.values())
