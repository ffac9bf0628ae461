"""Tasks: the stream is a function of the cursor, every row comes once per epoch, and bad data says what and where."""

import dataclasses
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import TaskConfig
from lockstep.envs.base import Task
from lockstep.envs.sources import GYM_CHUNK, ReasoningGymSource
from lockstep.envs.tasks import make_task
from lockstep.envs.template import Template
from lockstep.errors import ConfigError, DataError, TokenizerError

FEW_SHOT = "1 + 1 = 2\n5 + 2 = 7\n{expression} ="
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


@dataclasses.dataclass(frozen=True)
class Characters:
    """A tokenizer with one token per character, and a chat template that can be read off the text."""

    has_template: bool = True
    bos_id: int | None = ord("^")
    adds_bos: bool = False

    def encode(self, text):
        return [ord(c) for c in text]

    def encode_filled(self, template, fields):
        return self.encode(template.format(**fields))

    def decode(self, ids, skip_special=True):
        return "".join(chr(i) for i in ids if not (skip_special and i == self.bos_id))

    def render(self, messages, add_generation_prompt=True):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt

    def apply_template(self, messages, add_generation_prompt=True):
        return self.encode(self.render(messages, add_generation_prompt))


def make(seed=0, tokenizer=None, **keys) -> Task:
    return make_task(TaskConfig(**keys), tokenizer or Characters(), seed)


def jsonl(folder: Path, *rows, name="data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def from_file(folder: Path, *rows, seed=0, **keys) -> Task:
    return make(seed, kind="file", path=jsonl(folder, *rows), **keys)


def module(folder: Path, name: str, code: str) -> str:
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return str(folder)


def numbered(count: int, length: int = 0) -> list[dict]:
    """`count` rows with prompts of unlike length (up to `length` characters more)."""
    return [{"prompt": f"row {i} " + "x" * (i * 7 % (length + 1)), "answer": str(i)} for i in range(count)]


# ---------------------------------------------------------------- the cursor


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, Task]:
    """One task of every kind and order; the limit of those that skip lies in the middle of the lengths."""
    folder = tmp_path_factory.mktemp("tasks")
    module(folder, "rows_for_the_cursor", "def rows(index, seed): return {'prompt': 'x' * (1 + index * 7 % 13)}")
    file = {"kind": "file", "path": jsonl(folder, *numbered(11, 9))}
    function = {"kind": "function", "function": "rows_for_the_cursor:rows", "folder": str(folder)}
    gym = {"kind": "reasoning_gym", "dataset": "chain_sum", "options": TWO_DIGITS}
    return {
        "file": make(**file),
        "file in order": make(**file, shuffle=False),
        "file skipping": make(**file, max_prompt_tokens=10, too_long="skip"),
        "function": make(**function),
        "function skipping": make(**function, max_prompt_tokens=6, too_long="skip"),
        "reasoning_gym": make(**gym, prompt=FEW_SHOT),
    }


