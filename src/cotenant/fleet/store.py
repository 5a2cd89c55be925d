"""The job store: SQLite in WAL mode. A transition is committed here before anybody acts on it."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.fleet.jobs import JobSpec, spec_from_dict
from cotenant.fleet.state import ENDED, OVER, Assignment, Attempt, Job, assignment_from_dict

DB_FILE = "fleet.db"
LOCK_FILE = "fleet.lock"
VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, spec TEXT NOT NULL, arrival_s REAL NOT NULL,
    submitted_unix_s REAL NOT NULL, state TEXT NOT NULL, n INTEGER NOT NULL, failures INTEGER NOT NULL,
    losses INTEGER NOT NULL, done REAL NOT NULL, attained_s REAL NOT NULL, last_run_s REAL NOT NULL,
    first_start_s REAL, finished_s REAL, arrived INTEGER NOT NULL, cancel INTEGER NOT NULL, told INTEGER NOT NULL,
    exit TEXT);
CREATE INDEX IF NOT EXISTS jobs_state ON jobs (state);
CREATE TABLE IF NOT EXISTS attempts (
    job INTEGER NOT NULL, n INTEGER NOT NULL, phase TEXT NOT NULL, assignment TEXT NOT NULL, created_s REAL NOT NULL,
    started_s REAL, stop_s REAL, stop_why TEXT NOT NULL, counted_s REAL NOT NULL, ended TEXT NOT NULL, ended_s REAL,
    port INTEGER NOT NULL, off INTEGER NOT NULL, PRIMARY KEY (job, n)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, time_s REAL NOT NULL, job INTEGER NOT NULL, kind INTEGER NOT NULL,
    reason INTEGER NOT NULL, cpu_milli INTEGER NOT NULL, memory_mb INTEGER NOT NULL, speed REAL NOT NULL,
    places TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_job ON events (job);
CREATE TABLE IF NOT EXISTS rounds (
    time_s REAL NOT NULL, running INTEGER NOT NULL, waiting INTEGER NOT NULL, gpus_held REAL NOT NULL,
    gpus_wanted REAL NOT NULL, gpus_free_whole_nodes REAL NOT NULL, cpu_milli_held INTEGER NOT NULL,
    memory_mb_held INTEGER NOT NULL, decide_s REAL NOT NULL, early INTEGER NOT NULL);
"""
_JOB_COLUMNS = (
    "row", "id", "spec", "arrival_s", "state", "n", "failures", "losses", "done", "attained_s", "last_run_s",
    "first_start_s", "finished_s", "arrived", "cancel", "told", "exit",
)  # fmt: skip
_JOB_UPDATE = (
    "UPDATE jobs SET state=?, n=?, failures=?, losses=?, done=?, attained_s=?, last_run_s=?, first_start_s=?,"
    " finished_s=?, arrived=?, cancel=?, told=?, exit=? WHERE row=?"
)


Event = tuple[float, int, int, int, int, int, float, list[tuple[str, float]]]


class StoreError(WorkError):
    """The disk did not take a transition: nothing of it may be acted on."""


