"""How a family of models is described: its name rules, its fixed traits, what its `config.json` means.

The descriptions themselves are in `families.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lockstep.models.spec import Activation

Op = Literal["identity", "transpose"]
Windows = Literal["none", "all", "from_layer", "pattern"]
ExpertKeys = Literal["none", "mixtral", "qwen", "gpt_oss", "deepseek"]


@dataclass(frozen=True)
class NameRule:
    """leaf <-> tensor, `{i}` standing for the layer. transpose: the checkpoint has [out, in] a leaf [in, out]. With
    `{e}` the leaf is a stack, [E, ...], of E tensors. optional: a model of the family may lack the leaf."""

    leaf: str
    tensor: str
    op: Op = "identity"
    optional: bool = False

    @property
    def stacked(self) -> bool:
        return "{e}" in self.tensor


@dataclass(frozen=True)
class TensorRef:
    """The tensor of one leaf, or the tensors that it is a stack of. name: in the checkpoint, `{e}` standing for the
    number in the stack; shape: of one tensor; op: between one tensor and its part of the leaf; stack: number of tensors
    (None: the leaf is not a stack)."""

    name: str
    shape: tuple[int, ...]
    op: Op
    stack: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, in the order of the stack."""
        if self.stack is None:
            return (self.name,)
        before, after = self.name.split("{e}")
        return tuple(f"{before}{e}{after}" for e in range(self.stack))

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        part = self.shape[::-1] if self.op == "transpose" else self.shape
        return part if self.stack is None else (self.stack, *part)

    def convert(self, array: np.ndarray) -> np.ndarray:
        """One tensor -> its part of the leaf, or back. C-contiguous (safetensors writes the buffer, whatever the
        strides say)."""
        return np.ascontiguousarray(array.T if self.op == "transpose" else array)

    def gather(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The leaf; read: the tensor of a name, of `shape`."""
        if self.stack is None:
            return self.convert(read(self.name))
        leaf: np.ndarray | None = None
        for e, name in enumerate(self.names):  # one after the other: a stack and one tensor are in memory, not two
            part = self.convert(read(name))
            leaf = np.empty((self.stack, *part.shape), part.dtype) if leaf is None else leaf
            leaf[e] = part
        assert leaf is not None
        return leaf

    def spread(self, leaf: np.ndarray, numbers: Iterable[int]) -> dict[str, np.ndarray]:
        """Those tensors of a leaf, by name. numbers: places in `names`."""
        names, parts = self.names, leaf[None] if self.stack is None else leaf
        return {names[i]: self.convert(parts[i]) for i in numbers}


@dataclass(frozen=True)
class Family:
    """One family. name is `ModelSpec.family`; model_type and architecture are what `config.json` says, also: other
    model types of the very same layout.

    windows: `none`; `all` layers have `sliding_window`; `from_layer` max_window_layers on, if use_sliding_window;
    `pattern`: every `sliding_window_pattern`-th layer is global, the others have the window.
    defaults: what an absent key means (the format leaves out what equals its class default). fixed: keys that may only
    have this one value, beyond those that `hf_config` fixes for every family.
    prefixes: (stored prefix, canonical prefix) of layouts that wrap the text model. ignorable: prefixes of tensors that
    belong to no leaf, because they are another modality's.
    """

    name: str
    model_type: str
    architecture: str
    rules: tuple[NameRule, ...]
    defaults: Mapping[str, Any]
    windows: Windows = "none"
    also: tuple[str, ...] = ()
    experts: ExpertKeys = "none"
    latent: bool = False
    yarn: bool = False
    o_bias: bool = False
    sinks: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    prefixes: tuple[tuple[str, str], ...] = ()
    ignorable: tuple[str, ...] = ()

    @property
    def activation(self) -> Activation:
        return "gelu_tanh" if self.gemma else "silu"

    @property
    def norm_offset(self) -> float:
        return 1.0 if self.gemma else 0.0

    def canonical(self, tensor: str) -> str:
        """The tensor's name without the wrapping that a multi-modal checkpoint puts around the text model."""
        for stored, plain in self.prefixes:
            if tensor.startswith(stored):
                return plain + tensor.removeprefix(stored)
        return tensor

    def is_ignorable(self, tensor: str) -> bool:
        """Whether the tensor is known to carry nothing: RoPE tables of old checkpoints, or another modality."""
        return tensor.endswith(".rotary_emb.inv_freq") or tensor.startswith(self.ignorable)
