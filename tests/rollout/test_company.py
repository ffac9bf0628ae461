"""A completion is the same bits in a batch of 1 and of 64, with drafts of any length, a cache, either preemption."""

import numpy as np
import pytest

from lockstep.rollout.drafts import Payoff, SeenDrafts
from lockstep.rollout.engine import Engine
from lockstep.types import Prompt, SamplingParams, Trajectory

PARAMS = SamplingParams(0.6, 20, frozenset(range(3)))
RNG = np.random.default_rng(8)
ALIKE = RNG.integers(0, 262, 17).tolist()
# Prompt and samples, 64 in all: the first by itself, two that begin as it does, and lengths around a page's end.
REQUESTS = [
    (Prompt(f"r{n}", "", tuple(ids)), samples)
    for n, (ids, samples) in enumerate(
        [([*ALIKE, 1, 2], 1), ([*ALIKE, 3], 11), (ALIKE, 4)]
        + [(RNG.integers(0, 262, length).tolist(), samples) for length, samples in ((1, 16), (16, 16), (31, 16))]
    )
]
LONGEST_DRAFT = 8


class Given(Payoff):
    """As many guesses as the test says, where there is room."""

    length = 0

    def best(self, sequences: int, rows: int, room: int) -> int:
        return min(self.length, room // sequences) if sequences else 0


def bits(t: Trajectory) -> tuple:
    return t.completion_ids.tolist(), t.logprobs.tobytes(), t.finish_reason


@pytest.fixture(scope="module")
def alone(make_engine) -> dict[tuple[str, int], tuple]:
    """Every sample in a batch of its own: on an engine that has done nothing before."""
    found = {}
    for p, samples in REQUESTS:
        for i in range(samples):
            (t,) = make_engine(num_pages=128, max_positions=64).generate([p], {p.id: [i]}, PARAMS)
            found[p.id, i] = bits(t)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["always", "never"])
def test_every_batch_size_and_every_length_of_draft(make_engine, alone, monkeypatch, swap: str) -> None:
    """Sizes 1 to 64 one after the other on one engine, so that all but the first find prompts in the cache."""
    engine: Engine = make_engine(
        slots=64, num_pages=24, max_positions=64, prefill_rows=128, swap=swap, draft_tokens=LONGEST_DRAFT,
        drafts=SeenDrafts(), make_payoff=Given,
    )  # fmt: skip
    drafted = dict.fromkeys(range(LONGEST_DRAFT + 1), 0)
    for size in range(1, 65):
        length = size % (LONGEST_DRAFT + 1)
        monkeypatch.setattr(Given, "length", length)
        before, left = engine.stats.drafted, size
        for p, samples in REQUESTS:
            if left:
                engine.submit(p, range(min(samples, left)), PARAMS)
                left -= min(samples, left)
        done: list[Trajectory] = []
        while engine.busy:
            done += engine.step()
        assert len(done) == size
        # The seed of a sample is its index.
        assert all(bits(t) == alone[t.group_id, t.index] for t in done), size
        engine.check_integrity()
        drafted[length] += engine.stats.drafted - before
    assert not drafted[0] and all(drafted[length] for length in range(1, LONGEST_DRAFT + 1)), drafted
    assert engine.stats.accepted > 100 and engine.stats.cached_tokens > 1000
    assert engine.stats.preemptions >= 8
    assert engine.stats.swaps == (engine.stats.preemptions if swap == "always" else 0)
