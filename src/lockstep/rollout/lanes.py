"""Policies that one engine serves side by side, each in a *lane* of its own.

What is submitted while a policy is the newest runs under it to its end, whatever is installed meanwhile. A forward pass
is of one lane; lanes take turns. A lane is told apart by its install, never by what its version is called. When nobody
is under way on a lane that is not the newest it is retired: its weights are dropped, what is cached of it is forgotten.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from lockstep.cluster.programs import SplitWeights
from lockstep.models.decoder import Rows
from lockstep.rollout.scheduler import Scheduler
from lockstep.types import PolicyVersion

KEPT = 256  # retired lanes that `take_retired` has not been asked for


@dataclass(eq=False)
class Lane:
    """One installed policy. number: of the install, from 0. turn: of steps, as `Lanes.next` counts them, when it may go
    on."""

    number: int
    version: PolicyVersion
    weights: SplitWeights
    turn: int = 0


class RetiredLane(NamedTuple):
    """weight_bytes: of its weights on this process's devices, replicas included, those buffers that no lane left in the
    engine serves. Who else holds them (a trainer on the same devices, the caller of `install`) the engine cannot know:
    then they are freed when these let go too. pages: cache pages that were freed, of all devices."""

    version: PolicyVersion
    weight_bytes: int
    pages: int


class Lanes:
    """Lanes of the engine whose devices' schedulers are `shards`, oldest first; the newest gets what is submitted."""

    def __init__(self, shards: Sequence[Scheduler]) -> None:
        self._shards = shards
        self._lanes: dict[int, Lane] = {}
        self._numbers = itertools.count()
        self._retired: deque[RetiredLane] = deque(maxlen=KEPT)
        self._turn = 0  # of the last pass
        self.ran = -1  # number of the last pass's lane

    def __len__(self) -> int:
        return len(self._lanes)

    def __getitem__(self, number: int) -> Lane:
        return self._lanes[number]

    @property
    def newest(self) -> Lane | None:
        return next(reversed(self._lanes.values()), None)

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        return tuple(lane.version for lane in self._lanes.values())

    def add(self, version: PolicyVersion, weights: SplitWeights) -> None:
        """A lane for what is submitted from now on."""
        lane = Lane(next(self._numbers), version, weights)
        self._lanes[lane.number] = lane
        for shard in self._shards:
            shard.lane = lane.number
        self.retire()

    def next(self) -> Lane:
        """The lane of the next pass. Those in which a sample runs on any device share the steps evenly; one that had
        nothing to run meanwhile gets none for it (start-time fair queueing, Goyal et al. 1996, with equal weights)."""
        found = list(self._lanes)
        if len(found) > 1:
            found = sorted({seq.group.lane for shard in self._shards for seq in shard.running})
            assert found, "busy, but nothing to run: the requests under way would wait for ever"
        lane = min((self._lanes[number] for number in found), key=lambda lane: max(lane.turn, self._turn))
        self._turn = lane.turn = max(lane.turn, self._turn)
        self.ran = lane.number
        return lane

    def took(self, steps: int) -> None:
        """The pass of the lane that `next` chose is of so many steps."""
        self._lanes[self.ran].turn += steps

    def retire(self) -> None:
        """Let go of lanes that nobody is under way on, but for the newest."""
        if len(self._lanes) < 2:
            return
        needed = {group.lane for shard in self._shards for group in shard.groups.values()} | {max(self._lanes)}
        for number in self._lanes.keys() - needed:
            lane = self._lanes.pop(number)
            freed = weight_bytes(lane.weights, (other.weights for other in self._lanes.values()))
            pages = sum(shard.retire(number) for shard in self._shards)
            self._retired.append(RetiredLane(lane.version, freed, pages))

    def take_retired(self) -> list[RetiredLane]:
        """What was retired since this was last called, oldest first, of more than KEPT the newest."""
        taken = list(self._retired)
        self._retired.clear()
        return taken

    def check_rows(self, lane: Lane, rows: Rows) -> None:
        """Assert that a pass (on the host, laid out for all devices) reads and writes only what is `lane`'s."""
        n = len(rows.tokens) // len(self._shards)
        for d, shard in enumerate(self._shards):
            own, size = slice(d * n, (d + 1) * n), shard.memory.page_size
            written_under = np.append(shard.memory.written_under, lane.number)  # the spare row's page is everybody's
            for named in (rows.read[own], rows.write[own]):
                assert (written_under[named // size] == lane.number).all(), (
                    f"a pass of {lane.version} would touch keys and values of another policy"
                )


def _buffers(leaf: jax.Array) -> dict[tuple[int, int], int]:
    """(device, address) -> bytes."""
    if leaf.is_deleted():
        return {}
    return {(s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in leaf.addressable_shards}


def _leaves(weights: SplitWeights) -> dict[int, jax.Array]:
    return {id(leaf): leaf for leaf in jax.tree.leaves((weights.embed, weights.layers, weights.head))}


def weight_bytes(weights: SplitWeights, others: Iterable[SplitWeights]) -> int:
    """Bytes of buffers that are in `weights` and not in any of the others."""
    served = {key: leaf for other in others for key, leaf in _leaves(other).items()}
    mine = [leaf for key, leaf in _leaves(weights).items() if key not in served]
    kept = {key for leaf in served.values() for key in _buffers(leaf)} if mine else set()
    return sum({key: n for leaf in mine for key, n in _buffers(leaf).items() if key not in kept}.values())
