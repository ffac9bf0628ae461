"""Requests for callers who wait for the answer, in a thread or in an event loop."""

from __future__ import annotations

import asyncio
import queue
import secrets
from collections.abc import Iterable
from contextlib import suppress

from lockstep.errors import ServiceError
from lockstep.service.requests import ClientEvent, Ended, OnEvent, RolloutRequest, Rollouts
from lockstep.types import PolicyVersion, Prompt, SamplingParams


def run_all(rollouts: Rollouts, requests: Iterable[RolloutRequest]) -> list[Ended]:
    """Submit them all and wait for their ends, which are in the order of the requests. Raises as `Rollouts.submit`
    does, with those before cancelled."""
    ends: queue.SimpleQueue[tuple[int, Ended]] = queue.SimpleQueue()
    sent: list[RolloutRequest] = []
    try:
        for number, request in enumerate(requests):

            def hear(event: object, number: int = number) -> None:
                if isinstance(event, Ended):
                    ends.put((number, event))

            rollouts.submit(request, hear)
            sent.append(request)
    except BaseException:
        for request in sent:
            rollouts.cancel(request.id, "another request of the same call was refused")
        raise
    found = dict(ends.get() for _ in sent)
    return [found[number] for number in range(len(sent))]


async def ended(
    rollouts: Rollouts, request: RolloutRequest, given_up: str, on_event: OnEvent = lambda event: None
) -> Ended:
    """Submit one and wait for its end. on_event: told, in the service's threads, what comes before it. given_up: why it
    is cancelled when the caller is. Raises as `Rollouts.submit` does."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[Ended] = loop.create_future()

    def tell(event: Ended) -> None:
        if not end.done():  # a request that was given up ends too
            end.set_result(event)

    def hear(event: ClientEvent) -> None:
        if isinstance(event, Ended):
            with suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(tell, event)
        else:
            on_event(event)

    rollouts.submit(request, hear)
    try:
        return await end
    except asyncio.CancelledError:
        rollouts.cancel(request.id, given_up)
        raise


def score(
    rollouts: Rollouts, sequences: Iterable[Iterable[int]], temperature: float
) -> list[tuple[PolicyVersion, list[float]]]:
    """As `Rollouts.score`, by requests that ask for the prompt's log-probabilities and no new token. Each sequence is a
    request of its own: a flip may come between two of them."""
    call = f"score-{secrets.token_hex(8)}"
    params = SamplingParams(temperature, 0, frozenset(), prompt_logprobs=True)
    made = [RolloutRequest(Prompt(f"{call}/{i}", "", tuple(ids)), (0,), params) for i, ids in enumerate(sequences)]
    found = []
    for request, end in zip(made, run_all(rollouts, made), strict=True):
        if end.outcome != "finished":
            raise ServiceError(f"scoring sequence {request.id}: {end.outcome}: {end.reason}")
        (trajectory,) = end.trajectories
        details = trajectory.details
        assert details is not None and details.prompt_logprobs is not None and end.policy is not None
        found.append((end.policy, [float(lp) for lp in details.prompt_logprobs]))
    return found
