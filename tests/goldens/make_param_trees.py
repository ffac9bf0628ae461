"""Make `param_trees.json`: names and shapes of the tensors of published checkpoints, folded until a person can read
them.

    python tests/goldens/make_param_trees.py FOLDER

FOLDER holds one `<model>.json.gz` per model, `{"model", "config", "params": [[name, shape], ...]}`: names and shapes as
in the checkpoint (experts unfused), without the scales of quantized storage. The stored file was made from the
published configurations that the package aiconfigurator-core 0.12.0 (Apache-2.0) carries.

Stored per model: `tensors`, `parameters`, `sha256` of the sorted lines "name shape" (shape as `4096x1024`), and
`folded`: [pattern, shape], where `{0-60}` in a pattern stands for each of these numbers in turn. Unfolding gives the
same names again; that is checked here.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import re
import sys
from pathlib import Path

OUT = Path(__file__).parent / "param_trees.json"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_RANGE = re.compile(r"\{(\d+)-(\d+)\}")

Tensors = dict[str, tuple[int, ...]]


def fold(tensors: Tensors) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors that differ in numbers alone, as one pattern each. Raises AssertionError if they leave gaps."""
    groups: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        groups.setdefault((_NUMBER.sub("{}", name), shape), set()).add(numbers)
    folded = []
    for (pattern, shape), found in groups.items():
        ranges = [f"{{{min(column)}-{max(column)}}}" for column in zip(*found, strict=True)]
        folded.append((pattern.format(*ranges), shape))
    assert unfold(folded) == tensors, "tensors that differ in numbers alone leave gaps"
    return folded


def unfold(folded: list[tuple[str, tuple[int, ...]]]) -> Tensors:
    """The inverse of `fold`."""
    tensors: Tensors = {}
    for pattern, shape in folded:
        ranges = [range(int(a), int(b) + 1) for a, b in _RANGE.findall(pattern)]
        blank = _RANGE.sub("{}", pattern)
        for numbers in itertools.product(*ranges):
            name = blank.format(*numbers)
            assert name not in tensors, f"{name} is there twice"
            tensors[name] = tuple(shape)
    return tensors


def digest(tensors: Tensors) -> str:
    """SHA-256 of the sorted lines "name shape", in hex."""
    lines = sorted(f"{name} {'x'.join(map(str, shape))}" for name, shape in tensors.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main(folder: Path) -> None:
    golden = {}
    for file in sorted(folder.glob("*.json.gz")):
        tree = json.loads(gzip.decompress(file.read_bytes()))
        tensors = {name: tuple(shape) for name, shape in tree["params"]}
        assert len(tensors) == len(tree["params"]), f"{file}: a name is there twice"
        golden[tree["model"].replace("--", "/")] = {
            "tensors": len(tensors),
            "parameters": sum(math.prod(shape) for shape in tensors.values()),
            "sha256": digest(tensors),
            "folded": fold(tensors),
        }
    lines = []
    for model, entry in golden.items():
        folded = ",\n   ".join(json.dumps(line) for line in entry.pop("folded"))
        lines.append(f' {json.dumps(model)}: {json.dumps(entry)[:-1]}, "folded": [\n   {folded}\n ]}}')
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
