"""The critic: its values against a slow twin, its gradient against a plain loss differentiated as a whole, the same
however the batch is cut; what stops a step; that it learns.

The twin is `reference_logits` of the same model with a head over tokens whose first row is the value head, so the two
share only the layers' own formulas.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.value_loss import ValueTokens, value_loss
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.errors import NumericsError
from lockstep.models.decoder import Numerics, reference_logits
from lockstep.models.init import init_params
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.spec import LayerKind, ModelSpec, Rope, leaf_table
from lockstep.train.batching import Geometry
from lockstep.train.critic import Critic
from lockstep.train.trained_model import TrainedModel
from lockstep.types import Trajectory

TILE, PAGE, CLIP = 16, 4, 0.5
ROPE = Rope(10000.0)
LLAMA = ModelSpec(
    "llama", 60, 12, 6, 2, 4, 20, (LayerKind(ROPE),) * 2, 1e-5, 0.5, 512, tied_head=True, scalar_head=True
)
QWEN = replace(LLAMA, family="qwen3", tied_head=False, qkv_bias=True, qk_norm=True)
GEMMA = replace(
    LLAMA, family="gemma2", post_norms=True, norm_offset=1.0, embed_scale=12**0.5, activation="gelu_tanh",
    attn_softcap=2.0, final_softcap=0.1, layers=(LayerKind(ROPE, 3), LayerKind(Rope(500.0, ("linear", 2.0)))),
)  # fmt: skip
LORA = LoraSpec(2, 6.0, last_layers=1)
Axes = tuple[tuple[str, int], ...]


@cache
def tree(spec: ModelSpec, lora: LoraSpec | None) -> dict[str, np.ndarray]:
    """Every leaf away from its initial value, so that no gradient vanishes because a leaf is zero."""
    leaves = {**leaf_table(spec), **(adapter_table(spec, lora) if lora else {})}
    base = init_params(spec, 3) | {p: np.zeros(leaf.shape) for p, leaf in leaves.items() if ".lora_" in p}
    rng = np.random.default_rng(4)
    return {p: (base[p] + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32) for p, leaf in leaves.items()}


def programs(spec: ModelSpec, axes: Axes, lora: LoraSpec | None) -> Programs:
    mesh = Dial.build({"critic": dict(axes)}).mesh("critic")
    num = Numerics("float32", TILE, PAGE, lora.scale if lora else 0.0, mesh.shape["tensor"])
    return shared_programs(spec, num, mesh, {**leaf_table(spec), **(adapter_table(spec, lora) if lora else {})})


cached_programs = cache(programs)


def critic(
    spec: ModelSpec = LLAMA,
    axes: Axes = (),
    lora: LoraSpec | None = None,
    max_rows: int = 1024,
    optimizer: optax.GradientTransformation | None = None,
    **replaced: np.ndarray,
) -> Critic:
    """The default optimizer applies nothing and keeps the gradient."""
    made = cached_programs(spec, axes, lora)
    params = tree(spec, lora) | replaced
    trains = {p for p in params if lora is None or ".lora_" in p or p == "value_head"}
    frozen, trainable = (
        place({p: params[p] for p in chosen}, {p: made.leaves[p] for p in chosen}, made.mesh)
        for chosen in ([p for p in params if p not in trains], [p for p in params if p in trains])
    )
    keep = optax.chain(optax.trace(0.0), optax.scale(0.0))
    model = TrainedModel(made, frozen, trainable, optimizer or keep, optax.constant_schedule(0.125))
    return Critic(model, Geometry(made.row_shards, max_rows, TILE, PAGE), clip=CLIP)


def gradient(of: Critic) -> dict[str, np.ndarray]:
    return {p: np.asarray(g) for p, g in of.model.optimizer_state[0].trace.items()}


@pytest.fixture(scope="module")
def targets(trajectories: list[Trajectory]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(returns, old values), some near the critic's values and some beyond the clip."""
    rng = np.random.default_rng(9)
    shapes = [len(t.completion_ids) for t in trajectories]
    returns, old = ([rng.standard_normal(n).astype(np.float32) for n in shapes] for _ in range(2))
    return returns, old