KINDS = ["file", "file in order", "file skipping", "function", "function skipping", "reasoning_gym"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(cursor=st.integers(0, 60), a=st.integers(0, 25), b=st.integers(0, 25))
def test_any_cut_of_the_stream_gives_the_same_prompts(tasks, kind, cursor, a, b):
    task = tasks[kind]
    whole = task.prompts(cursor, a + b)
    assert whole == task.prompts(cursor, a) + task.prompts(cursor + a, b)
    assert len({prompt.id for prompt in whole}) == a + b
    assert all(prompt.ids == tuple(map(ord, prompt.text)) for prompt in whole)


def test_a_fresh_process_continues_at_the_cursor(tmp_path):
    """A task that starts in the middle (a resumed run) gives what one that came all the way gives."""
    code = "def rows(index, seed): return {'prompt': 'x' * (1 + (index * 7 + seed) % 13)}"
    keys = {"kind": "function", "function": "rows_resumed:rows", "folder": module(tmp_path, "rows_resumed", code)}
    for limit in ({}, {"max_prompt_tokens": 5, "too_long": "skip"}):
        went_on, resumed = make(3, **keys, **limit), make(3, **keys, **limit)
        went_on.prompts(0, 50)
        assert resumed.prompts(50, 20) == went_on.prompts(50, 20)
    assert went_on.skipped == resumed.skipped > 0


@given(count=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_every_epoch_holds_every_row_once(tmp_path_factory, count, seed, epoch):
    task = from_file(tmp_path_factory.mktemp("epochs"), *numbered(count), seed=seed)
    prompts = task.prompts(epoch * count, count)
    assert sorted(int(prompt.row["answer"]) for prompt in prompts) == list(range(count))
    assert {prompt.id for prompt in prompts} == {f"data/{epoch}/{i}" for i in range(count)}


def test_orders_differ_by_epoch_and_by_seed_and_stay_put(tmp_path):
    rows = numbered(20)

    def order(seed, epoch):
        return [int(p.row["answer"]) for p in from_file(tmp_path, *rows, seed=seed).prompts(20 * epoch, 20)]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    # Written down from this code (NumPy 2): a checkpoint promises the order to every later machine and NumPy.
    assert order(0, 0) == [3, 9, 6, 0, 13, 12, 14, 11, 4, 2, 10, 17, 15, 7, 16, 19, 1, 18, 8, 5]
    in_order = from_file(tmp_path, *rows, shuffle=False)
    assert [p.id for p in in_order.prompts(18, 4)] == ["data/0/18", "data/0/19", "data/1/0", "data/1/1"]


def test_rows_are_handed_out_afresh(tmp_path):
    """A reward that changes its row must not change the next epoch's."""
    task = from_file(tmp_path, {"prompt": "p", "answer": "1", "meta": {"level": 3}})
    task.prompts(0, 1)[0].row["meta"]["level"] = "spoilt"
    assert task.prompts(1, 1)[0].row == {"prompt": "p", "answer": "1", "meta": {"level": 3}}


# ---------------------------------------------------------------- reasoning-gym


def test_the_few_shot_prompt_of_the_demo():
    task = make(kind="reasoning_gym", dataset="chain_sum", options=TWO_DIGITS, prompt=FEW_SHOT, max_prompt_tokens=64)
    for prompt in task.prompts(0, 50):
        head, last = prompt.text.rsplit("\n", 1)
        left, sign, right, equals = last.split(" ")
        assert head == "1 + 1 = 2\n5 + 2 = 7" and equals == "="
        expected = int(left) + int(right) * {"+": 1, "-": -1}[sign]
        assert prompt.row["answer"] == str(expected)
        assert prompt.row["question"].endswith(f"{left} {sign} {right} =")
        assert prompt.row["metadata"]["num_terms"] == 2


def test_gym_streams_have_no_end_and_seeds_share_no_stretch():
    def problems(seed, cursor, n):
        task = make(seed, kind="reasoning_gym", dataset="chain_sum", options={"min_digits": 6, "max_digits": 6})
        return {prompt.text for prompt in task.prompts(cursor, n)}

    across = problems(0, GYM_CHUNK - 20, 40)
    assert len(across) == 40  # the second chunk does not repeat the first
    assert not problems(0, 0, 100) & problems(1, 0, 100)  # reasoning-gym alone: 99 of 100 in common
    assert problems(0, 0, 100) == problems(0, 0, 100)


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "acre", "list_functions", "word_ladder"])
def test_datasets_that_end_at_their_size_go_on_here(dataset):
    source = ReasoningGymSource(TaskConfig(kind="reasoning_gym", dataset=dataset), seed=5)
    rows = [source.row(index) for index in (GYM_CHUNK - 1, GYM_CHUNK)]
    assert rows[0]["question"] != rows[1]["question"]


