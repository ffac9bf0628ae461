"""Model folders in Hugging Face layout: `config.json`, safetensors in one file or in shards with an index, and the
tokenizer's files, which are carried along unread.

A load is total: every leaf is filled by exactly one tensor of the expected shape, every tensor is consumed or known to
carry nothing. A save is atomic (built beside the target, then renamed) and a load of it gives the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lockstep.errors import ModelError
from lockstep.files import fsync_dir, fsync_tree
from lockstep.models.families import TensorRef, family_of, name_map
from lockstep.models.hf_config import config_from_spec, spec_from_config
from lockstep.models.spec import ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors -> numpy
_LOADED: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_LISTED = 8


def load_spec(path: str | Path) -> ModelSpec:
    """The specification in a folder's `config.json`. Raises ModelError naming the folder."""
    path = Path(path)
    config = _read_json(path / "config.json")
    try:
        return spec_from_config(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def load_folder(
    path: str | Path, dtype: str = "float32", *, check_finite: bool = False
) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """Specification and parameters (leaf path -> array, in the leaf table's order) of a folder.

    dtype: `float32` or `bfloat16`, to which tensors are converted (to nearest, ties to even), or `stored`: as they lie.
    check_finite: refuse NaN and infinity, at the price of a pass over the values.

    Raises ModelError: no such folder or file, a configuration that is not supported, tensors that are missing, extra,
    of another shape or of a dtype that is not a float, a `lm_head.weight` that is not the embedding in a tied model.
    """
    path = Path(path)
    if dtype not in (*_LOADED, "stored"):
        raise ModelError(f"models are loaded as float32, bfloat16 or stored, not {dtype!r}")
    spec = load_spec(path)
    refs = name_map(spec)
    with _Tensors(path, spec) as tensors:
        tensors.check_names(refs)
        params = {leaf: _leaf(tensors, ref, dtype, check_finite) for leaf, ref in refs.items()}
        if tensors.tied and "lm_head.weight" in tensors.files:
            _check_tied(tensors, refs["embed"])
    return spec, params


def save_folder(
    path: str | Path,
    spec: ModelSpec,
    params: Mapping[str, Any],
    *,
    tokenizer_files_from: str | Path | None = None,
    token_ids: Mapping[str, int | list[int]] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that `load_folder`, transformers and the inference engines read. Dtypes are kept as they are.

    tokenizer_files_from: a folder whose tokenizer, template and generation files are copied and whose `config.json`
    gives the special token ids. token_ids: those ids where there is no such folder (`bos_token_id`, `eos_token_id`,
    `pad_token_id`). max_shard_bytes: tensor bytes per file at most; a larger tensor has a file of its own.

    Raises ModelError if the target exists, leaves do not fit the spec, or the family cannot express the spec. On any
    failure the target does not exist.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ModelError(f"{path} exists and is not an empty folder; choose another path or remove it")
    if max_shard_bytes < 1:
        raise ModelError(f"max_shard_bytes is {max_shard_bytes}; expected at least 1")
    refs = name_map(spec)
    _check_params(refs, params)
    config = config_from_spec(spec) | {"torch_dtype": str(params["embed"].dtype)}
    config |= _token_ids(token_ids, tokenizer_files_from)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        _write_json(partial / "config.json", config)
        _write_tensors(partial, refs, params, max_shard_bytes)
        if tokenizer_files_from is not None:
            _copy_tokenizer(Path(tokenizer_files_from), partial)
        fsync_tree(partial)
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_dir(path.parent)


class _Tensors:
    """The tensors of a folder by canonical name, read one at a time from memory-mapped files."""

    def __init__(self, path: Path, spec: ModelSpec):
        self.path = path
        self.family = family_of(spec)
        self.tied = spec.tied_head and not spec.scalar_head
        self.stored: dict[str, str] = {}  # canonical name -> name in the file
        self.files: dict[str, str] = {}  # canonical name -> file
        self.handles: dict[str, Any] = {}

    def __enter__(self) -> _Tensors:
        listed = _listed_files(self.path)
        for file in dict.fromkeys(listed.values()) if listed else [SINGLE]:
            if not (self.path / file).is_file():
                raise ModelError(f"{self.path}: {INDEX} names the file {file!r}, which is not there")
            try:
                handle = safe_open(self.path / file, framework="np")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{self.path / file} is not a complete safetensors file: {error}") from error
            self.handles[file] = handle
            for name in handle.keys():  # noqa: SIM118  (a handle is not a mapping)
                if listed and listed.get(name) != file:
                    raise ModelError(f"{self.path / file} holds {name!r}; {INDEX} has it in {listed.get(name)!r}")
                self._add(name, file)
        lost = [n for n in listed if self.family.canonical(n) not in self.files and not self.family.is_ignorable(n)]
        if lost:
            raise ModelError(f"{self.path}: {INDEX} lists tensors that its files do not hold: {_some(lost)}")
        return self

    def __exit__(self, *_: object) -> None:
        self.handles.clear()

    def _add(self, name: str, file: str) -> None:
        if self.family.is_ignorable(name):
            return
        plain = self.family.canonical(name)
        if plain in self.files:
            raise ModelError(
                f"{self.path}: tensor {plain!r} is there twice, as {self.stored[plain]!r} in {self.files[plain]} and as"
                f" {name!r} in {file}"
            )
        self.stored[plain], self.files[plain] = name, file

    def check_names(self, refs: Mapping[str, TensorRef]) -> None:
        """Every expected tensor is there and no other, but for the head of a tied model (its values are checked)."""
        expected = {name for ref in refs.values() for name in ref.names}
        missing = [n for n in expected if n not in self.files]
        stray = {"lm_head.weight"} if self.tied else set()
        extra = [n for n in self.files if n not in expected | stray]
        if missing or extra:
            raise ModelError(
                f"{self.path}: the tensors do not fit config.json (family {self.family.name!r}). Missing:"
                f" {_some(missing)}. Not expected: {_some(self.stored[n] for n in extra)}"
            )

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, as stored; its shape and dtype are checked before its values are read."""
        handle, stored = self.handles[self.files[name]], self.stored[name]
        part = handle.get_slice(stored)
        if tuple(part.get_shape()) != shape:
            raise ModelError(
                f"{self.path / self.files[name]}: tensor {stored!r} has shape {tuple(part.get_shape())}; config.json"
                f" asks for {shape}"
            )
        if part.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{self.path / self.files[name]}: tensor {stored!r} is stored as {part.get_dtype()}; supported:"
                f" {', '.join(_DTYPES)} (quantized checkpoints have to be converted first)"
            )
        return handle.get_tensor(stored)


def _listed_files(path: Path) -> dict[str, str]:
    """Tensor -> file from the index; empty if there is a single file and no index."""
    if not (path / INDEX).is_file():
        if (path / SINGLE).is_file():
            return {}
        others = sorted(p.name for p in path.glob("*.bin")) + sorted(p.name for p in path.glob("*.safetensors"))
        raise ModelError(
            f"{path} has neither {SINGLE} nor {INDEX} (found: {_some(others)}); weights in other formats have to be"
            " saved as safetensors first"
        )
    listed = _read_json(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(f, str) for f in listed.values()):
        raise ModelError(f"{path / INDEX}: 'weight_map' is not an object of tensor name -> file name")
    outside = sorted(f for f in set(listed.values()) if Path(f).name != f)
    if outside:
        raise ModelError(f"{path / INDEX} names files outside the folder: {_some(outside)}")
    return listed


def _leaf(tensors: _Tensors, ref: TensorRef, dtype: str, check_finite: bool) -> np.ndarray:
    dtypes = set()

    def read(name: str) -> np.ndarray:
        array = tensors.read(name, ref.shape)
        dtypes.add(str(array.dtype))
        if check_finite and not np.isfinite(array).all():
            raise ModelError(f"{tensors.path}: tensor {name!r} holds NaN or infinity")
        if dtype == "stored" and len(dtypes) > 1:
            raise ModelError(
                f"{tensors.path}: the tensors {ref.name!r} are one leaf, but stored as {' and '.join(sorted(dtypes))}; "
                "load them as float32 or bfloat16"
            )
        return array if dtype == "stored" else array.astype(_LOADED[dtype], copy=False)

    return ref.gather(read)


def _check_tied(tensors: _Tensors, embed: TensorRef) -> None:
    head, table = tensors.read("lm_head.weight", embed.shape), tensors.read(embed.name, embed.shape)
    if head.dtype != table.dtype or head.tobytes() != table.tobytes():
        raise ModelError(
            f"{tensors.path}: config.json ties the head to the embedding, but 'lm_head.weight' differs from"
            f" {embed.name!r}; remove the tensor or set tie_word_embeddings to false"
        )


def _check_params(refs: Mapping[str, TensorRef], params: Mapping[str, Any]) -> None:
    missing, extra = [p for p in refs if p not in params], [p for p in params if p not in refs]
    if missing or extra:
        raise ModelError(f"parameters do not fit the spec. Missing: {_some(missing)}. Not expected: {_some(extra)}")
    for leaf, ref in refs.items():
        if tuple(params[leaf].shape) != ref.leaf_shape:
            raise ModelError(f"leaf {leaf!r} has shape {tuple(params[leaf].shape)}; the spec asks for {ref.leaf_shape}")
        if str(params[leaf].dtype) not in _DTYPES.values():
            raise ModelError(f"leaf {leaf!r} is {params[leaf].dtype}; folders hold {', '.join(_DTYPES.values())}")


def _shards(refs: Mapping[str, TensorRef], params: Mapping[str, Any], limit: int) -> list[dict[str, list[int]]]:
    """Per file, in order: leaf path -> which of its tensors (0 alone unless the leaf is a stack)."""
    shards: list[dict[str, list[int]]] = [{}]
    filled = 0
    for leaf, ref in refs.items():
        size = params[leaf].nbytes // (ref.stack or 1)
        for number in range(ref.stack or 1):
            if shards[-1] and filled + size > limit:
                shards.append({})
                filled = 0
            shards[-1].setdefault(leaf, []).append(number)
            filled += size
    return shards


def _write_tensors(folder: Path, refs: Mapping[str, TensorRef], params: Mapping[str, Any], limit: int) -> None:
    shards = _shards(refs, params, limit)
    weight_map: dict[str, str] = {}
    for number, parts in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, np.ndarray] = {}
        for leaf, numbers in parts.items():
            tensors |= refs[leaf].spread(np.asarray(params[leaf]), numbers)
        # transformers refuses a file whose metadata does not name a framework.
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(params[leaf].nbytes for leaf in refs)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _token_ids(given: Mapping[str, int | list[int]] | None, folder: str | Path | None) -> dict[str, Any]:
    unknown = set(given or {}) - set(_TOKEN_IDS)
    if unknown:
        raise ModelError(f"token_ids has {sorted(unknown)}; known: {', '.join(_TOKEN_IDS)}")
    source = _read_json(Path(folder) / "config.json") if folder is not None else {}
    return {k: source[k] for k in _TOKEN_IDS if k in source} | dict(given or {})


def _copy_tokenizer(source: Path, target: Path) -> None:
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ModelError(f"{source} holds no tokenizer files; expected at least one of {', '.join(TOKENIZER_FILES)}")
    for name in found:
        shutil.copyfile(source / name, target / name)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} does not exist; expected a model folder in Hugging Face layout") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; expected an object")
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _some(names: Iterable[str]) -> str:
    """At most a few names, and how many more there are."""
    every = sorted(names)
    shown = ", ".join(map(repr, every[:_LISTED])) or "none"
    return shown if len(every) <= _LISTED else f"{shown} and {len(every) - _LISTED} more"
