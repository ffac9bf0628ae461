"""A cluster without a fault passes; what does not apply says so."""

from __future__ import annotations

import pytest

from lockstep.audit.examine import NAMES, audit

RUN_ONLY = {name for name in NAMES if name.startswith("run-")}


def test_a_clean_cluster_passes_everything(ask, with_adapter) -> None:
    checks = ask(with_adapter, with_adapter.cluster())
    assert tuple(checks) == NAMES
    assert {n: c for n, c in checks.items() if c.status == "fail"} == {}
    assert {n for n, c in checks.items() if c.status == "n/a"} == RUN_ONLY


@pytest.mark.slow
def test_a_clean_cluster_that_trains_every_weight(ask, all_weights) -> None:
    checks = ask(all_weights, all_weights.cluster())
    assert {n: c for n, c in checks.items() if c.status == "fail"} == {}
    assert {n for n, c in checks.items() if c.status == "n/a"} == RUN_ONLY | {"adapter-reaches-sampler"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["--cluster={actor = {fsdp = 2}, rollout = {data = 2}, reference = {tensor = 2}, cpu_devices = 8}"],
        ["--numerics.mode=fast"],
        ["--numerics.mode=fast", "--rollout.kv_dtype=int8", "--rollout.weights_dtype=int8"],
        ["--model.dtype=bfloat16", "--algorithm={measure_kl = false}", "--rollout.temperature=1.0"],
        ["--task.template=chat", "--task.max_prompt_tokens=64", "--train.micro_batch_rows=256", "--rollout.samples=2"],
        ["--train={epochs = 2, mini_batches = 3, micro_batch_rows = 64}", "--algorithm.reference_every=1"],
        ["--algorithm.name=ppo", "--critic={warmup_steps = 1, optim = {lr = 0.01}}"],
        ["--algorithm={name = 'dapo', overlong_tokens = 3, mask_truncated = true}"],
    ],
    ids=["apart", "fast", "eight bits", "bfloat16", "chat", "several updates", "a critic first", "dapo"],
)
def test_other_corners_of_the_recipe(kit, overrides) -> None:
    report = audit(kit.config(*overrides))
    assert report.ok, report.text()
