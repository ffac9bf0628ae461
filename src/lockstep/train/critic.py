"""The critic: a value for every token of a completion, and the step that trains it.

V_t is the value of the state *before* token t is drawn: of the row that predicts token t, so it has seen the prompt and
tokens 0..t-1. In exact mode a value's bits do not depend on what else is in the batch, as those of a log-probability.

    critic.values(trajectories)                            -> per trajectory [T] float32
    critic.step(trajectories, returns, old_values, number) -> one update by the clipped value loss, its metrics
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np

from lockstep.algorithms.value_loss import ValueTokens, value_loss
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.cluster.shared import shared_programs
from lockstep.config import Config
from lockstep.errors import ConfigError, NumericsError
from lockstep.models.catalog import LoadedModel, load_value_model
from lockstep.models.fetch import Say
from lockstep.models.value_head import with_value_head
from lockstep.train.batching import Geometry, MicroBatch, make_micro_batches
from lockstep.train.policy import trained_leaves
from lockstep.train.trained_model import TrainedModel, make_trained_model
from lockstep.types import Trajectory


class Critic:
    """The value model of a run, trained by the clipped value loss.

    clip: how far a value may move from the recorded one before the loss stops pulling (`value_loss`). warmup_steps: so
    many first steps of the run train it alone.
    """

    def __init__(self, model: TrainedModel, geometry: Geometry, *, clip: float, warmup_steps: int = 0) -> None:
        self.model, self.geometry, self._warmup_steps = model, geometry, warmup_steps
        self._loss = jax.jit(jax.value_and_grad(partial(value_loss, clip=clip), has_aux=True))

    def trains_alone(self, step: int) -> bool:
        """Whether the policy is left as it is in this step. step: how many came before it."""
        return step < self._warmup_steps

    def values(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Per trajectory [T] float32: the value of the state before each of its tokens; none where it has no tokens.

        Raises NumericsError for a value that is not finite.
        """
        weights = self.model.weights
        found: list[np.ndarray | None] = [None] * len(trajectories)
        for batch in self._batches(trajectories):
            batch.scatter(self.model.outputs(weights, batch), found)
        for t, values in zip(trajectories, found, strict=True):
            if values is not None:
                _require_finite(t, values)
        # Copies: a slice would keep its whole micro-batch alive for as long as the trajectory.
        return [np.zeros(0, np.float32) if v is None else v.copy() for v in found]

    def step(
        self,
        trajectories: Sequence[Trajectory],
        returns: Sequence[np.ndarray],
        old_values: Sequence[np.ndarray],
        number: int,
    ) -> dict[str, float]:
        """One update on all trajectories that have tokens; the same however they are cut into micro-batches.

        returns, old_values: per trajectory [T]: what the values are pulled towards, and the values that the advantages
        were made with. number: updates before this one (for the learning rate). Metrics are of the weights that the
        update started from: `critic/loss`, `critic/clip_fraction`, `critic/explained_variance` (1 - Var(R - V) / Var(R)
        over tokens; NaN where all returns are equal), `critic/value`, `critic/return` (means), `critic/grad_norm`
        (before clipping), `critic/lr`.
        Raises NumericsError, before anything is changed, where a value, a return or the gradient is not finite.
        """
        counted = [i for i, t in enumerate(trajectories) if t.num_sampled]
        _require_fitting(trajectories, {"returns": returns, "old values": old_values})
        num_tokens = np.float32(sum(trajectories[i].num_sampled for i in counted))
        weights, put = self.model.weights, self.model.programs.put_rows
        found: list[np.ndarray | None] = [None] * len(trajectories)
        grads: dict[str, jax.Array] | None = None
        sums = {"loss": 0.0, "clip_fraction": 0.0}
        for batch in self._batches(trajectories):
            forward = self.model.forward(weights, batch)
            batch.scatter(np.asarray(forward.outputs), found)
            for i, _, _ in batch.spans:
                _require_finite(trajectories[i], np.asarray(found[i]))
            tokens = ValueTokens(*put((batch.tokens.mask, batch.flat(old_values), batch.flat(returns))))
            (_, metrics), dvalues = self._loss(forward.outputs, tokens, num_tokens)
            grads = self.model.gradients(weights, forward, dvalues, grads)
            sums = {name: total + float(metrics[name]) for name, total in sums.items()}
        assert grads is not None, "a step needs at least one token"
        applied = self.model.update(grads, number, "critic")
        explained = _explained([np.asarray(found[i]) for i in counted], [returns[i] for i in counted])
        return {f"critic/{name}": value for name, value in (sums | explained | applied).items()}

    def _batches(self, trajectories: Sequence[Trajectory]) -> list[MicroBatch]:
        """Rows and spans; advantages and temperature, which a value does not depend on, are left at 0 and 1."""
        return make_micro_batches(trajectories, np.zeros(len(trajectories)), 1.0, self.geometry)