def test_gym_errors_name_what_would_be_right():
    with pytest.raises(ConfigError, match=r"'chain_sun' is not a dataset.*nearest: chain_sum"):
        make(kind="reasoning_gym", dataset="chain_sun")
    with pytest.raises(ConfigError, match=r"min_term is not an option of 'chain_sum'; nearest: min_terms"):
        make(kind="reasoning_gym", dataset="chain_sum", options={"min_term": 2})
    with pytest.raises(ConfigError, match="min_terms must be positive"):
        make(kind="reasoning_gym", dataset="chain_sum", options={"min_terms": 0})
    with pytest.raises(ConfigError, match="TypeError"):
        make(kind="reasoning_gym", dataset="chain_sum", options={"min_terms": "two"})
    with pytest.raises(ConfigError, match=r"options.seed cannot be set: the seed comes from run.seed"):
        make(kind="reasoning_gym", dataset="chain_sum", options={"seed": 1})
    with pytest.raises(ConfigError, match="the stream is endless"):
        make(kind="reasoning_gym", dataset="chain_sum", options={"size": 10})
    with pytest.raises(DataError, match=r"chain_sum item 0: task.prompt names \{expresion\}.*nearest: expression"):
        make(kind="reasoning_gym", dataset="chain_sum", prompt="{expresion} =")


def test_a_missing_reasoning_gym_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # how Python marks a module that cannot be imported
    with pytest.raises(ConfigError, match=r"cannot be imported .*pip install 'lockstep-rl\[tasks\]'"):
        make(kind="reasoning_gym", dataset="chain_sum")


# ---------------------------------------------------------------- files


def test_parquet_values_without_a_python_counterpart_are_named(tmp_path):
    times = pyarrow.array([1], pyarrow.timestamp("ns"))
    table = pyarrow.table({"prompt": ["a"], "when": times.cast(pyarrow.int64()).cast(pyarrow.duration("ns"))})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data.parquet row 0: a value has no Python counterpart .*'when'"):
        make(kind="file", path=str(tmp_path / "data.parquet"))


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": str(i), "n": i, "list": [i, i]} for i in range(7)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    from_parquet = make(kind="file", path=str(tmp_path / "data.parquet"), prompt="{n}: {question}")
    lines = from_file(tmp_path, *rows, prompt="{n}: {question}")
    assert from_parquet.prompts(3, 10) == lines.prompts(3, 10)
    assert lines.prompts(0, 1)[0].row in rows
    assert "data.parquet (7 rows, sha256 " in from_parquet.describe()


