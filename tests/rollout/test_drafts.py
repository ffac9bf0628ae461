"""Drafts: what is proposed, when it pays, and that nobody can tell from a completion whether there were any."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.mesh import Dial
from lockstep.errors import ConfigError
from lockstep.models import load_model
from lockstep.models.decoder import Numerics
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.draft_model import ModelDrafts, load_drafts
from lockstep.rollout.drafts import Payoff, Seen, SeenDrafts
from lockstep.rollout.engine import Engine
from lockstep.types import Prompt, SamplingParams, Trajectory

# -- proposals ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=4),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(1, 4),
)
def test_what_followed_the_longest_run_when_it_was_last_seen(prompt, earlier, tokens, count) -> None:
    """Against a search of everything that was said, in the order in which it was."""
    seen, prompt = Seen(tuple(prompt)), tuple(prompt)
    said = [(prompt[: i + 1], i, prompt) for i in range(2, len(prompt))]
    for text in [*earlier, tokens]:
        seen.add(text, 0)
        said += [((*prompt, *text[: i + 1]), i, text) for i in range(len(text)) if len(prompt) + i >= 2]
    wanted: list[int] = []
    end = (*prompt, *tokens)
    for n in range(4, 1, -1):
        places = [(i, where) for ids, i, where in said if len(end) >= n and ids[:-1][-n:] == end[-n:] and len(ids) > n]
        if places:
            i, where = places[-1]
            wanted = list(where[i : i + count])
            break
    assert seen.next(tokens, count) == wanted


def test_a_sample_is_drafted_from_what_the_others_of_its_group_go_on_to_say() -> None:
    seen = Seen((7, 8, 9))
    first = [1, 2, 3]
    seen.add(first, 0)
    assert seen.next([], 2) == [1, 2], "from the prompt alone"
    first += [4, 5]
    seen.add(first, 3)
    assert seen.next([6, 2, 3], 4) == [4, 5]
    assert seen.next([2, 2], 4) == []


# -- when it pays ------------------------------------------------------------------------------------------------------


def payoff(acceptance: float, times: dict[int, float], most: int = 4, unit: int = 32) -> Payoff:
    p = Payoff(most, unit)
    p.judged(1000, int(1000 * acceptance))
    for rows, seconds in times.items():
        p.passed(rows, seconds)
    return p


def test_rows_that_would_be_padding_are_used() -> None:
    p = payoff(0.1, {32: 1.0})
    assert p.best(sequences=8, rows=8, room=500) == 3, "32 rows take as long as 8; 40 would take twice as long"
    assert p.best(sequences=1, rows=1, room=500) == 4
    assert payoff(0.0, {32: 1.0}).best(8, 8, 500) == 0, "nothing is ever accepted"


def test_more_rows_are_used_when_they_are_worth_their_time() -> None:
    for acceptance, drafts in ((0.99, 4), (0.9, 2), (0.3, 0)):
        p = payoff(acceptance, {32: 1.0, 64: 1.6, 96: 2.2, 128: 2.8, 160: 3.4})
        assert p.best(sequences=32, rows=32, room=500) == drafts, acceptance
    assert payoff(0.9, {32: 1.0}).best(32, 32, 500) == 0, "of unknown size: in proportion, and no draft is sure"
    assert payoff(0.9, {32: 1.0, 64: 1.0}).best(32, 32, room=40) == 1, "no more than there is room for"


def test_what_does_not_pay_is_tried_again_now_and_then() -> None:
    p = payoff(0.0, {32: 1.0})
    assert [p.best(32, 32, 500) for _ in range(2 * Payoff.PROBE)] == ([0] * (Payoff.PROBE - 1) + [1]) * 2
    p.judged(100, 100)
    assert p.acceptance > 0.8, "old judgements fade"


# -- nobody can tell ---------------------------------------------------------------------------------------------------

PROMPT = Prompt("d", "", tuple(np.random.default_rng(3).integers(0, 262, 21).tolist()))


class Always(Payoff):
    def best(self, sequences: int, rows: int, room: int) -> int:
        return min(self.most, room // sequences) if sequences else 0


def bits(t: Trajectory) -> tuple:
    kept = None if t.kept_logmass is None else t.kept_logmass.tobytes()
    return t.completion_ids.tolist(), t.logprobs.tobytes(), t.finish_reason, kept


def run(engine: Engine, params: SamplingParams, seeds: list[int]) -> list[tuple]:
    return [bits(t) for t in engine.generate([PROMPT], {PROMPT.id: seeds}, params)]


PARAMS = {
    "greedy": SamplingParams(0.0, 20, frozenset()),
    "cold": SamplingParams(0.3, 20, frozenset(range(9))),
    "warm": SamplingParams(1.0, 20, frozenset()),
    "penalised": SamplingParams(0.2, 20, frozenset(), repetition_penalty=1.2, frequency_penalty=0.1),
    "cut, not before 9": SamplingParams(0.5, 20, frozenset(range(80)), top_k=20, top_p=0.9, min_new_tokens=9),
}


@pytest.fixture(scope="module")
def plain(make_engine) -> dict[str, list[tuple]]:
    """Without drafts. Seeds 1 and 2 twice: their second samples can be drafted from their first."""
    engine = make_engine()
    return {name: run(engine, p, [1, 2, 1, 3, 2]) for name, p in PARAMS.items()}


@pytest.mark.parametrize(("most", "pages", "rows"), [(1, 24, 32), (4, 24, 64), (7, 7, 32)])
def test_drafts_change_no_token_and_no_bit(make_engine, plain, most: int, pages: int, rows: int) -> None:
    """Also when pages run out meanwhile."""
    engine = make_engine(
        num_pages=pages, prefill_rows=rows, drafts=SeenDrafts(), draft_tokens=most, make_payoff=Always, slots=8
    )
    for name, params in PARAMS.items():
        for _ in range(2):  # the second time all of it was seen before
            before = replace(engine.stats)
            assert run(engine, params, [1, 2, 1, 3, 2]) == plain[name], name
            engine.check_integrity()
            again = engine.stats.completion_tokens - before.completion_tokens
            assert again == sum(len(t[0]) for t in plain[name])
        assert engine.stats.accepted > before.accepted, name
    assert 0 < engine.stats.accepted <= engine.stats.drafted


def test_a_completion_seen_before_takes_few_passes(make_engine, plain) -> None:
    engine = make_engine(drafts=SeenDrafts(), draft_tokens=7, make_payoff=Always)
    passes = []
    for _ in range(2):
        before = engine.stats.passes
        assert run(engine, PARAMS["warm"], [1]) == plain["warm"][:1]
        passes.append(engine.stats.passes - before)
    assert passes[1] <= 2 + 20 // 8 < 20 - 5 <= passes[0]


def test_a_draft_model_changes_no_bit_either(make_engine, tiny_params, plain) -> None:
    """The same model as its own draft guesses everything right; one of other weights hardly anything."""
    for seed, right in ((7, True), (8, False)):
        draft = make_engine(prefill_rows=32)
        assert draft.version is not None
        draft.install(draft.version, tiny_params(1, seed))
        engine = make_engine(drafts=ModelDrafts(draft), draft_tokens=3, make_payoff=Always, slots=8)
        for name in ("greedy", "warm"):
            assert run(engine, PARAMS[name], [1, 2, 1, 3, 2]) == plain[name]
        share = engine.stats.accepted / engine.stats.drafted
        assert share > 0.95 if right else share < 0.7
        assert draft.stats.cached_tokens > 0, "what it has read it does not read again"


def test_a_draft_model_of_other_tokens_is_refused(tiny_folder, tmp_path) -> None:
    model, mesh = load_model(str(tiny_folder)), Dial.build({"rollout": {}}).mesh("rollout")
    num, sizes = Numerics("float32", 32, 16), {"slots": 32, "max_positions": 64}
    drafts = load_drafts(str(tiny_folder), model.tokenizer, num, mesh, **sizes)
    assert drafts.engine.max_positions == 64
    model.tokenizer.__dict__["fingerprint"] = "another's"
    assert isinstance(model.tokenizer, Tokenizer)
    with pytest.raises(ConfigError, match="has another tokenizer than the model that is sampled from"):
        load_drafts(str(tiny_folder), model.tokenizer, num, mesh, **sizes)
