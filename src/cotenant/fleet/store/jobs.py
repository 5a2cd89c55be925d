"""The job store, in SQLite or PostgreSQL. A transition is committed here before it is acted on."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cotenant.core.errors import InputError, WorkError
from cotenant.core.folders import STORE_URL
from cotenant.fleet.jobs import JobSpec, spec_from_dict
from cotenant.fleet.state import ENDED, OVER, Assignment, Attempt, Job, assignment_from_dict
from cotenant.fleet.store.database import Database, StoreError
from cotenant.fleet.store.sqlite import Sqlite

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


class FleetLock:
    """The lock of a fleet's folder, which the running controller holds. There is one controller per folder."""

    # the database that has the store; None: the store is a file in the fleet's folder
    database: Database | None = None

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
        with suppress(OSError):  # on a full disk the lock is held, but the file cannot say by which controller
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"pid {os.getpid()}".encode(), 0)

    def release(self) -> None:
        """Release the lock of the folder, so that another controller can take it."""
        os.close(self._fd)


class Lock(Protocol):
    """The right to be a fleet's controller, and the database connection to which it belongs, if any."""

    @property
    def database(self) -> Database | None:
        """The database session with the store, if the store is not in the folder."""

    def release(self) -> None:
        """Release the right to be this fleet's controller, so that another controller can take it."""


def take_lock(folder: Path, waiting: Callable[[], None] = lambda: None) -> Lock:
    """Become the controller of the fleet in `folder`. If another controller runs: raises WorkError for a store in the
    folder; for a shared store it calls `waiting` once and waits.
    """
    url = store_url(folder)
    if url is None:
        return FleetLock(folder)
    from cotenant.fleet.store.postgres import PostgresLock

    return PostgresLock(url, waiting)