class FleetLock:
    """One controller per folder: a held lock is a live controller, a file alone is nobody."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WorkError(f"{folder}: cannot be used: {(error.strerror or str(error)).lower()}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "pid unknown"
            os.close(self._fd)
            raise WorkError(f"a controller ({holder}) already runs in {folder}") from None
        with suppress(OSError):  # on a full disk the lock holds without its label
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"pid {os.getpid()}".encode(), 0)

    def release(self) -> None:
        """Let another controller have the folder."""
        os.close(self._fd)


class Store:
    """One connection. Writers call `commit`; what was written before a failed commit never happened."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.path = folder / DB_FILE
        if read_only and not self.path.exists():
            raise WorkError(f"{folder} holds no fleet")
        try:
            self._db = sqlite3.connect(
                f"file:{self.path.absolute()}?mode={'ro' if read_only else 'rwc'}",
                uri=True, timeout=10.0, isolation_level=None, check_same_thread=False,
            )  # fmt: skip
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_SCHEMA)
                self._db.execute("INSERT OR IGNORE INTO meta VALUES ('version', ?)", (str(VERSION),))
            version = self.meta("version")
        except sqlite3.Error as error:
            raise WorkError(f"{self.path}: cannot be opened: {error}") from None
        if version != str(VERSION):
            raise WorkError(f"{self.path} is of version {version}; this program reads version {VERSION}")

    # -- transactions ----------------------------------------------------------------------------------------------

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(statement, rows)
        except sqlite3.Error as error:
            self.rollback()
            raise StoreError(f"{self.path}: cannot be written: {error}") from None

    def commit(self) -> None:
        """Make durable what was written; StoreError when the disk does not take it."""
        try:
            if self._db.in_transaction:
                self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self.rollback()
            raise StoreError(f"{self.path}: cannot be written: {error}") from None

    def rollback(self) -> None:
        """Forget what was not committed."""
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def limit_pages(self, pages: int) -> None:
        """Let the file grow to so many pages at most: a full disk, for tests."""
        self._db.execute(f"PRAGMA max_page_count={pages}")

    def close(self) -> None:
        """Close."""
        self._db.close()

    # -- meta ------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        """A setting of the fleet."""
        found = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def set_meta(self, key: str, value: str) -> None:
        """Change one."""
        self._write("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value=excluded.value",
                    [(key, value)])  # fmt: skip

    # -- writing ---------------------------------------------------------------------------------------------------

    def add_jobs(self, jobs: Iterable[Job], submitted_unix_s: float) -> None:
        """New jobs."""
        self._write(
            "INSERT INTO jobs (row, id, spec, arrival_s, submitted_unix_s, state, n, failures, losses, done,"
            " attained_s, last_run_s, arrived, cancel, told) VALUES (?,?,?,?,?,?,0,0,0,0,0,?,0,0,-1)",
            (
                (j.row, j.id, json.dumps(j.spec.to_dict()), j.arrival_s, submitted_unix_s, j.state, j.arrival_s)
                for j in jobs
            ),
        )

    def save_jobs(self, jobs: Iterable[Job]) -> None:
        """Jobs that changed."""
        self._write(
            _JOB_UPDATE,
            (
                (j.state, j.n, j.failures, j.losses, j.done, j.attained_s, j.last_run_s, j.first_start_s, j.finished_s,
                 int(j.arrived), int(j.cancel), j.told, None if j.exit is None else json.dumps(j.exit), j.row)
                for j in jobs
            ),
        )  # fmt: skip

    def save_attempts(self, attempts: Iterable[tuple[int, Attempt]]) -> None:
        """(row of the job, attempt), new or changed."""
        self._write(
            "INSERT INTO attempts VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (job, n) DO UPDATE SET"
            " phase=excluded.phase, assignment=excluded.assignment, started_s=excluded.started_s,"
            " stop_s=excluded.stop_s, stop_why=excluded.stop_why, counted_s=excluded.counted_s, ended=excluded.ended,"
            " ended_s=excluded.ended_s, off=excluded.off",
            (
                (row, a.n, a.phase, json.dumps(a.assignment.to_dict()), a.created_s, a.started_s, a.stop_s, a.stop_why,
                 a.counted_s, json.dumps(a.ended), a.ended_s, a.port, int(a.off))
                for row, a in attempts
            ),
        )  # fmt: skip

    def add_events(self, events: Iterable[Event]) -> None:
        """(time_s, job, kind, reason, cpu_milli, memory_mb, speed, [(node, GPUs)])."""
        self._write(
            "INSERT INTO events (time_s, job, kind, reason, cpu_milli, memory_mb, speed, places)"
            " VALUES (?,?,?,?,?,?,?,?)",
            ((*event[:7], json.dumps(event[7]) if event[7] else "") for event in events),
        )

    def add_round(self, row: tuple[Any, ...]) -> None:
        """One decision: the columns of a record's rounds, seconds it took, whether it was an early one."""
        self._write("INSERT INTO rounds VALUES (?,?,?,?,?,?,?,?,?,?)", [row])

    # -- reading ---------------------------------------------------------------------------------------------------

    def open_jobs(self) -> list[Job]:
        """Jobs that are not over, with their attempt if one lives, in order of arrival."""
        marks = ",".join("?" * len(OVER))
        rows = self._db.execute(
            f"SELECT {', '.join(_JOB_COLUMNS)} FROM jobs WHERE state NOT IN ({marks}) ORDER BY arrival_s, row", OVER
        )
        jobs = {int(row[0]): _job(row) for row in rows}
        for row in self._db.execute("SELECT * FROM attempts WHERE phase != ?", (ENDED,)):
            if int(row[0]) in jobs:
                jobs[int(row[0])].attempt = _attempt(row)
        return list(jobs.values())

    def next_row(self) -> int:
        """Row for the next job."""
        found = self._db.execute("SELECT MAX(row) FROM jobs").fetchone()[0]
        return 0 if found is None else int(found) + 1

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Any SELECT."""
        return self._db.execute(query, values).fetchall()


def _job(row: tuple[Any, ...]) -> Job:
    values = dict(zip(_JOB_COLUMNS, row, strict=True))
    spec: JobSpec = spec_from_dict(json.loads(values.pop("spec")))
    exit_ = values.pop("exit")
    values["arrived"], values["cancel"] = bool(values["arrived"]), bool(values["cancel"])
    return Job(spec=spec, exit=None if exit_ is None else json.loads(exit_), **values)


def _attempt(row: tuple[Any, ...]) -> Attempt:
    assignment: Assignment = assignment_from_dict(json.loads(row[3]))
    return Attempt(
        n=row[1], assignment=assignment, phase=row[2], created_s=row[4], started_s=row[5], stop_s=row[6],
        stop_why=row[7], counted_s=row[8], ended=json.loads(row[9]), ended_s=row[10], port=row[11], off=bool(row[12]),
    )  # fmt: skip
