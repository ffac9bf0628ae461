"""A tiny policy served by an engine."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.cluster.sharding import place
from lockstep.models.decoder import Numerics
from lockstep.models.init import init_params
from lockstep.models.spec import ModelSpec, leaf_table
from lockstep.rollout.engine import Engine
from lockstep.types import Fingerprint, PolicyVersion

FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_programs(tiny_spec: ModelSpec) -> Callable[[int], Programs]:
    """tiny_programs(devices): `tiny_spec` compiled for so many devices, tiles of 32 rows, pages of 16."""

    @cache
    def make(devices: int = 1) -> Programs:
        mesh = Dial.build({"rollout": {"data": devices}}).mesh("rollout")
        return Programs(tiny_spec, Numerics("float32", 32, 16), mesh, leaf_table(tiny_spec))

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
