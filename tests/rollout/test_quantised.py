"""Keys, values and weights in eight bits: against numpy, against the unquantised engine, and through a sync."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.audit.record import sampler_holds
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.quantised_weights import int8_bytes, layer_matrices
from lockstep.cluster.sharding import place
from lockstep.errors import ConfigError
from lockstep.models.decoder import Numerics
from lockstep.models.init import init_params
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.quantise import DTYPES, Quantised, Storage, blank, dequantise, product, put, quantise
from lockstep.models.spec import leaf_table
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.engine import Engine, make_fingerprint
from lockstep.rollout.pool_size import pool_bytes, row_bytes
from lockstep.train.batching import Geometry, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.trainer import mismatch
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
PARAMS = SamplingParams(1.0, 12, frozenset())
STORAGES = [Storage("int8"), Storage("fp8"), Storage(weights="int8"), Storage("fp8", "int8")]
# Nats of one token of this model: one with three layers and a peaked distribution. Real ones: docs/engine.md.
BOUND = {"compute": 0.0, "int8": 0.2, "fp8": 1.0}
WEIGHTS_BOUND = 0.6
LORA = LoraSpec(rank=2, alpha=4.0)


# -- the slow twin: numpy ----------------------------------------------------------------------------------------------


def by_hand(x: np.ndarray, kind: str, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """(held, scale): the formula, in float32 as it is written."""
    limit, dtype = {"int8": (127, np.int8), "fp8": (448, ml_dtypes.float8_e4m3fn)}[kind]
    scale = np.maximum(np.abs(x).max(axis) * np.float32(1 / limit), np.finfo(np.float32).tiny)
    y = x * np.expand_dims(1 / scale, axis)
    return (np.rint(y) if kind == "int8" else y).astype(dtype), scale


jitted = jax.jit(quantise, static_argnums=(1, 2))


def take(side: Quantised, rows: jax.Array, dtype: str) -> jax.Array:
    return dequantise(jax.tree.map(lambda a: a[rows], side), dtype)


@given(st.integers(0, 10**6), st.sampled_from(["int8", "fp8"]), st.sampled_from([0, -1]), st.integers(-12, 12))
def test_what_is_held_is_what_numpy_makes_and_is_near(seed: int, kind: str, axis: int, magnitude: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((6, 16)) * 10.0**magnitude * rng.choice([0, 1, 1], (6, 16))).astype(np.float32)
    q = jax.tree.map(np.asarray, jitted(jnp.asarray(x), DTYPES[kind], axis))
    held, scale = by_hand(x, kind, axis)
    np.testing.assert_array_equal(q.scale, scale)
    np.testing.assert_array_equal(q.held.view(np.int8), held.view(np.int8))
    read, step = q.held.astype(np.float32) * np.expand_dims(q.scale, axis), np.expand_dims(q.scale, axis)
    near = step / 2 if kind == "int8" else np.maximum(np.abs(x) / 16, step / 1024)
    assert (np.abs(read - x) <= near * (1 + 1e-4)).all()


def test_nothing_is_nothing_and_what_is_not_finite_shows() -> None:
    for kind in ("int8", "fp8"):
        zeros = quantise(jnp.zeros((2, 4)), DTYPES[kind], -1)
        assert (take(zeros, jnp.arange(2), "float32") == 0).all()
        for bad in (np.nan, np.inf):
            x = jnp.ones((2, 4)).at[1, 2].set(bad)
            read = np.asarray(take(quantise(x, DTYPES[kind], -1), jnp.arange(2), "float32"))
            assert np.isfinite(read[0]).all() and not np.isfinite(read[1]).any(), (kind, bad)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_pool_gives_back_what_numpy_reads(kind: str) -> None:
    rng = np.random.default_rng(1)
    new, rows = rng.standard_normal((3, 2, 8)).astype(np.float32), np.array([4, 0, 2])
    side = put(blank((6, 2, 8), "float32", kind), jnp.asarray(rows), jnp.asarray(new))
    held, scale = by_hand(new, kind, -1)
    np.testing.assert_array_equal(take(side, jnp.asarray(rows), "float32"), held.astype(np.float32) * scale[..., None])
    assert not np.asarray(take(side, jnp.asarray([1, 3, 5]), "float32")).any()


def test_a_product_with_int8_is_that_with_what_it_stands_for() -> None:
    rng = np.random.default_rng(2)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 32), (32, 7)))
    held, scale = by_hand(w, "int8", 0)
    assert scale.shape == (7,), "one per output channel"
    got = product(jnp.asarray(x), quantise(jnp.asarray(w), DTYPES["int8"], 0))
    np.testing.assert_allclose(got, x @ (held * scale), rtol=1e-5, atol=1e-5)
    assert np.abs(got - x @ w).max() > 1e-3


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast(tiny_spec) -> Callable[..., Programs]:
    """fast(parts=1, **axes): programs in fast mode, with an adapter."""

    @cache
    def make(parts: int = 1, **axes: int) -> Programs:
        leaves = {**leaf_table(tiny_spec), **adapter_table(tiny_spec, LORA)}
        mesh = Dial.build({"rollout": axes}).mesh("rollout")
        return Programs(tiny_spec, Numerics("float32", 0, 16, LORA.scale, parts), mesh, leaves)

    return make


@cache
def weights(programs: Programs, seed: int = 7) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    host = init_params(programs.spec, seed)
    host |= {p: np.zeros(leaf.shape) for p, leaf in programs.leaves.items() if ".lora_" in p}
    host = {p: (v + 0.05 * rng.standard_normal(v.shape)).astype(np.float32) for p, v in host.items()}
    host["final_norm"] = host["final_norm"] * np.float32(3)
    return place({p: host[p] for p in programs.leaves}, programs.leaves, programs.mesh)


def serve(programs: Programs, storage: Storage, **options) -> Engine:
    sizes = {"slots": 32, "max_positions": 48, "prefill_rows": 32, "fingerprint": FINGERPRINT}
    engine = Engine(programs, **(sizes | options), storage=storage)
    engine.install(PolicyVersion(4, "four"), weights(programs))
    return engine


def prompts() -> list[Prompt]:
    rng = np.random.default_rng(5)
    return [Prompt(f"q{n}", "", tuple(rng.integers(0, 262, n).tolist())) for n in (3, 17, 24)]


def run(engine: Engine) -> list[Trajectory]:
    return engine.generate(prompts(), {p.id: [1, 2, 3] for p in prompts()}, PARAMS)


def recomputed(programs: Programs, done: list[Trajectory]) -> np.ndarray:
    """The trainer's log-probabilities, which nothing quantises."""
    batches = make_micro_batches(done, np.zeros(len(done)), 1.0, Geometry(programs.row_shards, 1024, 0, 16))
    found: list[np.ndarray | None] = [None] * len(done)
    split = SplitWeights.of(weights(programs), programs.spec.num_layers)
    for batch, flat in zip(batches, score(programs, split, batches), strict=True):
        batch.scatter(flat, found)
    return np.concatenate([np.asarray(lp) for lp in found])


