"""The prefix cache: a radix tree over pages of token ids, so that what was computed once is found again. Pure Python.

An entry stands for one page of positions, `[k * page_size, (k + 1) * page_size)`, after a given run of ids, and names
the pool rows that hold their keys and values. Rows of one entry usually are one pool page; where a completion starts in
the middle of a page, they are the end of its prompt's last page and the beginning of the completion's first.

Keys and values depend on the weights, so there is one tree for each *identity* (installed policy); entries of another
identity cannot be reached, and `retire` gives their pages back at once.

Eviction: least recently used first, leaves only, those that nobody reads before those that somebody does. (An entry in
use may be forgotten: its pages stay with whoever holds them.) So every cached page can be had.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.rollout.pages import PagePool


@dataclass(eq=False)
class Entry:
    """One page of positions. ids: its token ids; rows [page_size] int32: pool row of each; used: when, by a counter."""

    ids: tuple[int, ...]
    rows: np.ndarray
    pages: tuple[int, ...]
    parent: Entry | None
    used: int = 0
    children: dict[tuple[int, ...], Entry] = field(default_factory=dict)


class PrefixCache:
    """One tree per identity over the pages of one pool."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        self._roots: dict[Hashable, Entry] = {}
        self._clock = itertools.count(1)
        self._order = itertools.count()
        self._leaves: list[tuple[int, int, Entry]] = []  # a heap; what no longer is a leaf or was used since is skipped
        self.num_entries = 0

    def match(self, identity: Hashable, ids: Sequence[int], limit: int) -> list[Entry]:
        """Entries for the longest run of whole pages of `ids` that is known, no position >= limit among them."""
        at, path, now = self._roots.get(identity), [], next(self._clock)
        for page in self._pages(ids, limit):
            at = at.children.get(page) if at is not None else None
            if at is None:
                break
            at.used = now
            path.append(at)
        if path and not path[-1].children:
            self._push(path[-1])
        return path

    def count(self, identity: Hashable, ids: Sequence[int], limit: int) -> int:
        """How many entries `match` would find. Changes nothing, the order of eviction included."""
        at, found = self._roots.get(identity), 0
        for page in self._pages(ids, limit):
            at = at.children.get(page) if at is not None else None
            if at is None:
                break
            found += 1
        return found

    def insert(self, identity: Hashable, ids: Sequence[int], rows: np.ndarray) -> None:
        """Remember every whole page of `ids`; rows: pool row of each position, held by the caller. What is known
        already stays as it is."""
        at = self._roots.get(identity)
        if at is None:
            at = self._roots[identity] = Entry((), np.zeros(0, np.int32), (), None)
        now, start = next(self._clock), 0
        for page in self._pages(ids, len(ids)):
            child = at.children.get(page)
            if child is None:
                own = rows[start : start + self.page_size].copy()
                pages = tuple(dict.fromkeys((own // self.page_size).tolist()))
                child = at.children[page] = Entry(page, own, pages, at)
                self.pool.remember(pages)
                self.num_entries += 1
            child.used = now
            at, start = child, start + self.page_size
        if at.parent is not None and not at.children:
            self._push(at)

    def _pages(self, ids: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
        size = self.page_size
        return (tuple(ids[i : i + size]) for i in range(0, min(limit, len(ids)) - size + 1, size))

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self._leaves, (entry.used, next(self._order), entry))
        if len(self._leaves) > 64 + 4 * self.num_entries:
            live = {id(e): (e.used, n, e) for used, n, e in self._leaves if self._is_current(used, e)}
            self._leaves = list(live.values())
            heapq.heapify(self._leaves)

    @staticmethod
    def _is_current(used: int, entry: Entry) -> bool:
        return entry.used == used and not entry.children and entry.parent is not None

    def evict(self, count: int) -> None:
        """Forget entries until `count` more pages are free, or none is left."""
        wanted = self.pool.num_free + count
        for in_use in (False, True):
            kept = []
            while self._leaves and self.pool.num_free < wanted:
                item = heapq.heappop(self._leaves)
                entry = item[2]
                if not self._is_current(item[0], entry):
                    continue
                if not in_use and all(map(self.pool.is_held, entry.pages)):
                    kept.append(item)
                else:
                    self._forget(entry)
            for item in kept:
                heapq.heappush(self._leaves, item)

    def _forget(self, entry: Entry) -> None:
        parent = entry.parent
        assert parent is not None and not entry.children
        del parent.children[entry.ids]
        entry.parent = None
        self.pool.forget(entry.pages)
        self.num_entries -= 1
        if parent.parent is not None and not parent.children:
            self._push(parent)

    def retire(self, identity: Hashable) -> None:
        """Forget everything of an identity that nobody will ask for any more."""
        root = self._roots.pop(identity, None)
        todo = [] if root is None else list(root.children.values())
        while todo:
            entry = todo.pop()
            todo += entry.children.values()
            entry.parent, entry.children = None, {}
            self.pool.forget(entry.pages)
            self.num_entries -= 1

    def pages(self) -> dict[Hashable, set[int]]:
        """By identity the pages that its entries name."""
        found: dict[Hashable, set[int]] = {}
        for identity, root in self._roots.items():
            todo, named = [*root.children.values()], found.setdefault(identity, set())
            while todo:
                entry = todo.pop()
                todo += entry.children.values()
                named.update(entry.pages)
        return found

    def check_integrity(self) -> int:
        """Number of entries; asserts that the tree and the pool's count of entries agree, page by page."""
        counts, found = [0] * self.pool.num_pages, 0
        todo = [(root, entry) for root in self._roots.values() for entry in root.children.values()]
        while todo:
            parent, entry = todo.pop()
            assert entry.parent is parent and len(entry.rows) == len(entry.ids) == self.page_size
            assert set(entry.pages) == set((entry.rows // self.page_size).tolist())
            todo += [(entry, child) for child in entry.children.values()]
            found += 1
            for page in entry.pages:
                counts[page] += 1
        assert found == self.num_entries and counts == self.pool._entries, "the tree and the pool disagree"
        return found
