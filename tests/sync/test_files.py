"""Folders of weights: what a reader takes, what it refuses, what is removed and when."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from lockstep.errors import SyncError
from lockstep.sync import weight_files
from lockstep.sync.foreign import WeightsError
from lockstep.sync.mapping import Target, whole
from lockstep.sync.weight_files import (
    MANIFEST,
    VersionFolder,
    folder_of,
    prune,
    remove,
    settle,
    versions,
    write_version,
)

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "bool", "float64")


def leaves(seed: int = 0) -> list[tuple[Target, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for at, dtype in enumerate(DTYPES):
        for name, shape in ((f"m{at}", (7, 5)), (f"v{at}", (11,)), (f"s{at}", ()), (f"e{at}", (0, 4))):
            path = f"{name}.{dtype}"
            found.append((whole(path, shape, dtype), rng.integers(0, 100, shape).astype(np.dtype(dtype))))
    return found


def write(root: Path, version: int, seed: int = 0, max_file_bytes: int = 300) -> dict:
    made = leaves(seed)
    return write_version(root, version, [t for t, _ in made], iter(made), {"plan": "p", "mapping": "m"}, max_file_bytes)


def whole_region(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return (*(slice(0, size) for size in shape), ...)


def read_all(folder: Path) -> None:
    with VersionFolder(folder) as opened:
        for path, leaf in opened.manifest["leaves"].items():
            opened.read(path, whole_region(leaf["shape"]))


def test_files_are_safetensors_of_bounded_size_and_say_all(tmp_path):
    manifest = write(tmp_path, 12)
    folder = tmp_path / "v000012"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and [path.name for path in files] == sorted(manifest["files"])
    seen = set()
    for path in files:
        with safe_open(path, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                seen.add(name)
                target, array = next(item for item in leaves() if item[0].path == name)
                if target.dtype.startswith("float8"):
                    continue  # numpy's own names only, in this library
                got = opened.get_slice(name) if array.ndim else None
                if array.ndim == 2 and array.size:
                    np.testing.assert_array_equal(got[2:5], array[2:5])
                np.testing.assert_array_equal(opened.get_tensor(name), array)
    assert seen == {target.path for target, _ in leaves()}
    assert manifest["version"] == 12 and manifest["bytes"] == sum(a.nbytes for _, a in leaves())
    assert json.loads((folder / "manifest.json").read_text()) == manifest


def test_a_leaf_larger_than_a_file_has_one_alone(tmp_path):
    manifest = write(tmp_path, 1, max_file_bytes=50)
    holders = [leaf["file"] for leaf in manifest["leaves"].values() if leaf["bytes"] > 50]
    assert holders and len(set(holders)) == len(holders)


@pytest.mark.parametrize("block_bytes", [1, 16, 1000])
def test_any_region_reads_back_whatever_the_blocks(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", block_bytes)
    write(tmp_path, 1)
    with VersionFolder(tmp_path / "v000001") as opened:
        for target, array in leaves():
            regions = [whole_region(target.shape)]
            if array.ndim == 2 and array.size:
                regions += [
                    (slice(2, 5, 1), slice(1, 4, 1)),
                    (slice(1, 7, 3), slice(0, 5, 2)),
                    (slice(6, 7), slice(4, 5)),
                ]
            for region in regions:
                np.testing.assert_array_equal(opened.read(target.path, region), array[region])


def test_only_the_rows_that_are_read_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", 20)  # one row of the float32 matrix
    manifest = write(tmp_path, 1)
    leaf = manifest["leaves"]["m0.float32"]
    path = tmp_path / "v000001" / leaf["file"]
    data = bytearray(path.read_bytes())
    data[leaf["offset"] + 20 * 3] ^= 1  # in row 3
    path.write_bytes(data)
    with VersionFolder(tmp_path / "v000001") as opened:
        opened.read("m0.float32", (slice(0, 3), slice(0, 5)))
        opened.read("m0.float32", (slice(4, 7), slice(0, 5)))
        with pytest.raises(WeightsError, match=r"m0\.float32 was altered, in 1 of 7 blocks"):
            opened.read("m0.float32", (slice(2, 5), slice(0, 1)))


def test_every_byte_that_is_flipped_anywhere_is_noticed(tmp_path):
    """Every byte of a small version's data and manifest; padding and headers, which nothing reads, excepted."""
    one = [(whole("w", (5, 3), "float32"), np.arange(15, dtype=np.float32).reshape(5, 3))]
    manifest = write_version(tmp_path, 1, [one[0][0]], iter(one), {"plan": "p", "mapping": "m"}, 1 << 20)
    folder = tmp_path / "v000001"
    data, text = folder / "data-00000.safetensors", folder / "manifest.json"
    start = manifest["leaves"]["w"]["offset"]
    for path, places in ((data, range(start, start + 60)), (text, range(0, text.stat().st_size, 3))):
        good = path.read_bytes()
        for at in places:
            bad = bytearray(good)
            bad[at] ^= 1 << (at % 8)
            path.write_bytes(bad)
            with pytest.raises(WeightsError):
                read_all(folder)
                if json.loads(bad) == manifest:  # another blank between the words
                    raise WeightsError
        path.write_bytes(good)
    read_all(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "is incomplete: it has no manifest"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is no manifest"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is no manifest"),
        (lambda folder: (folder / "extra.bin").write_bytes(b""), "extra.bin has 0 bytes, .* there is no such file"),
        (lambda folder: (folder / "data-00001.safetensors").unlink(), "data-00001.safetensors has no bytes"),
        (lambda folder: (folder / "data-00001.safetensors").write_bytes(b"x" * 1000), "has 1000 bytes, the manifest"),
        (lambda folder: (folder / "data-00000.safetensors").write_bytes(b""), "has 0 bytes, the manifest says"),
        (shutil.rmtree, "is not there"),
    ],
)
def test_a_folder_that_is_not_what_its_manifest_says_is_refused(tmp_path, change, match):
    write(tmp_path, 1)
    change(tmp_path / "v000001")
    with pytest.raises(WeightsError, match=match):
        VersionFolder(tmp_path / "v000001")


