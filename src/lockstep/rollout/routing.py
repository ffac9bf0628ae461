"""Which device a request goes to. It decides where rows are computed, never what comes out. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.work import Request

SLACK = 8  # a device may be this fraction (one in so many) of its slots busier, and still be chosen for what it knows


def best_device(shards: Sequence[Scheduler], request: Request) -> Scheduler:
    """Among the devices whose queue has room, none of which has more than slots / 8 samples (at least one) more to do
    than the least busy: the one whose prefix cache holds most of the prompt, then the least busy, then the first.

    Where no queue has room: the least busy, which will say so. All devices run passes of one shape, as large as the
    busiest needs, so a cache hit is worth a small imbalance and no more.
    """
    open_ = [s for s in shards if s.accepts(request)] or list(shards)
    least = min(s.load for s in open_)
    near = [s for s in open_ if s.load - least <= max(1, s.slots // SLACK)]
    return max(near, key=lambda s: (s.known_positions(request), -s.load))
