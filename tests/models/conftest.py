"""What several model tests need: a writer of GGUF files, a tiny tokenizer in GGUF metadata, the real SmolLM2 file."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from lockstep.models.catalog import known_model
from lockstep.models.fetch import fetch

SCALARS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
FORMATS = dict(zip(SCALARS, "BbHhIif?Qqd", strict=True))
TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q6_K": 14, "BF16": 30}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value) -> tuple[int, bytes]:
    """(type number, bytes) of a metadata value; a scalar of a chosen type is written as ("u8", 3)."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case tuple((kind, number)):
            return SCALARS[kind], struct.pack("<" + FORMATS[kind], number)
        case np.ndarray():
            kind = next(k for k, f in FORMATS.items() if np.dtype(f) == value.dtype)
            return 9, struct.pack("<IQ", SCALARS[kind], len(value)) + value.tobytes()
        case list():
            parts = [_value(v) for v in value]
            return 9, struct.pack("<IQ", parts[0][0] if parts else 8, len(parts)) + b"".join(p for _, p in parts)
    raise AssertionError(value)


def gguf_bytes(metadata=None, tensors=None, align=32) -> bytes:
    """A GGUF 3 file. tensors: name -> (type name or number, shape slowest first, raw bytes) or a float32 array."""
    metadata, tensors = metadata or {}, tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, raw = _value(value)
        head += _string(key) + struct.pack("<I", kind) + raw
    data = b""
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = ("F32", tensor.shape, tensor.astype("<f4").tobytes())
        kind, shape, raw = tensor
        data += b"\0" * (-len(data) % align)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _string(name) + dims + struct.pack("<IQ", TYPE_IDS.get(kind, kind), len(data))
        data += raw
    return head + b"\0" * (-len(head) % align) + data


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer_metadata(**changes) -> dict:
    """Byte-level BPE: three special tokens, 256 bytes, four merges, a user-defined token, ChatML template."""
    merges = ["h e", "l l", "he ll", "hell o"]
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges), "<think>"]
    types = np.array([3] * 3 + [1] * (len(tokens) - 4) + [4], np.int32)
    metadata = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    return {k: v for k, v in (metadata | changes).items() if v is not None}


LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 12,
    "llama.feed_forward_length": 7,
    "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 4,
}


def llama_tensors(vocab: int, seed: int = 0, head: bool = False) -> dict[str, np.ndarray]:
    """Random weights for LLAMA, by GGUF name."""
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (vocab, 12), "output_norm": (12,)}
    if head:
        shapes["output"] = (vocab, 12)
    layer = {"attn_norm": (12,), "attn_q": (12, 12), "attn_k": (4, 12), "attn_v": (4, 12), "attn_output": (12, 12)}
    layer |= {"ffn_norm": (12,), "ffn_gate": (7, 12), "ffn_up": (7, 12), "ffn_down": (12, 7)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    return {
        f"{name}.weight": rng.standard_normal(math.prod(shape), np.float32).reshape(shape)
        for name, shape in shapes.items()
    }


@pytest.fixture
def write_gguf(tmp_path):
    """write_gguf(metadata, tensors) -> path of a new GGUF file."""

    def write(metadata=None, tensors=None, **options) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        path.write_bytes(gguf_bytes(metadata, tensors, **options))
        return path

    return write


@pytest.fixture(scope="session")
def make_gguf():
    """The function that makes a GGUF file's bytes."""
    return gguf_bytes


@pytest.fixture(scope="session")
def tiny_metadata():
    """The function that makes tokenizer metadata, changes as keyword arguments (None removes a key)."""
    return tiny_tokenizer_metadata


def make_tiny_llama():
    metadata = tiny_tokenizer_metadata()
    return {**metadata, **LLAMA}, llama_tensors(len(metadata["tokenizer.ggml.tokens"]))


@pytest.fixture
def tiny_llama():
    """(metadata, tensors) of a two-layer llama model with the tiny tokenizer."""
    return make_tiny_llama()


@pytest.fixture(scope="session")
def tiny_llama_bytes() -> bytes:
    """The GGUF file of `tiny_llama`."""
    return gguf_bytes(*make_tiny_llama())


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real file, fetched into the cache when it is not there."""
    return fetch(known_model("smollm2-135m"))
