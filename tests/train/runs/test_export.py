"""A run's weights as a model folder: the policy that was trained, to the last logit."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

from lockstep import checkpoint
from lockstep.errors import CheckpointError, ModelError
from lockstep.models import load_model
from lockstep.models.decoder import reference_logits
from lockstep.models.hf import load_folder, save_folder
from lockstep.rollout.generate import generate
from lockstep.train.export import export_run


def trained(run, step: int) -> dict[str, np.ndarray]:
    """The trained leaves of a checkpoint, read as anything else would read them: by their names."""
    arrays = {
        name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (dtype, shape, _) in run.state(step).items()
    }  # the manifest is the structure
    found, _ = checkpoint.restore(run.path, step, arrays)
    return {name.removeprefix("trainable/"): a for name, a in found.items() if name.startswith("trainable/")}


def logits(model, params, scale: float = 0.0) -> np.ndarray:
    tokens = np.arange(60).reshape(3, 20) % model.spec.vocab_size
    return np.asarray(reference_logits(model.spec, params, tokens, scale))


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_run(finished.path, folder)
    return folder


def test_base_and_adapter_are_merged(finished, kit, exported) -> None:
    base, merged = load_model(str(kit.folder / "model")), load_model(str(exported))
    assert merged.spec == base.spec and merged.tokenizer.fingerprint == base.tokenizer.fingerprint
    assert merged.tokenizer.template_fingerprint == base.tokenizer.template_fingerprint
    assert merged.tokenizer.eos_ids == base.tokenizer.eos_ids and len(base.tokenizer.eos_ids) == 2
    adapter = trained(finished, 8)
    wanted = logits(base, {**base.params, **adapter}, scale=16.0 / 2)
    np.testing.assert_allclose(logits(merged, merged.params), wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(wanted - logits(base, base.params)).max() > 0.1  # the adapter does something
    changed = {path for path, leaf in base.params.items() if leaf.tobytes() != merged.params[path].tobytes()}
    assert changed == {path.removesuffix(".lora_a") for path in adapter if path.endswith(".lora_a")}


def test_the_exported_folder_generates(kit, exported) -> None:
    words = {"chat": False, "samples": 2, "max_new_tokens": 4, "temperature": 1.0, "seed": 1, "stop": []}
    ours = generate(str(exported), ["01+1="], numerics_mode="exact", **words)
    base = generate(str(kit.folder / "model"), ["01+1="], numerics_mode="exact", **words)
    assert len(ours) == 2 and all(1 <= len(t.completion_ids) <= 4 for t in ours)
    assert [t.logprobs.tolist() for t in ours] != [t.logprobs.tolist() for t in base]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_full_parameter_run_exports_its_own_weights(kit, train, left, tmp_path, dtype: str) -> None:
    overrides = ("--lora=none", "--run.steps=1", "--optim.lr=0.01", f"--model.dtype={dtype}")
    run = left(train(kit.config(tmp_path, *overrides)))
    export_run(run.path, tmp_path / "out")
    _, params = load_folder(tmp_path / "out", dtype)
    masters = trained(run, 1)
    assert params.keys() == masters.keys()
    for path, leaf in masters.items():
        assert leaf.dtype == np.float32
        assert params[path].tobytes() == leaf.astype(params[path].dtype).tobytes()
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["torch_dtype"] == dtype
    assert run.metrics()[0]["mismatch/unequal_tokens"] == 0


def test_an_adapter_is_not_merged_into_another_base(finished, kit, tmp_path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished.path, path)
    spec, params = load_folder(kit.folder / "model", "float32")
    params["embed"] = params["embed"] + np.float32(0.01)
    save_folder(tmp_path / "other", spec, params, tokenizer_files_from=kit.folder / "model")
    recipe = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(recipe.replace(str(kit.folder / "model"), str(tmp_path / "other")))
    with pytest.raises(CheckpointError, match=r"the adapter of .*run was trained on other weights than .*other holds"):
        export_run(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported(finished, tmp_path) -> None:
    path = tmp_path / "run"
    shutil.copytree(finished.path, path, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(CheckpointError, match="has no checkpoint to export"):
        export_run(path, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        export_run(finished.path, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]
