"""Models with one rule broken each. `PLANTED` says which invariant may find it."""

from __future__ import annotations

from protocol_model.environment import Model
from protocol_model.states import NONE, RUNNING, WAITING, Draft, Group, Replica, Request, State


class OneShardMissing(Model):
    """A flip although one shard is not verified."""

    def may_flip(self, s: State | Draft, r: int) -> bool:
        replica = s.replicas[r]
        ready = replica.alive and replica.staged == s.trained and not replica.flipping
        return ready and replica.verified.bit_count() >= self.bounds.shards - 1


class OldAttemptCounts(Model):
    """A late word of an earlier staging attempt counts for the present one."""

    def on_verified_before(self, d: Draft, r: int, shard: int) -> list[Draft]:
        d.replica(r, verified=d.replicas[r].verified | 1 << shard)
        return [d]


class NoDrain(Model):
    """Installs while requests are under way."""

    def may_install(self, s: State | Draft, r: int) -> bool:
        return True


class ThirdVersion(Model):
    """dual: does not wait for the older version's requests."""

    def may_install(self, s: State | Draft, r: int) -> bool:
        return self.bounds.update == "dual" or super().may_install(s, r)


class GroupsMixed(Model):
    """Sends requests of a group wherever there is room."""

    def may_run(self, d: Draft, r: int, i: int) -> bool:
        return self.accepting(d.replicas[r]) and d.replicas[r].active >= d.requests[i].minimum


class SettledGroupBeginsAnew(Model):
    """Reissues a group under another version although a client was given some of it."""

    def may_begin_anew(self, group: Group, members: list[Request]) -> bool:
        return not any(q.status == RUNNING for q in members)


class RunningGroupBeginsAnew(Model):
    """Forgets a group's version while another request of it runs under it."""

    def may_begin_anew(self, group: Group, members: list[Request]) -> bool:
        return not group.settled


class LateAnswerTaken(Model):
    """Takes an answer of a replica that was lost for one of where the request is now."""

    def on_late(self, d: Draft, r: int, i: int) -> list[Draft]:
        computed, d.wire = d.wire[2], ()
        if d.requests[i].status not in (WAITING, RUNNING):
            return [d]
        d.request(i, computed=computed)
        self.end(d, i, "finished")
        return self.dispatch(d)


class EndsTwice(Model):
    """Says the end when a client gives up, and again when the worker has answered."""

    def on_cancel(self, d: Draft, i: int) -> list[Draft]:
        running = d.requests[i].status == RUNNING
        results = super().on_cancel(d, i)
        if running:
            for result in results:
                result.request(i, ends=result.requests[i].ends + 1)
        return results


class Forgotten(Model):
    """Does not send again what a lost replica ran."""

    def lost(self, d: Draft, r: int) -> list[Draft]:
        self.join(d, r, NONE)
        d.replica(r, alive=False)
        return self.dispatch(d)


class RestartForgets(Model):
    """No journal: after a restart nobody knows of what was open."""

    def end(self, d: Draft, i: int, outcome: str) -> None:
        super().end(d, i, outcome)
        if outcome == "failed" and self.restarting:
            d.request(i, ends=0)

    restarting = False

    def on_restart(self, d: Draft, happened: bool) -> list[Draft]:
        self.restarting = True
        results = super().on_restart(d, happened)
        self.restarting = False
        return results


class CacheKept(Model):
    """What is sent again goes on from the cache of an earlier version."""

    def begins(self, d: Draft, i: int) -> None:
        super().begins(d, i)
        replica = d.replicas[d.requests[i].at]
        runs = tuple(run._replace(wrote=0) if run.request == i else run for run in replica.runs)
        d.replica(d.requests[i].at, runs=runs)


class Stale(Model):
    """Does not look at the oldest version that a request accepts."""

    def may_run(self, d: Draft, r: int, i: int) -> bool:
        replica, policy = d.replicas[r], d.groups[self.bounds.groups[i]].policy
        return self.accepting(replica) and policy in (NONE, replica.active)


class SendsWhileInstalling(Model):
    """dual: sends to a replica that is installing. What was meant for the version before runs under the one after."""

    def accepting(self, replica: Replica) -> bool:
        return replica.alive and replica.active != NONE and not replica.out and not replica.flipping

    def on_install(self, d: Draft, r: int) -> list[Draft]:
        d.replica(r, installing=True)
        self.swap(d, r, d.trained)
        d.replica(r, here=self.whole)
        return self.dispatch(d)

    def may_run(self, d: Draft, r: int, i: int) -> bool:
        return d.replicas[r].installing or super().may_run(d, r, i)