def twin(spec: ModelSpec, params: Any, trajectories: list[Trajectory], lora: LoraSpec | None) -> jax.Array:
    """[B, longest] the value at every position of the padded sequences."""
    longest = max(len(t.prompt_ids) + len(t.completion_ids) for t in trajectories)
    tokens = np.zeros((len(trajectories), longest), np.int32)
    for row, t in zip(tokens, trajectories, strict=True):
        row[: len(t.prompt_ids) + len(t.completion_ids)] = np.concatenate([t.prompt_ids, t.completion_ids])
    head = jnp.zeros((spec.vocab_size, spec.dim)).at[0].set(jnp.asarray(params["value_head"])[0])
    with_tokens = replace(spec, scalar_head=False, tied_head=False, final_softcap=None)
    leaves = {p: x for p, x in params.items() if p != "value_head"} | {"head": head}
    return reference_logits(with_tokens, leaves, tokens, lora.scale if lora else 0.0)[..., 0]


CASES: dict[str, dict[str, Any]] = {
    "gemma, everything": {"spec": GEMMA},
    "lora and head on qwen, fsdp x tensor": {"spec": QWEN, "lora": LORA, "axes": (("fsdp", 2), ("tensor", 2))},
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name[0] in "gl")) for name in CASES])
def test_values_and_gradients_are_those_of_the_plain_way(case: str, trajectories, targets) -> None:
    """Values to 1e-5; the gradient of every leaf to 1e-4 of its largest entry."""
    made = critic(**CASES[case])
    spec, lora = CASES[case]["spec"], CASES[case].get("lora")
    returns, old = targets
    frozen = {p: np.asarray(x) for p, x in made.model.frozen.items()}
    trainable = {p: np.asarray(x) for p, x in made.model.trainable.items()}

    def loss(trained: Any) -> Any:
        table = twin(spec, {**frozen, **trained}, trajectories, lora)
        total, count, found = 0.0, 0, []
        for row, t, r, o in zip(table, trajectories, returns, old, strict=True):
            # Before token t: the position of the token ahead of it.
            v = row[len(t.prompt_ids) - 1 : len(t.prompt_ids) + len(t.completion_ids) - 1]
            held = o + jnp.clip(v - o, -CLIP, CLIP)
            total += jnp.maximum((v - r) ** 2, (held - r) ** 2).sum() / 2
            count += len(r)
            found.append(v)
        return total / count, found

    (expected_loss, expected), expected_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)
    for got, wanted in zip(made.values(trajectories), expected, strict=True):
        assert got.dtype == np.float32 and got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    metrics = made.step(trajectories, returns, old, 3)
    assert 0.1 < metrics["critic/clip_fraction"] < 0.9 and metrics["critic/lr"] == 0.125
    np.testing.assert_allclose(metrics["critic/loss"], expected_loss, rtol=1e-5)
    flat_v, flat_r = (np.concatenate([np.asarray(x, np.float64) for x in xs]) for xs in (expected, returns))
    np.testing.assert_allclose(
        metrics["critic/explained_variance"], 1 - (flat_r - flat_v).var() / flat_r.var(), rtol=1e-4
    )
    np.testing.assert_allclose(metrics["critic/value"], flat_v.mean(), rtol=1e-4)
    assert gradient(made).keys() == expected_gradient.keys()
    for path, wanted in expected_gradient.items():
        scale = float(np.abs(wanted).max())
        assert scale > 0, f"{path}: nothing to compare"
        assert np.abs(gradient(made)[path] - wanted).max() <= 1e-4 * scale, path


@pytest.mark.parametrize(("axes", "max_rows"), [((), 16), ((("data", 2),), 16)])
@pytest.mark.slow
def test_no_cut_of_the_batch_changes_a_value_bit_or_the_update(axes, max_rows, trajectories, targets) -> None:
    whole, cut = critic(), critic(axes=axes, max_rows=max_rows)
    a, b = whole.step(trajectories, *targets, 0), cut.step(trajectories, *targets, 0)
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=2e-6, err_msg=name)
    for path, wanted in gradient(whole).items():
        assert np.abs(gradient(cut)[path] - wanted).max() <= 2e-6 * np.abs(wanted).max(), path
    order = np.random.default_rng(8).permutation(len(trajectories))
    moved = cut.values([trajectories[i] for i in order])
    for i, values in zip(order, moved, strict=True):
        assert values.tobytes() == whole.values(trajectories)[i].tobytes()
        assert len(values) == len(trajectories[i].completion_ids)


