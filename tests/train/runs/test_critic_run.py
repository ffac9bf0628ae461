"""A critic in a run: what it holds is what is planned, it shares what it can, a checkpoint brings it back."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import jax
import numpy as np
import pytest

from lockstep import checkpoint
from lockstep.errors import ConfigError
from lockstep.models.catalog import load_spec
from lockstep.models.hf import save_folder
from lockstep.train import rundir
from lockstep.train.assembly import Cluster, build
from lockstep.train.dry_run import describe, planned_bytes
from lockstep.train.footprint import bytes_per_role
from lockstep.train.policy import split_leaves
from lockstep.types import Trajectory

PPO = "--algorithm.name=ppo"
CRITIC = "--critic={head_std = 0.5, lora = {rank = 2, last_layers = 1}, optim = {lr = 0.01}}"
CASES = {
    "on the actor's frozen arrays": [CRITIC],
    "on a mesh of its own, everything trains": [
        "--critic={warmup_steps = 2}", "--cluster={actor = {fsdp = 2}, critic = {fsdp = 2, tensor = 2}}"
    ],
    "where the actor trains everything": ["--lora=none", CRITIC],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_the_arrays_bytes(kit, tmp_path, name: str) -> None:
    config = kit.config(tmp_path, PPO, *CASES[name])
    with closing(build(config)) as cluster:
        spec = load_spec(config.model.name)
        planned = planned_bytes(config, cluster.dial, spec, split_leaves(config, spec))
        assert planned == bytes_per_role(cluster) and planned["critic"]["optimizer"] > 0
        assert cluster.critic is not None
        mine, theirs = cluster.critic.model.frozen, cluster.trainer.frozen
        shared = [path for path, array in mine.items() if array is theirs.get(path)]
        assert len(shared) == (len(mine) if name.startswith("on the actor's") else 0)
    assert "critic" in describe(config)


def sampled(cluster: Cluster) -> list[Trajectory]:
    ids, rng = np.arange(3, 6, dtype=np.int32), np.random.default_rng(0)
    zeros = np.zeros(4, np.float32)
    return [
        Trajectory(
            ids, rng.integers(0, 200, 4).astype(np.int32), zeros, zeros.astype(np.int32), "stop", 0, "g", i,
            cluster.fingerprint,
        )
        for i in range(3)
    ]  # fmt: skip


def state(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_checkpoint_brings_the_critic_back(kit, opened, tmp_path) -> None:
    config = kit.config(tmp_path, PPO, CRITIC)
    with opened(config) as loop:
        cluster = loop.cluster
        loop.start()
        batch = sampled(cluster)
        before = cluster.critic.values(batch)
        cluster.critic.step(batch, [np.ones(4, np.float32)] * 3, before, 0)
        after, held = cluster.critic.values(batch), state(cluster.critic.model.state)
        assert any((a != b).any() for a, b in zip(before, after, strict=True))
        rundir.save_checkpoint(loop.run_dir, config, cluster, loop.counters, loop.cursor, "data")
        policy = {"trainable": cluster.trainer.trainable}
        alone, _ = checkpoint.restore(loop.run_dir, 0, policy, partial=True)
        assert state(alone) == state(policy)
        run_dir = loop.run_dir
    with closing(build(config)) as again:
        assert state(again.critic.model.state) != held
        arrays, _ = checkpoint.restore(run_dir, 0, rundir.state_of(again))
        rundir.put_state(again, arrays)
        assert state(again.critic.model.state) == held
        for a, b in zip(again.critic.values(batch), after, strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_critic_that_cannot_read_the_policys_ids_is_refused(kit, tmp_path) -> None:
    from lockstep.models import load_model

    model = load_model(kit.folder / "model")
    save_folder(tmp_path / "short", model.spec, model.params, tokenizer_files_from=kit.folder / "model")
    file = tmp_path / "short" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|other|>"))
    with pytest.raises(ConfigError, match=r"critic.model = .* has another tokenizer than the policy"):
        build(kit.config(tmp_path, PPO, f"--critic.model={tmp_path / 'short'}"))
