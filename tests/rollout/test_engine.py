"""The engine as its callers see it: seeds, stops, versions, aborts, refusals, and how much it compiles.

That its record is the trainer's, and that a completion does not depend on its batch, is in `tests/test_exact.py`.
"""

import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.programs import padded_pages, padded_rows
from lockstep.errors import CapacityError, ConfigError, DataError, NumericsError, ServiceError, SyncError
from lockstep.models.decoder import Numerics
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.engine import Engine, decoding_digest, make_fingerprint, request_seed
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

NO_STOPS: frozenset[int] = frozenset()
FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")


def prompt(number: int = 0, length: int = 5) -> Prompt:
    ids = np.random.default_rng(number).integers(0, 262, length)
    return Prompt(f"p{number}", "", tuple(ids.tolist()))


def complete(
    engine: Engine, number: int, samples: int, new_tokens: int = 6, temperature: float = 1.0, seed: int = 0,
    stops: frozenset[int] = NO_STOPS, length: int = 5,
) -> list[Trajectory]:  # fmt: skip
    p = prompt(number, length)
    seeds = {p.id: [request_seed(seed, 1, p.id, i) for i in range(samples)]}
    return engine.generate([p], seeds, SamplingParams(temperature, new_tokens, stops))


def ids(t: Trajectory) -> list[int]:
    return t.completion_ids.tolist()


@pytest.fixture(scope="module")
def engine(make_engine) -> Engine:
    """One that tests share: each leaves it idle."""
    return make_engine()


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_equal_seeds_equal_completions_other_seeds_others(engine: Engine, make_engine) -> None:
    first, again, other = complete(engine, 1, 6), complete(make_engine(), 1, 6), complete(engine, 1, 6, seed=1)
    for a, b, c in zip(first, again, other, strict=True):
        assert ids(a) == ids(b) and a.logprobs.tobytes() == b.logprobs.tobytes()
        assert ids(a) != ids(c) and a.seed == b.seed != c.seed


def test_samples_of_a_group_differ(engine: Engine) -> None:
    done = complete(engine, 2, 16)
    assert len({tuple(ids(t)) for t in done}) == 16
    assert len({t.seed for t in done}) == 16


def test_a_seed_given_twice_is_one_completion_twice(engine: Engine) -> None:
    p = prompt(3)
    a, b = engine.generate([p], {p.id: [77, 77]}, SamplingParams(1.0, 6, NO_STOPS))
    assert ids(a) == ids(b) and (a.index, b.index) == (0, 1)


def test_greedy_ignores_seeds_and_is_recorded_at_temperature_one(engine: Engine) -> None:
    a, b = complete(engine, 4, 1, temperature=0.0), complete(engine, 4, 2, temperature=0.0, seed=9)
    assert {tuple(ids(t)) for t in (*a, *b)} == {tuple(ids(a[0]))}
    likeliest = a[0].logprobs[0]
    drawn = [t for t in complete(engine, 4, 32, new_tokens=1) if ids(t)[0] == ids(a[0])[0]]
    assert drawn and all(t.logprobs[0] == likeliest for t in drawn)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["a", "a/1", "1"]), st.integers(0, 9)))
def test_request_seeds_fill_64_bits_and_depend_on_every_part(key: tuple[int, int, str, int]) -> None:
    seed = request_seed(*key)
    assert seed == request_seed(*key) and 0 <= seed < 1 << 64
    run, step, name, index = key
    others = [(run + 1, step, name, index), (run, step + 1, name, index), (run, step, name + "b", index),
              (run, step, name, index + 1)]  # fmt: skip
    assert seed not in {request_seed(*other) for other in others}


