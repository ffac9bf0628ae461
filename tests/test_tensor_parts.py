"""Tensor parallelism that no bit can see: any number of devices along `tensor`, on either side, samples, records and
recomputes the same. The number of parts is fixed; who computes them is not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from lockstep.algorithm_section import AlgorithmConfig
from lockstep.algorithms import make_algorithm
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.errors import ConfigError
from lockstep.models import load_model, parts
from lockstep.models.decoder import Numerics
from lockstep.models.init import init_params
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import LayerKind, Leaf, ModelSpec, Rope, leaf_table
from lockstep.rollout.drafts import Payoff, SeenDrafts
from lockstep.rollout.engine import Engine, request_seed
from lockstep.train.batching import Geometry, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.trainer import Trainer
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

TILE, PAGE, PARTS = 16, 16, 4
LORA = LoraSpec(rank=4, alpha=8.0)
FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
Axes = tuple[tuple[str, int], ...]

ALONE: Axes = ()
TWO: Axes = (("tensor", 2),)
FOUR: Axes = (("tensor", 4),)
MIXED: Axes = (("fsdp", 2), ("tensor", 2))
ALL: Axes = (("data", 2), ("fsdp", 2), ("tensor", 2))
WIDE: Axes = (("data", 2), ("tensor", 4))

_layers = (LayerKind(Rope(100.0), window=7), LayerKind(Rope(10000.0)))
SPECS = {
    "qwen": ModelSpec("qwen", 264, 40, 8, 4, 8, 72, _layers, 1e-6, 8**-0.5, 512, qkv_bias=True, qk_norm=True),
    "gemma": ModelSpec(
        "gemma", 264, 48, 4, 4, 12, 80, _layers, 1e-6, 12**-0.5, 512, tied_head=True, post_norms=True,
        norm_offset=1.0, embed_scale=0.7, activation="gelu_tanh", attn_softcap=50.0, final_softcap=30.0,
    ),
    # As in SmolLM2, 4 divides neither the heads nor, here, the vocabulary.
    "odd": ModelSpec("llama", 263, 48, 9, 3, 8, 80, _layers, 1e-6, 8**-0.5, 512, tied_head=True),
}  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """One model on one mesh. Equal fields give equal weights, whatever the mesh."""

    spec: str
    dtype: str = "float32"
    lora: bool = False
    axes: Axes = ALONE
    parts: int = PARTS

    @property
    def adapter(self) -> dict[str, Leaf]:
        return adapter_table(SPECS[self.spec], LORA) if self.lora else {}

    def make_programs(self) -> Programs:
        spec = SPECS[self.spec]
        numerics = Numerics(self.dtype, TILE, PAGE, LORA.scale if self.lora else 0.0, self.parts)
        mesh = Dial.build({"actor": dict(self.axes)}).mesh("actor")
        return Programs(spec, numerics, mesh, {**leaf_table(spec), **self.adapter})

    @property
    def programs(self) -> Programs:
        return _programs(self)

    @property
    def params(self) -> dict[str, jax.Array]:
        return _params(self)

    def engine(self, programs: Programs | None = None, **options) -> Engine:
        sizes = {"slots": TILE, "max_positions": 32, "num_pages": 24, "prefill_rows": TILE} | options
        engine = Engine(programs or self.programs, fingerprint=FINGERPRINT, **sizes)
        engine.install(PolicyVersion(0, "digest"), self.params)
        return engine

    def sampled(self, programs: Programs | None = None) -> list[Trajectory]:
        return self.engine(programs).generate(*requests(self.spec))

    def recomputed(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """The trainer's log-probabilities of all tokens."""
        geometry = Geometry(self.programs.row_shards, TILE, TILE, PAGE)
        batches = make_micro_batches(trajectories, np.zeros(len(trajectories)), 1.0, geometry)
        weights = SplitWeights.of(self.params, len(_layers))
        found: list[np.ndarray | None] = [None] * len(trajectories)
        for batch, flat in zip(batches, score(self.programs, weights, batches), strict=True):
            batch.scatter(flat, found)
        return np.concatenate([np.asarray(lp) for lp in found])


@cache
def _programs(policy: Policy) -> Programs:
    return policy.make_programs()


@cache
def _params(policy: Policy) -> dict[str, jax.Array]:
    """Random weights, no leaf at its initial value."""
    spec, rng = SPECS[policy.spec], np.random.default_rng(3)
    host = init_params(spec, 3) | {p: np.zeros(leaf.shape, np.float32) for p, leaf in policy.adapter.items()}
    host = {p: (v + 0.15 * rng.standard_normal(v.shape)).astype(np.float32) for p, v in sorted(host.items())}
    host["final_norm"] = host["final_norm"] + np.float32(1 - spec.norm_offset)
    return place(host, policy.programs.leaves, policy.programs.mesh)


