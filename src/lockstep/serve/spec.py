"""What a replica serves, in a form that crosses to its process. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from lockstep.sync.choice import Way
from lockstep.types import Fingerprint


@dataclass(frozen=True)
class ServeSpec:
    """model: a known name, a folder or a .gguf file; all its weights can be replaced. recipe: a recipe's file instead,
    whose rollout role is served: its model, adapter, numerics, sizes and speculation; only what it trains can be
    replaced. overrides: of the recipe's keys. slots: sequences decoded together. max_positions: prompt and completion
    tokens of one sequence at most. kv_memory_mib: of the page pool; 0: enough for every slot. warm_up: compile before
    the first request."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str = ""
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    numerics: Literal["exact", "fast"] = "exact"
    slots: int = 32
    max_positions: int = 0
    kv_memory_mib: int = 0
    decode_steps: int = 8
    warm_up: bool = False


@dataclass(frozen=True)
class Birth:
    """What a replica's process is told. front, token: where to connect, and the secret. sync: where its weight sync
    listens, with a secret of its own. way: by which weights come; host: its address for that."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    spec: ServeSpec
    front: str
    token: str
    sync: str
    sync_token: str
    way: Way
    host: str


@dataclass(frozen=True)
class Ready:
    """What it answers when it can take weights. capacity: samples at a time. shards: devices that hold a part of a
    version. base_digest: of its frozen weights."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    capacity: int
    shards: int
    max_positions: int
    vocab_size: int
    num_pages: int
    page_size: int
    base_digest: str
    fingerprint: Fingerprint
    device: str


BIRTH, READY = TypeAdapter(Birth), TypeAdapter(Ready)
