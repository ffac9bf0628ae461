"""The rollout service's protocol as an explicit-state model, with the environment it lives in.

Written from the design's text, apart from `lockstep.service.protocol`. One state holds what the coordinator believes
(`active`, `staged`, pins, who runs where) and what is true (which shard holds which weights, under which version a
request's cache was written, how often a client was told an end). The coordinator's rules read and write only what it
believes; invariants (`invariants.py`) compare the two.

Events name one thing that happens. `Model.enabled` lists those that can happen, `Model.after` says what comes of one:
several results only where replicas are equally loaded. What may go wrong costs one of `Bounds.faults`. A few things
never happen, because a part outside the protocol rules them out: a worker answers a submitted request twice (`Worker`);
a replica that joins still runs something (it drops it); an answer of an earlier incarnation of a replica is taken for
one of its present one (the service knows its workers by identity).

states       what a state is, and the bounds
coordinator  what the coordinator decides: which request goes where, what an answer changes
environment  workers, replicas, the publish: what can happen, and what then becomes true
invariants   I1 to I8 and more, one function each
explore      every reachable state; termination
faults       models with one rule broken, which the invariants must find
"""
