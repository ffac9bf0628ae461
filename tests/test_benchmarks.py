"""The benchmark scripts: their command lines, what they hand to each side, what they make of the answers.

Nothing is timed here and TRL is not needed; the scripts themselves are run by hand (docs/performance.md).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import load_config
from lockstep.envs.scorers import first_line_exact

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module; the scripts import one another from their own folders."""
    folders = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]
    sys.path[:0] = folders
    try:
        return importlib.import_module(name)
    finally:
        for folder in folders:
            sys.path.remove(folder)


limits, loop, summary, peer = (script(n) for n in ("limits", "loop", "summary", "trl_addition"))

PEER_WORDS = ["--model", "m", "--prompts", "p.jsonl", "--out", "o.jsonl"]


# ---------------------------------------------------------------- command lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "1"], "--steps must be at least 2, got 1"),  # the first step does not count
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--threads", "100000"], "this process may use"),
        (["--peer", "fast"], "invalid choice"),
    ],
)
def test_loop_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loop.parse_arguments(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--threads", "0"], "--threads must be at least 1"),
        (["--threads", "100000"], "this process may use"),
        (["--repeats", "0"], "--repeats must be at least 1"),
    ],
)
def test_limits_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        limits.parse_arguments(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: --model, --prompts, --out"),
        ([*PEER_WORDS, "--steps", "0"], "--steps must be at least 1"),
        ([*PEER_WORDS, "--micro-batch", "48"], "must divide prompts x samples = 128, got 48"),
        ([*PEER_WORDS, "--micro-batch", "-1"], "must divide"),
    ],
)
def test_peer_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peer.parse_arguments(words)
    assert message in capsys.readouterr().err


def test_peer_takes_the_whole_batch_at_once_unless_told() -> None:
    assert peer.parse_arguments(PEER_WORDS).micro_batch == 128
    assert peer.parse_arguments([*PEER_WORDS, "--samples", "4"]).micro_batch == 64
    assert peer.parse_arguments([*PEER_WORDS, "--micro-batch", "32"]).micro_batch == 32


def test_peer_understands_every_option_that_the_benchmark_gives_it() -> None:
    for options, _ in loop.PEERS.values():
        words = [w for name, value in loop.peer_settings().items() for w in (f"--{name}", str(value))]
        given_ = peer.parse_arguments([*PEER_WORDS, *options, *words])
        defaults = vars(peer.parse_arguments([*PEER_WORDS, *options]))
        assert vars(given_) == defaults, "the peer's own defaults are the benchmark's settings"


# ---------------------------------------------------------------- what both sides are given


def test_prompts_are_repeatable_rows_that_the_peer_reads(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(files, (0, 0, 1), strict=True):
        loop.write_prompts(path, 5, seed)
    a, b, c = (peer.read_prompts(path, 5) for path in files)
    assert a == b != c
    for row in a:
        left, right = row["prompt"].rsplit("\n", 1)[1].removesuffix(" =").split(" + ")
        assert int(left) + int(right) == int(row["answer"])


def test_peer_names_what_is_wrong_with_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    loop.write_prompts(path, 3, 0)
    with pytest.raises(ValueError, match=r"expected at least 4 rows \(steps x prompts\), got 3"):
        peer.read_prompts(path, 4)
    path.write_text('{"prompt": "1 + 1 =", "answer": 2}\n')
    with pytest.raises(ValueError, match="row 1: column 'answer' must be a string, got 2"):
        peer.read_prompts(path, 1)


def test_recipe_of_the_lockstep_side_is_valid_and_has_the_shared_settings(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    base = tomllib.loads(loop.RECIPE.read_text(encoding="utf-8"))
    run = {"name": "run", "dir": str(tmp_path), "seed": 3, "steps": 6}
    recipe = loop.make_recipe(base, run, tmp_path / "model", tmp_path / "prompts.jsonl")
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    config = load_config(tmp_path / "recipe.toml", [])
    assert (config.run.seed, config.run.steps, config.model.name) == (3, 6, str(tmp_path / "model"))
    assert (config.task.kind, config.task.shuffle) == ("file", False)
    assert (config.numerics.mode, config.train.select, config.algorithm.measure_kl) == ("exact", "all", False)
    assert config.lora is not None and (config.lora.rank, config.lora.last_layers) == (8, 10)
    assert tuple(config.optim.betas) == (0.9, 0.999) and config.optim.lr == 2e-3


@given(st.text(alphabet="0123456789 \n\tx", max_size=12), st.integers(0, 198).map(str))
def test_both_sides_score_alike(completion: str, answer: str) -> None:
    rows = [{"answer": answer}, {"answer": answer}]
    texts = [completion, f" {answer}\n{completion}"]
    assert peer.reward(texts, [answer] * 2) == first_line_exact([""] * 2, texts, rows)


def test_mask_that_leaves_out_the_stop_token_is_refused() -> None:
    ids = np.array([[7, 8, 9, 2, 0], [7, 8, 9, 7, 8]])
    whole = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert peer.check_mask(ids, whole, [2, 5], 5) == {"completion_length": 4.5, "finish_stop": 0.5}
    for wrong in ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]):
        with pytest.raises(RuntimeError, match="the mask covers"):
            peer.check_mask(ids, np.array(wrong), [2, 5], 5)


