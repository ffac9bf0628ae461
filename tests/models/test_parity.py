"""Logits agree with transformers on every family, from goldens (`tests/goldens/make_parity.py`, `make_smollm2.py`); and
a table of wrong readings of a folder, each of which the comparison must notice.

The bound: the largest difference is at most 1e-5 of the largest logit, in float32. Measured when the goldens were made:
7.4e-7 to 3.1e-6 on the tiny models, 9.6e-7 on SmolLM2; the mildest of the wrong readings is off by 7.6e-2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.models.catalog import load_model
from lockstep.models.decoder import reference_logits
from lockstep.models.hf import load_folder
from lockstep.models.spec import LayerKind, ModelSpec, Rope

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = sorted(p.name for p in (GOLDENS / "hf").iterdir())
BOUND = 1e-5
NOTICED = 1000 * BOUND

Params = dict[str, np.ndarray]
Wrong = Callable[[ModelSpec, Params], tuple[ModelSpec, Params]]


@cache
def loaded(case: str) -> tuple[ModelSpec, Params, np.ndarray, np.ndarray]:
    spec, params = load_folder(GOLDENS / "hf" / case)
    with np.load(GOLDENS / "hf" / case / "golden.npz") as golden:
        return spec, params, golden["tokens"], golden["logits"]


def relative_error(logits: Any, expected: np.ndarray) -> float:
    """max |difference| / max |expected|."""
    assert logits.shape == expected.shape and logits.dtype == np.float32
    return float(np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    spec, params, tokens, expected = loaded(case)
    assert relative_error(reference_logits(spec, params, tokens), expected) <= BOUND


def with_spec(**changes: Any) -> Wrong:
    return lambda spec, params: (replace(spec, **changes), params)


def with_layers(change: Callable[[int, LayerKind], LayerKind]) -> Wrong:
    return lambda spec, params: (
        replace(spec, layers=tuple(change(i, kind) for i, kind in enumerate(spec.layers))),
        params,
    )


def with_leaves(change: Callable[[ModelSpec, dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Wrong:
    """change: the leaves of one layer, by name within it -> the leaves to replace."""

    def wrong(spec: ModelSpec, params: Params) -> tuple[ModelSpec, Params]:
        out = dict(params)
        for i in range(spec.num_layers):
            prefix = f"layers.{i}."
            layer = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
            out |= {prefix + k: v for k, v in change(spec, layer).items()}
        return spec, out

    return wrong


def transposed(name: str) -> Wrong:
    return with_leaves(lambda _, w: {name: w[name].T})


def swapped(a: str, b: str) -> Wrong:
    return with_leaves(lambda _, w: {a: w[b], b: w[a]})


def interleaved(spec: ModelSpec, w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q and k as the interleaved rotary convention orders them (the row order of GGUF files)."""
    order = np.arange(spec.head_dim).reshape(2, -1).T.reshape(-1)
    return {n: w[n].reshape(spec.dim, -1, spec.head_dim)[:, :, order].reshape(spec.dim, -1) for n in "qk"}