def test_both_halves_of_a_seed_count(engine: Engine) -> None:
    p = prompt(5)
    seeds = [1, 1 << 32, 1 + (1 << 32), (1 << 64) - 1]
    done = engine.generate([p], {p.id: seeds}, SamplingParams(1.0, 8, NO_STOPS))
    assert [t.seed for t in done] == seeds
    assert len({tuple(ids(t)) for t in done}) == 4


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_trajectories_are_complete_and_in_order(engine: Engine) -> None:
    prompts = [prompt(i, length) for i, length in enumerate((5, 20, 1, 16))]
    seeds = {p.id: [request_seed(0, 1, p.id, i) for i in range(n)] for p, n in zip(prompts, (3, 1, 4, 2), strict=True)}
    before = replace(engine.stats)
    done = engine.generate(prompts, seeds, SamplingParams(1.0, 7, NO_STOPS))
    assert [(t.group_id, t.index) for t in done] == [(p.id, i) for p in prompts for i in range(len(seeds[p.id]))]
    by_id = {p.id: p for p in prompts}
    for t in done:
        assert t.prompt_ids.tolist() == list(by_id[t.group_id].ids) and t.prompt_ids.dtype == np.int32
        assert len(t.completion_ids) == len(t.logprobs) == 7 and (t.logprobs < 0).all()
        assert t.versions.tolist() == [4] * 7 and t.versions.dtype == np.int32
        assert t.finish_reason == "length" and t.seed == seeds[t.group_id][t.index]
        assert t.fingerprint.difference(engine.fingerprint) == ["decoding"] and t.generate_s > 0
        assert t.fingerprint.decoding == decoding_digest(SamplingParams(1.0, 7, NO_STOPS)), "the request's own"
    assert engine.stats.completion_tokens - before.completion_tokens == 70
    assert engine.stats.prompt_tokens - before.prompt_tokens == 42, "each prompt once, however many samples"
    assert engine.stats.rows - before.rows == 42 + 10 * 6
    assert not engine.busy and engine.step() == []


def test_every_stop_id_stops_and_stays_as_the_last_token(engine: Engine) -> None:
    free = complete(engine, 6, 24, new_tokens=12)
    common = [i for i, _ in Counter(i for t in free for i in ids(t)[:8]).most_common(3)]
    stopped = complete(engine, 6, 24, new_tokens=12, stops=frozenset(common))
    ended_by = set()
    for whole, cut in zip(free, stopped, strict=True):
        first = next((i for i, token in enumerate(ids(whole)) if token in common), None)
        if first is None:
            assert ids(cut) == ids(whole) and cut.finish_reason == "length"
        else:
            assert ids(cut) == ids(whole)[: first + 1] and cut.finish_reason == "stop"
            assert cut.logprobs.tobytes() == whole.logprobs[: first + 1].tobytes()
            ended_by.add(ids(cut)[-1])
    assert ended_by == set(common), "the case must show every stop id at work"


def test_a_stop_at_the_last_place_is_a_stop(engine: Engine) -> None:
    last = ids(complete(engine, 7, 1, new_tokens=4)[0])[3]
    first = ids(complete(engine, 7, 1, new_tokens=4)[0]).index(last)
    cut = complete(engine, 7, 1, new_tokens=first + 1, stops=frozenset({last}))[0]
    assert cut.finish_reason == "stop" and ids(cut)[-1] == last and len(ids(cut)) == first + 1


def test_many_devices_give_the_completions_of_one(engine: Engine, make_engine) -> None:
    prompts = [prompt(i, length) for i, length in enumerate((5, 9, 1))]
    seeds = {p.id: [request_seed(0, 1, p.id, i) for i in range(2)] for p in prompts}
    params = SamplingParams(1.0, 4, NO_STOPS)
    one, two = engine.generate(prompts, seeds, params), make_engine(2).generate(prompts, seeds, params)
    assert [(ids(t), t.logprobs.tobytes()) for t in one] == [(ids(t), t.logprobs.tobytes()) for t in two]


def test_requests_go_to_the_device_with_least_to_do(make_engine) -> None:
    engine = make_engine(2)
    for number, samples in ((0, 4), (1, 1), (2, 1), (3, 3)):
        engine.submit(prompt(number), range(samples), SamplingParams(1.0, 3, NO_STOPS))
    assert [s.load for s in engine._shards] == [4, 5]
    while engine.busy:
        engine.step()
    assert [s.load for s in engine._shards] == [0, 0]


# -- versions ----------------------------------------------------------------------------------------------------------


