"""A bandit whose optimum is known: the whole loop ends at the policy that the KL's weight makes the best one.

One prompt, one token, a reward of 0 or 1. max over pi of E[r] - beta KL(pi || ref) is pi* ~ ref exp(r / beta), so that

    E*[r] = p e / (p e + 1 - p),   KL* = E*[r] / beta - log(p e + 1 - p),      e = exp(1 / beta), p = ref(r = 1)
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lockstep.models import load_model
from lockstep.models.decoder import reference_logits

BETA, STEPS, LAST = 0.5, 120, 40
CRITIC = "--critic={optim = {lr = 0.02}, clip = inf}"
WORDS = {
    "rloo": [],
    "reinforce_pp": [],
    "ppo": [CRITIC],
    # Without a group's deviation to divide by, which would weigh the reward and not the KL. k2's gradient is the KL's.
    "dr_grpo": ["--algorithm.kl_in=loss", "--algorithm.kl_estimator=k2"],
}


def chance(folder: Path, prompt: str) -> float:
    """That the untrained model's token is a character with an even code point: from its logits, over the vocabulary."""
    model = load_model(str(folder / "model"))
    ids = np.asarray(model.tokenizer.encode_prompt(prompt), np.int32)[None]
    logits = np.asarray(reference_logits(model.spec, model.params, ids), np.float64)[0, -1]
    p = np.exp(logits - logits.max())
    texts = [model.tokenizer.decode([i]) for i in range(len(p))]
    good = np.array([bool(t) and all(ord(c) % 2 == 0 for c in t) for t in texts])
    return float(p[good].sum() / p.sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_the_optimum_of_a_bandit_is_reached(kit, train, left, tmp_path: Path, name: str) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "00+1="}\n')
    words = [
        f"--run.steps={STEPS}", "--run.checkpoint_every=0", "--lora=none", "--optim.lr=2e-3", "--rollout.stop=[]",
        f"--task.path={tmp_path / 'one.jsonl'}", "--reward.functions=[{name = 'run_rewards:even'}]",
        "--rollout.prompts=1", "--rollout.samples=64", "--rollout.slots=64", "--rollout.max_new_tokens=1",
        "--train.micro_batch_rows=256", f"--algorithm={{name = '{name}', kl_coef = {BETA}}}", *WORDS[name],
    ]  # fmt: skip
    metrics = left(train(kit.config(tmp_path, *words))).metrics()
    p, e = chance(kit.folder, "00+1="), math.exp(1 / BETA)
    best = p * e / (p * e + 1 - p)
    distance = best / BETA - math.log(p * e + 1 - p)
    assert 0.2 < p < 0.8 and best > p + 0.15
    kl = "kl/k2" if name == "dr_grpo" else "kl/k1"
    found = np.mean([[m["reward"], m[kl]] for m in metrics[-LAST:]], axis=0)
    assert abs(metrics[0]["reward"] - p) < 0.2
    assert abs(found[0] - best) < 0.04, (found, best, distance)
    if name != "dr_grpo":  # k2 is biased as a value
        assert abs(found[1] - distance) < 0.12, (found, best, distance)
    assert all(m["mismatch/max_abs"] == 0 for m in metrics)
