"""The `[reward]` table of a recipe: what makes a completion good. See `sections`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, model_validator

from lockstep.schema import REQUIRED, Bool, Expects, Float, Int, Problems, Section, key, literal, toml_value
from lockstep.value_sections import RewardModelConfig

IN_WORKERS = ("math_verify", "reasoning_gym")  # built-ins that can hang on what a model wrote
CHAT_ONLY_FIELDS = ("messages", "prompt", "model", "n", "stream", "max_tokens")  # `options` may not set what keys do


def _one_group(pattern: str) -> str:
    """The pattern, if it is a regular expression with one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as e:
        raise ValueError(f"{literal(pattern)} is not a regular expression: {e}") from None
    if groups != 1:
        raise ValueError(
            f"{literal(pattern)} has {groups} groups; expected one, around what is wanted: write the others as (?:...)"
        )
    return pattern


OneGroup = Annotated[str, AfterValidator(_one_group), Expects("a regular expression with one group")]


class RewardFunction(Section):
    """One function of the sum."""

    name: str = key(REQUIRED, "A built-in, or `module:function` of your own.", min_length=1, also=("function",))
    weight: Float = key(1.0, "Factor of this reward in the sum; negative for a penalty.")
    whole_batch: Bool = key(
        False,
        "One call with all completions of a step, for a function that compares them or is fast on many; it then fails "
        "as a whole. false: a call for each completion.",
    )
    answer: OneGroup | None = key(
        None,
        "Built-ins: the answer is the group's last match in the completion; without a match the value is 0. Default: "
        "the completion itself is the answer.",
    )
    allow_code: Bool = key(
        False, "reasoning_gym: also a data set whose scorer runs text of the model as Python. Only in a sandbox."
    )

    @property
    def built_in(self) -> bool:
        return ":" not in self.name

    @model_validator(mode="after")
    def _keys_fit(self) -> RewardFunction:
        if self.answer is not None and not self.built_in:
            raise ValueError(
                f"`answer` has no effect on {literal(self.name)}, which sees the whole completion; leave it out"
            )
        if self.allow_code and self.name != "reasoning_gym":
            raise ValueError(f'`allow_code` has no effect on {literal(self.name)}: it is for "reasoning_gym"')
        return self


class RewardJudge(Section):
    """One judge of the sum: a generative model that reads a completion and says a number. Its reward is (number - low)
    / (high - low), between 0 and 1."""

    name: Annotated[str, Expects("a name (letters, digits, `_`, `.` and `-`)")] = key(
        REQUIRED, "Under which its reward is reported.", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )
    weight: Float = key(1.0, "Factor of this reward in the sum; negative for a penalty.")
    rubric: str = key(
        REQUIRED,
        "What the judge is asked: `{prompt}`, `{completion}`, and `{row.NAME}` for a field of the data row; `{{` is a "
        "brace. It should ask for a line that `pattern` matches.",
        min_length=1,
        also=("prompt", "template"),
    )
    system: str | None = key(None, "chat: text of the system turn.", also=("system_prompt",))
    engine: Literal["endpoint", "rollout"] = key(
        "endpoint", "Who answers. endpoint: the server at `url`. rollout: the policy in training, by the run's sampler."
    )
    url: str | None = key(
        None,
        "endpoint: address of an OpenAI-compatible API, such as `http://host:8000/v1`.",
        min_length=1,
        also=("base_url", "api_base"),
    )
    model: str | None = key(None, "endpoint: name of the model there.", min_length=1)
    api_key_env: Annotated[str | None, Expects("name of an environment variable")] = key(
        None, "endpoint: environment variable that holds the API key.", pattern=r"^[A-Za-z_]\w*$", also=("api_key",)
    )
    options: Annotated[Mapping[str, Any], AfterValidator(toml_value), Expects("a table")] = key(
        {}, "endpoint: further fields of the request, handed on as they are.", also=("extra_body",)
    )
    template: Literal["chat", "plain"] = key(
        "chat", "chat: the rubric is a user's turn in the judge's chat template. plain: the judge continues the text."
    )
    max_tokens: Int = key(512, "Tokens of an answer at most; one that is cut is a failure.", ge=1)
    max_prompt_tokens: Int = key(
        1024,
        "rollout: tokens of a filled rubric at most; the sampler's cache is sized for it. Longer is a failure.",
        ge=1,
    )
    pattern: OneGroup = key(
        r"(?i)\bscore\s*[:=]\s*(-?\d+(?:\.\d+)?)", "Its group's last match in the answer is the number."
    )
    low: Float = key(0.0, "The number that is worth 0; a lower one is a failure.")
    high: Float = key(10.0, "The number that is worth 1; a higher one is a failure.")
    deadline_s: Float = key(
        120.0, "Seconds that one verdict may take, tries and waits together; then it is a failure.", gt=0
    )
    retries: Int = key(
        3, "Further tries when the server cannot be reached, is busy, breaks or sends what is no answer.", ge=0
    )
    concurrency: Int = key(16, "Questions under way at a time.", ge=1)

    @model_validator(mode="after")
    def _fits(self) -> RewardJudge:
        problems = [f"judge {literal(self.name)}: {problem}" for problem in self._problems()]
        if problems:
            raise Problems(problems)
        return self

    def _problems(self) -> Iterator[str]:
        own = {"endpoint": ("url", "model", "api_key_env", "options"), "rollout": ("max_prompt_tokens",)}
        for engine, names in own.items():
            for name in names:
                if engine != self.engine and getattr(self, name) != type(self).model_fields[name].default:
                    yield f"`{name}` has no effect with engine = {literal(self.engine)}; leave it out"
        if self.engine == "endpoint":
            for name in ("url", "model"):
                if getattr(self, name) is None:
                    yield f'`{name}` is missing, which engine = "endpoint" needs: which server, and which model there'
            parts = urlsplit(self.url or "http://host")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                yield f'`url` = {literal(self.url)} is not the address of an API; use one such as "http://host:8000/v1"'
        for name in CHAT_ONLY_FIELDS:
            if name in self.options:
                yield f"`options.{name}` cannot be set: a key of the judge, or lockstep itself, decides it"
        if self.system is not None and self.template == "plain":
            yield '`system` has no effect with template = "plain", which has no turns; write it into `rubric`'
        if not self.low < self.high:
            yield f"`low` = {literal(self.low)} is not below `high` = {literal(self.high)}"
        yield from self._rubric_problems()

    def _rubric_problems(self) -> Iterator[str]:
        try:
            pieces = [(name, spec, how) for _, name, spec, how in Formatter().parse(self.rubric) if name is not None]
        except ValueError as e:
            yield f"`rubric` is not a format: {e}; a brace of the text is written {{{{ or }}}}"
            return
        for name, spec, how in pieces:
            field = name.removeprefix("row.")
            if spec or how or not (name in ("prompt", "completion") or (field != name and field.isidentifier())):
                yield (
                    f"`rubric` names {{{name}}}; it may name {{prompt}}, {{completion}} and {{row.NAME}}, and a brace "
                    "of the text is written {{ or }}"
                )
        if not any(name == "completion" for name, _, _ in pieces):
            yield "`rubric` has no {completion}, so the judge would not see what it judges; put it in"