def test_new_weights_are_for_what_is_submitted_after_them(make_engine, tiny_params) -> None:
    """What is under way ends as it would have (more of that in `test_lanes`)."""
    engine = make_engine()
    old = complete(engine, 8, 4)
    engine.install(PolicyVersion(5, "five"), tiny_params(1, 8))
    new = complete(engine, 8, 4)
    assert all(t.versions.tolist() == [5] * 6 for t in new)
    assert all(ids(a) != ids(b) for a, b in zip(old, new, strict=True))
    engine.install(PolicyVersion(6, "six"), tiny_params(1, 7))
    back = complete(engine, 8, 4)
    assert [(ids(t), t.logprobs.tobytes()) for t in back] == [(ids(t), t.logprobs.tobytes()) for t in old]
    assert back[0].versions.tolist() == [6] * 6


def test_weights_that_do_not_fit_are_not_installed(make_engine, tiny_params) -> None:
    engine, params = make_engine(), tiny_params(1, 8)
    wrong = {k: v for k, v in params.items() if k != "layers.1.q"}
    wrong |= {"layers.0.q.lora_a": params["embed"], "layers.0.k": params["layers.0.q"]}
    with pytest.raises(SyncError) as error:
        engine.install(PolicyVersion(5, "five"), wrong)
    for words in ("v5:five", "3 of 29 leaves", "layers.1.q is missing", "layers.0.q.lora_a is unknown", "(32, 16)"):
        assert words in str(error.value)
    assert engine.version == PolicyVersion(4, "four")
    assert complete(engine, 8, 1)[0].versions.tolist() == [4] * 6


def test_weights_that_are_not_finite_record_nothing(make_engine, tiny_params) -> None:
    """And leave nothing behind: the cache holds NaN now, which the next policy's samples must not see."""
    engine, good = make_engine(num_pages=2), complete(make_engine(), 9, 2)
    broken = {**tiny_params(), "layers.1.up": tiny_params()["layers.1.up"] * np.float32(np.nan)}
    engine.install(PolicyVersion(5, "five"), broken)
    with pytest.raises(NumericsError, match="policy v5:five: the model's output is not finite"):
        complete(engine, 9, 2)
    assert [len(ids(t)) for t in engine.abort("p9")] == [0, 0]
    engine.install(PolicyVersion(6, "six"), tiny_params())
    again = complete(engine, 9, 2)
    assert [(ids(t), t.logprobs.tobytes()) for t in again] == [(ids(t), t.logprobs.tobytes()) for t in good]


