"""The run's weight sync: what the sampler holds, how versions get there, and what they are probed with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import shardings
from lockstep.config import Config
from lockstep.models.spec import Leaf, ModelSpec
from lockstep.sync.delta_files import DeltaFilesTransport
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.folder import FolderReplica
from lockstep.sync.formats import hf_map
from lockstep.sync.local import LocalTransport
from lockstep.sync.mapping import FormatMap, identity_map
from lockstep.sync.probe import make_probe, probe_sequences
from lockstep.sync.publish import Probe
from lockstep.sync.replica import LocalReplica
from lockstep.sync.route import Route
from lockstep.sync.sync import WeightSync
from lockstep.sync.verify import leaf_digests, tree_digest
from lockstep.train.batching import Geometry, MicroBatch, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.policy import TRAINABLE_DTYPE, sampler_dtype
from lockstep.train.remote import Remote
from lockstep.train.serving import Local
from lockstep.types import Fingerprint, Trajectory

PROBE_TOKENS = 16  # per sequence
# Nats that rounding alone may make of one token on two meshes in fast mode; in exact mode it makes none.
PROBE_BOUND = {"float32": 1e-3, "bfloat16": 0.25}


def make_sync(
    config: Config,
    leaves: Mapping[str, Leaf],
    sides: tuple[tuple[Programs, Mapping[str, jax.Array]], tuple[Programs, Mapping[str, jax.Array]]],
    installed: Mapping[str, jax.Array],
    local: Local,
    base: Mapping[str, str],
) -> tuple[WeightSync, LocalReplica]:
    """The sync, and the sampler's replica of it. leaves: of what trains. sides: (programs, frozen weights) of actor and
    rollout. installed: the rollout's trained leaves before the first version. local: the sampler, which takes versions
    over as its update policy says. base: digests of the frozen weights."""
    (actor, actor_frozen), (rollout, rollout_frozen) = sides
    where, dtype = shardings(leaves, rollout.mesh), sampler_dtype(config)
    sampled = Scorer(rollout, rollout_frozen)
    replica = local.replica(
        rollout.mesh,
        "rollout",
        installed,
        where,
        LocalTransport(),
        install=lambda policy, tree: local.install(policy, {**rollout_frozen, **tree}),
        score=sampled,
        base_digest=_base_digest(base if rollout_frozen is actor_frozen else leaf_digests(rollout_frozen)),
    )
    routes = [local.service.route(Route.local(replica, None if dtype == TRAINABLE_DTYPE else _cast(leaves, dtype)))]
    if config.sync.folder is not None:
        routes.append(_folder(config, leaves, actor.spec).route())
    sync = WeightSync(
        leaves,
        routes,
        base=base,
        on_failure=config.sync.on_failure,
        deadline_s=config.sync.deadline_s,
        drain_s=config.rollout.deadline_s if config.rollout.staleness else 0.0,
        staging_bytes=config.sync.staging_mib << 20,
        probe=_probe_maker(config, Scorer(actor, actor_frozen)),
    )
    return sync, replica


def make_remote_sync(
    config: Config,
    leaves: Mapping[str, Leaf],
    actor: tuple[Programs, Mapping[str, jax.Array]],
    remote: Remote,
    base: Mapping[str, str],
) -> WeightSync:
    """To every replica of the service. They hold what trains in the type that they compute in."""
    routes = remote.routes()
    if config.sync.folder is not None:
        routes.append(_folder(config, leaves, actor[0].spec).route())
    return WeightSync(
        leaves,
        routes,
        base=base,
        on_failure=config.sync.on_failure,
        deadline_s=config.sync.deadline_s,
        drain_s=config.rollout.deadline_s,
        staging_bytes=config.sync.staging_mib << 20,
        probe=_probe_maker(config, Scorer(*actor)),
    )


def remote_mapping(config: Config, leaves: Mapping[str, Leaf]) -> FormatMap | None:
    """From the trainer's leaves to a served replica's."""
    return None if config.model.dtype == TRAINABLE_DTYPE else _cast(leaves, config.model.dtype)


def _base_digest(leaves: Mapping[str, str]) -> str:
    """Of the frozen weights that one side holds; empty where all weights train."""
    return tree_digest(leaves) if leaves else ""


def _cast(leaves: Mapping[str, Leaf], dtype: str) -> FormatMap:
    forms = {path: (leaf.shape, TRAINABLE_DTYPE) for path, leaf in leaves.items()}
    return identity_map(forms, {path: (leaf.shape, dtype) for path, leaf in leaves.items()}, cast=True)


def _folder(config: Config, leaves: Mapping[str, Leaf], spec: ModelSpec) -> FolderReplica:
    """The run's versions as folders, whether or not anything moves to the sampler."""
    settings = config.sync
    assert settings.folder is not None
    to = config.model.dtype
    mapping = hf_map(spec, TRAINABLE_DTYPE, to=to) if settings.folder_format == "hf" else _cast(leaves, to)
    kind = DeltaFilesTransport if settings.folder_delta else FilesTransport
    return FolderReplica("folder", mapping, kind(config.run.path / settings.folder, keep=settings.folder_keep))


def _probe_maker(config: Config, trained: Scorer) -> Callable[[Mapping[str, jax.Array]], Probe] | None:
    if not config.sync.probe_sequences:
        return None
    spec = trained.programs.spec
    length = min(PROBE_TOKENS, spec.max_position)
    sequences = probe_sequences(spec.vocab_size, config.sync.probe_sequences, length, seed=config.run.seed)
    exact, bound = config.numerics.mode == "exact", PROBE_BOUND[config.model.dtype]
    return lambda tree: make_probe(lambda chosen: trained(tree, chosen), sequences, exact, bound)


class Scorer:
    """Log-probabilities of token sequences under any trained leaves, by a role's own programs."""

    def __init__(self, programs: Programs, frozen: Mapping[str, jax.Array]) -> None:
        self.programs, self._frozen = programs, frozen
        self._made: tuple[tuple[tuple[int, ...], ...], list[MicroBatch]] | None = None

    def __call__(self, trained: Mapping[str, jax.Array], sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """[T - 1] float32 per sequence of T tokens: of tokens 1.. given those before, at temperature 1."""
        weights = SplitWeights.of({**self._frozen, **trained}, self.programs.spec.num_layers)
        batches = self._batches(tuple(tuple(map(int, tokens)) for tokens in sequences))
        found: list[np.ndarray | None] = [None] * len(sequences)
        for batch, flat in zip(batches, score(self.programs, weights, batches), strict=True):
            batch.scatter(flat, found)
        return [part for part in found if part is not None]

    def _batches(self, sequences: tuple[tuple[int, ...], ...]) -> list[MicroBatch]:
        """They are the same for every version, so they are laid out once."""
        if self._made is None or self._made[0] != sequences:
            p = self.programs
            geometry = Geometry(p.row_shards, sum(map(len, sequences)), p.num.tile_rows, p.num.page_size)
            made = make_micro_batches(
                [_as_rollout(i, s) for i, s in enumerate(sequences)], np.zeros(len(sequences)), 1.0, geometry
            )
            self._made = sequences, made
        return self._made[1]


def _as_rollout(number: int, tokens: tuple[int, ...]) -> Trajectory:
    """The first token as a prompt, the others as what was sampled from it."""
    ids = np.array(tokens, np.int32)
    return Trajectory(
        ids[:1], ids[1:], np.zeros(len(ids) - 1, np.float32), np.zeros(len(ids) - 1, np.int32), "length", 0,
        f"probe/{number}", 0, Fingerprint("", "", "", ""),
    )  # fmt: skip
