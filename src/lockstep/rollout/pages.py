"""The page pool: which cache pages are free, and who holds the others. Pure Python; the arrays live in the engine."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """`num_pages` pages with reference counts. A page is held once for each sequence that may read it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, each held once. The caller has checked `num_free`."""
        assert count <= len(self._free), (count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each page (another sample reads the same prompt)."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer; a page without holders is free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} released more often than held"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def check_integrity(self) -> tuple[int, int, int]:
        """(free, held, total); asserts free + held = total and that no page is both."""
        held = sum(1 for n in self._holders if n)
        assert len(set(self._free)) == len(self._free), "a page is in the free list twice"
        assert all(not self._holders[p] for p in self._free), "a held page is in the free list"
        assert len(self._free) + held == self.num_pages, (len(self._free), held, self.num_pages)
        return len(self._free), held, self.num_pages
