"""The claim the project stands on: in exact mode the log-probability that the sampler records is the trainer's, bit for
bit. Engine on one side, `train.batching` and `train.forward.score` or `Trainer.step` on the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.algorithms import make_algorithm
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights, numpy_rows
from lockstep.cluster.sharding import place
from lockstep.errors import MismatchError
from lockstep.models import load_model
from lockstep.models.decoder import Numerics
from lockstep.models.init import init_params
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table
from lockstep.rollout.drafts import Payoff, SeenDrafts
from lockstep.rollout.engine import Engine, request_seed
from lockstep.train.batching import Geometry, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.trainer import Trainer, mismatch
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

TILE, PAGE = 32, 16
POOL_PAGES = 48  # the same for most engines: a pool of another size is another shape to compile
FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
LORA = LoraSpec(rank=4, alpha=8.0, last_layers=1)
Axes = tuple[tuple[str, int], ...]

_plain, _windowed = LayerKind(Rope(10000.0)), LayerKind(Rope(100.0), window=7)
_llama3 = LayerKind(Rope(1000.0, ("llama3", 8.0, 1.0, 4.0, 32)))
SPECS = {
    "llama": ModelSpec("llama", 262, 32, 4, 2, 8, 48, (_llama3, _plain), 1e-5, 8**-0.5, 512, tied_head=True),
    "qwen": ModelSpec(
        "qwen", 131, 37, 6, 3, 10, 53, (_plain, _plain), 1e-6, 10**-0.5, 512, qkv_bias=True, qk_norm=True
    ),
    "gemma": ModelSpec(
        "gemma", 300, 48, 4, 1, 12, 80, (_windowed, _plain), 1e-6, 12**-0.5, 512, tied_head=True, post_norms=True,
        norm_offset=1.0, embed_scale=0.7, activation="gelu_tanh", attn_softcap=50.0, final_softcap=30.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """One model on one mesh. Equal fields give equal weights, whatever the mesh."""

    spec: str
    dtype: str = "float32"
    axes: Axes = ()
    lora: bool = False
    tile: int = TILE
    parts: int = 1

    @property
    def programs(self) -> Programs:
        return _programs(self)

    @property
    def adapter(self) -> dict[str, Leaf]:
        return adapter_table(SPECS[self.spec], LORA) if self.lora else {}

    @property
    def params(self) -> dict:
        return _params(self)

    def engine(
        self, slots: int = 32, prefill_rows: int = 32, num_pages: int = POOL_PAGES, version: int = 0, **options: Any
    ) -> Engine:
        engine = Engine(
            self.programs, slots=slots, max_positions=64, num_pages=num_pages, prefill_rows=prefill_rows,
            fingerprint=FINGERPRINT, **options,
        )  # fmt: skip
        engine.install(PolicyVersion(version, "digest"), self.params)
        return engine

    def recompute(self, trajectories: Sequence[Trajectory], temperature: float, max_rows: int) -> list[np.ndarray]:
        weights = SplitWeights.of(self.params, self.programs.spec.num_layers)
        return recompute(self.programs, weights, trajectories, temperature, max_rows)


@cache
def _programs(policy: Policy) -> Programs:
    spec = SPECS[policy.spec]
    mesh = Dial.build({"actor": dict(policy.axes)}).mesh("actor")
    numerics = Numerics(policy.dtype, policy.tile, PAGE, LORA.scale if policy.lora else 0.0, policy.parts)
    return Programs(spec, numerics, mesh, {**leaf_table(spec), **policy.adapter})


@cache
def _params(policy: Policy) -> dict:
    """Random weights, no leaf at its initial value (biases, norms and lora_b included); a peaked distribution."""
    spec, programs = SPECS[policy.spec], _programs(policy)
    rng = np.random.default_rng(3)
    host = init_params(spec, 3) | {p: np.zeros(leaf.shape, np.float32) for p, leaf in policy.adapter.items()}
    host = {p: (v + 0.15 * rng.standard_normal(v.shape)).astype(np.float32) for p, v in sorted(host.items())}
    host["final_norm"] = host["final_norm"] + np.float32(1 - spec.norm_offset)
    return place(host, programs.leaves, programs.mesh)


def recompute(
    programs: Programs, weights: SplitWeights, trajectories: Sequence[Trajectory], temperature: float, max_rows: int
) -> list[np.ndarray]:
    """The trainer's log-probabilities per trajectory."""
    geometry = Geometry(programs.row_shards, max_rows, programs.num.tile_rows, programs.num.page_size)
    batches = make_micro_batches(trajectories, np.zeros(len(trajectories)), temperature, geometry)
    found: list[np.ndarray | None] = [None] * len(trajectories)
    for batch, flat in zip(batches, score(programs, weights, batches), strict=True):
        batch.scatter(flat, found)
    assert all(lp is not None for lp in found)
    return [np.asarray(lp) for lp in found]


