"""The actor's training step: forward, loss, backward, update, over micro-batches with global denominators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from lockstep.algorithms.base import Algorithm
from lockstep.algorithms.losses import Tokens, Totals
from lockstep.cluster.entropy import Entropy
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.shared import shared
from lockstep.errors import MismatchError, NumericsError
from lockstep.train.batching import MicroBatch
from lockstep.train.forward import DeviceBatch, backward, last_state, layer_states
from lockstep.train.optimizer import added, gradient_norm, placed
from lockstep.types import Trajectory

ROUNDING = 1e-2  # nats; differences of rounding are far below it in float32 and bfloat16, those of content above


@dataclass(frozen=True)
class StepResult:
    """metrics: scalars by name, ready for the record. logprobs: per trajectory, the trainer's own [T] float32, under
    the weights that the step started from; None where the trajectory took no part."""

    metrics: dict[str, float]
    logprobs: list[np.ndarray | None]


def first_trained_layer(trainable: Mapping[str, Any]) -> int:
    """The lowest layer the backward pass has to reach (0 if the embedding trains)."""
    layers = [int(path.split(".")[1]) for path in trainable if path.startswith("layers.")]
    return 0 if "embed" in trainable or not layers else min(layers)


def mismatch(recorded: np.ndarray, recomputed: np.ndarray) -> dict[str, float]:
    """How far the sampler's record is from the trainer's log-probabilities, d = recomputed - recorded over all tokens.

    max_abs: max |d| (nats); k1 = mean(-d) and k3 = mean(exp(d) - 1 - d), both estimates of KL(sampler || trainer);
    ess: effective sample size of the weights exp(d) as a fraction, (sum w)^2 / (n sum w^2). Equal bits: 0, 0, 0, 1.
    """
    d = recomputed.astype(np.float64) - recorded.astype(np.float64)
    w = np.exp(d - d.max())  # any common factor of the weights cancels
    return {
        "mismatch/max_abs": float(np.abs(d).max()),
        "mismatch/k1": float(-d.mean()),
        "mismatch/k3": float((np.expm1(d) - d).mean()),
        "mismatch/ess": float(w.sum() ** 2 / (len(w) * (w * w).sum())),
        "mismatch/unequal_tokens": int((recorded.view(np.uint32) != recomputed.view(np.uint32)).sum()),
    }


class Trainer:
    """Owns what trains and its optimizer state. `params` is the whole tree; updates replace the trainable leaves.

    exact: raise MismatchError, before any update, if a recomputed log-probability is not the recorded one bit for bit.
    """

    def __init__(
        self,
        programs: Programs,
        frozen: Mapping[str, jax.Array],
        trainable: Mapping[str, jax.Array],
        algorithm: Algorithm,
        optimizer: optax.GradientTransformation,
        schedule: optax.Schedule,
        *,
        exact: bool,
    ) -> None:
        self.programs, self.algorithm, self.exact = programs, algorithm, exact
        self.frozen, self.trainable = dict(frozen), dict(trainable)
        self._schedule = schedule
        self.first_layer = first_trained_layer(trainable)
        self._names = frozenset(trainable)
        self.optimizer_state, self._update = placed(optimizer, self.trainable, programs.mesh)
        settings = algorithm.settings
        self._entropy = shared(Entropy, programs) if settings.entropy_coef or settings.measure_entropy else None
        self._loss = shared(_compiled_loss, algorithm, (0, 1) if settings.entropy_coef else (0,))

    @property
    def params(self) -> dict[str, jax.Array]:
        return {**self.frozen, **self.trainable}

    def trunks(self, batches: Sequence[MicroBatch]) -> list[jax.Array] | None:
        """Input of the first trained layer per micro-batch: the part of the network that no update changes, so that
        the reference and the actor need it once. None where everything trains."""
        if not self.first_layer:
            return None
        weights = SplitWeights.of(self.frozen, self.programs.spec.num_layers)
        put = [self.programs.put_rows(b.rows) for b in batches]
        return [last_state(self.programs, weights, rows, 0, self.first_layer) for rows in put]

    def step(
        self,
        batches: Sequence[MicroBatch],
        trajectories: Sequence[Trajectory],
        update_number: int,
        trunks: Sequence[jax.Array] | None = None,
        stale: Mapping[int, np.ndarray | None] | None = None,
    ) -> StepResult:
        """One optimizer update from all micro-batches, which hold every trajectory that has tokens.

        update_number: how many came before (for the learning rate). trunks: what `trunks` returned for these batches;
        without them the frozen layers are computed here. stale: of each trajectory that other weights than these
        sampled, its index and [T] log-probabilities recomputed under those, which its record is held against; None: it
        is held against nothing. Raises, before any update, NumericsError where a record, a log-probability or the
        gradient is not finite, MismatchError where record and trainer disagree in exact mode.
        """
        stale = stale or {}
        for i, recomputed in stale.items():
            if recomputed is not None:
                self._require_record(trajectories[i], recomputed, compared=True)
        weights = SplitWeights.of(self.params, self.programs.spec.num_layers)
        counted = [t for t in trajectories if t.num_sampled]
        totals = Totals(np.float32(sum(t.num_sampled for t in counted)), np.float32(len(counted)))
        if self.algorithm.kl_in_loss:
            assert all(t.reference_logprobs is not None for t in counted), "the loss needs reference log-probabilities"
        logprobs: list[np.ndarray | None] = [None] * len(trajectories)
        grads: dict[str, jax.Array] | None = None
        sums: dict[str, float] = {}
        for i, batch in enumerate(batches):
            trunk = trunks[i] if trunks is not None else None
            metrics, more = self._micro_step(weights, batch, trunk, totals, trajectories, logprobs, stale)
            grads = more if grads is None else added(grads, more)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        assert grads is not None, "a step needs at least one micro-batch"
        used = [i for i, lp in enumerate(logprobs) if lp is not None]
        assert len(used) == len(counted), "the micro-batches were made from other trajectories"
        norm = float(gradient_norm(grads))
        if not math.isfinite(norm):
            raise NumericsError(
                f"update {update_number}: the norm of the gradient is {norm}, while all log-probabilities are finite; "
                f"a reference log-probability is not finite, or a ratio or the backward pass overflowed in "
                f"{self.programs.num.dtype}. No update was applied; resume from the newest checkpoint, with a lower "
                f'optim.lr or model.dtype = "float32"'
            )
        self.trainable, self.optimizer_state = self._update(grads, self.optimizer_state, self.trainable)
        held = [(trajectories[i].logprobs, lp) for i in used if (lp := stale.get(i, logprobs[i])) is not None]
        if held:
            sums |= mismatch(np.concatenate([was for was, _ in held]), np.concatenate([now for _, now in held]))
        sums["ratio"] = 1.0 + sums.pop("ratio_less_1")
        sums |= {
            "grad_norm": norm,
            "lr": float(self._schedule(update_number)),
            "tokens/trained": int(totals.tokens),
            "loss/denominator": self.algorithm.denominator(totals),
        }
        return StepResult(sums, logprobs)

    def _micro_step(
        self,
        weights: SplitWeights,
        batch: MicroBatch,
        trunk: jax.Array | None,
        totals: Totals,
        trajectories: Sequence[Trajectory],
        logprobs: list[np.ndarray | None],
        stale: Mapping[int, np.ndarray | None],
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """(metrics, gradients): this micro-batch's shares. Its samples' log-probabilities are put into `logprobs`."""
        device = DeviceBatch.put(self.programs, batch)
        if trunk is None and self.first_layer:
            trunk = last_state(self.programs, weights, device.rows, 0, self.first_layer)
        layers = self.first_layer, self.programs.spec.num_layers
        states = list(layer_states(self.programs, weights, device.rows, *layers, trunk))
        picked = self.programs.pick(states[-1], device.at)
        logp = self.programs.logprobs(weights, picked, device.target, device.temperature)
        batch.scatter(np.asarray(logp), logprobs)
        for i, _, _ in batch.spans:
            recomputed = logprobs[i]
            assert recomputed is not None
            self._require_record(trajectories[i], recomputed, compared=i not in stale)
        tokens = Tokens(*self.programs.put_rows(tuple(batch.tokens)))
        entropy = None
        if self._entropy is not None:
            entropy = self._entropy(weights, picked, device.target, device.temperature)
        (_, metrics), (dlogp, *dentropy) = self._loss(logp, entropy, tokens, totals)
        extra = None
        if self._entropy is not None and dentropy:
            extra = self._entropy.vjp(
                weights, self._names, states[-1], device.at, device.target, device.temperature, dentropy[0]
            )
        return metrics, backward(self.programs, weights, self._names, device, states, dlogp, self.first_layer, extra)

    def require_records(self, trajectories: Sequence[Trajectory], recomputed: Sequence[np.ndarray | None]) -> None:
        """Hold each record against log-probabilities recomputed under the weights that sampled it, where there are
        any. Raises as `step` does."""
        for t, values in zip(trajectories, recomputed, strict=True):
            if values is not None:
                self._require_record(t, values, compared=True)

    def _require_record(self, t: Trajectory, recomputed: np.ndarray, *, compared: bool) -> None:
        """compared: whether the weights are those that sampled it."""
        recorded = t.logprobs
        for name, values in (("trainer's", recomputed), ("recorded", recorded)):
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                raise NumericsError(
                    f"the {name} log-probability of token {at} of sample {t.index} of {t.group_id!r} is {values[at]}; "
                    f"the weights it was computed with hold NaN or infinity, or overflowed. No update was applied; "
                    f"resume from the newest checkpoint, with a lower optim.lr"
                )
        if compared and self.exact and not np.array_equal(recorded.view(np.uint32), recomputed.view(np.uint32)):
            at = int(np.flatnonzero(recorded.view(np.uint32) != recomputed.view(np.uint32))[0])
            was, now = float(recorded[at]), float(recomputed[at])
            cause = (
                "so far apart that the sampler's weights, temperature or tokens are not the trainer's"
                if abs(was - now) > ROUNDING
                else "so close that an operation's last bits depend on what is computed beside it: a fault of "
                "lockstep on this processor, please report it with the run's recipe.toml and environment.json"
            )
            raise MismatchError(
                f"exact mode, but token {at} of sample {t.index} of {t.group_id!r} (policy version {t.versions[at]}) "
                f"was recorded with log-probability {was:.9g} and recomputed as {now:.9g}, {cause}. No update was "
                'applied. To go on with a measured mismatch set numerics.mode = "fast"'
            )


def _compiled_loss(algorithm: Algorithm, differentiated: tuple[int, ...]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(algorithm.loss, differentiated, has_aux=True))
