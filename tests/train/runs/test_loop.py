"""What a run writes: complete, true to the recipe, and every number of it recomputable from the trajectories."""

from __future__ import annotations

import gc
import json
import os
import re
from dataclasses import fields

import jax
import numpy as np
import pytest

from lockstep import checkpoint, store
from lockstep.config import load_config
from lockstep.metrics import read_jsonl
from lockstep.models import load_model
from lockstep.models.decoder import reference_logits
from lockstep.rollout.engine import request_seed
from lockstep.sync.verify import leaf_digests, policy_digest
from lockstep.types import Trajectory

KEYS = {
    "step", "reward", "reward_std", "reward/run_rewards:even", "kl/k3", "completion_length", "policy_version", "syncs",
    "groups/total", "groups/zero_variance", "rewards/failed", "tokens/generated", "tokens/trained", "finish/stop",
    "finish/length", "mismatch/max_abs", "mismatch/k1", "mismatch/k3", "mismatch/ess", "mismatch/unequal_tokens",
    "loss", "ratio", "clip_fraction", "grad_norm", "lr", "time/generate_s", "time/score_s", "time/train_s",
    "time/sync_s", "time/wait_s", "time/step_s", "engine/passes", "engine/padding", "prompts/skipped",
    "engine/cached_tokens", "engine/preemptions", "engine/drafted", "engine/accepted", "time/rollout_s", "idle/actor",
    "idle/rollout", "idle/reward", "staleness/mean", "staleness/max", "staleness/tokens", "dropped/stale",
    "dropped/aborted", "dropped/failed", "clip_fraction/low", "updates", "loss/denominator",
}  # fmt: skip


# ---------------------------------------------------------------- the run directory


def test_a_run_leaves_everything_behind(finished) -> None:
    here = {p.name for p in finished.path.iterdir()}
    assert here >= {
        "recipe.toml", "metrics.jsonl", "receipts.jsonl", "trajectories", "checkpoints", "report.html", "dial.json",
        "environment.json", "log.txt",
    }  # fmt: skip
    assert checkpoint.steps(finished.path) == [3, 6, 8]
    assert store.steps(finished.path / "trajectories") == list(range(1, 9))
    report = (finished.path / "report.html").read_text()
    assert "run_rewards:even" in report and not re.search(r"(src|href)=[\"']?https?:", report)


def test_the_resolved_recipe_is_the_recipe(finished, kit) -> None:
    assert load_config(finished.path / "recipe.toml") == kit.config(finished.path.parent)


def test_the_dial_and_the_environment(finished) -> None:
    dial = json.loads((finished.path / "dial.json").read_text())
    assert dial["roles"]["rollout"]["same_as"] == "actor" and dial["roles"]["actor"]["bytes"]["parameters"] > 0
    fingerprint = finished.step(1).trajectories[0].fingerprint
    assert dial["environment"]["fingerprint of numerics"] == fingerprint.numerics
    assert json.loads((finished.path / "environment.json").read_text())["jax"] == jax.__version__


def test_the_log_names_the_data(finished) -> None:
    log = (finished.path / "log.txt").read_text()
    assert "data.jsonl (10 rows, sha256 " in log and "report.html" in log and "stopped" not in log


# ---------------------------------------------------------------- metrics


def test_every_promised_metric_is_there(finished) -> None:
    records = read_jsonl(finished.path / "metrics.jsonl").records
    assert [set(r) for r in records] == [KEYS] * 8
    for r in records:
        parts = sum(r[f"time/{phase}_s"] for phase in ("generate", "score", "train", "sync", "wait"))
        assert parts == pytest.approx(r["time/step_s"]) and r["time/generate_s"] > 0 and r["time/train_s"] > 0


def test_step_version_and_syncs_are_three_counters(finished) -> None:
    metrics, receipts = finished.metrics(), finished.receipts()
    assert [m["step"] for m in metrics] == list(range(1, 9))
    assert [m["policy_version"] for m in metrics] == list(range(8))
    assert [m["syncs"] for m in metrics] == [0] * 8  # one mesh, the same buffers
    assert [(r["step"], r["version"], r["syncs"], r["same_buffers"], r["bytes_moved"]) for r in receipts] == [
        (n, n, 0, True, 0) for n in range(9)
    ]
    assert len({r["digest"] for r in receipts}) == 9
    assert [finished.meta(s)["version"] for s in (3, 6, 8)] == [3, 6, 8]
    assert finished.meta(8)["digest"] == receipts[8]["digest"] and finished.meta(8)["cursor"] == 24


