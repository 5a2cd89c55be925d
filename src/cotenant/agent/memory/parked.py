"""Parked tenants and programs, as memory and the state file hold them."""

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
    """What is parked, and how it comes back. `name`: a tenant's, or pid:N."""

    name: str
    method: str  # swap: by its own moves; checkpoint: by the driver
    gpus: tuple[str, ...]
    size: int  # bytes that it gave back
    keys: tuple[ProcessKey, ...] = ()
    since: float = field(default_factory=time.time)
    out_s: float = 0.0
    by_order: bool = False  # it stays away until it is resumed; else it comes back with its next turn

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the state file and --json."""
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
        """The reverse."""
        keys = tuple(ProcessKey(int(pid), int(ticks)) for pid, ticks in row["processes"])
        since, by_order = float(row["since"]), bool(row.get("by_order"))
        return cls(
            row["name"], row["method"], tuple(row["gpus"]), int(row["freed_bytes"]), keys, since, by_order=by_order
        )


class ParkedTable:
    """Everything parked on this node, by name."""

    def __init__(self) -> None:
        self.rows: dict[str, Parked] = {}
        self.under_way: dict[str, Parked] = {}  # being checkpointed

    def __contains__(self, name: object) -> bool:
        """Whether a tenant is away until it is resumed: nothing is promised to it meanwhile."""
        parked = self.rows.get(name) if isinstance(name, str) else None
        return parked is not None and parked.by_order

    def checkpointed_bytes(self, tenant: str) -> int | None:
        """Bytes that a tenant comes back with that holds nothing on any GPU; None for one that the driver does not
        keep."""
        parked = self.rows.get(tenant)
        return parked.size if parked is not None and parked.method == "checkpoint" else None

    def lives(self, tenant: str) -> bool:
        """Whether a tenant is parked and a process of it lives."""
        parked = self.rows.get(tenant)
        return parked is not None and any(processes.alive(key) for key in parked.keys)

    def as_dicts(self) -> list[dict[str, Any]]:
        """What is parked, and what may be, for the state file."""
        return [parked.as_dict() for parked in (self.under_way | self.rows).values()]


def movable_first(tenants: Iterable[Tenant]) -> list[Tenant]:
    """Tenants by how easily they leave: own processes move them, then parking; lowest priority first."""
    rank = {"swap": 0, "managed": 1, "park": 2, "none": 3}
    return sorted(tenants, key=lambda t: (t.spec.priority, rank[t.spec.oversubscribe]))