class RewardConfig(Section):
    functions: tuple[RewardFunction, ...] = key((), "Functions that score; each is run for every completion.")
    judges: tuple[RewardJudge, ...] = key((), "Models that score by a rubric.")
    models: tuple[RewardModelConfig, ...] = key((), "Trained reward models that score.")
    on_error: Literal["fail", "drop", "score"] = key(
        "fail",
        "When a function or judge gives no number: it raises, hangs, crashes, is not finite. fail: stop the run. drop: "
        "leave that completion out, counted. score: `error_score` in its place, counted.",
    )
    error_score: Float | None = key(None, 'on_error = "score": the value of what failed, before its weight.')
    workers: Int = key(
        2,
        "Processes that functions run in (built-ins that cannot hang run in lockstep's own). 0: all in lockstep's own, "
        "without a deadline, where a hang or a crash is the run's.",
        ge=0,
    )
    deadline_s: Float = key(
        10.0,
        "Seconds that a function may take for one completion; then its process is killed, and it has failed.",
        gt=0,
    )
    folder: str | None = key(
        None, "Where `module:function` is looked for before Python's own path. Default: the recipe's.", path="always"
    )

    @model_validator(mode="after")
    def _names_and_weights(self) -> RewardConfig:
        parts: list[RewardFunction | RewardJudge | RewardModelConfig] = [*self.functions, *self.judges, *self.models]
        names = [part.name for part in parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"`reward.functions`, `reward.judges` and `reward.models` list {literal(name)} twice; give it "
                    "once, with the summed weight (a second judge or model needs a name of its own)"
                )
        if parts and all(part.weight == 0 for part in parts):
            raise ValueError("all weights of `reward` are zero: every reward is 0, nothing can be learnt")
        return self

    @model_validator(mode="after")
    def _errors_and_workers(self) -> RewardConfig:
        if self.on_error == "score" and self.error_score is None:
            raise ValueError(
                '`reward.error_score` is missing, which on_error = "score" needs: there is no usual value, it is what '
                "the policy is taught that a failure is worth"
            )
        if self.on_error != "score" and self.error_score is not None:
            raise ValueError(
                f"`reward.error_score` has no effect with on_error = {literal(self.on_error)}; leave it out, or use "
                'on_error = "score"'
            )
        for function in self.functions:
            if function.name in IN_WORKERS and not self.workers:
                raise ValueError(
                    f"`reward.workers` = 0 with {literal(function.name)}, which can hang on what a model wrote and "
                    "needs the deadline that only a worker process has; use at least 1"
                )
        return self
