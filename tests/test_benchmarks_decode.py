"""`benchmarks/decode.py` and what it consists of; `benchmarks/gpu_exact.py` in miniature. Nothing is timed, and no peer
is needed: little workers take their place."""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest

from lockstep.models.spec import LayerKind, ModelSpec, Rope

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


decode, peers, work, worker, environments = map(
    script, ("decode", "decode_peers", "decode_work", "decode_worker", "environments")
)
gpu, forms = script("gpu_exact"), script("gpu_forms")


# ---------------------------------------------------------------- the command line and the work


def test_quick_run_does_not_replace_the_result() -> None:
    full, quick = decode.parse_arguments([]), decode.parse_arguments(["--quick"])
    assert (full.rounds, full.shapes) == (3, ["1", "8", "32", "64", "rl"])
    assert (quick.rounds, quick.shapes) == (1, ["1", "8", "rl"])
    assert full.peers == list(peers.PEERS) and full.out != quick.out
    assert decode.parse_arguments(["--peers", "lockstep,vllm", "--shapes", "rl"]).peers == ["lockstep", "vllm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "lockstep,sglang"], "--peers: 'sglang' is not one of lockstep, lockstep-fast, tunix"),
        (["--shapes", "16"], "--shapes: '16' is not one of 1, 8, 32, 64, rl"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--threads", "100000"], "this process may use"),
    ],
)
def test_decode_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.parse_arguments(words)
    assert message in capsys.readouterr().err


def test_lengths_are_long_tailed_and_the_same_in_every_round() -> None:
    shape = work.shapes(False)["rl"]
    dealt = [[n for own in shape.lengths(seed) for n in own] for seed in (0, 1)]
    assert dealt[0] != dealt[1] and sorted(dealt[0]) == sorted(dealt[1])
    assert statistics.median(dealt[0]) == 40 and max(dealt[0]) == 256 and min(dealt[0]) >= 1
    assert 50 < statistics.mean(dealt[0]) < 70


def test_jobs_are_new_in_every_round_and_the_same_in_every_run() -> None:
    shape = work.shapes(False)["8"]
    a, b, c = work.job(shape, 49152, 0), work.job(shape, 49152, 0), work.job(shape, 49152, 1)
    assert a == b and a["prompts"] != c["prompts"]
    made = worker.Job(**a)
    assert len(made.samples) == 8 and all(len(p) == 64 and n == 128 for p, n in made.samples)
    assert all(1000 <= t < 49152 for p in a["prompts"] for t in p)


SPEC = ModelSpec("llama", 1000, 32, 4, 2, 8, 48, (LayerKind(Rope(1e4)),) * 2, 1e-5, 8**-0.5, 512, tied_head=True)


def machine(gb_s: float, gflop_s: float) -> dict[str, Any]:
    return {"read_gb_s": {"best": gb_s}, "matmul_gflop_s": {"a": {"best": gflop_s}, "b": {"best": gflop_s / 2}}}


def test_limit_is_the_slower_of_bytes_and_operations() -> None:
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32  # q, k, v, o; gate, up, down; two norms
    body, head, cached = 2 * layer, 32000, 2 * 4 * 2 * 2 * 8
    shape = work.Shape("2", 2, 1, 4, 3)
    by_bytes = work.machine_limit(shape, SPEC, machine(1, 1e9))
    passes, seen = 3, 2 * (4 + 5 + 6)  # a pass for the prompts, two more; positions read
    assert by_bytes["gigabytes"] * 1e9 == passes * 4 * (body + head) + seen * cached
    assert by_bytes["limit_s"] == by_bytes["of_it_bytes_s"] == pytest.approx(by_bytes["gigabytes"])
    by_operations = work.machine_limit(shape, SPEC, machine(1e9, 1))
    attended = 4 * 2 * 4 * 8
    products = 2 * (8 * body + 2 * head) + 2 * 2 * 2 * (body + head)
    assert by_operations["gigaflop"] * 1e9 == products + attended * (8 * 2 + 2 * (5 + 6))
    assert by_operations["limit_s"] == pytest.approx(by_operations["gigaflop"]) and not by_operations["of_it_bytes_s"]


def test_agreement_is_the_part_before_the_first_difference() -> None:
    assert work.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 0.75
    assert work.agreement([[1]], [[2]]) == 0


def answer(tokens: int, seconds: float) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": seconds, "cpu_s": 2 * seconds, "details": {}}


def test_ratios_are_of_medians() -> None:
    ours, theirs = [answer(100, s) for s in (1, 2, 50)], [answer(100, s) for s in (4, 5, 4)]
    limit = {"1": {"limit_s": 0.5, "tokens_per_s": 200}}
    rows = work.summarise({"1": {"lockstep": ours, "vllm": theirs, "tunix": []}}, limit)
    assert [(r["peer"], r["tokens_per_s"], r["of_limit"]) for r in rows] == [
        ("lockstep", 50, 0.25),
        ("vllm", 25, 0.125),
    ]
    assert "lockstep_over" not in rows[0] and rows[1]["lockstep_over"] == 2
    lines = work.table(rows, limit, ["lockstep", "vllm", "tunix"]).splitlines()
    assert lines[2] == "| 1 | 50 | 25 (2.00 x) | failed | 200 |"