def test_nothing_can_be_generated_before_weights_are_installed(tiny_programs) -> None:
    engine = Engine(tiny_programs(1), slots=32, max_positions=48, num_pages=24, fingerprint=FINGERPRINT)
    with pytest.raises(ServiceError, match="'p0': no policy is installed yet; install weights first"):
        engine.submit(prompt(), [1], SamplingParams(1.0, 3, NO_STOPS))
    assert engine.version is None and not engine.busy and engine.step() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode_steps": 0}, r"Engine\(decode_steps=0\): expected an integer >= 1"),
        ({"slots": -1}, r"slots=-1\): expected an integer >= 1"),
        ({"prefill_rows": 1.5}, r"prefill_rows=1.5\): expected an integer >= 1"),
        ({"max_positions": True}, "max_positions=True"),
        ({"num_pages": -1}, r"num_pages=-1\): expected an integer >= 0"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"draft_tokens": -1}, "draft_tokens=-1"),
        ({"swap": "sometimes"}, r"swap='sometimes'\): expected 'auto', 'always' or 'never'"),
    ],
)
def test_sizes_without_meaning_are_refused(make_engine, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(**options)


# -- abort -------------------------------------------------------------------------------------------------------------


def test_abort_returns_what_was_sampled_and_frees_everything(make_engine) -> None:
    whole = {t.index: t for t in complete(make_engine(), 10, 3, new_tokens=9)}
    others = complete(make_engine(), 11, 2, new_tokens=9)
    for passes in (0, 1, 4):
        engine = make_engine(slots=4)
        for number, samples in ((10, 3), (11, 2)):
            seeds = [request_seed(0, 1, f"p{number}", i) for i in range(samples)]
            engine.submit(prompt(number), seeds, SamplingParams(1.0, 9, NO_STOPS))
        for _ in range(passes):
            assert engine.step() == []
        cut = engine.abort("p10")
        assert sorted(t.index for t in cut) == [0, 1, 2] and engine.abort("p10") == []
        for t in cut:
            assert t.finish_reason == "abort" and len(ids(t)) == passes and t.versions.tolist() == [4] * passes
            assert ids(t) == ids(whole[t.index])[:passes]
            assert t.logprobs.tobytes() == whole[t.index].logprobs[:passes].tobytes()
        rest = []
        while engine.busy:
            rest += engine.step()
        assert sorted((t.index, ids(t)) for t in rest) == [(t.index, ids(t)) for t in others]
        free, cached, used, total = engine._shards[0].check_integrity()
        assert (free + cached, used, total) == (24, 0, 24)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"length": 0}, CapacityError, ["'p0' has no tokens"]),
        ({"length": 43}, CapacityError, ["43 prompt tokens + 6 new tokens = 49", "sized for 48", "max_prompt_tokens"]),
        ({"new_tokens": 0}, ConfigError, ["1 samples of up to 0 tokens", "one new token"]),
        ({"samples": 0}, ConfigError, ["0 samples", "a seed each"]),
        ({"temperature": -1.0}, ConfigError, ["temperature -1.0", "0 is greedy"]),
        ({"temperature": float("nan")}, ConfigError, ["temperature nan"]),
        ({"ids": (3, 262)}, CapacityError, ["token id 262", "262 entries", "tokenizer is not this model's"]),
        ({"ids": (-1,)}, CapacityError, ["token id -1"]),
        ({"seeds": [1 << 64]}, ConfigError, ["seed 18446744073709551616", "request_seed"]),
        ({"seeds": [-1]}, ConfigError, ["seed -1"]),
    ],
)
def test_what_cannot_be_served_is_refused(engine: Engine, request_: dict, error: type, words: list[str]) -> None:
    p = prompt(0, request_.get("length", 5))
    p = replace(p, ids=request_.get("ids", p.ids))
    params = SamplingParams(request_.get("temperature", 1.0), request_.get("new_tokens", 6), NO_STOPS)
    seeds = request_.get("seeds", [1] * request_.get("samples", 1))
    for call in (lambda: engine.submit(p, seeds, params), lambda: engine.generate([p], {p.id: seeds}, params)):
        with pytest.raises(error) as caught:
            call()
        assert all(word in str(caught.value) for word in words)
        assert not engine.busy


def test_too_few_pages_names_the_key_to_raise(make_engine) -> None:
    with pytest.raises(CapacityError, match=r"need 4 pages of 16 tokens, the pool has 2; raise rollout\.num_pages"):
        complete(make_engine(num_pages=2), 0, 1, new_tokens=20, length=17)


def test_one_bad_prompt_of_many_leaves_the_engine_idle(engine: Engine) -> None:
    prompts = [prompt(0), prompt(1, 45)]
    with pytest.raises(CapacityError, match="'p1'"):
        engine.generate(prompts, {"p0": [1], "p1": [1]}, SamplingParams(1.0, 6, NO_STOPS))
    assert not engine.busy


def test_one_id_for_two_prompts_is_refused(engine: Engine) -> None:
    params, twice = SamplingParams(1.0, 6, NO_STOPS), replace(prompt(1), id="p0")
    with pytest.raises(DataError, match="'p0' is given twice"):
        engine.generate([prompt(0), twice], {"p0": [1]}, params)
    assert not engine.busy
    engine.submit(prompt(0), [1], params)
    with pytest.raises(DataError, match="'p0' is under way already"):
        engine.submit(twice, [2], params)
    with pytest.raises(AssertionError, match="submitted by somebody else"):
        engine.generate([prompt(1)], {"p1": [1]}, params)
    assert [t.index for t in engine.abort("p0")] == [0] and not engine.busy