@pytest.mark.parametrize(
    "storage", [pytest.param(s, marks=[pytest.mark.slow] * (n > 0)) for n, s in enumerate(STORAGES)], ids=str
)
def test_the_mismatch_is_small_and_is_reported(fast, storage: Storage) -> None:
    done = run(serve(fast(), storage))
    seen = mismatch(np.concatenate([t.logprobs for t in done]), recomputed(fast(), done))
    bound = BOUND[storage.kv] + (WEIGHTS_BOUND if storage.weights == "int8" else 0)
    assert 1e-3 < seen["mismatch/max_abs"] < bound, seen
    assert 0 < seen["mismatch/k3"] < bound**2 and 0.95 < seen["mismatch/ess"] < 1
    assert seen["mismatch/unequal_tokens"] > 0.9 * sum(len(t.logprobs) for t in done)
    plain = run(serve(fast(), Storage()))
    assert mismatch(np.concatenate([t.logprobs for t in plain]), recomputed(fast(), plain))["mismatch/max_abs"] < 1e-4


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_pool_holds_the_keys_and_values_in_eight_bits(fast, tiny_spec, kind) -> None:
    """Of the first layer, whose input no quantisation has touched."""
    one, other = serve(fast(), Storage()), serve(fast(), Storage(kind))
    for engine in (one, other):
        engine.generate(prompts()[1:2], {"q17": [1]}, SamplingParams(1.0, 1, frozenset()))
    for side in (0, 1):
        real, held = np.asarray(one._pools[0][0][side]), other._pools[0][0][side]
        read = np.asarray(take(held, jnp.arange(len(real)), "float32"))
        rows = np.flatnonzero(np.abs(real).sum((1, 2)))
        assert len(rows) >= 17 and held.held.dtype == DTYPES[kind]
        step = np.asarray(held.scale)[..., None]
        near = step / 2 if kind == "int8" else np.maximum(np.abs(real) / 16, step / 1024)
        assert (np.abs(read - real)[rows] <= (near * 1.001 + 1e-6)[rows]).all()
        assert np.abs(read - real)[rows].max() > 1e-4
    page = fast().num.page_size
    wanted = pool_bytes(other.num_pages, page, row_bytes(tiny_spec, "float32", kind))
    assert other.kv_bytes_per_device() == wanted < one.kv_bytes_per_device() / 2


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}, {"data": 2}], ids=str)
def test_the_weights_are_numpys_wherever_they_lie(fast, axes: dict[str, int]) -> None:
    programs = fast(**axes)
    engine = serve(programs, Storage(weights="int8"))
    params, nbytes = weights(programs), 0
    for i, layer in enumerate(engine.weights.layers):
        matrices = layer_matrices({k: params[f"layers.{i}.{k}"] for k in layer})
        assert set(matrices) == {"q", "k", "v", "o", "gate", "up", "down"}
        for name, leaf in layer.items():
            if name not in matrices:
                assert leaf is params[f"layers.{i}.{name}"], "norms and adapters are what was installed"
                continue
            held, scale = by_hand(np.asarray(matrices[name]), "int8", 0)
            np.testing.assert_array_equal(leaf.held, held)
            np.testing.assert_array_equal(leaf.scale, scale)
            nbytes += sum(a.addressable_shards[0].data.nbytes for a in leaf)
    assert engine.weights.head["table"] is params["embed"] and engine.weights.embed is params["embed"]
    assert nbytes == int8_bytes(programs.leaves, programs.mesh.shape)


