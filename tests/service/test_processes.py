"""Replicas in processes of their own: real engines, real weights, real kills."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.errors import ConfigError, ServiceError, SyncError
from lockstep.models.hf import load_folder, save_folder
from lockstep.serve.folder import PREFIX, SocketFolder
from lockstep.serve.process import ProcessWorker
from lockstep.serve.relay import RelayTransport
from lockstep.serve.server import Server
from lockstep.serve.spec import ServeSpec
from lockstep.service.blocking import run_all, score
from lockstep.service.controls import Source
from lockstep.service.requests import Ended, Lost, RolloutRequest, Started, Tokens
from lockstep.sync.choice import TransportName, Way
from lockstep.sync.remote import RemoteReplica
from lockstep.sync.shared_memory import SharedMemoryTransport
from lockstep.sync.sync import WeightSync
from lockstep.types import Prompt, SamplingParams

TOKEN = "a secret of a test, long enough"


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The tiny model's weights, each version a little changed."""
    root = tmp_path_factory.mktemp("versions")
    spec, params = load_folder(tiny_folder)
    for number in (1, 2, 3):
        changed = {k: v * np.float32(1 + number / 50) for k, v in params.items()}
        save_folder(root / f"v{number}", spec, changed, tokenizer_files_from=tiny_folder)
    return root


@pytest.fixture(scope="module")
def server(tiny_folder: Path, weights_dir: Path):
    said: list[str] = []
    with Server(
        ServeSpec(model=str(tiny_folder), slots=8, max_positions=64),
        replicas=2,
        weights_dir=weights_dir,
        sync_token=TOKEN,
        say=said.append,
    ) as made:
        made.said = said
        yield made


numbers = iter(range(10**6))


def request(tokens: int = 8, samples: int = 2, **more) -> RolloutRequest:
    number = next(numbers)
    rng = np.random.default_rng(number)
    ids = tuple(map(int, rng.integers(3, 250, 7)))
    seeds = tuple(map(int, rng.integers(0, 2**63, samples)))
    return RolloutRequest(Prompt(f"p{number}", "", ids), seeds, SamplingParams(1.0, tokens, frozenset()), **more)


def until(holds, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def test_requests_run_in_both_processes_and_are_scored_to_the_bit(server: Server) -> None:
    asked = [request() for _ in range(6)]
    ends = run_all(server.service, asked)
    assert {e.outcome for e in ends} == {"finished"} and {e.policy for e in ends} == {server.policy}
    assert len({r.name for r in server.service.status().replicas if r.engine.tokens}) == 2
    sequences = [
        [*a.prompt.ids, *t.completion_ids.tolist()] for a, e in zip(asked, ends, strict=True) for t in e.trajectories
    ]
    scored = score(server.service, sequences, 1.0)
    recorded = [t for e in ends for t in e.trajectories]
    for t, (policy, logprobs) in zip(recorded, scored, strict=True):
        assert policy == server.policy
        assert np.asarray(logprobs[7:], np.float32).tobytes() == t.logprobs.tobytes()


def test_one_token_has_no_probability_but_an_answer(server: Server) -> None:
    ((policy, logprobs),) = score(server.service, [[5]], 1.0)
    assert policy == server.policy and len(logprobs) == 1 and np.isnan(logprobs[0])


def test_a_version_is_staged_from_a_folder_and_committed(server: Server) -> None:
    before = run_all(server.service, [request()])[0].policy
    staged = server.stage(Source("files", "v1"), before.number + 1)
    assert {r.staged.number for r in server.service.status().replicas} == {before.number + 1}
    asked = request()
    assert run_all(server.service, [asked])[0].policy == before, "what is staged is not served"
    done = server.commit(before.number + 1)
    assert done["digest"] == staged["digest"] and sorted(done["replicas"]) == ["rollout-0", "rollout-1"]
    after = run_all(server.service, [request()])[0].policy
    assert (after.number, after.digest) == (before.number + 1, staged["digest"])


def test_a_staged_version_can_be_aborted(server: Server) -> None:
    before = server.service.status().published
    server.stage(Source("files", "v2"), before.number + 1)
    with pytest.raises(SyncError, match="staged already"):
        server.stage(Source("files", "v3"), before.number + 2)
    with pytest.raises(SyncError, match=f"version {before.number + 5} is not staged"):
        server.commit(before.number + 5)
    server.abort_version(before.number + 1)
    assert {r.staged for r in server.service.status().replicas} == {None}
    assert run_all(server.service, [request()])[0].policy == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("files", "../elsewhere"), "outside"),
        (Source("files", "/etc"), "outside"),
        (Source("files", "nothing-here"), "'nothing-here' is no folder in --weights-dir"),
        (Source("shared_memory", "../../etc/passwd"), "outside"),
        (Source("shared_memory", "no-such-segment"), "No such file"),
        (Source("transfer", "127.0.0.1:1", TOKEN, "0" * 32), "cannot reach the offer at 127.0.0.1:1"),
        (Source("transfer", "10.1.2.3:80", TOKEN, "0" * 32), "--offers-from"),
    ],
)
def test_what_cannot_be_staged_is_said(server: Server, source: Source, message: str) -> None:
    with pytest.raises(SyncError, match=message):
        server.stage(source, server.service.status().published.number + 1)


