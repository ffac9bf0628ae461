"""Against transformers itself, where torch and transformers are installed (the `peers` extra): wider random models than
the goldens, every family, both directions, float32 and bfloat16, the configurations that `save_folder` writes, and the
ids that a chat template makes. `make test-peers` runs it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.models.decoder import reference_logits
from lockstep.models.gguf import read_gguf
from lockstep.models.hf import load_folder, load_spec, save_folder
from lockstep.models.tokenizer import Tokenizer

torch = pytest.importorskip("torch", reason="needs the peers extra")
transformers = pytest.importorskip("transformers", reason="needs the peers extra")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers, not ours

SCRIPT = Path(__file__).parents[1] / "goldens" / "make_parity.py"
BOUND = 1e-5  # of the largest logit, float32
SIZES = {
    "llama3": {"vocab_size": 101, "hidden_size": 66, "intermediate_size": 37, "head_dim": 14},
    "smollm2": {"vocab_size": 103, "hidden_size": 84, "intermediate_size": 41},
    "mistral": {"vocab_size": 107, "hidden_size": 23, "intermediate_size": 43, "head_dim": 14},
    "qwen2": {"vocab_size": 109, "hidden_size": 84, "intermediate_size": 47},
    "qwen3": {"vocab_size": 113, "hidden_size": 29, "intermediate_size": 53, "head_dim": 14},
    "gemma2": {"vocab_size": 127, "hidden_size": 66, "intermediate_size": 59, "head_dim": 22},
    "gemma3": {"vocab_size": 131, "hidden_size": 78, "intermediate_size": 61, "head_dim": 22},
}


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_parity", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_parity"] = module
    spec.loader.exec_module(module)
    return module


peer = _script()


def relative_error(logits: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(logits, np.float32) - expected).max() / np.abs(expected).max())


def random_model(case: str) -> tuple[Any, np.ndarray]:
    config = peer.build_config(case, **SIZES[case], num_hidden_layers=5 if case != "gemma3" else 3)
    return peer.build_model(config, seed=11), peer.random_tokens(config.vocab_size, 11, (2, 67))


def reread(folder: Path, dtype: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@pytest.mark.parametrize("case", peer.CASES)
def test_a_folder_of_theirs_is_the_same_model_here_and_back(case: str, tmp_path: Path) -> None:
    model, tokens = random_model(case)
    expected = peer.model_logits(model, tokens)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    spec, params = load_folder(tmp_path / "theirs", "stored")
    assert relative_error(reference_logits(spec, params, tokens), expected) <= BOUND
    save_folder(tmp_path / "ours", spec, params, max_shard_bytes=20_000)
    np.testing.assert_array_equal(peer.model_logits(reread(tmp_path / "ours", torch.float32), tokens), expected)


@pytest.mark.parametrize("case", peer.CASES)
def test_bfloat16_agrees_as_far_as_bfloat16_does(case: str, tmp_path: Path) -> None:
    """Neither side is the truth in bfloat16, so each is held against the float32 logits: our error is at most 1.5 times
    that of transformers plus one unit of rounding."""
    model, tokens = random_model(case)
    truth = peer.model_logits(model, tokens)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "m")
    theirs = peer.model_logits(reread(tmp_path / "m", torch.bfloat16), tokens)
    spec, params = load_folder(tmp_path / "m", "bfloat16")
    ours = np.asarray(reference_logits(spec, params, tokens))

    def rms(logits: np.ndarray) -> float:
        return float(np.sqrt(np.mean((logits - truth) ** 2)) / np.abs(truth).max())

    assert rms(ours) <= 1.5 * rms(theirs) + 2**-9


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_an_absent_key_means_what_transformers_means(model_type: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model_type": model_type, "num_attention_heads": 32, "num_hidden_layers": 31}
    keys |= {"vocab_size": 101, "hidden_size": 2048, "intermediate_size": 37}
    if model_type.startswith("qwen"):
        keys["use_sliding_window"] = True  # else the default window and first layer do not show
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config, spec = transformers.AutoConfig.from_pretrained(tmp_path), load_spec(tmp_path)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (spec.num_kv_heads, spec.head_dim) == (config.num_key_value_heads, head_dim)
    assert (spec.tied_head, spec.norm_eps) == (config.tie_word_embeddings, config.rms_norm_eps)
    assert spec.max_position == config.max_position_embeddings
    assert spec.query_scale == (getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5
    assert spec.attn_softcap == getattr(config, "attn_logit_softcapping", None)
    assert spec.final_softcap == getattr(config, "final_logit_softcapping", None)
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    types = types or ["full_attention" if window is None else "sliding_attention"] * spec.num_layers
    assert [k.window for k in spec.layers] == [window if t == "sliding_attention" else None for t in types]
    ropes = config.rope_parameters
    thetas = [ropes.get(t, ropes)["rope_theta"] for t in types]
    assert [(k.rope.theta, k.rope.scaling) for k in spec.layers] == [(theta, None) for theta in thetas]


CONVERSATIONS = [
    [{"role": "user", "content": "What is 17 + 25?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Grüße, 世界 \n\n\ttabs 1234567890"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "don't {{ x }} {% if %} <b>&amp;</b> 🙂"},
    ],
]


@pytest.mark.parametrize("prompted", [True, False])
def test_a_chat_template_makes_the_ids_that_transformers_makes(
    smollm2_path: Path, tmp_path: Path, prompted: bool
) -> None:
    """Of messages without special tokens: their text in data is text here, and a token there."""
    ours = Tokenizer.from_gguf(read_gguf(smollm2_path).metadata)
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
        assert ours.apply_template(messages, prompted) == list(expected)
        assert ours.render(messages, prompted) == theirs.apply_chat_template(
            messages, add_generation_prompt=prompted, tokenize=False
        )
    text = "".join(m["content"] for conversation in CONVERSATIONS for m in conversation)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.eos_ids == {theirs.eos_token_id}
