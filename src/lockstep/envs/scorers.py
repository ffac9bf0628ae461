"""The built-in reward functions, and the loading of those that a recipe names.

    first_line_exact, exact    text against the row's `answer`; pure comparisons that cannot hang
    math_verify                mathematical equality with the row's `answer` (package math-verify)
    reasoning_gym              the data set's own scorer, partial credit included (package reasoning-gym)

The last two parse and compute with what a model wrote, which can take for ever (`9**9**9**9`), so they run in worker
processes only. Some scorers of reasoning-gym run such text as Python: those are refused unless the recipe allows it.

Imports no jax and no numpy; sympy and its like when a recipe asks for them.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.envs.outcome import RewardFunction
from lockstep.errors import ConfigError
from lockstep.loading import load_function, nearest


@dataclass(frozen=True)
class Named:
    """A function as a recipe names it. answer, allow_code: as in `[reward.functions]`. dataset, options: the task's,
    for reasoning_gym."""

    name: str
    answer: str | None = None
    allow_code: bool = False
    dataset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def first_line_exact(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1.0 where the completion's first line equals the row's `answer`, else 0.0; white space around either is ignored.

    The first line is the text up to the first line feed, or all of it when there is none: a line that ended with the
    model's own stop token, or was cut at `max_new_tokens`, counts as it stands. An empty first line is a line.
    """
    scores = []
    for completion, row in zip(completions, rows, strict=True):
        gold = _gold(row)
        if "\n" in gold:
            raise ValueError(
                f"answer {gold!r} has several lines, which no first line can equal; use the reward 'exact'"
            )
        scores.append(float(completion.split("\n", 1)[0].strip() == gold))
    return scores


def exact(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """1.0 where the whole completion equals the row's `answer`, else 0.0; white space around either is ignored."""
    return [float(completion.strip() == _gold(row)) for completion, row in zip(completions, rows, strict=True)]


def _gold(row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise KeyError(f"the data row has no 'answer', only {', '.join(sorted(row)) or 'nothing'}")
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise TypeError(
            f"the row's answer is {answer!r} ({type(answer).__name__}); exact comparison needs text or an int"
        )
    return str(answer).strip()


def make_math_verify() -> RewardFunction:
    """1.0 where the completion's expression equals the row's `answer` as mathematics (1/2 and 0.5), else 0.0.

    Source: math-verify (https://github.com/huggingface/Math-Verify). Its own time-outs are off: they answer False, a
    0 that nobody could tell from a wrong answer; the worker's deadline makes a failure of it instead.
    Raises: ConfigError where math-verify is not installed.
    """
    try:
        import math_verify
        import math_verify.grader
        import math_verify.parser
    except ImportError as exc:
        raise ConfigError(
            f"the reward 'math_verify' needs the package math-verify, which cannot be imported ({exc}); install it "
            "with: pip install 'lockstep-rl[math]'"
        ) from exc
    # Each module says once that its time-outs are off, which is what is wanted here.
    math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True

    def parsed(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)

    def equal(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
        scores = []
        for completion, row in zip(completions, rows, strict=True):
            gold = str(row["answer"]) if isinstance(row.get("answer"), float) else _gold(row)
            # An answer is an expression, not prose; without the signs that set it off, LaTeX would not be seen.
            wanted = parsed(gold if "$" in gold or "\\boxed" in gold else f"${gold}$")
            if not any(not isinstance(one, str) for one in wanted):
                raise ValueError(f"the row's answer {gold!r} is no mathematical expression that math-verify can read")
            scores.append(
                float(math_verify.verify(wanted, parsed(completion), timeout_seconds=None, raise_on_error=True))
            )
        return scores

    return equal


def make_reasoning_gym(named: Named) -> RewardFunction:
    """The score that the task's data set gives: 1.0 for right, and for near misses whatever its author chose (often
    0.01, or the share of the completion that is the answer).

    Raises: ConfigError for a scorer that runs what the model wrote, unless `allow_code` is set.
    """
    try:
        import reasoning_gym.factory
    except ImportError as exc:
        raise ConfigError(
            f"the reward 'reasoning_gym' needs the package reasoning-gym, which cannot be imported ({exc}); install it "
            "with: pip install 'lockstep-rl[tasks]'"
        ) from exc
    known = reasoning_gym.factory.DATASETS
    if named.dataset is None or named.dataset not in known:
        raise ConfigError(
            "the reward 'reasoning_gym' scores rows of a reasoning-gym data set (task.kind = \"reasoning_gym\"), got "
            f"{named.dataset!r}; {nearest(named.dataset or '', known)}"
        )
    found = runs_code(known[named.dataset][0])
    if found and not named.allow_code:
        raise ConfigError(
            f"the scorer of reasoning-gym's {named.dataset!r} runs text that the model wrote ({found}), with the "
            "rights of this run; write a reward of your own, or, in a sandbox, set allow_code = true on this function"
        )
    # Some scorers look at the data set's settings; its items, and so its seed, do not matter.
    dataset = reasoning_gym.factory.create_dataset(named.dataset, **named.options, seed=0, size=1)

    def score(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
        return [dataset.score_answer(text.strip(), row) for text, row in zip(completions, rows, strict=True)]

    return score


_RUNS = frozenset({"eval", "exec", "compile", "parse_expr", "sympify", "__import__"})  # sympy's two use eval


def runs_code(dataset: Any) -> str | None:
    """The call by which a data set's scorer would run text as Python, as in "eval(answer)"; None where there is none.

    Looks through `score_answer` and what it calls in its own module. Several data sets as one hand the scoring on,
    which cannot be seen through: that counts.
    """
    score = dataset.score_answer
    module = ast.parse(inspect.getsource(sys.modules[score.__module__]))
    helpers = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    todo: list[ast.AST] = [ast.parse(textwrap.dedent(inspect.getsource(score)))]
    seen = {"score_answer"}
    while todo:
        for node in ast.walk(todo.pop()):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called == "score_answer" or (called in _RUNS and called not in helpers):
                return ast.unparse(node)
            if called in helpers and called not in seen:
                seen.add(called)
                todo.append(helpers[called])
    return None


def with_answer(pattern: str, function: RewardFunction) -> RewardFunction:
    """`function` on the group's last match in each completion; 0.0 where there is none: no answer was given."""
    compiled = re.compile(pattern)

    def score(prompts: list[str], completions: list[str], rows: list[dict[str, Any]]) -> list[float]:
        scores = []
        for prompt, completion, row in zip(prompts, completions, rows, strict=True):
            found = [match[1] for match in compiled.finditer(completion) if match[1] is not None]
            scores.append(function([prompt], [found[-1]], [row])[0] if found else 0.0)
        return scores

    return score


PURE: dict[str, RewardFunction] = {"first_line_exact": first_line_exact, "exact": exact}
BUILT_IN = (*PURE, "math_verify", "reasoning_gym")


def load(named: Named, folder: str | None) -> RewardFunction:
    """The function that a recipe names. Raises: ConfigError when there is none, or it cannot be used."""
    if ":" in named.name:
        return load_function(named.name, folder, ("prompts", "completions", "rows"), may_be_async=True)
    if named.name not in BUILT_IN:
        raise ConfigError(
            f"reward.functions: there is no built-in reward {named.name!r}; {nearest(named.name, BUILT_IN)}; "
            "a function of your own is written 'module:function'"
        )
    if named.name in PURE:
        function = PURE[named.name]
    else:
        function = make_math_verify() if named.name == "math_verify" else make_reasoning_gym(named)
    return function if named.answer is None else with_answer(named.answer, function)
