"""Checkpoints of a run: `checkpoints/<step>/`, written by orbax, complete or absent, bitwise equal when read.

    checkpoints/10/arrays/          the arrays, an orbax PyTree checkpoint (OCDBT), one entry per leaf
    checkpoints/10/checkpoint.json  format, step, leaf -> [dtype, shape, sha256], and the caller's `meta`

A checkpoint is built under a temporary name, synced to disk, and renamed last. A name made of digits is therefore a
complete checkpoint, whatever killed the writer; leftovers of a killed writer are removed by the next save.

Orbax keeps no checksum of array data (a flipped bit in a data file restores as another number, silently), so every leaf
has a digest: taken from the values given to `save`, compared with the values `restore` is about to return.

A leaf is named by its path in the pytree, joined by `/`: `params/layers.0.q.lora_a`, `optimizer/0/mu/...`. One process
writes; arrays may be sharded over any of its devices and restored onto others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lockstep.errors import CheckpointError
from lockstep.files import fsync_dir, fsync_tree

FORMAT = 1
FOLDER = "checkpoints"
_MANIFEST = "checkpoint.json"
_BUILDING = ".saving-"


def save(run_dir: Path, step: int, arrays: Any, meta: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step and return its folder; when this returns it is on disk.

    arrays: pytree of jax or numpy arrays (`{"params": ..., "optimizer": ...}`). meta: a dict that JSON keeps as it is
    (policy version, syncs, cursor, recipe hash, ...).
    Raises CheckpointError when the step already has one, a leaf is not a plain array, or `meta` would not survive JSON.
    """
    folder = run_dir / FOLDER
    final = folder / str(step)
    if final.exists():
        raise CheckpointError(
            f"{final} exists already, and no checkpoint is overwritten; delete it to save this step anew"
        )
    leaves = _named_leaves(arrays)
    _check_saveable(leaves)
    manifest = {
        "format": FORMAT,
        "step": step,
        "leaves": {
            name: [*_form(leaf), digest] for (name, leaf), digest in zip(leaves.items(), _digests(leaves), strict=True)
        },
        "meta": _check_meta(meta),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in (p for p in folder.iterdir() if p.name.startswith(_BUILDING)):
        shutil.rmtree(leftover)
    building = folder / f"{_BUILDING}{step}"
    building.mkdir()
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save((building / "arrays").absolute(), args=ocp.args.PyTreeSave(leaves))
    except (ValueError, OSError) as error:  # orbax reports a full disk as a ValueError
        raise CheckpointError(
            f"{final} could not be written ({str(error).splitlines()[0][:200]}); is the disk full? Earlier checkpoints "
            f"are whole: {steps(run_dir) or 'none'}"
        ) from error
    (building / _MANIFEST).write_text(json.dumps(manifest, allow_nan=False))
    fsync_tree(building)
    os.rename(building, final)
    fsync_dir(folder)
    return final


def steps(run_dir: Path) -> list[int]:
    """Steps that have a complete checkpoint, ascending."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def latest(run_dir: Path) -> int | None:
    """The newest step with a complete checkpoint, or None."""
    return max(steps(run_dir), default=None)


def read_meta(run_dir: Path, step: int) -> dict[str, Any]:
    """The `meta` of a checkpoint, without its arrays: what a resume checks before it builds anything."""
    return _manifest(run_dir, step)["meta"]


def restore(run_dir: Path, step: int, like: Any, *, partial: bool = False) -> tuple[Any, dict[str, Any]]:
    """Read a checkpoint: (arrays, meta), the arrays bitwise those that were saved, in the structure of `like`.

    like: a pytree with the saved leaves. A jax.Array, or a jax.ShapeDtypeStruct with a sharding, says where a leaf goes
    (any mesh, also another than it was saved from); a numpy array, or a ShapeDtypeStruct without sharding, gives numpy.
    partial: `like` may have some of the leaves only; the others are not read.
    Raises CheckpointError when there is no such checkpoint, when leaves are missing, left over or of another dtype or
    shape (naming them), or when what was read is not what was saved.
    """
    manifest = _manifest(run_dir, step)
    path = run_dir / FOLDER / str(step)
    wanted = _named_leaves(like)
    if partial:
        manifest["leaves"] = {name: form for name, form in manifest["leaves"].items() if name in wanted}
    _check_matches(path, manifest["leaves"], wanted)
    restore_args = {name: _restore_args(leaf) for name, leaf in wanted.items()}
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(
                (path / "arrays").absolute(),
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(wanted, 0), restore_args=restore_args, partial_restore=partial
                ),
            )
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); restore it from a copy or resume an earlier one"
        ) from error
    for (name, (_, _, digest)), actual in zip(
        manifest["leaves"].items(), _digests(found, manifest["leaves"]), strict=True
    ):
        if actual != digest:
            raise CheckpointError(
                f"{path}: leaf {name!r} is not what was saved (sha256 {actual[:16]}, expected {digest[:16]}); the file "
                f"is damaged: restore it from a copy or resume an earlier checkpoint"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted]), manifest["meta"]


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaf path -> leaf, in pytree order."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if not named or len(named) != len(pairs):
        raise CheckpointError(
            f"expected a pytree whose leaves have distinct paths, got {len(pairs)} leaves under {len(named)} paths"
        )
    return named


def _form(leaf: Any) -> tuple[str, list[int]]:
    """(dtype name, shape)."""
    return str(leaf.dtype), list(leaf.shape)


def _check_saveable(leaves: Mapping[str, Any]) -> None:
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise CheckpointError(
                f"leaf {name!r}: expected an array, got {type(leaf).__name__}; put plain values into meta, not arrays"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.dtype.hasobject:
            raise CheckpointError(
                f"leaf {name!r}: dtype {leaf.dtype} is not stored; keys go through jax.random.key_data"
            )
        if leaf.size == 0:
            raise CheckpointError(f"leaf {name!r}: shape {list(leaf.shape)} has no elements; leave it out of the tree")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise CheckpointError(
                f"leaf {name!r} has shards in other processes ({leaf.sharding}); gather it to one process before saving"
            )


def _check_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` as JSON gives it back. Raises CheckpointError for what JSON would change (tuples, integer keys, NaN)."""
    for key, value in meta.items():
        try:
            same = isinstance(key, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise CheckpointError(
                f"meta[{key!r}]: expected a value that JSON keeps (str, bool, int, finite float, list, dict with str "
                f"keys, None), got {type(value).__name__} {value!r:.80}"
            )
    return dict(meta)


def _manifest(run_dir: Path, step: int) -> dict[str, Any]:
    path = run_dir / FOLDER / str(step)
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        found = manifest["format"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a checkpoint; {run_dir} has {steps(run_dir) or 'none'}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST} is damaged ({error}); resume an earlier checkpoint") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{path}: expected checkpoint format {FORMAT}, got {found!r}; resume it with its own version"
        )
    return manifest


def _check_matches(path: Path, saved: Mapping[str, list], wanted: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the wanted leaves, with their dtypes and shapes."""
    for kind, names in (("lacks", wanted.keys() - saved.keys()), ("also has", saved.keys() - wanted.keys())):
        if names:
            some = ", ".join(repr(n) for n in sorted(names)[:3])
            raise CheckpointError(
                f"{path} {kind} {len(names)} leaves: {some}{', ...' if len(names) > 3 else ''}. It was saved from "
                f"another model, adapter or optimizer; resume with the recipe it was saved under"
            )
    for name, leaf in wanted.items():
        (dtype, shape), (have_dtype, have_shape) = _form(leaf), saved[name][:2]
        if (dtype, shape) != (have_dtype, have_shape):
            raise CheckpointError(
                f"{path}: leaf {name!r}: expected {dtype}{shape}, the checkpoint has {have_dtype}{have_shape}. It was "
                f"saved from another model, adapter or optimizer; resume with the recipe it was saved under"
            )


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding is not None:
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)


def _digests(leaves: Mapping[str, Any], order: Mapping[str, Any] | None = None) -> list[str]:
    """sha256 (hex) of each leaf's bytes in row-major order: the same however the leaf is laid out over devices."""
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        return list(pool.map(lambda name: _digest(leaves[name]), order or leaves))


def _digest(leaf: Any) -> str:
    host = np.ascontiguousarray(leaf)
    return hashlib.sha256(host.reshape(-1).view(np.uint8).data).hexdigest()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax narrates on absl's logger; keep its errors only, and only while it works for us."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
