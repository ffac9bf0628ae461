"""What a plan claims of all its transfers together, against what the certificate summed up over them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.sync.alike import Alike
from lockstep.sync.bundle_proof import Flow
from lockstep.sync.columns import Fail
from lockstep.sync.leaf_proof import LeafProof
from lockstep.sync.plan import SyncPlan
from lockstep.sync.regions import Tally, rows_of, sums
from lockstep.sync.send_floor import floor_bytes

_CLOSE = 1e-6  # relative; what floats of seconds may be apart


class Totals:
    """Sums over all transfers, and the claims that they decide. examined: check -> words."""

    def __init__(self, plan: SyncPlan, fail: Fail) -> None:
        self.plan, self.fail = plan, fail
        self.examined: dict[str, str] = {}
        devices = len(plan.devices)
        self.links = np.zeros((devices, devices), np.int64)
        self._dense: dict[str, np.ndarray] = {}  # of bundles: by sender and receiver, by round and device
        self.pairs = Tally()  # bytes by sender * devices + receiver
        self.needed = np.zeros(devices, np.int64)
        self.new = np.zeros(devices, np.int64)
        self.out, self.into = Tally(), Tally()  # bytes by round * devices + device

    def demand(self, path: str, needed: Mapping[int, int], new_bytes: Mapping[int, int]) -> None:
        """What destination devices must get over links, and the bytes of their new buffers."""
        devices = self.plan.devices
        for total, part in ((self.needed, needed), (self.new, new_bytes)):
            rows = rows_of(devices, np.array(list(part), np.int64))
            if (rows < 0).any():
                self.fail("links", f"{path}: the plan's devices lack {[d for d in part if d not in devices][:5]}")
                continue
            total[rows] += np.array(list(part.values()), np.int64)

    def add(self, path: str, proof: LeafProof) -> None:
        self.demand(path, proof.needed, proof.new_bytes)
        if proof.traffic is None or not len(proof.traffic.links[0]):
            return
        devices = self.plan.devices
        sender, receiver, size = proof.traffic.links
        sender, receiver = rows_of(devices, sender), rows_of(devices, receiver)
        known = (sender >= 0) & (receiver >= 0)
        if not known.all():
            self.fail("links", f"{path}: a transfer is between devices that the plan does not list")
        key = sender[known] * len(devices) + receiver[known]
        self.pairs.add(key, size[known])
        for busy, (number, device, size) in ((self.out, proof.traffic.sent), (self.into, proof.traffic.received)):
            row = rows_of(devices, device)
            busy.add((number * len(devices) + row)[row >= 0], size[row >= 0])

    def flow(self, flow: Flow) -> None:
        """The traffic of a bundle."""
        for name in ("links", "sent", "received"):
            table = getattr(flow, name)
            so_far = self._dense.get(name, table[:0])
            if len(so_far) < len(table):
                so_far = np.concatenate([so_far, np.zeros((len(table) - len(so_far), table.shape[1]), np.int64)])
            so_far[: len(table)] += table
            self._dense[name] = so_far

    def _settle(self) -> None:
        for name, tally in (("links", self.pairs), ("sent", self.out), ("received", self.into)):
            flat = self._dense.get(name, np.zeros(0, np.int64)).reshape(-1)
            some = np.flatnonzero(flat)
            tally.add(some, flat[some])

    def totals(self) -> None:
        plan, count = self.plan, len(self.plan.devices)
        if list(plan.devices) != sorted(set(plan.devices)):
            self.fail("links", "the plan's devices are not increasing numbers")
        self._settle()
        key, size = self.pairs.total()
        self.links = links = sums(key, size, count * count).reshape(count, count)
        for name, claimed, true in (
            ("links", plan.links, links),
            ("sent", plan.sent, links.sum(axis=1)),
            ("received", plan.received, links.sum(axis=0)),
        ):
            if claimed.shape != true.shape:
                self.fail("links", f"{name} has shape {claimed.shape}; expected {true.shape}")
            elif (claimed != true).any():
                at = np.argwhere(claimed != true)[0].tolist()
                where = ", ".join(str(plan.devices[i]) for i in at)
                self.fail("links", f"{name} of {where} is {claimed[tuple(at)]} in the plan; it is {true[tuple(at)]}")
        self.examined["links"] = f"{int((links > 0).sum())} links, {int(links.sum())} bytes"
        if plan.new_bytes != self.new.max(initial=0):
            self.fail("new_bytes", f"{plan.new_bytes} in the plan; {self.new.max(initial=0)} on the fullest device")
        self.examined["new_bytes"] = f"{plan.new_bytes} bytes"
        self.rounds = [busy.total() for busy in (self.out, self.into)]
        peak = max((int(values.max(initial=0)) for _, values in self.rounds), default=0)
        if peak != plan.peak_staging_bytes:
            self.fail("staging", f"the peak is {plan.peak_staging_bytes} in the plan; it is {peak}")
        if peak > plan.staging_bytes:
            self.fail("staging", f"a device moves {peak} bytes in one round; the budget is {plan.staging_bytes}")
        self.examined["staging"] = f"at most {peak} of {plan.staging_bytes} bytes a round, in {plan.rounds} rounds"

    def bounds(self, classes: Sequence[tuple[Alike, int]]) -> None:
        plan, bounds = self.plan, self.plan.bounds
        rates = [plan.link.link_gbps, *([plan.link.bisection_gbps] if plan.link.bisection_gbps is not None else [])]
        if not all(rate > 0 and math.isfinite(rate) for rate in rates):
            return self.fail("bounds", f"links of {rates} Gbit/s carry nothing")
        per_byte = 8e-9 / plan.link.link_gbps
        links = self.links
        busiest = int(max(links.sum(axis=0).max(initial=0), links.sum(axis=1).max(initial=0)))
        receive = int(self.needed.max(initial=0)) * per_byte
        cross = 0.0 if plan.link.bisection_gbps is None else int(self.needed.sum()) * 8e-9 / plan.link.bisection_gbps
        for name, claimed, true in (("receive", bounds.receive_s, receive), ("bisection", bounds.bisection_s, cross)):
            if not math.isclose(claimed, true, rel_tol=_CLOSE, abs_tol=1e-15):
                self.fail("bounds", f"the {name} bound is {claimed} s in the plan; it is {true} s")
        sent = int(links.sum(axis=1).max(initial=0)) * per_byte
        if not 0 <= bounds.send_s <= sent * (1 + _CLOSE):
            self.fail("bounds", f"the send bound is {bounds.send_s} s, yet the busiest sender needs {sent} s")
        self._send_bound(classes, per_byte)
        floor = max(bounds.receive_s, bounds.send_s)
        ratio = max(1.0, busiest * per_byte / floor) if busiest and floor > 0 else 1.0
        if not math.isclose(plan.load_over_bound, ratio, rel_tol=_CLOSE) or (busiest and floor <= 0):
            self.fail("bounds", f"load over bound is {plan.load_over_bound} in the plan; it is {ratio}")
        seconds = self._seconds(per_byte)
        if not plan.seconds >= max(seconds, bounds.seconds) * (1 - _CLOSE):
            self.fail(
                "bounds", f"{plan.seconds} s are predicted; the rounds take {seconds} s, bounds {bounds.seconds} s"
            )
        self.examined["bounds"] = f"the busiest link end carries {ratio:.4f} of what no plan can avoid"

    def _send_bound(self, classes: Sequence[tuple[Alike, int]], per_byte: float) -> None:
        """No plan sends less: by the prices that the plan gives for it."""
        bounds, count = self.plan.bounds, len(self.plan.devices)
        listed = set(self.plan.devices)
        if bounds.send_s == 0 or not all(
            listed.issuperset(some) for one, _ in classes for some in (one.devices, one.place.layout.mesh.devices)
        ):
            return  # a device that is not listed is a failure of its own
        price = np.array(bounds.send_prices, np.float64)
        if price.shape != (count,) or not (
            np.isfinite(price).all() and (price >= 0).all() and price.sum() <= 1 + _CLOSE
        ):
            return self.fail("bounds", f"the send bound of {bounds.send_s} s is given without a price for every device")
        floor = floor_bytes(classes, price, self.plan.devices, self.plan.relayed) * per_byte
        if not bounds.send_s <= floor * (1 + _CLOSE):
            self.fail("bounds", f"the send bound is {bounds.send_s} s; the prices given for it prove {floor} s")

    def _seconds(self, per_byte: float) -> float:
        """Of all rounds, each as long as its busiest link end, or the bisection, takes; latency included."""
        count, link = len(self.plan.devices), self.plan.link
        longest: dict[int, float] = defaultdict(float)
        for key, size in self.rounds:
            number = key // count
            for at, most in zip(*_grouped_max(number, size), strict=True):
                longest[int(at)] = max(longest[int(at)], int(most) * per_byte)
        if link.bisection_gbps is not None and len(self.rounds[0][0]):
            key, size = self.rounds[0]
            rounds, inverse = np.unique(key // count, return_inverse=True)
            for at, total in zip(rounds, sums(inverse, size, len(rounds)), strict=True):
                longest[int(at)] = max(longest[int(at)], int(total) * 8e-9 / link.bisection_gbps)
        return sum(longest.values()) + len(longest) * link.latency_s


def _grouped_max(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each key once, and the greatest of its values; keys are increasing."""
    distinct, first = np.unique(keys, return_index=True)
    return distinct, np.maximum.reduceat(values, first) if len(first) else values
