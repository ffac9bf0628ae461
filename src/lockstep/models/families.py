"""What sets the model families apart: tensor names in Hugging Face checkpoints, fixed traits, and what an absent
`config.json` key means.

A name table is declarative: leaf pattern, tensor pattern, operation. `name_map` applies it to a spec and is total on
both sides: each leaf gets exactly one tensor, each rule is used. The inverse direction is the same map read backwards,
since both operations are their own inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lockstep.errors import ModelError
from lockstep.models.spec import Activation, ModelSpec, leaf_table

Op = Literal["identity", "transpose"]
Windows = Literal["none", "all", "from_layer", "pattern"]


@dataclass(frozen=True)
class NameRule:
    """leaf <-> tensor, `{i}` standing for the layer. transpose: the checkpoint has [out, in] a leaf [in, out]."""

    leaf: str
    tensor: str
    op: Op = "identity"


@dataclass(frozen=True)
class TensorRef:
    """The tensor of one leaf: its name and shape in the checkpoint, and the operation between the two."""

    name: str
    shape: tuple[int, ...]
    op: Op

    def convert(self, array: np.ndarray) -> np.ndarray:
        """Tensor -> leaf or leaf -> tensor, C-contiguous (safetensors writes the buffer, whatever the strides say)."""
        return np.ascontiguousarray(array.T if self.op == "transpose" else array)


@dataclass(frozen=True)
class Family:
    """One family. name is `ModelSpec.family`; model_type and architecture are what `config.json` says.

    windows: `none`; `all` layers have `sliding_window`; `from_layer` max_window_layers on, if use_sliding_window;
    `pattern`: every `sliding_window_pattern`-th layer is global, the others have the window.
    defaults: what an absent key means (the format leaves out what equals its class default). fixed: keys that may only
    have this one value, beyond those that `hf_config` fixes for every family.
    prefixes: (stored prefix, canonical prefix) of layouts that wrap the text model. ignorable: prefixes of tensors that
    belong to no leaf, because they are another modality's.
    """

    name: str
    model_type: str
    architecture: str
    rules: tuple[NameRule, ...]
    defaults: Mapping[str, Any]
    windows: Windows = "none"
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    prefixes: tuple[tuple[str, str], ...] = ()
    ignorable: tuple[str, ...] = ()

    @property
    def activation(self) -> Activation:
        return "gelu_tanh" if self.gemma else "silu"

    @property
    def norm_offset(self) -> float:
        return 1.0 if self.gemma else 0.0

    def canonical(self, tensor: str) -> str:
        """The tensor's name without the wrapping that a multi-modal checkpoint puts around the text model."""
        for stored, plain in self.prefixes:
            if tensor.startswith(stored):
                return plain + tensor.removeprefix(stored)
        return tensor

    def is_ignorable(self, tensor: str) -> bool:
        """Whether the tensor is known to carry nothing: RoPE tables of old checkpoints, or another modality."""
        return tensor.endswith(".rotary_emb.inv_freq") or tensor.startswith(self.ignorable)


def _layer(leaf: str, tensor: str, op: Op = "identity") -> NameRule:
    return NameRule("layers.{i}." + leaf, "model.layers.{i}." + tensor, op)


_OUTER = (
    NameRule("embed", "model.embed_tokens.weight"),
    NameRule("final_norm", "model.norm.weight"),
    NameRule("head", "lm_head.weight"),
)
_MATRICES = (
    *(_layer(n, f"self_attn.{n}_proj.weight", "transpose") for n in "qkvo"),
    *(_layer(n, f"mlp.{n}_proj.weight", "transpose") for n in ("gate", "up", "down")),
)
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

_COMMON_DEFAULTS = {
    "head_dim": None,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
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
        shape = leaf.shape[::-1] if rule.op == "transpose" else leaf.shape
        refs[path] = TensorRef(rule.tensor if layer is None else rule.tensor.replace("{i}", layer), shape, rule.op)
    unused = by_leaf.keys() - used - ({"head"} if spec.tied_head else set())
    if unused:
        raise ModelError(f"family {family.name!r} needs the leaves {sorted(unused)}, which this spec does not have")
    assert len({r.name for r in refs.values()}) == len(refs), f"{family.name}: two leaves share a tensor"
    return refs