def bits(done: list[Trajectory]) -> list[tuple]:
    return [(t.completion_ids.tolist(), t.logprobs.tobytes()) for t in done]


@pytest.mark.slow
def test_every_install_makes_the_copies_anew_and_frees_the_old_ones(fast) -> None:
    """Noise, then the weights again: what they gave before; no array of a replaced copy lives on."""
    engine = serve(fast(), Storage("int8", "int8"))
    wanted = bits(run(engine))
    noise, alive = weights(fast(), 9), []
    for _ in range(2):  # what was installed gets views of its shards the first time that it is looked at
        engine.install(PolicyVersion(5, "noise"), noise)
        assert bits(run(engine)) != wanted
        engine.install(PolicyVersion(6, "again"), weights(fast()))
        assert bits(run(engine)) == wanted
        gc.collect()
        alive.append(len(jax.live_arrays()))
    assert alive[0] == alive[1]
    # One matrix alone is enough to see that nothing is believed to be there already.
    moved = {**weights(fast()), "layers.1.up": noise["layers.1.up"]}
    engine.install(PolicyVersion(7, "moved"), moved)
    assert bits(run(engine)) != wanted
    held, _ = by_hand(np.asarray(noise["layers.1.up"]), "int8", 0)
    np.testing.assert_array_equal(engine.weights.layers[1]["up"].held, held)


def test_preempted_rows_come_back_in_eight_bits(fast) -> None:
    """Swapped rows keep their held bits and scales: whatever was read before is read again."""
    free, tight = serve(fast(), Storage("int8")), serve(fast(), Storage("int8"), num_pages=6, swap="always")
    done, again = run(free), run(tight)
    assert tight.stats.swaps > 0
    assert [t.completion_ids.tolist() for t in done] == [t.completion_ids.tolist() for t in again]
    for a, b in zip(done, again, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=0.02)  # fast mode: the batch is another


def test_an_audit_sees_what_is_really_held(fast) -> None:
    for real in (Storage(), *STORAGES):
        engine = serve(fast(), real)
        for said in (Storage(), *STORAGES):
            held = sampler_holds(engine, said, "float32")
            assert all(is_ == meant for is_, meant in held.values()) == (real == said), (real, said, held)


def test_exact_mode_refuses_it_in_words(tiny_programs) -> None:
    for storage in STORAGES:
        with pytest.raises(ConfigError, match=r"exact mode: the trainer computes with unquantised .*mode = 'fast'"):
            Engine(tiny_programs(1), slots=32, max_positions=48, fingerprint=FINGERPRINT, storage=storage)


@pytest.mark.slow
def test_with_parts_the_cache_may_be_quantised_and_the_matrices_may_not(fast) -> None:
    """A head's keys and values have scales of their own, so it makes no difference on which device the head is."""
    one, two = (serve(fast(2, tensor=t), Storage("int8")) for t in (1, 2))
    assert two.kv_bytes_per_device() * 2 == one.kv_bytes_per_device()
    for a, b in zip(run(one), run(two), strict=True):
        np.testing.assert_array_equal(a.completion_ids, b.completion_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)
    with pytest.raises(ConfigError, match="int8 where blocks are computed in 2 parts"):
        serve(fast(2, tensor=2), Storage(weights="int8"))


def test_the_fingerprint_names_it(tiny_folder) -> None:
    tokenizer, num = Tokenizer.from_hf(tiny_folder), Numerics("float32", 0, 16)
    made = [make_fingerprint(tokenizer, PARAMS, num, "cpu", s) for s in (Storage(), *STORAGES)]
    assert len({f.numerics for f in made}) == len(made)
    assert all(f.difference(made[0]) == ["numerics"] for f in made[1:])
    assert made[0] == make_fingerprint(tokenizer, PARAMS, num, "cpu")


def test_only_what_is_quantised_is_told_apart(fast) -> None:
    """The trainer's side of the same programs: unquantised arrays run the program that they always ran."""
    programs = fast()
    split = SplitWeights.of(weights(programs), programs.spec.num_layers)
    layer = split.layers[0]
    assert programs._of(layer) == {k: programs._specs[k] for k in layer}
    quantised = replace(split, layers=({**layer, "q": quantise(layer["q"], DTYPES["int8"], 0)},))
    assert isinstance(programs._of(quantised.layers[0])["q"], Quantised)