# ---------------------------------------------------------------- workers

COUNTING = """
import os, sys
sys.path.insert(0, {folder!r})
from decode_worker import Job, Setup, serve

class Counting:
    packages = ("numpy",)
    def __init__(self, setup):
        print("a library's chatter")
        if setup.option == "no model":
            raise FileNotFoundError("weights")
    def prepare(self, job): pass
    def generate(self, job):
        if job.seed == 13: raise RuntimeError("unlucky")
        if job.seed == 14: print("giving up", file=sys.stderr, flush=True); os._exit(3)
        if job.seed == 15: return [[1]]
        print("more chatter")
        return [list(range(n)) for _, n in job.samples]
    def details(self): return {{"first": 1}}

serve(Counting)
"""
SETUP = {"model": "m", "gguf": "", "threads": 1, "max_sequences": 2, "max_positions": 8}
JOB = {"prompts": [[1, 2], [3, 4]], "lengths": [[2], [3]], "temperature": 0.0}


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that counts, as the peer `tunix`."""
    path = tmp_path / "counting.py"
    path.write_text(COUNTING.format(folder=str(ROOT / "benchmarks" / "peers")))
    monkeypatch.setitem(peers.PEERS, "tunix", peers.PeerKind(str(path), ""))
    return tmp_path


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_worker_does_jobs_survives_failures_and_is_stopped_in_between(counting: Path) -> None:
    worker_ = peers.Worker("tunix", SETUP, counting, 60)
    try:
        assert worker_.ready["versions"].keys() == {"python", "numpy"}
        for seed in (1, 2):
            done = worker_.do(JOB | {"seed": seed})
            assert (done["tokens"], done["completions"]) == (5, [[0, 1], [0, 1, 2]])
            assert done["seconds"] > 0 and done["details"] == {"first": 1}
        with pytest.raises(peers.Failed, match=r"RuntimeError at counting.py:\d+: unlucky"):
            worker_.do(JOB | {"seed": 13})
        with pytest.raises(
            peers.Failed, match=r"1 completions, 2 expected.*sample 0: expected \[2\] tokens, got \[1\]"
        ):
            worker_.do(JOB | {"seed": 15})
        assert worker_.alive and worker_.do(JOB | {"seed": 1})["tokens"] == 5
        if Path("/proc/self/stat").is_file():
            patience = time.monotonic() + 10  # the signal is delivered when the process is next scheduled
            while state(worker_.process.pid) != "T" and time.monotonic() < patience:
                time.sleep(0.01)
            assert state(worker_.process.pid) == "T"
        assert "a library's chatter" in worker_.log.read_text()
        with pytest.raises(peers.Failed, match=r"(?s)ended with code .*giving up"):
            worker_.do(JOB | {"seed": 14})
        assert not worker_.alive
    finally:
        worker_.stop()


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks the process up in /proc")
def test_no_worker_outlives_a_benchmark_that_is_killed(counting: Path) -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from decode_peers import PEERS, PeerKind, Worker
from pathlib import Path
PEERS["tunix"] = PeerKind({str(counting / "counting.py")!r}, "")
worker = Worker("tunix", {SETUP!r}, Path({str(counting)!r}), 60)
print(worker.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(1000):
        if not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"worker {pid} is still there")


def test_worker_that_cannot_load_or_hangs_says_so(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = peers.PEERS["tunix"]
    monkeypatch.setitem(peers.PEERS, "tunix", dataclasses.replace(kind, option="no model"))
    with pytest.raises(peers.Failed, match=r"FileNotFoundError at counting.py"):
        peers.Worker("tunix", SETUP, counting, 60)
    (counting / "sleeping.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setitem(peers.PEERS, "tunix", peers.PeerKind(str(counting / "sleeping.py"), ""))
    with pytest.raises(peers.Failed, match="no answer within 1 s"):
        peers.Worker("tunix", SETUP, counting, 1)


def test_a_peer_that_fails_is_on_record_and_the_others_go_on(counting: Path, tiny_folder: Path) -> None:
    words = ["--quick", "--peers", "tunix,transformers", "--shapes", "8,rl", "--work", str(counting)]
    args = decode.parse_arguments([*words, "--model", str(tiny_folder)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers.PEERS, "transformers", peers.PeerKind("no_such_script.py", ""))
        run = decode.Run(args, tiny_folder)
        try:
            run.start()
            run.rounds()
        finally:
            run.stop()
    (error,) = run.peers["transformers"]["errors"]
    assert error["where"] == "load" and "no_such_script.py" in error["error"]
    assert not run.peers["tunix"]["errors"] and run.peers["tunix"]["warm_s"].keys() == {"8", "rl"}
    assert {s: list(by_peer) for s, by_peer in run.answers.items()} == {"8": ["tunix"], "rl": ["tunix"]}


def test_peer_with_other_tokens_is_not_believed(counting: Path, tiny_folder: Path) -> None:
    words = ["--quick", "--peers", "tunix", "--work", str(counting), "--model", str(tiny_folder)]
    run = decode.Run(decode.parse_arguments(words), tiny_folder)
    ours, theirs = ({**answer(4, 1.0), "completions": [row]} for row in ([1, 2, 3, 4], [1, 9, 3, 4]))
    run.peers["lockstep"] = {"errors": []}
    run.take("8", {"lockstep": ours, "tunix": theirs})
    run.judge()
    assert not run.peers["lockstep"]["errors"]
    assert "only 25% of its greedy tokens agree" in run.peers["tunix"]["errors"][0]["error"]


@pytest.mark.slow
def test_decode_runs_lockstep_itself(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    words = ["--quick", "--shapes", "8,rl", "--peers", "lockstep", "--model", str(tiny_folder), "--threads", "1"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "decode.py"),
        *words,
        "--work",
        str(tmp_path),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    by_shape = {r["shape"]: r for r in result["rows"]}
    assert by_shape["8"]["tokens"] == 8 * 6 and by_shape["rl"]["tokens"] == sum(
        n for own in work.shapes(True)["rl"].lengths(1) for n in own
    )
    assert by_shape["rl"]["details"]["cached_tokens"] > 0, "samples of a prompt share it"
    assert result["peers"]["lockstep"]["errors"] == [] and result["shapes"]["8"]["limit"]["limit_s"] > 0


# ---------------------------------------------------------------- environments


def test_requirements_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    lines = [
        "Metadata-Version: 2.1",
        "Name: a",
        "Requires-Dist: numpy>=2; python_version > '3'",
        "Requires-Dist: torchaudio",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", "\n".join([*lines, 'Requires-Dist: x; extra == "gpu"', "", "text"]))
    assert environments.wheel_requirements(wheel, ("torchaudio",)) == ["numpy>=2; python_version > '3'"]


def test_environment_that_cannot_be_made_shows_why(tmp_path: Path) -> None:
    with pytest.raises(
        environments.EnvironmentFailed, match=r"(?s)environment of tunix could not be made.*no-such-wheel"
    ):
        environments._pip(
            "tunix", Path(sys.executable), ["install", "--no-index", str(tmp_path / "no-such-wheel.whl")], {}
        )


def test_environments_differ_by_what_they_are_made_of() -> None:
    stamps = [e.stamp() for e in environments.ENVIRONMENTS.values()]
    assert len(set(stamps)) == len(stamps)
    assert {k.environment for k in peers.PEERS.values()} - {""} == environments.ENVIRONMENTS.keys()


# ---------------------------------------------------------------- the GPU script in miniature


def planted(run: Any) -> Any:
    rows = (jnp.arange(1.0, 129.0).reshape(32, 4) / 7,)
    return forms.Block("planted", run, jnp.float32(1.5), rows)


def test_checks_find_planted_dependence() -> None:
    heights = [1, 2, 16, 32]
    clean = forms.check_heights(planted(lambda s, x: x * s), "float32", heights)
    assert clean == {"classes": [heights], "neighbours_matter_at": [], "repeats_differ_at": []}
    by_height = forms.check_heights(planted(lambda s, x: x * s + (x.shape[0] > 2)), "float32", heights)
    assert by_height["classes"] == [[1, 2], [16, 32]]
    by_others = forms.check_heights(planted(lambda s, x: x - x.mean(0)), "float32", heights)
    assert by_others["neighbours_matter_at"] == [2, 16, 32]


def test_tiles_hide_the_number_of_rows() -> None:
    block = planted(lambda s, x: x * s + x.shape[0])
    found = forms.check_tiles(block, "float32", 8, (1, 2, 4))
    assert found["holds"] and found["equals_block_alone"]


@pytest.mark.slow
def test_gpu_script_runs_here_and_compares_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert gpu.main(["--quick", "--dtypes", "float32", "--out", str(first)]) == 0
    result = json.loads(first.read_text())
    assert [f["block"] for f in result["forms"]] == [
        "qkv", "attention", "out + mlp", "head", "gemm xla", "gemm pallas",
    ]  # fmt: skip
    assert all(t["holds"] for f in result["forms"] for t in f["tiles"].values())
    exact, fast = result["engine"]
    assert (exact["tile"], exact["unequal"], exact["max_abs"], fast["tile"]) == (32, 0, 0, 0)
    assert "| random weights | float32 | 32 | 0 of" in capsys.readouterr().out
    second.write_text(json.dumps(result))
    assert gpu.changed_since(json.loads(second.read_text()), result) == []
    result["forms"][0]["tiles"]["8"]["digest"] = "0"
    assert gpu.changed_since(json.loads(second.read_text()), result) == ["qkv float32 tile 8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtypes", "float16"], "'float16' is not float32 or bfloat16"),
        (["--compare", "no.json"], "no.json does not exist"),
    ],
)
def test_gpu_script_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse_arguments(words)
    assert message in capsys.readouterr().err
