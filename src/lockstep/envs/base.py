"""What tasks and rewards share: the nouns `Task` and `Score`, and the loading of a user's own function.

A task turns a position (the cursor) into prompts and keeps no other state, so a run resumes by remembering one
integer. A reward turns completions into `Score`s and never invents a value: a sample without a reward says why.

Imports no jax.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from lockstep.errors import ConfigError
from lockstep.text import closest
from lockstep.types import Prompt


@dataclass(frozen=True)
class Score:
    """What one completion earned.

    value: the weighted sum over the reward functions; NaN when `failed` is set.
    parts: the unweighted value of each function under its name in the recipe; NaN for a function that failed here.
    failed: why there is no reward (function, exception), or None. A failed sample is left out of training and counted.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None


class Task(ABC):
    """An endless supply of prompts, addressed by position."""

    @abstractmethod
    def prompts(self, cursor: int, n: int) -> list[Prompt]:
        """The `n` prompts after the first `cursor` of the run.

        A pure function of its arguments: `prompts(0, a + b) == prompts(0, a) + prompts(a, b)`, in any order of calls
        and in any process. The cursor is all that a checkpoint has to hold.

        Raises: DataError when a row cannot become a prompt.
        """

    @property
    @abstractmethod
    def skipped(self) -> int:
        """Rows left out so far: not what `task.keep` wants, or too long where `task.too_long = "skip"`."""

    @abstractmethod
    def describe(self) -> str:
        """One line: the data and its digest or version, the order, the limit, what was skipped."""


class PromptTokenizer(Protocol):
    """The part of `lockstep.models.tokenizer.Tokenizer` that a task needs."""

    @property
    def has_template(self) -> bool: ...

    bos_id: int | None
    adds_bos: bool

    def encode_filled(self, template: str, fields: Mapping[str, str]) -> list[int]: ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str: ...

    def render(self, messages: list[dict[str, Any]]) -> str: ...

    def apply_template(self, messages: list[dict[str, Any]]) -> list[int]: ...


def nearest(name: str, known: Collection[str]) -> str:
    """The tail of an error message for an unknown name: the nearest known ones first, else all of them (at most 20)."""
    close = closest(name, known, count=3, cutoff=0.5)
    if close:
        return f"nearest: {', '.join(close)}"
    shown = sorted(known)
    return f"known: {', '.join(shown[:20])}{', ...' if len(shown) > 20 else ''}" if shown else "known: none"


def describe_exception(exc: BaseException) -> str:
    """`ValueError: no number (rewards.py:12)`: the exception and the line that raised it."""
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if not f.filename.startswith("<frozen ")]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(exc).__name__}: {exc}{at}"


def load_object(reference: str, folder: str | None, kind: str, is_one: Callable[[Any], bool]) -> Any:
    """What `module:name` names; `load_function` says where it is looked for. kind, is_one: what it should be, for the
    error that lists those that there are. Raises ConfigError when there is no such module or name."""
    module_name, _, name = reference.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{reference!r} is not of the form 'module:{kind}', as in 'my_module:my_{kind}'")
    module = _import(module_name, Path(folder).resolve() if folder is not None else None, reference)
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if is_one(value)]
        raise ConfigError(f"{reference!r}: {_file_of(module)} has no {kind} {name!r}; {nearest(name, known)}")
    return found


def load_function(reference: str, folder: str | None, parameters: Sequence[str]) -> Callable[..., Any]:
    """The user's function behind `module:function`.

    `folder` (the recipe's) goes to the front of `sys.path` and stays there, exactly as Python does with the folder of
    a script: the module may import its neighbours, and any installed module can be named too. A file of the folder
    that cannot win, because a module of that name is loaded already, is an error rather than a surprise.

    folder: None leaves `sys.path` as it is. parameters: names of the positional arguments that it will be called with.
    Raises: ConfigError when there is no such module or function, the import fails, or the arguments do not fit.
    """
    function = load_object(reference, folder, "function", inspect.isfunction)
    function_name = reference.partition(":")[2]
    wanted = f"def {function_name}({', '.join(parameters)})"
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if callable(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{reference!r} is {kind}; expected an ordinary function: {wanted}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C show no signature: the call itself will tell
        return function
    try:
        signature.bind(*parameters)
    except TypeError as exc:
        raise ConfigError(f"{reference!r} takes {signature}; expected {wanted} ({exc})") from exc
    return function


def _import(module_name: str, folder: Path | None, reference: str) -> ModuleType:
    if folder is not None and sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the file may be younger than Python's listing of the folder
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:
        missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            here = [path.stem for path in folder.glob("*.py")] if folder is not None else []
            raise ConfigError(
                f"{reference!r}: there is no module {module_name!r} in the folder {folder}, and none is installed; "
                f"{nearest(module_name, here)}"
            ) from exc
        raise ConfigError(f"{reference!r}: importing {module_name} failed: {describe_exception(exc)}") from exc
    if folder is not None:
        _refuse_namesake(module, folder.joinpath(*module_name.split(".")), reference)
    return module


def _refuse_namesake(module: ModuleType, stem: Path, reference: str) -> None:
    """An error when the folder has a file for the module, yet another module of that name was there before."""
    own = [path.resolve() for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    if own and Path(_file_of(module)).resolve() not in own:
        raise ConfigError(
            f"{reference!r} should come from {own[0]}, but a module of that name is loaded already from "
            f"{_file_of(module)}; rename the file"
        )


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or f"<built-in {module.__name__}>"