@cache
def requests(spec: str) -> tuple[list[Prompt], dict[str, list[int]], SamplingParams]:
    """Of at most TILE positions, so that everything is of one shape: compiling is what these tests spend time on."""
    rng = np.random.default_rng(12)
    prompts = [
        Prompt(f"p{i}", "", tuple(rng.integers(0, SPECS[spec].vocab_size, n).tolist())) for i, n in enumerate((1, 9, 5))
    ]
    seeds = {p.id: [request_seed(0, 1, p.id, i) for i in range(3)] for p in prompts}
    return prompts, seeds, SamplingParams(1.0, 6, frozenset())


@cache
def record(policy: Policy) -> list[Trajectory]:
    return policy.sampled()


def bits(trajectories: Sequence[Trajectory]) -> list[tuple[bytes, bytes]]:
    return [(t.completion_ids.tobytes(), t.logprobs.tobytes()) for t in trajectories]


def unequal(trajectories: Sequence[Trajectory], again: np.ndarray) -> int:
    recorded = np.concatenate([t.logprobs for t in trajectories])
    return int((recorded.view(np.uint32) != again.view(np.uint32)).sum())


# Every mesh samples what the single device samples, and recomputes what it recorded: so any two agree.
CASES = [(Policy("odd"), MIXED)]
SLOW = [
    (Policy(spec, dtype, lora), axes)
    for spec in SPECS
    for dtype in ("float32", "bfloat16")
    for lora in (False, True)
    for axes in (TWO, FOUR, MIXED, ALL, WIDE)
]


def name(value: object) -> str:
    if isinstance(value, Policy):
        return f"{value.spec} {value.dtype}{' lora' if value.lora else ''}"
    return " ".join(f"{axis}={size}" for axis, size in value)


@pytest.mark.parametrize(
    ("policy", "axes"), CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW if c not in CASES], ids=name
)
def test_every_mesh_samples_and_recomputes_the_same_bits(policy: Policy, axes: Axes) -> None:
    one, many = record(policy), record(replace(policy, axes=axes))
    assert sum(len(t.logprobs) for t in one) == 54
    assert bits(one) == bits(many)
    assert unequal(one, replace(policy, axes=axes).recomputed(one)) == 0
    assert unequal(many, policy.recomputed(many)) == 0


def test_the_number_of_parts_does_change_bits() -> None:
    """Else nothing above would compare sums of other orders."""
    whole = replace(CASES[0][0], parts=1)
    assert unequal(record(CASES[0][0]), whole.recomputed(record(CASES[0][0]))) > 0


def _from_the_left(level: Sequence[jax.Array]) -> jax.Array:
    total = level[0]
    for part in level[1:]:
        total = total + part
    return total


def _reduced(total: int, own: tuple[jax.Array, ...]) -> list[jax.Array]:
    """What Megatron does: a device's parts summed, then all of these by the network's own order."""
    return [lax.psum(_from_the_left(own), parts.AXIS)]