OFFERS = """
import sys
from lockstep.models.hf import load_folder
from lockstep.service.offers import offer
_, params = load_folder(sys.argv[1])
with offer(params) as source:
    print(source.place, source.token, source.digest, flush=True)
    sys.stdin.read()
"""


def test_a_version_is_staged_from_another_process(server: Server, weights_dir: Path) -> None:
    number = server.service.status().published.number + 1
    words = [sys.executable, "-c", OFFERS, str(weights_dir / "v3")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        place, token, digest = process.stdout.readline().split()
        staged = server.stage(Source("transfer", place, token, digest), number)
        process.stdin.close()  # the service has it
    assert process.returncode == 0
    server.abort_version(number)
    assert server.stage(Source("files", "v3"), number)["digest"] == staged["digest"]
    server.commit(number)
    assert run_all(server.service, [request()])[0].policy.digest == staged["digest"]


@pytest.mark.parametrize("transport", [pytest.param(t, marks=pytest.mark.slow) for t in ("transfer", "files")])
def test_weights_go_the_way_that_is_chosen(
    tiny_folder: Path, weights_dir: Path, tmp_path: Path, transport: TransportName
) -> None:
    """From the front, and from a trainer through it; another way is refused, and what was served stays."""
    folder = tmp_path if transport == "files" else None
    spec = ServeSpec(model=str(tiny_folder), slots=8, max_positions=64)
    with Server(spec, weights_dir=weights_dir, sync_token=TOKEN, transport=transport, transport_dir=folder) as server:
        segments = set(Path("/dev/shm").glob("lockstep-front_*"))
        server.stage(Source("files", "v1"), 1)
        server.commit(1)
        (status,) = server.service.status().replicas
        assert status.active.number == 1 and status.sync_transport == transport
        assert set(Path("/dev/shm").glob("lockstep-front_*")) <= segments, "nothing went through shared memory"
        _, params = load_folder(weights_dir / "v2")
        tree = {path: jax.device_put(params[path], jax.devices()[0]) for path in server.served.trains}
        other = RemoteReplica(status.name, status.sync_address, TOKEN, SharedMemoryTransport("another_way"))
        with other as remote, pytest.raises(SyncError, match=f"receives over '{transport}'"):
            WeightSync(server.served.trains, [remote.route()], base={}, deadline_s=60).push(2, tree)
        own = Way(transport, status.sync_folder).make("trainer")
        with RemoteReplica(status.name, status.sync_address, TOKEN, own) as remote:
            receipt = WeightSync(server.served.trains, [remote.route()], base={}, deadline_s=60).push(2, tree)
        assert run_all(server.service, [request()])[0].policy == receipt.policy
        assert (folder is None) or (tmp_path / status.name / "v000002" / "manifest.json").is_file()


def test_rounds_of_the_front_s_own_version_are_not_told_to_a_trainer() -> None:
    """Nor a trainer's to the front's transport: one waits for the other to be staged, and each would wait for ever."""

    class Own:
        name = "own"

        def __init__(self) -> None:
            self.heard: list[tuple[int, int]] = []

        def send(self, *_: object) -> None: ...

        def release(self, *_: object) -> None: ...

        def arrived(self, *what: int) -> None:
            self.heard.append(what)

    own, told = Own(), []
    relay = RelayTransport(own)
    relay.on_round = lambda *what: told.append(what)
    relay.send(4, None, {}, {}, None)
    for version in (4, 5):
        relay.arrived(version, 0)
    assert (own.heard, told) == ([(4, 0)], [(5, 0)])
    relay.release(4, True)
    relay.on_round = None
    relay.arrived(4, 1)
    assert (own.heard, told) == ([(4, 0)], [(5, 0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "files"}, "needs --transport-dir"),
        ({"transport_dir": Path(".")}, "no effect"),
        ({"transport": "files", "transport_dir": Path("no/such/folder")}, "is not a folder"),
        ({"sync_host": "10.0.0.1"}, "shared memory does not reach"),
        ({"sync_host": "0.0.0.0", "transport": "transfer"}, "no address that a trainer could be told"),
        ({"offers_from": ["10.0.0.1/8"]}, "no host to allow"),
    ],
)
def test_options_that_do_not_go_together_are_said(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Server(ServeSpec(model="never loaded"), **options)


def test_a_version_whose_files_are_links_to_outside_is_not_read(
    server: Server, weights_dir: Path, tiny_folder: Path
) -> None:
    for name, make in (
        ("linked", lambda path: path.symlink_to(tiny_folder / "model.safetensors")),
        ("endless", lambda path: os.mkfifo(path)),
    ):
        shutil.copytree(tiny_folder, weights_dir / name, ignore=shutil.ignore_patterns("model.safetensors"))
        make(weights_dir / name / "model.safetensors")
        with pytest.raises(SyncError, match=r"'model\.safetensors' of the version's folder"):
            server.stage(Source("files", name), server.service.status().published.number + 1)


def test_of_a_commit_and_an_abort_at_once_one_counts(server: Server) -> None:
    for turn in range(6):
        number = server.service.status().published.number + 1
        server.stage(Source("files", f"v{turn % 3 + 1}"), number)
        start, done = threading.Barrier(3), dict[str, int]()

        def carry_out(what: str, call, number: int = number, start=start, done=done) -> None:
            start.wait()
            try:
                call(number)
            except SyncError:
                return
            done[what] = number

        verbs = {"commit": server.commit, "abort": server.abort_version, "again": server.commit}
        threads = [threading.Thread(target=carry_out, args=verb) for verb in verbs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (said,) = done
        assert (server.service.status().published.number == number) == (said != "abort")


def test_a_trainer_syncs_through_the_front(server: Server, weights_dir: Path) -> None:
    """Its weights go straight to the replicas' processes; when they are taken over is the front's to say."""
    status = server.service.status()
    leaves = server.served.trains
    _, params = load_folder(weights_dir / "v3")
    tree = {path: jax.device_put(params[path], jax.devices()[0]) for path in leaves}
    routes = [
        RemoteReplica(r.name, r.sync_address, TOKEN, SharedMemoryTransport(f"trainer{i}")).route()
        for i, r in enumerate(status.replicas)
    ]
    sync = WeightSync(leaves, routes, base={}, deadline_s=60)
    heard, asked = [], request(40, stream=True)
    server.service.submit(asked, heard.append)
    receipt = sync.push(status.published.number + 1, tree)
    until(lambda: isinstance(heard[-1], Ended))
    assert heard[-1].policy == status.published, "it was drained"
    assert run_all(server.service, [request()])[0].policy == receipt.policy
    for route in routes:
        route.replica.close()


def test_a_killed_replica_s_requests_go_on_elsewhere_and_it_comes_back(server: Server, weights_dir: Path) -> None:
    number = server.service.status().published.number + 1
    server.stage(Source("files", "v1"), number)
    server.commit(number)
    policy = server.service.status().published
    asked = [request(50, 1, stream=True) for _ in range(6)]
    heard: dict[str, list] = {a.id: [] for a in asked}
    for a in asked:
        server.service.submit(a, heard[a.id].append)
    until(lambda: all(any(isinstance(e, Tokens) for e in heard[a.id]) for a in asked))
    victim = next(e.replica for e in heard[asked[0].id] if isinstance(e, Started))
    os.kill(server._replicas[victim].worker.pid, signal.SIGKILL)
    until(lambda: all(isinstance(h[-1], Ended) for h in heard.values()))
    quiet = run_all(server.service, [RolloutRequest(a.prompt, a.seeds, a.params) for a in asked])
    for a, alone in zip(asked, quiet, strict=True):
        end = heard[a.id][-1]
        assert (end.outcome, end.policy) == ("finished", policy)
        assert end.trajectories[0].logprobs.tobytes() == alone.trajectories[0].logprobs.tobytes()
        shown = [i for e in heard[a.id] if isinstance(e, Tokens) for i in e.ids]
        assert shown == end.trajectories[0].completion_ids.tolist() == alone.trajectories[0].completion_ids.tolist()
    assert server.service.status().redispatched
    until(lambda: {(r.alive, r.active) for r in server.service.status().replicas} == {(True, policy)})
    until(lambda: any(f"{victim} is back, serving {policy}" in line for line in server.said))


@pytest.mark.parametrize("staged_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_replica_that_comes_back_between_staging_and_commit_serves_what_was_committed(
    server: Server, staged_first: bool
) -> None:
    """It holds nothing that it could commit: it is brought to the new version all the same."""
    number = server.service.status().published.number + 1
    victim = server._replicas["rollout-1"]

    def alive() -> bool:
        return next(r.alive for r in server.service.status().replicas if r.name == "rollout-1")

    if staged_first:
        server.stage(Source("files", "v2"), number)
    os.kill(victim.worker.pid, signal.SIGKILL)
    until(lambda: not alive())
    if not staged_first:
        server.stage(Source("files", "v2"), number)
    until(lambda: all(r.active is not None for r in server.service.status().replicas))
    server.commit(number)
    status = server.service.status()
    assert {(r.active.number, r.accepting) for r in status.replicas} == {(number, True)}


def test_a_replica_that_cannot_be_brought_to_what_is_served_is_started_once_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the process that could not be is ended: none is left behind."""
    one, catch_up, pids = server._replicas["rollout-0"], server.versions.catch_up, []

    def fail_once(route):
        pids.append(one.worker.pid)
        if len(pids) == 1:
            raise SyncError("sync: as the test wants it")
        return catch_up(route)

    monkeypatch.setattr(server.versions, "catch_up", fail_once)
    os.kill(one.worker.pid, signal.SIGKILL)
    published = server.service.status().published
    until(lambda: len(pids) == 2)
    until(lambda: {(r.alive, r.active) for r in server.service.status().replicas} == {(True, published)})
    assert pids[0] != pids[1] == one.worker.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_trainer_s_version_that_is_lost_is_not_replaced_by_an_older_one(server: Server) -> None:
    """rollout-1 has the server's own version, rollout-0 has the trainer's and dies. It comes back with nothing; the
    server serves nothing until somebody publishes."""
    own = server.service.status().published
    address = next(r.sync_address for r in server.service.status().replicas if r.name == "rollout-0")
    first = server.served.first_weights()
    tree = {path: jax.device_put(a * np.float32(1.5), jax.devices()[0]) for path, a in first.items()}
    with RemoteReplica("rollout-0", address, TOKEN, SharedMemoryTransport("one_trainer")) as remote:
        sync = WeightSync(server.served.trains, [remote.route()], base={}, deadline_s=60)
        policy = sync.push(own.number + 1, tree).policy
    os.kill(server._replicas["rollout-0"].worker.pid, signal.SIGKILL)
    until(lambda: server.service.status().lost == policy)
    with pytest.raises(ServiceError, match=f"{policy}, which was served last, is lost"):
        server.service.submit(request(), print)
    until(lambda: any("rollout-0 is back; the next version comes to it" in line for line in server.said))
    serving = {r.name: r.active for r in server.service.status().replicas}
    assert serving == {"rollout-0": None, "rollout-1": own}
    with pytest.raises(SyncError, match=f"out of order; {policy} was published last"):
        server.stage(Source("files", "v3"), policy.number)
    server.stage(Source("files", "v3"), policy.number + 1)
    server.commit(policy.number + 1)
    assert server.service.status().lost is None
    assert run_all(server.service, [request()])[0].policy.number == policy.number + 1


def test_a_folder_of_a_killed_server_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = SocketFolder()
    killed, new = tmp_path / f"{PREFIX}killed", tmp_path / f"{PREFIX}new"
    for folder in (killed, new):
        folder.mkdir()
    (killed / "lock").touch()
    (killed / "rollout-0.sync").touch()
    other = SocketFolder()
    assert sorted(tmp_path.iterdir()) == sorted([live.path, other.path, new])
    for folder in (live, other):
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == [new]


def test_a_model_that_is_not_there_is_said() -> None:
    with pytest.raises(Exception, match="no-such-model"):
        Server(ServeSpec(model="no-such-model"))


@pytest.mark.slow
def test_a_replica_is_warmed_up_before_it_takes_weights(tiny_folder: Path) -> None:
    said: list[str] = []
    with Server(ServeSpec(model=str(tiny_folder), slots=2, max_positions=32, warm_up=True), say=said.append) as server:
        assert any("rollout-0: warm-up:" in line for line in said)
        (end,) = run_all(server.service, [request()])
        status = server.service.status()
    assert end.policy.number == 0 and not status.retired, "the blank weights are no version"


def test_a_replica_that_cannot_be_set_up_says_why(tiny_folder: Path) -> None:
    with pytest.raises(ServiceError, match=r"rollout-0 cannot be set up.*decode_steps"):
        Server(ServeSpec(model=str(tiny_folder), slots=8, max_positions=64, decode_steps=0))
    assert threading.active_count() < 50


def test_a_loss_that_both_of_its_threads_see_is_told_once(tiny_folder: Path, tmp_path: Path) -> None:
    """One of them reads and one writes; had each to wait for the other's end, it would be told late, and twice."""
    worker = ProcessWorker("r", ServeSpec(model=str(tiny_folder), slots=2, max_positions=64), tmp_path)
    worker.ready()
    heard, over = [], threading.Event()
    worker.start(heard.append)

    def send() -> None:
        while not over.wait(0.0002):
            worker.submit(request())

    sender = threading.Thread(target=send)
    sender.start()
    until(lambda: heard)
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: any(isinstance(e, Lost) for e in heard))
    over.set()
    sender.join()
    for thread in worker._threads:
        thread.join()
    assert sum(isinstance(e, Lost) for e in heard) == 1
