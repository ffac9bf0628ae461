"""The reference role: the policy that the KL is measured against. Frozen, or following the one that trains.

Frozen it is the base under LoRA, else the weights before the first update. With `algorithm.reference_every` = n it
moves after every n-th step: reference <- mix * policy + (1 - mix) * reference. mix = 1 is a periodic refresh (as in Liu
et al. 2025, ProRL, arXiv:2505.24864), n = 1 with a small mix a moving average (Ramé et al. 2024, WARP,
arXiv:2406.16768).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.cluster.shared import shared_programs
from lockstep.config import Config
from lockstep.models.catalog import LoadedModel
from lockstep.models.spec import leaf_table
from lockstep.sync.verify import check_same, leaf_digests
from lockstep.train.batching import Geometry
from lockstep.train.policy import LeafSplit

Role = tuple[Programs, Mapping[str, jax.Array]]
"""A role's programs, and those of its weights that are the reference's too."""


class Reference:
    """Compiled functions, weights, and the role's own row geometry.

    fixed: leaves that never change. moving: those that follow what trains, float32, at first as it starts; None where
    the reference is frozen. shares_trunk: its layers below the first trained one are the actor's own arrays on the
    actor's mesh, so their output is computed once for both.
    """

    def __init__(
        self,
        programs: Programs,
        fixed: Mapping[str, jax.Array],
        moving: Mapping[str, jax.Array] | None,
        geometry: Geometry,
        shares_trunk: bool,
    ) -> None:
        self.programs, self.geometry, self.shares_trunk = programs, geometry, shares_trunk
        self._fixed, self.moving = dict(fixed), moving

    @property
    def moving(self) -> dict[str, jax.Array] | None:
        return self._moving

    @moving.setter
    def moving(self, tree: Mapping[str, jax.Array] | None) -> None:
        self._moving = None if tree is None else dict(tree)
        self.weights = SplitWeights.of({**self._fixed, **(tree or {})}, self.programs.spec.num_layers)

    def follow(self, policy: Mapping[str, jax.Array], mix: float) -> None:
        """Take `mix` of what trains now. Raises SyncError, and stays as it was, where that did not arrive whole on the
        reference's mesh."""
        assert self.moving is not None, "this reference is frozen"
        places = {path: leaf.sharding for path, leaf in self.moving.items()}
        arrived = {path: jax.device_put(leaf, places[path]) for path, leaf in policy.items()}
        if any(leaf.sharding != places[path] for path, leaf in policy.items()):
            check_same(leaf_digests(policy), leaf_digests(arrived), "actor", "reference")
        self.moving = arrived if mix == 1.0 else _mixed(arrived, self.moving, np.float32(mix))


@jax.jit
def _mixed(policy: Mapping[str, jax.Array], reference: Mapping[str, jax.Array], mix: Any) -> dict[str, jax.Array]:
    return {path: mix * leaf + (1 - mix) * reference[path] for path, leaf in policy.items()}


def measures_kl(config: Config) -> bool:
    """Whether the run needs a reference."""
    return config.algorithm.measure_kl or config.algorithm.kl_coef > 0


def make_reference(
    config: Config,
    dial: Dial,
    model: LoadedModel,
    leaves: LeafSplit,
    roles: tuple[Mapping[str, jax.Array], Role, Role],
    geometry: Callable[[Config, Programs], Geometry],
) -> Reference | None:
    """The reference of a recipe; None where nothing measures the KL.

    roles: (what trains, as it starts; the actor; the rollout): their frozen weights are the reference's too where it
    shares their mesh (arrays never change in place); there are none where everything trains.
    """
    if not measures_kl(config):
        return None
    initial, actor, rollout = roles
    moves = config.algorithm.reference_every > 0
    sharing = [
        (role, programs, frozen)
        for role, (programs, frozen) in (("actor", actor), ("rollout", rollout))
        if dial.colocated(role, "reference") and (frozen or role == "actor")
    ]
    if sharing:
        role, programs, frozen = sharing[0]
        # Frozen, a reference of a full-parameter run keeps the first weights themselves.
        fixed = frozen if frozen or moves else initial
        shares_trunk = role == "actor" and config.lora is not None
    else:
        table = leaf_table(model.spec)
        programs = shared_programs(model.spec, actor[0].num, dial.mesh("reference"), leaves.all if moves else table)
        kept = leaves.frozen if moves else table
        fixed, shares_trunk = place(model.params, kept, programs.mesh) if kept else {}, False
    trained = _on(initial, leaves, programs) if moves else None
    return Reference(programs, fixed, trained, geometry(config, programs), shares_trunk)


def _on(initial: Mapping[str, jax.Array], leaves: LeafSplit, programs: Programs) -> dict[str, jax.Array]:
    """What trains, where the reference's programs read it."""
    if all(leaf.sharding.mesh == programs.mesh for leaf in initial.values()):  # type: ignore[attr-defined]
        return dict(initial)
    return place({path: np.asarray(leaf) for path, leaf in initial.items()}, leaves.trains, programs.mesh)
