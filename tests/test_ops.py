"""The shared numerical pieces against float64 numpy, and what a tile promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.ops import LANES, log_normaliser, rms_norm, rotate, softcap, temperature_scaled, tiled


@pytest.mark.parametrize("tile", [0, 1, 4, 12])
def test_tiles_are_the_block_row_by_row(tile: int) -> None:
    """Several arrays in, a tree out, a value shared by all tiles; a tile without a live row is not computed."""
    rng = np.random.default_rng(0)
    x, number = rng.standard_normal((12, 3)).astype(np.float32), np.arange(12, dtype=np.int32)
    live = np.isin(number, [1, 2, 9])

    def block(shared, x, number):
        return {"sum": x.sum(-1) + shared, "both": (x * 2, number + 1)}

    out = jax.jit(lambda *a: tiled(block, tile, *a))(live, jnp.float32(5), x, number)
    computed = np.ones(12, bool) if not tile else np.repeat(live.reshape(-1, tile).any(1), tile)
    np.testing.assert_allclose(out["sum"], np.where(computed, x.sum(-1) + 5, 0), atol=1e-6)
    np.testing.assert_array_equal(out["both"][0], np.where(computed[:, None], x * 2, 0))
    np.testing.assert_array_equal(out["both"][1], np.where(computed, number + 1, 0))


def test_rows_that_fill_no_whole_tile_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match=r"\(10, 4\)"):
        tiled(lambda shared, x: x, 4, jnp.ones(10, bool), None, jnp.zeros(10))


@pytest.mark.parametrize("tile", [0, 4])
def test_a_tile_is_differentiable(tile: int) -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 3)), jnp.float32)
    live = jnp.arange(8) < 3
    w = jnp.asarray([1.0, -2.0, 0.5])
    grads = jax.grad(lambda w, x: (tiled(lambda w, x: jnp.tanh(x @ w), tile, live, w, x) * live).sum(), (0, 1))(w, x)
    wanted = jax.grad(lambda w, x: (jnp.tanh(x @ w) * live).sum(), (0, 1))(w, x)
    for got, expected in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("offset", "dtype"), [(0.0, "float32"), (1.0, "float32"), (0.0, "bfloat16"), (1.0, "bfloat16")]
)
def test_rms_norm(offset: float, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((4, 32)), rng.standard_normal(32)
    got = rms_norm(jnp.asarray(x, dtype), jnp.asarray(w, dtype), 1e-2, offset)
    x, w = (np.asarray(jnp.asarray(a, dtype).astype(jnp.float32), np.float64) for a in (x, w))
    wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-2) * (offset + w)
    assert got.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance)


def test_rotation_depends_on_the_distance_only() -> None:
    """Norms stay, position 0 is the identity, and q.k is a function of the difference of positions."""
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.standard_normal((1, 2, 8)), jnp.float32) for _ in range(2))
    inv = jnp.asarray(100.0 ** -(np.arange(0, 8, 2) / 8), jnp.float32)

    def at(x, position):
        return np.asarray(rotate(x, jnp.asarray([position], jnp.int32), inv), np.float64)

    np.testing.assert_array_equal(at(q, 0), np.asarray(q))
    np.testing.assert_allclose(np.linalg.norm(at(q, 77), axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
    products = [(at(q, p) * at(k, p - 7)).sum(-1) for p in (7, 20, 300)]
    np.testing.assert_allclose(products[1:], [products[0]] * 2, atol=1e-4)
    assert np.abs((at(q, 7) * at(k, 1)).sum(-1) - products[0]).max() > 1e-2


def test_soft_cap() -> None:
    x = jnp.asarray([-1e4, -1.0, 0.0, 0.5, 1e4])
    assert softcap(x, None) is x
    np.testing.assert_allclose(softcap(x, 3.0), 3 * np.tanh(np.asarray(x) / 3), rtol=1e-6)


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 300])
def test_log_normaliser(vocab: int) -> None:
    """Also where the logits are large, and with entries that underflow to nothing."""
    z = 30 * np.random.default_rng(vocab).standard_normal((5, vocab)).astype(np.float32) + 1000
    z[:, 1:2] = -1e30
    peak, log_sum, chunks = (np.asarray(a, np.float64) for a in log_normaliser(jnp.asarray(z.T)))
    wanted = np.logaddexp.reduce(z.astype(np.float64), -1)
    np.testing.assert_allclose(peak + log_sum, wanted, rtol=1e-6)
    assert chunks.shape == (5, -(-vocab // LANES))
    weights = np.exp(z.astype(np.float64) - peak[:, None])
    for i in range(chunks.shape[1]):
        np.testing.assert_allclose(chunks[:, i], weights[:, i * LANES : (i + 1) * LANES].sum(-1), rtol=1e-5, atol=1e-30)


def test_temperature_scales_and_zero_means_one() -> None:
    z = jnp.asarray([[2.0, -1.0]] * 3).T
    got = temperature_scaled(z, jnp.asarray([0.0, 0.5, 2.0]))
    np.testing.assert_array_equal(got.T, [[2.0, -1.0], [4.0, -2.0], [1.0, -0.5]])
