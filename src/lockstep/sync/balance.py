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

from dataclasses import dataclass, replace

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

    def floor(self, price: np.ndarray, relays: bool) -> float:
        """Bytes that the busiest sender gives out at least, by prices [devices] that add up to 1: what all copies cost
        when each comes from the cheapest who could send it. With the duals of (1) or (2), their optimum."""
        least = np.full(len(self.sizes), np.inf)
        np.minimum.at(least, np.repeat(np.arange(len(self.sizes)), self.sizes), price[self.members])
        first = least[self.holders]
        other = np.minimum(first, least[self.needers]) if relays else first
        return float((self.volume * (first + (self.copies - 1) * other)).sum())


@dataclass(frozen=True)
class Shares:
    """send, relay: [flat members] bytes that a device gives out as a holder, and as a relay, of what its set has.
    relayed: [groups] bytes that go by relay. load: the busiest sender's bytes. price: [devices] by which
    `Groups.floor` shows that it could not be less; None where that was not asked."""

    send: np.ndarray
    relay: np.ndarray
    relayed: np.ndarray
    load: float
    price: np.ndarray | None


def direct(groups: Groups) -> Shares:
    """The optimum of (1): nobody passes anything on."""
    send, load, price = min_max(groups, groups.by_holders(groups.volume * groups.copies))
    return Shares(send, np.zeros_like(send), np.zeros(len(groups.volume)), load, price)


def first_copies(groups: Groups) -> tuple[float, np.ndarray]:
    """Bytes that the busiest sender must give out whatever is relayed, because every cell leaves its holders once and
    all that is sent is sent by somebody; and the prices that show it."""
    _, _, price = min_max(groups, groups.by_holders(groups.volume))
    able = np.zeros(groups.devices)
    for number in np.unique(np.concatenate([groups.holders, groups.needers])):
        able[groups.members[groups.start[number] : groups.start[number + 1]]] = 1.0
    return best_floor(groups, [price, able / max(1.0, able.sum())])


def best_floor(groups: Groups, prices: list[np.ndarray]) -> tuple[float, np.ndarray]:
    """The greatest bound, with relays, that one of these proves."""
    floors = [groups.floor(price, relays=True) for price in prices]
    return max(floors), prices[floors.index(max(floors))]


def min_max(groups: Groups, demand: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """demand: [sets] bytes. Returns [flat members] bytes, the least possible maximum over devices, and the prices
    [devices] that show it."""
    equal = np.repeat(demand / np.maximum(groups.sizes, 1), groups.sizes)
    load = np.bincount(groups.members, equal, groups.devices)
    bound, price = _component_bound(groups, demand)
    if load.max(initial=0) <= bound * (1 + SLACK):
        return equal, float(load.max(initial=0)), price
    used = np.flatnonzero(np.repeat(demand > 0, groups.sizes))
    of_set = np.repeat(np.arange(len(groups.sizes)), groups.sizes)[used]
    sets, row = np.unique(of_set, return_inverse=True)
    count, unit = len(used), float(demand.sum()) / groups.devices
    ones = np.ones(count)
    found = _solve(
        np.r_[np.zeros(count), 1.0],
        coo_array((ones, (row, np.arange(count))), (len(sets), count + 1)).tocsr(),
        demand[sets] / unit,
        _load_rows(groups.members[used], groups.devices, count),
        np.zeros(groups.devices),
        np.zeros(count + 1),
        np.full(count + 1, np.inf),
    )
    assert found is not None, "the balance of senders has no solution"
    solution, price = found
    send = np.zeros(len(groups.members))
    send[used] = solution[:-1] * unit
    return send, float(solution[-1] * unit), price


def joint(groups: Groups, floor: float) -> Shares:
    """With relays: of the solutions that load nobody beyond `floor` bytes (what the busiest receiver takes in anyway),
    or, where there is none, beyond the optimum of (2), one that relays least. `load` is then at most that optimum or
    `floor`; beyond MOST_GROUPS, where every cell is relayed, it may be more."""
    if len(groups.volume) > MOST_GROUPS:
        return _all_relayed(groups)
    program = _Joint(groups)
    if first_copies(groups)[0] <= floor * (1 + SLACK) and (found := program.relay_least(floor)) is not None:
        return found
    load, price = program.least_load()
    found = program.relay_least(load)
    assert found is not None, f"no shares within {load} bytes, yet that is the optimum"
    return replace(found, price=price)


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
    both, load, _ = min_max(twice, np.r_[first, passed])
    count = len(groups.members)
    return Shares(both[:count], both[count:], np.where(several, groups.volume, 0.0), load, None)


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

    def least_load(self) -> tuple[float, np.ndarray]:
        """The optimum, in bytes, and the prices of devices that show it."""
        found = self._solve(np.r_[np.zeros(self.columns - 1), 1.0], np.inf)
        assert found is not None, "the balance of senders has no solution"
        return float(found[0][-1] * self.unit), found[1]

    def relay_least(self, load: float) -> Shares | None:
        """Shares within a load of so many bytes, with the least relayed; None if there are none."""
        nx, ne, groups = len(self.x), len(self.e), self.groups
        cost = np.r_[np.zeros(nx), np.ones(ne), np.zeros(self.columns - nx - ne)]
        found = self._solve(cost, load * (1 + SLACK) / self.unit)
        if found is None:
            return None
        solution, _ = found
        send, relay = np.zeros(len(groups.members)), np.zeros(len(groups.members))
        send[self.x], relay[self.e] = solution[:nx] * self.unit, solution[nx : nx + ne] * self.unit
        copies, volume = groups.copies[self.several], groups.volume[self.several]
        relayed = np.zeros(len(groups.volume))
        relayed[self.several] = (volume * copies - solution[nx + ne : -1] * self.unit) / (copies - 1)
        busiest = np.bincount(groups.members, send + relay, groups.devices).max()
        return Shares(send, relay, np.clip(relayed, 0, groups.volume), float(busiest), None)

    def _solve(self, cost: np.ndarray, cap: float) -> tuple[np.ndarray, np.ndarray] | None:
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
) -> tuple[np.ndarray, np.ndarray] | None:
    """The program's solution, and the duals of its loads, made to add up to 1; None if it has none."""
    found = linprog(cost, loads, limit, equal, right, np.stack([low, high], axis=1), method="highs")
    assert found.status in (0, 2), f"the balance of senders was not found: {found.message}"
    if found.status != 0:
        return None
    price = np.maximum(-found.ineqlin.marginals, 0)
    return np.maximum(found.x, 0), price / max(price.sum(), np.finfo(float).tiny)


def _component_bound(groups: Groups, demand: np.ndarray) -> tuple[float, np.ndarray]:
    """The most that devices which share sets have to send, over their number; and the prices that show it."""
    used = np.repeat(demand > 0, groups.sizes)
    of_set = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    size = len(groups.sizes) + groups.devices
    graph = coo_array(
        (np.ones(int(used.sum())), (of_set[used], len(groups.sizes) + groups.members[used])), (size, size)
    )
    _, label = connected_components(graph, directed=False)
    total = np.bincount(label[: len(groups.sizes)], demand, size)
    devices = np.bincount(label[len(groups.sizes) :], minlength=size)
    each = total / np.maximum(devices, 1)
    at = int(each.argmax()) if size else -1
    mine = label[len(groups.sizes) :] == at
    return float(each.max(initial=0)), mine / max(1, devices[at] if size else 1)