def test_a_zero_head_gives_exactly_zero(trajectories) -> None:
    made = critic(value_head=np.zeros((1, LLAMA.dim), np.float32))
    assert all((v == 0).all() for v in made.values(trajectories))


def test_a_number_that_is_not_finite_stops_the_step_and_changes_nothing(trajectories, targets) -> None:
    returns, old = targets
    spoiled = [np.where(np.arange(len(r)) == 0, np.nan, r).astype(np.float32) for r in returns]
    made = critic(optimizer=optax.adamw(1e-2))
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(made.model.state)]
    with pytest.raises(NumericsError, match=r"returns of sample . of 'group/.' hold NaN"):
        made.step(trajectories, spoiled, old, 0)
    with pytest.raises(NumericsError, match="old values of sample"):
        made.step(trajectories, returns, spoiled, 0)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(made.model.state)] == before
    broken = critic(value_head=np.full((1, LLAMA.dim), np.inf, np.float32))
    for act in (lambda: broken.values(trajectories), lambda: broken.step(trajectories, returns, old, 0)):
        with pytest.raises(NumericsError, match=r"the critic's value before token 0 of sample .* is (nan|inf|-inf)"):
            act()


def test_it_learns_what_a_completion_leads_to(trajectories) -> None:
    """Returns that the last token seen decides; after some steps the values explain nearly all of their variance."""
    returns = []
    for t in trajectories:
        before = np.concatenate([t.prompt_ids[-1:], t.completion_ids])[: len(t.completion_ids)]
        returns.append((before % 2).astype(np.float32))
    made = critic(optimizer=optax.adam(1e-2), value_head=np.zeros((1, LLAMA.dim), np.float32))
    explained = []
    for number in range(40):
        old = made.values(trajectories)
        explained.append(made.step(trajectories, returns, old, number)["critic/explained_variance"])
    assert explained[0] == 0 and explained[-1] > 0.9, explained


def test_equal_returns_explain_nothing(trajectories) -> None:
    ones = [np.ones(len(t.completion_ids), np.float32) for t in trajectories]
    assert np.isnan(critic().step(trajectories, ones, ones, 0)["critic/explained_variance"])


# -- the loss alone --------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-48, 48).map(lambda n: n / 16)  # exact in float32, and so are their differences


@settings(max_examples=60)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.booleans()), min_size=6, max_size=6),
    st.sampled_from([0.125, 0.5, 2.0]),
)
def test_the_loss_is_its_definition(tokens: list[tuple[float, float, float, bool]], clip: float) -> None:
    v, old, ret, mask = (np.array(x) for x in zip(*tokens, strict=True))
    held = np.clip(v, old - clip, old + clip)
    each = 0.5 * np.maximum((v - ret) ** 2, (held - ret) ** 2)
    garbage = [np.where(mask, x, np.nan).astype(np.float32) for x in (v, old, ret)]
    share, metrics = value_loss(jnp.asarray(garbage[0]), ValueTokens(mask, *garbage[1:]), np.float32(7), clip)
    np.testing.assert_allclose(share, each[mask].sum() / 7, rtol=1e-4, atol=1e-5)
    assert 0 <= float(metrics["clip_fraction"]) <= mask.sum() / 7 + 1e-6


def test_beyond_the_clip_a_token_has_no_gradient_where_that_would_pay() -> None:
    """From the recorded 0 with clip 0.5: towards the return, past the clip: none; away from it: the full one."""
    tokens = ValueTokens(np.ones(3, bool), np.zeros(3, np.float32), np.array([2, -2, 2], np.float32))
    slope = jax.grad(lambda v: value_loss(v, tokens, np.float32(1), 0.5)[0])(jnp.array([1.0, 1.0, 0.25]))
    np.testing.assert_allclose(slope, [0.0, 3.0, -1.75])
    free = jax.grad(lambda v: value_loss(v, tokens, np.float32(1), np.inf)[0])(jnp.array([1.0, 1.0, 0.25]))
    np.testing.assert_allclose(free, [-1.0, 3.0, -1.75])
