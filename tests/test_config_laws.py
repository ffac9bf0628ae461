"""Laws of recipes, on drawn ones: nothing is lost between TOML, overrides and values; nothing but a `ConfigError` is
raised; every key is described, in the docs too."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.config import Config, TaskConfig, parse_config
from lockstep.errors import ConfigError
from lockstep.keydocs import listing, markdown
from lockstep.schema import Section, keys
from lockstep.supervised_recipe import DpoRecipe, RewardRecipe, SftRecipe
from lockstep.types import LEAST_TEMPERATURE

ROOT = Path(__file__).parent.parent

SMALL = """
[run]
name = "small"
steps = 3
[model]
name = "smollm2-135m"
[task]
kind = "reasoning_gym"
dataset = "chain_sum"
[reward]
functions = [{ name = "exact" }]
"""


def read(overrides: str | list[str] = "", text: str = SMALL, folder: Path = Path("/recipes")) -> Config:
    words = overrides.split() if isinstance(overrides, str) else overrides
    return parse_config(text, overrides=words, folder=folder, where="small.toml")


names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
positive = st.floats(min_value=1e-12, max_value=1e12)
toml_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
meshes = st.fixed_dictionaries({}, optional={a: st.integers(1, 64) for a in ("data", "fsdp", "tensor")})


@st.composite
def recipes(draw: st.DrawFn) -> dict:
    """Tables that are right, with every kind of value in them."""
    table: dict = {
        "run": {"name": draw(names), "steps": draw(st.integers(1, 10**9)), "seed": draw(st.integers(0, 2**31 - 1))},
        "model": {"name": draw(st.sampled_from(["smollm2-135m", "/m", "./m", "../../m é"]))},
        "cluster": {"actor": draw(meshes), "rollout": draw(st.just("actor") | meshes)},
        "reward": {"functions": [{"name": draw(names), "weight": draw(positive)}]},
        "rollout": {"stop": draw(st.lists(texts.filter(bool), unique=True, max_size=3))},
        "optim": {"lr": draw(st.floats(0, 1e3)), "betas": draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2))},
        "train": {"save_trajectories": draw(st.booleans())},
        "algorithm": {"std_epsilon": draw(positive), "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"]))},
    }
    if draw(st.booleans()):
        table["lora"] = {"rank": draw(st.integers(1, 999)), "targets": draw(st.permutations(["q", "gate", "down"]))}
    prompt = draw(texts).replace("{", "{{").replace("}", "}}") + "{question}"
    if draw(st.booleans()):
        options = draw(st.dictionaries(texts, toml_values, max_size=3))
        table["task"] = {"kind": "reasoning_gym", "dataset": "d", "prompt": prompt, "options": options}
    else:
        table["task"] = {"kind": "file", "path": "d.jsonl", "prompt": prompt, "shuffle": draw(st.booleans())}
    return table


@settings(deadline=None)
@given(recipes())
def test_to_toml_is_read_back_as_the_same_config(table: dict) -> None:
    config = parse_config(tomli_w.dumps(table), overrides=[], folder=Path("/recipes"), where="drawn")
    again = parse_config(config.to_toml(), overrides=[], folder=Path("/other"), where="resolved")
    assert again == config
    assert again.to_toml() == config.to_toml()


def scalar_overrides(table: dict, prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in table.items():
        whole = not isinstance(value, dict) or prefix + name in ("task.options", "cluster.actor", "cluster.rollout")
        pairs += [(prefix + name, value)] if whole else scalar_overrides(value, f"{prefix}{name}.")
    return pairs


@settings(deadline=None)
@given(recipes())
def test_overrides_say_what_the_file_can_say(table: dict) -> None:
    """Every key given on the command line as TOML, over an empty recipe, is the config of the file."""

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{inline(k)} = {inline(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(inline, value)) + "]"
        return tomli_w.dumps({"v": value}).removeprefix("v = ").removesuffix("\n")

    here = Path.cwd()
    words = [word for name, value in scalar_overrides(table) for word in (f"--{name}", inline(value))]
    from_words = parse_config("", overrides=words, folder=here, where="words")
    assert from_words == parse_config(tomli_w.dumps(table), overrides=[], folder=here, where="file")


@settings(deadline=None)
@given(texts)
def test_any_bare_text_arrives_as_it_is(text: str) -> None:
    bare = "x" + text  # cannot be a quoted TOML string
    assert read(["--task.dataset", bare]).task.dataset == bare
    assert read([f"--task.dataset={bare}"]).task.dataset == bare


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_no_word_makes_anything_but_a_config_or_a_config_error(name: str, value: str) -> None:
    for words in ([f"--{name}={value}"], [f"--optim.lr={value}"], [f"--cluster.rollout={value}"], [f"--{name}", value]):
        with contextlib.suppress(ConfigError):
            read(words)


@settings(max_examples=40, deadline=None)
@given(toml_values)
def test_no_value_anywhere_makes_anything_but_a_config_or_a_config_error(value: object) -> None:
    for k in keys(Config):
        if "[]" in k.path:
            continue
        table = tomllib.loads(SMALL)
        here = table
        *parents, last = k.path.split(".")
        for part in parents:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                break
        else:
            here[last] = value
            with contextlib.suppress(ConfigError):
                parse_config(tomli_w.dumps(table), overrides=[], folder=Path("/recipes"), where="drawn")


def test_options_from_python_must_be_writable() -> None:
    for value in (None, {1: 2}, object(), float("nan"), [{"a": None}]):
        with pytest.raises(ValidationError, match=r"cannot be written|must be text|nan is not"):
            TaskConfig(kind="reasoning_gym", dataset="d", options={"x": value})


# ---------------------------------------------------------------- described


def test_every_key_is_described_and_documented() -> None:
    for k in keys(Config):
        description = k.field.description or ""
        assert description.endswith((".", ")")) and len(description) > 10, k.path
        assert k.expected and k.default
    assert listing(list(keys(Config))).count("\n") > 100


def test_a_recipe_s_least_temperature_is_the_engine_s() -> None:
    (key,) = [k for k in keys(Config) if k.path == "rollout.temperature"]
    assert key.expected == f"a number >= {LEAST_TEMPERATURE:g}"


@pytest.mark.parametrize(
    ("page", "recipe"),
    [("recipes.md", Config), ("reward-model.md", RewardRecipe), ("sft.md", SftRecipe), ("dpo.md", DpoRecipe)],
)
def test_the_reference_in_the_docs_is_the_schemas(page: str, recipe: type[Section]) -> None:
    text = (ROOT / "docs" / page).read_text()
    written = text.partition("<!-- keys -->\n")[2].partition("<!-- /keys -->")[0]
    assert written == markdown(recipe), f"put what `lockstep keys --markdown` says between the marks of docs/{page}"


def test_no_word_of_other_systems_means_two_keys() -> None:
    said: dict[str, str] = {}
    for k in keys(Config):
        for word in k.also:
            assert said.setdefault(f"{k.section}.{word}", k.path) == k.path
            assert word != k.name


def test_importing_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, lockstep.config\n"
        "lockstep.config.load_config('recipes/addition.toml')\n"
        "print(*sorted({'jax','numpy','optax','pyarrow','rich','tokenizers','reasoning_gym'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
