"""Every reachable state of a model, breadth first, and whether what is left to itself comes to a good end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protocol_model.environment import Model
from protocol_model.invariants import INVARIANTS, is_over
from protocol_model.states import Event, State


class Violation(AssertionError):
    """An invariant does not hold. trace: the events that lead there, from the initial state."""

    def __init__(self, what: str, trace: list[Event], state: State) -> None:
        super().__init__(f"{what} does not hold after {trace}\n{state}")
        self.what, self.trace, self.state = what, trace, state


@dataclass
class Explored:
    """states, edges: how many. events: how often each kind of event was taken. longest: of the fair runs from any
    state, the most steps."""

    states: int = 0
    edges: int = 0
    events: Counter[str] = field(default_factory=Counter)
    longest: int = 0


def canonical(s: State) -> State:
    """Replicas are alike: of a state of two replicas and its mirror image, the lesser."""
    if len(s.replicas) != 2:
        return s
    twin = s._replace(
        replicas=s.replicas[::-1],
        requests=tuple(q._replace(at=1 - q.at) if q.at >= 0 else q for q in s.requests),
        marks=s.marks[::-1],
        wire=(1 - s.wire[0], *s.wire[1:]) if s.wire else (),
    )
    return min(s, twin)


def explore(model: Model, *, most: int = 10**8) -> Explored:
    """Visit every reachable state. Raises Violation for an invariant that fails; for a state that is left to itself
    (nothing goes wrong any more) and stops short of a good end; and for one from where that may go on for ever."""
    start = canonical(model.initial())
    number: dict[State, int] = {start: 0}
    order, parents = [start], [(-1, ("start",))]
    fair: list[list[int]] = []
    found = Explored()

    def trace(n: int) -> list[Event]:
        events = []
        while n > 0:
            n, event = parents[n]
            events.append(event)
        return events[::-1]

    at = 0
    while at < len(order):
        s = order[at]
        for invariant in INVARIANTS:
            if not invariant(model, s):
                raise Violation(invariant.__name__, trace(at), s)
        onward: list[int] = []
        for event, wrong in model.enabled(s):
            for _, result in model.after(s, event):
                then = canonical(result)
                n = number.setdefault(then, len(order))
                if n == len(order):
                    order.append(then)
                    parents.append((at, event))
                found.edges += 1
                found.events[event[0]] += 1
                if not wrong and n != at:
                    onward.append(n)
        if not onward and not is_over(model, s):
            raise Violation("comes_to_a_good_end", trace(at), s)
        fair.append(onward)
        at += 1
        assert at <= most, f"more than {most} states"
    found.states = len(order)
    found.longest = _longest(fair, lambda n: Violation("comes_to_an_end", trace(n), order[n]))
    return found


def _longest(fair: list[list[int]], endless: object) -> int:
    """The most steps of a fair run. Every fair run ends, because no state is reached from itself."""
    into = [0] * len(fair)
    for onward in fair:
        for n in onward:
            into[n] += 1
    ready = [n for n, count in enumerate(into) if count == 0]
    steps, done = [0] * len(fair), 0
    while ready:
        n = ready.pop()
        done += 1
        for then in fair[n]:
            steps[then] = max(steps[then], steps[n] + 1)
            into[then] -= 1
            if into[then] == 0:
                ready.append(then)
    if done < len(fair):
        raise endless(next(n for n, count in enumerate(into) if count))
    return max(steps)
