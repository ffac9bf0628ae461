"""Training on samples of a cut distribution: by choice only, exact, and weighted."""

from dataclasses import replace

import numpy as np
import pytest

from lockstep.errors import FingerprintError
from lockstep.train.rollouts import consumable


def test_a_cut_distribution_is_recorded_and_trained_on_exactly(kit, train, left, tmp_path) -> None:
    config = kit.config(
        tmp_path, "--run.steps=2", "--rollout.top_p=0.7", "--rollout.top_k=50", "--rollout.truncation=correct"
    )
    run = left(train(config))
    for record in run.metrics():
        assert record["mismatch/unequal_tokens"] == 0, "both sides of the ratio are of the whole softmax"
        assert record["ratio"] == pytest.approx(1, abs=1e-6)  # a mean over micro-batches
        kept = np.concatenate([t.kept_logmass for t in run.step(record["step"]).trajectories])
        assert (kept <= 0).all() and (kept < 0).any()
        assert record["sampling/kept_mass"] == pytest.approx(np.exp(kept.astype(np.float64)).mean(), rel=1e-6)
        assert 0.1 < record["sampling/kept_mass"] < 0.9


def test_a_sample_that_says_it_was_cut_is_refused(kit, opened, tmp_path) -> None:
    with opened(kit.config(tmp_path, "--run.steps=1")) as loop:
        loop.start()
        done, _ = consumable(loop.collector._generate(1, 0, 0), 0, "fail")
        assert loop.collector._accepted(done, 0) == done
        cut = replace(done[0], kept_logmass=np.zeros(len(done[0].logprobs), np.float32))
        with pytest.raises(FingerprintError, match="from a part of the vocabulary only"):
            loop.collector._accepted([cut], 0)
