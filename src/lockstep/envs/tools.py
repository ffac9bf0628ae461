"""Tools that a policy may call: how a call is written, a calculator, and the environment that answers.

A call is `<tool>NAME: ARGUMENT</tool>`, or the same in JSON, `<tool>{"name": NAME, "argument": ARGUMENT}</tool>`. The
closing tag may be missing at the end of a turn, as it is where it was the stop text of another engine. The last call of
a turn counts. A turn without a call is the answer.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.envs.multi_turn import Environment, Observation, Step, Turn

_CALL = re.compile(r"<tool>(.*?)(?:</tool>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class ToolCall:
    name: str
    argument: str


class ToolError(Exception):
    """A call that cannot be answered. The policy reads why: it is the policy's mistake, no failure of the sample."""


def parse_call(text: str) -> ToolCall | None:
    """The last call in a turn's text; None where there is none. Raises ToolError for one that is not well written."""
    found = _CALL.findall(text)
    if not found:
        return None
    body = found[-1].strip()
    if body.startswith("{"):
        try:
            value = json.loads(body)
        except ValueError as error:
            raise ToolError(f"not valid JSON: {error}") from error
        if set(value) != {"name", "argument"} or not all(isinstance(v, str) for v in value.values()):
            raise ToolError('expected {"name": "...", "argument": "..."}')
        return ToolCall(value["name"], value["argument"])
    name, colon, argument = body.partition(":")
    if not colon:
        raise ToolError("expected NAME: ARGUMENT")
    return ToolCall(name.strip(), argument.strip())


class Tool(Protocol):
    async def call(self, argument: str) -> str:
        """The result as text. Raises ToolError where the policy should read why not."""
        ...


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """Numbers, + - * / // %, and parentheses, of at most 200 characters. No names, no calls, no powers: what a model
    wrote is never run, and cannot take long."""

    async def call(self, argument: str) -> str:
        if len(argument) > 200:
            raise ToolError("longer than 200 characters")
        try:
            value = _value(ast.parse(argument.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ToolError("not an expression") from error
        except (ZeroDivisionError, OverflowError) as error:
            raise ToolError(str(error)) from error
        if isinstance(value, float) and not math.isfinite(value):
            raise ToolError("not finite")
        return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
    raise ToolError("only numbers, + - * / // % and parentheses")


class ToolEnvironment(Environment):
    """Answers calls until a turn has none, which is the answer.

    tools: by name. judge: text of the answer -> its reward. called: reward of each call that was answered. show: result
    -> what the policy reads.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        judge: Callable[[str], float],
        *,
        called: float = 0.0,
        show: Callable[[str], Observation] = lambda result: Observation(result, "tool"),
    ) -> None:
        self._tools, self._judge, self._called, self._show = tools, judge, called, show

    async def step(self, turn: Turn) -> Step:
        try:
            call = parse_call(turn.text)
            if call is None:
                return Step(reward=self._judge(turn.text), done=True)
            if call.name not in self._tools:
                raise ToolError(f"there is no tool {call.name!r}; there are: {', '.join(sorted(self._tools))}")
            return Step(self._show(await self._tools[call.name].call(call.argument)), self._called)
        except ToolError as error:
            return Step(self._show(f"error: {error}"))


def calculator(row: Mapping[str, Any], seed: int) -> Environment:
    """For `environment.function`: a calculator, called `calculator`. 1 for an answer whose last number is the row's
    `answer`. In a plain prompt the result stands on the line of the call."""
    wanted = str(row["answer"])

    def judge(text: str) -> float:
        numbers = _NUMBER.findall(text)
        return float(bool(numbers) and numbers[-1] == wanted)

    return ToolEnvironment({"calculator": Calculator()}, judge, show=lambda result: Observation(f" = {result}\n"))