def heads_tiled(spec: ModelSpec, w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Query heads as if key-value head j served every num_kv_heads-th query head instead of a run of them."""
    order = np.arange(spec.num_heads).reshape(spec.num_kv_heads, -1).T.reshape(-1)
    return {"q": w["q"].reshape(spec.dim, spec.num_heads, -1)[:, order].reshape(spec.dim, -1)}


def other_window(by: int) -> Wrong:
    return with_layers(lambda _, kind: kind if kind.window is None else replace(kind, window=kind.window + by))


WRONG: dict[str, tuple[str, Wrong]] = {
    "square q not transposed": ("smollm2", transposed("q")),
    "square o not transposed": ("smollm2", transposed("o")),
    "gate and up swapped": ("llama3", swapped("gate", "up")),
    "k and v swapped": ("llama3", swapped("k", "v")),
    "the two norms swapped": ("llama3", swapped("attn_norm", "mlp_norm")),
    "interleaved rotary order": ("llama3", with_leaves(interleaved)),
    "query heads dealt out": ("llama3", with_leaves(heads_tiled)),
    "rope scaling ignored": ("llama3", with_layers(lambda _, k: LayerKind(replace(k.rope, scaling=None)))),
    "llama3 scaling read as linear": ("llama3", with_layers(lambda *_: LayerKind(Rope(100.0, ("linear", 8.0))))),
    "another theta": ("smollm2", with_layers(lambda *_: LayerKind(Rope(100_000.0)))),
    "epsilon of the class default": ("llama3", with_spec(norm_eps=1e-6)),
    "norm weight plus one": ("llama3", with_spec(norm_offset=1.0)),
    "embedding as the head": ("mistral", lambda spec, p: (spec, p | {"head": p["embed"]})),
    "window one wider": ("mistral", other_window(1)),
    "window one narrower": ("mistral", other_window(-1)),
    "no window": ("mistral", with_layers(lambda _, k: replace(k, window=None))),
    "window in every layer": ("qwen2", with_layers(lambda _, k: replace(k, window=5))),
    "q and k biases dropped": ("qwen2", with_leaves(lambda _, w: {n: 0 * w[n] for n in ("q_bias", "k_bias")})),
    "v bias dropped": ("qwen2", with_leaves(lambda _, w: {"v_bias": 0 * w["v_bias"]})),
    "k and v biases swapped": ("qwen2", swapped("k_bias", "v_bias")),
    "no query-key norm": ("qwen3", with_spec(qk_norm=False)),
    "query and key norms swapped": ("qwen3", swapped("q_norm", "k_norm")),
    "scale by width over heads": ("qwen3", with_spec(query_scale=(23 / 6) ** -0.5)),
    "relu-like activation": ("qwen3", with_spec(activation="gelu_tanh")),
    "norm offset dropped": ("gemma2", with_spec(norm_offset=0.0)),
    "no post norms": ("gemma2", with_spec(post_norms=False)),
    "norms named as in llama": ("gemma2", swapped("mlp_norm", "attn_post_norm")),
    "no attention soft cap": ("gemma2", with_spec(attn_softcap=None)),
    "no final soft cap": ("gemma2", with_spec(final_softcap=None)),
    "scale by head width": ("gemma2", with_spec(query_scale=14**-0.5)),
    "embedding not scaled": ("gemma2", with_spec(embed_scale=1.0)),
    "silu instead of gelu": ("gemma2", with_spec(activation="silu")),
    "windows on odd layers": ("gemma2", with_layers(lambda i, k: replace(k, window=None if i % 2 == 0 else 7))),
    "global theta everywhere": (
        "gemma3",
        with_layers(lambda _, k: replace(k, rope=Rope(1009.0, ("linear", 8.0)))),
    ),
    "linear scaling on local layers too": (
        "gemma3",
        with_layers(lambda _, k: replace(k, rope=replace(k.rope, scaling=("linear", 8.0)))),
    ),
    "linear scaling ignored": ("gemma3", with_layers(lambda _, k: replace(k, rope=replace(k.rope, scaling=None)))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reading_is_noticed(name: str) -> None:
    case, wrong = WRONG[name]
    spec, params, tokens, expected = loaded(case)
    wrong_spec, wrong_params = wrong(spec, params)
    assert {k: v.shape for k, v in wrong_params.items()} == {k: v.shape for k, v in params.items()}
    assert relative_error(reference_logits(wrong_spec, wrong_params, tokens), expected) > NOTICED


def test_smollm2_is_the_model_that_transformers_runs() -> None:
    """The real weights, dequantized from GGUF: ids and values of the largest logits at three positions, the normaliser,
    and the log-probability of every token of a text."""
    model = load_model("smollm2-135m")
    with np.load(GOLDENS / "smollm2.npz") as golden:
        logits = np.asarray(reference_logits(model.spec, model.params, golden["tokens"][None]))[0]
        z = np.logaddexp.reduce(logits.astype(np.float64), -1)
        positions, tokens = golden["positions"], golden["tokens"]
        scale = np.abs(golden["top_logits"]).max()
        order = np.argsort(-logits[positions], -1)[:, :8]
        np.testing.assert_array_equal(order, golden["top_ids"])
        top = np.take_along_axis(logits[positions], golden["top_ids"], 1)
        logprobs = logits[np.arange(len(tokens) - 1), tokens[1:]] - z[:-1]
        assert np.abs(top - golden["top_logits"]).max() / scale <= BOUND
        assert np.abs(z[positions] - golden["logsumexp"]).max() / scale <= BOUND
        assert np.abs(logprobs - golden["target_logprobs"]).max() / scale <= BOUND
