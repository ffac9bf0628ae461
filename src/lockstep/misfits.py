"""What the tables of a recipe may not say together: checks that involve several of them. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.schema import literal
from lockstep.sections import SyncConfig

if TYPE_CHECKING:
    from lockstep.config import Config


def misfits(config: Config) -> Iterator[str]:
    """What is wrong between sections (each within itself is right by now): what, why, what instead."""
    rollout, numerics, train = config.rollout, config.numerics, config.train
    rollouts = rollout.prompts * rollout.samples
    length = config.task.max_prompt_tokens + config.max_completion_tokens
    length_of = (
        f"task.max_prompt_tokens + {config.completion_key} = {config.task.max_prompt_tokens} + "
        f"{config.max_completion_tokens} = {length}"
    )
    tile = numerics.tile_rows
    if numerics.mode == "exact" and rollout.slots % tile:
        near = sorted({max(rollout.slots // tile, 1) * tile, (rollout.slots // tile + 1) * tile})
        yield (
            f"`rollout.slots` = {rollout.slots} is not a multiple of `numerics.tile_rows` = {tile}: exact mode decodes "
            f"whole tiles, the rest of the last one would be computed for nothing; use {' or '.join(map(str, near))}"
        )
    for role, wanted, table in (
        ("critic", config.critic is not None, "[critic]"),
        ("reward", bool(config.reward.models), "[[reward.models]]"),
    ):
        if role in config.cluster.roles and not wanted:
            yield (
                f"`cluster.{role}` = {literal(config.cluster.shapes[role])} without `{table}`: the run has none; "
                "add the table, or leave the mesh out"
            )
    for role in config.cluster.roles:
        tensor = config.cluster.mesh(role).tensor
        if config.cluster.owner(role) == role and numerics.parts_on(config.cluster) % tensor:
            least = config.cluster.fewest_parts
            yield (
                f"`numerics.tensor_parts` = {numerics.tensor_parts} is not a multiple of `cluster.{role}.tensor` = "
                f"{tensor}: every device computes as many parts; use {least} or a multiple of it, or 0 for {least}"
            )
    pages = -(-length // rollout.page_size)
    if 0 < rollout.num_pages < pages:
        yield (
            f"`rollout.num_pages` = {rollout.num_pages} is too few for one request: {length_of} tokens take {pages} "
            f"pages of {rollout.page_size}; use at least {pages}, or 0 to have it sized"
        )
    if train.micro_batch_rows < length:
        yield (
            f"`train.micro_batch_rows` = {train.micro_batch_rows} cannot hold one trajectory of {length_of} rows, and "
            f"a trajectory is never cut; use at least {length}"
        )
    if train.select == "informative" and not 1 <= train.select_count <= rollouts:
        yield (
            f'`train.select_count` = {train.select_count} with `train.select` = "informative": it is the number of '
            f"rollouts trained on, of rollout.prompts * rollout.samples = {rollouts}; use 1 to {rollouts}"
        )
    if train.select == "all" and train.select_count:
        yield (
            f'`train.select_count` = {train.select_count} has no effect with `train.select` = "all"; leave it out, or '
            'use `train.select` = "informative"'
        )
    alone = config.run.steps - config.actor_steps
    if config.run.steps <= alone:
        yield (
            f"`critic.warmup_steps` = {alone} is not less than `run.steps` = {config.run.steps}: the policy would "
            "never be trained; use fewer"
        )
    elif config.optim.warmup_steps > config.actor_steps:
        less = f" less `critic.warmup_steps` = {alone}" if alone else ""
        yield (
            f"`optim.warmup_steps` = {config.optim.warmup_steps} is more than `run.steps` = {config.run.steps}{less}: "
            "the learning rate would never reach `optim.lr`; use fewer"
        )
    yield from _environment_misfits(config)
    yield from _storage_misfits(config)
    yield from _overlap_misfits(config)
    yield from _folder_misfits(config)
    yield from _algorithm_misfits(config)


def _environment_misfits(config: Config) -> Iterator[str]:
    environment, reward = config.environment, config.reward
    parts = [f.name for f in reward.functions] + [j.name for j in reward.judges] + [m.name for m in reward.models]
    if environment is None:
        if not parts:
            yield (
                "`reward.functions`, `reward.judges` and `reward.models` are all empty, so no completion is better "
                "than another; list a function, a judge or a model"
            )
        return
    if environment.max_total_tokens < config.rollout.max_new_tokens:
        yield (
            f"`environment.max_total_tokens` = {environment.max_total_tokens} is less than `rollout.max_new_tokens` = "
            f"{config.rollout.max_new_tokens}, what one turn may take; use at least as many"
        )
    if "environment" in parts:
        yield (
            'a part of `reward` is called "environment", which is the name that what `[environment]` gives is reported '
            "by; give it another one"
        )


def _storage_misfits(config: Config) -> Iterator[str]:
    for name in ("kv_dtype", "weights_dtype"):
        value = getattr(config.rollout, name)
        if config.numerics.mode == "exact" and value != "compute":
            yield (
                f'`rollout.{name}` = {literal(value)} with `numerics.mode` = "exact": the trainer computes with '
                "unquantised keys, values and weights, so the sampler's log-probabilities cannot be its own bit for "
                'bit; use "compute", or `numerics.mode` = "fast", which measures the mismatch'
            )
    parts = config.numerics.parts_on(config.cluster)
    if config.rollout.weights_dtype != "compute" and parts > 1:
        yield (
            f"`rollout.weights_dtype` = {literal(config.rollout.weights_dtype)} where blocks are computed in {parts} "
            'parts: a scale would have to be cut with its matrix, which is not done yet; use "compute", or meshes with '
            "tensor = 1"
        )


def _overlap_misfits(config: Config) -> Iterator[str]:
    rollout, cluster = config.rollout, config.cluster
    if rollout.url is not None and cluster.owner("rollout") == "rollout":
        yield (
            f"`cluster.rollout` = {literal(cluster.shapes['rollout'])} with `rollout.url`: the service samples, no "
            'sampler is built here, and its devices are its own; use `cluster.rollout` = "actor", or leave it out'
        )
    if rollout.url is not None and rollout.update != "drain":
        yield (
            f"`rollout.update` = {literal(rollout.update)} has no effect with `rollout.url`: how a service changes its "
            "weights is its own (`lockstep serve --policy`); leave it out"
        )
    if rollout.url is not None or not rollout.staleness:
        return
    shares = [role for role in cluster.roles if role != "rollout" and cluster.owner(role) == cluster.owner("rollout")]
    if shares and cluster.mesh("rollout").size > 1:
        yield (
            f"`rollout.staleness` = {rollout.staleness} with the rollout on the {cluster.mesh('rollout').size} devices "
            f"of {' and '.join(shares)}: sampling and training would run on them at the same time, and programs that "
            "span several devices can then wait for each other for ever; give the rollout a mesh of its own, or use "
            "staleness = 0"
        )


def _folder_misfits(config: Config) -> Iterator[str]:
    sync, plain_sync = config.sync, SyncConfig()
    if sync.folder is None:
        for name in ("folder_format", "folder_delta", "folder_keep"):
            if (value := getattr(sync, name)) != getattr(plain_sync, name):
                yield f"`sync.{name}` = {literal(value)} has no effect without `sync.folder`; name one, or leave it out"
    elif sync.folder_format == "hf" and config.lora is not None:
        yield (
            '`sync.folder_format` = "hf" with `[lora]`: Hugging Face names are of whole models, and what trains is the '
            'adapter; use "native", or leave `[lora]` out'
        )


def _algorithm_misfits(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.kl_coef and algorithm.kl_estimator == "k1" and algorithm.kl_in == "loss":
        yield (
            f'`algorithm.kl_coef` = {algorithm.kl_coef} with `algorithm.kl_estimator` = "k1": as a loss its expected '
            'gradient is 0, the penalty would only add noise; use "k2" (gradient of the reverse KL) or "k3", or '
            '`algorithm.kl_in` = "reward"'
        )
    if algorithm.kl_coef and algorithm.kl_estimator != "k1" and algorithm.kl_in == "reward":
        yield (
            f'`algorithm.kl_coef` = {algorithm.kl_coef} with `algorithm.kl_estimator` = "{algorithm.kl_estimator}" and '
            '`algorithm.kl_in` = "reward": as a reward only "k1" has the gradient of a KL; that of "k2" and "k3" is '
            'nearly 0 close to the reference and leads away from it further off; use "k1", or '
            '`algorithm.kl_in` = "loss"'
        )
    if algorithm.kl_coef and not algorithm.measure_kl:
        yield (
            f"`algorithm.kl_coef` = {algorithm.kl_coef} needs the KL, but `algorithm.measure_kl` = false; leave it out"
        )
    if algorithm.reference_every and not (algorithm.measure_kl or algorithm.kl_coef):
        yield (
            f"`algorithm.reference_every` = {algorithm.reference_every} has no effect with `algorithm.measure_kl` = "
            "false: there is no reference; leave it out"
        )
    if algorithm.reference_mix != 1.0 and not algorithm.reference_every:
        yield (
            f"`algorithm.reference_mix` = {algorithm.reference_mix} has no effect without `algorithm.reference_every`; "
            "say how often the reference moves"
        )
    if algorithm.name == "ppo" and config.critic is None:
        yield (
            '`algorithm.name` = "ppo" needs a critic: add a `[critic]` table (docs/critic.md), or use an algorithm '
            "without one, such as grpo"
        )
    if config.critic is not None and algorithm.built_in and algorithm.name != "ppo":
        yield (
            f"`[critic]` has no effect with `algorithm.name` = {literal(algorithm.name)}, which uses no values; "
            'leave it out, or use "ppo"'
        )
    if algorithm.correction != "none" and config.numerics.mode == "exact" and not rollout.staleness:
        yield (
            f"`algorithm.correction` = {literal(algorithm.correction)} has no effect in exact mode without staleness: "
            "the record is the trainer's, bit for bit, and every weight is 1; leave it out"
        )
    if algorithm.overlong_tokens > config.max_completion_tokens:
        yield (
            f"`algorithm.overlong_tokens` = {algorithm.overlong_tokens} is more than `{config.completion_key}` = "
            f"{config.max_completion_tokens}: the penalty would begin before the first token; use fewer"
        )
    if algorithm.dynamic_rounds and rollout.staleness:
        yield (
            f"`algorithm.dynamic_rounds` = {algorithm.dynamic_rounds} with `rollout.staleness` = {rollout.staleness}: "
            "which prompts the next steps get is known only when this step's groups are, so they cannot be asked for "
            "ahead; use staleness = 0, or dynamic_rounds = 0"
        )
    if algorithm.name == "raft" and algorithm.best_of >= rollout.samples:
        yield (
            f"`algorithm.best_of` = {algorithm.best_of} of `rollout.samples` = {rollout.samples}: a best one is chosen "
            "from more; use less"
        )
    if config.train.mini_batches > rollout.prompts * rollout.samples:
        yield (
            f"`train.mini_batches` = {config.train.mini_batches} is more than rollout.prompts * rollout.samples = "
            f"{rollout.prompts * rollout.samples} samples; use fewer"
        )
