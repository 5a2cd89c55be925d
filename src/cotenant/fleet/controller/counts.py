"""What a controller counts for its metrics, since it started."""

from __future__ import annotations

from cotenant.observability.exposition import Histogram
from cotenant.observability.metrics import FLEET_DECISION, FLEET_WAIT


class Counts:
    """Decisions of the policy with how long they took, and waits of jobs until their processes ran for the first time;
    both in seconds."""

    def __init__(self) -> None:
        self.rounds = 0
        self.last_decision_s = 0.0
        self.decisions = Histogram(FLEET_DECISION.buckets)
        self.waits = Histogram(FLEET_WAIT.buckets)

    def decided(self, took_s: float) -> None:
        """A decision was made."""
        self.rounds += 1
        self.last_decision_s = took_s
        self.decisions.observe(took_s)
