"""A scalar head: folders of transformers' ForSequenceClassification layout, fresh heads, and who may not have one.

What the head computes is tested with the programs that run it, in `tests/train/test_critic.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.errors import ModelError
from lockstep.models import load_model
from lockstep.models.catalog import load_value_model
from lockstep.models.families import FAMILIES
from lockstep.models.hf import SINGLE, load_folder, load_spec, save_folder
from lockstep.models.hf_config import config_from_spec, scalar_architecture
from lockstep.models.init import init_params
from lockstep.models.spec import ModelSpec, leaf_table

GOLDENS = Path(__file__).parents[1] / "goldens" / "hf"
# As transformers names them: `transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES`.
ARCHITECTURES = {
    "llama3": "LlamaForSequenceClassification",
    "smollm2": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",
    "gemma3": "Gemma3TextForSequenceClassification",
}


def scalar(case: str) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """A golden model with a scalar head of ones, two, three, ..."""
    spec, params = load_folder(GOLDENS / case)
    spec = replace(spec, scalar_head=True)
    head = np.arange(1, spec.dim + 1, dtype=np.float32)[None]
    return spec, {path: head if path == "value_head" else params[path] for path in leaf_table(spec)}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_folder_round_trips_in_the_layout_of_transformers(case: str, tmp_path: Path) -> None:
    spec, params = scalar(case)
    save_folder(tmp_path / "m", spec, params)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[case]] and config["id2label"] == {"0": "LABEL_0"}
    tensors = load_file(tmp_path / "m" / SINGLE)
    assert tensors["score.weight"].shape == (1, spec.dim) and "lm_head.weight" not in tensors
    back, again = load_folder(tmp_path / "m", "stored")
    assert back == spec and list(again) == list(params)
    assert all(again[path].tobytes() == params[path].tobytes() for path in params)


def test_every_family_that_runs_has_the_architecture() -> None:
    names = {scalar_architecture(FAMILIES[load_spec(GOLDENS / case).family]) for case in ARCHITECTURES}
    assert names == set(ARCHITECTURES.values())


def test_a_classifier_of_two_labels_is_refused(tmp_path: Path) -> None:
    spec, params = scalar("llama3")
    save_folder(tmp_path / "m", spec, params)
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(ModelError, match=r"with 2 labels .* num_labels = 1"):
        load_spec(tmp_path / "m")
    del config["id2label"]  # transformers' default is then two labels: the tensor tells
    file.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "m" / SINGLE)
    save_file(tensors | {"score.weight": np.zeros((2, spec.dim), np.float32)}, tmp_path / "m" / SINGLE)
    with pytest.raises(ModelError, match=r"'score.weight' has shape \(2, 18\).*asks for \(1, 18\)"):
        load_folder(tmp_path / "m")


@pytest.mark.parametrize("case", ["llama3", "smollm2"])
def test_a_language_models_head_beside_the_scalar_one_is_not_ignored(case: str, tmp_path: Path) -> None:
    spec, params = scalar(case)
    save_folder(tmp_path / "m", spec, params)
    tensors = load_file(tmp_path / "m" / SINGLE)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    save_file(tensors | extra, tmp_path / "m" / SINGLE)
    with pytest.raises(ModelError, match=r"Not expected: 'lm_head.weight'"):
        load_folder(tmp_path / "m")


def differing(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> set[str]:
    return {path for path in a.keys() | b.keys() if path not in a or path not in b or a[path] is not b[path]}


def test_a_fresh_head_replaces_the_one_over_tokens(tiny_folder: Path, tiny_spec: ModelSpec, tmp_path: Path) -> None:
    untied = replace(tiny_spec, tied_head=False)
    save_folder(tmp_path / "m", untied, init_params(untied, 7), tokenizer_files_from=tiny_folder)
    policy = load_model(tmp_path / "m")
    zeros = load_value_model(tmp_path / "m", std=0.0, seed=1)
    assert zeros.spec == replace(untied, scalar_head=True) and list(zeros.params) == list(leaf_table(zeros.spec))
    assert policy.params.keys() ^ zeros.params.keys() == {"head", "value_head"}
    assert not zeros.params["value_head"].any()
    drawn = [load_value_model(tmp_path / "m", std=0.5, seed=s).params["value_head"] for s in (1, 1, 2)]
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])
    assert 0.25 < drawn[0].std() < 1.0
    with pytest.raises(ModelError, match="finite number >= 0, got -1"):
        load_value_model(tmp_path / "m", std=-1.0, seed=1)


def test_a_trained_head_is_kept_and_its_model_is_no_policy(
    tiny_folder: Path, tiny_spec: ModelSpec, tmp_path: Path
) -> None:
    spec = replace(tiny_spec, scalar_head=True)
    params = init_params(spec, 7) | {"value_head": np.full((1, spec.dim), 2.5, np.float32)}
    save_folder(tmp_path / "rm", spec, params, tokenizer_files_from=tiny_folder)
    kept = load_value_model(tmp_path / "rm", std=0.0, seed=1)
    assert kept.spec == spec and np.array_equal(kept.params["value_head"], params["value_head"])
    with pytest.raises(ModelError, match=r"has a scalar head.*a policy needs the ForCausalLM folder"):
        load_model(tmp_path / "rm")


def test_a_config_says_what_its_head_is(tiny_spec: ModelSpec) -> None:
    plain, headed = config_from_spec(tiny_spec), config_from_spec(replace(tiny_spec, scalar_head=True))
    assert "id2label" not in plain and headed["architectures"] == ["LlamaForSequenceClassification"]
