"""`config.json` <-> `ModelSpec`. Every key is accounted for: read, required to have the one value that is supported, or
known not to change the function. A key outside those lists is an error, because ignoring it might change the model.

Both layouts of the rotary settings are read: `rope_theta` + `rope_scaling`, and `rope_parameters` (transformers 5).
Written is the former, which every version reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lockstep.errors import ModelError
from lockstep.models.families import FAMILIES, Family, family_of
from lockstep.models.spec import LayerKind, ModelSpec, Rope

_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}

# Bookkeeping, token ids, generation and training settings. Dropout is here because the policy is the evaluation-time
# function, in generation as in training; `dtype` because the dtype of a load is the caller's choice.
_INERT = frozenset(
    """
    model_type architectures transformers_version dtype torch_dtype _name_or_path _commit_hash name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    use_cache initializer_range attention_dropout _attn_implementation _attn_implementation_autoset attn_implementation
    cache_implementation pretraining_tp is_llama_config transformers.js_config unsloth_fixed unsloth_version
    _sliding_window_pattern finetuning_task id2label label2id problem_type return_dict output_hidden_states
    output_attentions torchscript use_bfloat16 tf_legacy_loss task_specific_params prefix tokenizer_class is_decoder
    tie_encoder_decoder cross_attention_hidden_size chunk_size_feed_forward max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905  (a list of words is easier to read than 70 quoted strings)
)

# Of a multi-modal wrapper: settings of the parts that are left out, besides the text model's own keys.
_WRAPPER_INERT = frozenset(
    {"text_config", "vision_config", "mm_tokens_per_image", "image_token_index", "image_token_id"}
    | {"boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"}
)

_REQUIRED = object()


class _Keys:
    """Reads keys of one configuration, remembers which, and complains about the rest."""

    def __init__(self, family: Family, config: Mapping[str, Any]):
        self.family = family
        self.config = config
        self.seen: set[str] = set()

    def fail(self, key: str, expected: str) -> ModelError:
        return ModelError(
            f"config.json of a {self.family.name} model: key {key!r} is {self.config.get(key)!r}; supported: {expected}"
        )

    def get(self, key: str) -> Any:
        self.seen.add(key)
        value = self.config[key] if key in self.config else self.family.defaults.get(key, _REQUIRED)
        if value is _REQUIRED:
            raise ModelError(f"config.json of a {self.family.name} model lacks the key {key!r}")
        return value

    def integer(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, "an integer of at least 1")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.fail(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def finish(self) -> None:
        """Check the keys that may have one value only, then that no key is left over."""
        fixed = _FIXED | {key: (value,) for key, value in self.family.fixed.items()}
        for key in sorted(self.config.keys() - self.seen):
            value = self.config[key]
            if key in fixed:
                # 0 == False and 1.0 == True in Python; a flag must be a flag.
                if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in fixed[key]):
                    raise self.fail(key, " or ".join(map(repr, fixed[key])))
            elif key not in _INERT:
                raise ModelError(
                    f"config.json of a {self.family.name} model: key {key!r} (value {self.config[key]!r}) is not known"
                    " to lockstep, and could change what the model computes. If it does not, take it out of config.json"
                )


