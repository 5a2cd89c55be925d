"""Leases of what runs: extended well before they end, and remembered, for a node that falls silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cotenant.fleet.state import PARKED, STARTING, UP, Job

LOST_MARGIN_S = 1.0


class Leases:
    """`keep_s`: how long a lease runs. Ends are written in the node's own monotonic clock, as it told it last: an order
    that comes late grants no more than it would have in time."""

    def __init__(self, lease_s: float, keep_s: float) -> None:
        self.keep_s = keep_s
        self.every_s = min(lease_s, keep_s / 4)
        self._extended_s: float | None = None
        self._ends_s: dict[str, float] = {}  # fleet time by which every lease that a node ever got has ended

    def extend(
        self, orders: Mapping[str, list[dict[str, Any]]], here: Mapping[str, list[Job]], clocks_ns: Mapping[str, int],
        fleet_s: float, monotonic_s: float, may_extend: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Add what is due to the orders: `here` names the jobs on each node, `clocks_ns` what its clock said before
        `may_extend` was asked."""
        for name in here:
            self._ends_s.setdefault(name, fleet_s + self.keep_s)
        if self._extended_s is not None and monotonic_s - self._extended_s < self.every_s:
            return
        if not may_extend():
            return
        self._extended_s = monotonic_s
        for name, jobs in here.items():
            staying = [job for job in jobs if job.attempt is not None and job.attempt.phase in (STARTING, UP, PARKED)]
            if name in orders and name in clocks_ns and staying:
                until_ns = clocks_ns[name] + round(self.keep_s * 1e9)
                attempts = [job.attempt_id() for job in staying]
                orders[name].append({"do": "extend", "attempts": attempts, "until_ns": until_ns})
                self._ends_s[name] = fleet_s + self.keep_s

    def granted(self, node: str, fleet_s: float) -> None:
        """A new attempt got a lease with its start."""
        self._ends_s[node] = fleet_s + self.keep_s

    def surely_over(self, node: str, grace_s: float, fleet_s: float) -> bool:
        """Whether nothing can run on a silent node any more: all leases ended, and the grace after them."""
        return fleet_s > self._ends_s.get(node, fleet_s + self.keep_s) + grace_s + LOST_MARGIN_S
