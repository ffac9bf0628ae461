"""The prefix cache against a model of it: the set of runs of ids that it may know."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lockstep.rollout.pages import PagePool
from lockstep.rollout.prefix import PrefixCache

SIZE = 2
identities = st.sampled_from(["v1", "v2"])
runs = st.lists(st.integers(0, 2), max_size=9).map(tuple)


def whole_pages(ids: tuple[int, ...], limit: int | None = None) -> list[tuple[int, ...]]:
    stop = len(ids) if limit is None else min(limit, len(ids))
    return [ids[:n] for n in range(SIZE, stop + 1, SIZE)]


class CacheMachine(RuleBasedStateMachine):
    """content: what is in each pool row, as the run of ids up to it; an entry's rows must hold its own run."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.cache = PrefixCache(self.pool, SIZE)
        self.known: dict[str, set[tuple[int, ...]]] = {"v1": set(), "v2": set()}
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.held: list[list[int]] = []

    @rule(identity=identities, ids=runs)
    def compute_and_remember(self, identity: str, ids: tuple[int, ...]) -> None:
        count = -(-len(ids) // SIZE)
        if self.pool.num_available < count:
            return
        if self.pool.num_free < count:
            self.evict(count - self.pool.num_free)
        pages = self.pool.take(count)
        rows = np.asarray([p * SIZE + i for p in pages for i in range(SIZE)], np.int32)[: len(ids)]
        self.content |= {int(row): (identity, ids[: i + 1]) for i, row in enumerate(rows)}
        self.cache.insert(identity, ids, rows)
        self.known[identity] |= set(whole_pages(ids))
        self.held.append(pages)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(identity=identities, ids=runs, limit=st.integers(0, 9))
    def match(self, identity: str, ids: tuple[int, ...], limit: int) -> None:
        found = self.cache.match(identity, ids, limit)
        wanted = [run for run in whole_pages(ids, limit) if run in self.known[identity]]
        assert [e.ids for e in found] == [run[-SIZE:] for run in wanted]
        for entry, run in zip(found, wanted, strict=True):
            here = [self.content[int(row)] for row in entry.rows]
            assert here == [(identity, run[: len(run) - SIZE + 1 + i]) for i in range(SIZE)]

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        free, available = self.pool.num_free, self.pool.num_available
        self.cache.evict(count)
        assert self.pool.num_available == available
        assert self.pool.num_free >= min(free + count, available), "a cached page could not be had"
        # What was forgotten is the model's to find out; never the beginning of what is still known.
        for identity, known in self.known.items():
            known &= {run for run in known if len(self.cache.match(identity, run, len(run))) == len(run) // SIZE}

    @rule(identity=identities)
    def retire(self, identity: str) -> None:
        self.cache.retire(identity)
        self.known[identity] = set()

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check_integrity()
        assert self.cache.check_integrity() == sum(map(len, self.known.values()))
        named = {i: {row // SIZE for row, (of, run) in self.content.items() if of == i} for i in self.known}
        assert all(pages <= named[identity] for identity, pages in self.cache.pages().items())


TestPrefixCache = CacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def remember(cache: PrefixCache, ids: tuple[int, ...]) -> list[int]:
    pages = cache.pool.take(len(ids) // SIZE)
    cache.insert("v1", ids, np.asarray([p * SIZE + i for p in pages for i in range(SIZE)], np.int32))
    return pages


def test_pages_that_nobody_reads_go_first_then_the_least_recently_used() -> None:
    cache = PrefixCache(PagePool(6), SIZE)
    read, old, new = remember(cache, (1, 1)), remember(cache, (2, 2)), remember(cache, (3, 3))
    cache.pool.release(old)
    cache.pool.release(new)
    cache.match("v1", (2, 2), 2)
    cache.evict(1)
    assert [bool(cache.match("v1", ids, 2)) for ids in ((1, 1), (2, 2), (3, 3))] == [True, True, False]
    cache.evict(1)
    assert [bool(cache.match("v1", ids, 2)) for ids in ((1, 1), (2, 2), (3, 3))] == [True, False, False]
    cache.evict(1)
    assert not cache.match("v1", (1, 1), 2) and cache.pool.is_held(read[0]), "forgotten, and still its holder's"


def test_what_is_known_stays_as_it_is() -> None:
    cache = PrefixCache(PagePool(6), SIZE)
    first, second = remember(cache, (1, 2)), remember(cache, (1, 2, 3, 4))
    entries = cache.match("v1", (1, 2, 3, 4), 4)
    assert [e.pages for e in entries] == [tuple(first), (second[1],)]
    cache.pool.release(second)
    assert cache.pool.check_integrity() == (4, 1, 1, 6)


@pytest.mark.parametrize("damage", ["pool", "tree", "parent"])
def test_integrity_check_finds_damage(damage: str) -> None:
    cache = PrefixCache(PagePool(6), SIZE)
    pages = remember(cache, (1, 2, 3, 4))
    if damage == "pool":
        cache.pool.forget(pages[:1])
    elif damage == "tree":
        cache.num_entries += 1
    else:
        cache.match("v1", (1, 2, 3, 4), 4)[1].parent = None
    with pytest.raises(AssertionError):
        cache.check_integrity()
