"""Passes of fewer rows than a tile: used where they come out as a tile would, and only there."""

from typing import Any

import jax
import numpy as np
import pytest

from lockstep.cluster import short_tiles
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.models.decoder import Numerics
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import ModelSpec, leaf_table


def programs(spec: ModelSpec, tile: int, **axes: int) -> Programs:
    leaves = leaf_table(spec) | adapter_table(spec, LoraSpec(rank=4, alpha=8.0))
    return Programs(spec, Numerics("float32", tile, 16, 2.0), Dial.build({"rollout": axes}).mesh("rollout"), leaves)


@pytest.fixture(scope="module")
def of_tile_32(tiny_spec: ModelSpec) -> Programs:
    return programs(tiny_spec, 32)


def test_a_few_rows_are_a_short_pass(of_tile_32: Programs) -> None:
    found = [of_tile_32.rows_for(n, 16) for n in (0, 2, 3, 8, 9, 16, 17, 32, 33, 65)]
    assert found == [2, 2, 8, 8, 16, 16, 32, 32, 64, 128]


def test_on_several_devices_too(tiny_spec: ModelSpec) -> None:
    assert programs(tiny_spec, 32, data=2, fsdp=2).rows_for(3, 16) == 8


@pytest.mark.parametrize(
    ("tile", "expected"), [(0, [8, 16, 32]), (4, [4, 16, 32]), (8, [8, 16, 32]), (12, [12, 12, 24])]
)
def test_of_other_tiles_only_parts(tiny_spec: ModelSpec, tile: int, expected: list[int]) -> None:
    """A short pass divides the tile; in fast mode, where nothing is promised, it is free."""
    assert [programs(tiny_spec, tile).rows_for(n, 16) for n in (3, 12, 20)] == expected


def test_a_height_that_comes_out_otherwise_is_not_used(tiny_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """One last bit of one number of a pass of 8 rows, and passes of 8 are out; those of 16 stay."""
    p = programs(tiny_spec, 32)
    plain = p.layer_of

    def off(weights: Any, i: int, x: jax.Array, rows: Any, pool: Any) -> Any:
        y, pool = plain(weights, i, x, rows, pool)
        if x.shape[0] == 8:
            y = y.at[5, 3].set(np.nextafter(np.asarray(y)[5, 3], np.float32(np.inf)))
        return y, pool

    monkeypatch.setattr(p, "layer_of", off)
    assert [p.rows_for(n, 16) for n in (3, 12)] == [16, 16]


def test_it_is_tried_once_for_each_height(tiny_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(short_tiles, "comes_out_as_a_tile", lambda p, height, width: not tried.append(height))
    p = programs(tiny_spec, 32)
    assert [p.rows_for(n, w) for n, w in ((3, 16), (3, 64), (12, 16), (1, 16))] == [8, 8, 16, 2]
    assert tried == [8, 16, 2]
