"""Several policies in one engine: each sample comes out as if its policy were the only one there ever was.

Compared, bit for bit, with the same request alone on an engine of its own that never served another policy, and with
the trainer's log-probabilities under the weights of the version that the trajectory names.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.errors import NumericsError, SyncError
from lockstep.models.decoder import Numerics
from lockstep.models.init import init_params
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import leaf_table
from lockstep.rollout.drafts import Payoff, SeenDrafts
from lockstep.rollout.engine import Engine, request_seed
from lockstep.train.batching import Geometry, make_micro_batches
from lockstep.train.forward import score
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
POLICIES = (7, 8, 9)  # by seed of their weights
# Prompt length, samples, new tokens; the first three begin alike, beyond a page.
SHAPES = [(20, 3, 24), (23, 2, 9), (18, 1, 24), (5, 3, 17), (16, 1, 12), (1, 2, 20)]
LORA = LoraSpec(rank=4, alpha=8.0, last_layers=1)
MAX_ROWS = 512  # of the trainer's micro-batches


@cache
def asked(kind: int) -> tuple[tuple[int, ...], list[int], SamplingParams]:
    """(prompt ids, seeds, parameters) of a kind of request."""
    rng = np.random.default_rng(5)
    alike = rng.integers(0, 262, 17).tolist()
    bodies = [rng.integers(0, 262, length).tolist() for length, *_ in SHAPES]
    ids = alike + bodies[kind][17:] if kind < 3 else bodies[kind]
    _, samples, new = SHAPES[kind]
    # A hot and a cold kind: what is cold repeats itself, so that guesses are right.
    params = SamplingParams(0.3 if kind % 2 else 1.0, new, frozenset({3}))
    return tuple(ids), [request_seed(0, 1, f"k{kind}", i) for i in range(samples)], params


class AsManyAsFit(Payoff):
    """Drafts without a thought of time."""

    def best(self, sequences: int, rows: int, room: int) -> int:
        return min(self.most, room // sequences) if sequences else 0


@dataclass(frozen=True)
class House:
    """What an engine is made of. policy(devices, seed): the weights of one."""

    programs: Callable[[int], Programs]
    policy: Callable[[int, int], dict[str, jax.Array]]

    def engine(self, devices: int = 1, drafts: bool = False, **options: Any) -> Engine:
        sizes: dict[str, Any] = {"slots": 32, "max_positions": 48, "num_pages": 24, "prefill_rows": 32}
        guesses = {"drafts": SeenDrafts(), "draft_tokens": 3, "make_payoff": AsManyAsFit} if drafts else {}
        return Engine(self.programs(devices), **(sizes | guesses | options), fingerprint=FINGERPRINT)

    def alone(self, seed: int, kind: int) -> list[tuple[list[int], bytes]]:
        """Samples of a request on an engine that does nothing else."""
        return _alone(self, seed, kind)

    def rescored(self, seed: int, trajectories: list[Trajectory]) -> list[np.ndarray]:
        """The trainer's log-probabilities, temperature by temperature."""
        programs = self.programs(1)
        weights = SplitWeights.of(self.policy(1, seed), programs.spec.num_layers)
        geometry = Geometry(1, MAX_ROWS, programs.num.tile_rows, programs.num.page_size)
        found: dict[int, np.ndarray] = {}
        for temperature in (0.3, 1.0):
            places = [i for i, t in enumerate(trajectories) if asked(kind_of(t))[2].temperature == temperature]
            mine = [trajectories[i] for i in places if len(trajectories[i].logprobs)]
            scores: list[np.ndarray | None] = [None] * len(mine)
            batches = make_micro_batches(mine, np.zeros(len(mine)), temperature, geometry) if mine else []
            for batch, flat in zip(batches, score(programs, weights, batches), strict=True):
                batch.scatter(flat, scores)
            nothing = np.zeros(0, np.float32)
            again = iter(scores)
            found |= {i: next(again) if len(trajectories[i].logprobs) else nothing for i in places}
        return [found[i] for i in range(len(trajectories))]


@cache
def _alone(house: House, seed: int, kind: int) -> list[tuple[list[int], bytes]]:
    ids, seeds, params = asked(kind)
    engine = house.engine()
    engine.install(PolicyVersion(0, "alone"), house.policy(1, seed))
    done = engine.generate([Prompt("p", "", ids)], {"p": seeds}, params)
    assert engine.stats.preemptions == engine.stats.cached_tokens == 0
    return [bits(t) for t in done]