def _unwrap(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's configuration: the whole, or that inside a multi-modal Gemma 3."""
    if config.get("model_type") != "gemma3":
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json of a gemma3 model: 'text_config' is {text!r}; expected an object")
    outer = {k: v for k, v in config.items() if k not in _WRAPPER_INERT and k not in _INERT}
    for key, value in outer.items():
        if text.get(key, value) != value:
            raise ModelError(f"config.json of a gemma3 model: {key!r} is {value!r}, in 'text_config' {text[key]!r}")
    return {**outer, **text, "model_type": "gemma3_text", "architectures": config.get("architectures")}


def _family(config: Mapping[str, Any]) -> Family:
    known = {f.model_type: f for f in FAMILIES.values()}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise ModelError(f"config.json: model_type is {model_type!r}; supported: {', '.join([*known, 'gemma3'])}")
    family = known[model_type]
    accepted = {family.architecture} | ({"Gemma3ForConditionalGeneration"} if family.name == "gemma3" else set())
    architectures = config.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or not set(architectures) <= accepted:
        raise ModelError(f"config.json: architectures is {architectures!r}; supported: {sorted(accepted)}")
    return family


def _rope(family: Family, settings: Mapping[str, Any], default_theta: float) -> Rope:
    """One rotary setting: an object with `rope_theta` and the scaling's own keys."""
    keys = _Keys(dataclasses.replace(family, defaults={"rope_theta": default_theta}, fixed={}), settings)
    theta = keys.number("rope_theta")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if settings.get("type", kind) != kind:
        raise ModelError(f"config.json: rope_type is {kind!r} and type is {settings['type']!r}; remove one")
    keys.seen |= {"rope_type", "type"}
    rope: Rope
    if kind == "default":
        rope = Rope(theta)
    elif kind == "linear":
        rope = Rope(theta, ("linear", keys.number("factor")))
    elif kind == "llama3":
        factor, low, high = (keys.number(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        if not low < high:
            raise keys.fail("low_freq_factor", f"a number below high_freq_factor, which is {high}")
        rope = Rope(theta, ("llama3", factor, low, high, keys.integer("original_max_position_embeddings")))
    else:
        raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")
    keys.finish()
    return rope


def _old_ropes(keys: _Keys) -> dict[str, Rope]:
    theta, scaling = keys.number("rope_theta"), keys.config.get("rope_scaling")
    keys.seen.add("rope_scaling")
    if not isinstance(scaling, Mapping | None):
        raise keys.fail("rope_scaling", "an object or null")
    if scaling and scaling.get("rope_theta", theta) != theta:
        raise keys.fail(
            "rope_theta", f"what rope_scaling says, {scaling['rope_theta']!r} (readers disagree on which wins)"
        )
    main = _rope(keys.family, {"rope_theta": theta, **(scaling or {})}, theta)
    if "rope_local_base_freq" not in keys.family.defaults:
        return {"full_attention": main, "sliding_attention": main}
    return {"full_attention": main, "sliding_attention": Rope(keys.number("rope_local_base_freq"))}


def _ropes(keys: _Keys) -> dict[str, Rope]:
    """Rotary embedding by layer type."""
    new = keys.config.get("rope_parameters")
    keys.seen.add("rope_parameters")
    if new is None:
        return _old_ropes(keys)
    if not isinstance(new, Mapping):
        raise keys.fail("rope_parameters", "an object or null")
    thetas = dict.fromkeys(("full_attention", "sliding_attention"), keys.family.defaults["rope_theta"])
    if "rope_local_base_freq" in keys.family.defaults:
        thetas["sliding_attention"] = keys.family.defaults["rope_local_base_freq"]
        if new.keys() - thetas.keys() or not all(isinstance(new.get(k) or {}, Mapping) for k in thetas):
            raise keys.fail("rope_parameters", f"an object per layer type, {' and '.join(thetas)}")
        ropes = {k: _rope(keys.family, new.get(k) or {}, theta) for k, theta in thetas.items()}
    else:
        ropes = dict.fromkeys(thetas, _rope(keys.family, new, thetas["full_attention"]))
    old = {"rope_theta", "rope_scaling", "rope_local_base_freq"} & keys.config.keys()
    if old and _old_ropes(keys) != ropes:
        raise ModelError(f"config.json: rope_parameters and {sorted(old)} disagree; remove the outdated ones")
    return ropes


def _windows(keys: _Keys, num_layers: int) -> list[int | None]:
    """Attention window per layer, None for a layer that sees everything."""
    rule = keys.family.windows
    if rule == "none":
        return [None] * num_layers
    window = keys.optional_integer("sliding_window")
    if rule == "all":
        return [window] * num_layers
    if rule == "from_layer":
        if not keys.flag("use_sliding_window"):
            window = None
        first = keys.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise keys.fail("max_window_layers", "an integer of at least 0")
        sliding = [window is not None and i >= first for i in range(num_layers)]
    else:
        every = keys.integer("sliding_window_pattern")
        if every != keys.family.fixed.get("sliding_window_pattern", every):
            raise keys.fail("sliding_window_pattern", repr(keys.family.fixed["sliding_window_pattern"]))
        sliding = [(i + 1) % every != 0 for i in range(num_layers)]
    keys.seen.add("layer_types")
    types = keys.config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or not set(types) <= {"sliding_attention", "full_attention"}:
            raise keys.fail("layer_types", "a list of 'sliding_attention' and 'full_attention'")
        if len(types) != num_layers:
            raise keys.fail("layer_types", f"one entry per layer, {num_layers} in all")
        sliding = [t == "sliding_attention" for t in types]
    if any(sliding) and window is None:
        raise keys.fail("sliding_window", "a window, since layers with sliding attention are asked for")
    return [window if s else None for s in sliding]


def _layers(keys: _Keys) -> tuple[LayerKind, ...]:
    ropes = _ropes(keys)
    windows = _windows(keys, keys.integer("num_hidden_layers"))
    if keys.family.windows != "pattern":
        return tuple(LayerKind(ropes["full_attention"], w) for w in windows)
    return tuple(LayerKind(ropes["full_attention" if w is None else "sliding_attention"], w) for w in windows)


def _head_dims(keys: _Keys, dim: int) -> tuple[int, int, int]:
    """Query heads, key-value heads, head width."""
    heads, head_dim = keys.integer("num_attention_heads"), keys.optional_integer("head_dim")
    kv_heads = keys.optional_integer("num_key_value_heads") or heads
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
    keys = _Keys(family, config)
    dim = keys.integer("hidden_size")
    heads, kv_heads, head_dim = _head_dims(keys, dim)
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
        layers=_layers(keys),
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
    )
    keys.finish()
    return spec


def _written_rope(spec: ModelSpec) -> dict[str, Any]:
    """Old-layout rotary keys, of the layers that see everything where the two kinds differ."""
    full = next((k.rope for k in spec.layers if k.window is None), spec.layers[0].rope)
    scaling: dict[str, Any] | None = None
    if full.scaling is not None:
        names = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = dict(zip(names, full.scaling, strict=False))
    keys: dict[str, Any] = {"rope_theta": full.theta, "rope_scaling": scaling}
    if "rope_local_base_freq" in family_of(spec).defaults:
        local = next((k.rope for k in spec.layers if k.window is not None), None)
        keys["rope_local_base_freq"] = local.theta if local else family_of(spec).defaults["rope_local_base_freq"]
    return keys


def _written_windows(spec: ModelSpec) -> dict[str, Any]:
    family, windows = family_of(spec), [k.window for k in spec.layers]
    window = next((w for w in windows if w is not None), None)
    if family.windows == "none":
        return {}
    if family.windows == "all":
        return {"sliding_window": window}
    keys: dict[str, Any] = {
        "sliding_window": window,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
    if family.windows == "from_layer":
        first = next((i for i, w in enumerate(windows) if w is not None), len(windows))
        keys |= {"use_sliding_window": window is not None, "max_window_layers": first}
    return keys


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a spec: `spec_from_config` gives the same spec back.

    Raises ModelError if the family's configuration cannot express the spec.
    """
    family = family_of(spec)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.mlp_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_head,
        **_written_rope(spec),
        **_written_windows(spec),
    }
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
