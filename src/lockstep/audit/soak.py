"""A few steps of the real loop: first at learning rate 0, where nothing may move, then at one that moves everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from lockstep import store
from lockstep.loading import describe_exception
from lockstep.metrics import read_jsonl
from lockstep.progress import Progress
from lockstep.train.assembly import Cluster
from lockstep.train.loop import Loop
from lockstep.types import PolicyVersion


@dataclass
class Soak:
    """What the steps left behind.

    loop: after its last step, closed. still: how many steps ran at learning rate 0. records, receipts: lines of the
    logs. steps: stored trajectories. changed: leaves that moved although the rate was 0. stayed: whether nothing moved
    although it was not 0. trainable, published: weights and version at the end. broke: what stopped the loop, or None.
    """

    loop: Loop
    still: int
    records: tuple[dict[str, Any], ...] = ()
    receipts: tuple[dict[str, Any], ...] = ()
    steps: list[store.StepRecord] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    trainable: dict[str, jax.Array] = field(default_factory=dict)
    published: PolicyVersion | None = None
    stayed: bool = False
    broke: str | None = None

    @classmethod
    def run(cls, loop_class: type[Loop], cluster: Cluster, folder: Path, still: int, moving: int) -> Soak:
        """Steps in `folder`, without a word."""
        trainer = cluster.trainer
        before = dict(trainer.trainable)
        with Progress(cluster.config, folder, Console(file=StringIO(), force_terminal=False)) as progress:
            soak = cls(loop_class(cluster, folder, progress), still)
            # Whatever breaks is what this is here to find; the other checks go on without it.
            try:
                with soak.loop as loop:
                    loop.start()
                    for _ in range(still):
                        loop.step()
                    soak.changed = unequal(before, trainer.trainable)
                    for _ in range(moving):
                        loop.step()
                    soak.stayed = not unequal(before, trainer.trainable)
            except Exception as error:
                soak.broke = describe_exception(error)
        soak.trainable, soak.published = dict(trainer.trainable), cluster.sync.published
        soak._read(folder)
        return soak

    def _read(self, folder: Path) -> None:
        for name in ("metrics", "receipts"):
            path = folder / f"{name}.jsonl"
            found = read_jsonl(path).records if path.is_file() else ()
            if name == "metrics":
                self.records = found
            else:
                self.receipts = found
        self.steps = [store.read_step(folder / "trajectories", n) for n in store.steps(folder / "trajectories")]


def unequal(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> list[str]:
    """Paths of the leaves whose values differ (0 and -0 do not)."""
    return [path for path, same in jax.device_get(_same(dict(a), {p: b[p] for p in a})).items() if not same]


@jax.jit
def _same(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.array_equal(a[path], b[path]) for path in a}