# -- compilation -------------------------------------------------------------------------------------------------------


@contextmanager
def compilations() -> Iterator[Counter[str]]:
    """What is compiled inside the block, by function (jax's own log)."""
    found: Counter[str] = Counter()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := re.match(r"Compiling jit\((\w+)\)", record.getMessage()):
                found[match[1]] += 1

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Handler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def test_few_programs_are_compiled_whatever_the_lengths(tiny_programs, tiny_params) -> None:
    """Rows are padded to powers of two of the tile, positions to powers of two of the page. So for all prompt lengths 1
    to 80, 1 to 8 samples, 1 to 9 new tokens there are at most 5 sizes of pass (2 to 64) x 4 of index (16 to 128), and 4
    programs to try out the three below the tile, each on a blank pool of its own."""
    programs = type(tiny_programs(1))(*(getattr(tiny_programs(1), k) for k in ("spec", "num", "mesh", "leaves")))
    engine = Engine(programs, slots=32, max_positions=96, num_pages=48, prefill_rows=64, fingerprint=FINGERPRINT)
    engine.install(PolicyVersion(0, "none"), tiny_params(1))
    rng = np.random.default_rng(0)
    with compilations() as found:
        numbers = itertools.count()
        for _ in range(12):
            prompts = [prompt(next(numbers), int(rng.integers(1, 81))) for _ in range(int(rng.integers(1, 5)))]
            seeds = {p.id: list(range(int(rng.integers(1, 9)))) for p in prompts}
            engine.generate(prompts, seeds, SamplingParams(1.0, int(rng.integers(1, 10)), NO_STOPS))
    assert found.pop("broadcast_in_dim", 0) <= 3, "blank pools of the trials"
    assert set(found) == {f"_{n}_program" for n in ("embed", "layer", "pick", "sample", "advance")}, found
    assert found["_layer_program"] <= 24 and found["_embed_program"] <= 5 and found["_sample_program"] <= 3


@given(st.integers(0, 5000), st.sampled_from([0, 8, 32]))
def test_rows_are_padded_to_few_sizes(count: int, tile: int) -> None:
    size, unit = padded_rows(count, tile), tile or 32
    assert size >= count and size % unit == 0 and (size // unit).bit_count() == 1
    assert size == unit or size < 2 * count


@given(st.integers(1, 5000), st.sampled_from([1, 8, 16]))
def test_positions_are_padded_to_few_sizes(count: int, page: int) -> None:
    size = padded_pages(count, page)
    assert size >= count and size % page == 0 and (size // page).bit_count() == 1
    assert size == page or size < 2 * count


def test_the_fingerprint_tells_apart_what_decides_a_log_probability(tiny_folder) -> None:
    tokenizer = Tokenizer.from_hf(tiny_folder)
    sampling, numerics = SamplingParams(1.0, 5, frozenset({1, 2})), Numerics("float32", 32, 16, 2.0)
    base = make_fingerprint(tokenizer, sampling, numerics, "cpu")
    assert base == make_fingerprint(tokenizer, replace(sampling, stop_ids=frozenset({2, 1})), numerics, "cpu")
    changed = {
        "temperature": 0.6, "max_new_tokens": 6, "stop_ids": frozenset({1}), "stop_strings": ("a",), "top_p": 0.9,
        "allowed_ids": frozenset({1, 2}), "logit_bias": ((1, 0.5),),
    }  # fmt: skip
    for key, value in changed.items():
        assert base.difference(make_fingerprint(tokenizer, replace(sampling, **{key: value}), numerics, "cpu")) == [
            "decoding"
        ]
    for key, value in {
        "dtype": "bfloat16",
        "tile_rows": 0,
        "page_size": 8,
        "lora_scale": 1.0,
        "tensor_parts": 2,
    }.items():
        other = make_fingerprint(tokenizer, sampling, replace(numerics, **{key: value}), "cpu")
        assert base.difference(other) == ["numerics"]
    assert base.difference(make_fingerprint(tokenizer, sampling, numerics, "gpu")) == ["numerics"]
