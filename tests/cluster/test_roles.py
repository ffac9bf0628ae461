import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.roles import AXES, assign
from lockstep.errors import ConfigError


def test_shapes_take_devices_in_order_and_aliases_share():
    roles = assign({"actor": {"fsdp": 2, "tensor": 2}, "rollout": {"data": 3}, "reference": "actor"}, 8)
    assert roles["actor"].devices == (0, 1, 2, 3)
    assert roles["rollout"].devices == (4, 5, 6)
    assert roles["reference"].devices == (0, 1, 2, 3)
    assert [r.same_as for r in roles.values()] == [None, None, "actor"]
    assert dict(roles["rollout"].axes) == {"data": 3, "fsdp": 1, "tensor": 1}
    assert list(roles["actor"].axes) == list(AXES)
    assert roles["actor"].axes_text == "fsdp=2 tensor=2"


def test_alias_of_an_alias_leads_to_the_owner():
    roles = assign({"reference": "rollout", "rollout": "actor", "actor": {"data": 2}}, 2)
    assert roles["reference"].same_as == roles["rollout"].same_as == "actor"
    assert list(roles) == ["reference", "rollout", "actor"]


def test_explicit_devices_may_overlap_and_are_left_alone_by_the_others():
    roles = assign(
        {
            "actor": {"fsdp": 2},
            "rollout": {"data": 2, "devices": [0, 3]},
            "reference": {"tensor": 2, "devices": [3, 0]},
        },
        4,
    )
    assert roles["actor"].devices == (1, 2)
    assert roles["rollout"].devices == (0, 3)
    assert roles["reference"].devices == (3, 0)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"actr": {"fsdp": 1}}, r"cluster\.actr is not a role; .*; did you mean actor\?"),
        ({"actor": {"fdsp": 1}}, r"cluster\.actor\.fdsp is not a mesh axis; .*; did you mean fsdp\?"),
        ({"actor": {"fsdp": 0}}, r"cluster\.actor\.fsdp must be a whole number of devices, at least 1; got 0"),
        ({"actor": {"fsdp": True}}, r"got True"),
        ({"actor": {"fsdp": 2.0}}, r"got 2\.0"),
        (
            {"actor": {"fsdp": 1}, "rollout": "actr"},
            r'cluster\.rollout = "actr" .* here: actor; did you mean actor\?',
        ),
        ({"actor": "rollout", "rollout": "actor"}, r"actor -> rollout -> actor is a circle"),
        ({"actor": "actor"}, r"actor -> actor is a circle"),
        ({"actor": {"fsdp": 2, "devices": [0]}}, r"names 1 devices, but its mesh has 2 \(data=1 x fsdp=2 x tensor=1\)"),
        ({"actor": {"fsdp": 2, "devices": [1, 1]}}, r"names device 1 more than once"),
        ({"actor": {"fsdp": 2, "devices": [0, 9]}}, r"names device 9, but there are 4 .* cluster\.cpu_devices = 10"),
        ({"actor": {"fsdp": 1, "devices": [-1]}}, r"names device -1"),
        ({"actor": {"devices": 3}}, r"must be a list of device numbers; got 3"),
        ({"actor": {"devices": ["0"]}}, r"must be a list of device numbers"),
    ],
)
def test_what_cannot_be_assigned_is_named(cluster, message):
    with pytest.raises(ConfigError, match=message):
        assign(cluster, 4)


def test_too_few_devices_says_needed_available_and_remedy():
    with pytest.raises(ConfigError, match=r"need 6 devices \(actor 4, rollout 2\); 4 available.*cpu_devices = 6$"):
        assign({"actor": {"fsdp": 4}, "rollout": {"data": 2}, "reference": "actor"}, 4)


def test_the_remedy_for_too_few_devices_works():
    cluster = {"actor": {"fsdp": 4}, "rollout": {"data": 2, "devices": [1, 3]}}
    with pytest.raises(ConfigError, match=r"of which 2 are named explicitly.*cpu_devices = 6$"):
        assign(cluster, 4)
    assert assign(cluster, 6)["actor"].devices == (0, 2, 4, 5)


@given(st.lists(st.dictionaries(st.sampled_from(AXES), st.integers(1, 3), max_size=3), min_size=1, max_size=3))
def test_assigned_devices_are_disjoint_and_as_many_as_the_axes_say(shapes):
    cluster = dict(zip(("actor", "rollout", "reference"), shapes, strict=False))
    needed = sum(math.prod(s.values()) for s in shapes)
    roles = assign(cluster, needed)
    used = [d for role in roles.values() for d in role.devices]
    assert sorted(used) == list(range(needed))
    assert all(len(role.devices) == math.prod(role.axes.values()) for role in roles.values())
    if needed > 1:
        with pytest.raises(ConfigError):
            assign(cluster, needed - 1)
