"""The trainer's gradient against a plain loss differentiated as a whole, and the same however the batch is cut.

The plain loss pads sequences, computes each prompt once per sample, knows no rows, tiles or micro-batches, and shares
with the layer-by-layer backward pass only the layers' own formulas (`reference_logits`, which `tests/models` compares
with transformers).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.algorithms import make_algorithm
from lockstep.algorithms.base import Algorithm
from lockstep.config import AlgorithmConfig
from lockstep.models.decoder import reference_logits
from lockstep.models.lora import LoraSpec
from lockstep.models.spec import LayerKind, ModelSpec, Rope

TEMPERATURE = 1.3
ROPE = Rope(10000.0)
# Every switch of the decoder is on in one of these. 60 tokens, width 12, MLP 20: two or four devices can share them.
LLAMA = ModelSpec("llama", 60, 12, 6, 2, 4, 20, (LayerKind(ROPE),) * 2, 1e-5, 0.5, 512, tied_head=True)
QWEN = replace(LLAMA, family="qwen3", tied_head=False, qkv_bias=True, qk_norm=True)
GEMMA = replace(
    LLAMA, family="gemma2", post_norms=True, norm_offset=1.0, embed_scale=12**0.5, activation="gelu_tanh",
    attn_softcap=2.0, final_softcap=3.0, layers=(LayerKind(ROPE, 3), LayerKind(Rope(500.0, ("linear", 2.0)))),
)  # fmt: skip

LAST_LAYER = {"spec": QWEN, "lora": LoraSpec(2, 6.0, last_layers=1), "axes": (("fsdp", 2),)}
# What to make, and rows per micro-batch.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "llama, tied head": ({"spec": LLAMA}, 1024),
    "qwen, untied head, fsdp x tensor": ({"spec": QWEN, "axes": (("fsdp", 2), ("tensor", 2))}, 1024),
    "gemma, data x fsdp": ({"spec": GEMMA, "axes": (("data", 2), ("fsdp", 2))}, 1024),
    "lora on qwen, fsdp x tensor": (
        {"spec": QWEN, "lora": LoraSpec(2, 6.0), "axes": (("fsdp", 2), ("tensor", 2))}, 1024,
    ),
    "lora on the last layer of qwen, fsdp": (LAST_LAYER, 16),
}  # fmt: skip


def grpo(**settings: Any) -> Algorithm:
    """As a recipe with these settings makes it."""
    return make_algorithm(AlgorithmConfig(**({"clip_high": 0.28} | settings)), 8)


def plain_loss(policy, trajectories, advantages, beta):
    """trainable -> loss, over sequences padded to the longest."""
    kept = [(t, a) for t, a in zip(trajectories, advantages, strict=True) if len(t.completion_ids)]
    longest = max(len(t.prompt_ids) + len(t.completion_ids) for t, _ in kept)
    tokens = np.zeros((len(kept), longest), np.int32)
    mask = np.zeros((len(kept), longest), bool)
    old, ref = np.zeros((2, len(kept), longest), np.float32)
    for b, (t, _) in enumerate(kept):
        p, n = len(t.prompt_ids), len(t.completion_ids)
        tokens[b, : p + n] = np.concatenate([t.prompt_ids, t.completion_ids])
        mask[b, p : p + n], old[b, p : p + n], ref[b, p : p + n] = True, t.logprobs, t.reference_logprobs
    adv = np.array([a for _, a in kept], np.float32)[:, None]

    def loss(trainable):
        params = {p: jnp.asarray(x) for p, x in {**policy.base, **trainable}.items()}
        logits = reference_logits(policy.programs.spec, params, tokens, policy.programs.num.lora_scale) / TEMPERATURE
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], 2)[..., 0]
        m, o, r = mask[:, 1:], old[:, 1:], ref[:, 1:]
        ratio = jnp.exp(jnp.where(m, logp - o, 0.0))
        surrogate = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.28) * adv)
        d = jnp.where(m, r - logp, 0.0)
        return jnp.where(m, -surrogate + beta * (jnp.exp(d) - 1 - d), 0.0).sum() / mask.sum()

    return loss


def assert_close(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Every leaf agrees to `tolerance` of its own largest entry."""
    assert got.keys() == expected.keys()
    for path, gradient in expected.items():
        assert got[path].shape == gradient.shape and got[path].dtype == np.float32, path
        scale = np.abs(gradient).max()
        assert scale > 0, f"{path}: nothing to compare"
        error = np.abs(got[path] - gradient).max() / scale
        assert error <= tolerance, f"{path}: off by {error:.2e} of its largest entry"


SLOW = set(CASES) - {"llama, tied head"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_gradient_of_every_leaf_is_that_of_a_plain_loss(case: str, make_policy, trajectories, advantages) -> None:
    """To 1e-4 of each leaf's largest entry, in float32, with ratios on both sides of the clip and a KL term."""
    made, max_rows = CASES[case]
    policy = make_policy(**made)
    noisy = policy.recorded(trajectories, max_rows, noise=0.3)
    batches = policy.micro_batches(noisy, advantages, max_rows)
    result, got = policy.gradients(batches, noisy, grpo(clip_low=0.2, clip_high=0.28, kl_coef=0.2), exact=False)
    loss, expected = jax.jit(jax.value_and_grad(plain_loss(policy, noisy, advantages, 0.2)))(policy.trainable)
    assert 0.05 < result.metrics["clip_fraction"] < 0.95
    np.testing.assert_allclose(result.metrics["loss"], loss, rtol=1e-5)
    assert_close(got, {p: np.asarray(g) for p, g in expected.items()}, 1e-4)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in expected.values()))
    np.testing.assert_allclose(result.metrics["grad_norm"], norm, rtol=1e-4)


CUTS: dict[str, tuple[tuple[tuple[str, int], ...], int]] = {
    "small micro-batches": ((), 16),
    "two devices, data, small micro-batches": ((("data", 2),), 16),
    "four devices, fsdp": ((("fsdp", 4),), 1024),
    "four devices, data x fsdp": ((("data", 2), ("fsdp", 2)), 1024),
}


@pytest.fixture(scope="module")
def whole(plain, record, advantages):
    """One device, one micro-batch: (result, gradient) that every cut has to reproduce."""
    batches = plain.micro_batches(record, advantages)
    assert len(batches) == 1
    return plain.gradients(batches, record)


