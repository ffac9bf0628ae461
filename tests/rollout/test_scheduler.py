"""The scheduler driven without a model, every pool row watched: what is written where, and by whom it is read.

`Driver` plays the engine. What a key and a value depend on is the policy and the ids up to their position, so its pool
is a table from row to the lane and exactly these ids: a row of a pass writes what it reads of the position before it,
and its own token. Whatever is shared, cached, preempted, swapped or computed again, a row must find its own ids there,
under its own lane.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep.cluster.programs import SplitWeights
from lockstep.errors import CapacityError, QueueFullError
from lockstep.rollout.drafts import Payoff
from lockstep.rollout.lanes import Lanes
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.work import Drawn, Pass, Request, Sequence
from lockstep.types import PolicyVersion, Prompt, SamplingParams

STOPS = frozenset({0, 3})
Cell = tuple[int, tuple[int, ...]]  # lane, ids up to the position
NO_WEIGHTS = SplitWeights(None, (), {})


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
    prompt_writes: Counter[Cell] = field(default_factory=Counter)
    passes: list[Pass] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)  # lane of every pass

    def __post_init__(self) -> None:
        self.lanes = Lanes([self.scheduler])
        self.install()

    def install(self) -> None:
        self.lanes.add(PolicyVersion(len(self.lanes), "same"), NO_WEIGHTS)

    def plan(self) -> Pass:
        self.scheduler.settle()
        return self.scheduler.schedule(self.lanes.next().number)

    def run_lanes(self, steps: dict[int, int], passes: int) -> list[int]:
        """Lanes of so many passes, each of which counts as so many steps of its lane."""
        for _ in range(passes):
            self.one_pass(steps)
        return self.ran[-passes:]

    def one_pass(self, steps: dict[int, int] | None = None) -> list[Sequence]:
        scheduler = self.scheduler
        work = self.plan()
        lane = self.lanes.ran
        self.lanes.took((steps or {}).get(lane, 1))
        assert work.rows, "busy, but nothing to run: the requests under way would wait for ever"
        oldest = next(s for s in scheduler.running if s.group.lane == lane)
        assert oldest.group.ready or any(r.kind == "prompt" for r in work), "the oldest of its lane got no row"
        assert not oldest.group.ready or oldest.pending or any(oldest in r.samples for r in work)
        assert len(work) <= scheduler.max_rows
        assert scheduler.num_running <= scheduler.slots
        scheduler.check_integrity()
        for swap in work.save:
            swap.sequence.saved = [self.pool[row] for row in swap.rows.tolist()]
        for swap in work.load:
            self.pool |= dict(zip(swap.rows.tolist(), swap.sequence.saved, strict=True))
            swap.sequence.saved = None
        self._write(work, lane)
        drawn = []
        for row in work:
            read = [self.pool[r] for r in row.read[: row.pos + 1].tolist()]
            ids = read[-1][1]
            assert read == [(lane, ids[: i + 1]) for i in range(len(ids))], "another's keys and values would be read"
            assert len(ids) == row.pos + 1 and ids[-1] == row.token
            for s in row.samples:
                assert s.group.lane == lane, "a sample would draw from another policy"
                assert ids == (*s.ids, *row.drafts), "a sample would draw from another's state"
                token = drawn_token(s.group.request.seeds[s.index], len(s.tokens) + len(row.drafts))
                drawn.append(Drawn(s, token, -1.0, drafts=row.drafts))
        assert len({(id(d.sequence), d.drafts) for d in drawn}) == len(drawn), "a sample would draw twice in one pass"
        finished = scheduler.record(drawn)
        self.lanes.retire()
        scheduler.check_integrity()
        self.passes.append(work)
        self.ran.append(lane)
        self.finished += finished
        return finished

    def _write(self, work: Pass, lane: int) -> None:
        """Rows of lower positions first: a layer writes every row of a pass before any is read."""
        written: set[int] = set()
        for row in sorted(work, key=lambda r: r.pos):
            if row.write is None:
                continue
            assert row.write not in written, "two rows of a pass write one pool row"
            assert 0 <= row.write < self.scheduler.memory.pages.num_pages * self.scheduler.memory.page_size
            assert row.write == row.read[row.pos]
            written.add(row.write)
            of, before = self.pool[int(row.read[row.pos - 1])] if row.pos else (lane, ())
            assert of == lane
            self.pool[row.write] = lane, (*before, row.token)
            if row.kind == "prompt":
                self.prompt_writes[self.pool[row.write]] += 1

    def run(self, limit: int = 10_000) -> None:
        while self.scheduler.busy:
            self.one_pass()
            assert len(self.passes) < limit

    def check_all_free(self) -> None:
        free, cached, used, total = self.scheduler.check_integrity()
        assert used == 0 and free + cached == total == self.scheduler.memory.pages.num_pages
        assert not self.scheduler.busy and self.scheduler.load == 0 and self.scheduler.num_running == 0
        self.install()
        assert self.scheduler.check_integrity() == (total, 0, 0, total)


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
    """(scheduler, requests that fit it): few slots and pages, short passes, prompts that begin alike."""
    page_size = draw(st.sampled_from([1, 3, 4]))
    requests = [request(i, *draw(shapes)) for i in range(draw(st.integers(1, 6)))]
    alike = draw(st.integers(0, 14))
    requests = [
        replace(r, prompt=replace(r.prompt, ids=(*range(min(alike, len(r.prompt.ids))), *r.prompt.ids[alike:])))
        for r in requests
    ]
    return draw(schedulers(page_size, requests)), requests


def pages_needed(r: Request, page_size: int) -> int:
    """For one sample by itself: its prompt's, and those of all new tokens but the last; the two share none."""
    length, new = len(r.prompt.ids), r.params.max_new_tokens - 1
    return -(-length // page_size) + (-(-(length % page_size + new) // page_size) if new else 0)


class Guesses:
    """Drafts that are right two times of three, and sometimes fewer than were asked for."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        made = []
        for s, count in zip(sequences, counts, strict=True):
            seed, n = s.group.request.seeds[s.index], len(s.tokens)
            right = [drawn_token(seed, n + i) for i in range(count - (seed + n) % 4 // 3)]
            made.append([t if (seed + n + i) % 3 else t + 1 for i, t in enumerate(right)])
        return made

    def drawn(self, seq: Sequence, first: int) -> None:
        assert 0 <= first < len(seq.tokens), "told of nothing new"


class AsManyAsFit(Payoff):
    """Drafts without a thought of time."""

    def best(self, sequences: int, rows: int, room: int) -> int:
        return min(self.most, room // sequences) if sequences else 0


def speculating(most: int) -> dict[str, Any]:
    return {"drafts": Guesses(), "payoff": AsManyAsFit(most, 1)}


@st.composite
def schedulers(draw, page_size: int, requests: list[Request]):
    pages = max(pages_needed(r, page_size) for r in requests) + draw(st.sampled_from([0, 1, 2, 5, 40]))
    slots = draw(st.integers(1, 5))
    max_rows = slots + draw(st.sampled_from([0, 1, 3, 30]))
    swap = draw(st.sampled_from([None, lambda rows: True, lambda rows: rows % 2 == 0]))
    speculation = speculating(draw(st.integers(1, 4))) if draw(st.booleans()) else {}
    return Scheduler(slots, pages, page_size, max_rows, swap_pays=swap, **speculation)


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
        scheduler.check_integrity()
        assert all(s.finish == "abort" and s.group.request is requests[number] for s in cancelled)
        assert not any(g.request is requests[number] for g in (*scheduler.groups.values(), *scheduler.queue))
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
    assert len(driver.passes[0].rows[-1].samples) == 5
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
        lost = driver.plan()
        driver.one_pass()
        same = [(row.token, row.pos, row.write) for row in lost]
        assert same == [(row.token, row.pos, row.write) for row in driver.passes[-1]]
    check_answers([r], driver.finished)


@pytest.mark.parametrize(
    ("prompt_length", "new_tokens", "words"),
    [
        (17, 5, "'p1': 17 prompt tokens and up to 5 new ones need 7 pages of 4 tokens, the pool has 5; raise"),
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


# -- sharing, waiting, giving way --------------------------------------------------------------------------------------


def plain(number: int, ids: tuple[int, ...], samples: int = 1, new_tokens: int = 3) -> Request:
    seeds = tuple(1000 * number + i for i in range(samples))
    return Request(Prompt(f"p{number}", "", ids), seeds, SamplingParams(1.0, new_tokens, frozenset()))


def answer(driver: Driver, r: Request) -> list[Sequence]:
    before = len(driver.finished)
    driver.scheduler.submit(r)
    driver.run()
    return driver.finished[before:]


def test_a_prompt_that_begins_as_an_earlier_one_is_computed_from_there() -> None:
    driver = Driver(Scheduler(2, 40, 4, 16))
    answer(driver, plain(1, tuple(range(10))))
    answer(driver, plain(2, (*range(9), 77, 78)))
    assert driver.scheduler.memory.cached_tokens == 8, "two whole pages; the third differs within"
    assert driver.prompt_writes.total() == 10 + 3
    answer(driver, plain(3, tuple(range(8))))
    assert driver.prompt_writes.total() == 13 + 4, "the last position is computed in any case"


def test_a_next_turn_finds_prompt_and_completion() -> None:
    """Whole pages of positions, the one that begins in the prompt's last page and ends in the completion's too."""
    for length in (4, 5, 6, 7):
        driver = Driver(Scheduler(2, 40, 4, 64))
        done = answer(driver, plain(1, tuple(range(length)), samples=3, new_tokens=9))
        for seq in done:
            before = driver.prompt_writes.total()
            turn = (*seq.ids, 500, 501)
            answer(driver, plain(10 + seq.index, turn))
            known = (length + 8) // 4 * 4  # the last token was drawn, never run
            assert driver.prompt_writes.total() - before == len(turn) - known
        driver.check_all_free()


def test_of_prompts_that_begin_alike_one_computes_the_beginning() -> None:
    driver = Driver(Scheduler(8, 80, 4, 64))
    requests = [plain(i, (*range(12), 100 + i), samples=2) for i in range(3)]
    for r in requests:
        driver.scheduler.submit(r)
    driver.run()
    check_answers(requests, driver.finished)
    assert driver.prompt_writes.total() == 13 + 1 + 1
    assert [len(work) for work in driver.passes] == [13, 4, 6, 4], "the others wait for one pass, not longer"


def test_a_new_identity_finds_nothing_of_the_old() -> None:
    driver = Driver(Scheduler(2, 40, 4, 16))
    answer(driver, plain(1, tuple(range(10))))
    assert driver.scheduler.check_integrity() == (36, 4, 0, 40)
    driver.install()
    assert driver.scheduler.check_integrity() == (40, 0, 0, 40)
    answer(driver, plain(2, tuple(range(10))))
    assert driver.scheduler.memory.cached_tokens == 0 and driver.prompt_writes.total() == 20
    driver.scheduler.submit(plain(3, (1,)))
    with pytest.raises(AssertionError, match="samples of this policy are still under way"):
        driver.scheduler.retire(driver.scheduler.lane)


def test_lanes_take_turns_and_share_nothing_but_room() -> None:
    """One prompt under three installs: computed three times, side by side, and each pass is of one."""
    driver = Driver(Scheduler(8, 80, 4, 64))
    requests = [plain(i, tuple(range(10)), new_tokens=5) for i in range(3)]
    for r in requests:
        driver.scheduler.submit(r)
        driver.install()
    assert len(driver.lanes) == 4
    driver.run()
    check_answers(requests, driver.finished)
    assert driver.ran == [0, 1, 2] * 5 and driver.prompt_writes.total() == 30
    assert driver.scheduler.take_counts()["cached_tokens"] == 0
    assert [lane.pages for lane in driver.lanes.take_retired()] == [4, 4, 4] and len(driver.lanes) == 1
    assert driver.scheduler.check_integrity() == (80, 0, 0, 80), "all three have ended, and with them what is cached"


def test_lanes_share_steps_not_looks_and_save_up_none() -> None:
    """A lane that takes four steps at a look waits for four looks of one; lanes that come later owe and are owed
    nothing."""
    driver = Driver(Scheduler(8, 80, 4, 64))
    for number in range(2):
        driver.scheduler.submit(plain(number, (1, 2), new_tokens=40))
        driver.install()
    steps = {0: 4}
    assert driver.run_lanes(steps, 10) == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1]
    driver.scheduler.submit(plain(2, (1, 2), new_tokens=40))
    assert driver.run_lanes(steps, 9).count(2) == 4 and driver.ran[-9:].count(0) == 1


@pytest.mark.parametrize("swap", [None, lambda rows: True])
def test_the_youngest_gives_way_whatever_its_policy(swap) -> None:
    """Pages for all of the older lane's sample and half of the newer's; each ends under its own."""
    scheduler = Scheduler(slots=4, num_pages=9, page_size=4, max_rows=8, swap_pays=swap)
    driver = Driver(scheduler)
    old, new = plain(1, tuple(range(5)), new_tokens=20), plain(2, tuple(range(5)), new_tokens=20)
    scheduler.submit(old)
    driver.install()
    scheduler.submit(new)
    driver.run()
    check_answers([old, new], driver.finished)
    assert [s.group.request for s in driver.finished] == [old, new] and scheduler.num_preemptions > 0
    assert [s.group.lane for s in driver.finished] == [0, 1]
    assert (scheduler.num_swaps > 0) == (swap is not None)
    driver.check_all_free()


def test_a_lane_is_retired_with_its_last_sample_finished_or_aborted() -> None:
    driver = Driver(Scheduler(4, 40, 4, 16))
    driver.scheduler.submit(plain(1, tuple(range(9)), new_tokens=2))
    driver.scheduler.submit(plain(2, tuple(range(9)), new_tokens=9))
    driver.one_pass()
    driver.install()
    driver.scheduler.submit(plain(3, tuple(range(9)), new_tokens=4))
    while not driver.finished:
        driver.one_pass()
    assert len(driver.lanes) == 2 and not driver.lanes.take_retired()
    driver.scheduler.abort("p2")
    driver.lanes.retire()
    assert len(driver.lanes) == 1 and [r.version.number for r in driver.lanes.take_retired()] == [0]
    driver.run()
    assert [s.group.lane for s in driver.finished] == [0, 1]
    driver.check_all_free()


def test_the_least_recently_used_pages_are_given_up_first() -> None:
    driver = Driver(Scheduler(1, 6, 4, 16))
    for number, first in ((1, 0), (2, 100), (3, 0)):  # 3 is 1 again: used later than 2
        answer(driver, plain(number, tuple(range(first, first + 9)), new_tokens=1))
    answer(driver, plain(4, tuple(range(200, 209)), new_tokens=1))  # one page too many
    before = driver.scheduler.memory.cached_tokens
    answer(driver, plain(5, tuple(range(9)), new_tokens=1))
    assert driver.scheduler.memory.cached_tokens - before == 8
    answer(driver, plain(6, tuple(range(100, 109)), new_tokens=1))
    assert driver.scheduler.memory.cached_tokens - before == 8 + 4, "of 2 just the end had to go"


def test_prompts_that_are_scored_are_computed_whole() -> None:
    driver = Driver(Scheduler(2, 40, 4, 32))
    r = plain(1, tuple(range(10)))
    answer(driver, r)
    again = replace(r, prompt=replace(r.prompt, id="again"), params=replace(r.params, prompt_logprobs=True))
    answer(driver, again)
    assert driver.prompt_writes.total() == 20 and driver.scheduler.memory.cached_tokens == 0


@pytest.mark.parametrize("swap", [None, lambda rows: True])
def test_when_pages_run_out_the_youngest_gives_way_and_goes_on_later(swap) -> None:
    """Three samples of 20 tokens, pages for all of one and half of the others."""
    scheduler = Scheduler(slots=4, num_pages=11, page_size=4, max_rows=8, swap_pays=swap)
    driver = Driver(scheduler)
    r = plain(1, tuple(range(5)), samples=3, new_tokens=20)
    scheduler.submit(r)
    driver.run()
    check_answers([r], driver.finished)
    assert [s.index for s in driver.finished] == [0, 1, 2], "the oldest is never stopped"
    assert scheduler.num_preemptions > 0
    again = Counter(row.kind for work in driver.passes for row in work)["again"]
    assert (scheduler.num_swaps > 0) == (again == 0) == (swap is not None)
    driver.check_all_free()


def test_drafts_that_are_right_save_passes_and_wrong_ones_cost_nothing_else() -> None:
    r = plain(1, (1, 2, 3), samples=2, new_tokens=13)
    passes, finished = [], []
    for speculation in ({}, speculating(1), speculating(4)):
        driver = Driver(Scheduler(4, 40, 4, 64, **speculation))
        driver.scheduler.submit(r)
        driver.run()
        check_answers([r], driver.finished)
        counts = driver.scheduler.take_counts()
        assert (counts["accepted"] > 0) == bool(speculation) and counts["accepted"] <= counts["drafted"]
        driver.check_all_free()
        passes.append(len(driver.passes))
        finished.append([s.tokens for s in driver.finished])
    assert passes[0] == 13 and passes[0] > passes[1] > passes[2]


def test_a_full_queue_refuses_and_names_its_bound() -> None:
    scheduler = Scheduler(1, 40, 4, 16, max_waiting=5)
    driver = Driver(scheduler)
    scheduler.submit(plain(1, (1, 2), samples=9))  # nothing waits: accepted, however large
    with pytest.raises(QueueFullError, match="'p2': 9 samples wait to be started, 1 more exceed the bound of 5"):
        scheduler.submit(plain(2, (1, 2)))
    assert not scheduler.holds("p2") and scheduler.load == 9
    while scheduler.num_waiting > 2:
        driver.one_pass()
    scheduler.submit(plain(3, (1, 2), samples=3))
    with pytest.raises(QueueFullError, match="5 samples wait"):
        scheduler.submit(plain(4, (1, 2)))
    driver.run()
    assert len(driver.finished) == 12


class SchedulerMachine(RuleBasedStateMachine):
    """Anything in any order; the books are balanced after every step, and everything is answered once."""

    @initialize(
        slots=st.integers(1, 4),
        pages=st.integers(9, 16),
        more=st.sampled_from([0, 2, 9]),
        drafts=st.sampled_from([0, 1, 3]),
        swap=st.sampled_from([None, lambda rows: True, lambda rows: rows % 2 == 1]),
    )
    def make(self, slots: int, pages: int, more: int, drafts: int, swap) -> None:
        speculation = speculating(drafts) if drafts else {}
        self.driver = Driver(Scheduler(slots, pages, 3, slots + more, max_waiting=8, swap_pays=swap, **speculation))
        self.requests: dict[str, Request] = {}
        self.aborted: list[Sequence] = []

    @rule(
        alike=st.integers(0, 3),
        length=st.integers(1, 10),
        samples=st.integers(1, 4),
        new=st.integers(1, 12),
        stops=st.sampled_from([STOPS, frozenset()]),
    )
    def submit(self, alike: int, length: int, samples: int, new: int, stops: frozenset[int]) -> None:
        """Prompts of three kinds, each the beginning of the longer ones of its kind; and later turns."""
        number, scheduler = len(self.requests), self.driver.scheduler
        r = request(number, length, samples, new, stops)
        ids = tuple(100 * alike + i for i in range(length))
        if alike == 3 and self.driver.finished:  # another turn
            ids = (*self.driver.finished[length % len(self.driver.finished)].ids, 900)
        r = replace(r, prompt=replace(r.prompt, ids=ids))
        refused = pages_needed(r, 3) > scheduler.memory.pages.num_pages
        full = scheduler.num_waiting and scheduler.num_waiting + samples > 8
        try:
            scheduler.submit(r)
        except (CapacityError, QueueFullError) as error:
            assert refused if isinstance(error, CapacityError) else full
            return
        assert not refused and not full
        self.requests[r.prompt.id] = r

    @precondition(lambda self: self.driver.scheduler.busy)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.driver.scheduler.busy:
                self.driver.one_pass()

    @precondition(lambda self: self.driver.scheduler.busy)
    @rule()
    def a_pass_fails(self) -> None:
        """Scheduled, copied out and in at most, never recorded."""
        work = self.driver.plan()
        for swap in work.save:
            swap.sequence.saved = [self.driver.pool[row] for row in swap.rows.tolist()]

    @precondition(lambda self: self.driver.scheduler.busy)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.driver.scheduler.groups)))
        before = {s.index for s in self.driver.finished if s.group.request.prompt.id == name}
        cancelled = self.driver.scheduler.abort(name)
        every = set(range(len(self.requests[name].seeds)))
        assert {s.index for s in cancelled} == every - before and not self.driver.scheduler.holds(name)
        self.aborted += cancelled
        self.driver.lanes.retire()

    @precondition(lambda self: self.driver.scheduler.running)
    @rule()
    def preempt(self) -> None:
        scheduler = self.driver.scheduler
        self.driver.plan()  # forgets copies that the pass before wanted
        if scheduler.running:
            scheduler._preempt(scheduler.running[-1])

    @rule()
    def new_version(self) -> None:
        self.driver.install()

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()
            under_way = {g.lane for g in self.driver.scheduler.groups.values()}
            assert {*under_way, self.driver.lanes.newest.number} == self.driver.lanes._lanes.keys()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for seq in self.aborted:
            wanted = expected_tokens(seq.group.request.seeds[seq.index], seq.group.request.params)
            assert seq.tokens == wanted[: len(seq.tokens)] and len(seq.tokens) < len(wanted)
        gone = {(s.group.request.prompt.id, s.index) for s in self.aborted}
        done = {(s.group.request.prompt.id, s.index): s.tokens for s in self.driver.finished}
        wanted = {(n, i): expected_tokens(seed, r.params) for n, r in self.requests.items()
                  for i, seed in enumerate(r.seeds)}  # fmt: skip
        assert len(done) == len(self.driver.finished) and len(gone) == len(self.aborted)
        assert done == {key: tokens for key, tokens in wanted.items() if key not in gone}
        self.driver.check_all_free()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
