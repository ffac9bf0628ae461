"""What `config.json` says of mixtures of experts and of latent attention. The publishers name the same things
differently; what is not said is what their architecture always does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lockstep.models.hf_keys import Keys
from lockstep.models.naming import Family
from lockstep.models.spec import Experts, LatentAttention, LayerKind, ModelSpec

MAX_EXPERTS = 100_000
_COUNT = {"mixtral": "num_local_experts", "qwen": "num_experts", "gpt_oss": "num_local_experts"}


def experts_of(keys: Keys) -> Experts | None:
    """The mixture of experts, None for a family that has none. Raises ModelError for numbers that do not fit."""
    kind = keys.family.experts
    if kind == "none":
        return None
    count = _COUNT.get(kind, "n_routed_experts")
    num, per_token = keys.integer(count, most=MAX_EXPERTS), keys.integer("num_experts_per_tok")
    if per_token > num:
        raise keys.fail("num_experts_per_tok", f"an integer of at most {count}, which is {num}")
    if kind == "mixtral":
        return Experts(num, per_token, keys.integer("intermediate_size"))
    if kind == "gpt_oss":
        if "experts_per_token" in keys.config and keys.integer("experts_per_token") != per_token:
            raise keys.fail("experts_per_token", f"what num_experts_per_tok says, {per_token}")
        limit = keys.number("swiglu_limit")
        return Experts(num, per_token, keys.integer("intermediate_size"), bias=True, fused=True, limit=limit)
    width, normalised = keys.integer("moe_intermediate_size"), keys.flag("norm_topk_prob")
    if kind == "qwen":
        return Experts(num, per_token, width, normalised=normalised)
    shared = 0 if keys.get("n_shared_experts") in (None, 0) else keys.integer("n_shared_experts", most=MAX_EXPERTS)
    groups, groups_per_token = keys.integer("n_group"), keys.integer("topk_group")
    if num % groups:
        raise keys.fail("n_group", f"a divisor of n_routed_experts, which is {num}")
    if groups_per_token > groups:
        raise keys.fail("topk_group", f"an integer of at most n_group, which is {groups}")
    return Experts(
        num,
        per_token,
        width,
        shared_dim=shared * width,
        normalised=normalised,
        scale=keys.number("routed_scaling_factor"),
        groups=groups,
        groups_per_token=groups_per_token,
        correction=True,
    )


def with_experts(keys: Keys, kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """The layers, with what says which of them have experts."""
    rule = keys.family.experts
    if rule == "none":
        return kinds
    has = [True] * len(kinds)
    if rule == "qwen":
        dense, step = keys.get("mlp_only_layers") or [], keys.integer("decoder_sparse_step")
        if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < len(kinds) for i in dense):
            raise keys.fail("mlp_only_layers", f"a list of layers, from 0 to {len(kinds) - 1}")
        has = [i not in set(dense) and (i + 1) % step == 0 for i in range(len(kinds))]
    elif rule == "deepseek":
        first = keys.get("first_k_dense_replace")
        if type(first) is not int or first < 0:
            raise keys.fail("first_k_dense_replace", "an integer of at least 0")
        has = [i >= first for i in range(len(kinds))]
    return tuple(dataclasses.replace(kind, experts=h) for kind, h in zip(kinds, has, strict=True))


def latent_of(keys: Keys) -> LatentAttention | None:
    """Latent attention, None for a family that has none."""
    if not keys.family.latent:
        return None
    latent = LatentAttention(
        q_rank=keys.optional_integer("q_lora_rank"),
        kv_rank=keys.integer("kv_lora_rank"),
        nope_dim=keys.integer("qk_nope_head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
    )
    if latent.rope_dim % 2:
        raise keys.fail("qk_rope_head_dim", "an even width, which rotary embeddings need")
    # Derived numbers that some writers add. `head_dim` is the width that is rotated, not the query's.
    for key, value in (("head_dim", latent.rope_dim), ("qk_head_dim", latent.nope_dim + latent.rope_dim)):
        if keys.config.get(key) is not None and keys.integer(key) != value:
            raise keys.fail(key, f"what the other widths add up to, {value}")
        keys.seen.add(key)
    return latent


def written_experts(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The keys of `experts_of` and `with_experts`. What they cannot say shows when they are read again."""
    experts = spec.experts
    if experts is None:
        return {}
    count = _COUNT.get(family.experts, "n_routed_experts")
    keys: dict[str, Any] = {count: experts.num, "num_experts_per_tok": experts.per_token}
    if family.experts == "gpt_oss":
        keys |= {"swiglu_limit": experts.limit, "attention_bias": True}
    if family.experts in ("qwen", "deepseek"):
        keys |= {"moe_intermediate_size": experts.mlp_dim, "norm_topk_prob": experts.normalised}
    if family.experts == "qwen":
        dense = [i for i, kind in enumerate(spec.layers) if not kind.experts]
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if family.experts == "deepseek":
        keys |= {
            "n_shared_experts": experts.shared_dim // experts.mlp_dim,
            "n_group": experts.groups,
            "topk_group": experts.groups_per_token,
            "routed_scaling_factor": experts.scale,
            "first_k_dense_replace": next((i for i, k in enumerate(spec.layers) if k.experts), spec.num_layers),
        }
    return keys


def written_latent(spec: ModelSpec) -> dict[str, Any]:
    """The keys of `latent_of`."""
    latent = spec.latent
    if latent is None:
        return {"head_dim": spec.head_dim}
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }
