"""A user's own function behind `module:function`: found, imported, checked; and what its errors look like.

Worker processes load functions too, and start fast because this imports little: no jax, no numpy.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import ConfigError
from lockstep.text import closest


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


def load_function(
    reference: str, folder: str | None, parameters: Sequence[str], *, may_be_async: bool = False
) -> Callable[..., Any]:
    """The user's function behind `module:function`.

    `folder` (the recipe's) goes to the front of `sys.path` and stays there, exactly as Python does with the folder of
    a script: the module may import its neighbours, and any installed module can be named too. A file of the folder
    that cannot win, because a module of that name is loaded already, is an error rather than a surprise.

    folder: None leaves `sys.path` as it is. parameters: names of the positional arguments that it will be called with.
    may_be_async: an `async def` will do; the caller awaits what it returns.
    Raises: ConfigError when there is no such module or function, the import fails, or the arguments do not fit.
    """
    function = load_object(reference, folder, "function", inspect.isfunction)
    function_name = reference.partition(":")[2]
    wanted = f"def {function_name}({', '.join(parameters)})"
    if not callable(function) or (inspect.iscoroutinefunction(function) and not may_be_async):
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