def _in_bfloat16(total: int, own: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Rounded before it is sent, by those who send."""
    sent = lax.all_gather(jnp.stack([x.astype(jnp.bfloat16) for x in own]), parts.AXIS, axis=0, tiled=True)
    return list(sent.astype(own[0].dtype))


@pytest.mark.parametrize(
    ("place_of_fault", "fault"), [("tree_sum", _from_the_left), ("_gathered", _reduced), ("_gathered", _in_bfloat16)]
)
def test_another_order_of_summation_is_seen(
    place_of_fault: str, fault: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four devices only, as a faulty collective would be."""
    policy, _ = CASES[0]
    monkeypatch.setattr(parts, place_of_fault, fault)
    on_four = replace(policy, axes=FOUR)
    assert bits(on_four.sampled(on_four.make_programs())) != bits(record(policy))


class AlwaysDraft(Payoff):
    """As many guesses as fit, whatever they cost."""

    def best(self, sequences: int, rows: int, room: int) -> int:
        return min(self.most, room // sequences) if sequences else 0


@pytest.mark.slow
def test_swaps_drafts_and_changed_distributions_on_a_mesh() -> None:
    """Too few pages, caches that are cut by heads copied out and back, tokens guessed, penalties and top-k."""
    policy = Policy("qwen", lora=True)
    prompts, seeds, params = requests("qwen")
    params = replace(params, max_new_tokens=16, top_k=20, presence_penalty=0.5, top_logprobs=2)
    found = []
    for axes in (ALONE, TWO):
        engine = replace(policy, axes=axes).engine(
            num_pages=6, swap="always", drafts=SeenDrafts(), draft_tokens=3, make_payoff=AlwaysDraft
        )
        done = engine.generate(prompts, seeds, params)
        stats = engine.stats
        assert min(stats.swaps, stats.drafted) > 0
        found.append((bits(done), [(t.kept_logmass.tobytes(), t.details.top_logprobs.tobytes()) for t in done]))
    assert found[0] == found[1]


def test_the_cache_is_cut_by_heads_where_heads_are() -> None:
    def on(policy: Policy, axes: Axes) -> int:
        return replace(policy, axes=axes).engine().kv_bytes_per_device()

    cut, whole = Policy("qwen", lora=True), Policy("odd")
    assert on(cut, ALONE) == 2 * on(cut, TWO) == 4 * on(cut, FOUR)
    assert on(whole, ALONE) == on(whole, MIXED)


def gradient(policy: Policy, trajectories: Sequence[Trajectory]) -> dict[str, jax.Array]:
    trains = {p: v for p, v in policy.params.items() if not policy.lora or "lora" in p}
    frozen = {p: v for p, v in policy.params.items() if p not in trains}
    algorithm = make_algorithm(AlgorithmConfig(), 8)
    keep = optax.chain(optax.trace(0.0), optax.scale(0.0))
    trainer = Trainer(policy.programs, frozen, trains, algorithm, keep, optax.constant_schedule(1.0), exact=True)
    advantages = np.random.default_rng(1).standard_normal(len(trajectories)).astype(np.float32)
    geometry = Geometry(policy.programs.row_shards, TILE, TILE, PAGE)
    result = trainer.step(make_micro_batches(trajectories, advantages, 1.0, geometry), trajectories, 0)
    assert result.metrics["mismatch/unequal_tokens"] == 0
    return trainer.optimizer_state[0].trace


def check_gradient(policy: Policy, axes: Axes, bound: float) -> None:
    """To `bound` of each leaf's largest entry the single device's; copies of a leaf have the same bits everywhere, or
    the devices' weights would drift apart."""
    one, many = (gradient(replace(policy, axes=a), record(policy)) for a in (ALONE, axes))
    for path, expected in one.items():
        scale = np.abs(expected).max()
        assert scale > 0, path
        assert np.abs(np.asarray(many[path]) - np.asarray(expected)).max() <= bound * scale, path
        copies: dict[str, set[bytes]] = {}
        for shard in many[path].addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(found) == 1 for found in copies.values()), f"{path}: copies differ"


@pytest.mark.parametrize(
    ("policy", "axes"),
    [
        (Policy("odd"), MIXED),
        pytest.param(Policy("qwen", lora=True), FOUR, marks=pytest.mark.slow),
        pytest.param(Policy("qwen"), ALL, marks=pytest.mark.slow),
        pytest.param(Policy("gemma"), WIDE, marks=pytest.mark.slow),
        pytest.param(Policy("odd", lora=True), WIDE, marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_gradients_differ_by_rounding_only(policy: Policy, axes: Axes) -> None:
    """The training step, exact, on records that another mesh made."""
    check_gradient(policy, axes, 1e-5)


def test_a_cotangent_that_is_not_summed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "enter", lambda x: x)
    _programs.cache_clear()
    try:
        with pytest.raises(AssertionError):
            check_gradient(Policy("odd"), MIXED, 1e-2)
    finally:
        _programs.cache_clear()


@pytest.mark.parametrize("count", range(1, 9))
def test_the_tree_is_the_one_that_is_documented(count: int) -> None:
    """((p0 + p1) + (p2 + p3)); of an odd number the last waits. In float32 the order shows."""
    numbers = np.random.default_rng(count).standard_normal((count, 100)).astype(np.float32)

    def expected(low: int, high: int) -> np.ndarray:
        if high - low == 1:
            return numbers[low]
        half = 1 << (high - low - 1).bit_length() - 1
        return expected(low, low + half) + expected(low + half, high)

    np.testing.assert_array_equal(jax.jit(parts.tree_sum)(list(numbers)), expected(0, count))


def test_a_mesh_that_cannot_share_the_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parts = 3, but the mesh has tensor = 2, .* use tensor_parts = 2 or"):
        Policy("qwen", axes=TWO, parts=3).make_programs()


def test_blocks_that_stay_whole_are_named() -> None:
    assert parts.whole_blocks(SPECS["qwen"], PARTS) == parts.whole_blocks(SPECS["odd"], 1) == []
    attention, head = parts.whole_blocks(SPECS["odd"], PARTS)
    assert attention.startswith("attention: computed whole") and attention.endswith(
        "4 parts do not divide 9 heads on 3"
    )
    assert head.startswith("head: ") and head.endswith("a vocabulary of 263")


@pytest.mark.slow
def test_smollm2_on_two_devices() -> None:
    """The real model, whose attention two devices cannot share: MLP and head are."""
    model = load_model("smollm2-135m")
    table, found = leaf_table(model.spec), []
    for axes in (ALONE, TWO):
        mesh = Dial.build({"actor": dict(axes)}).mesh("actor")
        programs = Programs(model.spec, Numerics("float32", 32, PAGE, tensor_parts=2), mesh, table)
        engine = Engine(programs, slots=32, max_positions=64, num_pages=16, prefill_rows=32, fingerprint=FINGERPRINT)
        engine.install(PolicyVersion(0, "digest"), place(model.params, table, mesh))
        prompt = Prompt("p", "", tuple(model.tokenizer.encode("The capital of France is")))
        found.append(engine.generate([prompt], {"p": [1, 2, 3]}, SamplingParams(1.0, 8, model.tokenizer.eos_ids)))
    assert bits(found[0]) == bits(found[1])
