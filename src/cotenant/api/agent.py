"""Python interface of this node's agent and its tenants."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cotenant.agent.ipc.client import ControlClient
from cotenant.api.arguments import checked
from cotenant.api.tables import html_table, text_table
from cotenant.core.errors import InputError
from cotenant.core.folders import agent_folder
from cotenant.core.units import format_bytes, parse_fraction, parse_memory


class Agent:
    """A connection to a running `cotenant agent`; a notebook shows its tenants. Use it in a `with` statement, or call
    `close`. `folder`: folder of the agent's sockets; by default the one that `cotenant ps` uses. Raises WorkError if no
    agent answers, or if the agent refuses a request, with the agent's reason.
    """

    @checked
    def __init__(self, folder: str | Path | None = None, *, timeout_s: float = 60.0) -> None:
        self._client = ControlClient(Path(folder) if folder is not None else agent_folder(), timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection to the agent. Tenants are not affected."""
        self._client.close()

    def tenants(self) -> list[dict[str, Any]]:
        """Return the agent's tenants, as `cotenant ps --json` lists them."""
        return list(self._client.call("list")["tenants"])

    def gpus(self) -> list[dict[str, Any]]:
        """Return the agent's GPUs, as `cotenant ps --json` lists them."""
        return list(self._client.call("list")["agent"]["gpus"])

    @checked
    def set(
        self, name: str, *, request: str | float | None = None, limit: str | float | None = None,
        memory: str | int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Change a tenant's share. Returns the new share, and the time from which on it applies. Fractions are "30%" or
        0.3, memory is "8GiB" or a number of bytes. Raises InputError if nothing is given."""
        if request is None and limit is None and memory is None:
            raise InputError("give at least one of request, limit and memory", field="set")
        return dict(
            self._client.call(
                "set", name=name, request=_fraction(request, "request"), limit=_fraction(limit, "limit"),
                memory_bytes=parse_memory(memory, "memory") if isinstance(memory, str) else memory,
            )
        )  # fmt: skip

    @checked
    def stop(self, name: str, *, grace_s: float = 10.0) -> dict[str, Any]:
        """Stop a tenant's processes: SIGTERM, and after `grace_s` seconds SIGKILL to those that remain."""
        return dict(self._client.call("stop", name=name, grace_s=grace_s))

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [
                row["name"], f"{row['request']:.0%}", f"{row['limit']:.0%}",
                "no limit" if row["memory_bytes"] is None else format_bytes(row["memory_bytes"]),
                format_bytes(row["memory_used_bytes"]),
            ]
            for row in self.tenants()
        ]  # fmt: skip
        return ["tenant", "request", "limit", "memory limit", "memory used"], rows

    def _repr_html_(self) -> str:
        return html_table(*self._texts())

    def __repr__(self) -> str:
        return text_table(*self._texts())


def _fraction(given: str | float | None, field: str) -> float | None:
    return parse_fraction(given, field) if isinstance(given, str) else given
