"""The journal: every admission ends once, wherever its writer is cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from fakes import ManualWorker, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_service import World

from lockstep.errors import DataError, ServiceError
from lockstep.service.controls import KeyConflict, Stored
from lockstep.service.journal import COMPACT_BYTES, STOPPED, Journal
from lockstep.service.requests import Ended
from lockstep.types import PolicyVersion

ANSWER = Stored(200, "application/json", (("x-policy", "3"),), b'{"text": "\xc3\xa4"}\x00')


def opened(path: Path, **how) -> Journal:
    return Journal(path, say=lambda line: None, **how)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def once(path: Path) -> dict[str, str]:
    """How each request ended; asserts that none ended twice, or did not."""
    found = records(path)
    admitted = Counter(r["id"] for r in found if r["kind"] == "admitted")
    ends = {r["id"]: r["outcome"] for r in found if r["kind"] == "ended"}
    assert admitted == Counter(r["id"] for r in found if r["kind"] == "ended") == Counter(ends.keys())
    return ends


def test_what_a_killed_server_left_open_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    one = opened(path)
    for name in "abc":
        one.admitted(request(name))
    one.ended("b", Ended("finished", (), "", PolicyVersion(3, "d")))
    one.close()
    two = opened(path)
    assert two.recovered == 2
    assert once(path) == {"a": "failed", "c": "failed"}, "b and its end are not needed any more"
    assert {r["reason"] for r in records(path) if r["kind"] == "ended"} == {STOPPED}
    two.admitted(request("a"))  # the same may be asked again
    two.close()
    assert opened(path).recovered == 1


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["admit", "end", "answer"]), st.integers(0, 4)), min_size=1, max_size=12
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS, st.data())
def test_cut_off_anywhere_every_admission_ends_once(tmp_path: Path, operations, data) -> None:
    path = tmp_path / "journal"
    for file in tmp_path.iterdir():
        file.unlink()
    journal, under_way, answered = opened(path), set(), {}
    for what, number in operations:
        name = f"r{number}"
        if what == "admit" and name not in under_way:
            journal.admitted(request(name))
            under_way.add(name)
        elif what == "end" and name in under_way:
            journal.ended(name, Ended("finished"))
            under_way.remove(name)
        elif what == "answer" and journal.begin(name, "digest") is None:
            journal.keep(name, ANSWER)
    journal.close()
    whole = path.read_bytes()
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    path.write_bytes(cut)
    kept = [json.loads(line) for line in cut.split(b"\n")[:-1]]
    answered = {r["key"] for r in kept if r["kind"] == "answer"}
    after = opened(path)
    open_then = {r["id"] for r in kept if r["kind"] == "admitted"} if kept else set()
    open_now = Counter(r["id"] for r in kept if r["kind"] == "admitted")
    open_now.subtract(r["id"] for r in kept if r["kind"] == "ended")
    assert set(once(path)) == {i for i, count in open_now.items() if count} <= open_then
    for number in range(5):
        found = after.begin(f"r{number}", "digest")
        assert found == (ANSWER if f"r{number}" in answered else None)
    after.close()


def test_keys(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    assert journal.begin("k", "one") is None
    with pytest.raises(KeyConflict, match="under way") as error:
        journal.begin("k", "one")
    assert error.value.under_way
    with pytest.raises(KeyConflict, match="another request"):
        journal.begin("k", "two")
    journal.release("k")
    assert journal.begin("k", "two") is None  # nothing had come of it
    journal.keep("k", ANSWER)
    journal.close()
    again = opened(tmp_path / "journal")
    assert again.begin("k", "two") == ANSWER
    with pytest.raises(KeyConflict, match="another request"):
        again.begin("k", "one")
    again.close()


def test_the_newest_answers_are_kept(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal", answers=3)
    for number in range(5):
        journal.begin(f"k{number}", "d")
        journal.keep(f"k{number}", ANSWER)
    assert [journal.begin(f"k{n}", "d") is not None for n in range(5)] == [False, False, True, True, True]
    journal.close()
    small = opened(tmp_path / "journal", answer_bytes=400)
    assert len(small._answers) == 2
    small.close()


def test_it_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path / "journal")
    monkeypatch.setattr("lockstep.service.journal.COMPACT_BYTES", 4000)
    journal._compact_at = 4000
    journal.admitted(request("stays open"))
    for number in range(500):
        journal.admitted(request(f"r{number}"))
        journal.ended(f"r{number}", Ended("finished"))
        assert journal.path.stat().st_size < 8000
    assert COMPACT_BYTES > 8000
    journal.close()
    assert opened(tmp_path / "journal").recovered == 1


def test_one_process_at_a_time(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    with pytest.raises(ServiceError, match="in use by another process"):
        opened(tmp_path / "journal")
    journal.close()
    opened(tmp_path / "journal").close()
    with pytest.raises(ServiceError, match="folder must exist"):
        opened(tmp_path / "nowhere" / "journal")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: .*damaged"),
        ('{"kind": "ended", "id": "x", "outcome": "finished"}', "line 2: .*was not under way"),
        ('{"kind": "other"}', "line 2: .*kind 'other'"),
        ("[]", "line 2"),
    ],
)
def test_damage_is_an_error_and_a_torn_end_is_not(tmp_path: Path, line: str, message: str) -> None:
    path, said = tmp_path / "journal", []
    journal = opened(path)
    journal.admitted(request("a"))
    journal.close()
    whole = path.read_text()
    path.write_text(whole + line + "\n")
    with pytest.raises(DataError, match=message):
        opened(path)
    path.write_text(whole + line)
    Journal(path, say=said.append).close()
    assert "unfinished line" in said[0]


class Full(Journal):
    """A disk on which so many writes find no room."""

    failures = 0

    def _write(self, line: str) -> None:
        if self.failures:
            self.failures -= 1
            data, self_fd = line.encode()[:5], self._fd
            os.write(self_fd, data)
            os.ftruncate(self_fd, self._size)
            raise OSError(28, "No space left on device")
        super()._write(line)


def test_a_full_disk_admits_nothing_and_loses_no_end(tmp_path: Path) -> None:
    journal = Full(tmp_path / "journal", say=lambda line: None)
    world = World(ledger=journal)
    (worker,) = world.workers
    assert isinstance(worker, ManualWorker)
    world.push(0)
    heard = world.submit("a")
    journal.failures = 2
    with pytest.raises(ServiceError, match=r"not admitted: .*No space left"):
        world.submit("b")
    assert list(world.service.protocol.requests) == ["a"]
    worker.finish()
    assert heard[-1].outcome == "finished", "the client is told all the same"
    world.submit("c")  # and with it the end of a is written
    worker.finish()
    journal.begin("k", "d")
    journal.failures = 1
    with pytest.raises(ServiceError, match="cannot be written"):
        journal.keep("k", ANSWER)
    journal.close()
    assert once(journal.path) == {"a": "finished", "c": "finished"}


def test_the_service_writes_every_end(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    world = World(ledger=journal)
    (worker,) = world.workers
    world.push(0)
    for name in "abcd":
        world.submit(name)
    world.service.cancel("b")
    worker.settle()
    worker.finish("a")
    worker.lose()
    world.service.close()
    assert once(journal.path) == {"a": "finished", "b": "aborted", "c": "failed", "d": "failed"}
    journal.close()


WRITER = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from fakes import request
from lockstep.service.journal import Journal
from lockstep.service.requests import Ended
journal = Journal(Path(sys.argv[1]), say=lambda line: None)
print("ready", flush=True)
def write(thread):
    number = 0
    while True:
        number += 1
        journal.admitted(request(f"{thread}/{number}"))
        journal.ended(f"{thread}/{number}", Ended("finished"))
for thread in range(2):
    threading.Thread(target=write, args=(thread,), daemon=True).start()
threading.Event().wait()
"""


def test_killed_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for round in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.05 + 0.1 * round)
            process.send_signal(signal.SIGKILL)
        assert len(path.read_bytes()) > 1000
        opened(path).close()
        once(path)
    assert threading.active_count() < 50
