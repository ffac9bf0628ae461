"""Sources: rows by index. What the three kinds of tasks have of their own; the order and the prompt are elsewhere.

Imports no jax; pyarrow and reasoning_gym are imported by the source that needs them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, DataError
from lockstep.loading import describe_exception, load_function, nearest

if TYPE_CHECKING:
    import pyarrow

    from lockstep.config import TaskConfig

GYM_CHUNK = 500  # items made with one seed: reasoning-gym's own default size; some of its datasets cannot go beyond it


def derive_seed(seed: int, *parts: str | int) -> int:
    """A seed of 31 bits for one purpose of a run. Neighbouring seeds give unrelated ones, on every machine."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


class Source(ABC):
    """Rows by index. `name` begins the ids of the prompts; `size` is the number of rows, None when endless."""

    name: str
    size: int | None

    @abstractmethod
    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, the same at every call; the caller may keep or change what it gets."""

    @abstractmethod
    def where(self, index: int) -> str:
        """How errors name row `index`."""

    @abstractmethod
    def question(self, row: Mapping[str, Any], where: str) -> Any:
        """The problem in a row: text, or a list of messages."""

    @abstractmethod
    def fields(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What the prompt format may name besides {question}."""

    @abstractmethod
    def describe(self) -> str:
        """The data in a few words, with what identifies its content (a digest, a version)."""


