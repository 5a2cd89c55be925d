"""The job store's database as a SQLite file in the fleet's folder."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cotenant.core.errors import WorkError
from cotenant.fleet.store.database import Row, StoreError


class Sqlite:
    """The Database of a job store: a SQLite file in WAL mode, synced at every commit."""

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
        try:
            self.connection.executescript(schema)
        except sqlite3.Error as error:
            raise WorkError(f"{self.name}: cannot be opened: {error}") from None

    def write(self, statement: str, rows: Iterable[Row]) -> None:
        try:
            if not self.connection.in_transaction:
                self.connection.execute("BEGIN IMMEDIATE")
            self.connection.executemany(statement, rows)
        except sqlite3.Error as error:
            self.rollback()
            raise StoreError(f"{self.name}: cannot be written: {error}") from None

    def read(self, query: str, values: Row = ()) -> list[Row]:
        return self.connection.execute(query, values).fetchall()

    def commit(self) -> None:
        try:
            if self.connection.in_transaction:
                self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            self.rollback()
            raise StoreError(f"{self.name}: cannot be written: {error}") from None

    def rollback(self) -> None:
        with suppress(sqlite3.Error):
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def close(self) -> None:
        self.connection.close()
