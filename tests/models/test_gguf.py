"""GGUF: what is written is read, bit for bit; what is broken is refused."""

import hashlib
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ModelError
from lockstep.models.gguf import dequantize, params_from_gguf, read_gguf, spec_from_gguf, tensor_name
from lockstep.models.spec import leaf_table


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).astype("<f4").tobytes()).hexdigest()


# --- values and tensors ---------------------------------------------------------------------------------------------


def test_metadata_of_every_type_is_read_back(write_gguf):
    metadata = {
        "u8": ("u8", 255),
        "i8": ("i8", -128),
        "u16": ("u16", 65535),
        "i16": ("i16", -32768),
        "u32": 2**32 - 1,
        "i32": ("i32", -(2**31)),
        "u64": ("u64", 2**64 - 1),
        "i64": ("i64", -(2**63)),
        "f64": ("f64", math.pi),
        "f32": 0.5,
        "bool": True,
        "text": "héllo\n",
        "texts": ["a", "", "Ġb"],
        "numbers": np.arange(5, dtype=np.int32),
        "nested": [np.arange(2, dtype=np.float32), np.arange(3, dtype=np.float32)],
    }
    found = read_gguf(write_gguf(metadata)).metadata
    assert list(found) == list(metadata)
    for key, value in metadata.items():
        expected = value[1] if isinstance(value, tuple) else value
        if key == "nested":
            assert all(np.array_equal(a, b) for a, b in zip(found[key], expected, strict=True))
        else:
            assert np.array_equal(found[key], expected) and type(found[key]) is type(expected), key


@given(
    st.dictionaries(st.text(max_size=9), st.text(max_size=20) | st.booleans() | st.integers(0, 2**32 - 1), max_size=6)
)
@settings(max_examples=40)
def test_any_text_key_and_value_survive(tmp_path_factory, make_gguf, metadata):
    path = tmp_path_factory.mktemp("gguf") / "any.gguf"
    path.write_bytes(make_gguf(metadata))
    assert read_gguf(path).metadata == metadata


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_plain_tensors_are_read_exactly(write_gguf, kind, dtype):
    values = np.random.default_rng(1).standard_normal((5, 3)).astype(dtype)
    file = read_gguf(write_gguf({"x": 1}, {"a": (kind, (5, 3), values.tobytes()), "b": np.ones((2, 2, 2), np.float32)}))
    read = file.read("a")
    assert read.dtype == np.float32 and np.array_equal(read, values.astype(np.float32))
    assert file.tensors["a"].shape == (5, 3) and file.tensors["a"].type == kind
    assert np.array_equal(file.read("b"), np.ones((2, 2, 2)))


# SHA-256 of the float32 values that `gguf.quants.dequantize` of the `gguf` package 0.19.0 makes of `_blocks(...)`.
QUANTISED = {
    "Q8_0": (34, "d0ce2662be4a4af4b990eb7b91a9ec846b6456f445f8205e4afa1476d776dff1"),
    "Q4_0": (18, "55aaedcf16599c9f17b1b377d642471438875979cf792f184843b5163afdba17"),
    "Q4_1": (20, "f9f4dad8661dcb969370876702f6f578437705089d85ebbd6b8bf922738e61ee"),
    "Q5_0": (22, "9233f9862c63ec9be4c4b29dd54349fbc1691151e07baa4e265f02ef90eef188"),
    "Q5_1": (24, "98aeb217824eb8c79d9876a009f512c5eacf5feff72c28d3875987d69fa7153f"),
}


def _blocks(kind: str) -> np.ndarray:
    """[6, block bytes] uint8: arbitrary quants, finite scales and offsets."""
    nbytes = QUANTISED[kind][0]
    raw = ((np.arange(6 * nbytes) * 37 + 11) % 256).astype(np.uint8).reshape(6, nbytes)
    raw[:, 0:2] = np.linspace(-2, 3, 6, dtype="<f2").view(np.uint8).reshape(6, 2)
    if kind.endswith("_1"):
        raw[:, 2:4] = np.linspace(0.1, -5, 6, dtype="<f2").view(np.uint8).reshape(6, 2)
    return raw


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_tensors_equal_the_gguf_package_bit_for_bit(write_gguf, kind):
    raw = _blocks(kind)
    file = read_gguf(write_gguf({}, {"t": (kind, (2, 96), raw.tobytes())}))
    assert file.read("t").shape == (2, 96)
    assert sha256(file.read("t")) == QUANTISED[kind][1]
    assert sha256(dequantize(raw.reshape(-1), kind)) == QUANTISED[kind][1]


# --- broken files ---------------------------------------------------------------------------------------------------


def test_every_truncation_is_a_model_error(tmp_path, write_gguf):
    whole = write_gguf(
        {"k": "v", "a": np.arange(3, dtype=np.int32)}, {"t": ("Q8_0", (1, 32), _blocks("Q8_0")[0].tobytes())}
    )
    content = whole.read_bytes()
    assert read_gguf(whole).read("t").shape == (1, 32)
    cut = tmp_path / "cut.gguf"
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)


