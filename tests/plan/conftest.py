"""Two answers to look at: a real model's, and one of a folder in which there is nothing but a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def llama() -> Any:
    return lockstep.plan_sync("llama-3.1-8b", actor="fsdp=8", rollout="tensor=4,data=2")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder in which there is nothing but a configuration."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder
