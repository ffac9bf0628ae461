"""Make the goldens of `tests/algorithms/test_trl.py`: losses, gradients and advantages by TRL's own code.

    python tests/goldens/make_trl.py     # in an environment of its own: pip install trl torch

No model is trained: the trainers' loss methods are called with a stub in place of the trainer, which hands them fixed
log-probabilities, and the statements that make advantages of rewards are taken out of the installed method and run on
fixed rewards. Everything in float64. Inputs are multiples of 1/1024, which float32 holds; what is padding is garbage.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl.trainer import dpo_trainer, grpo_trainer, reward_trainer, rloo_trainer

OUT = Path(__file__).parent / "trl.json"
LENGTHS = [3, 1, 6, 2, 5, 4]
WIDTH, MAX_COMPLETION_LENGTH, SAMPLES = 6, 8, 3

# name -> settings of `GRPOConfig`; the ratios of the inputs lie on both sides of every bound.
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo, KL": {"loss_type": "grpo", "beta": 0.3},
    "grpo, two-sided": {"loss_type": "grpo", "delta": 1.4},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dr_grpo, KL": {"loss_type": "dr_grpo", "beta": 0.3},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo, entropy": {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.05},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.25},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
}


def on_grid(x: np.ndarray) -> np.ndarray:
    return np.round(x * 1024) / 1024


def make_inputs() -> dict[str, Any]:
    """[B, T] except advantages [B]."""
    rng = np.random.default_rng(7)
    shape = (len(LENGTHS), WIDTH)
    old = -rng.random(shape) * 3 - 0.5
    found = {
        "logps": old + rng.normal(0, 0.4, shape),
        "old_logps": old,
        "ref_logps": old + rng.normal(0, 0.3, shape),
        "entropies": rng.random(shape) * 2,
        "advantages": rng.normal(0, 1, len(LENGTHS)),
    }
    mask = np.arange(WIDTH) < np.array(LENGTHS)[:, None]
    return {name: on_grid(x).tolist() for name, x in found.items()} | {"mask": mask.astype(int).tolist()}


def accelerator() -> SimpleNamespace:
    """One process."""
    return SimpleNamespace(
        num_processes=1,
        sync_gradients=False,
        device="cpu",
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )


def tensors(inputs: dict[str, Any], rows: slice) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, dtype=torch.float64)[rows] for name, x in inputs.items()}


def stub(scored: tuple[torch.Tensor, torch.Tensor], **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (*scored, None),
        accelerator=accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        **more,
    )


def grpo(inputs: dict[str, Any], settings: dict[str, Any], rows: slice, of: int) -> tuple[float, Any, Any]:
    """(loss, gradient in logps, gradient in entropies) of `rows`, one of `of` equal micro-batches."""
    made = {"epsilon": 0.2, "beta": 0.0, "entropy_coef": 0.0, "importance_sampling_level": "token", "delta": None}
    made |= settings
    given = tensors(inputs, rows)
    logps, entropies = given["logps"].requires_grad_(), given["entropies"].requires_grad_()
    trainer = stub(
        (logps, entropies),
        args=SimpleNamespace(delta=made["delta"], use_bias_correction_kl=False, steps_per_generation=of),
        beta=made["beta"],
        current_gradient_accumulation_steps=of,
        entropy_coef=made["entropy_coef"],
        _entropy_bonus_enabled=made["entropy_coef"] != 0,
        epsilon_low=made["epsilon"],
        epsilon_high=made.get("epsilon_high", made["epsilon"]),
        importance_sampling_level=made["importance_sampling_level"],
        loss_type=made["loss_type"],
        max_completion_length=MAX_COMPLETION_LENGTH,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=False,
    )
    ids = torch.zeros(given["mask"].shape, dtype=torch.long)
    loss = grpo_trainer.GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": given["mask"],
            "advantages": given["advantages"],
            "old_per_token_logps": given["old_logps"],
            "ref_per_token_logps": given["ref_logps"],
            "num_items_in_batch": torch.tensor(float(sum(LENGTHS)), dtype=torch.float64),
        },
    )
    loss.backward()
    none = torch.zeros_like(logps)
    return loss.item(), logps.grad, none if entropies.grad is None else entropies.grad


def grpo_case(inputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Of the whole batch at once, and summed over two micro-batches, as gradient accumulation does."""
    whole = grpo(inputs, settings, slice(None), 1)
    halves = [grpo(inputs, settings, rows, 2) for rows in (slice(0, 3), slice(3, 6))]
    return {
        "settings": settings,
        "loss": whole[0],
        "gradient": whole[1].tolist(),
        "entropy_gradient": whole[2].tolist(),
        "halves": {
            "loss": sum(loss for loss, _, _ in halves),
            "gradient": torch.cat([gradient for _, gradient, _ in halves]).tolist(),
        },
    }


def rloo_case(inputs: dict[str, Any]) -> dict[str, Any]:
    given = tensors(inputs, slice(None))
    logps = given["logps"].requires_grad_()
    ids = torch.zeros(given["mask"].shape, dtype=torch.long)
    loss = rloo_trainer.RLOOTrainer._compute_loss(
        stub((logps, given["entropies"]), epsilon_low=0.2, epsilon_high=0.2),
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": given["mask"],
            "old_logps": (given["old_logps"] * given["mask"]).sum(1),
            "advantages": given["advantages"],
        },
    )
    loss.backward()
    return {"settings": {"epsilon": 0.2}, "loss": loss.item(), "gradient": logps.grad.tolist()}


