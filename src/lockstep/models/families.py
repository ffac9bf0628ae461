"""What sets the model families apart: tensor names in Hugging Face checkpoints, fixed traits, and what an absent
`config.json` key means.

A name table is declarative: leaf pattern, tensor pattern, operation. `name_map` applies it to a spec and is total on
both sides: each leaf gets exactly one tensor, or one per expert of a stack; no tensor belongs to two leaves; each rule
is used unless it is optional. The inverse direction is the same map read backwards, since transposing and keeping are
their own inverses, and a stack is taken apart in the order in which it was made.
"""

from __future__ import annotations

from lockstep.errors import ModelError
from lockstep.models.naming import Family, NameRule, Op, TensorRef
from lockstep.models.spec import ModelSpec, leaf_table

__all__ = ["FAMILIES", "Family", "NameRule", "TensorRef", "family_of", "name_map"]


def _layer(leaf: str, tensor: str, op: Op = "identity", optional: bool = False) -> NameRule:
    return NameRule("layers.{i}." + leaf, "model.layers.{i}." + tensor, op, optional)


def _mlp(leaf: str, tensor: str, optional: bool = True) -> tuple[NameRule, ...]:
    """Gate, up and down; leaf, tensor: the names, `*` standing for gate, up or down."""
    names = ("gate", "up", "down")
    return tuple(_layer(leaf.replace("*", n), tensor.replace("*", n), "transpose", optional) for n in names)


_OUTER = (
    NameRule("embed", "model.embed_tokens.weight"),
    NameRule("final_norm", "model.norm.weight"),
    NameRule("head", "lm_head.weight", optional=True),
    NameRule("value_head", "score.weight", optional=True),
)
_ATTENTION = tuple(_layer(n, f"self_attn.{n}_proj.weight", "transpose") for n in "qkvo")
_MATRICES = _ATTENTION + _mlp("*", "mlp.*_proj.weight", optional=False)
_NORMS = (
    _layer("attn_norm", "input_layernorm.weight"),
    _layer("mlp_norm", "post_attention_layernorm.weight"),
)
# Gemma 2 and 3 norm before and after each half, and the name that elsewhere means "before the MLP" means "after the
# attention" here.
_SANDWICH_NORMS = (
    _layer("attn_norm", "input_layernorm.weight"),
    _layer("attn_post_norm", "post_attention_layernorm.weight"),
    _layer("mlp_norm", "pre_feedforward_layernorm.weight"),
    _layer("mlp_post_norm", "post_feedforward_layernorm.weight"),
)
_QKV_BIAS = tuple(_layer(f"{n}_bias", f"self_attn.{n}_proj.bias") for n in "qkv")
_QK_NORM = tuple(_layer(f"{n}_norm", f"self_attn.{n}_norm.weight") for n in "qk")
_PLAIN = _OUTER + _MATRICES + _NORMS
_GEMMA = _OUTER + _MATRICES + _SANDWICH_NORMS

