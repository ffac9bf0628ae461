"""`config.json` -> spec for published models of every family, back again, and everything that is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ModelError
from lockstep.models.families import FAMILIES, name_map
from lockstep.models.hf_config import config_from_spec, spec_from_config
from lockstep.models.spec import LayerKind, ModelSpec, Rope, num_parameters

# Published configurations, cut to the keys that matter (and some that must be known not to).
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA3_70B = LLAMA3 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA3_405B = LLAMA3 | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_V1 = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_V3 = MISTRAL_V1 | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_17B = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
}
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA2_27B = GEMMA2_2B | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
# Number of parameters; number of tensors; first 16 hex digits of the SHA-256 of the sorted lines "name [shape]" of the
# published checkpoint, where a list of its tensors was at hand.
PUBLISHED: dict[str, tuple[dict, int, int, str | None]] = {
    "Llama-3.1-8B": (LLAMA3, 8_030_261_248, 291, "0eb5a413717c19bd"),
    "Llama-3.1-70B": (LLAMA3_70B, 70_553_706_496, 723, "8893671a3dba0a3d"),
    "Llama-3.1-405B": (LLAMA3_405B, 405_853_388_800, 1137, "19b32f8bc93bdae8"),
    "SmolLM2-135M": (SMOLLM2, 134_515_008, 272, None),
    "Mistral-7B-v0.1": (MISTRAL_V1, 7_241_732_096, 291, None),
    "Mistral-7B-v0.3": (MISTRAL_V3, 7_248_023_552, 291, None),
    "Qwen2.5-0.5B": (QWEN25, 494_032_768, 290, None),
    "Qwen3-0.6B": (QWEN3_06B, 596_049_920, 310, "0174a45881f5f620"),
    "Qwen3-1.7B": (QWEN3_17B, 1_720_574_976, 310, "3b0c60df711d1878"),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360, 399, "1efef96af65e1e9f"),
    "Qwen3-32B": (QWEN3_32B, 32_762_123_264, 707, "0634cef651e24fc0"),
    "gemma-2-2b": (GEMMA2_2B, 2_614_341_888, 288, None),
    "gemma-2-27b": (GEMMA2_27B, 27_227_128_320, 508, None),
    "gemma-3-1b": (GEMMA3_1B, 999_885_952, 340, None),
    "gemma-3-4b (text)": (GEMMA3_4B, 3_880_263_168, 444, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_tensors(name: str) -> None:
    config, parameters, tensors, digest = PUBLISHED[name]
    spec = spec_from_config(config)
    refs = name_map(spec)
    assert (num_parameters(spec), len(refs)) == (parameters, tensors)
    lines = sorted((ref.name, list(ref.shape)) for ref in refs.values())
    if digest is not None:
        found = hashlib.sha256("\n".join(f"{n} {s}" for n, s in lines).encode()).hexdigest()
        assert found.startswith(digest)


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_and_spec_are_inverses(name: str) -> None:
    spec = spec_from_config(PUBLISHED[name][0])
    written = json.loads(json.dumps(config_from_spec(spec)))
    assert spec_from_config(written) == spec


ropes = st.builds(
    Rope,
    st.floats(2.0, 1e7),
    st.none()
    | st.tuples(st.just("linear"), st.floats(1.0, 64.0))
    | st.tuples(st.just("llama3"), st.floats(1.0, 64.0), st.just(1.0), st.floats(1.5, 8.0), st.integers(1, 8192)),
)


@given(
    name=st.sampled_from(sorted(n for n, f in FAMILIES.items() if f.experts == "none")),  # others: test_experts.py
    rope=ropes,
    local_theta=st.floats(2.0, 1e7),
    window=st.integers(1, 9),
    sliding=st.lists(st.booleans(), min_size=1, max_size=9),
    groups=st.integers(1, 5),
    scalar=st.integers(1, 999),
    tied=st.booleans(),
)
def test_every_spec_of_every_family_survives_the_configuration(
    name: str,
    rope: Rope,
    local_theta: float,
    window: int,
    sliding: list[bool],
    groups: int,
    scalar: int,
    tied: bool,
) -> None:
    family = FAMILIES[name]
    sliding = {"none": [False] * len(sliding), "all": [sliding[0]] * len(sliding)}.get(family.windows, sliding)
    local = Rope(local_theta) if name == "gemma3" else rope
    spec = ModelSpec(
        family=name,
        vocab_size=101,
        dim=23,
        num_heads=2 * groups,
        num_kv_heads=2,
        head_dim=14,
        mlp_dim=37,
        layers=tuple(LayerKind(local, window) if s else LayerKind(rope) for s in sliding),
        norm_eps=1e-5,
        query_scale=(scalar if family.gemma else 14) ** -0.5,
        max_position=211,
        tied_head=tied,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        norm_offset=family.norm_offset,
        embed_scale=23**0.5 if family.gemma else 1.0,
        activation=family.activation,
        attn_softcap=50.0 if name == "gemma2" else None,
        final_softcap=30.0 if family.gemma else None,
    )
    assert spec_from_config(json.loads(json.dumps(config_from_spec(spec)))) == spec


def test_llama3_fields() -> None:
    spec = spec_from_config(LLAMA3)
    rope = Rope(500_000.0, ("llama3", 8.0, 1.0, 4.0, 8192))
    assert spec == ModelSpec(
        family="llama",
        vocab_size=128256,
        dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14336,
        layers=(LayerKind(rope),) * 32,
        norm_eps=1e-5,
        query_scale=128**-0.5,
        max_position=131072,
    )


def test_transformers_5_layout_reads_the_same() -> None:
    def new(config: dict, parameters: Any) -> dict:
        old = {"rope_theta", "rope_scaling", "rope_local_base_freq"}
        return {k: v for k, v in config.items() if k not in old} | {"rope_parameters": parameters}

    llama = new(LLAMA3, LLAMA3["rope_scaling"] | {"rope_theta": 500000.0})
    assert spec_from_config(llama) == spec_from_config(LLAMA3)
    qwen = new(QWEN25, {"rope_theta": 1000000.0, "rope_type": "default"})
    assert spec_from_config(qwen) == spec_from_config(QWEN25)
    both = {
        "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    assert spec_from_config(new(GEMMA3_1B, both)) == spec_from_config(GEMMA3_1B)
    assert spec_from_config(LLAMA3 | {"rope_parameters": llama["rope_parameters"]}) == spec_from_config(LLAMA3)
    with pytest.raises(ModelError, match=r"rope_parameters and \['rope_scaling', 'rope_theta'\] disagree"):
        spec_from_config(LLAMA3 | {"rope_parameters": {"rope_theta": 10000.0}})


def test_windows() -> None:
    def windows(config: dict) -> list[int | None]:
        return [k.window for k in spec_from_config(config).layers]

    assert windows(MISTRAL_V1) == [4096] * 32
    assert windows(MISTRAL_V3) == [None] * 32
    absent = {k: v for k, v in MISTRAL_V1.items() if k != "sliding_window"}
    assert windows(absent) == [4096] * 32  # what the format means by leaving the key out
    assert windows(QWEN25) == [None] * 24
    assert windows(QWEN25 | {"use_sliding_window": True}) == [None] * 21 + [32768] * 3
    assert windows(QWEN25 | {"use_sliding_window": True, "max_window_layers": 0}) == [32768] * 24
    explicit = ["full_attention", "sliding_attention"] * 12
    assert windows(QWEN25 | {"use_sliding_window": True, "layer_types": explicit}) == [None, 32768] * 12
    assert windows(GEMMA2_2B) == [4096, None] * 13
    assert windows(GEMMA3_1B) == ([512] * 5 + [None]) * 4 + [512] * 2


def test_gemma_traits() -> None:
    two, three = spec_from_config(GEMMA2_27B), spec_from_config(GEMMA3_4B)
    assert (two.norm_offset, two.post_norms, two.activation, two.tied_head) == (1.0, True, "gelu_tanh", True)
    assert (two.query_scale, two.embed_scale) == (144**-0.5, 4608**0.5)
    assert (two.attn_softcap, two.final_softcap, two.qk_norm) == (50.0, 30.0, False)
    assert (three.attn_softcap, three.final_softcap, three.qk_norm) == (None, None, True)
    assert (three.vocab_size, three.num_heads, three.num_kv_heads, three.head_dim) == (262208, 8, 4, 256)
    local, everywhere = LayerKind(Rope(10_000.0), 1024), LayerKind(Rope(1_000_000.0, ("linear", 8.0)))
    assert three.layers == ((local,) * 5 + (everywhere,)) * 5 + (local,) * 4


REFUSED: list[tuple[dict, dict, str]] = [
    (LLAMA3, {"model_type": "phi3"}, "model_type is 'phi3'; supported: llama, mistral, qwen2"),
    (LLAMA3, {"model_type": None}, "model_type is None"),
    (LLAMA3, {"architectures": ["LlamaForTokenClassification"]}, "supported: .'LlamaForCausalLM'"),
    (LLAMA3, {"attention_bias": True}, "key 'attention_bias' is True; supported: False"),
    (LLAMA3, {"mlp_bias": True}, "key 'mlp_bias' is True; supported: False"),
    (LLAMA3, {"quantization_config": {"quant_method": "fp8"}}, "key 'quantization_config'.*supported: None"),
    (LLAMA3, {"partial_rotary_factor": 0.5}, "key 'partial_rotary_factor' is 0.5; supported: 1.0"),
    (LLAMA3, {"rope_interleaved": True}, "key 'rope_interleaved' is True"),
    (LLAMA3, {"sliding_window": 4096}, "key 'sliding_window' is 4096; supported: None"),
    (LLAMA3, {"num_local_experts": 8}, "key 'num_local_experts' .value 8. is not known to lockstep"),
    (LLAMA3, {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "key 'auto_map'"),
    (LLAMA3, {"hidden_act": "relu"}, "key 'hidden_act' is 'relu'; supported: 'silu'"),
    (LLAMA3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
    (LLAMA3, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic' is not supported"),
    (LLAMA3, {"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 4.0}}, "remove one"),
    (LLAMA3, {"rope_scaling": {"rope_type": "linear"}}, "lacks the key 'factor'"),
    (LLAMA3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "key 'beta_fast'"),
    (LLAMA3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "disagree on which wins"),
    (LLAMA3, {"rope_scaling": LLAMA3["rope_scaling"] | {"low_freq_factor": 4.0}}, "below high_freq_factor"),
    (LLAMA3, {"rope_scaling": "llama3"}, "key 'rope_scaling' is 'llama3'; supported: an object or null"),
    (LLAMA3, {"rope_parameters": [1]}, "key 'rope_parameters'"),
    (LLAMA3, {"rope_theta": 0}, "key 'rope_theta' is 0; supported: a number above 0"),
    (LLAMA3, {"num_key_value_heads": 7}, "a divisor of num_attention_heads, which is 32"),
    (LLAMA3, {"num_attention_heads": 24}, "a divisor of hidden_size, which is 4096, or a head_dim"),
    (LLAMA3, {"head_dim": 127}, "head width is 127"),
    (LLAMA3, {"hidden_size": "4096"}, "key 'hidden_size' is '4096'; supported: an integer"),
    (LLAMA3, {"num_hidden_layers": 0}, "key 'num_hidden_layers' is 0"),
    (LLAMA3, {"vocab_size": True}, "key 'vocab_size' is True"),
    (LLAMA3, {"rms_norm_eps": float("inf")}, "key 'rms_norm_eps' is inf"),
    (LLAMA3, {"tie_word_embeddings": "no"}, "key 'tie_word_embeddings' is 'no'; supported: true or false"),
    (QWEN3_06B, {"attention_bias": True}, "key 'attention_bias' is True"),
    (QWEN3_06B, {"layer_types": ["sliding_attention"] * 28}, "key 'sliding_window' is None; supported: a window"),
    (QWEN25, {"max_window_layers": -1}, "key 'max_window_layers' is -1"),
    (QWEN25, {"use_sliding_window": True, "layer_types": ["full_attention"]}, "one entry per layer, 24 in all"),
    (QWEN25, {"layer_types": ["linear_attention"] * 24}, "key 'layer_types'"),
    (MISTRAL_V1, {"layer_types": ["full_attention"] * 32}, "key 'layer_types'"),
    (GEMMA2_2B, {"hidden_activation": "gelu"}, "key 'hidden_activation' is 'gelu'"),
    (GEMMA2_2B, {"sliding_window_pattern": 6}, "key 'sliding_window_pattern' is 6; supported: 2"),
    (GEMMA2_2B, {"attn_logit_softcapping": 0.0}, "key 'attn_logit_softcapping' is 0.0"),
    (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "key 'attn_logit_softcapping' is 50.0; supported: None"),
    (GEMMA3_1B, {"use_bidirectional_attention": True}, "key 'use_bidirectional_attention'"),
    (GEMMA3_1B, {"rope_parameters": {"rope_theta": 1e4}}, "an object per layer type"),
    (GEMMA3_4B, {"text_config": None}, "'text_config' is None; expected an object"),
    (GEMMA3_4B, {"quantization_config": {"bits": 4}}, "key 'quantization_config'"),
    (GEMMA3_4B, {"hidden_size": 17}, "'hidden_size' is 17, in 'text_config' 2560"),
]


@pytest.mark.parametrize(("base", "change", "message"), REFUSED)
def test_what_would_change_the_function_is_refused(base: dict, change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(base | change)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"lacks the key '{key}'"):
        spec_from_config({k: v for k, v in LLAMA3.items() if k != key})


def test_a_spec_that_a_config_cannot_express_is_refused() -> None:
    spec = spec_from_config(LLAMA3)
    with pytest.raises(ModelError, match=r"llama config.json cannot express: layers.*"):
        config_from_spec(replace(spec, layers=(LayerKind(Rope(1e4)), LayerKind(Rope(1e5)))))
    with pytest.raises(ModelError, match=r"cannot express: attn_softcap \(wanted 50.0, llama gives None\)"):
        config_from_spec(replace(spec, attn_softcap=50.0))
    with pytest.raises(ModelError, match="cannot express: query_scale"):
        config_from_spec(replace(spec, query_scale=0.1))
