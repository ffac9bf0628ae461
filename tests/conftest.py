"""The suite runs on eight simulated CPU devices; JAX_COMPILATION_CACHE_DIR keeps compiled programs between runs."""

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import settings

from lockstep.cluster import short_tiles
from lockstep.cluster.devices import enable_compilation_cache, simulate_cpu_devices
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.models.decoder import Numerics
from lockstep.models.hf import save_folder
from lockstep.models.init import init_params
from lockstep.models.spec import LayerKind, ModelSpec, Rope, leaf_table
from lockstep.rollout.engine import Engine
from lockstep.types import Fingerprint, PolicyVersion

simulate_cpu_devices(8)
if compiled := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    enable_compilation_cache(compiled)

# An example that compiles takes longer than hypothesis allows by default; the suite bounds the number of examples. The
# same examples every time, so that what passed here passes elsewhere; `make test-slow` looks for new ones.
settings.register_profile("search", deadline=None, print_blob=True)
settings.register_profile("same", parent=settings.get_profile("search"), derandomize=True)
settings.load_profile("same")

HEIGHTS = short_tiles.HEIGHTS

MOST_MAPS = 40_000  # Linux allows a process 65,530 memory maps; beyond it a compiled program that is loaded crashes it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Passes of fewer rows than a tile, which change no bit, are for the tests of them (marked `short_tiles`) and the
    slow ones: every height of a pass compiles all layers."""
    wanted = item.get_closest_marker("short_tiles") or item.get_closest_marker("slow")
    short_tiles.HEIGHTS = HEIGHTS if wanted else ()


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs() -> Iterator[None]:
    """Every compiled program takes several memory maps, and the whole suite compiles thousands of programs."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


TINY_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    """A Llama of three layers that compiles in a moment: 262 tokens, width 32, 4 query heads on 2 key heads."""
    layers = (LayerKind(Rope(10000.0)),) * 3
    return ModelSpec("llama", 262, 32, 4, 2, 8, 48, layers, 1e-5, 8**-0.5, 512, tied_head=True)


@pytest.fixture(scope="session")
def tiny_folder(tiny_spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_spec` with random weights as a Hugging Face folder, with a byte tokenizer, two EOS ids and a template."""
    parent = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    files = parent / "tokenizer"
    files.mkdir()
    backend.save(str(files / "tokenizer.json"))
    eos = [backend.token_to_id("<|endoftext|>"), backend.token_to_id("<|im_end|>")]
    config = {"eos_token": "<|im_end|>", "chat_template": TINY_TEMPLATE}
    (files / "tokenizer_config.json").write_text(json.dumps(config))
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (files / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    save_folder(parent / "model", tiny_spec, init_params(tiny_spec, 7), tokenizer_files_from=files)
    return parent / "model"


FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_programs(tiny_spec: ModelSpec) -> Callable[[int], Programs]:
    """tiny_programs(devices): `tiny_spec` compiled for so many devices, tiles of 32 rows, pages of 16."""

    @cache
    def make(devices: int = 1) -> Programs:
        mesh = Dial.build({"rollout": {"data": devices}}).mesh("rollout")
        return shared_programs(tiny_spec, Numerics("float32", 32, 16), mesh, leaf_table(tiny_spec))

    return make


@pytest.fixture(scope="session")
def tiny_params(tiny_spec: ModelSpec, tiny_programs: Callable[[int], Programs]) -> Callable[..., dict[str, Any]]:
    """tiny_params(devices, seed): weights that prefer some tokens, on the mesh of tiny_programs(devices)."""

    @cache
    def make(devices: int = 1, seed: int = 7) -> dict[str, Any]:
        host = init_params(tiny_spec, seed)
        host["final_norm"] = host["final_norm"] * np.float32(3)
        return place(host, leaf_table(tiny_spec), tiny_programs(devices).mesh)

    return make


@pytest.fixture(scope="session")
def make_engine(tiny_programs: Any, tiny_params: Any) -> MakeEngine:
    """make_engine(devices=1, **options): a fresh engine that serves version 4 of the tiny policy."""

    def make(devices: int = 1, **options: Any) -> Engine:
        sizes = {"slots": 32, "max_positions": 48, "num_pages": 24, "prefill_rows": 32, "fingerprint": FINGERPRINT}
        engine = Engine(tiny_programs(devices), **(sizes | options))
        engine.install(PolicyVersion(4, "four"), tiny_params(devices))
        return engine

    return make