def store_url(folder: Path) -> str | None:
    """URL of the database with the fleet's store; None: the store is a file in the folder."""
    try:
        url = (folder / STORE_URL).read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkError(f"{folder / STORE_URL}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    if not url:  # PostgreSQL's client would take an empty URL as the database that its environment variables name
        raise WorkError(f"{folder / STORE_URL} is empty: it must contain the URL of the fleet's store")
    return url


def keep_store_url(folder: Path, url: str) -> None:
    """Configure the fleet in `folder` to use the store at `url`. Raises WorkError if the folder already contains jobs,
    InputError if the fleet is already configured to use another store.
    """
    if (folder / DB_FILE).exists():
        raise WorkError(f"{folder / DB_FILE} contains this fleet's jobs, which would be lost; use another folder")
    kept, before = folder / STORE_URL, None
    if kept.is_file() and kept.stat().st_size > 1:  # an empty file names no store
        before = store_url(folder)
    # two URLs that differ only in the password name one and the same store
    if before is not None and _shown(before) != _shown(url):
        raise InputError(
            f"the fleet in {folder} has the store {_shown(before)}, not {_shown(url)}: use another folder, or remove "
            f"{kept} to leave the jobs of the old store behind",
            field="store",
        )
    part = folder / f".{STORE_URL}.{os.getpid()}"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(url + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / STORE_URL)  # renamed in one step, since another controller may be reading the file
    except OSError as error:
        part.unlink(missing_ok=True)
        raise WorkError(f"{folder / STORE_URL}: cannot be written: {(error.strerror or str(error)).lower()}") from None


def _shown(url: str) -> str:
    """The URL of a store for a message: without its password."""
    secret = r"(//[^:/@]*):[^/?]*@|[&\s]?\bpassword=(?:'[^']*'|[^&\s]*)"
    return re.sub(secret, lambda found: f"{found[1]}@" if found[1] else "", url)


def open_database(folder: Path, *, read_only: bool = False) -> Database:
    """Open the fleet's store, in the folder or in a database elsewhere."""
    url = store_url(folder)
    if url is None:
        return Sqlite(folder / DB_FILE, read_only=read_only)
    from cotenant.fleet.store.postgres import Postgres

    return Postgres(url)


class Store:
    """The job store, through one connection to its database. Writers call `commit`. A failed commit undoes everything
    since the last one."""

    def __init__(self, folder: Path, *, read_only: bool = False, database: Database | None = None) -> None:
        if read_only and not is_fleet(folder):
            raise WorkError(f"{folder} is not the folder of a fleet")
        self._db = database or open_database(folder, read_only=read_only)
        self._write, self.commit, self.rollback = self._db.write, self._db.commit, self._db.rollback
        self.rows, self.close = self._db.read, self._db.close
        if not read_only:
            self._db.create(_SCHEMA)
            self._write("INSERT INTO meta VALUES ('version', ?) ON CONFLICT DO NOTHING", [(str(VERSION),)])
            self.commit()
        version = self.meta("version")
        if version != str(VERSION):
            raise WorkError(
                f"{self._db.name} has version {version} of the store, and this release reads {VERSION}: use the "
                "release that wrote it"
            )

    def may_extend(self) -> bool:
        """Whether leases may be extended. With a shared store a write of this controller must succeed first, since
        another controller may have replaced it and may be waiting for the jobs' leases to end.
        """
        if not self._db.shared:
            return True
        try:
            self.set_meta("lead", "extends")
            self.commit()
        except StoreError:
            return False
        return True

    # -- meta ------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        """Return a value of the fleet's metadata by its name; None if there is none."""
        found = self.rows("SELECT value FROM meta WHERE key=?", (key,))
        return str(found[0][0]) if found else None

    def set_meta(self, key: str, value: str) -> None:
        """Change a value of the fleet's metadata."""
        self._write("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value=excluded.value",
                    [(key, value)])  # fmt: skip

    # -- writing ---------------------------------------------------------------------------------------------------

    def add_jobs(self, jobs: Iterable[Job], submitted_unix_s: float) -> None:
        """Insert jobs."""
        self._write(
            "INSERT INTO jobs (row, id, spec, arrival_s, submitted_unix_s, state, n, failures, losses, done,"
            " attained_s, last_run_s, arrived, cancel, told) VALUES (?,?,?,?,?,?,0,0,0,0,0,?,0,0,-1)",
            (
                (j.row, j.id, json.dumps(j.spec.to_dict()), j.arrival_s, submitted_unix_s, j.state, j.arrival_s)
                for j in jobs
            ),
        )

    def save_jobs(self, jobs: Iterable[Job]) -> None:
        """Update the rows of changed jobs in the store."""
        self._write(
            _JOB_UPDATE,
            (
                (j.state, j.n, j.failures, j.losses, j.done, j.attained_s, j.last_run_s, j.first_start_s, j.finished_s,
                 int(j.arrived), int(j.cancel), j.told, None if j.exit is None else json.dumps(j.exit), j.row)
                for j in jobs
            ),
        )  # fmt: skip

    def save_attempts(self, attempts: Iterable[tuple[int, Attempt]]) -> None:
        """Insert or update the rows of attempts to run jobs, each given as (row of the job, attempt)."""
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
        """Insert events of jobs: (time_s, job, kind, reason, cpu_milli, memory_mb, speed, [(node, GPUs)])."""
        self._write(
            "INSERT INTO events (time_s, job, kind, reason, cpu_milli, memory_mb, speed, places)"
            " VALUES (?,?,?,?,?,?,?,?)",
            ((*event[:7], json.dumps(event[7]) if event[7] else "") for event in events),
        )

    def add_round(self, row: tuple[Any, ...]) -> None:
        """Insert one decision of the policy: the columns of a record's rounds, how long the decision took in s, and
        whether it was early (made between two rounds).
        """
        self._write("INSERT INTO rounds VALUES (?,?,?,?,?,?,?,?,?,?)", [row])

    # -- reading ---------------------------------------------------------------------------------------------------

    def open_jobs(self) -> list[Job]:
        """Unfinished jobs with their current attempt, in order of arrival."""
        marks = ",".join("?" * len(OVER))
        rows = self.rows(
            f"SELECT {', '.join(_JOB_COLUMNS)} FROM jobs WHERE state NOT IN ({marks}) ORDER BY arrival_s, row", OVER
        )
        jobs = {int(row[0]): _job(row) for row in rows}
        for row in self.rows("SELECT * FROM attempts WHERE phase != ?", (ENDED,)):
            if int(row[0]) in jobs:
                jobs[int(row[0])].attempt = _attempt(row)
        return list(jobs.values())

    def next_row(self) -> int:
        """Return the row number that the next job gets."""
        found = self.rows("SELECT MAX(row) FROM jobs")[0][0]
        return 0 if found is None else int(found) + 1

    def last_s(self) -> float:
        """The latest time in the store, in seconds of the fleet's clock."""
        found = self.rows("SELECT MAX(time_s) FROM events")[0][0]
        return max(float(self.meta("time_s") or 0.0), float(found or 0.0))


def is_fleet(folder: Path) -> bool:
    """Return whether a folder is the folder of a fleet."""
    return (folder / DB_FILE).exists() or (folder / STORE_URL).exists()


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
