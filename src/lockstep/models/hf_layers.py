"""What `config.json` says of the single layers: rotary embedding and attention window.

Both layouts of the rotary settings are read: `rope_theta` + `rope_scaling`, and `rope_parameters` (transformers 5).
Written is the former, which every version reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lockstep.errors import ModelError
from lockstep.models.hf_keys import Keys
from lockstep.models.naming import Family
from lockstep.models.spec import LayerKind, ModelSpec, Rope, Yarn

# Ten times the deepest model there is: a nonsensical number is an error at once, not hours of making leaves.
MAX_LAYERS = 10_000


def _rope(family: Family, settings: Mapping[str, Any], default_theta: float) -> Rope:
    """One rotary setting: an object with `rope_theta` and the scaling's own keys."""
    keys = Keys(
        dataclasses.replace(family, defaults={"rope_theta": default_theta}, fixed={}, inert=frozenset()), settings
    )
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
    elif kind == "yarn" and family.yarn:
        rope = Rope(theta, _yarn(keys))
    else:
        yarn = ", yarn" if family.yarn else ""
        raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3{yarn}")
    keys.finish()
    return rope


def _yarn(keys: Keys) -> Yarn:
    """What a key left out means: the betas of the paper, and an attention factor that its formula gives."""
    given = keys.config
    for key in {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"} & given.keys():
        keys.number(key)
    return Yarn(
        factor=keys.number("factor"),
        original_max_position=keys.integer("original_max_position_embeddings"),
        beta_fast=float(given.get("beta_fast", Yarn.beta_fast)),
        beta_slow=float(given.get("beta_slow", Yarn.beta_slow)),
        mscale=float(given["mscale"]) if "mscale" in given else None,
        mscale_all_dim=float(given["mscale_all_dim"]) if "mscale_all_dim" in given else None,
        truncate=keys.flag("truncate") if "truncate" in given else True,
    )


def _written_scaling(scaling: Any) -> dict[str, Any] | None:
    if isinstance(scaling, Yarn):
        keys = {"original_max_position": "original_max_position_embeddings"}
        given = {keys.get(k, k): v for k, v in dataclasses.asdict(scaling).items() if v is not None}
        return {"rope_type": "yarn", **given}
    names = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return None if scaling is None else dict(zip(names, scaling, strict=False))


def _old_ropes(keys: Keys) -> dict[str, Rope]:
    theta, scaling = keys.number("rope_theta"), keys.get("rope_scaling")
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


def _ropes(keys: Keys) -> dict[str, Rope]:
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


def _windows(keys: Keys, num_layers: int) -> list[int | None]:
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
        if not isinstance(types, list) or any(t not in ("sliding_attention", "full_attention") for t in types):
            raise keys.fail("layer_types", "a list of 'sliding_attention' and 'full_attention'")
        if len(types) != num_layers:
            raise keys.fail("layer_types", f"one entry per layer, {num_layers} in all")
        sliding = [t == "sliding_attention" for t in types]
    if any(sliding) and window is None:
        raise keys.fail("sliding_window", "a window, since layers with sliding attention are asked for")
    return [window if s else None for s in sliding]


def layers(keys: Keys) -> tuple[LayerKind, ...]:
    """Rotary embedding and window of every layer."""
    ropes = _ropes(keys)
    windows = _windows(keys, keys.integer("num_hidden_layers", most=MAX_LAYERS))
    if keys.family.windows != "pattern":
        return tuple(LayerKind(ropes["full_attention"], w) for w in windows)
    return tuple(LayerKind(ropes["full_attention" if w is None else "sliding_attention"], w) for w in windows)


def written_rope(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Old-layout rotary keys, of the layers that see everything where the two kinds differ."""
    full = next((k.rope for k in spec.layers if k.window is None), spec.layers[0].rope)
    keys: dict[str, Any] = {"rope_theta": full.theta, "rope_scaling": _written_scaling(full.scaling)}
    if "rope_local_base_freq" in family.defaults:
        local = next((k.rope for k in spec.layers if k.window is not None), None)
        keys["rope_local_base_freq"] = local.theta if local else family.defaults["rope_local_base_freq"]
    return keys


def written_windows(family: Family, spec: ModelSpec) -> dict[str, Any]:
    windows = [k.window for k in spec.layers]
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