# Mixtures of experts. Where layers may have an MLP instead, both are optional; `leaf_table` has one or the other.
_ROUTED = (
    _layer("router", "mlp.gate.weight", "transpose", optional=True),
    *_mlp("experts_*", "mlp.experts.{e}.*_proj.weight"),
    *_mlp("*", "mlp.*_proj.weight"),
)
_MIXTRAL = (
    _layer("router", "block_sparse_moe.gate.weight", "transpose"),
    _layer("experts_gate", "block_sparse_moe.experts.{e}.w1.weight", "transpose"),
    _layer("experts_up", "block_sparse_moe.experts.{e}.w3.weight", "transpose"),
    _layer("experts_down", "block_sparse_moe.experts.{e}.w2.weight", "transpose"),
)
# Stored as the leaves are: stacked, [in, out], gate and up in alternating columns.
_GPT_OSS = (
    _layer("sinks", "self_attn.sinks"),
    _layer("o_bias", "self_attn.o_proj.bias"),
    _layer("router", "mlp.router.weight", "transpose"),
    _layer("router_bias", "mlp.router.bias"),
    _layer("experts_gate_up", "mlp.experts.gate_up_proj"),
    _layer("experts_gate_up_bias", "mlp.experts.gate_up_proj_bias"),
    _layer("experts_down", "mlp.experts.down_proj"),
    _layer("experts_down_bias", "mlp.experts.down_proj_bias"),
)
_DEEPSEEK = (
    _layer("q", "self_attn.q_proj.weight", "transpose", optional=True),
    _layer("q_a", "self_attn.q_a_proj.weight", "transpose", optional=True),
    _layer("q_a_norm", "self_attn.q_a_layernorm.weight", optional=True),
    _layer("q_b", "self_attn.q_b_proj.weight", "transpose", optional=True),
    _layer("kv_a", "self_attn.kv_a_proj_with_mqa.weight", "transpose"),
    _layer("kv_a_norm", "self_attn.kv_a_layernorm.weight"),
    _layer("kv_b", "self_attn.kv_b_proj.weight", "transpose"),
    _layer("o", "self_attn.o_proj.weight", "transpose"),
    *_ROUTED,
    _layer("router_correction", "mlp.gate.e_score_correction_bias", optional=True),
    *_mlp("shared_*", "mlp.shared_experts.*_proj.weight"),
)

