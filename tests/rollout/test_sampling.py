"""Requests that ask for more than a temperature: what comes out, what is recorded, and that nobody else notices."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.cluster.programs import SplitWeights
from lockstep.errors import ConfigError
from lockstep.models.decoder import reference_logits
from lockstep.rollout.engine import Engine
from lockstep.train.batching import Geometry, make_micro_batches
from lockstep.train.forward import score
from lockstep.types import Prompt, SamplingParams, Trajectory

PROMPT = Prompt("s", "", (7, 8, 9, 10, 7, 8))
PLAIN = SamplingParams(1.0, 8, frozenset())
SEEDS = list(range(12))


@pytest.fixture(scope="module")
def engine(make_engine) -> Engine:
    """One that tests share: each leaves it idle. Its tokens are bytes."""
    return make_engine(decode=lambda ids: bytes(i % 256 for i in ids).decode(errors="replace"))


def run(engine: Engine, params: SamplingParams, prompt: Prompt = PROMPT, seeds: list[int] = SEEDS) -> list[Trajectory]:
    return engine.generate([prompt], {prompt.id: seeds}, params)


def bits(t: Trajectory) -> tuple:
    return t.completion_ids.tolist(), t.logprobs.tobytes(), t.finish_reason


def logits(engine: Engine, t: Trajectory) -> np.ndarray:
    """[T, V] by the slow forward pass."""
    spec, params = engine.programs.spec, {k: np.asarray(v) for k, v in engine_params(engine).items()}
    ids = np.concatenate([t.prompt_ids, t.completion_ids])
    return np.asarray(reference_logits(spec, params, ids[None]), np.float64)[0, len(t.prompt_ids) - 1 : -1]


def engine_params(engine: Engine) -> dict[str, Any]:
    w = engine.weights
    assert isinstance(w, SplitWeights)
    layers = {f"layers.{i}.{k}": v for i, layer in enumerate(w.layers) for k, v in layer.items()}
    return {"embed": w.embed, "final_norm": w.head["final_norm"], **layers}


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.logaddexp.reduce(z, -1, keepdims=True)


CHANGES: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.05, "temperature": 0.8},
    {"allowed_ids": frozenset(range(40, 90))},
    {"forbidden_ids": frozenset(range(250))},
    {"min_new_tokens": 5, "stop_ids": frozenset(range(100))},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3},
    {"logit_bias": ((5, 4.0), (6, -2.0)), "temperature": 1.3},
    {"temperature": 0.0, "forbidden_ids": frozenset({3})},
    {"top_logprobs": 3},
    {"stop_strings": ("zz",), "top_k": 60},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: "+".join(c))
def test_the_record_is_of_the_distribution_drawn_from_and_of_the_trainers(engine: Engine, change: dict) -> None:
    params = replace(PLAIN, **change)
    done = run(engine, params)
    temperature = params.temperature or 1.0
    geometry = Geometry(1, 1024, engine.programs.num.tile_rows, engine.programs.num.page_size)
    batches = make_micro_batches(done, np.zeros(len(done)), temperature, geometry)
    found: list[np.ndarray | None] = [None] * len(done)
    for batch, flat in zip(batches, score(engine.programs, engine.weights, batches), strict=True):
        batch.scatter(flat, found)
    for t, recomputed in zip(done, found, strict=True):
        assert recomputed is not None and t.logprobs.tobytes() == recomputed.tobytes(), "bit for bit the trainer's"
        assert (t.kept_logmass is not None) == ((params.truncates or params.reshapes) and params.temperature > 0)
        z, at = logits(engine, t), np.arange(len(t.completion_ids))
        for i in at:
            drawn_from = log_softmax(changed(z[i], params, t, i))
            if params.temperature > 0:
                np.testing.assert_allclose(t.sampled_logprobs[i], drawn_from[t.completion_ids[i]], atol=2e-5)
            else:
                assert t.completion_ids[i] == drawn_from.argmax()
        if params.truncates and t.kept_logmass is not None:
            assert (t.kept_logmass <= 0).all() and (t.kept_logmass < 0).any()


def changed(z: np.ndarray, p: SamplingParams, t: Trajectory, i: int) -> np.ndarray:
    """[V] logits of the distribution that token i was to be drawn from, step by step as it is documented."""
    z, before = z.copy(), t.completion_ids[:i].tolist()
    seen = sorted({*t.prompt_ids.tolist(), *before})
    z[seen] = np.where(z[seen] > 0, z[seen] / p.repetition_penalty, z[seen] * p.repetition_penalty)
    for token in set(before):
        z[token] -= p.presence_penalty + p.frequency_penalty * before.count(token)
    for token, bias in p.logit_bias:
        z[token] += bias
    out = set(p.forbidden_ids) | (set(range(len(z))) - p.allowed_ids if p.allowed_ids is not None else set())
    z[sorted(out | (set(p.stop_ids) if i + 1 < p.min_new_tokens else set()))] = -np.inf
    z /= p.temperature or 1.0
    order = np.argsort(-z, kind="stable")
    if p.top_k:
        z[order[p.top_k :]] = -np.inf
    mass = np.cumsum(np.exp(log_softmax(z)[order]))
    z[order[1:][mass[:-1] >= p.top_p]] = -np.inf
    z[z < z.max() + np.log(p.min_p or 1e-300)] = -np.inf
    return z


def test_neutral_changes_draw_what_a_plain_row_draws(engine: Engine) -> None:
    """The second program, asked for nothing that matters: same tokens, same bits."""
    plain = run(engine, PLAIN)
    for neutral in (
        {"top_logprobs": 1},
        {"top_k": 262},
        {"min_p": 1e-30},
        {"forbidden_ids": frozenset({261}), "top_k": 262},
    ):
        other = run(engine, replace(PLAIN, **neutral))
        if "forbidden_ids" not in neutral:
            assert [bits(t) for t in other] == [bits(t) for t in plain]
        assert all(t.kept_logmass is None or (np.abs(t.kept_logmass) < 0.05).all() for t in other)


def test_rows_do_not_notice_what_others_ask_for(engine: Engine) -> None:
    wanted = [PLAIN, replace(PLAIN, top_p=0.5), replace(PLAIN, repetition_penalty=1.3), replace(PLAIN, temperature=0.0)]
    alone = [[bits(t) for t in run(engine, p, seeds=[1, 2])] for p in wanted]
    for number, params in enumerate(wanted):
        engine.submit(replace(PROMPT, id=str(number)), [1, 2], params)
    done: dict[tuple[str, int], tuple] = {}
    while engine.busy:
        done |= {(t.group_id, t.index): bits(t) for t in engine.step()}
    assert [[done[str(n), i] for i in (0, 1)] for n in range(len(wanted))] == alone


def test_the_likeliest_ids_are_listed(engine: Engine) -> None:
    for t in run(engine, replace(PLAIN, top_logprobs=3, temperature=0.7), seeds=[1, 2]):
        assert t.details is not None and t.details.prompt_logprobs is None and t.kept_logmass is None
        assert t.details.top_ids is not None and t.details.top_logprobs is not None
        lp = log_softmax(logits(engine, t) / 0.7)
        order = np.argsort(-lp, -1, kind="stable")[:, :3]
        assert t.details.top_ids.tolist() == order.tolist() and t.details.top_ids.shape == (8, 3)
        np.testing.assert_allclose(t.details.top_logprobs, np.take_along_axis(lp, order, 1), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_likely_id_has_the_log_probability_that_drawing_it_records(engine: Engine, temperature: float) -> None:
    """Bit for bit, whether it was drawn with the list, or by a sample that asked for nothing."""
    hot = replace(PLAIN, temperature=temperature)
    listed = run(engine, replace(hot, top_logprobs=8), seeds=[*range(6)])
    plain = run(engine, hot, seeds=[*range(6, 26)])
    first = {int(t.completion_ids[0]): t.logprobs[0].tobytes() for t in plain}
    compared = 0
    for t in listed:
        assert t.details is not None and t.details.top_ids is not None and t.details.top_logprobs is not None
        for drawn, value, ids, values in zip(
            t.completion_ids, t.logprobs, t.details.top_ids, t.details.top_logprobs, strict=True
        ):
            for i in np.flatnonzero(ids == drawn):
                assert values[i].tobytes() == value.tobytes()
                compared += 1
    of_first = dict(zip(listed[0].details.top_ids[0].tolist(), listed[0].details.top_logprobs[0], strict=True))
    shared = of_first.keys() & first.keys()
    assert {i: of_first[i].tobytes() for i in shared} == {i: first[i] for i in shared}
    assert compared > 5 and shared


def test_a_prompt_is_scored_without_a_draw(engine: Engine) -> None:
    """Also one that fills every position, and several waiting for one pass over it."""
    length = engine.max_positions
    prompt = Prompt("full", "", tuple(np.random.default_rng(1).integers(0, 262, length).tolist()))
    scored = replace(PLAIN, prompt_logprobs=True, max_new_tokens=0)
    drawn = engine.stats.completion_tokens
    first, second = run(engine, scored, prompt, [1, 2])
    assert engine.stats.completion_tokens == drawn and not engine.busy and engine.check_integrity()
    assert (len(first.completion_ids), first.finish_reason, first.versions.tolist()) == (0, "length", [])
    shorter = replace(prompt, id="shorter", ids=prompt.ids[:-1])
    (drew,) = run(engine, replace(scored, max_new_tokens=1), shorter, [1])
    got = [t.details.prompt_logprobs for t in (first, second, drew) if t.details is not None]
    assert got[0].tobytes() == got[1].tobytes() and got[0][:-1].tobytes() == got[2].tobytes()
    with pytest.raises(ConfigError, match="nothing to draw"):
        run(engine, replace(scored, prompt_logprobs=False), prompt, [1])


def test_prompts_are_scored(engine: Engine) -> None:
    prompt = Prompt("long", "", tuple(np.random.default_rng(0).integers(0, 262, 40).tolist()))
    run(engine, PLAIN, prompt, [1])
    t, u = run(engine, replace(PLAIN, prompt_logprobs=True, temperature=0.7), prompt, [1, 2])
    assert t.details is not None and t.details.prompt_logprobs is not None and u.details is not None
    got = t.details.prompt_logprobs
    assert got.shape == (40,) and np.isnan(got[0]) and got.tobytes() == u.details.prompt_logprobs.tobytes()
    params = {k: np.asarray(v) for k, v in engine_params(engine).items()}
    z = np.asarray(reference_logits(engine.programs.spec, params, t.prompt_ids[None]), np.float64)[0] / 0.7
    wanted = log_softmax(z)[np.arange(39), t.prompt_ids[1:]]
    np.testing.assert_allclose(got[1:], wanted, atol=1e-5)
    assert bits(t) == bits(run(engine, replace(PLAIN, temperature=0.7), prompt, [1])[0]), "hit or miss, the same bits"


def test_stop_texts_end_where_the_tokens_first_hold_them(engine: Engine) -> None:
    free = run(engine, replace(PLAIN, max_new_tokens=20), seeds=SEEDS)
    candidates = [(t.completion_ids[i], t.completion_ids[i + 1]) for t in free for i in range(3, 12)]
    pair = next((a, b) for a, b in candidates if a % 256 < 128 and b % 256 < 128)
    stop = bytes([pair[0] % 256, pair[1] % 256]).decode()
    cut = run(engine, replace(PLAIN, max_new_tokens=20, stop_strings=(stop, "never said")), seeds=SEEDS)
    stopped = 0
    for whole, part in zip(free, cut, strict=True):
        n = len(part.completion_ids)
        assert part.completion_ids.tolist() == whole.completion_ids.tolist()[:n]
        assert part.logprobs.tobytes() == whole.logprobs[:n].tobytes()
        said = bytes(i % 256 for i in part.completion_ids).decode(errors="replace")
        assert said.endswith(stop) if part.finish_reason == "stop" else stop not in said
        assert stop not in said[:-1], "the first time, and all tokens are kept"
        stopped += part.finish_reason == "stop"
    assert stopped, "the case must show a stop"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_p": 0.0}, "top_p 0.0 is not > 0 and <= 1"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_k": -1}, "top_k -1 is not >= 0"),
        ({"min_p": float("nan")}, "min_p nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is not a finite number > 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty inf"),
        ({"min_new_tokens": 9}, "min_new_tokens 9 is not in 0..max_new_tokens = 8"),
        ({"top_logprobs": 263}, "top_logprobs 263 is not in 0..262"),
        ({"logit_bias": ((262, 1.0),)}, "token id 262 is not in the vocabulary of 262"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias names an id twice"),
        ({"logit_bias": ((1, float("-inf")),)}, "use forbidden_ids to rule an id out"),
        ({"allowed_ids": frozenset({1}), "forbidden_ids": frozenset({1})}, "leave no id to draw"),
        ({"min_new_tokens": 1, "stop_ids": frozenset({1}), "allowed_ids": frozenset({1})}, "leave no id to draw"),
        ({"stop_strings": ("",)}, "stop_strings holds an empty text"),
        ({"top_p": 2.0, "min_p": 3.0}, "top_p 2.0 is not > 0 and <= 1 (1 keeps all); min_p 3.0"),
    ],
)
def test_what_has_no_meaning_is_refused(engine: Engine, change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match="prompt 's'") as error:
        run(engine, replace(PLAIN, **change))
    assert words in str(error.value) and not engine.busy


def test_stop_texts_need_a_tokenizer(make_engine) -> None:
    with pytest.raises(ConfigError, match="made without `decode`"):
        run(make_engine(), replace(PLAIN, stop_strings=("a",)))
