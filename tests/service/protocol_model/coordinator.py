"""What the coordinator decides. Each rule that a planted fault breaks is a method of its own."""

from __future__ import annotations

from protocol_model.states import ENDED, NONE, RUNNING, WAITING, Bounds, Draft, Group, Replica, Request, State


class Coordinator:
    """Reads and writes what is believed. What its decisions make true is the environment's (`begins`, `stop`, ...)."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.whole = (1 << bounds.shards) - 1

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_admit(self, d: Draft, i: int) -> list[Draft]:
        d.request(i, status=WAITING, minimum=d.published if i in self.bounds.fresh else 0)
        return self.dispatch(d)

    def on_cancel(self, d: Draft, i: int) -> list[Draft]:
        d.cancels -= 1
        q = d.requests[i]
        if q.status == WAITING:
            self.end(d, i, "aborted")
            return self.dispatch(d)
        d.request(i, stopping=True)
        if not q.again:
            self.stop(d, i)
        return [d]

    def on_shown(self, d: Draft, r: int, i: int) -> list[Draft]:
        q, g = d.requests[i], self.bounds.groups[i]
        if self.expects(d, r, i) and not q.again:
            group = d.groups[g]
            d.request(i, shown=True)
            d.groups[g] = group._replace(settled=True, seen=group.seen | 1 << self.computes(d.replicas[r], i))
        return [d]

    def on_finished(self, d: Draft, r: int, i: int) -> list[Draft]:
        computed = self.computes(d.replicas[r], i)
        self.done(d, r, i)
        return self.answered(d, r, i, computed)

    def answered(self, d: Draft, r: int, i: int, computed: int) -> list[Draft]:
        if not self.expects(d, r, i):
            return [d]
        g = self.bounds.groups[i]
        d.groups[g] = d.groups[g]._replace(settled=True, seen=d.groups[g].seen | 1 << computed)
        d.request(i, computed=computed)
        self.end(d, i, "finished")
        return self.dispatch(d)

    def on_cancelled(self, d: Draft, r: int, i: int) -> list[Draft]:
        self.done(d, r, i)
        if not self.expects(d, r, i):
            return [d]
        if d.requests[i].stopping:
            self.end(d, i, "aborted")
        else:
            self.back(d, i)
        return self.dispatch(d)

    def on_refused(self, d: Draft, r: int, i: int) -> list[Draft]:
        d.faults -= 1
        self.done(d, r, i)
        if not self.expects(d, r, i):
            return [d]
        self.end(d, i, "aborted" if d.requests[i].stopping else "failed")
        return self.dispatch(d)

    def on_late(self, d: Draft, r: int, i: int) -> list[Draft]:
        d.wire = ()
        return [d]

    def expects(self, d: Draft, r: int, i: int) -> bool:
        """An answer counts if it is of the replica where the request runs."""
        return d.requests[i].status == RUNNING and d.requests[i].at == r

    def end(self, d: Draft, i: int, outcome: str) -> None:
        version = d.requests[i].version
        self.leave(d, i)
        ends = d.requests[i].ends + 1
        d.request(i, status=ENDED, version=version, stopping=False, again=False, losses=0, shown=False)
        d.request(i, ends=ends, outcome=outcome)
        d.effects.append(("end", i, outcome))
        self.unpin(d, self.bounds.groups[i])

    def back(self, d: Draft, i: int) -> None:
        """It waits again, with its seeds."""
        self.leave(d, i)
        d.request(i, status=WAITING, again=False)
        self.unpin(d, self.bounds.groups[i])

    def leave(self, d: Draft, i: int) -> None:
        r = d.requests[i].at
        if d.requests[i].status == RUNNING:
            d.request(i, status=WAITING, at=NONE, version=NONE)
            older = d.replicas[r].older
            if not any(q.status == RUNNING and q.at == r and q.version == older for q in d.requests):
                d.replica(r, older=NONE)

    def unpin(self, d: Draft, g: int) -> None:
        """A group is over with its last open request; while nothing of it runs or is settled, it may begin anew."""
        members = [q for q, group in zip(d.requests, self.bounds.groups, strict=True) if group == g]
        if not any(q.status in (WAITING, RUNNING) for q in members):
            d.groups[g] = Group()
        elif self.may_begin_anew(d.groups[g], members):
            d.groups[g] = d.groups[g]._replace(policy=NONE)

    def may_begin_anew(self, group: Group, members: list[Request]) -> bool:
        return not group.settled and not any(q.status == RUNNING for q in members)

    def running(self, d: Draft | State, r: int) -> list[int]:
        return [i for i, q in enumerate(d.requests) if q.status == RUNNING and q.at == r]

    # -- which goes where ----------------------------------------------------------------------------------------------

    def dispatch(self, d: Draft, first: int = 0, kept: frozenset[int] = frozenset()) -> list[Draft]:
        """Oldest first, to the least loaded; who lacks only room keeps later ones from where it could run."""
        for i in range(first, len(d.requests)):
            q = d.requests[i]
            if q.status != WAITING:
                continue
            if (outcome := self.cannot_come(d, i)) is not None:
                self.end(d, i, outcome)
                continue
            able = [r for r in range(len(d.replicas)) if self.may_run(d, r, i)]
            load = {r: len(self.running(d, r)) for r in able}
            room = [r for r in able if r not in kept and load[r] < self.bounds.capacity]
            if not room:
                kept |= set(able)
                continue
            results = []
            for r in (r for r in room if load[r] == min(load[r] for r in room)):
                twin = d.copy()
                self.send(twin, r, i)
                results += self.dispatch(twin, i + 1, kept)
            return results
        return [d]

    def cannot_come(self, d: Draft, i: int) -> str | None:
        """How a request ends that would wait for ever: its group's version is gone, or is older than it accepts."""
        group = d.groups[self.bounds.groups[i]]
        if group.policy != NONE and not any(r.alive and r.active == group.policy for r in d.replicas):
            return "aborted" if self.bounds.update == "abort" else "failed"
        too_old = group.settled and group.policy < d.requests[i].minimum
        return "failed" if group.policy != NONE and too_old else None

    def accepting(self, replica: Replica) -> bool:
        if not replica.alive or replica.active == NONE or replica.out or replica.installing:
            return False
        return not replica.flipping or self.bounds.update == "dual"

    def may_run(self, d: Draft, r: int, i: int) -> bool:
        replica, policy = d.replicas[r], d.groups[self.bounds.groups[i]].policy
        return self.accepting(replica) and replica.active >= d.requests[i].minimum and policy in (NONE, replica.active)

    def send(self, d: Draft, r: int, i: int) -> None:
        g, version = self.bounds.groups[i], d.replicas[r].active
        d.request(i, status=RUNNING, at=r, version=version)
        d.groups[g] = d.groups[g]._replace(policy=version)
        d.effects.append(("send", r, i, version))
        self.begins(d, i)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def join(self, d: Draft, r: int, active: int) -> None:
        d.replica(r, alive=True, active=active, staged=NONE, verified=0, flipping=False, installing=False)
        d.replica(r, out=False, older=NONE)

    def lost(self, d: Draft, r: int) -> list[Draft]:
        """What it ran runs again elsewhere, unless it was being cancelled, or too many replicas fell with it."""
        for i in self.running(d, r):
            if d.requests[i].stopping:
                self.end(d, i, "aborted")
            elif d.requests[i].losses + 1 >= self.bounds.losses:
                self.end(d, i, "failed")
            else:
                d.request(i, losses=d.requests[i].losses + 1)
                self.back(d, i)
        self.join(d, r, NONE)
        d.replica(r, alive=False)
        return self.dispatch(d)

    def discard(self, d: Draft, r: int) -> list[Draft]:
        d.replica(r, staged=NONE, verified=0, flipping=False)
        return self.dispatch(d)

    def may_stage(self, s: State | Draft, r: int) -> bool:
        return s.replicas[r].alive and not s.replicas[r].flipping

    def may_flip(self, s: State | Draft, r: int) -> bool:
        """I4."""
        replica = s.replicas[r]
        return replica.alive and replica.staged == s.trained and replica.verified == self.whole and not replica.flipping

    def may_install(self, s: State | Draft, r: int) -> bool:
        """drain, abort: nothing runs there. dual: at most one older version besides; while nobody knows what it serves,
        what runs there may be under either of two."""
        if self.bounds.update == "dual" and not s.replicas[r].out:
            return s.replicas[r].older == NONE
        return not self.running(s, r)

    def flip(self, d: Draft, r: int) -> None:
        d.replica(r, flipping=True)
        for i in self.running(d, r):
            if self.bounds.update == "abort" and not d.requests[i].stopping and not d.requests[i].again:
                d.request(i, again=True)
                self.stop(d, i)

    def serves(self, d: Draft, r: int, version: int) -> list[Draft]:
        """The replica says what it serves. What runs there was begun under what it served before."""
        replica = d.replicas[r]
        if replica.staged == version:
            d.replica(r, staged=NONE, verified=0)
        older = replica.active if replica.active != version and self.running(d, r) else replica.older
        d.replica(r, active=version, older=older, flipping=False, installing=False)
        d.replica(r, out=replica.out and version == NONE)
        return self.dispatch(d)

    def leave_out(self, d: Draft, r: int) -> None:
        d.replica(r, out=True, flipping=False, installing=False)
