"""An engine serves from the very arrays that were installed, and keeps nothing that is made from them."""

from __future__ import annotations

from typing import Any

import jax

from lockstep.types import PolicyVersion, Prompt, SamplingParams


def arrays_in(thing: Any, seen: set[int]) -> list[jax.Array]:
    """All arrays that can be reached from it through attributes and containers."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, jax.Array):
        return [thing]
    inner: list[Any] = []
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        inner = list(thing)
    elif type(thing).__module__.startswith("lockstep."):
        slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
        inner = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, n) for n in slots if hasattr(thing, n))]
    return [array for one in inner for array in arrays_in(one, seen)]


def test_nothing_is_derived_from_the_weights(make_engine, tiny_params):
    """So a probe of the arrays by the rollout's programs asks what is served (docs/verification.md)."""
    engine = make_engine()
    params = tiny_params(1, 9)
    engine.install(PolicyVersion(5, "five"), params)
    ask = Prompt("a", "", tuple(range(1, 9)))
    engine.generate(
        [ask], {ask.id: [1]}, SamplingParams(1.0, 4, frozenset())
    )  # whatever is made when first needed is there now
    # The programs hold constants of the model's description; the pools hold keys and values of sequences.
    others = {id(array) for array in arrays_in([engine.programs._constants, engine._pools], set())}
    held = {id(array): array for array in arrays_in(engine, set()) if id(array) not in others}
    assert held.keys() == {id(array) for array in params.values()}
