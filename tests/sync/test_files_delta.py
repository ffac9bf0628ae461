"""Delta folders: smaller where that pays, whole where it does not, applied to their base and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep.errors import SyncError
from lockstep.sync import delta_files
from lockstep.sync.arrays import placed
from lockstep.sync.delta_files import DELTA, DeltaFilesTransport
from lockstep.sync.ends import numbers_from, renumbered
from lockstep.sync.files_transport import FilesTransport
from lockstep.sync.plan import SyncPlan
from lockstep.sync.planner import make_plan
from lockstep.sync.publish import planned_links
from lockstep.sync.transport import Deadline, Staged
from lockstep.sync.weight_files import versions

SHAPES = {"w": (64, 48), "norm": (48,), "scale": ()}


class Pair:
    """A sender and a receiver over one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sender, self.receiver = DeltaFilesTransport(root, keep=3), DeltaFilesTransport(root)
        here, there = (Mesh(np.array(jax.devices()[at : at + 2]), ("a",)) for at in (0, 4))
        self.here = {
            "w": NamedSharding(here, P("a")),
            "norm": NamedSharding(here, P()),
            "scale": NamedSharding(here, P()),
        }
        self.where = {
            "w": NamedSharding(there, P(None, "a")),
            "norm": NamedSharding(there, P()),
            "scale": NamedSharding(there, P()),
        }
        self.numbers = numbers_from(100, self.where.values())
        blank = {path: jax.device_put(np.zeros(shape, np.float32), self.where[path]) for path, shape in SHAPES.items()}
        places = renumbered({path: placed(leaf) for path, leaf in blank.items()}, self.numbers)
        self.plan: SyncPlan = make_plan({path: placed(leaf) for path, leaf in self.weights(0).items()}, places)

    def weights(self, changes: int) -> dict[str, jax.Array]:
        """The same base, with that many elements changed."""
        made = {
            path: np.random.default_rng(0).standard_normal(shape).astype(np.float32) for path, shape in SHAPES.items()
        }
        made["w"].reshape(-1)[:changes] += 1
        return {path: jax.device_put(array, self.here[path]) for path, array in made.items()}

    def send(self, version: int, source: dict[str, jax.Array], published: bool | None = True) -> dict:
        """published: None leaves it open."""
        self.stored = self.sender.send(version, self.plan, source, {}, Deadline.after(30), f"digest{version}").stored
        self.receiver.redeem(version, self.sender.ticket(version))
        manifest = json.loads((self.root / f"v{version:06d}" / "manifest.json").read_text())
        if published is not None:
            self.sender.release(version, published)
        return manifest

    def receive(self, version: int, receiver: FilesTransport | None = None) -> Staged:
        """With the last ticket for it at the pair's own receiver, else by the folder's name alone."""
        receiver = self.receiver if receiver is None else receiver
        return receiver.receive(version, self.plan, self.where, self.numbers, Deadline.after(5))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "weights")


def assert_same(staged: Staged, source: dict[str, jax.Array]) -> None:
    for path, leaf in source.items():
        np.testing.assert_array_equal(staged.tree[path], leaf)


def test_few_changes_are_a_small_folder_that_gives_the_whole_tree(pair):
    first = pair.send(1, pair.weights(0))
    assert first["kind"] == "full" and first["why"] == "full: nothing was published before"
    before = pair.receive(1).tree
    kept = {path: np.array(leaf) for path, leaf in before.items()}
    second = pair.send(2, pair.weights(5))
    assert second["kind"] == "delta" and second["base"] == {"number": 1, "digest": "digest1"}
    assert second["why"].startswith("delta: 0.16% of 3,121 elements changed")
    assert set(second["files"]) == {DELTA} and second["bytes"] < first["bytes"] / 10
    staged = pair.receive(2)
    assert_same(staged, pair.weights(5))
    assert staged.link_bytes == planned_links(pair.plan)
    for path, leaf in before.items():  # what may be being served is not touched, nor shared
        np.testing.assert_array_equal(leaf, kept[path])
        ours = {s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards}
        assert not ours & {s.data.unsafe_buffer_pointer() for s in staged.tree[path].addressable_shards}
    assert pair.send(3, pair.weights(5))["kind"] == "delta"  # nothing changed: smaller still
    assert_same(pair.receive(3), pair.weights(5))


def test_what_does_not_pay_or_does_not_follow_is_written_whole_and_says_why(pair):
    pair.send(1, pair.weights(0))
    rng = np.random.default_rng(9)
    noise = {
        path: jax.device_put(np.asarray(rng.integers(0, 2**32, shape, np.uint32)).view(np.float32), pair.here[path])
        for path, shape in SHAPES.items()
    }
    assert pair.send(2, noise)["why"].startswith("full: 100.00% of 3,121 elements changed")
    assert pair.stored.kind == "full" and pair.stored.density == 1.0 and pair.stored.bytes >= pair.stored.full_bytes
    for version, last in ((4, 2), (3, 4)):
        manifest = pair.send(version, noise)
        assert manifest["kind"] == "full"
        assert manifest["why"] == f"full: version {version} does not follow {last}, the last published"
        assert (pair.stored.density, pair.stored.base, pair.stored.why) == (None, None, manifest["why"])


