"""Recipes: what is read, what is refused and in which words, and that nothing is lost between TOML and values."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
import tomli_w
from pydantic import ValidationError

from lockstep.config import Config, MeshConfig, load_config, parse_config
from lockstep.errors import ConfigError, LockstepError
from lockstep.overrides import split_overrides
from lockstep.schema import find
from lockstep.supervised_recipe import load_supervised, recipe_kind

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))

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


def refused(overrides: str | list[str] = "", text: str = SMALL) -> str:
    with pytest.raises(ConfigError) as caught:
        read(overrides, text)
    return str(caught.value)


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_shipped_recipe_is_read(path: Path) -> None:
    if kind := recipe_kind(path):
        assert load_supervised(kind, path).run.name == path.stem
        return
    config = load_config(path)
    assert config.run.name == path.stem
    if config.task.path is not None:
        assert Path(config.task.path).is_file()
    for function in config.reward.functions:
        if ":" in function.name:
            assert config.reward.folder is not None
            module, _, name = function.name.partition(":")
            assert f"def {name}(" in (Path(config.reward.folder) / f"{module}.py").read_text()


def test_the_demo_recipe_sets_every_key_that_has_an_effect() -> None:
    text = (ROOT / "recipes" / "addition.toml").read_text()
    config = load_config(ROOT / "recipes" / "addition.toml")

    def names(table: dict, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in table.items():
            found |= names(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
        return found

    left_out = names(tomllib.loads(config.to_toml())) - names(tomllib.loads(text))
    of_the_folder = {f"sync.folder_{name}" for name in ("format", "delta", "keep")}  # none without `sync.folder`
    assert left_out == {"cluster.actor.data", "cluster.actor.tensor", "task.too_long"} | of_the_folder


def test_values_arrive_with_their_types() -> None:
    config = load_config(ROOT / "recipes" / "addition.toml")
    assert config.optim.lr == 1.5e-3 and config.optim.betas == (0.9, 0.999)
    assert config.lora is not None and config.lora.targets == ("q", "k", "v", "o", "gate", "up", "down")
    assert config.task.prompt == "1 + 1 = 2\n5 + 2 = 7\n{expression} =" and config.rollout.stop == ("\n",)
    assert config.task.options == {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    assert config.run.path == Path("runs/addition")
    assert isinstance(read("--optim.lr 1").optim.lr, float)  # a whole number is a number


def test_a_config_cannot_be_changed() -> None:
    config = read()
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.run = config.run  # type: ignore[misc]


def test_unlisted_table_and_no_lora_by_default() -> None:
    assert read().lora is None
    lora = read("--lora.rank 4").lora
    assert lora is not None and (lora.rank, lora.alpha) == (4, 16.0)
    assert read("--lora.rank 4 --lora none").lora is None


def test_cluster_roles_resolve_to_meshes() -> None:
    cluster = read(["--cluster.actor={fsdp = 2, tensor = 3}", "--cluster.rollout.data", "4"]).cluster
    assert cluster.mesh("actor") == MeshConfig(fsdp=2, tensor=3) and cluster.mesh("actor").size == 6
    assert cluster.owner("reference") == "actor" and cluster.mesh("reference") is cluster.mesh("actor")
    assert cluster.owner("rollout") == "rollout" and cluster.mesh("rollout").axes == {"data": 4, "fsdp": 1, "tensor": 1}
    assert cluster.num_devices == 10
    assert read("--cluster.reference {} --cluster.rollout reference").cluster.owner("rollout") == "reference"


def test_a_critic_is_on_the_actors_mesh_unless_told_otherwise() -> None:
    assert read().critic is None and read().cluster.roles == ("actor", "rollout", "reference")
    with_critic = read("--algorithm.name ppo --critic.optim.lr 1e-5")
    assert with_critic.cluster.owner("critic") == "actor" and "critic" in with_critic.cluster.roles
    assert read(text=with_critic.to_toml()) == with_critic
    apart = read("--algorithm.name ppo --critic.optim.lr 1e-5 --cluster.critic {tensor=2}").cluster
    assert apart.mesh("critic") == MeshConfig(tensor=2) and apart.num_devices == 3 and apart.fewest_parts == 2


def test_reward_models_are_on_the_actors_mesh_unless_told_otherwise() -> None:
    models = "--reward={models=[{name='taste',model='./rm'}]}"
    assert read(models).cluster.owner("reward") == "actor"
    assert read(f"{models} --cluster.reward {{fsdp=2}}").cluster.num_devices == 3
    assert "without `[[reward.models]]`: the run has none" in refused("--cluster.reward {fsdp=2}")
    twice = "--reward={functions=[{name='taste'}],models=[{name='taste',model='./rm'}]}"
    assert 'list "taste" twice' in refused(twice)


# ---------------------------------------------------------------- paths


def test_recipe_paths_start_from_the_recipe_and_command_line_paths_from_here(tmp_path, monkeypatch) -> None:
    recipes, here = tmp_path / "recipes", tmp_path / "here"
    recipes.mkdir(), here.mkdir()
    text = tomllib.loads(SMALL)
    text["model"]["name"] = "../my-model"
    text["task"] = {"kind": "file", "path": "data.jsonl"}
    text["reward"]["functions"] = [{"name": "mine:score"}]
    (recipes / "r.toml").write_text(tomli_w.dumps(text))
    monkeypatch.chdir(here)
    config = load_config(recipes / "r.toml")
    assert config.model.name == str(tmp_path / "my-model")
    assert config.task.path == str(recipes / "data.jsonl")
    assert config.reward.folder == str(recipes) and config.task.folder is None  # no function in [task]
    config = load_config("../recipes/r.toml", ["--model.name", "./m", "--task.path", "d.jsonl"])
    assert config.model.name == str(here / "m") and config.task.path == str(here / "d.jsonl")
    assert config.reward.folder == str(recipes)
    config = load_config(recipes / "r.toml", ["--reward.folder=mine", "--model.name=~/m"])
    assert config.reward.folder == str(here / "mine") and config.model.name == str(Path.home() / "m")


def test_a_resolved_recipe_does_not_depend_on_where_it_is_read(tmp_path, monkeypatch) -> None:
    config = load_config(ROOT / "recipes" / "own-data.toml")
    (tmp_path / "recipe.toml").write_text(config.to_toml())
    monkeypatch.chdir(tmp_path)
    assert load_config(tmp_path / "recipe.toml") == config


def test_a_known_model_name_is_no_path() -> None:
    assert read("--model.name qwen2.5-0.5b").model.name == "qwen2.5-0.5b"
    assert read("--model.name ./qwen").model.name == os.path.join(os.getcwd(), "qwen")


def test_a_function_task_looks_in_the_recipes_folder() -> None:
    text = SMALL.replace('kind = "reasoning_gym"\ndataset = "chain_sum"', 'kind = "function"\nfunction = "m.n:rows"')
    assert read(text=text).task.folder == "/recipes"
    assert read("--task.folder /elsewhere", text).task.folder == "/elsewhere"


# ---------------------------------------------------------------- refused, in words

BAD_VALUES = [
    ("--optim.lr -1", "`optim.lr`: expected a number >= 0; got -1 (set by --optim.lr)"),
    ("--optim.lr nan", "`optim.lr`: expected a number >= 0; got nan"),
    ("--optim.lr inf", "`optim.lr`: expected a number >= 0; got inf"),
    ("--optim.lr fast", "`optim.lr`: expected a number >= 0; got fast (set by --optim.lr)"),
    ("--optim.lr '1e-5'", "`optim.lr`: expected a number >= 0; got \"1e-5\" (text)"),
    ("--optim.lr .5", "a number has digits on both sides of its point"),
    ("--optim.eps 0", "`optim.eps`: expected a number > 0; got 0"),
    ("--optim.max_grad_norm 0.0", "`optim.max_grad_norm`: expected a number > 0, or inf; got 0.0"),
    ("--optim.max_grad_norm nan", "`optim.max_grad_norm`: expected a number > 0, or inf; got nan"),
    ("--optim.weight_decay -0.1", "`optim.weight_decay`: expected a number >= 0; got -0.1"),
    ("--optim.betas [0.9]", "`optim.betas`: expected a list of 2, each item a number >= 0 and < 1; got [0.9]"),
    ("--optim.betas [0.9,0.9,0.9]", "expected a list of 2"),
    ("--optim.betas 0.9,0.99", "a list is written [0.9, 0.99]"),
    ("--optim.betas [0.9,1.0]", "`optim.betas` = [0.9, 1.0]: each must be >= 0 and < 1"),
    ("--optim.betas [-0.1,0.9]", "`optim.betas` = [-0.1, 0.9]"),
    ("--optim.schedule cosin", 'expected one of "constant", "linear", "cosine"; got "cosin"; did you mean "cosine"?'),
    ("--run.steps 2.5", "`run.steps`: expected a whole number >= 1; got 2.5"),
    ("--run.steps 0", "`run.steps`: expected a whole number >= 1; got 0"),
    ("--run.steps true", "`run.steps`: expected a whole number >= 1; got true"),
    ("--run.seed 2147483648", "`run.seed`: expected a whole number >= 0 and < 2147483648"),
    ("--run.name a/b", "`run.name`: expected a folder name"),
    ("--run.name ..", "`run.name`: expected a folder name"),
    ("--train.save_trajectories True", "`train.save_trajectories`: expected true or false; got True; write true"),
    ("--train.save_trajectories 1", "`train.save_trajectories`: expected true or false; got 1"),
    ("--lora.targets ['q','z']", '`lora.targets[1]`: expected one of "q", "k"'),
    ("--lora.targets ['q','q']", "`lora.targets` = [\"q\", \"q\"] names a matrix twice"),
    ("--lora.targets []", "`lora.targets`: expected a list, each item one of"),
    ("--lora.targets q,v", 'a list is written ["q", "v"]'),
    ("--lora.rank 0", "`lora.rank`: expected a whole number >= 1; got 0"),
    ("--model.dtype float16", '`model.dtype`: expected one of "float32", "bfloat16"; got "float16"'),
    ("--algorithm.kl_estimator k4", '`algorithm.kl_estimator`: expected one of "k1", "k2", "k3"; got "k4"'),
    ("--algorithm.clip_low 1.5", "`algorithm.clip_low`: expected a number >= 0 and <= 1; got 1.5"),
    ("--algorithm.kl_coef -0.1", "`algorithm.kl_coef`: expected a number >= 0; got -0.1"),
    ("--rollout.stop ['']", "`rollout.stop` holds an empty text"),
    ("--rollout.stop ['a','a']", "`rollout.stop` = [\"a\", \"a\"] holds a text twice"),
    ("--rollout.speculation draft", "`rollout.draft_model` is missing, which speculation = \"draft\" needs"),
    ("--rollout.draft_model m", "`rollout.draft_model` has no effect with speculation = \"off\""),
    ("--rollout.top_p 0.9", '`rollout.top_p` = 0.9 cuts tokens off, so samples come from another distribution'),
    ("--rollout.top_k 5 --rollout.min_p 0.1", '`rollout.top_k` = 5, `rollout.min_p` = 0.1 cuts tokens off'),
    ("--rollout.top_p 0", "`rollout.top_p`: expected a number > 0 and <= 1; got 0"),
    ("--rollout.stop [3]", "`rollout.stop[0]`: expected text, not empty; got 3"),
    ("--task.options 3", "`task.options`: expected a table; got 3"),
    ("--task.options.x foo", '`task.options.x`: expected any TOML value; got foo; a text is written "foo"'),
    ("--run 3", "`run`: expected a table; got 3"),
    ("--reward.functions []", "`reward.functions`, `reward.judges` and `reward.models` are all empty"),
    ("--reward.functions [{}]", "`reward.functions[0].name` is required and missing: A built-in"),
    ("--reward.functions [{name='a'},{name='a'}]", 'and `reward.models` list "a" twice'),
    ("--reward.functions [{name='a',weight=0}]", "all weights of `reward` are zero"),
    ("--reward.functions [{name='a',weight=nan}]", "`reward.functions[0].weight`: expected a number; got nan"),
    ("--reward.functions[0].weight 3", "items of a list cannot be set one by one"),
    ("--rollout.stop.0 x", "items of a list cannot be set one by one; give the whole list, --rollout.stop"),
    ("--cluster.actor rollout", "`cluster.actor`: expected a mesh such as {fsdp = 4, tensor = 2}"),
    ("--cluster.rollout [1]", "`cluster.rollout`"),
    ("--cluster.rollout critics", '`cluster.rollout` = "critics" is not a role; use "actor", or a mesh'),
    ("--cluster.rollout critic", '`cluster.rollout` = "critic", but the run has no critic; use "actor"'),
    ("--cluster.critic {data=2}", "without `[critic]`: the run has none; add the table, or leave the mesh out"),
    ("--critic.clip 0", "`critic.clip`: expected a number > 0, or inf; got 0"),
    ("--cluster.rollout reference", "but reference has no mesh of its own (it is \"actor\")"),
    ("--cluster.rollout rollout", "but rollout has no mesh of its own"),
    ("--cluster.rollout {data=0}", "`cluster.rollout.data`: expected a whole number >= 1; got 0"),
    ("--cluster.rollout {data=2,size=3}", "[cluster.rollout] has the keys: data, fsdp, tensor"),
    ("--cluster.rollout {data=2} --cluster.cpu_devices 2", "the meshes need 3 devices (actor 1, rollout 2;"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), BAD_VALUES, ids=[b[0] for b in BAD_VALUES])
def test_a_bad_value_is_refused_in_words(overrides: str, words: str) -> None:
    assert words in refused(overrides)


BAD_PAIRS = [
    (
        "--rollout.temperature 0",
        ["`rollout.temperature`: expected a number >= 0.001; got 0", "every sample of a group is the same", "use 1.0"],
    ),
    ("--rollout.samples 1", ["`rollout.samples`: expected a whole number >= 2; got 1; a group of one is its own mean"]),
    ("--rollout.slots 100", ["not a multiple of `numerics.tile_rows` = 32", "use 96 or 128"]),
    ("--rollout.slots 8", ["`rollout.slots` = 8", "use 32"]),
    (
        "--cluster.actor={tensor=4} --cluster.rollout={tensor=6} --numerics.tensor_parts=4",
        ["`numerics.tensor_parts` = 4 is not a multiple of `cluster.rollout.tensor` = 6", "use 12 or a multiple of it"],
    ),
    ("--rollout.num_pages 39", ["512", "128 = 640 tokens take 40 pages of 16", "use at least 40"]),
    ("--rollout.num_pages 99 --rollout.kv_memory_mib 64", ["`rollout.kv_memory_mib` = 64 both size", "one of them"]),
    (
        "--rollout.kv_dtype int8",
        ['`rollout.kv_dtype` = "int8" with `numerics.mode` = "exact"', "bit for bit", '"fast"'],
    ),
    ("--rollout.weights_dtype int8", ['`rollout.weights_dtype` = "int8" with', "unquantised", '"compute"']),
    ("--rollout.weights_dtype fp8", ['`rollout.weights_dtype`: expected one of "compute", "int8"; got "fp8"']),
    ("--rollout.swap sometimes", ['`rollout.swap`: expected one of "auto", "always", "never"']),
    ("--rollout.max_waiting 0", ["`rollout.max_waiting`: expected a whole number >= 1"]),
    (
        "--rollout.staleness 1 --cluster.actor={fsdp=2}",
        ["`rollout.staleness` = 1 with the rollout on the 2 devices of actor and reference", "a mesh of its own"],
    ),
    ("--rollout.staleness -1", ["`rollout.staleness`: expected a whole number >= 0"]),
    ("--rollout.token_file t", ["`rollout.token_file` = ", "has no effect without `rollout.url`"]),
    ("--rollout.sync_host h", ["`rollout.sync_host` = ", "has no effect without `rollout.url`"]),
    ("--rollout.url host:8000", ['`rollout.url` = "host:8000" is not the address of a service']),
    (
        "--rollout.url http://host:8000 --cluster.rollout={data=2}",
        ["`cluster.rollout` = {data = 2", "with `rollout.url`", 'use `cluster.rollout` = "actor"'],
    ),
    (
        "--rollout.url http://host:8000 --rollout.update dual",
        ['`rollout.update` = "dual" has no effect with `rollout.url`', "`lockstep serve --policy`"],
    ),
    ("--train.micro_batch_rows 639", ["`train.micro_batch_rows` = 639", "use at least 640"]),
    ("--train.select informative", ["`train.select_count` = 0", "use 1 to 128"]),
    ("--train.select informative --train.select_count 129", ["`train.select_count` = 129", "use 1 to 128"]),
    ("--train.select_count 3", ['has no effect with `train.select` = "all"']),
    ("--optim.warmup_steps 4", ["`optim.warmup_steps` = 4 is more than `run.steps` = 3"]),
    (
        "--algorithm.name=ppo --critic={warmup_steps=3}",
        ["`critic.warmup_steps` = 3 is not less than `run.steps` = 3", "never be trained"],
    ),
    (
        "--algorithm.name=ppo --critic={warmup_steps=1} --optim.warmup_steps 3",
        ["`optim.warmup_steps` = 3 is more than `run.steps` = 3 less `critic.warmup_steps` = 1"],
    ),
    ("--algorithm.kl_coef 0.1 --algorithm.kl_estimator k1", ["expected gradient is 0", 'use "k2"']),
    ("--algorithm.kl_coef 0.1 --algorithm.kl_in reward", ['"k3" and `algorithm.kl_in` = "reward"', 'use "k1"']),
    ("--algorithm.kl_coef 0.1 --algorithm.measure_kl false", ["`algorithm.measure_kl` = false"]),
    ("--task.kind file", ['`task.path` is missing, which kind = "file" needs']),
    ("--task.kind function", ['`task.function` is missing, which kind = "function" needs']),
    ("--task.dataset none", ['`task.dataset` is missing, which kind = "reasoning_gym" needs']),
    ("--task.dataset ''", ["`task.dataset` is missing"]),
    ("--task.path x.jsonl", ['`task.path` has no effect with kind = "reasoning_gym": it belongs to kind = "file"']),
    ("--task.shuffle false", ["`task.shuffle` has no effect"]),
    ("--task.system x", ['`task.system` has no effect with template = "plain"', 'template = "chat"']),
    ("--task.prompt constant", ["has no placeholder, so every prompt would be the same"]),
    ("--task.prompt {question", ["is not a format"]),
]


@pytest.mark.parametrize(("overrides", "parts"), BAD_PAIRS, ids=[b[0] for b in BAD_PAIRS])
def test_keys_that_do_not_go_together_say_why_and_what_instead(overrides: str, parts: list[str]) -> None:
    message = refused(overrides)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ("", 1),
        ("--cluster.actor={fsdp=8}", 1),
        ("--cluster.actor={fsdp=2} --cluster.rollout={tensor=2}", 2),
        ("--cluster.actor={tensor=4} --cluster.rollout={tensor=6} --cluster.reference=rollout", 12),
        ("--cluster.reference={tensor=3}", 3),
        ("--cluster.actor={tensor=2} --numerics.tensor_parts=8", 8),
    ],
)
def test_parts_are_the_fewest_that_every_mesh_can_share(overrides: str, count: int) -> None:
    config = read(overrides)
    assert config.numerics.parts_on(config.cluster) == count


def test_what_is_at_the_limit_is_right() -> None:
    read("--rollout.num_pages 40 --train.micro_batch_rows 640 --optim.warmup_steps 3 --rollout.samples 2")
    read("--train.select informative --train.select_count 128")
    read("--rollout.top_p 0.9 --rollout.top_k 50 --rollout.truncation correct")
    read("--rollout.speculation draft --rollout.draft_model m --rollout.draft_tokens 7")
    read("--numerics.mode fast --rollout.slots 100")  # only exact mode has tiles
    assert read("--optim.max_grad_norm inf").optim.max_grad_norm == float("inf")
    read("--optim.lr 0")  # a soak: nothing may move
    read("--algorithm.kl_coef 0.1 --algorithm.kl_estimator k2")
    read("--cluster.rollout {data=2} --cluster.cpu_devices 3")
    read("--rollout.staleness 1")
    read("--rollout.staleness 2 --cluster.actor={fsdp=2} --cluster.rollout={fsdp=2}")
    read("--rollout.staleness 2 --cluster.actor={fsdp=2} --rollout.url http://host:8000/ --rollout.token_file t")


def test_all_problems_are_reported_at_once() -> None:
    message = refused("--optim.lr -1 --run.steps 0 --lora.rank 0")
    assert message.startswith("small.toml: 3 problems\n  - ")
    assert all(key in message for key in ("`optim.lr`", "`run.steps`", "`lora.rank`"))
    message = refused("--rollout.slots 100 --train.select_count 1 --optim.warmup_steps 9")
    assert message.startswith("small.toml: 3 problems\n")
    message = refused("--optim.lrr 1 --rum.steps 2 --optim.lr x")
    assert message.startswith("command line: 3 problems\n")


def test_errors_are_of_the_tree_and_name_the_file(tmp_path) -> None:
    assert issubclass(ConfigError, LockstepError) and issubclass(ConfigError, ValueError)
    path = tmp_path / "broken.toml"
    path.write_text('[run]\nname = "x\n')
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML: .*line 2"):
        load_config(path)
    path.write_bytes(b"[run]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"there is no recipe .*additio\.toml; in that folder: .*addition\.toml"):
        load_config(ROOT / "recipes" / "additio.toml")
    with pytest.raises(ConfigError, match="there is no folder"):
        load_config(tmp_path / "nowhere" / "x.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    assert refused(text="").startswith("small.toml: 4 problems")


def test_a_missing_table_says_what_it_is_for() -> None:
    assert "`task` is required and missing: The prompts." in refused(text=SMALL.split("[task]")[0])


# ---------------------------------------------------------------- unknown keys

UNKNOWN = [
    ("optim.lrr", "`optim.lr`"),
    ("optim.learning_rate", "`optim.lr`"),
    ("optimizer.lr", "`optim.lr`"),
    ("optim.temperature", "`rollout.temperature`"),
    ("lr", "`optim.lr`"),
    ("rollout.temprature", "`rollout.temperature`"),
    ("rollout.num_generations", "`rollout.samples`"),
    ("algorithm.beta", "`algorithm.kl_coef`"),
    ("run.max_steps", "`run.steps`"),
    ("lora.r", "`lora.rank`"),
    ("trian", "`train`"),
    ("rolout.samples", "`rollout.samples`"),
    ("cluster.rollout.tensr", "`cluster.rollout.tensor`"),
    ("numerics.tile_row", "`numerics.tile_rows`"),
]


@pytest.mark.parametrize(("unknown", "meant"), UNKNOWN, ids=[u[0] for u in UNKNOWN])
def test_an_unknown_key_names_the_nearest_one(unknown: str, meant: str) -> None:
    from_override = refused(f"--{unknown} 1")
    assert f"unknown key `{unknown}`" in from_override and f"did you mean {meant}?" in from_override
    table = tomllib.loads(SMALL)
    here = table
    *parents, last = unknown.split(".")
    for part in parents:
        here = here.setdefault(part, {})
    here[last] = 1
    from_file = refused(text=tomli_w.dumps(table))
    if parents and find(Config, parents[0]) is None:
        unknown = parents[0]  # the table itself is unknown
        assert f"unknown key `{unknown}`" in from_file
    else:
        assert f"unknown key `{unknown}`" in from_file and f"did you mean {meant}?" in from_file


def test_a_key_like_no_other_lists_what_there_is() -> None:
    assert "[optim] has the keys: lr, schedule, warmup_steps" in refused("--optim.zzz 1")
    assert "the sections are: run, model, lora" in refused("--zzz 1")


def test_words_that_are_no_override() -> None:
    assert "override --run.steps has no value" in refused(["--run.steps"])
    assert "override --run.steps has no value" in refused(["--run.steps", "--run.name", "x"])
    for word in ("5", "--=5", "-x=5", "--run.=5", "--.=5", "---x=1"):
        assert "expected `--section.key value`" in refused([word]), word
    assert split_overrides(["a.b=1", "--c.d", "-2", "--e=f=g"]) == [("a.b", "1"), ("c.d", "-2"), ("e", "f=g")]
    assert "not UTF-8" in refused(["--run.name=\udcff"])
    assert read(["--run.steps", "5", "--run.steps=7"]).run.steps == 7


def test_a_text_may_be_bare_or_quoted() -> None:
    for text in ("trial", "12", "2024-01-01", "true", "1e5"):
        assert read(["--run.name", text]).run.name == text
    assert read(["--run.name", '"quoted"']).run.name == "quoted"
    assert read(["--task.prompt", r'"{question}\n"']).task.prompt == "{question}\n"
    assert read(["--task.prompt", "{question} # no comment"]).task.prompt == "{question} # no comment"
    assert read(["--task.prompt", "{question}\nx = 1"]).task.prompt == "{question}\nx = 1"
    assert "expected a number" in refused(["--optim.lr", "1\nsteps = 2"])


# ---------------------------------------------------------------- environments

PLAY = '[environment]\nfunction = "mine:make"\nmax_total_tokens = 300\n'


def test_an_environment_may_be_all_of_the_reward() -> None:
    config = read(text=SMALL.replace('[reward]\nfunctions = [{ name = "exact" }]\n', PLAY))
    assert config.environment is not None and config.environment.folder == "/recipes"
    assert not config.reward.functions and config.max_completion_tokens == 300
    assert read(text=config.to_toml()) == config
    assert read(text=SMALL + PLAY).reward.functions[0].name == "exact"
    assert read().max_completion_tokens == read().rollout.max_new_tokens


def test_an_environment_fits_the_rest() -> None:
    text = SMALL + PLAY
    assert "is less than `rollout.max_new_tokens` = 128" in refused("--environment.max_total_tokens 127", text)
    named = "--reward.functions=[{name='environment'}]"
    assert 'a part of `reward` is called "environment"' in refused(named, text)
    assert "`environment.function`: expected module:function" in refused("--environment.function x", text)
    long = refused("--train.micro_batch_rows 800", text)
    assert "task.max_prompt_tokens + environment.max_total_tokens = 512 + 300 = 812" in long


def test_a_critic_without_keys_is_one() -> None:
    assert read("--algorithm.name=ppo --critic={}").cluster.owner("critic") == "actor"