def kind_of(t: Trajectory) -> int:
    return int(t.group_id.split("/")[0])


def bits(t: Trajectory) -> tuple[list[int], bytes]:
    return t.completion_ids.tolist(), t.logprobs.tobytes()


@pytest.fixture(scope="module")
def full(tiny_programs, tiny_params) -> House:
    return House(tiny_programs, tiny_params)


@pytest.fixture(scope="module")
def lora(tiny_spec) -> House:
    """Policies that share a frozen base, the very arrays."""
    adapter = adapter_table(tiny_spec, LORA)
    leaves = {**leaf_table(tiny_spec), **adapter}

    @cache
    def programs(devices: int) -> Programs:
        mesh = Dial.build({"rollout": {"data": devices}}).mesh("rollout")
        return Programs(tiny_spec, Numerics("float32", 32, 16, LORA.scale), mesh, leaves)

    @cache
    def base(devices: int) -> dict[str, jax.Array]:
        host = init_params(tiny_spec, 7)
        host["final_norm"] = host["final_norm"] * np.float32(3)
        return place(host, leaf_table(tiny_spec), programs(devices).mesh)

    @cache
    def policy(devices: int, seed: int) -> dict[str, jax.Array]:
        rng = np.random.default_rng(seed)
        mine = {p: rng.standard_normal(leaf.shape).astype(np.float32) for p, leaf in adapter.items()}
        return {**base(devices), **place(mine, adapter, programs(devices).mesh)}

    return House(programs, policy)


@dataclass
class Run:
    """An engine under way; what each request was submitted under is written down when it is submitted."""

    house: House
    engine: Engine
    devices: int
    under: dict[str, tuple[PolicyVersion, int]] = field(default_factory=dict)  # by prompt id: version, seed of weights
    done: list[Trajectory] = field(default_factory=list)
    installs: int = 0
    now: tuple[PolicyVersion, int] | None = None
    lanes_run: list[int] = field(default_factory=list)

    def install(self, seed: int) -> None:
        version = PolicyVersion(self.installs, f"w{seed}")
        self.engine.install(version, self.house.policy(self.devices, seed))
        self.installs, self.now = self.installs + 1, (version, seed)

    def submit(self, kind: int) -> str:
        ids, seeds, params = asked(kind)
        name = f"{kind}/{len(self.under)}"
        self.engine.submit(Prompt(name, "", ids), seeds, params)
        assert self.now is not None
        self.under[name] = self.now
        return name

    def step(self) -> None:
        self.done += self.engine.step()
        self.lanes_run.append(self.engine._lanes.ran)
        self.engine.check_integrity()

    def finish(self) -> None:
        while self.engine.busy:
            self.step()

    def check(self) -> None:
        """Everything is answered once, as if alone, under its version, and scored so by the trainer."""
        wanted = {(name, i) for name in self.under for i in range(SHAPES[int(name.split("/")[0])][1])}
        assert len(self.done) == len(wanted) and {(t.group_id, t.index) for t in self.done} == wanted
        for t in self.done:
            version, seed = self.under[t.group_id]
            ids, logprobs = self.house.alone(seed, kind_of(t))[t.index]
            n = len(t.completion_ids)
            assert bits(t) == (ids[:n], logprobs[: 4 * n]) and (n == len(ids)) == (t.finish_reason != "abort")
            assert t.versions.tolist() == [version.number] * n
        for seed in POLICIES:
            mine = [t for t in self.done if self.under[t.group_id][1] == seed]
            for t, again in zip(mine, self.house.rescored(seed, mine), strict=True):
                assert t.logprobs.tobytes() == again.tobytes(), "the trainer scores it otherwise under its version"
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        assert self.now is not None and self.engine.versions == (self.now[0],)
        assert [r.version.number for r in sorted(self.engine.take_retired(), key=lambda r: r.version.number)] == list(
            range(self.installs - 1)
        )
        self.install(POLICIES[0])
        free, cached, used, total = self.engine.pages
        assert (free, cached, used) == (total, 0, 0) and len(self.engine.take_retired()) == 1


def begin(house: House, devices: int = 1, **options: Any) -> Run:
    run = Run(house, house.engine(devices, **options), devices)
    run.install(POLICIES[0])
    return run


