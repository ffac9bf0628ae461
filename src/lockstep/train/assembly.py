"""From a recipe to the parts of a run: model, roles on their meshes, engine, trainer, sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.algorithms import Algorithm, make_algorithm
from lockstep.cluster.devices import device_kinds
from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.config import Config
from lockstep.envs.base import Task
from lockstep.envs.rewards import Reward, make_reward
from lockstep.envs.tasks import make_task
from lockstep.models import load_model
from lockstep.models.catalog import LoadedModel
from lockstep.models.decoder import Numerics
from lockstep.models.lora import LoraSpec
from lockstep.models.parts import whole_blocks
from lockstep.models.quantise import Storage
from lockstep.models.spec import ModelSpec
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.draft_model import make_drafts
from lockstep.rollout.engine import Engine, make_fingerprint
from lockstep.rollout.pool_size import head_shares, longest_sequence, pages_of_recipe
from lockstep.rollout.stops import split_stops
from lockstep.service.requests import Rollouts
from lockstep.sync.replica import LocalReplica
from lockstep.sync.sync import WeightSync
from lockstep.sync.verify import check_same, leaf_digests, tree_digest
from lockstep.train.batching import Geometry
from lockstep.train.critic import Critic, make_critic
from lockstep.train.episodes import Episodes, load_environment
from lockstep.train.judging import RolloutAskers
from lockstep.train.optimizer import actor_schedule, make_optimizer
from lockstep.train.policy import LeafSplit, sampler_dtype, split_leaves
from lockstep.train.reference import Reference, make_reference
from lockstep.train.remote import Remote
from lockstep.train.reward_model import RewardModel, make_reward_models
from lockstep.train.serving import Local, queue_bound
from lockstep.train.syncing import make_remote_sync, make_sync, remote_mapping
from lockstep.train.trained_model import initial_trainable, require_finite
from lockstep.train.trainer import Trainer
from lockstep.types import Fingerprint, SamplingParams


@dataclass
class Cluster:
    """Everything a step needs. rollouts: the rollout role; episodes: what plays on it where there is an environment.
    local: the role too, where it is in this process; then own_replica holds its trainable leaves, as last published,
    and rollout_frozen its other leaves. remote: it too, where it is behind `rollout.url`. model_digest: of the weights
    that the run started from, an adapter not included."""

    config: Config
    task: Task
    reward: Reward
    tokenizer: Tokenizer
    spec: ModelSpec
    dial: Dial
    trainer: Trainer
    geometry: Geometry
    rollouts: Rollouts
    episodes: Episodes | None
    local: Local | None
    remote: Remote | None
    sampling: SamplingParams
    fingerprint: Fingerprint
    reference: Reference | None
    reward_models: Sequence[RewardModel]
    critic: Critic | None
    sync: WeightSync
    own_replica: LocalReplica | None
    rollout_frozen: Mapping[str, jax.Array]
    source: str
    model_digest: str

    @property
    def engine(self) -> Engine:
        """The sampler, where it is in this process."""
        assert self.local is not None, "the rollout role is in another process"
        return self.local.engine

    @property
    def replica(self) -> LocalReplica:
        """The sampler's leaves that train, where it is in this process."""
        assert self.own_replica is not None, "the rollout role is in another process"
        return self.own_replica

    def close(self) -> None:
        """End what runs beside the caller's thread; a second call does nothing."""
        self.reward.close()
        if self.episodes is not None:
            self.episodes.close()
        for role in (self.local, self.remote):
            if role is not None:
                role.close()


