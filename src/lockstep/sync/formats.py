"""Format maps of engines: what their leaves are called, and how each is made of ours. One declarative table per format.

    mapping = engine_map("fused", spec, "float32", to="bfloat16", tensor=4)
    forms(mapping)["model.layers.0.self_attn.qkv_proj.weight"]     # ((1152, 576), "bfloat16")

    hf           Hugging Face names, [out, in], one tensor per expert: checkpoints, and what vLLM's loader takes in
    sglang_jax   the arrays of an SGLang-JAX engine in this process: [in, out], norms `*.scale`, embedding and head
                 `*.embedding`, KV heads repeated for tensor ranks that share one
    fused        [out, in] as an engine holds it that cuts fused leaves once per tensor rank: q, k, v as `qkv_proj`,
                 gate and up as `gate_up_proj`, the vocabulary padded

A family without a table is refused by name before anything moves. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.errors import ModelError, SyncError
from lockstep.models.families import FAMILIES, TensorRef, name_map
from lockstep.models.spec import ModelSpec, leaf_table
from lockstep.sync import operations as op
from lockstep.sync.mapping import Form, FormatMap, Target, whole
from lockstep.text import did_you_mean


@dataclass(frozen=True)
class Format:
    """families: names in `ModelSpec.family` that the table knows. build: destination leaves, all but the cast."""

    families: tuple[str, ...]
    build: Callable[[_Model], Iterator[Target]]


@dataclass(frozen=True)
class _Model:
    """spec and the engine's options, as `engine_map` has them; leaf: our leaves, whole."""

    spec: ModelSpec
    leaf: dict[str, Target]
    tensor: int
    vocab_multiple: int
    head_dim: int
    pad_heads: bool
    own_head: bool