class ReasoningGymSource(Source):
    """Problems made by a dataset of reasoning-gym, without end. Rows: question, answer, metadata.

    Item i is item i mod 500 of the dataset seeded by hash(run seed, dataset, i div 500). (reasoning-gym seeds item i
    with seed + i, so the streams of runs with seeds 0 and 1 would otherwise be the same one, shifted by one item.)
    """

    size = None

    def __init__(self, config: TaskConfig, seed: int):
        """Raises: ConfigError when reasoning-gym is not installed, has no such dataset, or refuses the options."""
        try:
            import reasoning_gym.factory
        except ModuleNotFoundError as exc:
            raise ConfigError(
                'task.kind = "reasoning_gym" needs the package reasoning-gym, which cannot be imported '
                f"({exc}); install it with: pip install 'lockstep-rl[tasks]'"
            ) from exc
        assert config.dataset is not None
        known = reasoning_gym.factory.DATASETS
        if config.dataset not in known:
            raise ConfigError(
                f"task.dataset = {config.dataset!r} is not a dataset of reasoning-gym; {nearest(config.dataset, known)}"
            )
        self.name: str = config.dataset
        self._create = reasoning_gym.factory.create_dataset
        self._options, self._seed = dict(config.options), seed
        self._chunk: tuple[int, Any] | None = None
        self._refuse_options([field.name for field in dataclasses.fields(known[self.name][1])])
        try:
            self._dataset(0)
        except Exception as exc:  # its validation uses assertions, type errors and whatever a wrong value runs into
            raise ConfigError(
                f"task.options = {self._options} do not suit {self.name!r}: {describe_exception(exc)}"
            ) from exc

    def _refuse_options(self, known: list[str]) -> None:
        for option in self._options:
            if option in ("seed", "size"):
                why = "comes from run.seed" if option == "seed" else "has no meaning, the stream is endless"
                raise ConfigError(f"task.options.{option} cannot be set: the {option} {why}")
            if option not in known:
                raise ConfigError(f"task.options.{option} is not an option of {self.name!r}; {nearest(option, known)}")

    def _dataset(self, chunk: int) -> Any:
        if self._chunk is None or self._chunk[0] != chunk:
            seed = derive_seed(self._seed, "reasoning_gym", self.name, chunk)
            self._chunk = (chunk, self._create(self.name, **self._options, seed=seed, size=GYM_CHUNK))
        return self._chunk[1]

    def row(self, index: int) -> dict[str, Any]:
        chunk, item = divmod(index, GYM_CHUNK)
        try:
            return dict(self._dataset(chunk)[item])
        except Exception as exc:  # foreign code: name the item, keep the cause
            raise DataError(f"{self.where(index)} could not be made: {describe_exception(exc)}") from exc

    def where(self, index: int) -> str:
        return f"{self.name} item {index}"

    def question(self, row: Mapping[str, Any], where: str) -> Any:
        return row["question"]

    def fields(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        return dict(row["metadata"])

    def describe(self) -> str:
        version = importlib.metadata.version("reasoning-gym")
        return f"{self.name} (reasoning-gym {version}, options {self._options}, seed {self._seed})"


class _Columns(Source):
    """Rows whose columns are the user's; one of them, `prompt_column`, is the problem."""

    def __init__(self, prompt_column: str):
        self._prompt_column = prompt_column

    def question(self, row: Mapping[str, Any], where: str) -> Any:
        if self._prompt_column not in row:
            raise DataError(
                f"{where}: there is no column {self._prompt_column!r} (task.prompt_column); "
                f"{nearest(self._prompt_column, row)}"
            )
        return row[self._prompt_column]

    def fields(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        if "question" in row and self._prompt_column != "question":
            raise DataError(
                f"{where}: {{question}} is ambiguous: task.prompt_column is {self._prompt_column!r}, and the row has a "
                'column "question" as well; rename one, or set task.prompt_column = "question" and name the other '
                "columns in task.prompt"
            )
        return dict(row)


class FileRows:
    """The rows of one JSONL or Parquet file, held in memory (JSON lines as bytes, Parquet as columns). key: of the
    recipe, for errors."""

    def __init__(self, path: Path, key: str):
        """Raises: DataError when the file is missing, empty, of another kind or broken."""
        self.path = path
        if not path.is_file():
            found = "is a folder" if path.is_dir() else "does not exist"
            near = [p.name for p in path.parent.glob("*") if p.suffix in (".jsonl", ".parquet")]
            raise DataError(f"{key}: {path} {found}; expected a file. Nearby data: {sorted(near)[:10] or 'none'}")
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._lines: list[tuple[int, bytes]] = []  # line number from 1, JSON
        self._table: pyarrow.Table | None = None
        if path.suffix == ".jsonl":
            self._lines = _json_lines(path)
            self.size = len(self._lines)
        elif path.suffix == ".parquet":
            self._table = _parquet(path, key)
            self.size = self._table.num_rows
        else:
            raise DataError(
                f"{key}: {path} must end in .jsonl (one JSON object per line) or .parquet, "
                f"not {path.suffix or 'nothing'!r}"
            )
        if self.size == 0:
            raise DataError(f"{key}: {path} holds no rows; at least one is needed")

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, the same at every call; the caller may keep or change what it gets."""
        if self._table is not None:
            try:
                return self._table.slice(index, 1).to_pylist()[0]
            except (ValueError, LookupError) as exc:  # nanoseconds, an unknown time zone: no Python value for it
                raise DataError(
                    f"{self.where(index)}: a value has no Python counterpart ({exc}); columns: "
                    f"{self._table.schema.names}. Leave that column out, or store it as text"
                ) from exc
        line, data = self._lines[index]
        return _json_object(data, f"{self.path}:{line}")

    def where(self, index: int) -> str:
        """How errors name row `index`."""
        return f"{self.path} row {index}" if self._table is not None else f"{self.path}:{self._lines[index][0]}"

    def describe(self) -> str:
        return f"{self.path.name} ({self.size} rows, sha256 {self.digest[:12]})"


class FileSource(_Columns):
    """The rows of a file."""

    def __init__(self, config: TaskConfig):
        """Raises: DataError as `FileRows`."""
        super().__init__(config.prompt_column)
        assert config.path is not None
        self._rows = FileRows(Path(config.path), "task.path")
        self.name, self.size = self._rows.path.stem, self._rows.size

    def row(self, index: int) -> dict[str, Any]:
        return self._rows.row(index)

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def describe(self) -> str:
        return self._rows.describe()


def _json_lines(path: Path) -> list[tuple[int, bytes]]:
    """Lines that hold something, with their numbers from 1; a byte order mark at the start is not content."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    return [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise DataError(f"{where}: not UTF-8 text: {exc}") from exc
    except json.JSONDecodeError as exc:
        raise DataError(f"{where}: broken JSON at column {exc.colno}: {exc.msg}; the line is {exc.doc[:80]!r}") from exc
    except (ValueError, RecursionError) as exc:  # a number of thousands of digits, nesting without end
        raise DataError(f"{where}: JSON that cannot be read: {exc}; the line begins {data[:80]!r}") from exc
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected one JSON object per line, got {type(value).__name__} {value!r:.80}")
    return value


def _parquet(path: Path, key: str) -> pyarrow.Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as exc:
        raise DataError(f"{key}: {path} cannot be read as Parquet: {exc}") from exc
    names = table.column_names
    if len(set(names)) != len(names):
        raise DataError(f"{key}: {path} has several columns of one name: {names}")
    return table


class FunctionSource(_Columns):
    """Rows from the user's `def rows(index: int, seed: int) -> dict`, which must depend on its arguments alone."""

    size = None

    def __init__(self, config: TaskConfig, seed: int):
        """Raises: ConfigError when the function cannot be loaded; DataError when row 0 differs between two calls."""
        super().__init__(config.prompt_column)
        assert config.function is not None
        self.name = config.function
        self._function, self._seed = load_function(config.function, config.folder, ("index", "seed")), seed
        first, again = self.row(0), self.row(0)
        different = sorted(key for key in first.keys() | again.keys() if _text(first, key) != _text(again, key))
        if different:
            raise DataError(
                f"{self.where(0)}: two calls with the same index and seed differ in {', '.join(map(repr, different))}; "
                "the row must depend on index and seed alone (for chance: random.Random(f'{seed}/{index}')), or a "
                "resumed run would go on with other data"
            )

    def row(self, index: int) -> dict[str, Any]:
        try:
            row = self._function(index, self._seed)
        except (Exception, SystemExit) as exc:  # the user's code: name the call, keep the cause
            raise DataError(f"{self.where(index)} raised {describe_exception(exc)}") from exc
        if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
            raise DataError(f"{self.where(index)} must return a dict with text keys, got {row!r:.120}")
        return dict(row)

    def where(self, index: int) -> str:
        return f"{self.name} called with index={index}, seed={self._seed}"

    def describe(self) -> str:
        return f"{self.name} (seed {self._seed})"


def _text(row: Mapping[str, Any], key: str) -> str | None:
    """A value as text, for comparison; None for what only has an identity (a repr with an address says nothing)."""
    value = row.get(key)
    return repr(value) if isinstance(value, (str, int, float, list, dict, tuple)) or value is None else None
