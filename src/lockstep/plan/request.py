"""What is asked: a model, two meshes, types, links. Every word is checked here, before anything is planned."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.cluster.roles import assign
from lockstep.errors import ConfigError
from lockstep.models.lora import TARGETS, LoraSpec
from lockstep.models.spec import ModelSpec
from lockstep.plan.words import counted
from lockstep.sync.formats import FORMATS
from lockstep.sync.placement import AXES, parse_axes
from lockstep.sync.plan import LinkModel
from lockstep.sync.planner import DEFAULT_STAGING_BYTES
from lockstep.text import did_you_mean, sanitize

if TYPE_CHECKING:
    from lockstep.config import Config

DTYPES = ("bfloat16", "float16", "float32")
COLOCATED = "actor"
NATIVE = "native"
EXAMPLE = "fsdp=8 or tensor=4,data=2"
MAX_DEVICES = 8192  # a plan counts the bytes of every pair of devices
MAX_STAGING_MIB = 1 << 20
MAX_GBPS = 1e6
DEFAULT_RANK = 16


@dataclass(frozen=True)
class Grid:
    """A mesh in whole: axes (name, size), the first varies slowest; devices: their numbers, in that order."""

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]

    @property
    def text(self) -> str:
        """`fsdp=4 tensor=2`: the axes larger than one; `1 device` if none is."""
        return " ".join(f"{axis}={size}" for axis, size in self.axes if size > 1) or "1 device"


@dataclass(frozen=True)
class Request:
    """One question. name: of the model, as it was given. actor, rollout: the same object when colocated. dtype: what
    the sampler holds; actor_dtype: what the trainer holds. lora: None when all weights train. staging_bytes: most that
    a device sends or receives in a round. format: names and shapes that the sampler wants."""

    name: str
    spec: ModelSpec
    actor: Grid
    rollout: Grid
    dtype: str
    actor_dtype: str
    lora: LoraSpec | None
    link: LinkModel
    staging_bytes: int
    format: str = NATIVE

    @property
    def colocated(self) -> bool:
        return self.actor == self.rollout


def read_grids(
    actor: str | Mapping[str, Any], rollout: str | Mapping[str, Any], names: tuple[str, str] = ("actor", "rollout")
) -> tuple[Grid, Grid]:
    """Both meshes on numbered devices. Unless they are named, the actor's are the first ones, and the rollout's the
    first that the actor has not; named ones may overlap. The same object twice when the rollout is the `actor`. names:
    what errors call the two.

    Raises ConfigError: an axis that is none or is given twice, a size that is not a positive whole number, device
    numbers that are no ranges, repeated or not as many as the mesh has, more devices than can be planned.
    """
    first = _grid(names[0], actor, taken=())
    second = first if rollout == COLOCATED else _grid(names[1], rollout, taken=first.devices)
    return first, first if first == second else second


def _grid(name: str, value: str | Mapping[str, Any], taken: Sequence[int]) -> Grid:
    axes, devices = _read(name, value)
    count = math.prod(axes.values())
    if devices is None:
        used = set(taken)
        devices = [number for number in range(count + len(used)) if number not in used][:count]
    if len(devices) != count or len(set(devices)) != count:
        raise ConfigError(
            f"{name}: the mesh has {counted(count, 'device')}, {len(devices)} are named ({len(set(devices))} different "
            f"ones); name each of its devices once, or none"
        )
    return Grid(tuple((axis, axes[axis]) for axis in AXES if axis in axes), tuple(devices))


def _read(name: str, value: str | Mapping[str, Any]) -> tuple[dict[str, int], Sequence[int] | None]:
    """Axes and device numbers (None: not named) of `tensor=4,data=2`, `fsdp=8@0-3+8-11` or the mapping that stands for
    it, {"fsdp": 8, "devices": [...]}."""
    if isinstance(value, Mapping):
        devices = value.get("devices")
        text = ",".join(f"{axis}={size}" for axis, size in value.items() if axis != "devices")
        if devices is not None and not all(type(d) is int and 0 <= d < MAX_DEVICES for d in devices):
            raise ConfigError(f"{name}: devices must be a list of numbers from 0 to {MAX_DEVICES - 1}; got {devices!r}")
    elif isinstance(value, str):
        text, at, words = value.partition("@")
        devices = _device_numbers(name, words) if at else None
    else:
        raise ConfigError(f"{name}: expected a mesh such as {EXAMPLE}; got {value!r}")
    if "=" not in text and text.strip() != "1":
        also = did_you_mean(text, [COLOCATED]) if name.endswith("rollout") else ""
        raise ConfigError(f"{name}: expected a mesh such as {EXAMPLE}; got {value!r}{also}")
    if re.search(r"\d{8}", text):
        raise ConfigError(f"{name}: {sanitize(text, 40)} is too large; at most {MAX_DEVICES} devices can be planned")
    try:
        axes = parse_axes(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if math.prod(axes.values()) > MAX_DEVICES:
        raise ConfigError(f"{name}: {text} is {math.prod(axes.values())} devices; at most {MAX_DEVICES} can be planned")
    return axes, devices


def _device_numbers(name: str, text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split("+"):
        first, dash, last = (word.strip() for word in part.partition("-"))
        ends = [first, last if dash else first]
        if not all(w.isascii() and w.isdigit() and len(w) < 10 for w in ends) or int(ends[0]) > int(ends[1]):
            raise ConfigError(f"{name}: expected device numbers such as @0-7 or @0-3+8-11; got {'@' + text!r}")
        if int(ends[1]) >= MAX_DEVICES:
            raise ConfigError(f"{name}: device {ends[1]} is too large a number; use 0 to {MAX_DEVICES - 1}")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return numbers


def make_request(
    model: str | os.PathLike[str] | ModelSpec,
    *,
    actor: str | Mapping[str, Any],
    rollout: str | Mapping[str, Any],
    lora: int | LoraSpec | None = None,
    dtype: str = "bfloat16",
    actor_dtype: str | None = None,
    link: LinkModel | float | None = None,
    staging_bytes: int | None = None,
    format: str = NATIVE,
    options: Mapping[str, str] | None = None,
) -> Request:
    """The question in words, checked (`lockstep.plan_sync` explains the arguments). options: argument -> what errors
    call it. Raises ConfigError or ModelError, the cheapest checks first."""
    from lockstep.models.catalog import load_spec

    called = {"actor": "actor", "rollout": "rollout", "lora": "lora", "dtype": "dtype", "actor_dtype": "actor_dtype"}
    called |= options or {}
    meshes = read_grids(actor, rollout, (called["actor"], called["rollout"]))
    for option, value in ((called["dtype"], dtype), (called["actor_dtype"], actor_dtype or dtype)):
        if value not in DTYPES:
            raise ConfigError(
                f"{option}: expected one of {', '.join(DTYPES)}; got {value!r}{did_you_mean(str(value), DTYPES)}"
            )
    check_format(format, lora)
    spec = model if isinstance(model, ModelSpec) else load_spec(model)
    return Request(
        name=spec.family if isinstance(model, ModelSpec) else os.fspath(model),
        spec=spec,
        actor=meshes[0],
        rollout=meshes[1],
        dtype=dtype,
        actor_dtype=actor_dtype or dtype,
        lora=read_lora(called["lora"], lora, spec),
        link=read_link(link),
        staging_bytes=DEFAULT_STAGING_BYTES if staging_bytes is None else staging_bytes,
        format=format,
    )


def request_of_recipe(
    config: Config, *, link: LinkModel | None = None, staging_bytes: int | None = None, format: str = NATIVE
) -> Request:
    """What a run of this recipe syncs. Raises ConfigError or ModelError."""
    from lockstep.models.catalog import load_spec
    from lockstep.train.policy import TRAINABLE_DTYPE, lora_spec, sampler_dtype

    check_format(format, config.lora)
    spec = load_spec(config.model.name)
    available = config.cluster.cpu_devices or config.cluster.num_devices
    roles = assign(config.cluster.shapes, available)
    actor, rollout = (Grid(tuple(roles[r].axes.items()), roles[r].devices) for r in ("actor", "rollout"))
    return Request(
        name=config.model.name,
        spec=spec,
        actor=actor,
        rollout=actor if actor == rollout else rollout,
        dtype=sampler_dtype(config),
        actor_dtype=TRAINABLE_DTYPE,
        lora=lora_spec(config.lora, spec),
        link=link or LinkModel(),
        staging_bytes=config.sync.staging_mib << 20 if staging_bytes is None else staging_bytes,
        format=format,
    )


def check_format(name: str, lora: object) -> None:
    """Raise ConfigError for a format that nobody declared, and for one that an adapter has no names in."""
    known = (NATIVE, *FORMATS)
    if name not in known:
        raise ConfigError(f"format: expected one of {', '.join(known)}; got {name!r}{did_you_mean(str(name), known)}")
    if name != NATIVE and lora is not None:
        raise ConfigError(f"format {name!r} has no names for an adapter's leaves; leave out the format, or the adapter")


def read_lora(option: str, lora: int | LoraSpec | None, spec: ModelSpec) -> LoraSpec | None:
    """The adapter: every matrix of every layer when only a rank is given. Raises ConfigError for a rank that is none,
    or so large that the adapter would be no smaller than what it adapts."""
    if lora is None or isinstance(lora, LoraSpec):
        return lora
    if not isinstance(lora, int) or isinstance(lora, bool) or not 1 <= lora <= spec.dim:
        why = "; leave it out to sync all weights" if lora == 0 else f" (the model's width is {spec.dim})"
        raise ConfigError(f"{option}: expected a rank from 1 to {spec.dim}; got {lora!r}{why}")
    return LoraSpec(rank=lora, alpha=2.0 * lora, targets=TARGETS)


def read_link(link: LinkModel | float | None, *, bisection_gbps: float | None = None) -> LinkModel:
    """The link model; a number is its Gbit/s. Raises ConfigError for a speed that is not above 0 and finite."""
    if not (link is None or isinstance(link, LinkModel | int | float)):
        raise ConfigError(f"link: expected a LinkModel or a number of Gbit/s; got {link!r}")
    model = link if isinstance(link, LinkModel) else LinkModel() if link is None else LinkModel(link_gbps=float(link))
    if bisection_gbps is not None:
        model = replace(model, bisection_gbps=bisection_gbps)
    for name in ("link_gbps", "bisection_gbps", "memory_gbps"):
        value = getattr(model, name)
        if value is not None and not 0 < value <= MAX_GBPS:
            raise ConfigError(f"link: expected {name} above 0 and at most {MAX_GBPS:g} Gbit/s; got {value!r}")
    if not (math.isfinite(model.latency_s) and model.latency_s >= 0):
        raise ConfigError(f"link: expected latency_s in seconds, at least 0; got {model.latency_s!r}")
    return model
