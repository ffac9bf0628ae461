"""A cluster without a fault passes; what does not apply says so."""

from __future__ import annotations

from lockstep.audit.examine import NAMES

RUN_ONLY = {name for name in NAMES if name.startswith("run-")}


def test_a_clean_cluster_passes_everything(ask, with_adapter) -> None:
    checks = ask(with_adapter, with_adapter.cluster())
    assert tuple(checks) == NAMES
    assert {n: c for n, c in checks.items() if c.status == "fail"} == {}
    assert {n for n, c in checks.items() if c.status == "n/a"} == RUN_ONLY


def test_a_clean_cluster_that_trains_every_weight(ask, all_weights) -> None:
    checks = ask(all_weights, all_weights.cluster())
    assert {n: c for n, c in checks.items() if c.status == "fail"} == {}
    assert {n for n, c in checks.items() if c.status == "n/a"} == RUN_ONLY | {"adapter-reaches-sampler"}
