"""Senders are balanced to the optimum: against exhaustive twins, and down to whole rows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.sync import balance, lanes
from lockstep.sync.balance import Groups, Shares
from lockstep.sync.cells import Sets

DEVICES = 6


def subsets(devices: int):
    return (set(x) for size in range(1, devices + 1) for x in combinations(range(devices), size))


def least_load(demands: list[tuple[set[int], float]]) -> float:
    """By Hall's theorem: the most that some devices must send among themselves, over their number; tried for all."""
    return max(sum(size for owners, size in demands if owners <= some) / len(some) for some in subsets(DEVICES))


def of(cells: list[tuple[set[int], set[int], int, int]]) -> lanes.Cells:
    """From (holders, needers, rows, bytes of a row)."""
    sets = Sets()
    number = [[sets.number(np.array(sorted(x))) for x in (a, b)] for a, b, _, _ in cells]
    holders, needers = np.array(number, np.int64).reshape(-1, 2).T
    rows, row_bytes = np.array([cell[2:] for cell in cells], np.int64).reshape(-1, 2).T
    pairs, group = np.unique(holders * 1000 + needers, return_inverse=True)
    members, start = sets.flat()
    volume = np.bincount(group, rows * row_bytes, len(pairs))
    groups = Groups(pairs // 1000, pairs % 1000, volume, sets.sizes, members, start, DEVICES)
    zero = np.zeros(len(rows), np.int64)
    return lanes.Cells(
        zero, np.arange(len(rows)), rows, row_bytes, holders, needers, sets.sizes[needers], group, groups
    )


@st.composite
def cells(draw):
    found = []
    for _ in range(draw(st.integers(1, 7))):
        order = draw(st.permutations(range(DEVICES)))
        split = draw(st.integers(1, DEVICES - 1))
        some = draw(st.integers(1, split))
        found.append(
            (set(order[:some]), set(order[split:]), draw(st.integers(1, 40)), draw(st.sampled_from([1, 3, 8])))
        )
    return found


def loads(made: lanes.Lanes, made_of: lanes.Cells) -> np.ndarray:
    size = (made.stop - made.start) * made_of.row_bytes[made.cell]
    copies = made_of.copies[made.cell]
    by = made.relay >= 0
    sent = np.bincount(made.sender, size * np.where(by, 1, copies), DEVICES)
    return sent + np.bincount(made.relay[by], (size * (copies - 1))[by], DEVICES)


@settings(max_examples=60)
@given(cells())
def test_direct_senders_reach_the_optimum(some):
    shares = balance.direct(of(some).groups)
    wanted = least_load([(a, n * size * len(b)) for a, b, n, size in some])
    assert shares.load == pytest.approx(wanted, rel=1e-6)
    assert shares.price is not None and shares.price.sum() == pytest.approx(1)
    assert of(some).groups.floor(shares.price, relays=False) == pytest.approx(wanted, rel=1e-6)
    busiest = np.bincount(of(some).groups.members, shares.send, DEVICES).max()
    assert busiest == pytest.approx(wanted, rel=1e-6)


@settings(max_examples=40)
@given(cells())
def test_relays_reach_the_optimum(some):
    """The first copy of a cell comes from those who have it, each other one from them or from who needs it."""
    groups = of(some).groups
    first = [(a, n * size) for a, b, n, size in some]
    others = [(a | b, n * size * (len(b) - 1)) for a, b, n, size in some]
    wanted = least_load(first + others)
    shares = balance.joint(groups, 0.0)
    assert shares.load == pytest.approx(wanted, rel=1e-5)
    if shares.price is not None:  # by prices that prove it
        assert groups.floor(shares.price, relays=True) == pytest.approx(wanted, rel=1e-5)
    assert balance.first_copies(groups)[0] <= wanted * (1 + 1e-6)
    assert wanted <= balance.direct(groups).load * (1 + 1e-6)
    # With a receiver busier than that, nothing is relayed that need not be.
    floor = float(groups.received().max())
    eased = balance.joint(groups, floor)
    assert eased.load <= max(floor, wanted) * (1 + 1e-5)
    assert eased.relay.sum() <= shares.relay.sum() + 1e-5 * (1 + shares.relay.sum())
    if balance.direct(groups).load <= floor:
        assert eased.relay.sum() == pytest.approx(0, abs=1e-4)


@settings(max_examples=60)
@given(cells(), st.sampled_from(["direct", "joint", "all"]))
def test_whole_rows_follow_the_shares(some, way):
    made_of = of(some)
    groups = made_of.groups
    shares = {
        "direct": lambda: balance.direct(groups),
        "joint": lambda: balance.joint(groups, 0.0),
        "all": lambda: balance._all_relayed(groups),
    }[way]()
    made = lanes.make(made_of, shares)
    for number, (holders, needers, rows, _) in enumerate(some):
        mine = np.flatnonzero(made.cell == number)
        assert made.start[mine].tolist() == [0, *made.stop[mine][:-1].tolist()] and made.stop[mine][-1] == rows
        assert (made.stop[mine] > made.start[mine]).all()
        assert set(made.sender[mine].tolist()) <= holders
        assert set(made.relay[mine].tolist()) <= needers | {-1}
        assert len(needers) > 1 or (made.relay[mine] == -1).all()
    assert (loads(made, made_of) <= shares.load + granularity(made_of, shares)).all()


def granularity(made_of: lanes.Cells, shares: Shares) -> np.ndarray:
    """What a device may send beyond its share because rows are whole: one row, to all that need it, per set that it
    is a holder in; likewise per set that it relays in, and one for where a group of cells is cut in direct and relayed.
    """
    groups = made_of.groups
    row = made_of.row_bytes * made_of.copies
    widest = np.zeros(len(groups.sizes))
    np.maximum.at(widest, made_of.holders, row)
    if shares.relayed.any():
        np.maximum.at(widest, made_of.needers, row)
    cut = ((shares.relayed > 0) & (shares.relayed < groups.volume)).sum()
    return groups.spread(widest) + row.max() * cut


def test_everything_relayed_is_the_fallback_beyond_many_groups(monkeypatch):
    some = [({0}, {2, 3, 4, 5}, 32, 8), ({1}, {2, 3, 4, 5}, 32, 8)]
    monkeypatch.setattr(balance, "MOST_GROUPS", 1)
    shares = balance.joint(of(some).groups, 0.0)
    assert shares.relayed.tolist() == [256, 256]
    # Each holder gives out its 256 bytes once; 4 relays pass on 3/4 of the 512 that all of them need: 384 each.
    assert shares.load == pytest.approx(384)
    assert shares.relay.sum() == pytest.approx(4 * 384)


def test_what_all_hold_is_sent_by_who_has_least_to_do():
    # Device 0 has 80 bytes of its own to send, device 1 has 20; what both hold, 60 bytes, makes it 80 and 80.
    made_of = of([({0}, {4}, 80, 1), ({1}, {4}, 20, 1), ({0, 1}, {5}, 60, 1)])
    shares = balance.direct(made_of.groups)
    assert shares.load == pytest.approx(80)
    assert loads(lanes.make(made_of, shares), made_of).tolist() == [80, 80, 0, 0, 0, 0]
