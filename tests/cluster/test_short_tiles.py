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

pytestmark = pytest.mark.short_tiles


def programs(spec: ModelSpec, tile: int, **axes: int) -> Programs:
    leaves = leaf_table(spec) | adapter_table(spec, LoraSpec(rank=4, alpha=8.0))
    return Programs(spec, Numerics("float32", tile, 16, 2.0), Dial.build({"rollout": axes}).mesh("rollout"), leaves)


@pytest.fixture(scope="module")
def of_tile_32(tiny_spec: ModelSpec) -> Programs:
    return programs(tiny_spec, 32)


def usable(p: Programs) -> list[int]:
    """Which heights are, is the processor's affair: two rows come out as a tile's with AVX-512, and not without."""
    return [h for h in short_tiles.HEIGHTS if short_tiles.comes_out_as_a_tile(p, h, 16)]


def test_a_few_rows_are_a_short_pass(of_tile_32: Programs) -> None:
    heights = [*usable(of_tile_32), 32]
    found = [of_tile_32.rows_for(n, 16) for n in (0, 2, 3, 8, 9, 16, 17, 32, 33, 65)]
    assert found == [*(min(h for h in heights if h >= n) for n in (0, 2, 3, 8, 9, 16, 17, 32)), 64, 128]


def test_on_several_devices_too(tiny_spec: ModelSpec) -> None:
    p = programs(tiny_spec, 32, data=2, fsdp=2)
    assert p.rows_for(3, 16) == min(h for h in [*usable(p), 32] if h >= 3)


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


def test_layers_of_every_kind_are_tried(tiny_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors without AVX-512, passes of two rows come out as a tile's without an adapter and otherwise with
    one; the adapter may be on the last layers only."""
    adapter = adapter_table(tiny_spec, LoraSpec(2, 4.0, last_layers=1))
    mesh = Dial.build({"actor": {}}).mesh("actor")
    p = Programs(tiny_spec, Numerics("float32", 32, 16, 2.0), mesh, {**leaf_table(tiny_spec), **adapter})
    tried: list[int] = []

    def tried_on(programs: Programs, layer: int, height: int, width: int) -> bool:
        tried.append(layer)
        return layer == 0

    monkeypatch.setattr(short_tiles, "_layer_comes_out_as_a_tile", tried_on)
    assert p.rows_for(3, 16) == 32 and tried == [0, 2] * 2


def test_it_is_tried_once_for_each_height(tiny_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(short_tiles, "comes_out_as_a_tile", lambda p, height, width: not tried.append(height))
    p = programs(tiny_spec, 32)
    assert [p.rows_for(n, w) for n, w in ((3, 16), (3, 64), (12, 16), (1, 16))] == [8, 8, 16, 2]
    assert tried == [8, 16, 2]
