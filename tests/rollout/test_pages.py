"""The page pool against a model of it: who holds what, and that free + held is always the whole."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lockstep.rollout.pages import PagePool


class PoolMachine(RuleBasedStateMachine):
    """holdings: what each holder may release, oldest first."""

    @initialize(num_pages=st.integers(0, 12))
    def make(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.holdings: list[list[int]] = []

    def held(self) -> Counter[int]:
        return Counter(page for pages in self.holdings for page in pages)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        before = self.held()
        pages = self.pool.take(data.draw(st.integers(0, self.pool.num_free)))
        assert len(set(pages)) == len(pages), "one page twice"
        assert all(0 <= page < self.pool.num_pages and not before[page] for page in pages), "a held page was handed out"
        self.holdings.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holdings:
            pages = list(data.draw(st.sampled_from(self.holdings)))
            self.pool.hold(pages)
            self.holdings.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holdings:
            self.pool.release(self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1))))

    @rule()
    def more_than_there_is(self) -> None:
        with pytest.raises(AssertionError):
            self.pool.take(self.pool.num_free + 1)

    @rule(page=st.integers(0, 11))
    def what_nobody_holds(self, page: int) -> None:
        if page < self.pool.num_pages and not self.held()[page]:
            with pytest.raises(AssertionError, match=f"page {page}"):
                self.pool.release([page])
            with pytest.raises(AssertionError, match=f"page {page}"):
                self.pool.hold([page])

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = len(self.held())
        assert self.pool.check_integrity() == (self.pool.num_pages - held, held, self.pool.num_pages)
        assert self.pool.num_free == self.pool.num_pages - held


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(3)
    prompt = pool.take(2)
    pool.hold(prompt)
    pool.release(prompt)
    assert pool.num_free == 1
    pool.release(prompt)
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "twice"),
        (lambda pool: pool._free.append(0), "held page is in the free list"),
        (lambda pool: pool._free.pop(), r"\(1, 1, 3\)"),
    ],
)
def test_integrity_check_finds_damage(damage, complaint) -> None:
    pool = PagePool(3)
    assert pool.take(1) == [0]
    damage(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity()
