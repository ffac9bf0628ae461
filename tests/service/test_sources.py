"""Versions by request, from every kind of place: whole models and adapters, and what is said of those that are none."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from lockstep.errors import SyncError
from lockstep.models.hf import name_map
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import leaf_table
from lockstep.serve.hosts import AllowedHosts
from lockstep.serve.role import Served, load_served
from lockstep.serve.sources import SHARED_MEMORY, Sources
from lockstep.serve.spec import ServeSpec
from lockstep.service.controls import Source
from lockstep.service.offers import offer
from lockstep.sync.mapping import FormatMap, whole
from lockstep.sync.shared_memory import write_segment
from lockstep.sync.weight_files import folder_of, write_version

Weights = Mapping[str, np.ndarray]
Put = Callable[[Weights], contextlib.AbstractContextManager[Source]]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Served:
    return load_served(ServeSpec(model=str(tiny_folder), max_positions=64))


@pytest.fixture(scope="module")
def adapter(model: Served) -> Served:
    """The same model, of which versions replace an adapter."""
    table = adapter_table(model.model.spec, LoraSpec(2, 4.0, last_layers=1))
    return replace(model, trains=table, frozen=leaf_table(model.model.spec))


@pytest.fixture(params=["files", "shared_memory", "transfer"])
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Put:
    """put(weights): makes them a source of one kind, for a while."""

    @contextlib.contextmanager
    def files(weights: Weights) -> Iterator[Source]:
        targets = [whole(name, a.shape, a.dtype.name) for name, a in weights.items()]
        write_version(tmp_path, 3, targets, zip(targets, weights.values(), strict=True), {}, 1 << 30)
        yield Source("files", folder_of(tmp_path, 3).name)

    @contextlib.contextmanager
    def shared_memory(weights: Weights) -> Iterator[Source]:
        path = SHARED_MEMORY / f"lockstep-test-{uuid.uuid4().hex}"
        targets = {name: whole(name, a.shape, a.dtype.name) for name, a in weights.items()}
        tree = {name: jax.device_put(a, jax.devices()[0]) for name, a in weights.items()}
        owned = write_segment(path, 3, FormatMap("test", targets, {}, {}), tree)
        try:
            yield Source("shared_memory", path.name)
        finally:
            owned.withdraw()

    return {"files": files, "shared_memory": shared_memory, "transfer": offer}[request.param]


def random(shapes: Mapping[str, tuple[int, ...]], dtype: object = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}  # type: ignore[call-overload]


def same(found: Weights, wanted: Weights) -> None:
    assert list(found) == list(wanted)
    for name, array in found.items():
        assert (array.dtype, array.tobytes()) == (wanted[name].dtype, wanted[name].tobytes()), name


def test_an_adapter_comes_from_every_kind_of_place(adapter: Served, put: Put, tmp_path: Path) -> None:
    weights = random({path: leaf.shape for path, leaf in adapter.trains.items()})
    with put(weights) as source:
        same(Sources(adapter, tmp_path, AllowedHosts()).load(source), weights)


def test_a_model_comes_by_either_names_in_any_float_type(model: Served, put: Put, tmp_path: Path) -> None:
    sources = Sources(model, tmp_path, AllowedHosts())
    own = random({path: leaf.shape for path, leaf in model.trains.items()}, ml_dtypes.bfloat16)
    wanted = {path: array.astype(np.float32) for path, array in own.items()}
    with put(own) as source:
        same(sources.load(source), wanted)
    theirs: dict[str, np.ndarray] = {}
    for path, ref in name_map(model.model.spec).items():
        theirs |= ref.spread(own[path], range(len(ref.names)))
    with put(theirs) as source:
        same(sources.load(source), wanted)


def test_every_leaf_that_is_wrong_is_listed(adapter: Served, put: Put, tmp_path: Path) -> None:
    weights = random({path: leaf.shape for path, leaf in adapter.trains.items()})
    first, second, third, *_ = weights
    weights |= {first: weights[first][:-1], second: weights[second].astype(np.int32), "momentum": weights[third]}
    del weights[third]
    with put(weights) as source, pytest.raises(SyncError, match="in 4 leaves") as said:
        Sources(adapter, tmp_path, AllowedHosts()).load(source)
    for words in (f"{third} is missing", "momentum is not a leaf", f"{first} is float32[", f"{second} is int32["):
        assert words in str(said.value)


def test_what_is_not_finite_is_refused(adapter: Served, put: Put, tmp_path: Path) -> None:
    weights = random({path: leaf.shape for path, leaf in adapter.trains.items()})
    last = list(weights)[-1]
    weights[last][0, 0] = np.inf
    with put(weights) as source, pytest.raises(SyncError, match=f"{last} of .* holds NaN or infinity"):
        Sources(adapter, tmp_path, AllowedHosts()).load(source)


def test_a_whole_model_is_no_adapter(adapter: Served, tiny_folder: Path) -> None:
    sources = Sources(adapter, tiny_folder.parent, AllowedHosts())
    with pytest.raises(SyncError, match="takes an adapter"):
        sources.load(Source("files", tiny_folder.name))