# ---------------------------------------------------------------- what is made of the answers


def run(side: str, round_: int, seconds: list[float], reward: float) -> object:
    steps = [
        {"step": i, "reward": reward, "completion_length": 4.0, "step_s": s}
        | {"generate_s": s / 4, "score_s": 0.0, "train_s": s / 2}
        for i, s in enumerate(seconds, start=1)
    ]
    return summary.Run(side, round_, 0, 10 * sum(seconds), 20 * sum(seconds), [[1, 2]], [2, 198], {}, steps)


def test_summary_leaves_out_the_first_step_and_pairs_by_round() -> None:
    runs = [
        run("lockstep", 0, [50, 2, 2, 2], 0.5),
        run("trl", 0, [9, 8, 8, 8], 0.25),
        run("lockstep", 1, [50, 4, 4, 4], 0.5),
        run("trl", 1, [9, 8, 8, 8], 0.25),
    ]
    found = summary.summarise(runs)
    assert found["lockstep"]["step_s"] == {"median": 3, "min": 2, "max": 4}
    assert found["trl"]["train_s"]["median"] == 4
    assert found["step_ratio"] == {"median": 8 / 3, "min": 2, "max": 4}
    assert found["lockstep"]["reward"]["by_step"] == [0.5] * 4
    assert found["trl"]["reward"]["mean"] == 0.25
    assert json.loads(json.dumps([dataclasses.asdict(r) for r in runs]))[0]["stop_ids"] == [2, 198]
    step = next(line for line in summary.time_table(found).splitlines() if line.startswith("| step"))
    assert step == "| step | 3.00 (2.00 - 4.00) | 8.00 (8.00 - 8.00) | 2.67 (2.00 - 4.00 by pair) |"
    assert summary.learning_table(found).splitlines()[2] == "| 1 | 0.500 (0.50, 0.50) | 0.250 (0.25, 0.25) |"


def test_a_step_that_was_not_exact_is_no_result() -> None:
    seconds = {f"time/{name}_s": 1.0 for name in ("step", "generate", "score", "train", "sync", "wait")}
    record = {"step": 1, "reward": 0.1, "completion_length": 4.5, "mismatch/max_abs": 0.0, **seconds}
    assert loop.lockstep_step(record)["train_s"] == 1.0
    with pytest.raises(loop.BenchmarkError, match="mismatch/max_abs is 1e-06"):
        loop.lockstep_step(record | {"mismatch/max_abs": 1e-6})