def assert_same_bits(trajectories: Sequence[Trajectory], recomputed: Sequence[np.ndarray]) -> None:
    recorded = np.concatenate([t.logprobs for t in trajectories])
    again = np.concatenate(recomputed)
    unequal = int((recorded.view(np.uint32) != again.view(np.uint32)).sum())
    assert not unequal, f"{unequal} of {len(again)} tokens differ: {mismatch(recorded, again)}"


def same_trajectory(a: Trajectory, b: Trajectory) -> bool:
    return a.completion_ids.tolist() == b.completion_ids.tolist() and a.logprobs.tobytes() == b.logprobs.tobytes()


# Prompt length, samples, new tokens, temperature: lengths on both sides of page ends, prompt and completion. Sized so
# that each temperature's rows make one micro-batch of one shape: compiling is what these tests spend their time on.
MIXED = [
    (1, 2, 1, 1.0), (5, 1, 40, 0.6), (15, 3, 5, 1.3), (16, 1, 5, 0.0), (17, 2, 40, 1.0), (31, 1, 5, 0.6),
    (32, 2, 1, 1.3), (33, 2, 5, 0.6), (40, 1, 20, 1.3), (40, 2, 5, 0.0), (2, 1, 40, 0.0), (8, 5, 4, 1.0),
]  # fmt: skip
LONGEST = 59


@dataclass(frozen=True)
class Wanted:
    """One request of the mixed batch."""

    prompt: Prompt
    seeds: tuple[int, ...]
    params: SamplingParams


@cache
def mixed_requests(spec: str) -> list[Wanted]:
    rng = np.random.default_rng(11)
    made = []
    for number, (length, samples, new_tokens, temperature) in enumerate(MIXED):
        prompt = Prompt(f"p{number}", "", tuple(rng.integers(0, SPECS[spec].vocab_size, length).tolist()))
        seeds = tuple(request_seed(0, 1, prompt.id, i) for i in range(samples))
        made.append(Wanted(prompt, seeds, SamplingParams(temperature, new_tokens, frozenset())))
    return made


def run(engine: Engine, requests: Iterable[Wanted]) -> dict[tuple[str, int], Trajectory]:
    """All requests in one mixed batch, temperatures and all."""
    for r in requests:
        engine.submit(r.prompt, r.seeds, r.params)
    done: list[Trajectory] = []
    while engine.busy:
        done += engine.step()
    return {(t.group_id, t.index): t for t in done}