def test_only_what_was_published_is_a_base(pair):
    """A replica refuses a version, and the next one reaches it all the same."""
    pair.send(1, pair.weights(0))
    pair.receive(1)
    assert pair.send(2, pair.weights(1), published=False)["kind"] == "delta"
    assert sorted(path.name for path in pair.root.iterdir()) == ["v000001"]
    for version in (3, 4):
        manifest = pair.send(version, pair.weights(version))
        why = "full: version 2 was sent and not published"
        assert (manifest["kind"], manifest["why"]) == ("full", why) if version == 3 else manifest["kind"] == "delta"
        assert_same(pair.receive(version), pair.weights(version))
    pair.send(5, pair.weights(5), published=None)
    pair.sender.release(5, False)
    pair.sender.release(5, False)
    assert "version 5 was sent" in pair.send(5, pair.weights(5))["why"]


def test_a_receiver_without_the_base_starts_from_the_last_whole_one(pair):
    for version in (1, 2, 3):
        pair.send(version, pair.weights(version))
    late = DeltaFilesTransport(pair.root)
    assert_same(pair.receive(3, late), pair.weights(3))
    assert pair.send(4, pair.weights(4))["kind"] == "delta"
    assert_same(pair.receive(4, late), pair.weights(4))  # from what it staged
    shutil.rmtree(pair.root / "v000002")
    with pytest.raises(
        SyncError, match="v000003 is a delta from v2:digest2, which was not staged here last and cannot"
    ):
        pair.receive(4, DeltaFilesTransport(pair.root))
    shutil.copytree(pair.root / "v000001", pair.root / "v000002")
    with pytest.raises(SyncError, match=r"v000003 is a delta from v2:digest2, but .*v000002 holds another"):
        pair.receive(4, DeltaFilesTransport(pair.root))


def test_deltas_end_and_what_they_need_stays(pair, monkeypatch):
    monkeypatch.setattr(delta_files, "FULL_EVERY", 3)
    kinds = []
    for version in range(1, 10):
        kinds.append(pair.send(version, pair.weights(version))["kind"])
        whole = version - (version - 1) % 4
        # Three are kept, and all that the oldest of them starts from.
        oldest = max(1, version - 2)
        first = min(oldest - (oldest - 1) % 4, whole)
        assert versions(pair.root) == list(range(first, version + 1))
        assert_same(pair.receive(version, DeltaFilesTransport(pair.root)), pair.weights(version))
    assert kinds == ["full", "delta", "delta", "delta"] * 2 + ["full"]
    pair.send(10, pair.weights(10))
    shutil.rmtree(pair.root / "v000010")
    assert pair.send(11, pair.weights(11))["why"] == "full: the folder of version 10 is gone"


def test_a_version_that_is_there_is_kept_and_verified(pair):
    """A trainer that was started again publishes its checkpoint's version: followers may be reading it."""
    for version in (1, 2):
        pair.send(version, pair.weights(version))
    before = (pair.root / "v000002" / "manifest.json").stat().st_mtime_ns
    pair.sender = DeltaFilesTransport(pair.root, keep=3)
    pair.send(2, pair.weights(2), published=None)
    assert pair.stored.kind == "kept" and pair.stored.bytes == 0
    read = {path: leaf.copy() for path, leaf in pair.sender.read_back(2)}
    pair.sender.release(2, True)
    for path, leaf in pair.weights(2).items():
        np.testing.assert_array_equal(read[path], leaf)
    assert (pair.root / "v000002" / "manifest.json").stat().st_mtime_ns == before
    assert pair.send(3, pair.weights(3))["kind"] == "delta"
    # One that does not verify stays where it is, for it may be what is served, and is written anew the next time.
    pair.sender = DeltaFilesTransport(pair.root, keep=3)
    pair.send(3, pair.weights(3), published=False)
    assert versions(pair.root) == [1, 2, 3] and pair.stored.kind == "kept"
    assert pair.send(3, pair.weights(3))["kind"] == "full" and pair.stored.kind == "full"


def test_a_receiver_without_deltas_says_what_it_needs(pair):
    pair.send(1, pair.weights(0))
    pair.send(2, pair.weights(1))
    with pytest.raises(SyncError, match="holds what changed only; receive it with DeltaFilesTransport"):
        pair.receive(2, FilesTransport(pair.root))


@pytest.mark.parametrize("at", [0, 10, 40, 200, -1])
def test_a_flipped_byte_of_a_delta_is_refused(pair, at):
    pair.send(1, pair.weights(0))
    pair.receive(1)
    pair.send(2, pair.weights(40))
    path = pair.root / "v000002" / DELTA
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(SyncError, match="delta"):
        pair.receive(2)
    data[at] ^= 4
    path.write_bytes(data)
    assert_same(pair.receive(2), pair.weights(40))


def test_another_delta_in_its_place_is_refused(pair):
    for version in (1, 2, 3):
        pair.send(version, pair.weights(version))
        pair.receive(version) if version < 3 else None
    other, path = pair.root / "v000002" / DELTA, pair.root / "v000003" / DELTA
    size = path.stat().st_size
    shutil.copy(other, path)
    assert path.stat().st_size == size  # else the manifest's size tells
    with pytest.raises(SyncError, match="its delta goes from v1:digest1 to v2:digest2"):
        pair.receive(3)


def test_a_base_that_changed_under_the_delta_is_noticed(pair):
    """The number and the digest are right, the content is not: what comes out is held against what was sent."""
    pair.send(1, pair.weights(0))
    staged = pair.receive(1)
    policy, tree = pair.receiver._staged
    pair.receiver._staged = policy, {**tree, "norm": tree["norm"] + 1}
    pair.send(2, pair.weights(3))
    with pytest.raises(SyncError, match="norm does not come out as it was sent"):
        pair.receive(2)
    pair.receiver._staged = policy, staged.tree
    assert_same(pair.receive(2), pair.weights(3))
