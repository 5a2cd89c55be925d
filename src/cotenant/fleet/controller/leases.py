"""Leases of what runs: extended well before they end, and remembered, for a node that falls silent."""

from __future__ import annotations

import math
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
        self._extended_s: dict[str, float] = {}  # when, by node: one that was silent is not kept waiting
        self._ends_s: dict[str, float] = {}  # fleet time by which every lease that a node ever got has ended

    def extend(
        self, orders: Mapping[str, list[dict[str, Any]]], here: Mapping[str, list[Job]], clocks_ns: Mapping[str, int],
        fleet_s: float, monotonic_s: float, may_extend: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Add what is due to the orders: `here` names the jobs on each node, `clocks_ns` what its clock said before
        `may_extend` was asked."""
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
        """A new attempt got a lease with its start."""
        self._ends_s[node] = fleet_s + self.keep_s

    def surely_over(self, node: str, grace_s: float, fleet_s: float) -> bool:
        """Whether nothing can run on a silent node any more: all leases ended, and the grace after them."""
        return fleet_s > self._ends_s.get(node, fleet_s + self.keep_s) + grace_s + LOST_MARGIN_S
