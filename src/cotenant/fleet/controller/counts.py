"""Counters of a controller (decisions, waiting times) for its metrics."""

from __future__ import annotations

from cotenant.observability.exposition import Histogram
from cotenant.observability.metrics import FLEET_DECISION, FLEET_WAIT


class Counts:
    """Number and duration of the policy's decisions, and waiting times of jobs until their processes first ran; in
    seconds.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.last_decision_s = 0.0
        self.decisions = Histogram(FLEET_DECISION.buckets)
        self.waits = Histogram(FLEET_WAIT.buckets)

    def decided(self, took_s: float) -> None:
        """Record a decision of the policy and how long it took."""
        self.rounds += 1
        self.last_decision_s = took_s
        self.decisions.observe(took_s)