def test_blank_lines_and_a_byte_order_mark_are_not_rows(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "\xc3\xa9"}\n\n')
    task = make(kind="file", path=str(path), shuffle=False)
    assert [prompt.text for prompt in task.prompts(0, 3)] == ["a", "é", "a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b'{"prompt": "a"}\n{"prompt": "b"\n', r"data.jsonl:2: broken JSON at column 15"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", r"data.jsonl:1: JSON that cannot be read: .*digits"),
        (b'{"prompt": ' + b"[" * 100_000, r"data.jsonl:1: JSON that cannot be read: .*recursion"),
        (b'{"prompt": "a"}\n\n["b"]\n', r"data.jsonl:3: expected one JSON object per line, got list"),
        (b'{"prompt": "\xff"}\n', r"data.jsonl:1: not UTF-8"),
        (b'{"promt": "a", "x": 1}\n', r"data.jsonl:1: there is no column 'prompt' .*nearest: promt"),
        (b'{"prompt": "a"}\n{"prompt": 5}\n', r"data.jsonl:2: the prompt must be text, got int 5"),
        (b'{"prompt": null}\n', r"must be text, got NoneType"),
        (b'{"prompt": ""}\n', r"data.jsonl:1: the prompt is empty"),
        (b'{"prompt": [{"role": "user", "content": "a"}]}\n', 'messages need task.template = "chat"'),
        (b'{"prompt": "a", "question": "b"}\n', r"\{question\} is ambiguous"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        make(kind="file", path=str(tmp_path / "data.jsonl"))


def test_files_that_cannot_be_data(tmp_path):
    jsonl(tmp_path, {"prompt": "a"})
    with pytest.raises(DataError, match=r"dta.jsonl does not exist.*data.jsonl"):
        make(kind="file", path=str(tmp_path / "dta.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        make(kind="file", path=str(tmp_path))
    (tmp_path / "data.csv").write_text("prompt\na\n")
    with pytest.raises(DataError, match=r"must end in \.jsonl .* or \.parquet, not '\.csv'"):
        make(kind="file", path=str(tmp_path / "data.csv"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        make(kind="file", path=str(tmp_path / "broken.parquet"))


# ---------------------------------------------------------------- functions


def test_a_function_gets_index_and_seed(tmp_path):
    code = "def rows(index, seed): return {'problem': f'{seed}:{index}', 'answer': index}"
    keys = {"function": "rows_own:rows", "folder": module(tmp_path, "rows_own", code), "prompt_column": "problem"}
    task = make(7, kind="function", **keys)
    assert [prompt.text for prompt in task.prompts(2, 2)] == ["7:2", "7:3"]
    assert task.prompts(2, 1)[0].id == "rows_own:rows/0/2"
    assert task.describe() == "rows_own:rows (seed 7), endless; plain prompts of at most 512 tokens"


@pytest.mark.parametrize(
    ("name", "code", "error", "message"),
    [
        ("f_absent", "def row(index, seed): return {}", ConfigError, r"has no function 'rows'; nearest: row"),
        ("f_args", "def rows(index): return {}", ConfigError, r"takes \(index\); expected def rows\(index, seed\)"),
        ("f_async", "async def rows(index, seed): return {}", ConfigError, "is an async function"),
        ("f_value", "rows = [{}]", ConfigError, "is a list; expected an ordinary function"),
        ("f_syntax", "def rows(:", ConfigError, r"importing f_syntax failed: SyntaxError.*line 1"),
        ("f_import", "import no_such_module", ConfigError, r"No module named 'no_such_module' \(.*f_import.py:1\)"),
        ("f_raises", "def rows(index, seed): return {}[index]", DataError, r"index=0, seed=0 raised KeyError: 0 .*:1"),
        ("f_list", "def rows(index, seed): return [index]", DataError, r"must return a dict with text keys, got \[0\]"),
        ("f_column", "def rows(index, seed): return {'q': 'a'}", DataError, "no column 'prompt'"),
        (
            "f_chance",
            "import random\ndef rows(index, seed): return {'prompt': str(random.random()), 'answer': 1}",
            DataError,
            "two calls with the same index and seed differ in 'prompt'",
        ),
    ],
)
def test_bad_functions_are_named(tmp_path, name, code, error, message):
    folder = module(tmp_path, name, code)
    with pytest.raises(error, match=message):
        make(kind="function", function=f"{name}:rows", folder=folder)


def test_modules_of_the_folder_come_first_and_never_lose_silently(tmp_path):
    folder = module(tmp_path, "rows_neighbour", "TEXT = 'from next door'")
    module(
        tmp_path,
        "rows_importing",
        "import rows_neighbour\ndef rows(index, seed): return {'prompt': rows_neighbour.TEXT}",
    )
    task = make(kind="function", function="rows_importing:rows", folder=folder)
    assert task.prompts(0, 1)[0].text == "from next door"
    with pytest.raises(ConfigError, match=r"no module 'rows_absent' in the folder .*, and none is installed"):
        make(kind="function", function="rows_absent:rows", folder=folder)
    module(tmp_path, "json", "def rows(index, seed): return {}")
    with pytest.raises(ConfigError, match=r"should come from .*json\.py, but a module of that name is loaded already"):
        make(kind="function", function="json:rows", folder=folder)


# ---------------------------------------------------------------- limits


def test_a_prompt_over_the_limit_is_an_error_before_the_first_step(tmp_path):
    rows = [{"prompt": "short"}, {"prompt": "much longer"}]
    with pytest.raises(DataError, match=r"data.jsonl:2: the prompt has 11 tokens.*max_prompt_tokens is 10\..*too_long"):
        from_file(tmp_path, *rows, max_prompt_tokens=10)
    task = from_file(tmp_path, *rows, max_prompt_tokens=10, too_long="skip")
    assert {prompt.text for prompt in task.prompts(0, 3)} == {"short"} and task.skipped == 1
    assert "at most 10 tokens, 1 left out so far" in task.describe()
    assert from_file(tmp_path, *rows, max_prompt_tokens=11).skipped == 0
    with pytest.raises(DataError, match="each of the 2 rows is over"):
        from_file(tmp_path, *rows, max_prompt_tokens=1, too_long="skip")


def test_a_stream_of_which_nothing_fits_is_an_error(tmp_path):
    code = "def rows(index, seed): return {'prompt': 'too long' if index > 3 else 'fits'}"
    keys = {"function": "rows_long:rows", "folder": module(tmp_path, "rows_long", code), "max_prompt_tokens": 4}
    task = make(kind="function", **keys, too_long="skip")
    assert len(task.prompts(0, 4)) == 4
    with pytest.raises(DataError, match="items 4 to 1003 are all over"):
        task.prompts(4, 1)
    with pytest.raises(DataError, match="index=4, seed=0: the prompt has 8 tokens"):
        make(kind="function", **keys).prompts(0, 5)


def test_keep_picks_rows_by_their_fields(tmp_path):
    rows = [{"prompt": "1 + 1", "n": 2}, {"prompt": "3 - 1", "n": 2}, {"prompt": "1 + 2", "n": 3}]
    sums = from_file(tmp_path, *rows, keep={"prompt": r".* \+ .*"})
    assert {p.text for p in sums.prompts(0, 4)} == {"1 + 1", "1 + 2"} and sums.skipped == 1
    assert {p.text for p in from_file(tmp_path, *rows, keep={"prompt": r".*1", "n": "2"}).prompts(0, 4)} == {
        "1 + 1",
        "3 - 1",
    }
    with pytest.raises(DataError, match=r"not one that task.keep = .* wants, so none is left"):
        from_file(tmp_path, *rows, keep={"n": "20"})
    with pytest.raises(ConfigError, match=r"task.keep names 'promt', which .*; nearest: prompt"):
        from_file(tmp_path, *rows, keep={"promt": ".*"})


def test_keep_on_a_stream_is_a_function_of_the_cursor(tmp_path):
    code = "def rows(index, seed): return {'prompt': str(index), 'odd': index % 2 == 1}"
    keys = {"function": "rows_odd:rows", "folder": module(tmp_path, "rows_odd", code), "keep": {"odd": "True"}}
    task = make(kind="function", **keys)
    assert [p.text for p in task.prompts(2, 3)] == ["5", "7", "9"]
    assert make(kind="function", **keys).prompts(0, 5)[2:] == task.prompts(2, 3)


# ---------------------------------------------------------------- templates


def test_only_the_recipes_prompt_is_a_format_string(tmp_path):
    rows = {"prompt": "{x} {0} {{}} %s", "x": "{question}", "n": 7, "answer": "1"}
    task = from_file(tmp_path, rows, prompt="{{{question}}} {x!r} {n:03d}")
    assert task.prompts(0, 1)[0].text == "{{x} {0} {{}} %s} '{question}' 007"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{question} {nope}", r"names \{nope\}, which this row does not have; known: answer, meta, prompt, question"),
        ("{question} {meta}", r"names \{meta\}, which is \{'a': 1\} here"),
        ("{question:d}", "does not fit 'p'"),
    ],
)
def test_placeholders_that_do_not_fit_the_row(tmp_path, prompt, message):
    with pytest.raises(DataError, match=message):
        from_file(tmp_path, {"prompt": "p", "answer": "1", "meta": {"a": 1}}, prompt=prompt)


@pytest.mark.parametrize(
    "prompt", ["{question", "}", "{}", "{0}", "{question.x}", "{question[0]}", "{question:{n}}", "{question!x}"]
)
def test_formats_that_are_not_plain_names(prompt):
    config = TaskConfig.model_construct(prompt=prompt, template="plain", system=None)
    with pytest.raises(ConfigError, match=r"task\.prompt"):
        Template(config, Characters())


def test_the_answer_cannot_be_put_into_the_prompt():
    config = TaskConfig.model_construct(prompt="{question} {answer}", template="plain", system=None)
    with pytest.raises(ConfigError, match="would show the policy what the reward compares with"):
        Template(config, Characters())


def test_chat_uses_the_models_own_template(tmp_path):
    keys = {"template": "chat", "system": "Be brief.", "prompt": "Q: {question}"}
    prompt = from_file(tmp_path, {"prompt": "2 + 2?"}, **keys).prompts(0, 1)[0]
    assert prompt.text == "<system>Be brief.<user>Q: 2 + 2?<assistant>"
    assert prompt.ids == tuple(map(ord, prompt.text))
    with pytest.raises(ConfigError, match="the model has no chat template"):
        make(kind="file", path=jsonl(tmp_path, {"prompt": "a"}), template="chat", tokenizer=Characters(False))


def test_a_plain_prompt_begins_as_the_model_expects(tmp_path):
    data = {"kind": "file", "path": jsonl(tmp_path, {"prompt": "a{b}"})}
    expecting = Characters(adds_bos=True)
    added = make(**data, tokenizer=expecting)
    assert added.prompts(0, 1)[0].text == "^a{b}" and "plain prompts after ^" in added.describe()
    assert make(**data, prompt="^{question}", tokenizer=expecting).prompts(0, 1)[0].text == "^a{b}"
    assert make(**data, template="chat", tokenizer=expecting).prompts(0, 1)[0].text == "<user>a{b}<assistant>"
    assert make(**data, tokenizer=Characters(bos_id=None, adds_bos=True)).prompts(0, 1)[0].text == "a{b}"


def test_what_the_tokenizer_refuses_names_the_row(tmp_path):
    class Refusing(Characters):
        def apply_template(self, messages, add_generation_prompt=True):
            raise TokenizerError("roles must alternate")

    with pytest.raises(DataError, match=r"data.jsonl:1: roles must alternate"):
        make(kind="file", path=jsonl(tmp_path, {"prompt": "a"}), template="chat", tokenizer=Refusing())


USER = {"role": "user", "content": "hi {x}"}


def test_chat_takes_messages_as_they_are(tmp_path):
    turns = [USER, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "2 + 2"}]
    prompt = from_file(tmp_path, {"prompt": turns}, template="chat", system="S").prompts(0, 1)[0]
    assert prompt.text == "<system>S<user>hi {x}<assistant>yes?<user>2 + 2<assistant>"
    assert prompt.row["prompt"] == turns


@pytest.mark.parametrize(
    ("messages", "keys", "message"),
    [
        ([], {}, "must end with one that the policy is to answer; there is none"),
        ([USER, {"role": "assistant", "content": "yes"}], {}, "the last one is the assistant's"),
        ([{"role": "user"}], {}, "message 0 must have 'role' and 'content'"),
        (["hi"], {}, "message 0 must have 'role' and 'content', got 'hi'"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "role and content of message 0 must be text"),
        ([{"role": "system", "content": "x"}, USER], {"system": "S"}, "leave task.system out"),
        ([USER], {"prompt": "Q: {question}"}, "cannot be applied"),
    ],
)
def test_messages_that_cannot_be_a_prompt(tmp_path, messages, keys, message):
    with pytest.raises(DataError, match=message):
        from_file(tmp_path, {"prompt": messages}, template="chat", **keys)
