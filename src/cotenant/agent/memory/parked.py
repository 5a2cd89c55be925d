"""One parked tenant or program, as memory and the state file hold it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cotenant.agent.processes import ProcessKey

if TYPE_CHECKING:
    from cotenant.agent.tenants.registry import Tenant


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


def movable_first(tenants: Iterable[Tenant]) -> list[Tenant]:
    """Tenants by how easily they leave: own processes move them, then parking; lowest priority first."""
    rank = {"swap": 0, "managed": 1, "park": 2, "none": 3}
    return sorted(tenants, key=lambda t: (t.spec.priority, rank[t.spec.oversubscribe]))
