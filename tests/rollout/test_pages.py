"""The page pool against a model of it: who holds what, what is remembered, and that the three kinds are the whole."""

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
        self.entries: list[list[int]] = []

    def held(self) -> Counter[int]:
        return Counter(page for pages in self.holdings for page in pages)

    def remembered(self) -> Counter[int]:
        return Counter(page for pages in self.entries for page in pages)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        before = self.held() + self.remembered()
        pages = self.pool.take(data.draw(st.integers(0, self.pool.num_free)))
        assert len(set(pages)) == len(pages), "one page twice"
        assert all(0 <= page < self.pool.num_pages and not before[page] for page in pages), "a page in use was given"
        self.holdings.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holdings + self.entries:
            pages = list(data.draw(st.sampled_from(self.holdings + self.entries)))
            self.pool.hold(pages)
            self.holdings.append(pages)

    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        if self.holdings + self.entries:
            pages = list(data.draw(st.sampled_from(self.holdings + self.entries)))
            self.pool.remember(pages)
            self.entries.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holdings:
            self.pool.release(self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1))))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.entries:
            self.pool.forget(self.entries.pop(data.draw(st.integers(0, len(self.entries) - 1))))

    @rule()
    def more_than_there_is(self) -> None:
        with pytest.raises(AssertionError):
            self.pool.take(self.pool.num_free + 1)

    @rule(page=st.integers(0, 11))
    def what_nobody_has(self, page: int) -> None:
        if page < self.pool.num_pages:
            held, remembered = self.held()[page], self.remembered()[page]
            wrong = [] if held else [self.pool.release]
            wrong += [] if remembered else [self.pool.forget]
            wrong += [] if held or remembered else [self.pool.hold, self.pool.remember]
            for call in wrong:
                with pytest.raises(AssertionError, match=f"page {page}"):
                    call([page])

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        used, cached = len(self.held()), len(self.remembered().keys() - self.held().keys())
        free = self.pool.num_pages - used - cached
        assert self.pool.check_integrity() == (free, cached, used, self.pool.num_pages)
        assert self.pool.num_free == free and self.pool.num_available == free + cached


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
        (lambda pool: pool._free.pop(), r"\(1, 0, 1, 3, 0\)"),
        (lambda pool: pool._entries.__setitem__(2, 1), "cached page is in the free list"),
    ],
)
def test_integrity_check_finds_damage(damage, complaint) -> None:
    pool = PagePool(3)
    assert pool.take(1) == [0]
    damage(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity()
