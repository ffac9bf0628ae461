"""Reading GGUF files: one file that holds a model's numbers, tokenizer, chat template and (quantised) weights.

    with nothing but numpy:   file = read_gguf(path); file.metadata; file.read("token_embd.weight")
    as a model:               spec = spec_from_gguf(file); params = params_from_gguf(file, spec, "float32")

Weights are dequantised to float32, bit for bit as the `gguf` package does, and cast once at the end.
Supported tensor types: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1. Supported architecture: llama (SmolLM2, Llama,
Mistral). Everything else is refused by name. Every length and offset in the file is checked before it is used: a
truncated or corrupt file is a `ModelError`, never a crash.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lockstep.errors import ModelError
from lockstep.models.spec import LayerKind, ModelSpec, Rope, leaf_table

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # of the format
_MAX_NESTING = 4  # arrays of arrays; nothing in use goes past 2

# Type number -> (name, elements per block, bytes per block). Only what `dequantize` knows.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
# Names of the rest, so that a refusal says what the file holds.
# fmt: off
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}
# Every `llama.*` key that is understood. Any other might change what the model computes, so it is refused.
_LLAMA_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "expert_count", "expert_used_count",
    "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "tensor_data_layout", "vocab_size",
}
# fmt: on


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place in the file. shape: slowest dimension first (the reverse of the file's order), so a matrix is
    [out, in]. type: a name such as "Q4_1". offset, nbytes: within the file (nbytes is 0 for an unsupported type)."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An opened file. metadata: key -> int, float, bool, str, list[str] or numeric array. The weights stay on disk
    (memory-mapped) until `read`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: np.ndarray

    def read(self, name: str) -> np.ndarray:
        """The named tensor as float32, in its `shape` (read-only when it is stored as F32).

        Raises ModelError when there is no such tensor or its type is not supported.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path}: no tensor {name!r} in this GGUF file ({len(self.tensors)} tensors)")
        if tensor.nbytes == 0:
            supported = ", ".join(t for t, _, _ in _TYPES.values())
            raise ModelError(
                f"{self.path}: tensor {name!r} is stored as {tensor.type}; supported are {supported}. "
                "Use a file quantised to one of those, or the model's Hugging Face folder"
            )
        raw = self.data[tensor.offset : tensor.offset + tensor.nbytes]
        return dequantize(raw, tensor.type).reshape(tensor.shape)


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file (version 2 or 3, little-endian): metadata and the tensor table, every bound checked.

    Raises ModelError when the file is missing, not GGUF, truncated or inconsistent.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        data = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise ModelError(f"{path}: cannot open GGUF file: {error.strerror or error}") from error
    reader = _Reader(path, data)
    metadata, num_tensors = _read_header(reader)
    tensors = _read_tensor_table(reader, num_tensors, metadata)
    return GGUFFile(path, metadata, tensors, np.asarray(data))


