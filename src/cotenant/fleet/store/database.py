"""The interface of a database for the job store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from cotenant.core.errors import WorkError

Row = tuple[Any, ...]


class StoreError(WorkError):
    """Raised if the database did not store a transition. The controller must not act on that transition."""


class Database(Protocol):
    """One connection. Statements are in SQLite's dialect with `?` for values. Failures raise StoreError and are rolled
    back.

    `name`: for error messages. `shared`: whether controllers on other machines may take over the fleet; if so, leases
    may be extended only after a write of this controller succeeded.
    """

    name: str
    shared: bool

    def create(self, schema: str) -> None:
        """Create the tables of the job store that are missing."""

    def write(self, statement: str, rows: Iterable[Row]) -> None:
        """Execute a statement once per row, in a transaction that lasts until `commit`."""

    def read(self, query: str, values: Row = ()) -> list[Row]:
        """Return all rows of a SELECT statement."""

    def commit(self) -> None:
        """Commit the transaction, so that what was written is durable."""

    def rollback(self) -> None:
        """Roll back what was written since the last commit."""

    def close(self) -> None:
        """Close."""