def _require_fitting(trajectories: Sequence[Trajectory], given: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Raise NumericsError unless there is a finite number for every token."""
    for name, arrays in given.items():
        assert len(arrays) == len(trajectories), f"{len(arrays)} {name} for {len(trajectories)} trajectories"
        for t, array in zip(trajectories, arrays, strict=True):
            assert array.shape == t.logprobs.shape, (name, array.shape, t.logprobs.shape)
            if not np.isfinite(array).all():
                raise NumericsError(
                    f"{name} of sample {t.index} of {t.group_id!r} hold NaN or infinity; they come from rewards, "
                    "log-probabilities and recorded values. The critic was not updated"
                )


def _require_finite(t: Trajectory, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise NumericsError(
            f"the critic's value before token {at} of sample {t.index} of {t.group_id!r} is {values[at]}; the critic's "
            "weights hold NaN or infinity, or overflowed. Resume from the newest checkpoint, with a lower "
            "critic.optim.lr"
        )


def _explained(values: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> dict[str, float]:
    v = np.concatenate([np.asarray(x, np.float64) for x in values])
    r = np.concatenate([np.asarray(x, np.float64) for x in returns])
    variance = r.var()
    return {
        "explained_variance": float(1 - (r - v).var() / variance) if variance else math.nan,
        "value": float(v.mean()),
        "return": float(r.mean()),
    }


def _require_same_tokens(config: Config, name: str, model: LoadedModel, policy: LoadedModel) -> None:
    """Raise ConfigError unless the critic can read every sequence of the policy's ids."""
    if model.tokenizer.fingerprint != policy.tokenizer.fingerprint:
        raise ConfigError(
            f"critic.model = {name!r} has another tokenizer than the policy ({model.tokenizer.vocab_size} and "
            f"{policy.tokenizer.vocab_size} tokens), and a critic reads the policy's own token ids; use a model with "
            "the same one, or leave critic.model out"
        )
    longest = config.task.max_prompt_tokens + config.max_completion_tokens
    if longest > model.spec.max_position:
        raise ConfigError(
            f"task.max_prompt_tokens + {config.completion_key} = {longest}, but critic.model = {name!r} was made for "
            f"{model.spec.max_position} positions; lower one of them, or use another critic"
        )


def make_critic(
    config: Config,
    dial: Dial,
    policy: LoadedModel,
    actor: tuple[Programs, Mapping[str, jax.Array]],
    geometry: Callable[[Config, Programs], Geometry],
    say: Say | None = None,
) -> Critic | None:
    """The critic of a recipe, None without `[critic]`. actor: its programs and frozen weights.

    A critic that starts from the policy's model and trains an adapter reads the actor's own frozen arrays where the two
    share a mesh. Raises ModelError for weights that are not finite, ConfigError for a model that does not fit.
    """
    wanted, seed = config.critic, config.run.seed
    if wanted is None:
        return None
    if wanted.model is None:
        model = with_value_head(policy, wanted.head_std, seed)
    else:
        model = load_value_model(wanted.model, config.model.dtype, std=wanted.head_std, seed=seed, say=say)
        _require_same_tokens(config, wanted.model, model, policy)
    leaves = trained_leaves(wanted.lora, model.spec)
    num = replace(actor[0].num, lora_scale=leaves.lora.scale if leaves.lora else 0.0)
    programs = shared_programs(model.spec, num, dial.mesh("critic"), leaves.all)
    shared = actor[1] if wanted.model is None and dial.colocated("actor", "critic") else {}
    steps = config.run.steps, config.train.updates_per_step
    made = make_trained_model(model, programs, leaves, wanted.optim, steps, seed, shared)
    return Critic(made, geometry(config, programs), clip=wanted.clip, warmup_steps=wanted.warmup_steps)
