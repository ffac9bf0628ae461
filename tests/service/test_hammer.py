"""The hammer (`benchmarks/hammer.py`) on a tiny model: swaps under load, every completion scored again."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.serve.spec import ServeSpec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hammer.py"


@pytest.fixture(scope="module")
def hammer() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        return importlib.import_module("hammer")
    finally:
        sys.path.remove(str(SCRIPT.parent))


def hammered(hammer: ModuleType, folder: Path, update: str, swaps: int, replicas: int) -> None:
    spec = ServeSpec(model=str(folder), slots=8, max_positions=112)
    result = hammer.run(
        spec,
        swaps=swaps,
        update=update,
        replicas=replicas,
        clients=6,
        quiet_s=0.5,
        temperatures=(0.6, 1.0, 1.3),
        say=lambda line: None,
    )
    assert not hammer.broken(result), result
    assert result["finished"] > 5 and result["versions"] > 1 and result["scored_tokens"] == result["tokens"], result


@pytest.mark.parametrize(
    ("update", "swaps", "replicas"), [pytest.param("dual", 4, 1, marks=pytest.mark.slow), ("drain", 2, 1)]
)
def test_swaps_under_load(hammer: ModuleType, tiny_folder: Path, update: str, swaps: int, replicas: int) -> None:
    hammered(hammer, tiny_folder, update, swaps, replicas)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["dual", "drain", "abort"])
def test_a_thousand_swaps_under_load(hammer: ModuleType, tiny_folder: Path, update: str) -> None:
    hammered(hammer, tiny_folder, update, 1000, 2)
