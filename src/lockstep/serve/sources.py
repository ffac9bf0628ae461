"""Where versions that are staged by request come from: folders, shared memory, offers of other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from lockstep.errors import ModelError, SyncError
from lockstep.models.families import TensorRef
from lockstep.models.hf import load_folder, name_map
from lockstep.serve.hosts import AllowedHosts
from lockstep.serve.role import Served
from lockstep.service.controls import Source
from lockstep.service.offers import pull
from lockstep.sync import foreign
from lockstep.sync.mapping import Form
from lockstep.sync.weight_files import MANIFEST, VersionFolder

SHARED_MEMORY = Path("/dev/shm")
DTYPES = ("float32", "bfloat16", "float16")  # that a version may come in
_SHOWN = 8  # problems in a message; the rest are counted


class Sources:
    """served: what is served. root: the only folder that versions are read from; None: none. hosts: that offers are
    pulled from."""

    def __init__(self, served: Served, root: Path | None, hosts: AllowedHosts) -> None:
        self._served, self._hosts = served, hosts
        self._root = None if root is None else root.resolve()

    def load(self, source: Source) -> dict[str, np.ndarray]:
        """The trained leaves, in the sampler's type. Raises SyncError or ModelError for a place that may not be read,
        and for what is not a version of what is served: every leaf that is wrong is listed."""
        if source.kind == "transfer":
            return self._pulled(source)
        path = self._confined(source)
        if source.kind == "shared_memory":
            with _said(), foreign.Segment(path) as segment:
                segment.check()
                leaves = segment.manifest["leaves"]
                return self._leaves(_forms(leaves), lambda name: segment.array(name, check=False), path.name)
        self._check_files(path)
        if (path / MANIFEST).is_file():
            return self._version(path)
        if self._served.frozen:
            raise SyncError(
                f"sync: {path.name} holds a whole model, and what is served takes an adapter; stage a version's folder "
                "(of a run's `sync.folder`), a segment of shared memory, or an offer"
            )
        spec, params = load_folder(path, self._served.dtype, check_finite=True)
        if spec != self._served.model.spec:
            raise ModelError(f"{path} holds another model than the one that is served; its config.json differs")
        return params

    def _pulled(self, source: Source) -> dict[str, np.ndarray]:
        where = f"the offer at {source.place}"
        address = self._hosts.address(source.place)
        arrays = pull(source, address, lambda forms: self._check_forms(forms, where))
        return self._leaves({name: (a.shape, a.dtype.name) for name, a in arrays.items()}, arrays.__getitem__, where)

    def _version(self, folder: Path) -> dict[str, np.ndarray]:
        with _said(), VersionFolder(folder) as opened:
            if opened.manifest["kind"] != "full":
                raise SyncError(
                    f"sync: {folder.name} holds what changed since {opened.manifest.get('base')} only; stage a whole "
                    "version, or have the run write whole ones: sync.folder_delta = false"
                )
            leaves = opened.manifest["leaves"]
            return self._leaves(_forms(leaves), lambda name: opened.read(name, (...,)), folder.name)

    # -- where may be read ---------------------------------------------------------------------------------------------

    def _confined(self, source: Source) -> Path:
        root = self._root if source.kind == "files" else SHARED_MEMORY
        if root is None:
            raise SyncError("sync: versions are read from no folder here; start the service with --weights-dir DIR")
        path = (root / source.place).resolve()
        if not path.is_relative_to(root) or path == root:
            raise SyncError(f"sync: {source.place!r} is outside of where versions are read from")
        return path

    def _check_files(self, folder: Path) -> None:
        """A folder inside may still hold links to what is outside, or something that is read for ever."""
        assert self._root is not None
        if not folder.is_dir():
            raise SyncError(f"sync: {folder.name!r} is no folder in --weights-dir; write the version there first")
        for path in folder.iterdir():
            real = path.resolve()
            if not real.is_relative_to(self._root):
                raise SyncError(
                    f"sync: {path.name!r} of the version's folder links to outside of --weights-dir; copy it"
                )
            if not (real.is_file() or real.is_dir()):
                raise SyncError(f"sync: {path.name!r} of the version's folder is no regular file")

    # -- what must be there --------------------------------------------------------------------------------------------

    def _leaves(
        self, forms: Mapping[str, Form], read: Callable[[str], np.ndarray], where: str
    ) -> dict[str, np.ndarray]:
        """By the leaves' own names, or by the Hugging Face names of the model. read: a leaf; its memory is not kept."""
        self._check_forms(forms, where)
        refs = self._refs(forms)
        made: dict[str, np.ndarray] = {}
        for leaf in self._served.trains:
            array = read(leaf) if refs is None else refs[leaf].gather(read)
            if not np.isfinite(np.asarray(array, np.float32)).all():
                raise SyncError(f"sync: {leaf} of {where} holds NaN or infinity")
            made[leaf] = np.array(array, self._served.dtype)
            del array  # a view keeps what it is of from being closed
        return made

    def _check_forms(self, forms: Mapping[str, Form], where: str) -> None:
        refs = self._refs(forms)
        if refs is None:
            wanted = {name: leaf.shape for name, leaf in self._served.trains.items()}
        else:
            wanted = {name: ref.shape for ref in refs.values() for name in ref.names}
        wrong = [f"{name} is missing" for name in wanted if name not in forms]
        for name, (shape, dtype) in forms.items():
            if name not in wanted:
                wrong.append(f"{name} is not a leaf that versions replace")
            elif tuple(shape) != tuple(wanted[name]) or dtype not in DTYPES:
                wrong.append(f"{name} is {dtype}{list(shape)}, expected {list(wanted[name])} of {' or '.join(DTYPES)}")
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise SyncError(
                f"sync: {where} is no version of what is served, in {len(wrong)} leaves: "
                f"{'; '.join(wrong[:_SHOWN])}{more}. Nothing is staged"
            )

    def _refs(self, forms: Mapping[str, Form]) -> dict[str, TensorRef] | None:
        """Leaf -> its Hugging Face tensors, where those are what is there; None: the leaves' own names. An adapter has
        no others."""
        if self._served.frozen or any(name in self._served.trains for name in forms):
            return None
        return name_map(self._served.model.spec)


def _forms(leaves: Mapping[str, Mapping[str, object]]) -> dict[str, Form]:
    """Of a manifest's leaves."""
    return {name: (tuple(leaf["shape"]), str(leaf["dtype"])) for name, leaf in leaves.items()}  # type: ignore[arg-type]


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """What is wrong with a store, as SyncError."""
    try:
        yield
    except foreign.WeightsError as error:
        raise SyncError(f"sync: {error}") from error
