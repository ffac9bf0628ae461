"""Who sends how much: loads balanced to the optimum, over all leaves together.

Only totals matter, so cells are first summed by who has them and who needs them. With x[H, h] the bytes that device h
sends of what the set H of holders has to give,

    minimise L   such that   sum_h x[H, h] = demand[H],   sum_H x[H, d] <= L for every device d                     (1)

is a linear program with one variable per member of a set. Where equal shares already reach a bound that no plan can
beat (everything that a connected group of devices has to send, over their number) it is not needed.

With relays, of a group g of cells (holders H, needers N, r = |N| > 1, V bytes) D bytes in V..rV leave the holders, each
cell at least once; the rest is passed on by those who got it. That any such totals can be carried out with each byte
passed on at most once follows from taking, of the cells of N, E[N, j] / (r - 1) bytes through needer j:

    sum_h x[H, h] = sum_{g of H} D[g],   sum_j E[N, j] = sum_{g of N} (r V[g] - D[g]),   loads of x and E <= L      (2)

Floats decide shares only; `lanes` cuts whole rows at them. Solver: HiGHS (Huangfu and Hall 2018,
doi:10.1007/s12532-017-0130-5) through scipy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

MOST_GROUPS = 60_000  # of cells, in the joint program; beyond, every cell is relayed or none
SLACK = 1e-7  # relative; what the solver's tolerances leave open


@dataclass(frozen=True)
class Groups:
    """Cells summed by owners, [groups] arrays: holders, needers (set numbers), volume (bytes of one copy). sizes
    [sets], members, start: the sets, flat, as `cells.Sets` gives them. Groups without needers are left out."""

    holders: np.ndarray
    needers: np.ndarray
    volume: np.ndarray
    sizes: np.ndarray
    members: np.ndarray
    start: np.ndarray
    devices: int

    @property
    def copies(self) -> np.ndarray:
        return self.sizes[self.needers]

    def received(self) -> np.ndarray:
        """[devices] bytes that each must take in."""
        return self.spread(np.bincount(self.needers, self.volume, len(self.sizes)))

    def spread(self, per_set: np.ndarray) -> np.ndarray:
        """[devices] sums of per-set numbers over the sets that a device is in."""
        return np.bincount(self.members, np.repeat(per_set, self.sizes), self.devices)

    def by_holders(self, per_group: np.ndarray) -> np.ndarray:
        """[sets] sums over the groups of each set of holders."""
        return np.bincount(self.holders, per_group, len(self.sizes))


@dataclass(frozen=True)
class Shares:
    """send, relay: [flat members] bytes that a device gives out as a holder, and as a relay, of what its set has.
    relayed: [groups] bytes that go by relay. load: the busiest sender's bytes."""

    send: np.ndarray
    relay: np.ndarray
    relayed: np.ndarray
    load: float


def direct(groups: Groups) -> Shares:
    """The optimum of (1): nobody passes anything on."""
    send, load = min_max(groups, groups.by_holders(groups.volume * groups.copies))
    return Shares(send, np.zeros_like(send), np.zeros(len(groups.volume)), load)


def first_copies(groups: Groups) -> float:
    """Bytes that the busiest sender must give out whatever is relayed: every cell leaves its holders once; and the
    average over all devices that can send."""
    _, load = min_max(groups, groups.by_holders(groups.volume))
    able = np.zeros(groups.devices, bool)
    for number in np.unique(np.concatenate([groups.holders, groups.needers])):
        able[groups.members[groups.start[number] : groups.start[number + 1]]] = True
    return max(load, float((groups.volume * groups.copies).sum()) / max(1, int(able.sum())))


