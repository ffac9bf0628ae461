"""`config.json` <-> `ModelSpec`. Every key is accounted for: read, required to have the one value that is supported, or
known not to change the function. A key outside those lists is an error, because ignoring it might change the model.

What it says of single layers, and of experts and latent attention, is read in `hf_layers.py` and `hf_experts.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lockstep.errors import ModelError
from lockstep.models.families import FAMILIES, Family, family_of
from lockstep.models.hf_experts import experts_of, latent_of, with_experts, written_experts, written_latent
from lockstep.models.hf_keys import INERT, Keys
from lockstep.models.hf_layers import layers, written_rope, written_windows
from lockstep.models.spec import LatentAttention, ModelSpec

# Of a multi-modal wrapper: settings of the parts that are left out, besides the text model's own keys.
_WRAPPER_INERT = frozenset(
    {"text_config", "vision_config", "mm_tokens_per_image", "image_token_index", "image_token_id"}
    | {"boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"}
)


def _unwrap(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's configuration: the whole, or that inside a multi-modal Gemma 3."""
    if config.get("model_type") != "gemma3":
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json of a gemma3 model: 'text_config' is {text!r}; expected an object")
    outer = {k: v for k, v in config.items() if k not in _WRAPPER_INERT and k not in INERT}
    for key, value in outer.items():
        if text.get(key, value) != value:
            raise ModelError(f"config.json of a gemma3 model: {key!r} is {value!r}, in 'text_config' {text[key]!r}")
    return {**outer, **text, "model_type": "gemma3_text", "architectures": config.get("architectures")}


SCALAR = "ForSequenceClassification"


def scalar_architecture(family: Family) -> str:
    """What transformers calls the family's model with one score per sequence."""
    if family.name == "gemma3":
        return f"Gemma3Text{SCALAR}"
    return family.architecture.removesuffix("ForCausalLM") + SCALAR


def _scalar_head(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether the model has one. Raises ModelError for a classifier of several labels."""
    architectures = config.get("architectures") or [family.architecture]
    if scalar_architecture(family) not in architectures:
        return False
    labels = config.get("id2label")
    if labels is not None and len(labels) != 1:
        raise ModelError(
            f"config.json: architectures is {architectures!r} with {len(labels)} labels (id2label); a scalar head has "
            "one: num_labels = 1 when the model was made"
        )
    return True


def _family(config: Mapping[str, Any]) -> Family:
    known = {model_type: f for f in FAMILIES.values() for model_type in (f.model_type, *f.also)}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise ModelError(f"config.json: model_type is {model_type!r}; supported: {', '.join([*known, 'gemma3'])}")
    family = known[model_type]
    accepted = {family.architecture, scalar_architecture(family)} | (
        {"Gemma3ForConditionalGeneration"} if family.name == "gemma3" else set()
    )
    architectures = config.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or not all(isinstance(a, str) and a in accepted for a in architectures):
        raise ModelError(f"config.json: architectures is {architectures!r}; supported: {sorted(accepted)}")
    return family


def _head_dims(keys: Keys, dim: int, latent: LatentAttention | None) -> tuple[int, int, int]:
    """Query heads, key-value heads, width of a head's query and key."""
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.optional_integer("num_key_value_heads") or heads
    if latent is not None:
        if kv_heads != heads:
            raise keys.fail("num_key_value_heads", f"num_attention_heads, which is {heads}")
        return heads, heads, latent.nope_dim + latent.rope_dim
    head_dim = keys.optional_integer("head_dim")
    if heads % kv_heads:
        raise keys.fail("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
    if head_dim is None:
        if dim % heads:
            raise keys.fail("num_attention_heads", f"a divisor of hidden_size, which is {dim}, or a head_dim")
        head_dim = dim // heads
    if head_dim % 2:
        raise ModelError(f"config.json: the head width is {head_dim}; rotary embeddings need an even one")
    return heads, kv_heads, head_dim


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The specification that a Hugging Face `config.json` describes.

    Raises ModelError, naming key, value and what is supported, for any architecture, option or key that is not.
    """
    config = _unwrap(config)
    family = _family(config)
    keys = Keys(family, config)
    dim = keys.integer("hidden_size")
    latent = latent_of(keys)
    heads, kv_heads, head_dim = _head_dims(keys, dim, latent)
    activation_key, activation = ("hidden_activation", "gelu_pytorch_tanh") if family.gemma else ("hidden_act", "silu")
    for key in {activation_key, "hidden_act"} & config.keys():
        if keys.get(key) != activation:
            raise keys.fail(key, repr(activation))
    spec = ModelSpec(
        family=family.name,
        vocab_size=keys.integer("vocab_size"),
        dim=dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=keys.integer("intermediate_size"),
        layers=with_experts(keys, layers(keys)),
        norm_eps=keys.number("rms_norm_eps"),
        query_scale=(keys.number("query_pre_attn_scalar") if family.gemma else head_dim) ** -0.5,
        max_position=keys.integer("max_position_embeddings"),
        tied_head=keys.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        norm_offset=family.norm_offset,
        embed_scale=dim**0.5 if family.gemma else 1.0,
        activation=family.activation,
        attn_softcap=keys.optional_number("attn_logit_softcapping") if family.name == "gemma2" else None,
        final_softcap=keys.optional_number("final_logit_softcapping") if family.gemma else None,
        o_bias=family.o_bias,
        sinks=family.sinks,
        experts=experts_of(keys),
        latent=latent,
        scalar_head=_scalar_head(family, config),
    )
    keys.finish()
    return spec


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a spec: `spec_from_config` gives the same spec back.

    Raises ModelError if the family's configuration cannot express the spec.
    """
    family = family_of(spec)
    config: dict[str, Any] = {
        "architectures": [scalar_architecture(family) if spec.scalar_head else family.architecture],
        "model_type": family.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.mlp_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_head,
        **written_rope(family, spec),
        **written_windows(family, spec),
        **written_experts(family, spec),
        **written_latent(spec),
    }
    if spec.scalar_head:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if family.gemma:
        scalar = spec.query_scale**-2
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(scalar) if round(scalar) ** -0.5 == spec.query_scale else scalar,
            "attn_logit_softcapping": spec.attn_softcap,
            "final_logit_softcapping": spec.final_softcap,
        }
    else:
        config["hidden_act"] = "silu"
    back = spec_from_config(config)
    if back != spec:
        differing = [
            f"{f.name} (wanted {getattr(spec, f.name)!r}, {family.name} gives {getattr(back, f.name)!r})"
            for f in dataclasses.fields(spec)
            if getattr(back, f.name) != getattr(spec, f.name)
        ]
        raise ModelError(f"a {family.name} config.json cannot express: {'; '.join(differing)}")
    return config
