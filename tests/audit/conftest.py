"""A tiny recipe to audit, and clusters of it whose parts can be replaced by faulty ones.

The clusters of one recipe share their compiled programs: engine, trainer and sync are made anew around them.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lockstep.audit.check import Check
from lockstep.audit.examine import examine
from lockstep.audit.subject import Subject, in_small, remade
from lockstep.config import Config, parse_config
from lockstep.rollout.engine import Engine
from lockstep.rollout.pool_size import longest_sequence
from lockstep.rollout.trajectories import decoding_digest
from lockstep.sync.verify import leaf_digests
from lockstep.train.assembly import Cluster, build
from lockstep.train.loop import Loop
from lockstep.train.policy import split_leaves
from lockstep.train.serving import Local
from lockstep.train.syncing import make_sync
from lockstep.train.trainer import Trainer
from lockstep.types import SamplingParams

RECIPE = """
run = { name = "audited", dir = "runs", seed = 3, steps = 3, checkpoint_every = 2 }
model = { name = "./model" }
lora = { rank = 2, last_layers = 2 }
task = { kind = "file", path = "data.jsonl", max_prompt_tokens = 8 }
reward = { functions = [{ name = "audit_rewards:even" }] }
rollout = { prompts = 3, samples = 4, max_new_tokens = 6, temperature = 1.2, slots = 32, page_size = 4 }
algorithm = { kl_coef = 0.1 }
optim = { lr = 0.02 }
train = { micro_batch_rows = 32 }
"""

REWARDS = '''
def even(prompts, completions, rows):
    """Share of characters with an even code point."""
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in completions]
'''


@dataclass(frozen=True)
class Kit:
    """A folder with a model (whose tokenizer has a beginning-of-sequence token), data and a reward."""

    folder: Path

    def config(self, *overrides: str) -> Config:
        return parse_config(RECIPE, overrides=list(overrides), folder=self.folder, where="recipe")


@pytest.fixture(scope="session")
def kit(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder = tmp_path_factory.mktemp("audit")
    model = folder / "model"
    shutil.copytree(tiny_folder, model)
    settings = model / "tokenizer_config.json"
    with_bos = json.loads(settings.read_text()) | {"bos_token": "<|im_start|>", "add_bos_token": True}
    settings.write_text(json.dumps(with_bos))
    rows = [{"prompt": f"{n:02d}+1=", "number": n} for n in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "audit_rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(RECIPE)
    return Kit(folder)


@dataclass
class Bench:
    """One recipe's cluster, from which others are made; what a fault does not replace is compiled once for all."""

    recipe: Config
    base: Cluster

    @cached_property
    def measuring(self) -> Trainer:
        return remade(self.base.trainer, self.base.config)

    def cluster(
        self,
        engine: type[Engine] = Engine,
        trainer: type[Trainer] = Trainer,
        algorithm: Any = None,
        sampling: SamplingParams | None = None,
    ) -> Cluster:
        """A fresh cluster on the same programs and weights, with other classes for its parts."""
        base, config = self.base, self.base.config
        fingerprint = base.fingerprint
        if sampling is not None:
            fingerprint = replace(fingerprint, decoding=decoding_digest(sampling))
        actor = copy.copy(base.trainer)
        actor.__class__, actor.algorithm = trainer, algorithm or actor.algorithm
        sampler = engine(
            base.engine.programs, slots=config.rollout.slots, max_positions=longest_sequence(config, base.spec),
            fingerprint=fingerprint,
        )  # fmt: skip
        sampler._sampler = base.engine._sampler  # its compiled programs
        leaves = split_leaves(config, base.spec).trains
        sides = (actor.programs, actor.frozen), (sampler.programs, base.rollout_frozen)
        local = Local.start(config.rollout, sampler)
        sync, replica = make_sync(config, leaves, sides, actor.trainable, local, leaf_digests(actor.frozen))
        return replace(
            base, trainer=actor, local=local, rollouts=local.service, sync=sync, own_replica=replica,
            fingerprint=fingerprint, sampling=sampling or base.sampling,
        )  # fmt: skip

    def ask(self, cluster: Cluster, folder: Path, loop: type[Loop] = Loop) -> dict[str, Check]:
        """Every check of it by name."""
        measuring, built = copy.copy(self.measuring), cluster.trainer
        measuring.optimizer_state = jax.tree.map(jnp.copy, self.measuring.optimizer_state)
        measuring.__class__ = type(built)
        if built.algorithm is not measuring.algorithm:
            measuring.algorithm = built.algorithm
            measuring._loss = jax.jit(jax.value_and_grad(built.algorithm.loss, (0,), has_aux=True))
        subject = Subject(cluster, folder, self.recipe, loop, measuring)
        return {check.name: check for check in examine(subject, None, lambda check: None)}


def _bench(config: Config, folder: Path) -> Bench:
    return Bench(config, build(in_small(config, folder)))


@pytest.fixture(scope="session")
def with_adapter(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The recipe as it is."""
    return _bench(kit.config(), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def all_weights(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The recipe without an adapter."""
    return _bench(kit.config("--lora=none"), tmp_path_factory.mktemp("small"))


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """(bench, its cluster, loop's class) -> every check of it by name."""
    return lambda bench, cluster, loop=Loop: bench.ask(cluster, tmp_path, loop)
