"""Folders: bitwise round trips, shards, atomic writes, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lockstep.errors import ModelError
from lockstep.models.families import name_map
from lockstep.models.hf import INDEX, SINGLE, load_folder, load_spec, save_folder
from lockstep.models.hf_config import spec_from_config
from lockstep.models.init import init_params
from lockstep.models.spec import ModelSpec, leaf_table

GOLDENS = Path(__file__).parents[1] / "goldens" / "hf"
CASES = sorted(p.name for p in GOLDENS.iterdir())


def bits(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder, read without the code under test."""
    return {name: bits(t) for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the qwen2 golden, to be damaged."""
    return Path(shutil.copytree(GOLDENS / "qwen2", tmp_path / "qwen2"))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_spec(GOLDENS / "llama3")


@pytest.mark.parametrize("case", CASES)
def test_round_trip_keeps_every_bit_of_a_folder_that_transformers_wrote(case: str, tmp_path: Path) -> None:
    source = GOLDENS / case
    spec, params = load_folder(source, "stored")
    assert {str(p.dtype) for p in params.values()} == {"bfloat16"}
    assert list(params) == list(leaf_table(spec))
    save_folder(tmp_path / "again", spec, params)
    assert stored(tmp_path / "again") == stored(source)
    spec_again, params_again = load_folder(tmp_path / "again", "stored")
    assert spec_again == spec
    assert {k: bits(v) for k, v in params_again.items()} == {k: bits(v) for k, v in params.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_in_every_dtype(dtype: str, tmp_path: Path, spec: ModelSpec) -> None:
    params = {k: v.astype(dtype) for k, v in init_params(spec, 1).items()}
    save_folder(tmp_path / "a", spec, params, max_shard_bytes=1500)
    _, again = load_folder(tmp_path / "a", "stored")
    assert {k: bits(v) for k, v in again.items()} == {k: bits(v) for k, v in params.items()}
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == dtype


def test_a_leaf_is_the_transpose_of_a_projection() -> None:
    _, params = load_folder(GOLDENS / "qwen2", "stored")
    raw = load_file(GOLDENS / "qwen2" / SINGLE)
    assert bits(params["layers.2.q"].T.copy()) == bits(raw["model.layers.2.self_attn.q_proj.weight"])
    assert bits(params["embed"]) == bits(raw["model.embed_tokens.weight"])
    assert bits(params["layers.1.k_bias"]) == bits(raw["model.layers.1.self_attn.k_proj.bias"])
    assert all(p.flags.c_contiguous for p in params.values())


def test_shards_hold_each_tensor_once_and_stay_under_the_limit(tmp_path: Path, spec: ModelSpec) -> None:
    params = init_params(spec, 1)
    limit = 9000
    save_folder(tmp_path / "a", spec, params, max_shard_bytes=limit)
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    files = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in params.values())
    for name in files:
        with safe_open(tmp_path / "a" / name, framework="np") as f:
            assert f.metadata() == {"format": "pt"}
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118  (a handle is not a mapping)
        assert all(index["weight_map"][k] == name for k in tensors)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
    _, again = load_folder(tmp_path / "a", "float32")
    assert all(bits(again[k]) == bits(v) for k, v in params.items())


def test_conversion_is_to_nearest_even_and_never_implicit(tmp_path: Path, spec: ModelSpec) -> None:
    params = init_params(spec, 1)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)  # halfway between two bfloat16 values
    params["final_norm"][:2] = ties
    save_folder(tmp_path / "a", spec, params)
    _, narrow = load_folder(tmp_path / "a", "bfloat16")
    assert narrow["final_norm"][:2].astype(np.float32).tolist() == [1.0, 1 + 4 * 2**-8]
    assert all(bits(narrow[k]) == bits(v.astype(ml_dtypes.bfloat16)) for k, v in params.items())
    for wrong in ("float16", "int8", "auto"):
        with pytest.raises(ModelError, match=f"float32, bfloat16 or stored, not '{wrong}'"):
            load_folder(tmp_path / "a", wrong)


def test_tokenizer_files_and_token_ids_travel(tmp_path: Path, spec: ModelSpec) -> None:
    source = Path(shutil.copytree(GOLDENS / "llama3", tmp_path / "source"))
    (source / "tokenizer.json").write_bytes(b'{"x": "\xc3\xa9"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "unrelated.txt").write_text("no")
    edit_json(source / "config.json", eos_token_id=[2, 7])
    save_folder(tmp_path / "a", spec, init_params(spec, 1), tokenizer_files_from=source)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        SINGLE,
        "tokenizer.json",
    ]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 7])
    save_folder(tmp_path / "b", spec, init_params(spec, 1), token_ids={"eos_token_id": 5})
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 5
    with pytest.raises(ModelError, match=r"token_ids has .'eos'.; known: bos_token_id"):
        save_folder(tmp_path / "c", spec, init_params(spec, 1), token_ids={"eos": 5})


def test_a_failed_save_leaves_nothing(tmp_path: Path, spec: ModelSpec) -> None:
    params = init_params(spec, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no tokenizer files"):
        save_folder(tmp_path / "a", spec, params, tokenizer_files_from=GOLDENS / "llama3")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]
    save_folder(tmp_path / "empty", spec, params)
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        save_folder(tmp_path / "empty", spec, params)
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("embed"), "Missing: 'embed'"),
        (lambda p: p.update(extra=p["embed"]), "Not expected: 'extra'"),
        (lambda p: p.update({"layers.0.q": p["layers.0.q"].T}), r"leaf 'layers.0.q' has shape \(60, 18\).*\(18, 60\)"),
        (lambda p: p.update(embed=p["embed"].astype(np.float64)), "leaf 'embed' is float64; folders hold float32"),
    ],
)
def test_parameters_that_do_not_fit_are_not_saved(
    change: Callable[[dict], object], message: str, tmp_path: Path, spec: ModelSpec
) -> None:
    params = init_params(spec, 1)
    change(params)
    with pytest.raises(ModelError, match=message):
        save_folder(tmp_path / "a", spec, params)
    assert not (tmp_path / "a").exists()


K0 = "model.layers.0.self_attn.k_proj.weight"
DAMAGE: list[tuple[Callable[[dict], object], str]] = [
    (lambda t: t.pop(K0), f"Missing: '{K0}'. Not expected: none"),
    (lambda t: t.update(foo=t[K0]), "Missing: none. Not expected: 'foo'"),
    (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": t[K0]}), "Not expected: 'model.layers.3.mlp"),
    (lambda t: t.update({K0: t[K0].T.copy()}), rf"'{K0}' has shape \(24, 8\); config.json asks for \(8, 24\)"),
    (lambda t: t.update({K0: t[K0].view(np.int16)}), f"'{K0}' is stored as I16; supported: F32, BF16, F16"),
    (lambda t: t.clear(), "Missing: .* and 31 more"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_tensors_that_do_not_fit_are_named(change: Callable[[dict], object], message: str, folder: Path) -> None:
    edit_tensors(folder, change)
    with pytest.raises(ModelError, match=message):
        load_folder(folder)


def test_rope_tables_of_old_checkpoints_carry_nothing(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}))
    load_folder(folder)


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDENS / "smollm2", tmp_path / "m"))
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    _, params = load_folder(folder, "stored")
    assert "head" not in params
    edit_tensors(folder, lambda t: t["lm_head.weight"].__setitem__((0, 0), 5.0))
    with pytest.raises(ModelError, match=r"ties the head to the embedding, but 'lm_head.weight' differs"):
        load_folder(folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert load_folder(folder)[1]["head"][0, 0] == 5.0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_found_on_request(value: float, folder: Path) -> None:
    edit_tensors(folder, lambda t: t["model.norm.weight"].__setitem__(3, value))
    load_folder(folder)
    with pytest.raises(ModelError, match=r"'model.norm.weight' holds NaN or infinity"):
        load_folder(folder, check_finite=True)


def test_files_that_are_missing_or_torn(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere/config.json does not exist; expected a model folder"):
        load_folder(tmp_path / "nowhere")
    whole = (folder / SINGLE).read_bytes()
    for torn in (whole[:-7], whole[:5], b""):
        (folder / SINGLE).write_bytes(torn)
        with pytest.raises(ModelError, match=r"model.safetensors is not a complete safetensors file"):
            load_folder(folder)
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"has neither .*found: 'pytorch_model.bin'.*saved as safetensors first"):
        load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not readable as JSON"):
        load_spec(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config.json holds a list; expected an object"):
        load_spec(folder)


def test_a_config_error_names_the_folder(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="qwen9")
    with pytest.raises(ModelError, match=r"qwen2: config.json: model_type is 'qwen9'"):
        load_spec(folder)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path, spec: ModelSpec) -> None:
    folder = tmp_path / "a"
    save_folder(folder, spec, init_params(spec, 1), max_shard_bytes=9000)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    last = index["lm_head.weight"]
    for change, message in [
        ({"model.embed_tokens.weight": last}, rf"holds 'model.embed_tokens.weight'; .* has it in '{last}'"),
        ({"lm_head.weight": index["model.embed_tokens.weight"]}, "files do not hold: 'lm_head.weight'"),
        ({"lm_head.weight": "gone.safetensors"}, "names the file 'gone.safetensors', which is not there"),
        ({"lm_head.weight": "../b/model.safetensors"}, "files outside the folder: '../b/model.safetensors'"),
        ({"ghost": last}, "lists tensors that its files do not hold: 'ghost'"),
    ]:
        edit_json(folder / INDEX, weight_map=index | change)
        with pytest.raises(ModelError, match=message):
            load_folder(folder)
    edit_json(folder / INDEX, weight_map={k: v for k, v in index.items() if k != "model.embed_tokens.weight"})
    with pytest.raises(ModelError, match=r"holds 'model.embed_tokens.weight'; .* has it in None"):
        load_folder(folder)
    for wrong in ({}, [1], {"a": 3}):
        edit_json(folder / INDEX, weight_map=wrong)
        with pytest.raises(ModelError, match="'weight_map' is not an object of tensor name"):
            load_folder(folder)


@pytest.mark.parametrize("wrapping", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multi_modal_gemma3(wrapping: str, tmp_path: Path) -> None:
    source, folder = GOLDENS / "gemma3", tmp_path / "m"
    folder.mkdir()
    text = json.loads((source / "config.json").read_text())
    wrapper = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "mm_tokens_per_image": 4,
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    tensors = load_file(source / SINGLE)
    wrapped = {wrapping + name.removeprefix("model."): t for name, t in tensors.items()}
    wrapped |= {"vision_tower.vision_model.post_layernorm.weight": np.ones(3, np.float32)}
    wrapped |= {"multi_modal_projector.mm_soft_emb_norm.weight": np.ones(3, np.float32)}
    save_file(wrapped, folder / SINGLE, metadata={"format": "pt"})
    spec, params = load_folder(folder, "stored")
    plain_spec, plain = load_folder(source, "stored")
    assert spec == plain_spec and {k: bits(v) for k, v in params.items()} == {k: bits(v) for k, v in plain.items()}
    save_file(wrapped | {"model.norm.weight": tensors["model.norm.weight"]}, folder / SINGLE)
    with pytest.raises(ModelError, match=r"tensor 'model.norm.weight' is there twice"):
        load_folder(folder)


def test_saving_needs_no_numpy_arrays(tmp_path: Path, spec: ModelSpec) -> None:
    import jax.numpy as jnp

    params = {k: jnp.asarray(v, jnp.bfloat16) for k, v in init_params(spec, 1).items()}
    save_folder(tmp_path / "a", spec, params)
    _, again = load_folder(tmp_path / "a", "stored")
    assert all(bits(again[k]) == bits(np.asarray(v)) for k, v in params.items())
    assert spec_from_config(json.loads((tmp_path / "a" / "config.json").read_text())) == spec
    assert {r.name for r in name_map(spec).values()} == set(stored(tmp_path / "a"))
