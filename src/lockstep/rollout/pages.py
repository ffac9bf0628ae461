"""The page pool: which cache pages are free, who holds the others, and which are only remembered. Pure Python; the
arrays live in the engine.

A page is *used* while a group or a sequence holds it, *cached* while nobody does but the prefix cache remembers what is
in it, else *free*. Only cached and free pages can be had: `available = free + cached`.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """`num_pages` pages, each with a count of holders and of entries of the prefix cache that name it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._entries = [0] * num_pages
        self._cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that nobody holds: free, or cached and so free once the cache forgets them."""
        return len(self._free) + self._cached

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(free, cached, used, total), from the books; `check_integrity` proves them."""
        return len(self._free), self._cached, self.num_pages - self.num_available, self.num_pages

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def take(self, count: int) -> list[int]:
        """`count` pages, each held once. The caller has checked `num_free`."""
        assert count <= len(self._free), (count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each page, which somebody holds or the cache remembers."""
        for page in pages:
            assert self._holders[page] or self._entries[page], f"page {page} is free and cannot be shared"
            if not self._holders[page]:
                self._cached -= 1
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer; a page without holders is cached where the cache names it, else free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} released more often than held"
            self._holders[page] -= 1
            if not self._holders[page]:
                if self._entries[page]:
                    self._cached += 1
                else:
                    self._free.append(page)

    def remember(self, pages: Iterable[int]) -> None:
        """One more entry of the cache names each of these pages, which are held or cached."""
        for page in pages:
            assert self._holders[page] or self._entries[page], f"page {page} is free; nothing in it can be remembered"
            self._entries[page] += 1

    def forget(self, pages: Iterable[int]) -> None:
        """One entry fewer; a page that neither an entry nor a holder names is free."""
        for page in pages:
            assert self._entries[page] > 0, f"page {page} forgotten more often than remembered"
            self._entries[page] -= 1
            if not self._entries[page] and not self._holders[page]:
                self._cached -= 1
                self._free.append(page)

    def check_integrity(self) -> tuple[int, int, int, int]:
        """(free, cached, used, total); asserts free + cached + used = total and that no page is two of them."""
        used = sum(1 for n in self._holders if n)
        cached = sum(1 for n, e in zip(self._holders, self._entries, strict=True) if e and not n)
        assert len(set(self._free)) == len(self._free), "a page is in the free list twice"
        assert all(not self._holders[p] for p in self._free), "a held page is in the free list"
        assert all(not self._entries[p] for p in self._free), "a cached page is in the free list"
        counts = len(self._free), cached, used, self.num_pages
        assert sum(counts[:3]) == self.num_pages and cached == self._cached, (*counts, self._cached)
        return counts
