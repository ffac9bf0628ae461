"""Make the goldens of `tests/models/test_parity.py`: tiny random models of every family as transformers saves them, and
the logits that transformers computes for them.

    python tests/goldens/make_parity.py [case ...]     # needs the `peers` extra: torch, transformers

Each case is a folder `tests/goldens/hf/<case>` with `config.json` and `model.safetensors` (bfloat16, so that the files
are small and the float32 model is exactly known) and `golden.npz`: `tokens` [B, S] int32, `logits` [B, S, V] float32
(float32 weights, eager attention) and `made_with`. Sizes are distinct primes or twice a prime where the family allows
it (Llama, Gemma 2 and Gemma 3 insist that the number of heads divides the width), windows are shorter than the
sequence, soft caps and rotary scaling bite, norm weights and biases are away from their initial values, and epsilon is
so large that a wrong one shows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

OUT = Path(__file__).parent / "hf"
SHAPE = (2, 29)

_SMALL = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 211,
    "rms_norm_eps": 0.01,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1009.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 101.0},
}

# name -> (transformers model type, configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "llama",
        {"vocab_size": 31, "hidden_size": 18, "intermediate_size": 13, "head_dim": 10, "rope_parameters": _LLAMA3},
    ),
    # The width of SmolLM2: no head_dim of its own, so that q and o are square, and a tied head.
    "smollm2": (
        "llama",
        {"vocab_size": 43, "hidden_size": 24, "intermediate_size": 13, "tie_word_embeddings": True},
    ),
    "mistral": (
        "mistral",
        {"vocab_size": 29, "hidden_size": 17, "intermediate_size": 23, "head_dim": 14, "sliding_window": 7},
    ),
    "qwen2": (
        "qwen2",
        {
            "vocab_size": 41,
            "hidden_size": 24,
            "intermediate_size": 13,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "vocab_size": 47,
            "hidden_size": 23,
            "intermediate_size": 13,
            "head_dim": 10,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "vocab_size": 37,
            "hidden_size": 18,
            "intermediate_size": 17,
            "head_dim": 14,
            "sliding_window": 7,
            "query_pre_attn_scalar": 13,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "vocab_size": 31,
            "hidden_size": 30,
            "intermediate_size": 13,
            "head_dim": 6,
            "sliding_window": 11,
            "query_pre_attn_scalar": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _GEMMA3_ROPE,
            "final_logit_softcapping": 2.0,
        },
    ),
}


def build_config(case: str, **changes: Any) -> Any:
    """The transformers configuration of a case, optionally changed."""
    model_type, settings = CASES[case]
    settings = {**_SMALL, **settings, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **changes}
    return transformers.AutoConfig.for_model(model_type, **settings)


def build_model(config: Any, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A random model with weights that make every part matter: matrices of std 1.3/sqrt(fan_in), norm weights of mean
    1 (0 where the family adds 1) and std 0.3, biases of std 0.5. Values are representable in bfloat16."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    offset = 0.0 if config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0.0, 1.3 / p.shape[1] ** 0.5)
            elif "norm" in name:
                p.normal_(offset, 0.3)
            else:
                p.normal_(0.0, 0.5)
            p.copy_(p.to(torch.bfloat16).float())
    return model.eval().to(dtype)


def random_tokens(vocab_size: int, seed: int, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """[B, S] int32, every id equally likely."""
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def model_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """[B, S, V] float32."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.float().numpy()


def make(case: str) -> None:
    seed = list(CASES).index(case) + 1
    model = build_model(build_config(case), seed)
    tokens = random_tokens(model.config.vocab_size, seed)
    logits = model_logits(model, tokens)
    model.to(torch.bfloat16).save_pretrained(OUT / case)
    (OUT / case / "generation_config.json").unlink(missing_ok=True)
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention"
    np.savez_compressed(OUT / case / "golden.npz", tokens=tokens, logits=logits, made_with=made_with)
    size = sum(f.stat().st_size for f in (OUT / case).iterdir())
    print(f"{case}: {size} bytes, logits {logits.shape}, std {logits.std():.2f}, max {abs(logits).max():.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        make(name)