@given(st.integers(0, 10**6), st.integers(0, 255), st.data())
@settings(max_examples=150)
def test_a_changed_byte_never_crashes(tmp_path_factory, tiny_llama_bytes, at, value, data):
    content = bytearray(tiny_llama_bytes)
    header = content.index(b"blk.1.ffn_down.weight") + 60  # what follows is weights, where any byte is valid
    content[at % header] = value
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("gguf") / "changed.gguf"
    path.write_bytes(content)
    try:
        file = read_gguf(path)
        params_from_gguf(file, spec_from_gguf(file))
    except ModelError:
        pass


def _header(version=3, tensors=0, keys=0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def _entry(name=b"t", dims=(32,), kind=0, offset=0) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


KEY = struct.pack("<Q", 1) + b"k"
BROKEN = {
    "is empty": (b"", "needs 4 bytes"),
    "is something else": (b"PK\3\4" + bytes(40), r"first bytes b'GGUF'.*PK"),
    "is version 1": (_header(1), "version 2 or 3.*found 1"),
    "is big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "claims many keys": (_header(keys=2**63), "metadata key 0"),
    "claims many tensors": (_header(tensors=2**63), "tensor 0"),
    "has a key twice": (_header(keys=2) + 2 * (KEY + struct.pack("<II", 4, 1)), "'k' appears twice"),
    "has an unknown value type": (_header(keys=1) + KEY + struct.pack("<I", 99), "value type 99"),
    "has a huge array": (_header(keys=1) + KEY + struct.pack("<IIQ", 9, 0, 2**62), "needs 4611686018427387904 bytes"),
    "has a huge text array": (_header(keys=1) + KEY + struct.pack("<IIQ", 9, 8, 2**62), "elements"),
    "has endless arrays": (_header(keys=1) + KEY + struct.pack("<I", 9) + 9 * struct.pack("<IQ", 9, 1), "value type 9"),
    "has text that is not UTF-8": (_header(keys=1) + KEY + struct.pack("<IQ", 8, 1) + b"\xff", "not UTF-8"),
    "has five dimensions": (_header(tensors=1) + _entry(dims=(1,) * 5), "5 dimensions"),
    "has an empty tensor": (_header(tensors=1) + _entry(dims=(0, 32)), r"shape \[32, 0\]"),
    "has an unknown tensor type": (_header(tensors=1) + _entry(kind=77), "type 77"),
    "has ragged blocks": (_header(tensors=1) + _entry(dims=(33,), kind=8), "multiples of 32"),
    "has a tensor past the end": (_header(tensors=1) + _entry() + bytes(100), "needs bytes"),
    "has a tensor too large to count": (_header(tensors=1) + _entry(dims=(2**62, 2**62)), "needs bytes"),
    "has a crooked offset": (_header(tensors=1) + _entry(offset=4), "not a multiple of 32"),
    "has a tensor twice": (_header(tensors=2) + 2 * _entry() + bytes(400), "'t' appears twice"),
    "has no alignment": (
        _header(keys=1) + struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0),
        "general.alignment",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_broken_is_refused(tmp_path, case):
    content, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_a_missing_file_and_a_missing_tensor_are_named(tmp_path, write_gguf):
    with pytest.raises(ModelError, match=r"nowhere\.gguf.*No such file"):
        read_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelError, match="no tensor 'x'"):
        read_gguf(write_gguf()).read("x")


def test_an_unsupported_tensor_type_is_named_when_it_is_read(write_gguf):
    file = read_gguf(write_gguf({"k": "still readable"}, {"t": ("Q6_K", (256,), bytes(210))}))
    assert file.metadata == {"k": "still readable"}
    with pytest.raises(ModelError, match=r"'t' is stored as Q6_K; supported are F32.*Q5_1.*Hugging Face folder"):
        file.read("t")


# --- as a model -----------------------------------------------------------------------------------------------------


def test_a_llama_model_is_read_leaf_by_leaf(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama
    # Independent of the reader: the permutation that llama.cpp's convert_hf_to_gguf.py applies to q and k.
    hf = {name: w.copy() for name, w in tensors.items()}
    for name, heads in (("attn_q", 3), ("attn_k", 1)):
        for i in range(2):
            w = tensors[f"blk.{i}.{name}.weight"]
            tensors[f"blk.{i}.{name}.weight"] = w.reshape(heads, 2, 2, 12).swapaxes(1, 2).reshape(w.shape)
    file = read_gguf(write_gguf(metadata, tensors))
    spec = spec_from_gguf(file)
    params = params_from_gguf(file, spec)
    assert (spec.dim, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.mlp_dim) == (12, 3, 1, 4, 7)
    assert (spec.num_layers, spec.max_position, spec.norm_eps, spec.tied_head) == (2, 64, 1e-5, True)
    assert spec.layers[0].rope.theta == 100000.0 and spec.query_scale == 0.5
    table = leaf_table(spec)
    assert list(params) == list(table)
    for path, leaf in table.items():
        stored = hf[tensor_name(path)]
        expected = stored if stored.ndim == 1 or path == "embed" else stored.T
        assert params[path].shape == leaf.shape and params[path].dtype == np.float32
        assert np.array_equal(params[path], expected), path
        assert params[path].flags.c_contiguous and params[path].flags.writeable
    rounded = params_from_gguf(file, spec, "bfloat16")
    assert all(np.array_equal(rounded[p], params[p].astype(ml_dtypes.bfloat16)) for p in params)


def test_an_untied_head_is_a_leaf(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    file = read_gguf(write_gguf(metadata, tensors))
    spec = spec_from_gguf(file)
    assert not spec.tied_head
    assert np.array_equal(params_from_gguf(file, spec)["head"], tensors["output.weight"])


WRONG_KEYS = {
    "another architecture": ({"general.architecture": "gemma3"}, "'gemma3' is not supported, 'llama' is"),
    "no architecture": ({"general.architecture": None}, "architecture None"),
    "an unknown key": ({"llama.attention.sliding_window": 4}, "sliding_window.*not understood"),
    "a missing count": ({"llama.block_count": None}, "'llama.block_count' must be one positive integer, found None"),
    "a count per layer": ({"llama.attention.head_count": np.array([3, 3], np.int32)}, "one positive integer"),
    "a zero count": ({"llama.feed_forward_length": 0}, "positive integer, found 0"),
    "an epsilon that is text": ({"llama.attention.layer_norm_rms_epsilon": "x"}, "positive float, found 'x'"),
    "an epsilon that is NaN": ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "positive float"),
    "partial rotation": ({"llama.rope.dimension_count": 2}, "rope.dimension_count' is 2, only the head dimension 4"),
    "heads that do not group": ({"llama.attention.head_count_kv": 2}, "do not fit"),
    "experts": ({"llama.expert_count": 8}, "mixture-of-experts"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
    "linear scaling without a factor": ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor"),
    "another vocabulary": ({"llama.vocab_size": 5}, "vocab_size' is 5.*264 rows"),
    "a trillion layers": ({"llama.block_count": ("u64", 10**12)}, "the file has 20 tensors"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_a_model_that_is_not_computed_here_is_refused(write_gguf, tiny_llama, case):
    changes, message = WRONG_KEYS[case]
    metadata, tensors = tiny_llama
    metadata = {k: v for k, v in (metadata | changes).items() if v is not None}
    with pytest.raises(ModelError, match=message):
        spec_from_gguf(read_gguf(write_gguf(metadata, tensors)))


def test_linear_rope_scaling_is_read(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama
    metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert spec_from_gguf(read_gguf(write_gguf(metadata, tensors))).layers[1].rope.scaling == ("linear", 4.0)


def test_tensors_that_do_not_fit_the_leaves_are_refused(write_gguf, tiny_llama):
    metadata, tensors = tiny_llama

    def load(changed, dtype="float32"):
        file = read_gguf(write_gguf(metadata, {k: v for k, v in changed.items() if v is not None}))
        return params_from_gguf(file, spec_from_gguf(file), dtype)

    with pytest.raises(ModelError, match=r"missing \['layers.1.up \(blk.1.ffn_up.weight\)'\]"):
        load(tensors | {"blk.1.ffn_up.weight": None})
    with pytest.raises(ModelError, match=r"not understood \['rope_freqs.weight'\]"):
        load(tensors | {"rope_freqs.weight": np.ones(2, np.float32)})
    with pytest.raises(
        ModelError, match=r"'blk.0.ffn_down.weight' \(leaf layers.0.down\) is \[7, 12\], expected \[12, 7\]"
    ):
        load(tensors | {"blk.0.ffn_down.weight": np.ones((7, 12), np.float32)})
    with pytest.raises(ModelError, match="dtype must be 'float32' or 'bfloat16', found 'int8'"):
        load(tensors, "int8")


def test_a_file_without_embedding_is_no_model(write_gguf, tiny_llama):
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        spec_from_gguf(read_gguf(write_gguf(tiny_llama[0])))


# SHA-256 of float32 values as `gguf.quants.dequantize` of the `gguf` package 0.19.0 gives them for this very file.
SMOLLM2 = {
    "token_embd.weight": "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa",  # Q8_0
    "blk.0.attn_q.weight": "aa74111ad24c3624a20374d2026fd1f50bfe2520252e3c9aef4a666a28593cc8",  # Q4_1
    "blk.29.ffn_down.weight": "c19605745425a11e704e305ce3d27b632c406195d39eb3377e9cfb140ac643d1",  # Q4_1
    "output_norm.weight": "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",  # F32
}


def test_smollm2_dequantises_as_the_gguf_package_does(smollm2_path):
    file = read_gguf(smollm2_path)
    assert {name: sha256(file.read(name)) for name in SMOLLM2} == SMOLLM2
    spec = spec_from_gguf(file)
    assert (spec.vocab_size, spec.dim, spec.num_heads, spec.num_kv_heads) == (49152, 576, 9, 3)
    assert (spec.num_layers, spec.mlp_dim, spec.norm_eps, spec.tied_head) == (30, 1536, 1e-5, True)