class _Reader:
    """A cursor that cannot leave the file."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path, self.view, self.size, self.pos = path, data.data, len(data), 0

    def error(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path}: not a usable GGUF file: {what} (byte {self.pos} of {self.size}). "
            "The file is truncated or corrupt: fetch or copy it again"
        )

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes > self.size - self.pos:
            raise self.error(f"{what} needs {nbytes} bytes, {self.size - self.pos} are left")
        self.pos += nbytes
        return self.view[self.pos - nbytes : self.pos]

    def scalar(self, fmt: str, what: str) -> Any:
        return struct.unpack(fmt, self.take(struct.calcsize(fmt), what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("<Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY and depth < _MAX_NESTING:
            element, count = self.scalar("<I", what), self.scalar("<Q", what)
            if element in _SCALARS:
                dtype = np.dtype(_SCALARS[element])
                return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).copy()
            # Each string or array takes 8 bytes or more: a length past that cannot be met, so fail before looping.
            if count > (self.size - self.pos) // 8:
                raise self.error(f"{what} claims {count} elements")
            return [self.value(element, what, depth + 1) for _ in range(count)]
        raise self.error(f"{what} has value type {kind}, which does not exist")


def _read_header(reader: _Reader) -> tuple[dict[str, Any], int]:
    """Magic, version, counts and the metadata; leaves the cursor at the tensor table."""
    magic = bytes(reader.take(4, "the magic number"))
    if magic != b"GGUF":
        raise ModelError(f"{reader.path}: expected a GGUF file (first bytes b'GGUF'), found {magic!r}")
    version = reader.scalar("<I", "the version")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise ModelError(f"{reader.path}: GGUF version 2 or 3, little-endian, is supported, found {version}{hint}")
    num_tensors, num_keys = reader.scalar("<Q", "the tensor count"), reader.scalar("<Q", "the key count")
    metadata: dict[str, Any] = {}
    for i in range(num_keys):
        key = reader.string(f"metadata key {i}")
        if key in metadata:
            raise reader.error(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.scalar("<I", f"the type of {key!r}"), f"metadata {key!r}")
    return metadata, num_tensors


def _read_tensor_table(reader: _Reader, num_tensors: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    """The tensor table, each entry checked to lie within the file."""
    entries = []
    for i in range(num_tensors):
        name = reader.string(f"the name of tensor {i}")
        num_dims = reader.scalar("<I", f"dimensions of {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise reader.error(f"tensor {name!r} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
        dims = [reader.scalar("<Q", f"dimensions of {name!r}") for _ in range(num_dims)]
        kind, offset = reader.scalar("<I", f"type of {name!r}"), reader.scalar("<Q", f"offset of {name!r}")
        entries.append((name, tuple(reversed(dims)), kind, offset))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0 or align % 8:
        raise reader.error(f"general.alignment must be a positive multiple of 8, found {align!r}")
    base = -(-reader.pos // align) * align
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise reader.error(f"tensor {name!r} appears twice")
        tensors[name] = _place(reader, name, shape, kind, base, offset, align)
    return tensors


def _place(
    reader: _Reader, name: str, shape: tuple[int, ...], kind: int, base: int, offset: int, align: int
) -> GGUFTensor:
    """One checked tensor entry. base: first byte of the data section; offset: from there."""
    if offset % align:
        raise reader.error(f"tensor {name!r} is at offset {offset}, not a multiple of {align}")
    if min(shape) == 0:
        raise reader.error(f"tensor {name!r} has shape {list(shape)}")
    if kind not in _TYPES:
        if kind not in _OTHER_TYPES:
            raise reader.error(f"tensor {name!r} has type {kind}, which does not exist")
        return GGUFTensor(name, shape, _OTHER_TYPES[kind], base + offset, 0)
    type_name, block, block_bytes = _TYPES[kind]
    if shape[-1] % block:
        raise reader.error(f"tensor {name!r} {list(shape)} is {type_name}: rows must be multiples of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if base + offset + nbytes > reader.size:
        raise reader.error(f"tensor {name!r} needs bytes {base + offset} to {base + offset + nbytes}")
    return GGUFTensor(name, shape, type_name, base + offset, nbytes)


def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Flat float32 values of a tensor's bytes.

    raw: [nbytes] uint8, whole blocks. A block is 32 values q sharing a float16 scale d (and, `_1`, a float16 offset m):
    Q8_0: d q, q int8. Q4_0: d (q - 8). Q4_1: d q + m. Q5_0: d (q - 16). Q5_1: d q + m. Low nibbles are the first 16
    values, high nibbles the last 16; the fifth bits of Q5 are one little-endian uint32.
    """
    if type_name == "F32":
        return raw.view("<f4")
    if type_name == "F16":
        return raw.view("<f2").astype(np.float32)
    if type_name == "BF16":
        return raw.view(ml_dtypes.bfloat16).astype(np.float32)
    block_bytes = next(b for name, _, b in _TYPES.values() if name == type_name)
    blocks = raw.reshape(-1, block_bytes)

    def half(at: int) -> np.ndarray:
        return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)

    out = np.empty((len(blocks), 32), np.float32)
    if type_name == "Q8_0":
        return np.multiply(blocks[:, 2:].view(np.int8), half(0), out=out).reshape(-1)
    nibbles = blocks[:, -16:]
    low, high = nibbles & 15, nibbles >> 4
    if type_name in ("Q5_0", "Q5_1"):
        bits = np.unpackbits(blocks[:, -20:-16].copy(), axis=1, bitorder="little") << 4
        low, high = low | bits[:, :16], high | bits[:, 16:]
    out[:, :16], out[:, 16:] = low, high
    if type_name.endswith("_0"):
        out -= 8 if type_name == "Q4_0" else 16
    out *= half(0)
    if type_name.endswith("_1"):
        out += half(2)
    return out.reshape(-1)


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The model's numbers.

    Raises ModelError for another architecture, a missing or unknown `llama.*` key, or a variant this decoder does not
    compute (experts, partial rotary embedding, rope scaling other than linear, per-layer head counts).
    """
    meta, where = file.metadata, file.path
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{where}: GGUF architecture {architecture!r} is not supported, 'llama' is (SmolLM2, Llama, Mistral). "
            "Use the model's Hugging Face folder: more families are supported there"
        )
    unknown = sorted(k for k in meta if k.startswith("llama.") and k.removeprefix("llama.") not in _LLAMA_KEYS)
    if unknown:
        raise ModelError(f"{where}: GGUF keys {unknown} are not understood and may change what the model computes")

    def count(key: str, default: int | None = None) -> int:
        value = meta.get(f"llama.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{where}: GGUF key 'llama.{key}' must be one positive integer, found {value!r}")
        return value

    def real(key: str, default: float | None = None) -> float:
        value = meta.get(f"llama.{key}", default)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise ModelError(f"{where}: GGUF key 'llama.{key}' must be a positive float, found {value!r}")
        # Stored as float32: take the shortest decimal that means the same float32 (1e-05, not 9.99999974e-06).
        return float(str(np.float32(value)))

    dim, num_heads = count("embedding_length"), count("attention.head_count")
    num_kv_heads = count("attention.head_count_kv", num_heads)
    head_dim = count("attention.key_length", max(1, dim // num_heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if count(key, head_dim) != head_dim:
            raise ModelError(f"{where}: 'llama.{key}' is {count(key)}, only the head dimension {head_dim} is supported")
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(f"{where}: {num_heads} heads, {num_kv_heads} KV heads of size {head_dim} do not fit together")
    if meta.get("llama.expert_count", 0):
        raise ModelError(f"{where}: mixture-of-experts models are not supported ({count('expert_count')} experts)")
    scaling_type = meta.get("llama.rope.scaling.type", "none")
    if scaling_type not in ("none", "linear"):
        raise ModelError(f"{where}: rope scaling {scaling_type!r} is not supported in GGUF; 'none' and 'linear' are")
    scaling = ("linear", real("rope.scaling.factor")) if scaling_type == "linear" else None
    rope = Rope(real("rope.freq_base", 10000.0), scaling)
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise ModelError(f"{where}: no tensor 'token_embd.weight': this GGUF file holds no llama model")
    if count("vocab_size", embed.shape[0]) != embed.shape[0]:
        raise ModelError(
            f"{where}: 'llama.vocab_size' is {count('vocab_size')}, 'token_embd.weight' has {embed.shape[0]} rows"
        )
    num_layers = count("block_count")
    if num_layers > len(file.tensors):
        raise ModelError(f"{where}: 'llama.block_count' is {num_layers}, the file has {len(file.tensors)} tensors")
    return ModelSpec(
        family="llama",
        vocab_size=embed.shape[0],
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=count("feed_forward_length"),
        layers=(LayerKind(rope),) * num_layers,
        norm_eps=real("attention.layer_norm_rms_epsilon"),
        query_scale=head_dim**-0.5,
        max_position=count("context_length"),
        tied_head="output.weight" not in file.tensors,
    )


_LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_TOP_TENSORS = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}


def tensor_name(path: str) -> str:
    """GGUF tensor name of a leaf path: `layers.3.q` -> `blk.3.attn_q.weight`."""
    if path in _TOP_TENSORS:
        return _TOP_TENSORS[path]
    _, index, name = path.split(".")
    return f"blk.{index}.{_LAYER_TENSORS[name]}.weight"


def params_from_gguf(file: GGUFFile, spec: ModelSpec, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Every leaf of `spec` by path, matrices [in, out], embed and head [V, D], in `dtype` ("float32", "bfloat16").

    The rows of q and k are stored for the interleaved rotary convention (pairs 2i, 2i+1); they are put back to the
    halves convention of `Rope`. Total on both sides: a leaf without a tensor, a tensor without a leaf, or a shape that
    is not the leaf's raises ModelError before any weight is read.
    """
    targets = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    if dtype not in targets:
        raise ModelError(f"dtype must be 'float32' or 'bfloat16', found {dtype!r}")
    table = leaf_table(spec)
    names = {path: tensor_name(path) for path in table}
    missing = [f"{path} ({name})" for path, name in names.items() if name not in file.tensors]
    extra = sorted(set(file.tensors) - set(names.values()))
    if missing or extra:
        raise ModelError(
            f"{file.path}: the tensors are not those of a {spec.num_layers}-layer llama model: "
            f"missing {missing[:5] or 'none'}, not understood {extra[:5] or 'none'}"
        )
    for path, leaf in table.items():
        stored = file.tensors[names[path]].shape
        expected = leaf.shape if path in ("embed", "head") else leaf.shape[::-1]
        if stored != expected:
            raise ModelError(
                f"{file.path}: tensor {names[path]!r} (leaf {path}) is {list(stored)}, expected {list(expected)}"
            )
    return {
        path: _to_leaf(path, file.read(name), spec).astype(targets[dtype], copy=False) for path, name in names.items()
    }


def _to_leaf(path: str, stored: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """A stored tensor in the layout of leaf `path`, C-contiguous and writable."""
    kind = path.rsplit(".", 1)[-1]
    if kind in ("q", "k"):
        num_out, num_in = stored.shape
        pairs = stored.reshape(-1, spec.head_dim // 2, 2, num_in)  # [head, pair, first/second, in]
        return pairs.transpose(3, 0, 2, 1).reshape(num_in, num_out)
    if stored.ndim == 2 and path not in ("embed", "head"):
        return np.ascontiguousarray(stored.T)
    return stored.copy()