_COMMON_DEFAULTS = {
    "head_dim": None,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
}
_QWEN_DEFAULTS = _COMMON_DEFAULTS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS = _COMMON_DEFAULTS | {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

# Of a mixture of experts: settings of its training, and how stored weights are packed (a plan is of the unpacked ones).
_EXPERTS_INERT = frozenset({"output_router_logits", "router_aux_loss_coef", "quantization_config"})

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family(
            "llama",
            "llama",
            "LlamaForCausalLM",
            _PLAIN,
            _COMMON_DEFAULTS | {"max_position_embeddings": 2048},
            fixed={"sliding_window": None},
        ),
        Family(
            "mistral",
            "mistral",
            "MistralForCausalLM",
            _PLAIN,
            _COMMON_DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
            windows="all",
        ),
        Family(
            "qwen2",
            "qwen2",
            "Qwen2ForCausalLM",
            _PLAIN + _QKV_BIAS,
            _QWEN_DEFAULTS,
            windows="from_layer",
            qkv_bias=True,
        ),
        Family(
            "qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            _PLAIN + _QK_NORM,
            _QWEN_DEFAULTS | {"head_dim": 128},
            windows="from_layer",
            qk_norm=True,
        ),
        Family(
            "gemma2",
            "gemma2",
            "Gemma2ForCausalLM",
            _GEMMA,
            _GEMMA_DEFAULTS
            | {
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "sliding_window_pattern": 2,
            },
            windows="pattern",
            gemma=True,
            fixed={"sliding_window_pattern": 2},
        ),
        Family(
            "gemma3",
            "gemma3_text",
            "Gemma3ForCausalLM",
            _GEMMA + _QK_NORM,
            _GEMMA_DEFAULTS
            | {
                "vocab_size": 262_208,
                "num_attention_heads": 8,
                "max_position_embeddings": 131_072,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "sliding_window_pattern": 6,
            },
            windows="pattern",
            qk_norm=True,
            gemma=True,
            # The published models have none, and transformers keeps the key without applying it.
            fixed={"attn_logit_softcapping": None},
            prefixes=(
                ("language_model.model.", "model."),
                ("model.language_model.", "model."),
                ("language_model.lm_head.", "lm_head."),
            ),
            ignorable=(
                "vision_tower.",
                "model.vision_tower.",
                "multi_modal_projector.",
                "model.multi_modal_projector.",
            ),
        ),
        Family(
            "mixtral",
            "mixtral",
            "MixtralForCausalLM",
            _OUTER + _ATTENTION + _NORMS + _MIXTRAL,
            _COMMON_DEFAULTS
            | {
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "sliding_window": None,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            windows="all",
            experts="mixtral",
            inert=_EXPERTS_INERT | {"router_jitter_noise"},
        ),
        Family(
            "qwen3_moe",
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _OUTER + _ATTENTION + _NORMS + _QK_NORM + _ROUTED,
            _COMMON_DEFAULTS
            | {
                "num_key_value_heads": 4,
                "max_position_embeddings": 32_768,
                "decoder_sparse_step": 1,
                "mlp_only_layers": None,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
            experts="qwen",
            qk_norm=True,
            fixed={"use_sliding_window": False},
            inert=_EXPERTS_INERT | {"sliding_window", "max_window_layers"},  # without use_sliding_window
        ),
        Family(
            "gpt_oss",
            "gpt_oss",
            "GptOssForCausalLM",
            _OUTER + _ATTENTION + _NORMS + _QKV_BIAS + _GPT_OSS,
            {key: value for key, value in _COMMON_DEFAULTS.items() if key != "rope_scaling"}
            | {
                "head_dim": 64,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150_000.0,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_limit": 7.0,
            },
            windows="pattern",
            experts="gpt_oss",
            yarn=True,
            qkv_bias=True,
            o_bias=True,
            sinks=True,
            fixed={"attention_bias": True, "sliding_window_pattern": 2, "swiglu_alpha": 1.702},
            inert=_EXPERTS_INERT | {"initial_context_length"},
        ),
        Family(
            "deepseek_v3",
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            _OUTER + _NORMS + _DEEPSEEK,
            _COMMON_DEFAULTS
            | {
                "max_position_embeddings": 4096,
                "moe_intermediate_size": 2048,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "first_k_dense_replace": 3,
                "n_group": 8,
                "topk_group": 4,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            also=("kimi_k2",),
            experts="deepseek",
            latent=True,
            yarn=True,
            fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
            # `auto_map` names the publisher's own code for this architecture; the next-token-prediction layers, which
            # only speculative decoding uses, have no leaves.
            inert=_EXPERTS_INERT | {"auto_map", "num_nextn_predict_layers", "ep_size", "aux_loss_alpha", "seq_aux"},
        ),
    )
}


def family_of(spec: ModelSpec) -> Family:
    """The family that a spec belongs to. Raises ModelError for a name outside the table."""
    if spec.family not in FAMILIES:
        raise ModelError(f"model family {spec.family!r} has no name table; known families: {', '.join(FAMILIES)}")
    return FAMILIES[spec.family]


def name_map(spec: ModelSpec) -> dict[str, TensorRef]:
    """Leaf path -> tensor, for every leaf of `leaf_table(spec)` in its order.

    Raises ModelError if the spec has a leaf that its family's checkpoints cannot hold, or lacks one that they do.
    """
    family = family_of(spec)
    by_leaf = {rule.leaf: rule for rule in family.rules}
    assert len(by_leaf) == len(family.rules) == len({r.tensor for r in family.rules}), f"{family.name}: a rule twice"
    refs: dict[str, TensorRef] = {}
    used: set[str] = set()
    for path, leaf in leaf_table(spec).items():
        layer = path.split(".")[1] if path.startswith("layers.") else None
        pattern = path if layer is None else "layers.{i}." + path.split(".", 2)[2]
        if pattern not in by_leaf:
            raise ModelError(f"leaf {path!r} has no tensor name in family {family.name!r}; its leaves: {list(by_leaf)}")
        rule = by_leaf[pattern]
        used.add(pattern)
        stack, part = (leaf.shape[0], leaf.shape[1:]) if rule.stacked else (None, leaf.shape)
        name = rule.tensor if layer is None else rule.tensor.replace("{i}", layer)
        refs[path] = TensorRef(name, part[::-1] if rule.op == "transpose" else part, rule.op, stack)
    unused = {leaf for leaf, rule in by_leaf.items() if not rule.optional} - used
    if unused:
        raise ModelError(f"family {family.name!r} needs the leaves {sorted(unused)}, which this spec does not have")
    assert len({r.name for r in refs.values()}) == len(refs), f"{family.name}: two leaves share a tensor"
    return refs