def engine_map(
    name: str,
    spec: ModelSpec,
    dtype: str,
    *,
    to: str | None = None,
    tensor: int = 1,
    vocab_multiple: int = 1,
    head_dim: int | None = None,
    pad_heads: bool = False,
    own_head: bool = False,
) -> FormatMap:
    """Our leaves of `spec`, of `dtype`, as format `name` wants them.

    to: the engine's dtype (None: ours). own_head: the engine keeps a head although the model ties it to the embedding.
    For `sglang_jax` and `fused`: tensor: ranks; where KV heads are fewer, each is repeated. head_dim: to which every
    head is padded with zeros. For `fused`: vocab_multiple: to a multiple of which the vocabulary is padded. pad_heads:
    whether heads of zeros may be added where ranks do not divide them (whole groups, so that query heads keep their KV
    head).

    Raises SyncError for an unknown format or family (naming those known), and for heads that do not fit the ranks.
    """
    if name not in FORMATS:
        raise SyncError(f"sync: no format {name!r}; known: {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    known = FORMATS[name].families
    if spec.family not in known:
        raise SyncError(
            f"sync: format {name!r} has no table for the model family {spec.family!r}; it has those of "
            f"{', '.join(known)}. Nothing was moved; add the family to `sync.formats`"
        )
    sizes = {"tensor": tensor, "vocab_multiple": vocab_multiple, "head_dim": head_dim or spec.head_dim}
    for what, size in sizes.items():
        if size < 1:
            raise SyncError(f"sync: format {name!r}: {what} = {size}; expected at least 1")
    leaf = {path: whole(path, *form) for path, form in native_forms(spec, dtype).items()}
    model = _Model(spec, leaf, tensor, vocab_multiple, head_dim or spec.head_dim, pad_heads, own_head)
    return op.format_map(name, (op.cast(target, to or dtype) for target in FORMATS[name].build(model)))


def hf_map(spec: ModelSpec, dtype: str, *, to: str | None = None, own_head: bool = False) -> FormatMap:
    """Our leaves as Hugging Face names them: `engine_map("hf", ...)`."""
    return engine_map("hf", spec, dtype, to=to, own_head=own_head)


def from_hf_map(spec: ModelSpec, dtype: str, *, to: str | None = None) -> FormatMap:
    """The way back: tensors of Hugging Face names as our leaves. Raises SyncError for a family without names."""
    made = []
    for path, ref in _names(spec).items():
        parts = [whole(name, ref.shape, dtype) for name in ref.names]
        if ref.op == "transpose":
            parts = [op.transpose(part) for part in parts]
        leaf = parts[0] if ref.stack is None else op.stack(parts)
        made.append(op.cast(op.rename(leaf, path), to or dtype))
    return op.format_map("from hf", made)


def native_forms(spec: ModelSpec, dtype: str) -> dict[str, Form]:
    """Shape and dtype of every leaf of ours, in the order of the leaf table."""
    return {path: (leaf.shape, dtype) for path, leaf in leaf_table(spec).items()}


def forms(mapping: FormatMap) -> dict[str, Form]:
    """Shape and dtype of every target: what the engine should hold."""
    return {path: (target.shape, target.dtype) for path, target in mapping.targets.items()}


def _names(spec: ModelSpec) -> dict[str, TensorRef]:
    try:
        return name_map(spec)
    except ModelError as error:
        raise SyncError(f"sync: {error}. Nothing was moved") from None


def _hf(model: _Model) -> Iterator[Target]:
    for path, ref in _names(model.spec).items():
        leaf = model.leaf[path]
        parts = (leaf,) if ref.stack is None else op.unstack(leaf)
        for name, part in zip(ref.names, parts, strict=True):
            yield op.rename(op.transpose(part) if ref.op == "transpose" else part, name)
    if model.spec.tied_head and model.own_head:
        yield op.tie(model.leaf["embed"], "lm_head.weight")


def _sglang_jax(model: _Model) -> Iterator[Target]:
    heads = _Heads(model)
    for path, ref in _names(model.spec).items():
        name = ref.name
        if name.endswith("norm.weight"):
            name = name.removesuffix("weight") + "scale"
        elif path in ("embed", "head"):
            name = name.removesuffix("weight") + "embedding"
        yield op.rename(heads.fitted(path, model.leaf[path]), name)
    if model.spec.tied_head and model.own_head:
        yield op.tie(model.leaf["embed"], "lm_head.embedding")


def _fused(model: _Model) -> Iterator[Target]:
    """Fused leaves take the name of the part they stand for; every other leaf is as in `hf`, if with other heads."""
    heads, spec = _Heads(model), model.spec
    rows = -(-spec.vocab_size // model.vocab_multiple) * model.vocab_multiple
    held: dict[str, Target] = {}
    for path, ref in _names(spec).items():
        leaf = heads.fitted(path, model.leaf[path])
        leaf = op.pad(leaf, 0, rows, "vocab") if path in ("embed", "head") else leaf
        held[path] = op.rename(op.transpose(leaf) if ref.op == "transpose" else leaf, ref.name)
    for i in range(spec.num_layers):
        layer = f"layers.{i}."
        for parts, name in (
            ("qkv", "self_attn.qkv_proj.weight"),
            (("q_bias", "k_bias", "v_bias"), "self_attn.qkv_proj.bias"),
            (("gate", "up"), "mlp.gate_up_proj.weight"),
        ):
            if layer + parts[0] in held:
                fused = op.fuse([held.pop(layer + part) for part in parts], 0, ranks=model.tensor)
                held[layer + name] = op.rename(fused, f"model.{layer}{name}")
    yield from held.values()
    if spec.tied_head and model.own_head:
        yield op.tie(held["embed"], "lm_head.weight")


class _Heads:
    """The named rules by which attention leaves fit tensor ranks: repeat-kv, pad heads, pad head dim."""

    def __init__(self, model: _Model) -> None:
        spec, ranks = model.spec, model.tensor
        self.spec, self.head_dim = spec, model.head_dim
        self.kv, self.times = spec.num_kv_heads, 1  # KV heads with those of zeros; how often each of them is there
        if spec.qk_norm and model.head_dim != spec.head_dim:
            raise SyncError(
                f"sync: {spec.family} norms its heads over {spec.head_dim} elements; padded to {model.head_dim} the "
                f"norm is another one. Leave head_dim as it is"
            )
        if spec.num_kv_heads % ranks == 0:
            return
        if ranks % spec.num_kv_heads == 0 and spec.num_heads % ranks == 0:
            self.times = ranks // spec.num_kv_heads
            return
        self.kv = -(-spec.num_kv_heads // ranks) * ranks
        if not model.pad_heads:
            raise SyncError(
                f"sync: {spec.num_heads} query heads and {spec.num_kv_heads} KV heads do not fit {ranks} tensor ranks. "
                f"Use ranks that divide the KV heads, or a multiple of the KV heads that divides the query heads; or "
                f"pad_heads=True (here {self.kv} KV heads), where the engine runs padded heads"
            )

    def fitted(self, path: str, leaf: Target) -> Target:
        """A leaf of ours, [in, out], with the engine's heads."""
        name, heads, kv_heads = path.rsplit(".", 1)[-1], self.spec.num_heads, self.spec.num_kv_heads
        dim = 0 if name == "o" else len(leaf.shape) - 1
        if name in ("q", "q_bias", "o"):
            wanted, times = heads // kv_heads * self.kv, 1
        elif name in ("k", "v", "k_bias", "v_bias"):
            heads, wanted, times = kv_heads, self.kv, self.times
        else:
            return leaf
        wide = op.pad_heads(leaf, dim, heads, self.head_dim)
        return op.repeat_kv(op.pad(wide, dim, wanted * self.head_dim, "heads"), dim, wanted, times)


FORMATS: dict[str, Format] = {
    "hf": Format(tuple(FAMILIES), _hf),
    "sglang_jax": Format(("llama", "qwen2", "qwen3"), _sglang_jax),
    "fused": Format(("llama", "mistral", "qwen2", "qwen3"), _fused),
}
"""By name. `engine_map` builds from it."""
