"""Workers, replicas and the publish: what can happen, and what then becomes true."""

from __future__ import annotations

from collections.abc import Iterator

from protocol_model.coordinator import Coordinator
from protocol_model.states import (
    NONE,
    RUNNING,
    UNBORN,
    WAITING,
    Draft,
    Effect,
    Event,
    Group,
    Replica,
    Request,
    Run,
    State,
)


class Model(Coordinator):
    """The whole: `enabled` says what can happen in a state, `after` what comes of it."""

    def initial(self) -> State:
        """Every replica serves version 0; nothing was asked for."""
        b = self.bounds
        replica = Replica(True, 0, NONE, 0, False, False, False, NONE, 0, (0,) * b.shards, NONE, ())
        groups = (Group(),) * (max(b.groups) + 1)
        return State(
            (replica,) * b.replicas, (Request(),) * len(b.groups), groups, "", "", 0, 0, b.faults, b.cancels, ()
        )

    # -- what can happen -----------------------------------------------------------------------------------------------

    def enabled(self, s: State) -> Iterator[tuple[Event, bool]]:
        """(event, whether it is something that goes wrong or a client that gives up)."""
        unborn = [i for i, q in enumerate(s.requests) if q.status == UNBORN]
        if unborn:
            yield ("admit", unborn[0]), False
        for i, q in enumerate(s.requests):
            if s.cancels and q.status in (WAITING, RUNNING) and not q.stopping:
                yield ("cancel", i), True
        for r, replica in enumerate(s.replicas):
            yield from self._of_replica(s, r, replica)
        if s.wire:
            yield ("late", *s.wire[:2]), True
        if s.faults:
            for happened in (False, True) if any(r.installing for r in s.replicas) else (False,):
                yield ("restart", happened), True
        yield from self._of_publish(s)

    def _of_replica(self, s: State, r: int, replica: Replica) -> Iterator[tuple[Event, bool]]:
        for run in replica.runs:
            yield ("finished", r, run.request), False
            if run.stopped:
                yield ("cancelled", r, run.request), False
            if run.request in self.bounds.streams and not s.requests[run.request].shown:
                yield ("shown", r, run.request), False
            if s.faults:
                yield ("refused", r, run.request), True
        if replica.out:
            yield ("told", r), False
        if replica.alive and s.faults:
            for happened in (False, True) if replica.installing else (False,):
                yield ("crash", r, happened), True
        if not replica.alive:
            yield ("rejoin", r, False), False
            if replica.weights[0] != NONE and len(set(replica.weights)) == 1:
                yield ("rejoin", r, True), False

    def _of_publish(self, s: State) -> Iterator[tuple[Event, bool]]:
        if self.may_begin(s):
            yield ("begin",), False
        if not s.phase:
            return
        todo = [r for r, mark in enumerate(s.marks) if mark == "."]
        if not todo:
            yield ("end",), False
        none_yet = not any(s.replicas[r].installing for r in todo) and "f" not in s.marks and "?" not in s.marks
        if todo and s.faults and none_yet:
            yield ("abandon",), True
        for r in todo:
            yield from self._of_staging(s, r) if s.phase == "stage" else ()
        if todo and all(self.may_flip(s, r) or s.replicas[r].flipping for r in todo):
            for r in todo:
                yield from self._of_flip(s, r)

    def _of_staging(self, s: State, r: int) -> Iterator[tuple[Event, bool]]:
        replica = s.replicas[r]
        if replica.staged != s.trained:
            yield ("stage", r), False
            return
        if self.bounds.atomic:
            if s.faults:
                yield ("evict", r), True
            return
        for shard in range(self.bounds.shards):
            yield ("verified", r, shard), False  # also once more, which changes nothing
            yield ("verified before", r, shard), False  # of an earlier attempt
        if s.faults:
            yield ("restage", r), True
            yield ("evict", r), True

    def _of_flip(self, s: State, r: int) -> Iterator[tuple[Event, bool]]:
        replica = s.replicas[r]
        if not replica.flipping:
            if not (self.bounds.rolling and any(other.flipping for other in s.replicas)):
                yield ("flip", r), False
        elif replica.installing:
            yield ("installed", r), False
            if s.faults:
                yield ("not installed", r), True
                yield ("answer lost", r, False), True
                yield ("answer lost", r, True), True
        else:
            if self.may_install(s, r):
                yield ("install", r), False
            if s.faults:
                yield ("give up", r), True

    def after(self, s: State, event: Event) -> list[tuple[list[Effect], State]]:
        """What comes of an event: (effects, state)."""
        draft = Draft(s)
        results = getattr(self, "on_" + event[0].replace(" ", "_"))(draft, *event[1:])
        return [(sorted(d.effects), d.state()) for d in results]

    # -- workers -------------------------------------------------------------------------------------------------------

    def begins(self, d: Draft, i: int) -> None:
        r = d.requests[i].at
        run = Run(i, d.replicas[r].weights[0], False)
        d.replica(r, runs=tuple(sorted((*d.replicas[r].runs, run))))

    def stop(self, d: Draft, i: int) -> None:
        r = d.requests[i].at
        d.effects.append(("stop", r, i))
        d.replica(r, runs=tuple(run._replace(stopped=run.stopped or run.request == i) for run in d.replicas[r].runs))

    def done(self, d: Draft, r: int, i: int) -> None:
        """The worker has answered; weights that nothing uses any more are freed."""
        d.replica(r, runs=tuple(run for run in d.replicas[r].runs if run.request != i))
        if d.replicas[r].old not in {run.wrote for run in d.replicas[r].runs}:
            d.replica(r, old=NONE)

    def computes(self, replica: Replica, i: int) -> int:
        """The version whose weights compute a request: those that wrote its cache, as long as they are there."""
        (run,) = [run for run in replica.runs if run.request == i]
        return run.wrote if run.wrote in (replica.weights[0], replica.old) else replica.weights[0]

    def swap(self, d: Draft, r: int, version: int) -> None:
        """Install what is staged. Under dual the weights of before stay for what runs; there is room for one older."""
        replica = d.replicas[r]
        weights = tuple(
            version if replica.here & 1 << shard else before for shard, before in enumerate(replica.weights)
        )
        keep = self.bounds.update == "dual" and any(run.wrote == replica.weights[0] for run in replica.runs)
        d.replica(r, weights=weights, old=replica.weights[0] if keep and weights != replica.weights else replica.old)
        d.replica(r, here=0)

    def dies(self, d: Draft, r: int, happened: bool) -> None:
        """Nothing runs there any more; an answer may still be on its way."""
        if happened:
            self.swap(d, r, d.replicas[r].staged)
        replica = d.replicas[r]
        if replica.runs and not d.wire:
            i = replica.runs[0].request
            d.wire = (r, i, self.computes(replica, i))
        d.replica(r, runs=(), old=NONE, here=0)

    def on_crash(self, d: Draft, r: int, happened: bool) -> list[Draft]:
        """happened: it had installed what it was installing."""
        d.faults -= 1
        self.dies(d, r, happened)
        if d.marks[r : r + 1] != "f":
            d.mark(r, "x")
        return self.lost(d, r)

    def on_rejoin(self, d: Draft, r: int, same: bool) -> list[Draft]:
        """same: with the weights that it served; else with none."""
        if not same:
            d.replica(r, weights=(NONE,) * self.bounds.shards)
        self.join(d, r, d.replicas[r].weights[0])
        return self.dispatch(d)

    def on_told(self, d: Draft, r: int) -> list[Draft]:
        """Asked, it says what it serves."""
        version = d.replicas[r].weights[0]
        if d.marks[r : r + 1] == "?":
            d.mark(r, "f" if version == d.trained else "x")
        d.published = max(d.published, version)
        return self.serves(d, r, version)

    def on_restart(self, d: Draft, happened: bool) -> list[Draft]:
        """All that the coordinator believed is gone but the journal: it ends what was open. Replicas go on, drop what
        they ran when they join, and say what they serve. The publish that was under way is given up."""
        d.faults -= 1
        for r, replica in enumerate(d.replicas):
            self.dies(d, r, happened and replica.installing)
            if replica.alive:
                self.join(d, r, d.replicas[r].weights[0])
                d.published = max(d.published, d.replicas[r].weights[0])
        for i, q in enumerate(d.requests):
            if q.status in (WAITING, RUNNING):
                self.end(d, i, "failed")
        d.groups = [Group()] * len(d.groups)
        d.phase = d.marks = ""
        return [d]

    # -- the publish ---------------------------------------------------------------------------------------------------

    def may_begin(self, s: State | Draft) -> bool:
        """The trainer changes its weights: I8."""
        return not s.phase and s.trained < self.bounds.versions - 1 and any(r.alive for r in s.replicas)

    def on_begin(self, d: Draft) -> list[Draft]:
        d.trained += 1
        d.phase, d.marks = "stage", "".join("." if r.alive else "x" for r in d.replicas)
        return [d]

    def on_stage(self, d: Draft, r: int) -> list[Draft]:
        d.replica(r, staged=d.trained, verified=0, here=0)
        if self.bounds.atomic:
            d.replica(r, verified=self.whole, here=self.whole)
        return [d]

    def on_restage(self, d: Draft, r: int) -> list[Draft]:
        d.faults -= 1
        return self.on_stage(d, r)

    def on_verified(self, d: Draft, r: int, shard: int) -> list[Draft]:
        replica = d.replicas[r]
        d.replica(r, verified=replica.verified | 1 << shard, here=replica.here | 1 << shard)
        return [d]

    def on_verified_before(self, d: Draft, r: int, shard: int) -> list[Draft]:
        return [d]

    def on_evict(self, d: Draft, r: int) -> list[Draft]:
        """A shard failed while it staged; the publish goes on without the replica, which serves what it served."""
        d.faults -= 1
        return self.dropped(d, r)

    def on_abandon(self, d: Draft) -> list[Draft]:
        """All or nothing: no replica flips, what is staged is discarded."""
        d.faults -= 1
        results = [d]
        for r, mark in enumerate(d.marks):
            if mark == ".":
                results = [then for before in results for then in self.dropped(before, r)]
        for result in results:
            result.phase = result.marks = ""
        return results

    def dropped(self, d: Draft, r: int) -> list[Draft]:
        d.mark(r, "x")
        d.replica(r, here=0)
        return self.discard(d, r)

    def on_flip(self, d: Draft, r: int) -> list[Draft]:
        d.phase = "flip"
        self.flip(d, r)
        return [d]

    def on_install(self, d: Draft, r: int) -> list[Draft]:
        d.replica(r, installing=True)
        return [d]

    def on_installed(self, d: Draft, r: int) -> list[Draft]:
        self.swap(d, r, d.trained)
        d.mark(r, "f")
        d.published = max(d.published, d.trained)
        return self.serves(d, r, d.trained)

    def on_not_installed(self, d: Draft, r: int) -> list[Draft]:
        """It failed with what was served before still served; then what is staged is discarded."""
        d.faults -= 1
        return [then for before in self.serves(d, r, d.replicas[r].weights[0]) for then in self.dropped(before, r)]

    def on_answer_lost(self, d: Draft, r: int, happened: bool) -> list[Draft]:
        """Nobody knows whether it flipped. What is staged is told to be discarded."""
        d.faults -= 1
        if happened:
            self.swap(d, r, d.trained)
        self.leave_out(d, r)
        results = self.dropped(d, r)
        for result in results:
            result.mark(r, "?")
        return results

    def on_give_up(self, d: Draft, r: int) -> list[Draft]:
        """Its requests took too long to end."""
        d.faults -= 1
        return self.dropped(d, r)

    def on_end(self, d: Draft) -> list[Draft]:
        d.phase = d.marks = ""
        return [d]