def assert_same(got: Any, whole: Any) -> None:
    """Log-probabilities bit for bit (the trainer is exact, so it has checked that against the record too); loss to
    1e-6 relative; gradients to 2e-6 of each leaf's largest entry: only the order of sums differs."""
    for a, b in zip(got[0].logprobs, whole[0].logprobs, strict=True):
        assert (a is None) == (b is None) and (a is None or a.tobytes() == b.tobytes())
    for name in ("loss", "clip_fraction", "ratio"):
        np.testing.assert_allclose(got[0].metrics[name], whole[0].metrics[name], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(got[0].metrics["grad_norm"], whole[0].metrics["grad_norm"], rtol=1e-6)
    assert got[0].metrics["tokens/trained"] == whole[0].metrics["tokens/trained"]
    assert got[0].metrics["mismatch/max_abs"] == got[0].metrics["mismatch/unequal_tokens"] == 0
    assert_close(got[1], whole[1], 2e-6)


@pytest.mark.parametrize("cut", [pytest.param(c, marks=[pytest.mark.slow] * ("devices" in c)) for c in CUTS])
def test_no_cut_of_the_batch_changes_loss_or_gradient(cut: str, make_policy, record, advantages, whole) -> None:
    axes, max_rows = CUTS[cut]
    policy = make_policy(axes=axes)
    batches = policy.micro_batches(record, advantages, max_rows)
    parts = np.concatenate([b.tokens.mask.reshape(policy.programs.row_shards, -1).sum(1) for b in batches])
    assert len(set(parts.tolist())) > 1, "equal parts cannot tell a global mean from a mean of means"
    assert_same(policy.gradients(batches, record), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gspo", "rloo", "cispo", "dr_grpo", "dapo", "raft"])
def test_nor_that_of_any_algorithm(name: str, make_policy, plain, trajectories, advantages) -> None:
    """Away from the record, where a ratio of whole completions has to find all their tokens."""
    algorithm = make_algorithm(AlgorithmConfig(name=name, kl_coef=0.0), 8)
    noisy = plain.recorded(trajectories, noise=0.1)
    result, gradient = plain.gradients(plain.micro_batches(noisy, advantages), noisy, algorithm, exact=False)
    assert abs(result.metrics["ratio"] - 1) > 1e-4
    for axes, max_rows in (((), 16), ((("data", 2),), 16), ((("fsdp", 2), ("tensor", 2)), 1024)):
        policy = make_policy(axes=axes)
        cut = policy.micro_batches(noisy, advantages, max_rows)
        got, other = policy.gradients(cut, noisy, algorithm, exact=False)
        for metric in ("loss", "ratio", "clip_fraction", "loss/denominator"):
            np.testing.assert_allclose(got.metrics[metric], result.metrics[metric], rtol=1e-5, err_msg=metric)
        assert_close(other, gradient, 1e-5)


def test_sharing_a_prompt_changes_nothing(plain, record, advantages, whole) -> None:
    alone = [replace(t, group_id=f"{t.group_id}/{t.index}") for t in record]
    shared, copied = plain.micro_batches(record, advantages), plain.micro_batches(alone, advantages, 16)
    assert sum(b.num_rows for b in copied) > 1.5 * sum(b.num_rows for b in shared)
    assert_same(plain.gradients(copied, alone), whole)


def test_the_order_of_samples_and_groups_changes_nothing(plain, record, advantages, whole) -> None:
    order = np.random.default_rng(8).permutation(len(record))
    moved = [record[i] for i in order]
    result, gradient = plain.gradients(plain.micro_batches(moved, advantages[order]), moved)
    back = [result.logprobs[i] for i in np.argsort(order)]
    assert_same((replace(result, logprobs=back), gradient), whole)


@pytest.mark.parametrize("garbage", [np.nan, 1e9])
def test_padding_changes_no_bit(garbage: float, plain, record, advantages, whole) -> None:
    """Other tokens in the padded rows, other rows and targets and garbage in the masked slots."""
    (batch,) = plain.micro_batches(record, advantages)
    hidden, padded = ~batch.tokens.mask, batch.rows.write == len(batch.rows.tokens)
    assert hidden.any() and padded.any()
    fields = ("old_logp", "ref_logp", "advantage")
    spoiled = replace(
        batch,
        rows=batch.rows._replace(tokens=np.where(padded, 59, batch.rows.tokens).astype(np.int32)),
        target=np.where(hidden, 17, batch.target).astype(np.int32),
        at=np.where(hidden, 3, batch.at).astype(np.int32),
        tokens=batch.tokens._replace(
            **{f: np.where(hidden, np.float32(garbage), getattr(batch.tokens, f)) for f in fields}
        ),
    )
    result, gradient = plain.gradients([spoiled], record)
    assert result.metrics == whole[0].metrics
    for path, expected in whole[1].items():
        assert gradient[path].tobytes() == expected.tobytes(), path


def test_zero_advantages_give_exactly_zero_gradients(plain, record) -> None:
    result, gradient = plain.gradients(plain.micro_batches(record, np.zeros(len(record))), record, grpo())
    assert result.metrics["loss"] == result.metrics["grad_norm"] == 0.0
    assert all((g == 0).all() for g in gradient.values())


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(whole) -> None:
    assert whole[0].metrics["ratio"] == 1.0 and whole[0].metrics["clip_fraction"] == 0.0


@pytest.mark.slow
def test_the_trunk_shortcut_changes_no_bit(make_policy, trajectories, advantages) -> None:
    policy = make_policy(**LAST_LAYER)
    record = policy.recorded(trajectories, 16)
    batches = policy.micro_batches(record, advantages, 16)
    trainer = policy.keeper(grpo(kl_coef=0.2))
    assert trainer.first_layer == 1
    trunks = trainer.trunks(batches)
    assert trunks is not None and len(trunks) == len(batches) > 1
    full, short = (policy.gradients(batches, record, trunks=t) for t in (None, trunks))
    for a, b in zip(full[0].logprobs, short[0].logprobs, strict=True):
        assert (a is None and b is None) or a.tobytes() == b.tobytes()
    assert full[0].metrics == short[0].metrics
    assert all(full[1][p].tobytes() == short[1][p].tobytes() for p in full[1])


def test_where_everything_trains_there_is_no_trunk(plain, record, advantages) -> None:
    trainer = plain.keeper(grpo(kl_coef=0.2))
    assert trainer.first_layer == 0 and trainer.trunks(plain.micro_batches(record, advantages)) is None


@pytest.mark.slow
def test_bfloat16_computes_on_float32_masters(make_policy, trajectories, advantages, whole) -> None:
    """Gradients are float32, point where the float32 model's do, and the record is still exact."""
    policy = make_policy(dtype="bfloat16")
    record = policy.recorded(trajectories)
    result, gradient = policy.gradients(policy.micro_batches(record, advantages), record)
    assert result.metrics["mismatch/unequal_tokens"] == 0
    assert all(g.dtype == np.float32 for g in gradient.values())
    a, b = (np.concatenate([g[p].ravel() for p in whole[1]]) for g in (gradient, whole[1]))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99
