"""The job store in PostgreSQL, for several controllers of which one leads.

The controller that holds an advisory lock of the database leads. The lock belongs to the session that writes, so a
controller that lost it cannot write; the server ends a session that is silent for SILENT_S, whether its controller is
dead, disconnected or frozen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cotenant.core.errors import InputError, WorkError
from cotenant.core.extras import needs
from cotenant.fleet.store.database import Row, StoreError

if TYPE_CHECKING:
    import psycopg

SILENT_S, BEAT_S, TRY_EVERY_S = 10, 2.0, 1.0
# timeouts, since a connection to a server that no longer answers would otherwise block the controller for ever
CONNECTION = {
    "connect_timeout": 5, "keepalives_idle": 3, "keepalives_interval": 2, "keepalives_count": 3,
    "tcp_user_timeout": 9000, "application_name": "cotenant fleet",
}  # fmt: skip
TYPES = (
    (" WITHOUT ROWID", ""), ("number INTEGER PRIMARY KEY", "number BIGSERIAL PRIMARY KEY"), (" INTEGER", " BIGINT"),
    (" REAL", " DOUBLE PRECISION"),
)  # fmt: skip


class LostStoreError(WorkError):
    """Raised if the database session has ended: this controller no longer leads and must stop."""


class Postgres:
    """See Database."""

    shared = True

    def __init__(self, url: str) -> None:
        """Connect to the database. Raises WorkError on failure, InputError for an invalid URL."""
        with needs("postgres"):
            import psycopg
        try:
            self.connection: psycopg.Connection[Row] = psycopg.connect(url, autocommit=True, **CONNECTION)
            for setting in ("idle_session_timeout", "idle_in_transaction_session_timeout"):
                self.connection.execute(f"SET {setting} = '{SILENT_S}s'")
        except psycopg.OperationalError as error:
            raise WorkError(f"the store cannot be reached: {_first(error)}") from None
        except psycopg.Error as error:
            raise InputError(f"the store cannot be used: {_first(error)}; it must be PostgreSQL 14 or newer",
                             field="store") from None  # fmt: skip
        self.errors = psycopg.Error
        info = self.connection.info
        self.name = f"database {info.dbname} at {info.host or 'a unix socket'}"
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="fleet store", daemon=True).start()

    def _beat(self) -> None:
        """Keep the database session alive: a decision of the policy may take longer than the server's timeout."""
        while not self._closed.wait(BEAT_S):
            try:
                self.connection.execute("SELECT 1")
            except self.errors:
                if self.connection.closed:
                    return

    def lead(self) -> bool:
        """Try to become the controller of this fleet. Raises InputError if the database has no schema for its
        tables."""
        query = "SELECT current_schema(), pg_try_advisory_lock(hashtext('cotenant fleet in ' || current_schema()))"
        schema, leads = self.read(query)[0]
        # The lock's name contains the schema's name. Without a schema nothing would be locked, and the controller would
        # wait for ever.
        if schema is None:
            raise InputError(f"{self.name}: no schema of the search path exists", field="store")
        return leads is True

    def _failed(self, error: Exception) -> WorkError:
        if self.connection.closed or self.connection.broken:
            return LostStoreError(f"{self.name}: the session has ended ({_first(error)}): this controller stops")
        self.rollback()
        return StoreError(f"{self.name}: cannot be written: {_first(error)}")

    def _in_transaction(self) -> bool:
        # 0 means IDLE, the status of a connection without a transaction
        return bool(self.connection.info.transaction_status != 0)

    def create(self, schema: str) -> None:
        for ours, theirs in TYPES:
            schema = schema.replace(ours, theirs)
        try:
            self.connection.execute(schema)
        except self.errors as error:
            raise self._failed(error) from None

    def write(self, statement: str, rows: Iterable[Row]) -> None:
        try:
            if not self._in_transaction():
                self.connection.execute("BEGIN")
            with self.connection.cursor() as cursor:
                cursor.executemany(statement.replace("?", "%s"), rows)
        except self.errors as error:
            raise self._failed(error) from None

    def read(self, query: str, values: Row = ()) -> list[Row]:
        try:
            rows: list[Row] = self.connection.execute(query.replace("?", "%s"), values).fetchall()
            return rows
        except self.errors as error:
            raise self._failed(error) from None

    def commit(self) -> None:
        try:
            if self._in_transaction():
                self.connection.execute("COMMIT")
        except self.errors as error:
            raise self._failed(error) from None

    def rollback(self) -> None:
        try:
            if self._in_transaction():
                self.connection.execute("ROLLBACK")
        except self.errors:
            return

    def close(self) -> None:
        self._closed.set()
        self.connection.close()


class PostgresLock:
    """The leadership of a fleet. The constructor waits while another controller leads. `database`: the session that
    holds the lock."""

    def __init__(self, url: str, waiting: Callable[[], None] = lambda: None) -> None:
        self.database = Postgres(url)  # a wrong URL raises an error here, before the loop that waits
        said = False
        while True:
            try:
                if self.database.lead():
                    return
            except WorkError:
                self.database.close()
                self.database = _again(url)
            if not said:
                waiting()
                said = True
            time.sleep(TRY_EVERY_S)

    def release(self) -> None:
        """Release the leadership of the fleet, so that another controller can take it."""
        self.database.close()


def _again(url: str) -> Postgres:
    """Open a new session as soon as the server answers, so that a waiting controller survives a failover of the
    server."""
    while True:
        try:
            return Postgres(url)
        except WorkError:
            time.sleep(TRY_EVERY_S)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
