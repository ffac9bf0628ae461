"""AdamW as a recipe asks for it, and an optimizer on the mesh of what it trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.cluster.shared import shared
from lockstep.config import Config, OptimConfig

Update = Callable[[Any, Any, Any], tuple[dict[str, jax.Array], Any]]


@functools.lru_cache(maxsize=64)
def make_schedule(optim: OptimConfig, steps: int, updates_per_step: int = 1) -> optax.Schedule:
    """Learning rate by update number: linear warm-up to `lr`, then constant, or down to 0 at the last step. The same
    object for the same arguments, so that an update is compiled once in a process."""
    warm_up = optim.warmup_steps * updates_per_step
    rest = max(1, steps * updates_per_step - warm_up)
    after = {
        "constant": optax.constant_schedule(optim.lr),
        "linear": optax.linear_schedule(optim.lr, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(optim.lr, rest),
    }[optim.schedule]
    if not warm_up:
        return after
    # Starts one notch up: update 0 at rate 0 would be a wasted step.
    warm = optax.linear_schedule(optim.lr / warm_up, optim.lr, max(1, warm_up - 1))
    return optax.join_schedules([warm, after], [warm_up])


def actor_schedule(config: Config) -> optax.Schedule:
    """The policy's: it has no updates in the steps that train the critic alone."""
    return make_schedule(config.optim, config.actor_steps, config.train.updates_per_step)


@functools.lru_cache(maxsize=64)
def make_optimizer(optim: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm),
        optax.adamw(schedule, b1=optim.betas[0], b2=optim.betas[1], eps=optim.eps, weight_decay=optim.weight_decay),
    )


def placed(
    optimizer: optax.GradientTransformation, trainable: Mapping[str, jax.Array], mesh: Mesh
) -> tuple[Any, Update]:
    """(state, update): the state with its moments where their parameters lie, and the compiled update,
    (gradients, state, parameters) -> (parameters, state), which consumes gradients and state."""
    shapes = tuple((path, jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)) for path, a in trainable.items())
    init, update = shared(_compiled, optimizer, shapes, mesh)
    return init(dict(trainable)), update


def _compiled(
    optimizer: optax.GradientTransformation, shapes: tuple[tuple[str, jax.ShapeDtypeStruct], ...], mesh: Mesh
) -> tuple[Callable[[Any], Any], Update]:
    # Without saying where moments lie a compiler may replicate them.
    places = {path: shape.sharding for path, shape in shapes}
    state_places = optax.tree.map_params(
        optimizer,
        lambda _, place: place,
        jax.eval_shape(optimizer.init, dict(shapes)),
        places,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # The parameters are not donated: the sampler may be serving these very buffers.
    compiled = jax.jit(update, donate_argnums=(0, 1), out_shardings=(places, state_places))
    return jax.jit(optimizer.init, out_shardings=state_places), compiled


@functools.partial(jax.jit, donate_argnums=0)
def added(a: Any, b: Any) -> Any:
    """Two trees of gradients, leaf by leaf; the first is consumed."""
    return jax.tree.map(jnp.add, a, b)


gradient_norm = jax.jit(optax.global_norm)


def updates_made(state: Any) -> int | None:
    """How many updates the optimizer has made, by its own count; None where it keeps none."""
    counts = optax.tree.get_all_with_path(state, "count")
    return int(counts[0][1]) if counts else None