def min_max(groups: Groups, demand: np.ndarray) -> tuple[np.ndarray, float]:
    """demand: [sets] bytes. Returns [flat members] bytes and the least possible maximum over devices."""
    equal = np.repeat(demand / np.maximum(groups.sizes, 1), groups.sizes)
    load = np.bincount(groups.members, equal, groups.devices)
    if load.max(initial=0) <= _component_bound(groups, demand) * (1 + SLACK):
        return equal, float(load.max(initial=0))
    used = np.flatnonzero(np.repeat(demand > 0, groups.sizes))
    of_set = np.repeat(np.arange(len(groups.sizes)), groups.sizes)[used]
    sets, row = np.unique(of_set, return_inverse=True)
    count, unit = len(used), float(demand.sum()) / groups.devices
    ones = np.ones(count)
    solution = _solve(
        np.r_[np.zeros(count), 1.0],
        coo_array((ones, (row, np.arange(count))), (len(sets), count + 1)).tocsr(),
        demand[sets] / unit,
        _load_rows(groups.members[used], groups.devices, count),
        np.zeros(groups.devices),
        np.zeros(count + 1),
        np.full(count + 1, np.inf),
    )
    assert solution is not None, "the balance of senders has no solution"
    send = np.zeros(len(groups.members))
    send[used] = solution[:-1] * unit
    return send, float(solution[-1] * unit)


def joint(groups: Groups, floor: float) -> Shares:
    """With relays: of the solutions that load nobody beyond `floor` bytes (what the busiest receiver takes in anyway),
    or, where there is none, beyond the optimum of (2), one that relays least. `load` is then at most that optimum or
    `floor`; beyond MOST_GROUPS, where every cell is relayed, it may be more."""
    if len(groups.volume) > MOST_GROUPS:
        return _all_relayed(groups)
    program = _Joint(groups)
    if first_copies(groups) <= floor * (1 + SLACK) and (found := program.relay_least(floor)) is not None:
        return found
    load = program.least_load()
    found = program.relay_least(load)
    assert found is not None, f"no shares within {load} bytes, yet that is the optimum"
    return found


def _all_relayed(groups: Groups) -> Shares:
    """Every cell leaves its holders once: holders' first copies and relays' others, as sets of their own in (1)."""
    several = groups.copies > 1
    first = groups.by_holders(groups.volume)
    passed = np.bincount(groups.needers, groups.volume * (groups.copies - 1), len(groups.sizes))
    twice = Groups(
        groups.holders,
        groups.needers,
        groups.volume,
        np.tile(groups.sizes, 2),
        np.tile(groups.members, 2),
        np.r_[groups.start[:-1], groups.start + groups.start[-1]],
        groups.devices,
    )
    both, load = min_max(twice, np.r_[first, passed])
    count = len(groups.members)
    return Shares(both[:count], both[count:], np.where(several, groups.volume, 0.0), load)


