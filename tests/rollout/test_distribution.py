"""Speed keeps the distribution: on a vocabulary small enough to write every completion down with its probability.

Probabilities come from the slow forward pass in float64, cut as the parameters say; what is drawn is compared by a
chi-square test. Seeds are fixed, so the statistic is too: it fails when something changes, not now and then.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.cluster.sharding import place
from lockstep.models.decoder import Numerics, reference_logits
from lockstep.models.init import init_params
from lockstep.models.spec import LayerKind, ModelSpec, Rope, leaf_table
from lockstep.rollout.draft_model import ModelDrafts
from lockstep.rollout.drafts import Payoff, SeenDrafts
from lockstep.rollout.engine import Engine, request_seed
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams

V, LENGTH = 5, 3
SPEC = ModelSpec("llama", V, 16, 2, 1, 8, 24, (LayerKind(Rope(10000.0)),) * 2, 1e-5, 8**-0.5, 64, tied_head=True)
PROMPT = Prompt("p", "", (3, 1, 4, 1, 0, 2, 2))


def weights(seed: int) -> dict[str, np.ndarray]:
    host = init_params(SPEC, seed)
    return host | {"final_norm": host["final_norm"] * np.float32(1.2)}


@pytest.fixture(scope="module")
def programs() -> Programs:
    return Programs(SPEC, Numerics("float32", 32, 4), Dial.build({"rollout": {}}).mesh("rollout"), leaf_table(SPEC))


def engine(programs: Programs, seed: int = 5, **options: Any) -> Engine:
    fingerprint = Fingerprint("tokenizer", "template", "decoding", "numerics")
    made = Engine(programs, **({"slots": 128, "max_positions": 16, "fingerprint": fingerprint} | options))
    made.install(PolicyVersion(0, "digest"), place(weights(seed), leaf_table(SPEC), programs.mesh))
    return made


def distribution(p: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every completion, from the definition."""
    every = list(product(range(V), repeat=LENGTH))
    ids = np.asarray([(*PROMPT.ids, *c) for c in every])
    z = np.asarray(reference_logits(SPEC, weights(5), ids), np.float64)[:, len(PROMPT.ids) - 1 : -1] / p.temperature
    prob = np.exp(z - np.logaddexp.reduce(z, -1, keepdims=True))
    order = np.argsort(-prob, -1, kind="stable")
    ranked = np.take_along_axis(prob, order, -1)
    if p.top_k:
        ranked[..., p.top_k :] = 0
    before = np.cumsum(ranked, -1) - ranked
    ranked[(before >= p.top_p * ranked.sum(-1, keepdims=True)) & (before > 0)] = 0
    ranked[ranked < p.min_p * ranked.max(-1, keepdims=True)] = 0
    cut = np.zeros_like(prob)
    np.put_along_axis(cut, order, ranked / ranked.sum(-1, keepdims=True), -1)
    each = np.take_along_axis(cut, np.asarray(every)[..., None], -1)[..., 0].prod(-1)
    return dict(zip(every, each.tolist(), strict=True))


def check(engine: Engine, p: SamplingParams, draws: int) -> None:
    """Chi-square over all completions, those expected less than 5 times taken together; none that cannot be."""
    seeds = [request_seed(0, 1, "p", i) for i in range(draws)]
    done = engine.generate([PROMPT], {"p": seeds}, p)
    counts = dict.fromkeys(product(range(V), repeat=LENGTH), 0)
    for t in done:
        counts[tuple(t.completion_ids.tolist())] += 1
    wanted = distribution(p)
    for c, n in counts.items():
        assert wanted[c] > 0 or n == 0, f"{c} was drawn {n} times and has probability 0"
    # And each record is of the distribution that it was drawn from.
    for t in done[:50]:
        assert t.sampled_logprobs.sum() == pytest.approx(np.log(wanted[tuple(t.completion_ids.tolist())]), abs=1e-4)
    expected = np.asarray([wanted[c] * draws for c in counts])
    observed = np.asarray(list(counts.values()), np.float64)
    rare = expected < 5
    cells = [(observed[~rare], expected[~rare]), (observed[rare].sum(), expected[rare].sum())]
    observed, expected = (np.append(*(np.atleast_1d(c[i]) for c in cells)) for i in (0, 1))
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert len(expected) > 5, "too few cells to tell anything"
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, len(expected) - 1) > 1e-3, statistic


class Always(Payoff):
    def best(self, sequences: int, rows: int, room: int) -> int:
        return min(self.most, room // sequences) if sequences else 0


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_their_distribution(programs: Programs, change: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 1.0} | change), max_new_tokens=LENGTH, stop_ids=frozenset())
    check(engine(programs), params, 2000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "top_p"),
    [("cache", 1.0), ("preemption", 0.8), ("swap", 1.0), ("seen", 1.0), ("seen", 0.8), ("draft model", 1.0)],
)
def test_and_so_they_do_with_everything_that_makes_it_fast(programs: Programs, how: str, top_p: float) -> None:
    params = SamplingParams(1.0, LENGTH, frozenset(), top_p=top_p)
    if how == "cache":
        made = engine(programs)
        made.generate([PROMPT], {"p": [1]}, params)
    elif how in ("preemption", "swap"):
        made = engine(programs, num_pages=40, swap="always" if how == "swap" else "never")
    else:
        drafts = SeenDrafts() if how == "seen" else ModelDrafts(engine(programs, seed=6))
        made = engine(programs, drafts=drafts, draft_tokens=2, make_payoff=Always)
    check(made, params, 1000)
    stats = made.stats
    used = {"cache": stats.cached_tokens, "preemption": stats.preemptions, "swap": stats.swaps}
    assert used.get(how, stats.accepted) > 0 and stats.drafted >= stats.accepted
