"""A run that leaves every published version in a folder, and a reader that knows nothing of lockstep."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import load_config
from lockstep.errors import ConfigError, SyncError
from lockstep.metrics import read_jsonl
from lockstep.sync.formats import hf_map
from lockstep.sync.mapping import materialise
from lockstep.sync.weight_files import versions

ROOT = Path(__file__).parents[3]
APART = "--cluster={actor = {fsdp = 2}, rollout = {fsdp = 2}}"
SHORT = ("--run.steps=3", "--run.checkpoint_every=1", "--sync.folder=weights")
BF16 = "--model.dtype=bfloat16"
READ = """
import sys
import numpy
from pathlib import Path
from follow import follow
version, digest, leaves = next(follow(Path(sys.argv[1])))
assert not {"jax", "lockstep"} & set(sys.modules)
numpy.savez(sys.argv[2], version=version, digest=digest, **leaves)
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader of the documentation, as a file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transports.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def follow(" in block]
    folder = tmp_path_factory.mktemp("reader")
    (folder / "follow.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def follow(reader) -> dict[str, Any]:
    """Its functions."""
    names: dict[str, Any] = {"__name__": "follow"}
    exec(compile((reader / "follow.py").read_text(), "follow.py", "exec"), names)
    return names


def current(root: Path) -> Path:
    return root / json.loads((root / "CURRENT").read_text())["folder"]


def assert_holds(found: tuple[int, str, dict[str, np.ndarray]], loop: Any, dtype: str, hf: bool = False) -> None:
    """What was read is what the trainer has, in the sampler's type and the format's names."""
    version, digest, leaves = found
    assert (version, digest) == (loop.counters.version, loop.cluster.sync.published.digest)
    trained = {path: np.asarray(leaf) for path, leaf in loop.cluster.trainer.trainable.items()}
    wanted = {path: leaf.astype(dtype) for path, leaf in trained.items()}
    if hf:
        mapping = hf_map(loop.cluster.spec, "float32", to=dtype)
        wanted = {path: materialise(target, trained) for path, target in mapping.targets.items()}
    assert leaves.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert leaves[path].shape == leaf.shape and leaves[path].tobytes() == leaf.tobytes(), path


DELTAS = (
    "--optim.lr=1e-5", "--sync.folder_delta=true", "--sync.folder_format=hf", "--sync.on_failure=evict",
    "--sync.folder_keep=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("adapter, colocated", ()),
        pytest.param("everything, deltas, hf", ("--lora=none", BF16, *DELTAS), marks=pytest.mark.slow),
        pytest.param("everything, apart, deltas, hf", (APART, "--lora=none", BF16, *DELTAS), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_published_version_can_be_followed(name, more, kit, opened, follow, reader, tmp_path):
    config = kit.config(tmp_path, *SHORT, *more)
    root, held = config.run.path / "weights", None
    hf, delta = config.sync.folder_format == "hf", config.sync.folder_delta
    with opened(config) as loop:
        loop.start()
        for step in range(3):
            if step:
                loop.step()
            held = follow["read"](current(root), held)
            assert_holds(held, loop, config.model.dtype, hf)
            # From nothing, whatever is a delta of what:
            assert_holds(follow["read"](current(root)), loop, config.model.dtype, hf)
        out = tmp_path / "read.npz"
        subprocess.run([sys.executable, "-c", READ, str(root), str(out)], cwd=reader, check=True, timeout=60)
        with np.load(out) as read:
            leaves = {name: read[name] for name in read.files if name not in ("version", "digest")}
            assert_holds((int(read["version"]), str(read["digest"]), leaves), loop, config.model.dtype, hf)
    receipts = read_jsonl(config.run.path / "receipts.jsonl").records
    assert [r["version"] for r in receipts] == [0, 1, 2]
    for receipt in receipts:
        stored = receipt["stored"]["folder"]
        manifest = json.loads((root / "v000002" / "manifest.json").read_text())
        apart = "apart" in name
        assert receipt["same_buffers"] == (not apart) and receipt["replicas"] == ["rollout"]
        assert receipt["transport"] == "local+files" and (receipt["bytes_moved"] > 0) == apart
        assert stored["kind"] == ("delta" if delta and receipt["version"] else "full"), stored["why"]
        assert receipt["density"] == stored["density"] and (stored["density"] is None) == (not stored["base"])
        if stored["kind"] == "delta":
            assert 0 < stored["density"] < 1 and stored["bytes"] < stored["full_bytes"]
            assert stored["why"].startswith("delta: ") and stored["base"].startswith(f"v{receipt['version'] - 1}:")
    assert stored["bytes"] == sum(manifest["files"].values()) if stored["kind"] == "full" else manifest["bytes"]
    assert versions(root) == ([0, 1, 2] if delta else [1, 2])


def test_a_resumed_run_goes_on_in_its_folder(kit, train, follow, tmp_path):
    path = train(kit.config(tmp_path, *SHORT, "--sync.folder_delta=true"))
    root = path / "weights"
    before = {p.parent.name: p.stat().st_mtime_ns for p in root.glob("v*/manifest.json")}
    version, digest, leaves = follow["read"](current(root))
    assert version == 3
    train(load_config(path / "recipe.toml", ["--run.steps=4"]), resume=path)
    assert before.keys() >= {"v000003"}
    assert (root / "v000003" / "manifest.json").stat().st_mtime_ns == before["v000003"]  # not written again
    assert follow["read"](current(root))[0] == 4
    assert follow["read"](root / "v000003")[1] == digest
    held = follow["read"](root / "v000003")
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(held[2][name], leaf)


def test_a_folder_that_fails_is_a_replica_that_fails(kit, opened, follow, tmp_path):
    """abort: nothing is published, the old version goes on; evict: the run goes on without the folder."""
    for mode in ("abort", "evict"):
        config = kit.config(tmp_path / mode, *SHORT, "--sync.folder_delta=true", f"--sync.on_failure={mode}")
        root = config.run.path / "weights"
        with opened(config) as loop:
            loop.start()
            good, sync = current(root), loop.cluster.sync
            root.joinpath("v000001").write_text("in the way")
            if mode == "abort":
                with pytest.raises(SyncError, match=r"replica 'folder': .*v000001"):
                    loop.step()
                assert loop.cluster.replica.active == sync.published and sync.published.number == 0
            else:
                loop.step()
                assert loop.cluster.replica.active == sync.published and sync.published.number == 1
                assert "v000001" in sync.publisher.evicted["folder"]
            assert current(root) == good and versions(root) == [0]
        if mode == "evict":
            assert follow["read"](good)[0] == 0
            assert read_jsonl(config.run.path / "receipts.jsonl").records[-1]["stored"] == {}


def test_a_folder_comes_back_whole_and_goes_on_as_deltas(kit, opened, follow, tmp_path):
    config = kit.config(tmp_path, *SHORT, "--sync.folder_delta=true", "--sync.on_failure=evict", "--run.steps=4")
    root = config.run.path / "weights"
    with opened(config) as loop:
        loop.start()
        route = loop.cluster.sync._routes["folder"]
        blocked = root / "v000001"
        blocked.write_text("in the way")
        loop.step()
        blocked.unlink()
        loop.cluster.sync.admit(route)
        for _ in range(2):
            loop.step()
        assert_holds(follow["read"](current(root)), loop, config.model.dtype)
    whys = [r["stored"].get("folder", {}).get("why") for r in read_jsonl(config.run.path / "receipts.jsonl").records]
    assert whys[:3] == ["full: nothing was published before", None, "full: the receiver may have lost what it had"]
    assert whys[3].startswith(("delta: ", "full: 100.00%"))  # whichever is less


def test_settings_that_do_nothing_or_cannot_be(kit, tmp_path):
    with pytest.raises(ConfigError, match=r"`sync\.folder_delta` = true has no effect without `sync.folder`"):
        kit.config(tmp_path, "--sync.folder_delta=true")
    with pytest.raises(ConfigError, match=r'`sync\.folder_format` = "hf" with `\[lora\]`'):
        kit.config(tmp_path, "--sync.folder=weights", "--sync.folder_format=hf")
