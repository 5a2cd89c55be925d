"""The job store in PostgreSQL: the same promises as in a file, and one leader among several controllers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer

from cotenant.core.errors import InputError, WorkError
from cotenant.core.events import Kind
from cotenant.fleet.controller.job_table import JobTable
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.state import FINISHED, Assignment, Attempt, GpuShare, Place
from cotenant.fleet.store.database import StoreError
from cotenant.fleet.store.jobs import Store, keep_store_url, take_lock

pytestmark = [pytest.mark.extras, pytest.mark.slow]
SPEC = JobSpec("job", ("true",), env={"A": "b"})
HELD = Assignment((Place("node-0", (GpuShare("g"),), 3.0, 10**9),), 1, 1.5)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.end()


@pytest.fixture
def folder(server: PostgresServer, tmp_path: Path) -> Path:
    keep_store_url(tmp_path, server.url)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600
    return tmp_path


def test_what_was_flushed_is_there_for_the_next_controller(folder: Path) -> None:
    table = JobTable(Store(folder))
    first, second = table.add([(SPEC, 1.0), (SPEC, 2.0)])
    first.attempt, first.n = Attempt(0, HELD, created_s=3.0, port=7, off=True), 1
    table.touch(first)
    table.tell(3.0, first, Kind.START, 5, HELD)
    table.flush()
    second.n = 9  # this change is not flushed
    table.touch(second)
    again = JobTable(Store(folder))
    assert again.jobs["job"].attempt == first.attempt
    assert (again.jobs["job"].spec, again.jobs["job-2"].n) == (SPEC, 0)
    assert again.store.last_s() == 3.0
    over = again.jobs["job"]
    again.over_with(over, FINISHED, 4.0)
    again.flush()
    assert JobTable(Store(folder)).over["finished"] == 1
    assert list(JobTable(Store(folder)).jobs) == ["job-2"]


def test_one_statement_that_fails_undoes_the_whole_transition(folder: Path) -> None:
    table = JobTable(Store(folder))
    (job,) = table.add([(SPEC, 1.0)])
    job.n = 5
    table.touch(job)
    table.tell(float("nan"), job, Kind.START, 10**30)  # a number that the database cannot store
    with pytest.raises(StoreError, match="cannot be written"):
        table.flush()
    assert table.jobs["job"].n == 0


def test_a_folder_with_jobs_of_its_own_is_not_given_another_store(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with pytest.raises(WorkError, match="would be lost"):
        keep_store_url(tmp_path, "postgresql://nowhere/x")


def test_a_folder_is_not_silently_given_the_store_of_another_fleet(tmp_path: Path) -> None:
    keep_store_url(tmp_path, "postgresql://fleet:secret@db/a")
    keep_store_url(tmp_path, "postgresql://fleet:changed@db/a")
    assert (tmp_path / "store").read_text() == "postgresql://fleet:changed@db/a\n", "the same store"
    with pytest.raises(InputError) as refused:
        keep_store_url(tmp_path, "postgresql://db/b?user=fleet&password=secret")
    assert refused.value.message == (
        f"the fleet in {tmp_path} has the store postgresql://fleet@db/a, not postgresql://db/b?user=fleet: use another "
        f"folder, or remove {tmp_path / 'store'} to leave the jobs of the old store behind"
    )
    assert (tmp_path / "store").read_text() == "postgresql://fleet:changed@db/a\n"
    (tmp_path / "store").unlink()
    keep_store_url(tmp_path, "postgresql://db/b")
    (tmp_path / "store").write_text("")
    keep_store_url(tmp_path, "postgresql://db/c")  # an empty file names no store


def test_a_store_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    keep_store_url(tmp_path, "postgresql://fleet@127.0.0.1:1/x")
    with pytest.raises(WorkError, match="the store cannot be reached: connection"):
        take_lock(tmp_path)
    (tmp_path / "store").unlink()
    keep_store_url(tmp_path, "no url at all")
    with pytest.raises((InputError, WorkError), match="the store cannot be"):
        take_lock(tmp_path)


def test_a_search_path_that_leads_nowhere_is_one_sentence(server: PostgresServer, tmp_path: Path) -> None:
    keep_store_url(tmp_path, f"{server.url}?options=-csearch_path%3Dnowhere")
    with pytest.raises(InputError, match="no schema of the search path exists"):
        take_lock(tmp_path)


LEADER = """
import sys, time
from pathlib import Path
from cotenant.fleet.store.jobs import Store, take_lock
lock = take_lock(Path(sys.argv[1]))
store = Store(Path(sys.argv[1]), database=lock.database)
print("leads", flush=True)
while True:
    time.sleep(0.5)
    store.set_meta("who", sys.argv[2])
    store.commit()
"""


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_next_one_leads_and_the_old_one_writes_no_more(folder: Path, how: str) -> None:
    """A dead leader is replaced at once, a frozen one once the server has ended its session."""
    old = subprocess.Popen([sys.executable, "-c", LEADER, str(folder), "old"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert old.stdout is not None
        assert old.stdout.readline() == b"leads\n"
        waits = threading.Event()
        taken: list[float] = []

        def follow() -> None:
            lock = take_lock(folder, waits.set)
            taken.append(time.monotonic())
            lock.release()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        assert waits.wait(60)
        began = time.monotonic()
        os.kill(old.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        follower.join(90)
        assert taken
        print(f"\n{how}: led by the next one after {taken[0] - began:.1f} s")
        store = Store(folder)
        store.set_meta("who", "new")
        store.commit()
        os.kill(old.pid, signal.SIGCONT)
        assert old.wait(60) != 0
        if how == "frozen":
            assert old.stderr is not None
            assert b"the session has ended" in old.stderr.read()
        assert store.meta("who") == "new"
    finally:
        old.kill()
        old.wait()


def test_one_that_waits_outlives_a_restart_of_the_server(folder: Path, server: PostgresServer) -> None:
    first = take_lock(folder)
    waits = threading.Event()
    got: list[object] = []
    follower = threading.Thread(target=lambda: got.append(take_lock(folder, waits.set)), daemon=True)
    follower.start()
    assert waits.wait(60)
    server.stop(signal.SIGQUIT)
    with pytest.raises(WorkError, match="the session has ended"):
        Store(folder, database=first.database)
    server.start()
    follower.join(60)
    assert got
