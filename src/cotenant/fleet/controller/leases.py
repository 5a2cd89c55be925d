"""Leases of running jobs: a lease is the time for which a node may run a job without hearing from a controller. Leases
are extended well before they end, and remembered for nodes that stop responding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cotenant.fleet.state import PARKED, STARTING, UP, Job

LOST_MARGIN_S = 1.0


class Leases:
    """Extends the leases of running jobs; `keep_s`: length of a lease. The end of a lease is a time of the node's own
    monotonic clock, so that a delayed order does not grant more time than a prompt one.
    """

    def __init__(self, lease_s: float, keep_s: float) -> None:
        self.keep_s = keep_s
        self.every_s = min(lease_s, keep_s / 4)
        # node -> time at which an extension of its leases was last sent. If a node was unreachable for longer than
        # `every_s`, an extension is due as soon as it is back.
        self._extended_s: dict[str, float] = {}
        self._ends_s: dict[str, float] = {}  # node -> time (fleet's clock) by which all leases on that node have ended

    def extend(
        self, orders: Mapping[str, list[dict[str, Any]]], here: Mapping[str, list[Job]], clocks_ns: Mapping[str, int],
        fleet_s: float, monotonic_s: float, may_extend: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Find the nodes whose leases are due for an extension, and append the extensions to these nodes' `orders`.

        `here`: jobs on each node. `may_extend`: returns whether this controller still has the right to extend leases.
        `clocks_ns`: each node's clock, read before `may_extend` is called.
        """
        for name in here:
            self._ends_s.setdefault(name, fleet_s + self.keep_s)
        due = [
            name for name in here
            if name in orders and name in clocks_ns
            and monotonic_s - self._extended_s.get(name, -math.inf) >= self.every_s
        ]  # fmt: skip
        if not due or not may_extend():
            return
        for name in due:
            self._extended_s[name] = monotonic_s
            attempts = [j.attempt_id() for j in here[name] if j.attempt and j.attempt.phase in (STARTING, UP, PARKED)]
            if attempts:
                until_ns = clocks_ns[name] + round(self.keep_s * 1e9)
                orders[name].append({"do": "extend", "attempts": attempts, "until_ns": until_ns})
                self._ends_s[name] = fleet_s + self.keep_s

    def granted(self, node: str, fleet_s: float) -> None:
        """Record the lease that a new attempt to run a job received with the order to start."""
        self._ends_s[node] = fleet_s + self.keep_s

    def surely_over(self, node: str, grace_s: float, fleet_s: float) -> bool:
        """Return whether no job can run on an unresponsive node any more, because all leases on it and the grace time
        after them have ended.
        """
        return fleet_s > self._ends_s.get(node, fleet_s + self.keep_s) + grace_s + LOST_MARGIN_S