class LostAnswerMeansNo(Model):
    """A flip whose answer is lost is taken for one that did not happen."""

    def leave_out(self, d: Draft, r: int) -> None:
        d.replica(r, flipping=False, installing=False)


class TrainsDuringTransfer(Model):
    """The trainer changes its weights while they are on their way."""

    def may_begin(self, s: State | Draft) -> bool:
        return s.trained < self.bounds.versions - 1 and any(r.alive for r in s.replicas)


class StagesWhileInstalling(Model):
    """Stages into the buffer that is being installed."""

    def on_install(self, d: Draft, r: int) -> list[Draft]:
        d.replica(r, installing=True, here=0)
        return [d]


class StagedStays(Model):
    """What was staged is still called staged when it is served."""

    def serves(self, d: Draft, r: int, version: int) -> list[Draft]:
        replica = d.replicas[r]
        results = super().serves(d, r, version)
        for result in results:
            result.replica(r, staged=replica.staged, verified=replica.verified)
        return results


class OldKept(Model):
    """dual: the older version is not let go with its last request."""

    def done(self, d: Draft, r: int, i: int) -> None:
        d.replica(r, runs=tuple(run for run in d.replicas[r].runs if run.request != i))


class NobodyAsks(Model):
    """After a flip nothing looks at what waits."""

    deaf = False

    def serves(self, d: Draft, r: int, version: int) -> list[Draft]:
        self.deaf = True
        results = super().serves(d, r, version)
        self.deaf = False
        return results

    def dispatch(self, d: Draft, first: int = 0, kept: frozenset[int] = frozenset()) -> list[Draft]:
        return [d] if self.deaf else super().dispatch(d, first, kept)


class TakesAndStops(Model):
    """abort: a replica that is to flip takes requests, and stops them at once; they may come back to it for ever."""

    def accepting(self, replica: Replica) -> bool:
        return replica.alive and replica.active != NONE and not replica.out and not replica.installing

    def send(self, d: Draft, r: int, i: int) -> None:
        super().send(d, r, i)
        if d.replicas[r].flipping:
            d.request(i, again=True)
            self.stop(d, i)


GROUP = "one_version_in_a_group"
PLANTED: dict[type[Model], frozenset[str]] = {
    OneShardMissing: frozenset({"i4_flip_needs_every_shard", "i1_one_version_in_a_pass"}),
    OldAttemptCounts: frozenset({"i4_flip_needs_every_shard", "i1_one_version_in_a_pass"}),
    NoDrain: frozenset({"i3_cache_read_under_its_version", "i2_a_version_is_who_computed"}),
    ThirdVersion: frozenset({"i3_cache_read_under_its_version", "i2_a_version_is_who_computed"}),
    GroupsMixed: frozenset({GROUP}),
    SettledGroupBeginsAnew: frozenset({GROUP}),
    RunningGroupBeginsAnew: frozenset({GROUP}),
    LateAnswerTaken: frozenset({"i2_a_version_is_who_computed", "waiting_is_nowhere"}),
    EndsTwice: frozenset({"i7_ends_exactly_once"}),
    Forgotten: frozenset({"i7_ends_exactly_once"}),
    RestartForgets: frozenset({"i7_ends_exactly_once"}),
    CacheKept: frozenset({"i3_cache_read_under_its_version", "i2_a_version_is_who_computed"}),
    Stale: frozenset({"i6_as_new_as_asked_for"}),
    SendsWhileInstalling: frozenset({"i2_a_version_is_who_computed", "i5_staged_is_not_active"}),
    LostAnswerMeansNo: frozenset({"i2_a_version_is_who_computed"}),
    TrainsDuringTransfer: frozenset({"i8_not_changed_in_transfer"}),
    StagesWhileInstalling: frozenset({"i5_staged_is_not_active", "i4_flip_needs_every_shard"}),
    StagedStays: frozenset({"i5_staged_is_not_active"}),
    OldKept: frozenset({"two_versions_at_most"}),
    NobodyAsks: frozenset({"comes_to_a_good_end"}),
    TakesAndStops: frozenset({"comes_to_an_end"}),
}