def make_sampling(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """How completions are drawn. The model's end-of-sequence ids end one, all of them, and the recipe's stop texts."""
    rollout = config.rollout
    ids, texts = split_stops(tokenizer, rollout.stop)
    return SamplingParams(
        rollout.temperature,
        rollout.max_new_tokens,
        tokenizer.eos_ids | ids,
        texts,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
    )


def make_numerics(config: Config, lora: LoraSpec | None) -> Numerics:
    return Numerics(
        dtype=config.model.dtype,
        tile_rows=config.numerics.tile_rows if config.numerics.mode == "exact" else 0,
        page_size=config.rollout.page_size,
        lora_scale=lora.scale if lora else 0.0,
        tensor_parts=config.numerics.parts_on(config.cluster),
    )


def make_storage(config: Config) -> Storage:
    return Storage(config.rollout.kv_dtype, config.rollout.weights_dtype)


def build(config: Config, say: Callable[[str], None] | None = None) -> Cluster:
    """Load reward, model and data, and set up every role. say: told what takes long, and what devices cannot share.

    Writes nothing. Raises a LockstepError if a part is missing or broken, or if parts do not fit each other.
    """
    askers = RolloutAskers()
    reward = make_reward(config.reward, config.task, askers.asker)
    try:
        return _build(config, reward, askers, say)
    except BaseException:
        reward.close()
        raise


def _build(config: Config, reward: Reward, askers: RolloutAskers, say: Callable[[str], None] | None) -> Cluster:
    """`build`, with the reward made."""
    environment = config.environment
    make_environment = None if environment is None else load_environment(environment)
    algorithm = make_algorithm(config.algorithm, config.max_completion_tokens, critic=config.critic is not None)
    dial = Dial.from_config(config.cluster)
    model = load_model(config.model.name, config.model.dtype, say=say)
    if say is not None:
        for line in whole_blocks(model.spec, config.numerics.parts_on(config.cluster)):
            say(line)
    task = make_task(config.task, model.tokenizer, config.run.seed)
    leaves = split_leaves(config, model.spec)
    sampling = make_sampling(config, model.tokenizer)
    longest_sequence(config, model.spec)  # one that is too long is said before anything is placed
    trainer = _trainer(config, dial, model, leaves, algorithm)
    base_digests = leaf_digests(trainer.frozen)
    role = (_rollout_here if config.rollout.url is None else _rollout_elsewhere)(
        config, dial, model, leaves, trainer, base_digests, sampling, say
    )
    askers.connect(role.rollouts, model.tokenizer)
    models = make_reward_models(config, dial, model.tokenizer, trainer.programs.num, _geometry, say)
    for scorer in models:
        reward.add(scorer.name, scorer, scorer.weight)
    return Cluster(
        config=config,
        task=task,
        reward=reward,
        tokenizer=model.tokenizer,
        spec=model.spec,
        dial=dial,
        trainer=trainer,
        geometry=_geometry(config, trainer.programs),
        rollouts=role.rollouts,
        episodes=None
        if environment is None or make_environment is None
        else Episodes(role.rollouts, model.tokenizer, make_environment, environment, role.fingerprint),
        local=role.local,
        remote=role.remote,
        sampling=sampling,
        fingerprint=role.fingerprint,
        reference=make_reference(
            config,
            dial,
            model,
            leaves,
            (trainer.trainable, (trainer.programs, trainer.frozen), (role.programs, role.frozen)),
            _geometry,
        ),
        reward_models=models,
        critic=make_critic(config, dial, model, (trainer.programs, trainer.frozen), _geometry, say),
        sync=role.sync,
        own_replica=role.replica,
        rollout_frozen=role.frozen,
        source=model.source,
        model_digest=tree_digest(base_digests or leaf_digests(trainer.trainable)),
    )


@dataclass(frozen=True)
class _RolloutRole:
    """As the fields of `Cluster`. programs, frozen: of the sampler here; the actor's and none where it is elsewhere."""

    rollouts: Rollouts
    sync: WeightSync
    fingerprint: Fingerprint
    programs: Programs
    frozen: Mapping[str, jax.Array]
    local: Local | None = None
    remote: Remote | None = None
    replica: LocalReplica | None = None


def _rollout_here(
    config: Config,
    dial: Dial,
    model: LoadedModel,
    leaves: LeafSplit,
    trainer: Trainer,
    base_digests: Mapping[str, str],
    sampling: SamplingParams,
    say: Callable[[str], None] | None,
) -> _RolloutRole:
    """An engine in this process."""
    rollout, frozen, installed = _on_rollout(config, dial, model, leaves, trainer, base_digests)
    longest, storage = longest_sequence(config, model.spec), make_storage(config)
    fingerprint = make_fingerprint(
        model.tokenizer, sampling, rollout.num, device_kinds(list(rollout.mesh.devices.flat)), storage
    )
    engine = make_engine(config, model, rollout, longest, fingerprint, say)
    local = Local.start(config.rollout, engine)
    sides = (trainer.programs, trainer.frozen), (rollout, frozen)
    sync, replica = make_sync(config, leaves.trains, sides, installed, local, base_digests)
    return _RolloutRole(local.service, sync, fingerprint, rollout, frozen, local=local, replica=replica)


def _rollout_elsewhere(
    config: Config,
    dial: Dial,
    model: LoadedModel,
    leaves: LeafSplit,
    trainer: Trainer,
    base_digests: Mapping[str, str],
    sampling: SamplingParams,
    say: Callable[[str], None] | None,
) -> _RolloutRole:
    """The service at `rollout.url`. What it samples with must be what the same recipe would sample with here."""
    kinds = device_kinds(list(trainer.programs.mesh.devices.flat))
    fingerprint = make_fingerprint(model.tokenizer, sampling, trainer.programs.num, kinds, make_storage(config))
    remote = Remote.connect(config.rollout, remote_mapping(config, leaves.trains), say)
    try:
        sync = make_remote_sync(config, leaves.trains, (trainer.programs, trainer.frozen), remote, base_digests)
    except BaseException:
        remote.close()
        raise
    return _RolloutRole(remote.rollouts, sync, fingerprint, trainer.programs, {}, remote=remote)


def make_engine(
    config: Config,
    model: LoadedModel,
    rollout: Programs,
    longest: int,
    fingerprint: Fingerprint,
    say: Callable[[str], None] | None,
) -> Engine:
    """The sampler of a recipe. longest: positions of one sequence at most."""
    wanted, tokenizer = config.rollout, model.tokenizer
    drafts = make_drafts(
        wanted.speculation, wanted.draft_model, tokenizer, rollout, slots=wanted.slots, max_positions=longest, say=say
    )
    return Engine(
        rollout,
        slots=wanted.slots,
        max_positions=longest,
        num_pages=pages_of_recipe(wanted, model.spec, config.model.dtype, longest, head_shares(config, model.spec)),
        max_waiting=queue_bound(wanted, rollout.row_shards),
        swap=wanted.swap,
        decode_steps=wanted.decode_steps,
        storage=make_storage(config),
        decode=partial(tokenizer.decode, skip_special=False),
        drafts=drafts,
        draft_tokens=wanted.draft_tokens,
        fingerprint=fingerprint,
    )


def _trainer(config: Config, dial: Dial, model: LoadedModel, leaves: LeafSplit, algorithm: Algorithm) -> Trainer:
    """The actor: weights on its mesh, algorithm and optimizer. Raises ModelError for weights that are not finite."""
    programs = shared_programs(model.spec, make_numerics(config, leaves.lora), dial.mesh("actor"), leaves.all)
    frozen = place(model.params, leaves.frozen, programs.mesh) if leaves.frozen else {}
    trainable = place(initial_trainable(model.params, leaves, config.run.seed), leaves.trains, programs.mesh)
    require_finite({**frozen, **trainable}, model.source)
    schedule = actor_schedule(config)
    optimizer = make_optimizer(config.optim, schedule)
    exact = config.numerics.mode == "exact"
    return Trainer(programs, frozen, trainable, algorithm, optimizer, schedule, exact=exact)


def _on_rollout(
    config: Config,
    dial: Dial,
    model: LoadedModel,
    leaves: LeafSplit,
    trainer: Trainer,
    base_digests: Mapping[str, str],
) -> tuple[Programs, dict[str, jax.Array], dict[str, jax.Array]]:
    """The sampler's programs, frozen leaves and trained leaves: the actor's own where the two roles share a mesh.

    On a mesh of its own the frozen ones cross once, here, and are verified like any sync; the trained ones start as
    zeros, so that a sync that does not arrive cannot go unnoticed.
    """
    if dial.colocated("actor", "rollout"):
        return trainer.programs, trainer.frozen, trainer.trainable
    rollout = shared_programs(model.spec, trainer.programs.num, dial.mesh("rollout"), leaves.all)
    frozen = place(model.params, leaves.frozen, rollout.mesh) if leaves.frozen else {}
    check_same(base_digests, leaf_digests(frozen), "actor", "rollout")
    dtype = jnp.dtype(sampler_dtype(config))
    blank = {path: np.zeros(leaf.shape, dtype) for path, leaf in leaves.trains.items()}
    return rollout, frozen, place(blank, leaves.trains, rollout.mesh)


def _geometry(config: Config, programs: Programs) -> Geometry:
    return Geometry(programs.row_shards, config.train.micro_batch_rows, programs.num.tile_rows, programs.num.page_size)
