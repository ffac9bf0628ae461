"""`lockstep plan` and `lockstep.plan_sync`: their words, what they write, what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli import main
from lockstep.errors import ConfigError, SyncError
from lockstep.models.catalog import load_spec
from lockstep.plan.document import dumps
from lockstep.sync.plan import LinkModel

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "recipes" / "addition.toml")
LLAMA = ["--model", "llama-3.1-8b", "--actor", "fsdp=8", "--rollout", "tensor=4,data=2"]


@pytest.fixture
def plan(capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command: exit code, stdout, stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = main(["plan", *map(str, words)])
        except SystemExit as e:
            code = int(e.code or 0)
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


def test_a_folder_with_a_configuration_is_enough(plan, tiny) -> None:
    code, out, err = plan("--model", tiny, "--actor", "fsdp=2", "--rollout", "tensor=2")
    assert (code, err) == (0, "") and out.startswith(f"model    {tiny}: ")


def test_text_json_and_page_are_one_answer(plan, tmp_path, llama) -> None:
    code, out, err = plan(*LLAMA, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    assert code == 0 and out == llama.summary + "\n" and "a.json: " in err
    assert (tmp_path / "a.json").read_text() == dumps(llama) and (tmp_path / "a.html").read_text() == llama.to_html()
    code, out, _ = plan(*LLAMA, "--json", "-")
    assert code == 0 and out == dumps(llama)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "a.json"]


def test_options_reach_the_plan(plan, tiny) -> None:
    words = [
        "--link-gbps",
        "8",
        "--bisection-gbps",
        "4",
        "--staging-mib",
        "2",
        "--lora",
        "2",
        "--actor-dtype",
        "float32",
    ]
    code, out, _ = plan("--model", tiny, "--actor", "fsdp=2", "--rollout", "tensor=2@1-2", *words, "--json", "-")
    found = json.loads(out)
    assert code == 0 and found["link"]["link_gbps"] == 8 and found["link"]["bisection_gbps"] == 4
    assert found["staging_bytes"] == 2 << 20 and found["lora"]["rank"] == 2 and found["actor_dtype"] == "float32"
    assert found["rollout"]["devices"] == [1, 2] and found["bounds"]["binding"] == "bisection"


def test_a_recipe_is_planned_as_it_would_run(plan, tiny, tmp_path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f"""
        run = {{ name = "r", steps = 1 }}
        model = {{ name = "{tiny}" }}
        lora = {{ rank = 2, last_layers = 1, targets = ["q", "down"] }}
        cluster = {{ actor = {{ fsdp = 2 }}, reference = "actor", rollout = {{ tensor = 2 }} }}
        task = {{ kind = "file", path = "none.jsonl", max_prompt_tokens = 8 }}
        reward = {{ functions = [{{ name = "m:f" }}] }}
        """
    )
    code, out, err = plan("--recipe", recipe, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert [leaf["path"] for leaf in found["leaves"]] == [
        f"layers.2.{name}.lora_{x}" for name in ("q", "down") for x in "ab"
    ]
    assert found["actor_dtype"] == "float32" and found["rollout"]["devices"] == [2, 3]
    code, out, _ = plan("--recipe", recipe, "--cluster.rollout", "actor", "--lora", "3", "--json", "-")
    found = json.loads(out)
    assert code == 0 and found["colocated"] and found["lora"]["rank"] == 3 and found["bytes_written"] == 0
    code, out, _ = plan("--recipe", recipe, "--lora", "none")
    assert code == 0 and "\nlora " not in out


A, R = ["--actor", "fsdp=2"], ["--rollout", "tensor=2"]
L8 = ["--model", "llama-3.1-8b"]
WRONG = [
    ([], "which model? expected `lockstep plan --model MODEL --actor MESH --rollout MESH`"),
    (["--model", "llama-3.1-8", *A, *R], "did you mean 'llama-3.1-8b'?"),
    (["--model", "/", *A, *R], "config.json"),
    ([*L8, *A], "--rollout is missing: expected a mesh such as tensor=4,data=2, or `actor` for colocated"),
    ([*L8, *R], "--actor is missing"),
    ([*L8, "--recipe", DEMO], "--model and --recipe are two questions"),
    (["--recipe", "no.toml"], "there is no recipe no.toml"),
    (["--recipe", DEMO, *A], "--actor goes with --model; a recipe says it itself: override its `cluster.actor`"),
    (["--recipe", DEMO, "--dtype", "float32"], "--dtype goes with --model"),
    (["--recipe", DEMO, "--cluster.actr", "1"], "unknown key `cluster.actr`"),
    ([*L8, *A, *R, "--cluster.actor", "1"], "--cluster.actor is a key of a recipe and goes with --recipe"),
    ([*L8, "--actor", "fspd=8", *R], "--actor: mesh 'fspd=8': 'fspd' is not an axis"),
    ([*L8, "--actor", "fspd=8", *R], "did you mean fsdp?"),
    ([*L8, "--actor", "fsdp=x", *R], "fsdp = 'x' is not a positive integer"),
    ([*L8, "--actor", "fsdp=2.5", *R], "fsdp = '2.5' is not a positive integer"),
    ([*L8, "--actor", "fsdp=0", *R], "fsdp = '0' is not a positive integer"),
    ([*L8, "--actor=fsdp=-1", *R], "fsdp = '-1' is not a positive integer"),
    ([*L8, "--actor", "fsdp=9000", *R], "--actor: fsdp=9000 is 9000 devices; at most 8192 can be planned"),
    ([*L8, "--actor", "fsdp=" + "9" * 5000, *R], "is too large; at most 8192 devices can be planned"),
    ([*L8, "--actor", "fsdp=2,fsdp=2", *R], "gives fsdp twice"),
    ([*L8, "--actor", "", *R], "--actor: expected a mesh such as fsdp=8 or tensor=4,data=2; got ''"),
    ([*L8, *A, "--rollout", "aktor"], "got 'aktor'; did you mean actor?"),
    ([*L8, *A, "--rollout", "tensor=2@0-2"], "the mesh has 2 devices, 3 are named"),
    ([*L8, *A, "--rollout", "tensor=2@1+1"], "2 are named (1 different ones)"),
    ([*L8, *A, "--rollout", "tensor=2@3-1"], "expected device numbers such as @0-7 or @0-3+8-11; got '@3-1'"),
    ([*L8, *A, "--rollout", "tensor=2@8191-8192"], "device 8192 is too large a number"),
    ([*L8, "--actor", "pipeline=33", *R], "pipeline = 33 is more than the 32 layers"),
    ([*L8, *A, *R, "--lora", "0"], "--lora: expected a rank, a whole number from 1 to 9999999; got '0'; leave it out"),
    ([*L8, *A, *R, "--lora", "4097"], "--lora: expected a rank from 1 to 4096; got 4097"),
    ([*L8, *A, *R, "--dtype", "bf16"], "--dtype: expected one of bfloat16, float16, float32; got 'bf16'; did you mean"),
    ([*L8, *A, *R, "--actor-dtype", "int8"], "--actor-dtype: expected one of bfloat16, float16, float32; got 'int8'"),
    (
        [*L8, *A, *R, "--format", "fusd"],
        "format: expected one of native, hf, sglang_jax, fused; got 'fusd'; did you mean",
    ),
    ([*L8, *A, *R, "--format", "hf", "--lora", "4"], "has no names for an adapter's leaves"),
    (["--model", "deepseek-v3", *A, *R, "--format", "fused"], "no table for the model family 'deepseek_v3'"),
    ([*L8, *A, *R, "--link-gbps", "0"], "--link-gbps: expected Gbit/s above 0 and at most 1e+06; got '0'"),
    ([*L8, *A, *R, "--link-gbps", "inf"], "--link-gbps: expected"),
    ([*L8, *A, *R, "--bisection-gbps", "nan"], "--bisection-gbps: expected"),
    ([*L8, *A, *R, "--staging-mib", "0"], "--staging-mib: expected MiB, a whole number"),
    ([*L8, *A, *R, "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder /nowhere"),
    ([*L8, *A, *R, "--html", "/"], "--html: expected a file to write; '/' is a folder"),
    ([*L8, *A, *R, "--html", "same", "--json", "./same"], "--json and --html both write same"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_what_cannot_be_asked_is_one_line_and_exit_code_2(plan, words: list[str], message: str) -> None:
    code, out, err = plan(*words)
    assert code == 2 and out == "" and message in err and err.startswith("error: ") and err.count("\n") == 1


def test_what_cannot_be_written_stops_before_anything_is_computed(plan, monkeypatch, tmp_path) -> None:
    """Without devices, weights or a planner: only the words are looked at."""
    monkeypatch.setitem(sys.modules, "lockstep.plan.answer", None)
    code, _, err = plan(*LLAMA, "--json", tmp_path / "no" / "x.json")
    assert code == 2 and "there is no folder" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor": None}, "actor: expected a mesh such as"),
        ({"rollout": {"tensor": 2, "devices": [0, "1"]}}, "rollout: devices must be a list of numbers"),
        ({"rollout": {"tensor": 2, "devices": [0]}}, "the mesh has 2 devices, 1 are named"),
        ({"rollout": {"tensr": 2}}, "did you mean tensor?"),
        ({"rollout": {"tensor": True}}, "'True' is not a positive integer"),
        ({"lora": 0}, "lora: expected a rank from 1 to 32; got 0; leave it out"),
        ({"lora": True}, "lora: expected a rank"),
        ({"dtype": "float8"}, "dtype: expected one of"),
        ({"dtype": None}, "dtype: expected one of"),
        ({"link": "fast"}, "link: expected a LinkModel or a number"),
        ({"link": float("nan")}, "link: expected link_gbps above 0"),
        ({"link": LinkModel(latency_s=-1.0)}, "link: expected latency_s"),
        ({"format": "xyz"}, "format: expected one of native"),
    ],
)
def test_what_python_cannot_ask(tiny, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        lockstep.plan_sync(tiny, **{"actor": "fsdp=2", "rollout": "tensor=2"} | change)


def test_a_budget_that_is_none_is_refused(tiny) -> None:
    with pytest.raises((ConfigError, SyncError), match="staging"):
        lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=2", staging_bytes=0)


def test_a_specification_can_be_planned(tiny) -> None:
    spec = load_spec(str(tiny))
    assert spec.dim == 32
    assert lockstep.plan_sync(spec, actor="fsdp=2", rollout="tensor=2").plan.hash == (
        lockstep.plan_sync(tiny, actor="fsdp=2", rollout="tensor=2").plan.hash
    )


def test_no_jax_is_imported(tiny) -> None:
    code = (
        "import sys, lockstep\n"
        f"a = lockstep.plan_sync({str(tiny)!r}, actor='fsdp=2', rollout='tensor=2')\n"
        "a.summary, a.to_json(), a.to_html()\n"
        "print(sorted({'jax', 'optax', 'orbax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