def test_sides_that_did_not_do_the_same_work_are_not_compared() -> None:
    ours, theirs = run("lockstep", 0, [1, 1], 0.0), run("trl", 0, [1, 1], 0.0)
    loop.check_same_work(ours, theirs)
    with pytest.raises(loop.BenchmarkError, match="prompts of the first step"):
        loop.check_same_work(ours, dataclasses.replace(theirs, prompt_ids=[[0, 1, 2]]))
    with pytest.raises(loop.BenchmarkError, match="stop ids"):
        loop.check_same_work(ours, dataclasses.replace(theirs, stop_ids=[198]))


def test_failed_process_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('all went wrong'); raise SystemExit(3)"]
    with pytest.raises(loop.BenchmarkError, match=r"(?s)ended with code 3.*all went wrong"):
        loop.timed_process(command, tmp_path / "log.txt", limits.child_environment(1))


def test_measured_processes_get_no_forced_blas_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    env = limits.child_environment(2)
    assert "OPENBLAS_CORETYPE" not in env
    assert (env["OMP_NUM_THREADS"], env["JAX_PLATFORMS"]) == ("2", "cpu")


def test_limits_prints_every_limit(tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    words = ["--threads", "1", "--repeats", "1", "--megabytes", "1", "--out", str(out)]
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "limits.py"), *words], check=True, capture_output=True)
    result = json.loads(out.read_text())
    rates = [result["copy_gb_s"], result["read_gb_s"], *result["matmul_gflop_s"].values()]
    assert len(rates) == 2 + len(limits.MATMULS)
    assert all(r["best"] == max(r["numpy"], r["jax"]) > 0 for r in rates)
    assert result["machine"]["cores"] >= 1
    assert len(limits.markdown(result).splitlines()) == 2 + len(rates)


# ---------------------------------------------------------------- what a sync costs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trees", "smollm2,3b"], "'3b' is not one of smollm2, 1b, tiny"),
        (["--pairs", "near"], "'near' is not one of same, apart"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--threads", "100000"], "this process may use 1 to"),
    ],
)
def test_sync_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("sync").parse_arguments(words)
    assert message in capsys.readouterr().err


def test_sync_measures_every_way_and_its_own_bytes(tmp_path: Path) -> None:
    out = tmp_path / "sync.json"
    words = ["--trees", "tiny", "--rounds", "1", "--threads", "1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "sync.py"), *words], check=True, capture_output=True, text=True
    )
    result = json.loads(out.read_text())
    ways = ["sync", "device_put", "gather", "copy_fresh", "copy_existing"]
    assert [(r["pair"], r["way"]) for r in result["rows"]] == [(p, w) for p in ("same", "apart") for w in ways]
    assert all(r["min_s"] <= r["median_s"] <= r["max_s"] for r in result["rows"])
    same, apart = (r for r in result["rows"] if r["way"] == "sync")
    assert same["bytes_moved"] == same["bytes_crossing"] == 0
    assert apart["bytes_moved"] == apart["bytes_planned"] == apart["bytes_crossing"] == apart["bytes_held"]
    assert result["summary"][0]["moving_over_device_put"] is None
    assert result["summary"][1]["verify_over_moving"] > 0 and "| tiny | apart | sync |" in done.stdout


# ---------------------------------------------------------------- forms of products


@pytest.mark.parametrize("words", [["--rows", "8,7"], ["--rows", "0"], ["--repeats", "0"]])
def test_forms_refuse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("cpu_forms").main(words)
    assert "--rows must be even numbers and --repeats at least 1" in capsys.readouterr().err


def test_forms_compute_the_same_layer() -> None:
    """Up to rounding, or their times would not be comparable."""
    forms = script("cpu_forms")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, forms.WIDTH), np.float32)
    outputs = {}
    for name, (compiled, (w,), turned) in forms.forms([forms.layer_weights(rng)]).items():
        y = np.asarray(compiled(w, x.T if turned else x))
        outputs[name] = y.T if turned else y
    for y in outputs.values():
        np.testing.assert_allclose(y, outputs["rows"], atol=1e-4)
