"""`--dry-run`: what is printed is what the run then holds and moves."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from lockstep.cluster.devices import default_memory
from lockstep.config import parse_config
from lockstep.errors import ConfigError
from lockstep.models.catalog import load_spec
from lockstep.models.hf import save_folder
from lockstep.models.init import init_params
from lockstep.models.spec import num_parameters
from lockstep.plan.answer import plan_of
from lockstep.plan.request import request_of_recipe
from lockstep.train import trainer
from lockstep.train.assembly import build
from lockstep.train.dry_run import describe, planned_bytes
from lockstep.train.footprint import bytes_per_role, device_bytes, snapshot_column
from lockstep.train.policy import split_leaves

APART = "--cluster={actor = {fsdp = 2, tensor = 2}, rollout = {data = 2}, reference = {tensor = 2}}"
CASES = {
    "together": [],
    "apart": [APART],
    "together, everything trains": ["--lora=none", "--cluster.actor={fsdp = 4}"],
    "apart, everything trains": ["--lora=none", APART],
    "reference with the rollout": ['--cluster={rollout = {fsdp = 2}, reference = "rollout"}'],
    "rollout with the reference": ['--cluster={rollout = "reference", reference = {tensor = 2}}'],
    "reference with the rollout, everything trains": [
        "--lora=none", '--cluster={rollout = {fsdp = 2}, reference = "rollout"}',
    ],
    "no KL": [APART, "--algorithm.measure_kl=false"],
    "bfloat16, pages given": [APART, "--model.dtype=bfloat16", "--rollout.num_pages=9"],
    "eight bits, in memory given": [
        "--cluster={actor = {fsdp = 4}, rollout = {data = 2}, reference = {fsdp = 2}}", "--numerics.mode=fast",
        "--rollout.kv_memory_mib=1", "--rollout.kv_dtype=fp8", "--rollout.weights_dtype=int8",
    ],
    "untied head": [APART, "--model.name={untied}"],
    "untied head, everything trains": [APART, "--lora=none", "--model.name={untied}"],
}  # fmt: skip


@pytest.fixture(scope="module")
def untied(kit, tiny_spec, tmp_path_factory):
    """The tiny model with a head of its own, of a width that two devices cannot share."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    spec = replace(tiny_spec, tied_head=False, mlp_dim=47)
    save_folder(folder, spec, init_params(spec, 0), tokenizer_files_from=kit.folder / "model")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_the_arrays_bytes(kit, untied, tmp_path, name: str) -> None:
    config = kit.config(tmp_path, *(word.replace("{untied}", str(untied)) for word in CASES[name]))
    cluster = build(config)
    spec = load_spec(config.model.name)
    assert planned_bytes(config, cluster.dial, spec, split_leaves(config, spec)) == bytes_per_role(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_snapshot_gradients_and_staged_copies_are_as_large_as_said(opened, kit, tmp_path, monkeypatch, everything):
    """Measured where they exist: gradients as they are added up, the new tree as it is installed."""
    trains = ["--lora=none"] if everything else []
    config = kit.config(tmp_path, APART, "--run.steps=1", "--train.micro_batch_rows=16", *trains)
    seen: dict[str, int] = {}
    with opened(config) as loop:
        cluster = loop.cluster
        said, add, push = bytes_per_role(cluster), trainer.added, cluster.sync.push

        def counted_add(total, more):
            seen["gradients"] = device_bytes((total, more))
            return add(total, more)

        def counted_push(number, trainable):
            before = cluster.replica.installed
            receipt = push(number, trainable)
            staged = cluster.replica.installed
            assert not {id(a) for a in staged.values()} & {id(a) for a in before.values()}
            seen["staged"] = device_bytes(staged)
            return receipt

        monkeypatch.setattr(trainer, "added", counted_add)
        monkeypatch.setattr(cluster.sync, "push", counted_push)
        loop.start()
        loop.step()
        kept = device_bytes(loop.snapshot.restore())
        column = snapshot_column(jax.devices()[0])
        assert loop.snapshot.memory in column or loop.snapshot.memory == default_memory(jax.devices()[0])
    assert seen == {"gradients": said["actor"]["gradients"], "staged": said["rollout"]["staged"]}
    assert kept == said["actor"][column]


def test_the_plan_is_printed(kit, tmp_path) -> None:
    config = kit.config(tmp_path, APART)
    text = describe(config)
    assert text.startswith(config.to_toml().rstrip())
    assert parse_config(text.partition("\n\nmodel: ")[0], overrides=[], folder=tmp_path, where="plan") == config
    assert f"{num_parameters(load_spec(config.model.name)):,} parameters, 3 layers, float32; 1,856 parameters" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith(("role", "actor", "roll", "ref"))}
    assert "parameters/device" in rows["role"] and "kv/device" in rows["role"]
    assert "gradients/device" in rows["role"] and "staged/device" in rows["role"] and "snapshot" in rows["role"]
    assert "fsdp=2 tensor=2" in rows["actor"] and "0-3" in rows["actor"] and "4-5" in rows["rollout"]
    assert "8 of 8 devices used" in text


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--model.dtype=bfloat16"], marks=pytest.mark.slow),
        pytest.param(["--lora=none", "--sync.staging_mib=1"], marks=pytest.mark.slow),
    ],
)
def test_the_plan_that_is_printed_is_the_one_that_runs(kit, opened, left, tmp_path, more: list[str]) -> None:
    config = kit.config(tmp_path, APART, *more)
    with opened(config) as loop:
        loop.start()
    (receipt,) = left(loop.run_dir).receipts()
    plan = plan_of(request_of_recipe(config))
    assert receipt["plan"] == plan.hash
    assert receipt["bytes_moved"] == plan.bytes_written and receipt["bytes_crossing"] == plan.bytes_crossing
    links = [(a, b, n) for (a, b), n in np.ndenumerate(plan.links) if n]
    assert receipt["links"] == [[plan.devices[a], plan.devices[b], int(n)] for a, b, n in links]


def test_the_sync_cost_is_the_receipts(kit, opened, left, tmp_path) -> None:
    config = kit.config(tmp_path, APART)
    with opened(config) as loop:
        loop.start()
    (receipt,) = left(loop.run_dir).receipts()
    assert receipt["bytes_selected"] == 1856 * 4 and receipt["bytes_moved"] == 2 * 1856 * 4
    assert "each sync writes 14.5 KiB on the rollout devices (replicas included), of which 14.5 KiB cross" in describe(
        config
    )
    assert "the same buffers serve both roles, 0 B cross" in describe(kit.config(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--lora.last_layers=4"], "lora.last_layers = 4, but the model has 3 layers"),
        (["--cluster.actor={fsdp = 9}"], "the meshes need 9 devices"),
        (["--rollout.max_new_tokens=600", "--train.micro_batch_rows=900"], "was made for 512 positions"),
    ],
)
def test_a_plan_that_cannot_be(kit, tmp_path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(kit.config(tmp_path, *overrides))
    assert not list(tmp_path.iterdir())