def dpo_case(beta: float) -> dict[str, Any]:
    """Three pairs; log-probabilities of whole completions."""
    rng = np.random.default_rng(1)
    logps, reference = (on_grid(-rng.random((2, 3)) * 8 - 2) for _ in range(2))
    flat = torch.tensor(logps.reshape(-1), dtype=torch.float64).requires_grad_()
    tokens = torch.stack([flat, torch.zeros_like(flat)], 1)  # a real token and one that is masked
    mask = torch.tensor([[0, 1, 0]] * 6)
    quiet = torch.zeros(6, 2, dtype=torch.float64)
    outputs = SimpleNamespace(log_probs=tokens, entropy=quiet, mean_logits=quiet, is_top1=quiet.bool())
    trainer = stub(
        (flat, flat), beta=beta, f_divergence_type="reverse_kl", ld_alpha=None, loss_types=["sigmoid"],
        loss_weights=[1.0], precompute_ref_logps=True, use_weighting=False, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    loss = dpo_trainer.DPOTrainer._compute_loss(
        trainer,
        lambda **_: outputs,
        {
            "input_ids": torch.zeros(6, 3, dtype=torch.long),
            "attention_mask": torch.ones(6, 3),
            "completion_mask": mask,
            "ref_chosen_logps": torch.tensor(reference[0]),
            "ref_rejected_logps": torch.tensor(reference[1]),
        },
        False,
    )
    loss.backward()
    said = trainer._metrics["train"]
    names = {"chosen": "chosen", "rejected": "rejected", "accuracy": "accuracies", "margin": "margins"}
    return {
        "beta": beta,
        "logps": logps.tolist(),
        "ref_logps": reference.tolist(),
        "loss": loss.item(),
        "gradient": flat.grad.reshape(2, 3).tolist(),
        "metrics": {ours: said[f"rewards/{theirs}"][0] for ours, theirs in names.items()},
    }


def reward_model_case(margins: list[float] | None) -> dict[str, Any]:
    """Three pairs' scores; margins: by how much each chosen one should win, or None."""
    scores = on_grid(np.random.default_rng(2).normal(0, 2, (2, 3)))
    flat = torch.tensor(scores.reshape(-1, 1), dtype=torch.float64).requires_grad_()
    trainer = stub(
        (flat, flat), args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1
    )
    inputs: dict[str, Any] = {"attention_mask": torch.ones(6, 3)}
    if margins is not None:
        inputs["margin"] = torch.tensor(margins, dtype=torch.float64)
    loss = reward_trainer.RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=flat), inputs)
    loss.backward()
    said = trainer._metrics["train"]
    return {
        "scores": scores.tolist(),
        "margins": margins or [0.0] * 3,
        "loss": loss.item(),
        "gradient": flat.grad.reshape(2, 3).tolist(),
        "metrics": {name: said[name][0] for name in ("accuracy", "margin")},
    }


def statements(method: Any, first: str, last: str) -> Any:
    """Those of a method's body from the first that begins with one text to the last that begins with the other."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    assert isinstance(function, ast.FunctionDef)
    texts = [ast.unparse(node) for node in function.body]
    (start,) = [i for i, text in enumerate(texts) if text.startswith(first)]
    (stop,) = [i for i, text in enumerate(texts) if text.startswith(last)]
    return compile(ast.Module(function.body[start : stop + 1], []), f"<{method.__qualname__}>", "exec")


def advantages(code: Any, module: Any, rewards: np.ndarray, given: dict[str, Any], **settings: Any) -> list[float]:
    """given: local names that the statements read; settings: attributes of the trainer."""
    names = vars(module) | {
        "self": SimpleNamespace(reward_weights=torch.ones(1, dtype=torch.float64), **settings),
        "rewards_per_func": torch.tensor(rewards.reshape(-1, 1)),
        "unscorable_mask": torch.zeros(rewards.size, dtype=torch.bool),
        "num_generations": SAMPLES,
        "device": "cpu",
        "gather": lambda x: x,
        **given,
    }
    exec(code, names)
    found: list[float] = names["advantages"].tolist()
    return found


def advantage_cases(inputs: dict[str, Any]) -> dict[str, Any]:
    """Two groups of three, of different spread."""
    rewards = on_grid(np.array([0.1, 0.9, 0.4, -2.0, 3.0, 2.5]))
    score = grpo_trainer.GRPOTrainer._generate_and_score_completions
    group = "if self.multi_objective_aggregation =="
    code = statements(score, group, group)
    cases: dict[str, Any] = {"rewards": rewards.tolist(), "samples": SAMPLES, "kl_coef": 0.25}
    for scale in ("group", "batch", "none"):
        cases[f"grpo, {scale}"] = advantages(
            code, grpo_trainer, rewards, {}, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize"
        )
    code = statements(
        rloo_trainer.RLOOTrainer._generate_and_score_completions,
        "rewards = (rewards_per_func * self.reward_weights.to(device)",
        "advantages = torch.nan_to_num",
    )
    made = tensors(inputs, slice(None))
    given = {
        "old_per_token_logps": made["old_logps"],
        "ref_per_token_logps": made["ref_logps"],
        "completion_mask": made["mask"],
    }
    for name, beta in (("rloo", 0.0), ("rloo, KL", cases["kl_coef"])):
        cases[name] = advantages(
            code, rloo_trainer, rewards, given, reward_clip_range=None, beta=beta, normalize_advantages=False
        )
    return cases


def main() -> None:
    inputs = make_inputs()
    golden = {
        "made_with": f"trl {trl.__version__}, torch {torch.__version__}, float64",
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "inputs": inputs,
        "grpo": {name: grpo_case(inputs, settings) for name, settings in GRPO.items()},
        "rloo": rloo_case(inputs),
        "dpo": [dpo_case(beta) for beta in (0.1, 0.5)],
        "reward_model": [reward_model_case(margins) for margins in (None, [0.5, 0.0, 1.25])],
        "advantages": advantage_cases(inputs),
    }
    OUT.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{OUT}: {golden['made_with']}, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
