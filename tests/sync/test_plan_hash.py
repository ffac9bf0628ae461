"""The plan's name changes with everything that is carried out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lockstep.sync.layout import Layout, MeshShape
from lockstep.sync.plan import Bundle, Placed
from lockstep.sync.plan_hash import plan_hash
from lockstep.sync.planner import make_plan


def test_the_hash_covers_every_column_of_the_bundles():
    here = Layout(MeshShape((("data", 2), ("fsdp", 2)), (0, 1, 2, 3)), (("fsdp",), ()))
    there = Layout(MeshShape((("data", 4),), (2, 3, 4, 5)), ((), ()))
    plan = make_plan({"w": Placed((64, 8), "float32", here)}, {"w": Placed((64, 8), "float32", there)})
    (bundle,) = plan.transfers.bundles()
    assert len(bundle.local) and len(set(bundle.sender.tolist())) > 1

    def hashed(*bundles: Bundle) -> str:
        return plan_hash(plan.source, plan.destination, plan.mapping, (), bundles)

    assert hashed(bundle) == plan.hash
    found = {plan.hash, hashed(), hashed(bundle, bundle)}
    for name, value in vars(bundle).items():
        if isinstance(value, np.ndarray):
            value = value.copy()
            value.reshape(-1)[-1] += 1  # one sender only, say
        else:
            value = value + 1 if isinstance(value, int) else value[::-1] + value[:1]
        found.add(hashed(replace(bundle, **{name: value})))
    assert len(found) == 3 + len(vars(bundle))
