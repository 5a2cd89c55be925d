"""Interface of the job store's database, and its implementation with SQLite in the fleet's folder."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cotenant.core.errors import WorkError

Row = tuple[Any, ...]


class StoreError(WorkError):
    """The database did not accept a transition, which must not be acted on."""


class Database(Protocol):
    """One connection. Statements are in SQLite's dialect with `?` for values. Failures raise StoreError and are rolled
    back.

    `name`: for error messages. `shared`: controllers on other machines may take it over, so a lease may be extended
    only after a write of this controller succeeded.
    """

    name: str
    shared: bool

    def create(self, schema: str) -> None:
        """Create missing tables."""

    def write(self, statement: str, rows: Iterable[Row]) -> None:
        """Execute once per row, in a transaction that lasts until `commit`."""

    def read(self, query: str, values: Row = ()) -> list[Row]:
        """All rows of a SELECT."""

    def commit(self) -> None:
        """Make what was written durable."""

    def rollback(self) -> None:
        """Discard what was written since the last commit."""

    def close(self) -> None:
        """Close."""


class Sqlite:
    """A file in WAL mode, synced at every commit."""

    shared = False

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.name = str(path)
        try:
            self.connection = sqlite3.connect(
                f"file:{path.absolute()}?mode={'ro' if read_only else 'rwc'}",
                uri=True, timeout=10.0, isolation_level=None, check_same_thread=False,
            )  # fmt: skip
            if not read_only:
                self.connection.execute("PRAGMA journal_mode=WAL")
                self.connection.execute("PRAGMA synchronous=FULL")
        except sqlite3.Error as error:
            raise WorkError(f"{self.name}: cannot be opened: {error}") from None

    def create(self, schema: str) -> None:
        """See Database."""
        try:
            self.connection.executescript(schema)
        except sqlite3.Error as error:
            raise WorkError(f"{self.name}: cannot be opened: {error}") from None

    def write(self, statement: str, rows: Iterable[Row]) -> None:
        """See Database."""
        try:
            if not self.connection.in_transaction:
                self.connection.execute("BEGIN IMMEDIATE")
            self.connection.executemany(statement, rows)
        except sqlite3.Error as error:
            self.rollback()
            raise StoreError(f"{self.name}: cannot be written: {error}") from None

    def read(self, query: str, values: Row = ()) -> list[Row]:
        """See Database."""
        return self.connection.execute(query, values).fetchall()

    def commit(self) -> None:
        """See Database."""
        try:
            if self.connection.in_transaction:
                self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            self.rollback()
            raise StoreError(f"{self.name}: cannot be written: {error}") from None

    def rollback(self) -> None:
        """See Database."""
        with suppress(sqlite3.Error):
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def close(self) -> None:
        """See Database."""
        self.connection.close()
