"""Which pool pages hold what a group or a sequence reads: taken when needed, remembered when given back. Pure Python.

A prompt's pages are its group's, a completion's are its sequence's. The first own page of a completion continues the
positions of its prompt's last page (its first `P % page_size` rows stay unused), so that every later own page is one
page of positions, which the prefix cache can hand on.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lockstep.rollout.pages import PagePool
from lockstep.rollout.prefix import PrefixCache
from lockstep.rollout.work import GroupWork, Request, Sequence, no_rows

NOBODY = -1  # no lane


def _limit(request: Request) -> int:
    """Prompt positions that may come from the cache: not the last, whose hidden state the first token is drawn from,
    and none where every position is to be scored."""
    return 0 if request.params.prompt_logprobs else len(request.prompt.ids) - 1


class Memory:
    """Pages of one device. written_under [num_pages]: lane whose keys and values are in each, the last that took it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = PagePool(num_pages)
        self.cache = PrefixCache(self.pages, page_size)
        self.written_under = np.full(num_pages, NOBODY, np.int32)
        self.cached_tokens = 0  # found instead of computed

    def prompt_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def own_pages(self, prompt_length: int, tokens: int) -> int:
        """Pages of so many completion tokens."""
        return -(-(prompt_length % self.page_size + tokens) // self.page_size) if tokens > 0 else 0

    def _take(self, lane: int, count: int) -> list[int]:
        if self.pages.num_free < count:
            self.cache.evict(count - self.pages.num_free)
        pages = self.pages.take(count)
        self.written_under[pages] = lane
        return pages

    def _rows_of(self, pages: Iterable[int], first: int) -> np.ndarray:
        """Rows of `pages` for positions from `first` on, which need not be the start of its page."""
        starts = np.asarray(list(pages), np.int32)[:, None] * self.page_size
        return (starts + np.arange(self.page_size, dtype=np.int32)).reshape(-1)[first % self.page_size :]

    def _pages_of(self, rows: np.ndarray) -> list[int]:
        return list(dict.fromkeys((rows // self.page_size).tolist()))

    def _known(self, lane: int, ids: tuple[int, ...], limit: int) -> tuple[np.ndarray, int]:
        """(rows, whole pages of positions) that the cache has of `ids` under a lane, no position >= limit."""
        entries = self.cache.match(lane, ids, limit)
        pages = [page for e in entries for page in e.pages]
        assert (self.written_under[pages] == lane).all(), "keys and values of another policy would be read"
        return np.concatenate([no_rows(), *(e.rows for e in entries)]), len(entries)

    def known_positions(self, lane: int, request: Request) -> int:
        """How many positions of a request's prompt the cache holds now; looking does not count as use."""
        return self.page_size * self.cache.count(lane, request.prompt.ids, _limit(request))

    def retire(self, lane: int) -> int:
        """Forget what is cached of a lane; returns how many pages that freed."""
        before = self.pages.num_free
        self.cache.retire(lane)
        return self.pages.num_free - before

    # -- prompts -----------------------------------------------------------------------------------------------------

    def start_group(self, group: GroupWork, spare: int) -> bool:
        """Rows for a prompt: those that the cache has, and new ones. False, and nothing taken, if not `spare` pages are
        left then."""
        ids, total = group.request.prompt.ids, self.prompt_pages(group.prompt_length)
        rows, known = self._known(group.lane, ids, _limit(group.request))
        held = self._pages_of(rows)
        self.pages.hold(held)
        if self.pages.num_available < total - known + spare:
            # A page of positions may lie on two pool pages: what is too much with the cache may fit without.
            self.pages.release(held)
            rows, known, held = no_rows(), 0, []
            if self.pages.num_available < total + spare:
                return False
        pages = self._take(group.lane, total - known)
        group.held, group.prefilled = held + pages, len(rows)
        group.rows = np.concatenate([rows, self._rows_of(pages, 0)])[: len(ids)]
        self.cached_tokens += len(rows)
        return True

    def is_coming(self, group: GroupWork, others: Iterable[GroupWork]) -> bool:
        """Whether one of `others` computes the very ids that come next after what the cache has of the group's prompt:
        then waiting for it saves computing them twice."""
        ids, limit = group.request.prompt.ids, _limit(group.request)
        stop = (self._known(group.lane, ids, limit)[1] + 1) * self.page_size
        return stop <= limit and any(
            g.lane == group.lane and g.request.prompt.ids[:stop] == ids[:stop] for g in others if not g.ready
        )

    def filled(self, group: GroupWork, stop: int) -> None:
        """The first `stop` positions of a prompt are in the pool."""
        group.prefilled = stop
        self.cache.insert(group.lane, group.request.prompt.ids[:stop], group.rows)

    def stop_group(self, group: GroupWork) -> None:
        self.pages.release(group.held)
        group.held, group.rows, group.prefilled = [], no_rows(), 0

    # -- completions -------------------------------------------------------------------------------------------------

    def extend(self, seq: Sequence, count: int = 1) -> None:
        """`count` more pages for a sequence. The caller has made sure that they can be had."""
        if not len(seq.rows):
            seq.rows = seq.group.rows
        pages = self._take(seq.group.lane, count)
        seq.own += pages
        seq.rows = np.concatenate([seq.rows, self._rows_of(pages, len(seq.rows))])

    def trim(self, seq: Sequence) -> None:
        """Give back pages beyond those that the sequence's tokens need: taken for drafts that were not accepted."""
        first = seq.group.prompt_length
        needed = self.own_pages(first, len(seq.tokens))
        if len(seq.own) > needed:
            self.pages.release(seq.own[needed:])
            del seq.own[needed:]
            seq.rows = seq.rows[: (first // self.page_size + needed) * self.page_size]

    def restore(self, seq: Sequence) -> None:
        """Pages for all tokens of a sequence that was preempted; what the cache still has of them need not be computed
        again, nor what was saved on the host."""
        first, rows = seq.group.prompt_length, no_rows()
        pages = self.own_pages(first, len(seq.tokens))
        if seq.saved is None:
            rows = self._known(seq.group.lane, seq.ids, first + len(seq.tokens) - 1)[0][first:]
            held = self._pages_of(rows)
            self.pages.hold(held)
            if self.pages.num_available < pages - self.own_pages(first, len(rows)):
                # A page of positions that lies on two pool pages costs one more; then the rest is short of one.
                self.pages.release(held)
                rows, held = no_rows(), []
            self.cached_tokens += len(rows)
            seq.own, seq.computed = held, len(rows)
        seq.rows = np.concatenate([seq.group.rows, rows])
        if missing := pages - self.own_pages(first, len(rows)):
            self.extend(seq, missing)
        if seq.saved is not None:
            seq.computed = len(seq.saved)

    def remember(self, seq: Sequence) -> None:
        """Whole pages of a sequence, prompt and completion, may be found from now on."""
        if seq.computed:
            known = seq.group.prompt_length + seq.computed
            self.cache.insert(seq.group.lane, seq.ids[:known], seq.rows)

    def stop(self, seq: Sequence) -> None:
        """Give back what a sequence holds."""
        self.pages.release(seq.own)
        seq.own, seq.rows, seq.computed = [], no_rows(), 0

    def check_integrity(self, groups: Iterable[GroupWork], sequences: Iterable[Sequence]) -> tuple[int, int, int, int]:
        """(free, cached, used, total) pages; asserts that pool and cache agree, that exactly these groups and
        sequences hold the used ones, and that what is held or cached was written under the holder's own lane."""
        counts = self.pages.check_integrity()
        self.cache.check_integrity()
        holders = [0] * self.pages.num_pages
        for lane, held in (*((g.lane, g.held) for g in groups), *((s.group.lane, s.own) for s in sequences)):
            assert (self.written_under[held] == lane).all(), "pages of another policy are held"
            for page in held:
                holders[page] += 1
        for identity, named in self.cache.pages().items():
            assert (self.written_under[list(named)] == identity).all(), "pages of another policy are cached"
        assert holders == self.pages._holders, "pages are held by nobody who is under way, or not by those who are"
        return counts