def reseal(folder: Path, **changes: object) -> None:
    """A manifest with its own digest right, that says something else."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["digest"]
    weight_files.write_manifest(folder, {**manifest, **changes})


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"offset": 10**9}, "lies at|lies beyond"),
        ({"offset": -1}, "other types"),
        ({"shape": [7, 6]}, "140 bytes are not"),
        ({"shape": ["7", 5]}, "other types"),
        ({"dtype": "object"}, "bytes are not|is not known|wrong"),
        ({"crc32": []}, "0 checksums for 140 bytes"),
        ({"file": "../other"}, "lies beyond the end of"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path, entry, match):
    manifest = write(tmp_path, 1)
    leaves_ = {**manifest["leaves"], "m0.float32": {**manifest["leaves"]["m0.float32"], **entry}}
    reseal(tmp_path / "v000001", leaves=leaves_)
    with pytest.raises(WeightsError, match=match):
        read_all(tmp_path / "v000001")


def test_old_versions_go_by_count_but_never_one_that_is_read(tmp_path):
    for version in (1, 2, 3, 4):
        write(tmp_path, version, version)
    (tmp_path / "v000000").mkdir()  # a writer was killed there
    (tmp_path / "v000009").mkdir()  # and one is writing here
    (tmp_path / "notes.txt").write_text("not ours")
    with VersionFolder(tmp_path / "v000001"):
        assert prune(tmp_path, 2) == [0, 2]
        assert versions(tmp_path) == [1, 3, 4]
    assert prune(tmp_path, 0) == [1, 3]
    assert versions(tmp_path) == [4] and (tmp_path / "v000009").is_dir() and (tmp_path / "notes.txt").exists()
    assert prune(tmp_path, 1) == [] == prune(tmp_path / "none", 1)


def test_a_version_is_replaced_unless_it_is_read(tmp_path):
    write(tmp_path, 1, 0)
    with VersionFolder(tmp_path / "v000001") as opened:
        with pytest.raises(SyncError, match="v000001 is being read, so version 1 cannot be written anew"):
            write(tmp_path, 1, 1)
        opened.read("m0.float32", whole_region((7, 5)))
    manifest = write(tmp_path, 1, 1)
    with VersionFolder(folder_of(tmp_path, 1)) as opened:
        assert opened.manifest == manifest
        np.testing.assert_array_equal(opened.read("m1.bfloat16", whole_region((7, 5))), leaves(1)[4][1])


def test_a_version_that_is_replaced_comes_back_unless_the_new_one_is_published(tmp_path):
    old = write(tmp_path, 1, 0)
    new = write(tmp_path, 1, 1)
    assert versions(tmp_path) == [1] and new != old
    with VersionFolder(folder_of(tmp_path, 1)):
        assert not settle(tmp_path, 1, published=False)  # somebody reads the new one
    assert settle(tmp_path, 1, published=False) and settle(tmp_path, 1, published=True)
    with VersionFolder(folder_of(tmp_path, 1)) as opened:
        assert opened.manifest == old

    made = leaves(1)

    def breaks():
        yield from made[:2]
        raise OSError(28, "No space left on device")

    with pytest.raises(SyncError, match="is the disk full"):
        write_version(tmp_path, 1, [t for t, _ in made], breaks(), {}, 300)
    read_all(folder_of(tmp_path, 1))
    write(tmp_path, 1, 1)
    (folder_of(tmp_path, 1) / MANIFEST).unlink()  # killed while it was written: the old one is what there is
    write(tmp_path, 1, 2)
    assert settle(tmp_path, 1, published=False)
    with VersionFolder(folder_of(tmp_path, 1)) as opened:
        assert opened.manifest == old
    write(tmp_path, 1, 1)
    assert settle(tmp_path, 1, published=True) and [path.name for path in tmp_path.iterdir()] == ["v000001"]
    with VersionFolder(folder_of(tmp_path, 1)) as opened:
        assert opened.manifest == new


def test_what_was_read_stays_when_the_folder_goes(tmp_path):
    write(tmp_path, 1)
    with VersionFolder(tmp_path / "v000001") as opened:
        view = opened.read("m1.bfloat16", whole_region((7, 5)))
    assert remove(tmp_path / "v000001") and not list(tmp_path.iterdir())
    np.testing.assert_array_equal(view, leaves()[4][1])
    assert view.dtype == ml_dtypes.bfloat16


def test_a_writer_that_breaks_leaves_nothing_that_a_reader_takes(tmp_path):
    made = leaves()

    def breaks():
        yield from made[:20]
        raise OSError(28, "No space left on device")

    with pytest.raises(SyncError, match=r"version 3 could not be written to .*No space left.*is the disk full\?"):
        write_version(tmp_path, 3, [t for t, _ in made], breaks(), {}, 300)
    assert versions(tmp_path) == [] and folder_of(tmp_path, 3).is_dir()
    with pytest.raises(WeightsError, match="incomplete"):
        VersionFolder(folder_of(tmp_path, 3))
    write(tmp_path, 3)
    read_all(folder_of(tmp_path, 3))


def test_types_that_safetensors_has_not_are_refused_before_anything_is_written(tmp_path):
    target = whole("w", (2,), "complex64")
    with pytest.raises(SyncError, match="w has type complex64"):
        write_version(tmp_path, 1, [target], iter([(target, np.zeros(2, np.complex64))]), {}, 300)
    assert not list(tmp_path.iterdir())


def test_a_place_where_nothing_can_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match="could not be written"):
        write(tmp_path / "file", 1)