@pytest.mark.parametrize(
    ("kind", "devices", "options"),
    [
        pytest.param("full", 1, {"decode_steps": 8}, marks=pytest.mark.slow),
        ("full", 1, {"decode_steps": 1, "num_pages": 9, "swap": "always"}),
        ("full", 1, {"decode_steps": 8, "num_pages": 9, "swap": "never", "slots": 5}),
        ("full", 1, {"drafts": True, "num_pages": 6, "swap": "always"}),
        pytest.param("full", 2, {"decode_steps": 8, "num_pages": 9, "swap": "always"}, marks=pytest.mark.slow),
        ("full", 2, {"drafts": True, "num_pages": 9, "swap": "never"}),
        pytest.param("lora", 1, {"decode_steps": 8, "num_pages": 9, "swap": "always"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_samples_run_through_installs_as_if_alone(request, kind: str, devices: int, options: dict[str, Any]) -> None:
    """Two requests, a step, another policy: six installs, all of them under way."""
    run = begin(request.getfixturevalue(kind), devices, **options)
    for i, seed in enumerate((8, 9, 7, 8, 9, None)):
        for number in (0, 1, 2, 3, 4, 5)[2 * i % 6 :][:2]:
            run.submit(number)
        run.step()
        if seed is not None:
            run.install(seed)
    assert len(run.engine.versions) == 6
    run.finish()
    stats = run.engine.stats
    assert len(set(run.lanes_run)) == 6 and (stats.cached_tokens > 0 or devices > 1)
    turns = sum(a != b for a, b in zip(run.lanes_run, run.lanes_run[1:], strict=False))
    assert turns > 6, "they did not take turns"
    if "num_pages" in options:
        assert stats.preemptions > 0 and (stats.swaps > 0) == (options["swap"] == "always")
    if options.get("drafts"):
        assert stats.accepted > 0
    run.check()


ops = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, len(SHAPES) - 1)),
        st.tuples(st.just("submit"), st.integers(0, len(SHAPES) - 1)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("install"), st.sampled_from(POLICIES)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    max_size=24,
)


@settings(max_examples=12)
@given(
    house=st.sampled_from(["full", "full", "lora"]),
    devices=st.sampled_from([1, 2]),
    slots=st.sampled_from([2, 32]),
    num_pages=st.sampled_from([9, 24]),
    swap=st.sampled_from(["always", "never"]),
    decode_steps=st.sampled_from([1, 8]),
    drafts=st.booleans(),
    ops=ops,
)
def test_whatever_happens_every_sample_is_its_own_policys(
    full, lora, house: str, devices: int, slots: int, num_pages: int, swap: str, decode_steps: int, drafts: bool, ops
) -> None:
    run = begin(
        {"full": full, "lora": lora}[house], 1 if house == "lora" else devices, slots=slots, num_pages=num_pages,
        swap=swap, decode_steps=decode_steps, drafts=drafts,
    )  # fmt: skip
    for what, value in ops:
        if what == "submit":
            run.submit(value)
        elif what == "install":
            run.install(value)
        elif what == "step":
            for _ in range(value):
                run.step() if run.engine.busy else None
        elif run.under:
            run.done += run.engine.abort(list(run.under)[value % len(run.under)])
        run.engine.check_integrity()
    run.finish()
    run.check()


# -- lanes are installs ------------------------------------------------------------------------------------------------


def test_one_name_for_two_policies_does_not_mix_them(full) -> None:
    """The same version again, and the same number with another digest, while samples of it are under way."""
    run = begin(full)
    for version, seed in ((PolicyVersion(0, "w7"), 8), (PolicyVersion(0, "other"), 9)):
        run.submit(0)
        run.step()
        run.engine.install(version, full.policy(1, seed))
        run.now = (version, seed)
    run.submit(0)
    assert run.engine.versions == (PolicyVersion(0, "w7"), PolicyVersion(0, "w7"), PolicyVersion(0, "other"))
    run.finish()
    for t in run.done:
        assert bits(t) == full.alone(run.under[t.group_id][1], 0)[t.index] and set(t.versions.tolist()) == {0}
    assert len({t.completion_ids.tobytes() for t in run.done}) == 9, "three policies, three samples"


def test_a_prompt_is_not_waited_for_under_another_policy(full) -> None:
    """The same prompt, half computed under the old policy, is begun under the new one at once."""
    run = begin(full, prefill_rows=32, slots=4)
    run.submit(0)
    run.install(8)
    run.submit(0)
    run.step()
    assert run.engine.samples == (4, 2), "all four slots are taken: three of the old policy's samples, one of the new's"
    run.finish()
    run.check()


def test_weights_that_do_not_fit_change_nothing_under_way(full) -> None:
    run = begin(full)
    run.submit(3)
    run.step()
    with pytest.raises(SyncError, match="v9:no does not fit"):
        run.engine.install(PolicyVersion(9, "no"), {})
    run.finish()
    run.check()


def test_weights_that_are_not_finite_break_their_own_samples_only(full) -> None:
    run = begin(full)
    good = run.submit(0)
    run.step()
    params = full.policy(1, 8)
    broken = {**params, "layers.1.up": params["layers.1.up"] * np.float32(np.nan)}
    run.engine.install(PolicyVersion(1, "nan"), broken)
    ids, seeds, sampling = asked(1)
    run.engine.submit(Prompt("bad", "", ids), seeds, sampling)
    with pytest.raises(NumericsError, match="policy v1:nan"):
        run.finish()
    assert run.engine.abort_broken() == ["bad"] and run.engine.samples == (3, 0)
    run.installs = 2
    run.install(9)
    run.finish()
    assert {t.group_id for t in run.done} == {good}
    run.check()


# -- the end of a lane -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["finished", "aborted"])
def test_a_policy_is_let_go_with_its_last_sample(full, end: str) -> None:
    run = begin(full)
    weights = {k: v + 0 for k, v in full.policy(1, 8).items()}
    held = [weakref.ref(v) for v in weights.values()]
    nbytes = sum(v.nbytes for v in weights.values())
    run.engine.install(PolicyVersion(1, "mine"), weights)
    run.installs, run.now = 2, (PolicyVersion(1, "mine"), 8)
    del weights
    assert [r.version.number for r in run.engine.take_retired()] == [0], "idle: the old one goes at once"
    first, second = run.submit(0), run.submit(1)
    run.step()
    run.install(9)
    run.submit(0)
    for _ in range(3):
        run.step()
    run.done += run.engine.abort(first)
    assert run.engine.take_retired() == [] and all(ref() is not None for ref in held)
    cached = sum(len(pages) for pages in run.engine._shards[0].memory.cache.pages().values())
    assert cached > 0
    if end == "aborted":
        run.done += run.engine.abort(second)
    else:
        while any(t.group_id == second for t in run.done) < 1 or len([t for t in run.done if t.group_id == second]) < 2:
            run.step()
    (retired,) = run.engine.take_retired()
    assert retired.version == PolicyVersion(1, "mine") and retired.weight_bytes == nbytes and retired.pages > 0
    assert set(run.engine._shards[0].memory.cache.pages()) <= {2}, "its cache entries are forgotten at once"
    gc.collect()
    assert all(ref() is None for ref in held), "its weights are held by nobody"
    assert run.engine.version == run.now[0]
    run.finish()


def test_only_what_is_really_let_go_is_counted(full, lora) -> None:
    adapters = adapter_table(lora.programs(1).spec, LORA)
    for devices in (1, 2):
        run = begin(lora, devices)
        run.install(8)
        run.engine.install(PolicyVersion(5, "again"), lora.policy(devices, 8))
        run.install(9)
        mine = sum(4 * int(np.prod(leaf.shape)) for leaf in adapters.values())
        assert [r.weight_bytes for r in run.engine.take_retired()] == [devices * mine, 0, devices * mine]
    run = begin(full)
    run.install(8)
    tied = sum(v.nbytes for v in full.policy(1, 7).values())
    assert [r.weight_bytes for r in run.engine.take_retired()] == [tied], "a tied table once"


# -- streaming ---------------------------------------------------------------------------------------------------------


def test_open_samples_are_the_beginnings_of_what_comes(full) -> None:
    run = begin(full, num_pages=5, decode_steps=1)
    names = [run.submit(kind) for kind in (0, 3)]
    seen: dict[tuple[str, int], list[tuple[list[int], list[float]]]] = {}
    while run.engine.busy:
        run.step()
        for name in names:
            for s in run.engine.open_samples(name):
                seen.setdefault((name, s.index), []).append((list(s.tokens), list(s.logprobs)))
    assert run.engine.stats.preemptions > 0 and len(seen) == len(run.done)
    for t in run.done:
        ids, logprobs = t.completion_ids.tolist(), t.logprobs.tolist()
        assert all(
            (i, p) == (ids[: len(i)], logprobs[: len(p)]) and len(i) == len(p) for i, p in seen[t.group_id, t.index]
        )
    assert run.engine.open_samples(names[0]) == run.engine.open_samples("unknown") == []
