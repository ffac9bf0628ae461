"""Changed distributions against a slow and obvious twin in numpy, id by id."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.models.sampling import Changes, changed_logits, kept_logits

V, N = 300, 8


def nothing(n: int = N) -> dict[str, np.ndarray]:
    full = partial(np.full, n)
    return {
        "top_k": full(V, np.int32), "top_p": full(1, np.float32), "min_p": full(0, np.float32),
        "repetition": full(1, np.float32), "presence": full(0, np.float32), "frequency": full(0, np.float32),
        "only_listed": full(False), "ids": np.full((n, 4), V, np.int32), "bias": np.zeros((n, 4), np.float32),
        "seen": np.zeros((n, 4), bool), "count": np.zeros((n, 4), np.float32),
    }  # fmt: skip


def kept_ids(z: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition: sorted by logit, lower ids first among equals."""
    order = [i for i in sorted(range(len(z)), key=lambda i: (-z[i], i)) if z[i] > -np.inf][:top_k]
    weight = np.exp(z.astype(np.float64) - z.max())
    kept, mass, total = [], 0.0, sum(weight[i] for i in order)
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += weight[i]
    return {i for i in kept if weight[i] >= min_p * weight.max()}


run = jax.jit(kept_logits)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    levels=st.sampled_from([0, 3, 40]),
    ruled_out=st.sampled_from([0, 250]),
    data=st.data(),
)
def test_what_is_kept_is_what_the_definition_keeps(seed, spread, levels, ruled_out, data) -> None:
    """Ties (logits of few levels), ids ruled out, all three cuts at once, each row by its own numbers."""
    rng = np.random.default_rng(seed)
    z = (spread * rng.standard_normal((N, V))).astype(np.float32)
    if levels:
        z = np.round(z * levels / spread / 4).astype(np.float32) * np.float32(spread / levels)
    z = np.where(rng.permuted(np.tile(np.arange(V), (N, 1)), axis=1) < ruled_out, np.float32(-np.inf), z)
    c = nothing()
    for i in range(N):
        c["top_k"][i] = data.draw(st.sampled_from([1, 2, 7, 60, V]))
        c["top_p"][i] = data.draw(st.sampled_from([1e-6, 0.3, 0.7312, 0.951, 1.0]))
        c["min_p"][i] = data.draw(st.sampled_from([0.0, 0.0502, 0.3001]))
    got = np.asarray(run(z, Changes(**c)))
    for i in range(N):
        kept = set(np.flatnonzero(got[i] > -np.inf).tolist())
        wanted = kept_ids(z[i], int(c["top_k"][i]), float(c["top_p"][i]), float(c["min_p"][i]))
        weight = np.exp(z[i].astype(np.float64) - z[i].max())
        differ = sum(weight[list(kept ^ wanted)]) / weight.sum()
        assert differ < 1e-5 or len(kept ^ wanted) <= 1, (kept, wanted)  # one id on the very edge of top_p
        assert all(got[i][k] == z[i][k] for k in kept)


def test_nothing_asked_for_is_nothing_changed() -> None:
    z = np.random.default_rng(0).standard_normal((N, V)).astype(np.float32)
    c = Changes(**nothing())
    assert np.asarray(jax.jit(changed_logits)(z, c)).tobytes() == z.tobytes()
    assert np.asarray(run(z, c)).tobytes() == z.tobytes()


@pytest.mark.parametrize(("key", "value", "wanted"), [
    ("repetition", 2.0, {0: 0.5, 1: -2.0, 2: 1.0, 3: 1.0}),
    ("presence", 0.5, {0: 0.5, 1: -1.5, 2: 1.0, 3: 1.0}),
    ("frequency", 0.25, {0: 0.25, 1: -1.25, 2: 1.0, 3: 1.0}),
])  # fmt: skip
def test_penalties(key: str, value: float, wanted: dict[int, float]) -> None:
    """Logits 1, -1, 1, 1: ids 0 (three times) and 1 (once) in the completion."""
    z, c = np.tile(np.float32([1, -1, 1, 1]), (1, 1)), nothing(1)
    c[key][:] = value
    c["ids"], c["seen"] = np.int32([[0, 1, 4, 4]]), np.array([[True, True, False, False]])
    c["count"] = np.float32([[3, 1, 0, 0]])
    got = np.asarray(changed_logits(z, Changes(**c)))[0]
    assert {i: float(v) for i, v in enumerate(got)} == wanted


def test_bias_and_ids_ruled_out() -> None:
    z, c = np.zeros((2, 6), np.float32), nothing(2)
    c["only_listed"] = np.array([True, False])
    c["ids"] = np.int32([[1, 2, 5, 6], [1, 2, 5, 6]])
    c["bias"] = np.float32([[0, 3, -np.inf, 0], [0, 3, -np.inf, 0]])
    got = np.asarray(changed_logits(z, Changes(**c))).tolist()
    low = -np.inf
    assert got == [[low, 0, 3, low, low, low], [0, 0, 3, 0, 0, low]]
