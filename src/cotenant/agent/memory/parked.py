"""The table of parked tenants and programs, which is also in the state file.

A parked tenant or program is suspended, and the contents of its GPU memory are kept in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cotenant.agent import processes
from cotenant.agent.processes import ProcessKey
from cotenant.agent.tenants.tenant import Tenant


@dataclass
class Parked:
    """A parked tenant or program (named `pid:N`), and what is needed to resume it."""

    name: str
    # "swap": the shim in the tenant's processes moved the memory off the GPU; "checkpoint": the driver did
    method: str
    gpus: tuple[str, ...]
    size: int  # number of bytes of GPU memory that parking freed
    keys: tuple[ProcessKey, ...] = ()
    since: float = field(default_factory=time.time)
    out_s: float = 0.0
    # true: parked by a user until a user resumes it; false: evicted to make space, until its next turn
    by_order: bool = False
    # time of the monotonic clock before which the agent does not look whether memory of the tenant is on its GPU
    quiet_until_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The row in JSON types, for the state file and --json."""
        return {
            "name": self.name,
            "method": self.method,
            "gpus": list(self.gpus),
            "freed_bytes": self.size,
            "processes": [list(key) for key in self.keys],
            "since": self.since,
            "seconds": self.out_s,
            "by_order": self.by_order,
        }

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Parked:
        """Convert a row that `as_dict` wrote into an entry of the table."""
        keys = tuple(ProcessKey(int(pid), int(ticks)) for pid, ticks in row["processes"])
        since, by_order = float(row["since"]), bool(row.get("by_order"))
        return cls(
            row["name"], row["method"], tuple(row["gpus"]), int(row["freed_bytes"]), keys, since, by_order=by_order
        )


class ParkedTable:
    """The parked tenants and programs of this node, by name."""

    def __init__(self) -> None:
        self.rows: dict[str, Parked] = {}
        self.under_way: dict[str, Parked] = {}  # tenants that are being checkpointed now

    def __contains__(self, name: object) -> bool:
        """Whether a user has parked a tenant and not resumed it yet; then no share of the GPU is reserved for it. False
        for a tenant that the agent has evicted to make space.
        """
        parked = self.rows.get(name) if isinstance(name, str) else None
        return parked is not None and parked.by_order

    def checkpointed_bytes(self, tenant: str) -> int | None:
        """Bytes of GPU memory that restoring a checkpointed tenant takes; None if the tenant is not checkpointed."""
        parked = self.rows.get(tenant)
        return parked.size if parked is not None and parked.method == "checkpoint" else None

    def lives(self, tenant: str) -> bool:
        """Whether a parked tenant has a living process."""
        parked = self.rows.get(tenant)
        return parked is not None and any(processes.alive(key) for key in parked.keys)

    def as_dicts(self) -> list[dict[str, Any]]:
        """All rows of the table in JSON types for the state file, also those of programs that are being parked."""
        return [parked.as_dict() for parked in (self.under_way | self.rows).values()]


def movable_first(tenants: Iterable[Tenant]) -> list[Tenant]:
    """Sort tenants in the order in which they are parked when a GPU must be freed: lowest priority first; of equal
    priority, first those whose processes swap their own memory.
    """
    rank = {"swap": 0, "managed": 1, "park": 2, "none": 3}
    return sorted(tenants, key=lambda t: (t.spec.priority, rank[t.spec.oversubscribe]))