def by_temperature(
    requests: Sequence[Wanted], done: Mapping[tuple[str, int], Trajectory]
) -> dict[float, list[Trajectory]]:
    groups: dict[float, list[Trajectory]] = {}
    for r in requests:
        groups.setdefault(r.params.temperature, []).extend(done[r.prompt.id, i] for i in range(len(r.seeds)))
    return groups


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("llama", "float32"),
        pytest.param("qwen", "float32", marks=pytest.mark.slow),
        pytest.param("gemma", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gemma", "float32", marks=pytest.mark.slow),
        pytest.param("qwen", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_record_is_the_trainers_bit_for_bit(spec: str, dtype: str) -> None:
    """Temperatures 0 (recorded at 1), 0.6, 1 and 1.3 side by side; 1 to 40 new tokens; chunked prefill; late admission
    (23 samples, some on 16 slots); micro-batches as large as they get and as small as they may be."""
    policy, requests = Policy(spec, dtype), mixed_requests(spec)
    sizes = (LONGEST, 1024) if (spec, dtype) in (("llama", "float32"), ("gemma", "bfloat16")) else (1024,)
    done = run(policy.engine(slots=16), requests)
    groups = by_temperature(requests, done)
    assert sum(len(t.logprobs) for t in done.values()) > 200
    for temperature, trajectories in groups.items():
        for max_rows in sizes:
            assert_same_bits(trajectories, policy.recompute(trajectories, temperature, max_rows))
    # The comparison can fail: another temperature, another policy.
    assert mismatch(
        np.concatenate([t.logprobs for t in groups[0.6]]), np.concatenate(policy.recompute(groups[0.6], 1.0, 1024))
    )["mismatch/unequal_tokens"]


@cache
def alone(spec: str) -> dict[tuple[str, int], Trajectory]:
    """The mixed requests, each by itself and on an engine with nothing else to do."""
    engine = Policy(spec).engine()
    return {key: t for r in mixed_requests(spec) for key, t in run(engine, [r]).items()}


@settings(max_examples=12)
@given(
    order=st.lists(st.integers(0, len(MIXED) - 1), unique=True, min_size=1),
    slots=st.sampled_from([1, 3, 32, 64]),
    prefill_rows=st.sampled_from([1, 7, 32, 64]),
    arrivals=st.lists(st.integers(0, 5), min_size=len(MIXED), max_size=len(MIXED)),
)
def test_a_completion_does_not_depend_on_its_company(
    order: list[int], slots: int, prefill_rows: int, arrivals: list[int]
) -> None:
    """Tokens and log-probabilities, bit for bit: any subset, order, time of arrival, slots, prefill chunk."""
    engine = Policy("llama").engine(slots, prefill_rows)
    requests, done = mixed_requests("llama"), []
    for number, wait in zip(order, arrivals, strict=False):
        r = requests[number]
        engine.submit(r.prompt, r.seeds, r.params)
        for _ in range(wait):
            done += engine.step()
    while engine.busy:
        done += engine.step()
    assert len(done) == sum(len(requests[i].seeds) for i in order)
    assert all(same_trajectory(t, alone("llama")[t.group_id, t.index]) for t in done)


def test_the_smallest_pool_gives_the_same_completions() -> None:
    """Pages for one request at a time, handed from one to the next with whatever the last one left in them."""
    done = run(Policy("llama").engine(num_pages=6), mixed_requests("llama"))
    assert all(same_trajectory(t, alone("llama")[key]) for key, t in done.items())


class AlwaysDraft(Payoff):
    """As many guesses as fit, whatever they cost."""

    def best(self, sequences: int, rows: int, room: int) -> int:
        return min(self.most, room // sequences) if sequences else 0


@pytest.mark.parametrize(
    ("spec", "dtype", "swap"),
    [("llama", "float32", "never"), pytest.param("gemma", "bfloat16", "always", marks=pytest.mark.slow)],
)
def test_the_record_is_the_trainers_with_everything_on(spec: str, dtype: str, swap: str) -> None:
    """Pages run out, samples are swapped or computed again, prompts and completions come from the cache, tokens are
    guessed ahead: the second time everything was seen before."""
    policy, requests = Policy(spec, dtype), mixed_requests(spec)
    engine = policy.engine(
        slots=16, num_pages=8, swap=swap, drafts=SeenDrafts(), draft_tokens=3, make_payoff=AlwaysDraft
    )
    first, again = run(engine, requests), run(engine, requests)
    assert all(same_trajectory(t, again[key]) for key, t in first.items())
    for temperature, trajectories in by_temperature(requests, again).items():
        assert_same_bits(trajectories, policy.recompute(trajectories, temperature, 1024))
    stats = engine.stats
    assert min(stats.preemptions, stats.cached_tokens, stats.accepted) > 0 and (stats.swaps > 0) == (swap == "always")


ROLLOUT_MESHES: list[Axes] = [(), (("data", 2),), (("data", 4),), (("fsdp", 2), ("tensor", 2))]
TRAINER_MESHES: list[Axes] = [(), (("fsdp", 2),), (("fsdp", 4),), (("data", 2), ("fsdp", 2)), (("tensor", 4),)]
SHORT = [(1, 2, 3, 1.0), (9, 3, 4, 1.0), (12, 2, 5, 1.0), (3, 1, 2, 1.0), (7, 2, 5, 1.0)]


def short_requests(spec: str) -> tuple[list[Prompt], dict[str, list[int]], SamplingParams]:
    rng = np.random.default_rng(12)
    prompts = [
        Prompt(f"p{i}", "", tuple(rng.integers(0, SPECS[spec].vocab_size, row[0]).tolist()))
        for i, row in enumerate(SHORT)
    ]
    seeds = {p.id: [request_seed(0, 1, p.id, i) for i in range(row[1])] for p, row in zip(prompts, SHORT, strict=True)}
    return prompts, seeds, SamplingParams(1.0, 4, frozenset())


def on_mesh(axes: Axes, like: Axes) -> Policy:
    """Four parts if the mesh `like` shares them, of which attention has two heads, so that it is computed whole."""
    return Policy("llama", lora=True, axes=axes, parts=4 if "tensor" in dict(like) else 1)


@cache
def short_run(policy: Policy) -> list[Trajectory]:
    return policy.engine(num_pages=16).generate(*short_requests(policy.spec))


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(ROLLOUT_MESHES[1], marks=pytest.mark.slow),
        pytest.param(ROLLOUT_MESHES[2], marks=pytest.mark.slow),
        pytest.param(ROLLOUT_MESHES[3], marks=pytest.mark.slow),
    ],
)
def test_sampling_on_a_mesh_is_sampling_on_one_device(axes: Axes) -> None:
    one, many = (short_run(on_mesh(a, axes)) for a in ((), axes))
    assert all(same_trajectory(a, b) for a, b in zip(one, many, strict=True))


@pytest.mark.parametrize(
    "axes", [*TRAINER_MESHES[:2], *(pytest.param(axes, marks=pytest.mark.slow) for axes in TRAINER_MESHES[2:])]
)
def test_the_record_is_the_trainers_on_any_mesh(axes: Axes) -> None:
    """With the record of the single device, which is that of every rollout mesh (the test before). Under LoRA, with an
    adapter that is not zero, on the last layer only."""
    trajectories = short_run(on_mesh((), axes))
    for max_rows in (16, 1024):
        assert_same_bits(trajectories, on_mesh(axes, axes).recompute(trajectories, 1.0, max_rows))


def test_the_adapter_reaches_the_sampler() -> None:
    base, adapted = short_run(Policy("llama")), short_run(Policy("llama", lora=True))
    assert any(a.completion_ids.tolist() != b.completion_ids.tolist() for a, b in zip(base, adapted, strict=True))


def make_trainer(policy: Policy) -> Trainer:
    params = policy.params
    trains = {p: v for p, v in params.items() if not policy.lora or "lora" in p}
    frozen = {p: v for p, v in params.items() if p not in trains}
    algorithm = make_algorithm(AlgorithmConfig(), 8)
    optimizer, schedule = optax.sgd(0.5), optax.constant_schedule(0.5)
    return Trainer(policy.programs, frozen, trains, algorithm, optimizer, schedule, exact=True)


@pytest.mark.parametrize(
    ("policy", "sampler"),
    [
        (Policy("llama", lora=True, axes=(("fsdp", 2),)), Policy("llama", lora=True)),
        pytest.param(Policy("gemma", "bfloat16"), Policy("gemma", "bfloat16"), marks=pytest.mark.slow),
    ],
    ids=["lora on a mesh, trunk shared", "full bfloat16"],
)
def test_the_training_step_itself_sees_the_record(policy: Policy, sampler: Policy) -> None:
    """Trainer.step compares before it updates: equal bits pass, a single flipped bit or stale weights do not."""
    trajectories = short_run(sampler)
    advantages = np.random.default_rng(1).standard_normal(len(trajectories)).astype(np.float32)
    geometry = Geometry(policy.programs.row_shards, 16, TILE, PAGE)
    batches = make_micro_batches(trajectories, advantages, 1.0, geometry)
    assert len(batches) > 1
    trainer = make_trainer(policy)
    before = trainer.trainable
    flipped = list(trajectories)
    bits = flipped[-1].logprobs.view(np.uint32).copy()
    bits[-1] ^= 1
    flipped[-1] = replace(flipped[-1], logprobs=bits.view(np.float32))
    with pytest.raises(MismatchError, match=r"token \d+ of sample 1 of 'p4' \(policy version 0\) was recorded"):
        trainer.step(make_micro_batches(flipped, advantages, 1.0, geometry), flipped, 0)
    assert trainer.trainable is before, "an update was applied on a record that does not match"
    trunks = trainer.trunks(batches)
    assert (trunks is not None) == policy.lora
    result = trainer.step(batches, trajectories, 0, trunks)
    assert result.metrics["mismatch/unequal_tokens"] == 0 and result.metrics["mismatch/max_abs"] == 0
    assert_same_bits(trajectories, [lp for lp in result.logprobs if lp is not None])
    assert trainer.trainable is not before
    with pytest.raises(MismatchError, match=r"recomputed as .* No update was applied"):
        trainer.step(batches, trajectories, 1, trunks)


@pytest.mark.slow
def test_a_thousand_tokens() -> None:
    policy = Policy("gemma", "bfloat16")
    engine = Engine(policy.programs, slots=32, max_positions=1003, num_pages=192, fingerprint=FINGERPRINT)
    engine.install(PolicyVersion(0, "digest"), policy.params)
    done = engine.generate([Prompt("p", "", (1, 2, 3))], {"p": [1, 2]}, SamplingParams(1.0, 1000, frozenset()))
    assert [len(t.logprobs) for t in done] == [1000, 1000]
    assert_same_bits(done, policy.recompute(done, 1.0, 2048))


def test_fast_mode_differs_by_rounding_only() -> None:
    """No tiles: what the mismatch metrics of a `fast` run start from, 1.1e-5 nats at most when this was written. The
    completions need not be those of exact mode."""
    fast = Policy("qwen", tile=0)
    trajectories = short_run(fast)
    recorded = np.concatenate([t.logprobs for t in trajectories])
    found = mismatch(recorded, np.concatenate(fast.recompute(trajectories, 1.0, 1024)))
    assert found["mismatch/max_abs"] < 5e-5
    assert abs(found["mismatch/k1"]) < 1e-5 and found["mismatch/ess"] > 1 - 1e-6


@pytest.mark.parametrize(
    ("spec", "dtype"), [pytest.param("gemma", "bfloat16", marks=pytest.mark.slow), ("qwen", "float32")]
)
def test_a_rows_bits_depend_on_the_row_alone(spec: str, dtype: str) -> None:
    """One layer and the head, without an engine: 48 rows at other places of other tiles, among other numbers of rows,
    with wider indices, a larger pool, and NaN in the pool row that stands for what nobody may see."""
    policy = Policy(spec, dtype)
    programs, rng = policy.programs, np.random.default_rng(2)
    model, weights = programs.spec, SplitWeights.of(policy.params, 2)
    count, pool_rows = 48, 300
    keys, values = rng.standard_normal((2, pool_rows, model.num_kv_heads, model.head_dim), np.float32)
    hidden = rng.standard_normal((count, model.dim), np.float32)
    length = rng.integers(1, 17, count)
    seen = rng.integers(count, pool_rows, (count, 16))
    seen[np.arange(count), length - 1] = np.arange(count)

    def outputs(places: np.ndarray, n: int, width: int, more: int) -> list[tuple[bytes, bytes]]:
        rows = numpy_rows(1, n, width, pool_rows + more)
        x, target = np.zeros((n, model.dim), np.float32), np.zeros(n, np.int32)
        garbage = np.full((more + 1, *keys.shape[1:]), np.nan, np.float32)
        for i, at in enumerate(places):
            rows.pos[at], rows.length[at], rows.write[at] = length[i] - 1, length[i], i
            rows.read[at, : length[i]] = seen[i, : length[i]]
            x[at], target[at] = hidden[i], i % model.vocab_size
        pool = programs.put_rows(tuple(jnp.asarray(np.concatenate([a, garbage]), dtype) for a in (keys, values)))
        y, _ = programs.layer(weights, 0, programs.put_rows(jnp.asarray(x, dtype)), programs.put_rows(rows), (pool,))
        scored = (target, np.full(n, 0.6, np.float32))
        logp = np.asarray(programs.logprobs(weights, y, *programs.put_rows(scored)))
        host = np.asarray(y.astype(jnp.float32))
        return [(host[at].tobytes(), logp[at].tobytes()) for at in places]

    expected = outputs(np.arange(count), 64, 16, 0)
    for n, width, more in ((64, 16, 40), (256, 64, 0)):
        assert outputs(rng.permutation(n)[:count], n, width, more) == expected


def test_smollm2_records_what_the_trainer_computes() -> None:
    """The real model: 135 million parameters, 49152 tokens, 30 layers."""
    model = load_model("smollm2-135m")
    mesh = Dial.build({"actor": {}}).mesh("actor")
    table = leaf_table(model.spec)
    programs = Programs(model.spec, Numerics("float32", TILE, PAGE), mesh, table)
    params = place(model.params, table, mesh)
    texts = ["1 + 1 = 2\n5 + 2 = 7\n31 + 22 =", "The capital of France is", "def add(a, b):\n    return"]
    prompts = [Prompt(text, text, tuple(model.tokenizer.encode(text))) for text in texts]
    seeds = {p.id: [request_seed(0, 1, p.id, i) for i in range(2)] for p in prompts}
    engine = Engine(programs, slots=32, max_positions=64, num_pages=16, prefill_rows=64, fingerprint=FINGERPRINT)
    engine.install(PolicyVersion(0, "digest"), params)
    trajectories = engine.generate(prompts, seeds, SamplingParams(1.0, 5, model.tokenizer.eos_ids))
    weights = SplitWeights.of(params, model.spec.num_layers)
    assert_same_bits(trajectories, recompute(programs, weights, trajectories, 1.0, 128))
    said = [model.tokenizer.decode(t.completion_ids.tolist()) for t in trajectories]
    assert any("Paris" in text for text in said[2:4]), said