def test_the_tiny_run_is_not_trivial(finished) -> None:
    """What the oracle below is worth depends on this."""
    metrics = finished.metrics()
    assert all(m["reward_std"] > 0 and m["grad_norm"] > 0 for m in metrics)
    assert any(0 < m["finish/stop"] < 12 for m in metrics) and metrics[-1]["kl/k3"] > 1e-4
    assert metrics[0]["kl/k3"] == 0  # B starts at zero: the policy is its reference


def kl_numbers(name: str, logp: np.ndarray, ref: np.ndarray) -> np.ndarray:
    d = ref - logp
    return {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[name]


def advantages(kept: list[Trajectory], epsilon: float) -> tuple[dict[tuple[str, int], float], int]:
    """(group, index) -> z-score, and how many groups have none."""
    groups: dict[str, list[Trajectory]] = {}
    for t in kept:
        groups.setdefault(t.group_id, []).append(t)
    found, flat = {}, 0
    for members in groups.values():
        r = [t.reward for t in members]
        mean = sum(r) / len(r)
        std = (sum((x - mean) ** 2 for x in r) / (len(r) - 1)) ** 0.5 if len(r) > 1 else 0.0
        flat += len(set(r)) == 1
        found |= {
            (t.group_id, t.index): 0.0 if len(set(r)) == 1 else (t.reward - mean) / (std + epsilon) for t in members
        }
    return found, flat


def check_metrics(run, config) -> None:
    """Every logged number of every step from its trajectories, with nothing of the code that made it."""
    algorithm, weights = config.algorithm, {f.name: f.weight for f in config.reward.functions}
    for m in run.metrics():
        record = run.step(m["step"])
        everything = record.trajectories
        kept = [t for t in everything if t.failed is None]
        assert m["reward"] == pytest.approx(np.mean([t.reward for t in kept]), rel=1e-12)
        assert m["reward_std"] == pytest.approx(np.std([t.reward for t in kept]), rel=1e-12)
        for name, weight in weights.items():
            assert m[f"reward/{name}"] == pytest.approx(np.mean([t.rewards[name] for t in kept]), rel=1e-12), weight
        assert all(t.reward == sum(weights[n] * v for n, v in t.rewards.items()) for t in kept)
        assert m["rewards/failed"] == len(everything) - len(kept)
        assert m["tokens/generated"] == sum(len(t.completion_ids) for t in everything)
        assert m["completion_length"] == m["tokens/generated"] / len(everything)
        reasons = [t.finish_reason for t in everything]
        assert (m["finish/stop"], m["finish/length"]) == (reasons.count("stop"), reasons.count("length"))
        wanted, flat = advantages(kept, algorithm.std_epsilon)
        assert (m["groups/total"], m["groups/zero_variance"]) == (len({t.group_id for t in kept}), flat)

        rows = list(zip(everything, record.extra["advantage"], record.extra["trainer_logprobs"], strict=True))
        assert all((a is None) == (lp is None) for _, a, lp in rows)
        trained = [(t, a, lp) for t, a, lp in rows if a is not None]
        chosen = {(t.group_id, t.index) for t, _, _ in trained}
        if config.train.select == "all":
            assert chosen == wanted.keys()
        else:
            assert len(chosen) == min(config.train.select_count, len(kept))
            rest = [abs(a) for key, a in wanted.items() if key not in chosen]
            assert min(abs(wanted[key]) for key in chosen) >= max(rest, default=0.0) - 1e-12
        for t, a, _ in trained:
            assert a == pytest.approx(wanted[t.group_id, t.index], rel=1e-9, abs=1e-12)

        old = np.concatenate([t.logprobs for t, _, _ in trained])
        new = np.concatenate([lp for _, _, lp in trained])
        ref = np.concatenate([t.reference_logprobs for t, _, _ in trained]).astype(np.float64)
        adv = np.concatenate([np.full(len(lp), a) for _, a, lp in trained])
        assert m["tokens/trained"] == len(new)
        assert m["mismatch/unequal_tokens"] == int((old.view(np.uint32) != new.view(np.uint32)).sum())
        old, new = old.astype(np.float64), new.astype(np.float64)
        d = new - old
        assert m["mismatch/max_abs"] == np.abs(d).max()
        assert m["mismatch/k1"] == pytest.approx(-d.mean(), abs=1e-12)
        assert m["mismatch/k3"] == pytest.approx((np.exp(d) - 1 - d).mean(), abs=1e-12)
        ratio = np.exp(d)
        assert m["mismatch/ess"] == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()), rel=1e-9)
        kl = kl_numbers(algorithm.kl_estimator, new, ref)
        assert m[f"kl/{algorithm.kl_estimator}"] == pytest.approx(kl.mean(), rel=1e-4, abs=1e-6)
        held = np.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high) * adv
        loss = -np.minimum(ratio * adv, held).mean() + algorithm.kl_coef * kl.mean()
        assert m["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert m["clip_fraction"] == pytest.approx((held < ratio * adv).mean(), abs=1e-6)
        assert m["ratio"] == pytest.approx(ratio.mean(), rel=1e-6)


def test_every_number_follows_from_the_trajectories(finished, kit) -> None:
    config = kit.config(finished.path.parent)
    check_metrics(finished, config)
    assert [m["lr"] for m in finished.metrics()] == [np.float32(0.02)] * 8
    assert all(m["mismatch/max_abs"] == 0 and m["mismatch/unequal_tokens"] == 0 for m in finished.metrics())


@pytest.fixture(scope="module")
def varied(kit, train, left, tmp_path_factory):
    """Another corner of the recipe: dropped samples, two rewards, some rollouts chosen, KL in the loss, a schedule."""
    config = kit.config(
        tmp_path_factory.mktemp("varied"),
        "--run.steps=5",
        '--reward={functions = [{name = "run_rewards:picky"}, {name = "run_rewards:length", weight = -0.05}], '
        f'on_error = "drop", folder = "{kit.folder}"}}',
        '--algorithm={kl_coef = 0.3, kl_estimator = "k2"}',
        '--optim={lr = 0.04, schedule = "linear", warmup_steps = 2}',
        '--train={select = "informative", select_count = 5}',
        "--rollout.temperature=0.8",
    )
    return config, left(train(config))


def test_the_same_in_another_corner(varied) -> None:
    config, run = varied
    check_metrics(run, config)
    metrics = run.metrics()
    assert any(m["rewards/failed"] for m in metrics) and any(m["groups/total"] < 3 for m in metrics)
    # Up to the rate in two updates, then down towards 0 at the last step.
    assert [m["lr"] for m in metrics] == pytest.approx([0.02, 0.04, 0.04, 0.04 * 2 / 3, 0.04 / 3])


def test_dropped_samples_are_counted_shown_and_kept_in_the_record(varied) -> None:
    _, run = varied
    log = (run.path / "log.txt").read_text()
    for m in run.metrics():
        record = run.step(m["step"])
        failed = [t for t in record.trajectories if t.failed is not None]
        assert len(failed) == m["rewards/failed"]
        for t in failed:
            assert "cannot judge" in t.failed and np.isnan(t.reward) and t.reference_logprobs is None
            assert np.isnan(t.rewards["run_rewards:picky"]) and t.rewards["run_rewards:length"] == len(t.text)
        assert m.get("failures/run_rewards:picky/exception", 0) == len(failed)
        if failed:
            assert f"{len(failed)} of 12 samples dropped: reward 'run_rewards:picky' raised ValueError" in log


# ---------------------------------------------------------------- trajectories


def test_trajectories_are_what_was_asked_for(finished, kit) -> None:
    model = load_model(str(kit.folder / "model"))
    rows = [json.loads(line) for line in (kit.folder / "data.jsonl").read_text().splitlines()]
    seen: list[str] = []
    for step in range(1, 9):
        record = finished.step(step)
        assert [t.index for t in record.trajectories] == [0, 1, 2, 3] * 3
        groups = [t.group_id for t in record.trajectories]
        assert groups == [g for g in groups[::4] for _ in range(4)] and len(set(groups)) == 3
        seen += groups[::4]
        for t in record.trajectories:
            row = rows[int(t.group_id.rsplit("/", 1)[1])]
            assert record.prompts[t.group_id] == row["prompt"]
            assert t.prompt_ids.tolist() == model.tokenizer.encode(row["prompt"])
            assert 1 <= len(t.completion_ids) <= 6
            stops = model.tokenizer.eos_ids | {model.tokenizer.single_id(c) for c in "aeiot"}
            ended = int(t.completion_ids[-1]) in stops
            assert t.finish_reason == ("stop" if ended else "length") and (ended or len(t.completion_ids) == 6)
            assert not stops & set(t.completion_ids[:-1].tolist())
            assert t.text == model.tokenizer.decode(t.completion_ids.tolist())
            assert t.rewards == {"run_rewards:even": sum(ord(c) % 2 == 0 for c in t.text) / max(1, len(t.text))}
            assert t.versions.tolist() == [step - 1] * len(t.completion_ids)
            assert t.seed == request_seed(3, step, t.group_id, t.index)
            assert t.fingerprint == finished.step(1).trajectories[0].fingerprint and t.failed is None
            assert t.generate_s > 0
    # An epoch is ten prompts, each once.
    assert len(set(seen[:10])) == len(set(seen[10:20])) == 10 and not set(seen[:10]) & set(seen[10:20])


def test_every_field_of_a_trajectory_is_stored(finished) -> None:
    stored = finished.step(8).trajectories[0]
    absent = (
        "failed",
        "kept_logmass",
        "details",
        "values",
        "sampled",
        "turn_rewards",
    )  # this run has nothing to say there
    for field in fields(Trajectory):
        value = getattr(stored, field.name)
        assert (value is None) == (field.name in absent), field.name
        assert not isinstance(value, np.ndarray) or (value.size and value.dtype in (np.int32, np.float32))


def test_the_first_record_is_the_models_own(finished, kit) -> None:
    """Step 1 samples from the model as it was given: logits from the slow twin, in sequence, without pages or tiles."""
    model = load_model(str(kit.folder / "model"))
    trajectories = finished.step(1).trajectories
    ids = np.zeros((len(trajectories), 11), np.int32)  # what pads on the right is not seen from the left
    for row, t in zip(ids, trajectories, strict=True):
        row[: len(t.prompt_ids) + len(t.completion_ids)] = np.concatenate([t.prompt_ids, t.completion_ids])
    logits = np.asarray(reference_logits(model.spec, model.params, ids), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, t in zip(logp, trajectories, strict=True):
        at = len(t.prompt_ids) - 1 + np.arange(len(t.completion_ids))
        wanted = row[at, t.completion_ids]
        np.testing.assert_allclose(t.logprobs, wanted, rtol=1e-5, atol=1e-5)
        assert t.reference_logprobs.tobytes() == t.logprobs.tobytes()


def test_the_first_version_is_the_base_and_a_fresh_adapter(opened, kit, tmp_path) -> None:
    model = load_model(str(kit.folder / "model"))
    with opened(kit.config(tmp_path)) as loop:
        loop.start()
        adapter = {path: np.asarray(leaf) for path, leaf in loop.cluster.trainer.trainable.items()}
        version = loop.cluster.engine.version
    assert {path.split(".")[1] for path in adapter} == {"1", "2"}
    assert all((a == 0).all() == path.endswith("lora_b") for path, a in adapter.items())
    base, trained = (leaf_digests(jax.tree.map(jax.device_put, tree)) for tree in (model.params, adapter))
    assert version.digest == policy_digest(base, trained)


# ---------------------------------------------------------------- steps that teach nothing, and many steps


def test_equal_rewards_change_nothing_but_adams_count(opened, kit, tmp_path) -> None:
    reward = f'--reward={{functions = [{{name = "run_rewards:same"}}], folder = "{kit.folder}"}}'
    with opened(kit.config(tmp_path, reward)) as loop:
        loop.start()
        before = {path: np.asarray(leaf) for path, leaf in loop.cluster.trainer.trainable.items()}
        digest = loop.cluster.engine.version.digest
        loop.step()
        after = loop.cluster.trainer.trainable
        assert all(np.asarray(after[path]).tobytes() == leaf.tobytes() for path, leaf in before.items())
        assert loop.cluster.engine.version.number == 1 and loop.cluster.engine.version.digest == digest
        counts = [int(x) for x in jax.tree.leaves(loop.cluster.trainer.optimizer_state) if x.ndim == 0]
        moments = [np.asarray(x) for x in jax.tree.leaves(loop.cluster.trainer.optimizer_state) if x.ndim]
        assert counts == [1, 1] and not any(m.any() for m in moments)
        (m,) = read_jsonl(loop.run_dir / "metrics.jsonl").records
        warning = "step 1: in all 3 groups every sample has the same reward: nothing to learn from (1 such steps"
        assert warning in (loop.run_dir / "log.txt").read_text()
        for _ in range(5):
            loop.step()
        assert (loop.run_dir / "log.txt").read_text().count("nothing to learn from") == 1
    assert (m["groups/zero_variance"], m["groups/total"], m["grad_norm"], m["loss"]) == (3, 3, 0.0, 0.0)


def test_many_steps_leak_nothing_and_learn(opened, kit, tmp_path) -> None:
    """Gate 12: the number of live device arrays, and of open files, stays what it was after warm-up."""
    seen = []
    # A checkpoint looks at the shards of what it saves, and jax keeps those views until the next update: not after one.
    with opened(kit.config(tmp_path, "--run.steps=40", "--run.checkpoint_every=7")) as loop:
        loop.start()
        for step in range(1, 37):
            loop.step()
            if step % 6 == 0:
                gc.collect()
                seen.append((len(jax.live_arrays()), len(os.listdir("/proc/self/fd"))))
    assert len(set(seen)) == 1, seen
    rewards = [m["reward"] for m in read_jsonl(loop.run_dir / "metrics.jsonl").records]
    assert np.mean(rewards[-12:]) > np.mean(rewards[:3]) + 0.1


def test_after_warm_up_nothing_compiles(opened, kit, tmp_path) -> None:
    """Steps of another number of tokens each, of which one has been seen: the programs are those of the first steps."""
    compiled: list[str] = []

    def listen(name: str, _: float, **more: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    with opened(kit.config(tmp_path, "--run.steps=20", "--run.checkpoint_every=0")) as loop:
        loop.start()
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            for _ in range(6):
                loop.step()
            warm = len(compiled)
            for _ in range(8):
                loop.step()
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == warm > 0
    tokens = [m["tokens/trained"] for m in read_jsonl(loop.run_dir / "metrics.jsonl").records]
    assert len(set(tokens[6:]) - set(tokens[:6])) >= 3, tokens


def test_the_engine_says_how_full_its_passes_were(finished) -> None:
    for m in finished.metrics():
        assert 0 <= m["engine/padding"] < 1 and m["prompts/skipped"] == 0
        # A prefill and at most a pass per token; every pass decodes one token at least of each sample that runs.
        assert 2 <= m["engine/passes"] <= 6 + 3


def test_skipped_prompts_are_counted(opened, kit, tmp_path) -> None:
    rows = [{"prompt": "1" * (9 if n % 2 else 3), "number": n} for n in range(8)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'--task={{kind = "file", path = "{tmp_path}/mixed.jsonl", max_prompt_tokens = 6, too_long = "skip"}}'
    with opened(kit.config(tmp_path / "runs", task)) as loop:
        loop.start()
        loop.step()
    (m,) = read_jsonl(loop.run_dir / "metrics.jsonl").records
    assert m["prompts/skipped"] == 4


def test_the_same_recipe_gives_the_same_run_and_another_seed_another(finished, kit, train, left, tmp_path) -> None:
    again = left(train(kit.config(tmp_path, "--run.steps=2")))
    assert again.metrics() == finished.metrics()[:2]
    assert again.trajectories() == {n: t for n, t in finished.trajectories().items() if n <= 2}
    other = left(train(kit.config(tmp_path, "--run.steps=1", "--run.seed=4")))
    assert load_config(other.path / "recipe.toml").run.name == other.path.name == "run-2"
    assert (other.path / "log.txt").read_text() and other.trajectories()[1] != again.trajectories()[1]
