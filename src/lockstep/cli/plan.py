"""`lockstep plan`: what a weight sync would move and cost."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.words import Add, shown
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.plan.request import Request

MIB = 1 << 20
MAX_GBPS = 1e6


def add_plan(add: Add) -> None:
    plan = add(
        "plan",
        _plan,
        "what a weight sync moves, from whom to whom, and what it costs; needs no devices and no weights",
        usage="lockstep plan --model MODEL --actor MESH --rollout MESH [--lora RANK] [--dtype D] [...]\n"
        "       lockstep plan --recipe RECIPE [--section.key VALUE ...] [...]",
        epilog="A MESH is fsdp=8 or tensor=4,data=2; its devices are the next free ones unless they are named,\n"
        "tensor=4,data=2@0-7. `--rollout actor` is colocated: one mesh, the same arrays.\n"
        "  lockstep plan --model llama-3.1-8b --actor fsdp=8 --rollout tensor=4,data=2 --html plan.html\n"
        "  lockstep plan --recipe recipes/addition.toml --cluster.rollout '{data = 2}' --json -\n"
        "docs/plan.md explains every line and every field.",
    )
    ask = plan.add_argument
    ask("--model", metavar="MODEL", help="a known name, or a folder in which config.json suffices")
    ask("--actor", metavar="MESH", help="mesh of the role that trains")
    ask("--rollout", metavar="MESH", help="mesh of the role that samples, or `actor`")
    ask("--recipe", metavar="RECIPE", help="plan this recipe's sync: its model, meshes and adapter")
    ask("--lora", metavar="RANK", help="only an adapter of this rank crosses (none: a recipe without its own)")
    ask("--dtype", metavar="D", help="type of the sampler's weights (default: bfloat16)")
    ask("--actor-dtype", metavar="D", help="type of the trainer's weights (default: the sampler's)")
    ask(
        "--format",
        metavar="F",
        default="native",
        help="names and shapes that the sampler wants: native, hf, sglang_jax, fused",
    )
    ask("--link-gbps", metavar="N", help="Gbit/s that a device sends, and receives (default: 400)")
    ask("--bisection-gbps", metavar="N", help="Gbit/s that all devices together move (default: no limit)")
    ask("--staging-mib", metavar="N", help="MiB that a device may send or receive in one round")
    ask("--json", metavar="FILE", help="write the plan as JSON; - : to standard output, instead of the text")
    ask("--html", metavar="FILE", help="write the plan as one self-contained page")


_OF_MODEL = ("actor", "rollout", "lora", "dtype", "actor_dtype")
_HOW = "expected `lockstep plan --model MODEL --actor MESH --rollout MESH`, or `lockstep plan --recipe RECIPE`"


def _plan(options: argparse.Namespace) -> None:
    _check_words(options)
    json_file, html_file = _outputs(options)
    from lockstep.plan.answer import answer
    from lockstep.plan.document import dumps

    found = answer(_request(options))
    if html_file is not None:
        _write(html_file, found.to_html())
    if json_file is not None:
        _write(json_file, dumps(found))
    if options.json == "-":
        print(dumps(found), end="")
    else:
        print(shown(found.summary))


def _request(options: argparse.Namespace) -> Request:
    from lockstep.plan.request import make_request, read_link, request_of_recipe

    link = read_link(
        _number("--link-gbps", options.link_gbps), bisection_gbps=_number("--bisection-gbps", options.bisection_gbps)
    )
    staging = None if options.staging_mib is None else MIB * _whole("--staging-mib", options.staging_mib, "MiB")
    if options.recipe is not None:
        from lockstep.config import load_config

        config = load_config(options.recipe, options.overrides)
        return request_of_recipe(config, link=link, staging_bytes=staging, format=options.format)
    return make_request(
        options.model,
        actor=options.actor,
        rollout=options.rollout,
        lora=None if options.lora is None else _whole("--lora", options.lora, "a rank"),
        dtype=options.dtype or "bfloat16",
        actor_dtype=options.actor_dtype,
        link=link,
        staging_bytes=staging,
        format=options.format,
        options={name: _option(name) for name in _OF_MODEL},
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_words(options: argparse.Namespace) -> None:
    """Raise ConfigError unless the words ask one question."""
    if options.model is not None and options.recipe is not None:
        raise ConfigError(f"--model and --recipe are two questions; {_HOW}")
    if options.model is None and options.recipe is None:
        raise ConfigError(f"which model? {_HOW}")
    if options.recipe is not None:
        if options.lora is not None:
            options.overrides += ["--lora", "none"] if options.lora == "none" else ["--lora.rank", options.lora]
            options.lora = None
        for name in _OF_MODEL:
            if getattr(options, name) is not None:
                how = f"override its `cluster.{name}`" if name in ("actor", "rollout") else "a run syncs what it trains"
                raise ConfigError(f"{_option(name)} goes with --model; a recipe says it itself: {how}")
        return
    if options.overrides:
        raise ConfigError(f"{options.overrides[0]} is a key of a recipe and goes with --recipe; {_HOW}")
    for name in ("actor", "rollout"):
        if getattr(options, name) is None:
            also = ", or `actor` for colocated" if name == "rollout" else ""
            raise ConfigError(f"--{name} is missing: expected a mesh such as tensor=4,data=2{also}")


def _number(option: str, text: str | None) -> float | None:
    """A speed in Gbit/s."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_GBPS:
        raise ConfigError(f"{option}: expected Gbit/s above 0 and at most {MAX_GBPS:g}; got {text!r}")
    return value


def _whole(option: str, text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 7 and int(text)):
        none = "; leave it out to sync all weights" if option == "--lora" else ""
        raise ConfigError(f"{option}: expected {what}, a whole number from 1 to 9999999; got {text!r}{none}")
    return int(text)


def _outputs(options: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The files to write, known to be writable before anything is computed."""
    files: list[Path | None] = []
    for option, text in (("--json", options.json), ("--html", options.html)):
        if text is None or (option == "--json" and text == "-"):
            files.append(None)
            continue
        path = Path(text)
        if not text or path.is_dir():
            raise ConfigError(f"{option}: expected a file to write; {text!r} is {'a folder' if text else 'no name'}")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise ConfigError(f"{option} {path}: cannot be written; change its rights or choose another file")
        files.append(path)
    if files[0] is not None and files[1] is not None and files[0].resolve() == files[1].resolve():
        raise ConfigError(f"--json and --html both write {files[0]}; give them two files")
    return files[0], files[1]


def _write(path: Path, text: str) -> None:
    from lockstep.files import write_atomic

    if path.exists() and not path.is_file():
        path.write_text(text)  # a pipe or a device: nothing to replace
    else:
        write_atomic(path, text.encode())
    print(f"{path}: {len(text.encode()):,} bytes", file=sys.stderr)
