"""The scheduler driven without a model, every pool row watched: what is written where, and by whom it is read.

`Driver` plays the engine. It keeps the pool as a table, row -> (prompt id, sample or None for the prompt, position,
token), applies each pass's writes, then looks up every position that each row of the pass reads.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import CapacityError
from lockstep.rollout.scheduler import Request, Scheduler, Sequence, Work
from lockstep.types import Prompt, SamplingParams

STOPS = frozenset({0, 3})
Cell = tuple[str, int | None, int, int]


def drawn_token(seed: int, index: int, vocabulary: int = 12) -> int:
    """The token that the pretend model draws: of the seed and the number of tokens before it, as the engine's."""
    return hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=2).digest()[0] % vocabulary


def expected_tokens(seed: int, params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < params.max_new_tokens and not (tokens and tokens[-1] in params.stop_ids):
        tokens.append(drawn_token(seed, len(tokens)))
    return tokens


def request(number: int, prompt_length: int, samples: int, new_tokens: int, stops: frozenset[int] = STOPS) -> Request:
    ids = tuple(100 * number + i for i in range(prompt_length))
    seeds = tuple(1000 * number + i for i in range(samples))
    return Request(Prompt(f"p{number}", "", ids), seeds, SamplingParams(1.0, new_tokens, stops))


@dataclass
class Driver:
    """One scheduler under way, and everything that may be asked of it afterwards."""

    scheduler: Scheduler
    pool: dict[int, Cell] = field(default_factory=dict)
    prompt_writes: Counter[tuple[str, int]] = field(default_factory=Counter)
    passes: list[list[Work]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)

    def one_pass(self) -> list[Sequence]:
        scheduler = self.scheduler
        work = scheduler.schedule()
        assert work, "busy, but nothing to run: the requests under way would wait for ever"
        assert len(work) <= scheduler.max_rows
        assert scheduler.num_running <= scheduler.slots
        scheduler.pages.check_integrity()
        self._write(work)
        for row in work:
            self._check_reads(row)
        samples = [s for row in work for s in row.samples]
        assert len(set(map(id, samples))) == len(samples), "a sample would draw twice in one pass"
        drawn = [(s, drawn_token(s.group.request.seeds[s.index], len(s.tokens)), -1.0) for s in samples]
        finished = scheduler.record(drawn)
        scheduler.pages.check_integrity()
        self.passes.append(work)
        self.finished += finished
        return finished

    def _write(self, work: list[Work]) -> None:
        written: set[int] = set()
        for row in work:
            if row.write is None:
                continue
            assert row.write not in written, "two rows of a pass write one pool row"
            assert 0 <= row.write < self.scheduler.pages.num_pages * self.scheduler.page_size
            written.add(row.write)
            group, sample = self._owner(row)
            if sample is None:
                self.prompt_writes[group, row.pos] += 1
            self.pool[row.write] = (group, sample, row.pos, row.token)

    def _owner(self, row: Work) -> tuple[str, int | None]:
        """Prompt id, and the sample whose own token the row holds (None: the row is the prompt's)."""
        for group in self.scheduler.groups:
            if row.read is group.rows:
                return group.request.prompt.id, None
            for seq in group.running:
                if row.read is seq.read:
                    assert row.samples == (seq,)
                    return group.request.prompt.id, seq.index
        raise AssertionError("a row reads pages of no sequence that is under way")

    def _check_reads(self, row: Work) -> None:
        name, sample = self._owner(row)
        group = next(g for g in self.scheduler.groups if g.request.prompt.id == name)
        ids = group.request.prompt.ids
        own = next((s.tokens for s in group.running if s.index == sample), [])
        wanted = [(name, None, p, t) for p, t in enumerate(ids)]
        wanted += [(name, sample, len(ids) + i, t) for i, t in enumerate(own)]
        assert wanted[row.pos][3] == row.token
        for position, cell in enumerate(wanted[: row.pos + 1]):
            assert self.pool.get(int(row.read[position])) == cell, f"{name}/{sample} position {position}"

    def run(self, limit: int = 10_000) -> None:
        while self.scheduler.busy:
            self.one_pass()
            assert len(self.passes) < limit

    def check_all_free(self) -> None:
        total = self.scheduler.pages.num_pages
        assert self.scheduler.pages.check_integrity() == (total, 0, total)
        assert not self.scheduler.busy and self.scheduler.load == 0 and self.scheduler.num_running == 0


def check_answers(requests: list[Request], answers: list[Sequence]) -> None:
    """Every sample of every request once, with the tokens its seed gives, whoever ran beside it."""
    got = {(s.group.request.prompt.id, s.index): s for s in answers}
    assert len(got) == len(answers), "a sample was answered twice"
    assert got.keys() == {(r.prompt.id, i) for r in requests for i in range(len(r.seeds))}
    for r in requests:
        for i, seed in enumerate(r.seeds):
            seq, wanted = got[r.prompt.id, i], expected_tokens(seed, r.params)
            assert seq.tokens == wanted and len(seq.logprobs) == len(wanted)
            assert seq.finish == ("stop" if wanted[-1] in r.params.stop_ids else "length")


shapes = st.tuples(st.integers(1, 14), st.integers(1, 6), st.integers(1, 9), st.sampled_from([STOPS, frozenset()]))


@st.composite
def situations(draw):
    """(scheduler, requests that fit it): few slots, few pages, passes as short as they may be."""
    page_size = draw(st.sampled_from([1, 3, 4]))
    requests = [request(i, *draw(shapes)) for i in range(draw(st.integers(1, 6)))]
    need = max(-(-len(r.prompt.ids) // page_size) + -(-r.params.max_new_tokens // page_size) for r in requests)
    slots = draw(st.integers(1, 5))
    pages = need + draw(st.sampled_from([0, 1, 2, 5, 40]))
    return Scheduler(slots, pages, page_size, slots + draw(st.sampled_from([0, 1, 3, 30]))), requests


@settings(max_examples=150)
@given(situations(), st.data())
def test_every_request_is_answered_once_and_reads_only_its_own(situation, data) -> None:
    scheduler, requests = situation
    driver = Driver(scheduler)
    arrivals = sorted((data.draw(st.integers(0, 12), label="arrives at pass"), i) for i in range(len(requests)))
    while arrivals or scheduler.busy:
        while arrivals and (arrivals[0][0] <= len(driver.passes) or not scheduler.busy):
            scheduler.submit(requests[arrivals.pop(0)[1]])
        driver.one_pass()
        assert len(driver.passes) < 2000
    check_answers(requests, driver.finished)
    driver.check_all_free()
    assert driver.prompt_writes == {(r.prompt.id, p): 1 for r in requests for p in range(len(r.prompt.ids))}


@settings(max_examples=100)
@given(situations(), st.data())
def test_abort_at_any_point_frees_pages_and_keeps_what_was_drawn(situation, data) -> None:
    scheduler, requests = situation
    driver = Driver(scheduler)
    for r in requests:
        scheduler.submit(r)
    aborted: list[Sequence] = []
    for number in data.draw(st.permutations(range(len(requests))), label="abort order"):
        for _ in range(data.draw(st.integers(0, 6), label="passes between")):
            if scheduler.busy:
                driver.one_pass()
        cancelled = scheduler.abort(requests[number].prompt.id)
        scheduler.pages.check_integrity()
        assert all(s.finish == "abort" and s.group.request is requests[number] for s in cancelled)
        assert not any(g.request is requests[number] for g in (*scheduler.groups, *scheduler.queue))
        aborted += cancelled
    driver.check_all_free()
    for seq in aborted:
        wanted = expected_tokens(seq.group.request.seeds[seq.index], seq.group.request.params)
        assert seq.tokens == wanted[: len(seq.tokens)] and len(seq.tokens) < len(wanted)
    seen = [(s.group.request.prompt.id, s.index) for s in (*driver.finished, *aborted)]
    assert sorted(seen) == sorted((r.prompt.id, i) for r in requests for i in range(len(r.seeds)))


@settings(max_examples=50)
@given(situations(), st.data())
def test_aborting_one_leaves_the_others_as_they_were(situation, data) -> None:
    scheduler, requests = situation
    driver = Driver(scheduler)
    for r in requests:
        scheduler.submit(r)
    for _ in range(data.draw(st.integers(0, 8), label="passes before")):
        if scheduler.busy:
            driver.one_pass()
    victim = requests[data.draw(st.integers(0, len(requests) - 1), label="victim")]
    cancelled = scheduler.abort(victim.prompt.id)
    driver.run()
    done = [s for s in driver.finished if s.group.request is not victim]
    check_answers([r for r in requests if r is not victim], done)
    answered = [s.index for s in (*driver.finished, *cancelled) if s.group.request is victim]
    assert sorted(answered) == list(range(len(victim.seeds)))
    driver.check_all_free()


def test_abort_of_what_is_not_there_is_nothing() -> None:
    assert Scheduler(2, 4, 4, 2).abort("p1") == []


# -- single shapes of the same, each with its number -------------------------------------------------------------------


def test_samples_share_one_prefill_and_decode_side_by_side() -> None:
    driver = Driver(Scheduler(8, 100, 4, 64))
    r = request(1, prompt_length=10, samples=5, new_tokens=4, stops=frozenset())
    driver.scheduler.submit(r)
    driver.run()
    # One pass for the prompt, which draws all five first tokens; then three of five rows each.
    assert [len(work) for work in driver.passes] == [10, 5, 5, 5]
    assert len(driver.passes[0][-1].samples) == 5
    check_answers([r], driver.finished)


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    scheduler = Scheduler(slots=2, num_pages=40, page_size=4, max_rows=4)
    driver = Driver(scheduler)
    requests = [request(1, 2, 1, 9, frozenset()), request(2, 14, 1, 2, frozenset())]
    for r in requests:
        scheduler.submit(r)
    driver.run()
    decoding = [[row for row in work if row.samples and row.samples[0].group.request is requests[0]] for work in
                driver.passes]  # fmt: skip
    assert all(len(rows) == 1 for rows in decoding[:9]), "a running sample waited for another's prompt"
    assert [len(work) for work in driver.passes[:5]] == [4, 4, 4, 4, 4]
    check_answers(requests, driver.finished)


def test_fewer_slots_than_samples_reruns_only_the_last_prompt_row() -> None:
    driver = Driver(Scheduler(slots=2, num_pages=40, page_size=4, max_rows=16))
    r = request(1, prompt_length=6, samples=5, new_tokens=3, stops=frozenset())
    driver.scheduler.submit(r)
    driver.run()
    late = [row for work in driver.passes for row in work if row.write is None]
    assert [(row.pos, row.token, len(row.samples)) for row in late] == [
        (5, r.prompt.ids[5], 2),
        (5, r.prompt.ids[5], 1),
    ]
    check_answers([r], driver.finished)
    driver.check_all_free()


def test_pages_for_just_one_sample_suffice_for_all() -> None:
    scheduler = Scheduler(slots=8, num_pages=5, page_size=4, max_rows=8)
    driver = Driver(scheduler)
    requests = [request(i, prompt_length=9, samples=3, new_tokens=7, stops=frozenset()) for i in range(3)]
    for r in requests:
        scheduler.submit(r)
    driver.run()
    check_answers(requests, driver.finished)
    driver.check_all_free()


def test_a_pass_that_failed_can_be_tried_again() -> None:
    """Nothing is taken as done before it is recorded."""
    driver = Driver(Scheduler(slots=2, num_pages=40, page_size=4, max_rows=4))
    r = request(1, prompt_length=9, samples=2, new_tokens=3)
    driver.scheduler.submit(r)
    while driver.scheduler.busy:
        lost = driver.scheduler.schedule()
        driver.one_pass()
        same = [(row.token, row.pos, row.write) for row in lost]
        assert same == [(row.token, row.pos, row.write) for row in driver.passes[-1]]
    check_answers([r], driver.finished)


@pytest.mark.parametrize(
    ("prompt_length", "new_tokens", "words"),
    [
        (17, 4, "'p1': 17 prompt tokens and up to 4 new ones need 6 pages of 4 tokens, the pool has 5; raise"),
        (1, 20, "'p1': 1 prompt tokens and up to 20 new ones need 6 pages"),
        (0, 4, "'p1' has no tokens; a completion needs at least one"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt_length: int, new_tokens: int, words: str) -> None:
    scheduler = Scheduler(slots=2, num_pages=5, page_size=4, max_rows=4)
    with pytest.raises(CapacityError) as error:
        scheduler.submit(request(1, prompt_length, 1, new_tokens))
    assert words in str(error.value)
    assert not scheduler.busy and scheduler.load == 0


def test_nothing_to_draw_and_too_small_passes_are_bugs_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="every running sequence must fit"):
        Scheduler(slots=4, num_pages=5, page_size=4, max_rows=3)
    for samples, new_tokens in ((0, 4), (1, 0)):
        with pytest.raises(AssertionError, match="nothing to draw"):
            Scheduler(2, 5, 4, 4).submit(request(1, 1, samples, new_tokens))
