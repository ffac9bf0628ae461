import json

import jax
import pytest

from lockstep.cluster.mesh import Dial
from lockstep.config import ClusterConfig
from lockstep.errors import ConfigError
from lockstep.models.spec import Leaf

SPLIT = {"actor": {"fsdp": 2, "tensor": 2}, "rollout": {"data": 2}, "reference": "actor"}


def test_every_mesh_has_all_three_axes_and_an_alias_is_the_same_mesh():
    dial = Dial.build(SPLIT)
    assert dict(dial.mesh("actor").shape) == {"data": 1, "fsdp": 2, "tensor": 2}
    assert dict(dial.mesh("rollout").shape) == {"data": 2, "fsdp": 1, "tensor": 1}
    assert dial.mesh("reference") is dial.mesh("actor")
    assert [d.id for d in dial.mesh("rollout").devices.flat] == [4, 5]


def test_colocated_means_same_devices_in_the_same_order_with_the_same_axes():
    dial = Dial.build(
        {
            "actor": {"fsdp": 2, "devices": [0, 1]},
            "rollout": {"fsdp": 2, "devices": [0, 1]},
            "reference": {"fsdp": 2, "devices": [1, 0]},
            "critic": {"data": 2, "devices": [0, 1]},
            "reward": "critic",
        }
    )
    assert dial.colocated("actor", "rollout") and dial.colocated("reward", "critic")
    assert not dial.colocated("actor", "reference")
    assert not dial.colocated("actor", "critic")


def test_a_dial_over_given_devices_uses_no_others():
    last = jax.devices()[6:]
    dial = Dial.build({"actor": {"data": 2}}, last)
    assert list(dial.mesh("actor").devices.flat) == last
    with pytest.raises(ConfigError, match=r"need 3 devices .*; 2 available"):
        Dial.build({"actor": {"data": 3}}, last)


def test_a_role_without_a_mesh_is_an_error():
    with pytest.raises(ConfigError, match=r"cluster\.critic is needed here .* has: actor, rollout, reference"):
        Dial.build(SPLIT).mesh("critic")


def test_from_config_simulates_what_the_recipe_asks_for():
    cluster = ClusterConfig.model_validate({"actor": {"fsdp": 2}, "rollout": {"data": 4}, "cpu_devices": 6})
    dial = Dial.from_config(cluster)
    assert len(dial.devices) == 6
    assert dial.roles["rollout"].devices == (2, 3, 4, 5)
    assert dial.colocated("reference", "actor")


def test_json_has_the_shape_the_report_reads():
    data = Dial.build(SPLIT).to_json({"actor": {"parameters": 10, "optimizer": 20}, "rollout": {"kv": 5}})
    assert json.loads(json.dumps(data)) == {
        "roles": {
            "actor": {
                "axes": {"data": 1, "fsdp": 2, "tensor": 2},
                "devices": [0, 1, 2, 3],
                "same_as": None,
                "bytes": {"parameters": 10, "optimizer": 20},
            },
            "rollout": {
                "axes": {"data": 2, "fsdp": 1, "tensor": 1},
                "devices": [4, 5],
                "same_as": None,
                "bytes": {"kv": 5},
            },
            "reference": {
                "axes": {"data": 1, "fsdp": 2, "tensor": 2},
                "devices": [0, 1, 2, 3],
                "same_as": "actor",
                "bytes": {},
            },
        }
    }


def test_describe_is_a_table_with_bytes_per_device_and_the_dims_left_whole():
    leaves = {f"layers.{i}.k": Leaf(f"layers.{i}.k", (8, 3), ("embed", "kv_heads"), "normal") for i in range(2)}
    text = Dial.build(SPLIT).describe({"actor": {"parameters": 3 * 2**20}, "rollout": {"kv": 100}}, leaves)
    assert text.splitlines() == [
        "role       mesh             devices  parameters/device  kv/device",
        "actor      fsdp=2 tensor=2  0-3      3 MiB              -",
        "rollout    data=2           4-5      -                  100 B",
        "reference  same as actor    0-3      -                  -",
        "6 of 8 devices used (cpu)",
        "actor: layers.*.k dim 1 (kv_heads = 3) stays whole: tensor = 2 does not divide it (2 leaves)",
    ]