class _Joint:
    """Program (2). Columns: x of holders, E of needers, D of groups with several needers, L; in `unit` bytes."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        copies, volume = groups.copies, groups.volume
        self.several = np.flatnonzero(copies > 1)
        self.unit = float((volume * copies).sum()) / groups.devices
        of_set = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
        holds, passes = np.zeros(len(groups.sizes), bool), np.zeros(len(groups.sizes), bool)
        holds[groups.holders] = True
        passes[groups.needers[self.several]] = True
        self.x, self.e = np.flatnonzero(holds[of_set]), np.flatnonzero(passes[of_set])
        holder_row, needer_row = np.cumsum(holds) - 1, holds.sum() + np.cumsum(passes) - 1
        nx, ne, nd = len(self.x), len(self.e), len(self.several)
        self.columns = nx + ne + nd + 1
        d = nx + ne + np.arange(nd)
        rows = [
            holder_row[of_set[self.x]],
            needer_row[of_set[self.e]],
            holder_row[groups.holders[self.several]],
            needer_row[groups.needers[self.several]],
        ]
        values = [np.ones(nx), np.ones(ne), -np.ones(nd), np.ones(nd)]
        columns = [np.arange(nx), nx + np.arange(ne), d, d]
        shape = (int(holds.sum() + passes.sum()), self.columns)
        self.equal = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape).tocsr()
        single = np.where(copies == 1, volume, 0.0)
        several = np.where(copies > 1, volume * copies, 0.0)
        passed = np.bincount(groups.needers, several, len(groups.sizes))
        self.right = np.r_[groups.by_holders(single)[holds], passed[passes]] / self.unit
        self.loads = _load_rows(groups.members[np.r_[self.x, self.e]], groups.devices, self.columns - 1)
        low, high = volume[self.several] / self.unit, (volume * copies)[self.several] / self.unit
        self.low = np.r_[np.zeros(nx + ne), low, 0.0]
        self.high = np.r_[np.full(nx + ne, np.inf), high, np.inf]

    def least_load(self) -> float:
        """The optimum, in bytes."""
        found = self._solve(np.r_[np.zeros(self.columns - 1), 1.0], np.inf)
        assert found is not None, "the balance of senders has no solution"
        return float(found[-1] * self.unit)

    def relay_least(self, load: float) -> Shares | None:
        """Shares within a load of so many bytes, with the least relayed; None if there are none."""
        nx, ne, groups = len(self.x), len(self.e), self.groups
        cost = np.r_[np.zeros(nx), np.ones(ne), np.zeros(self.columns - nx - ne)]
        solution = self._solve(cost, load * (1 + SLACK) / self.unit)
        if solution is None:
            return None
        send, relay = np.zeros(len(groups.members)), np.zeros(len(groups.members))
        send[self.x], relay[self.e] = solution[:nx] * self.unit, solution[nx : nx + ne] * self.unit
        copies, volume = groups.copies[self.several], groups.volume[self.several]
        relayed = np.zeros(len(groups.volume))
        relayed[self.several] = (volume * copies - solution[nx + ne : -1] * self.unit) / (copies - 1)
        busiest = np.bincount(groups.members, send + relay, groups.devices).max()
        return Shares(send, relay, np.clip(relayed, 0, groups.volume), float(busiest))

    def _solve(self, cost: np.ndarray, cap: float) -> np.ndarray | None:
        high = np.r_[self.high[:-1], cap]
        return _solve(cost, self.equal, self.right, self.loads, np.zeros(self.groups.devices), self.low, high)


def _load_rows(device: np.ndarray, devices: int, columns: int) -> csr_array:
    """Rows `what a device sends - L`, for variables 0..len(device)-1 of these devices and L in column `columns`."""
    count = len(device)
    row = np.r_[device, np.arange(devices)]
    column = np.r_[np.arange(count), np.full(devices, columns)]
    return coo_array((np.r_[np.ones(count), -np.ones(devices)], (row, column)), (devices, columns + 1)).tocsr()


def _solve(
    cost: np.ndarray,
    equal: csr_array,
    right: np.ndarray,
    loads: csr_array,
    limit: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> np.ndarray | None:
    """The program's solution; None if it has none."""
    found = linprog(cost, loads, limit, equal, right, np.stack([low, high], axis=1), method="highs")
    assert found.status in (0, 2), f"the balance of senders was not found: {found.message}"
    return np.maximum(found.x, 0) if found.status == 0 else None


def _component_bound(groups: Groups, demand: np.ndarray) -> float:
    """The most that devices which share sets have to send, over their number."""
    used = np.repeat(demand > 0, groups.sizes)
    of_set = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    size = len(groups.sizes) + groups.devices
    graph = coo_array(
        (np.ones(int(used.sum())), (of_set[used], len(groups.sizes) + groups.members[used])), (size, size)
    )
    _, label = connected_components(graph, directed=False)
    total = np.bincount(label[: len(groups.sizes)], demand, size)
    devices = np.bincount(label[len(groups.sizes) :], minlength=size)
    return float((total / np.maximum(devices, 1)).max(initial=0))
