"""A run whose sampler holds keys, values and weights in eight bits, in memory that the recipe states; and a warm-up."""

import json

import numpy as np
import pytest

from lockstep.errors import ConfigError, FingerprintError
from lockstep.train.assembly import build


@pytest.mark.slow
def test_the_mismatch_is_in_the_record_and_the_options_in_the_identity(kit, opened, left, tmp_path) -> None:
    eight = ["--rollout.kv_dtype=int8", "--rollout.weights_dtype=int8"]
    keys = ["--numerics.mode=fast", "--run.steps=2", "--rollout.kv_memory_mib=1", "--rollout.max_waiting=4"]
    with opened(kit.config(tmp_path, *keys, *eight, "--rollout.swap=never")) as loop:
        loop.start()
        loop.step()
        loop.step()
        engine = loop.cluster.engine
        page = 8 * 3 * 2 * 2 * (8 + 4)  # tokens, layers, keys and values, heads, bytes of a head and its scale
        assert 0 <= (1 << 20) - engine.kv_bytes_per_device() < page
    run = left(loop.run_dir)
    for record in run.metrics():
        assert 1e-3 < record["mismatch/max_abs"] < 1 and record["mismatch/unequal_tokens"] > 0
        assert 0 < record["mismatch/k3"] < 0.05 and 0.9 < record["mismatch/ess"] < 1
    made = run.step(2).trajectories
    again = np.concatenate([lp for lp in run.step(2).extra["trainer_logprobs"] if lp is not None])
    recorded = np.concatenate([t.logprobs for t in made])
    assert np.abs(again - recorded).max() == pytest.approx(run.metrics()[1]["mismatch/max_abs"], rel=1e-6)
    environment = json.loads((run.path / "dial.json").read_text())["environment"]
    assert environment["sampler"] == "key-value cache int8, layer matrices int8"
    assert environment["fingerprint of numerics"] == made[0].fingerprint.numerics
    assert f"key-value cache: {engine.num_pages} pages of 8 tokens" in (run.path / "log.txt").read_text()
    # A sample of another storage is of another identity: the trainer refuses it.
    with opened(kit.config(tmp_path, *keys)) as other, pytest.raises(FingerprintError, match="another numerics"):
        other.collector._accepted(made, 2)


def test_a_budget_for_less_than_one_sequence_is_refused_before_anything_is_made(kit, tmp_path) -> None:
    long = ["--rollout.max_new_tokens=500", "--train.micro_batch_rows=512", "--rollout.page_size=2000"]
    with pytest.raises(
        ConfigError, match=r"kv_memory_mib = 1 holds 1 pages .*length \(506 tokens\) takes 2; use at least 2"
    ):
        build(kit.config(tmp_path, *long, "--rollout.kv_memory_mib=1"))


@pytest.mark.slow
def test_a_warm_up_is_in_the_log_and_in_the_first_record_only(kit, opened, left, tmp_path) -> None:
    with opened(kit.config(tmp_path, "--run.steps=2", "--rollout.warm_up=true")) as loop:
        loop.start()
        loop.step()
        loop.step()
    run = left(loop.run_dir)
    first, second = run.metrics()
    assert first["warmup/programs"] > 0 and first["warmup/seconds"] > 0 and "warmup/programs" not in second
    log = (run.path / "log.txt").read_text()
    assert f"warm-up: {first['warmup/programs']} programs compiled or read from the cache" in log
