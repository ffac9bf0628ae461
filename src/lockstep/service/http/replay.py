"""Idempotency keys in memory: the answer that was given is given again. Lost with the process; a journal can replace
it."""

from __future__ import annotations

from collections import OrderedDict

from lockstep.service.controls import KeyConflict, Stored


class MemoryReplay:
    """Keeps the newest answers, up to so many bytes in all; one of more than answer_bytes is not kept."""

    def __init__(self, total_bytes: int = 64 << 20, answer_bytes: int = 4 << 20):
        self._total_bytes, self._answer_bytes, self._held = total_bytes, answer_bytes, 0
        self._under_way: dict[str, str] = {}
        self._kept: OrderedDict[str, tuple[str, Stored]] = OrderedDict()

    def begin(self, key: str, digest: str) -> Stored | None:
        known = self._under_way.get(key)
        if known is None and key in self._kept:
            known = self._kept[key][0]
        if known is not None and known != digest:
            raise KeyConflict(f"idempotency key {key!r} was used for another request; use a new key", False)
        if key in self._under_way:
            raise KeyConflict(f"the request with idempotency key {key!r} is still under way; ask again later", True)
        if key in self._kept:
            return self._kept[key][1]
        self._under_way[key] = digest
        return None

    def keep(self, key: str, answer: Stored) -> None:
        digest = self._under_way.pop(key)
        if len(answer.body) > self._answer_bytes:
            return
        self._kept[key] = digest, answer
        self._held += len(answer.body)
        while self._held > self._total_bytes:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._held -= len(oldest.body)

    def release(self, key: str) -> None:
        self._under_way.pop(key, None)
