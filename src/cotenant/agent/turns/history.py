"""Recent turns, decisions and warnings, for the live page and the metrics."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

from cotenant.agent.tenants.tenant import Tenant
from cotenant.agent.turns.trace import TurnTrace
from cotenant.observability import metrics as names
from cotenant.observability.exposition import Histogram
from cotenant.policy.shares import Ended

LOG = logging.getLogger(__name__)

MOST_DECISIONS = 50
MOST_DEPARTED = 256


class History:
    """Histograms of turns, recent decisions about tenants, and warnings of tenants that have ended."""

    def __init__(self, gpus: Iterable[str], trace: TurnTrace | None = None) -> None:
        gpus = list(gpus)
        self.turns = dict.fromkeys(gpus, 0)
        self.lengths = {gpu: Histogram(names.TURN_SECONDS.buckets) for gpu in gpus}
        self.waits = {gpu: Histogram(names.TURN_WAIT.buckets) for gpu in gpus}
        self.decisions: deque[tuple[int, float, str]] = deque(maxlen=MOST_DECISIONS)
        # name -> warnings of a tenant that has ended, for its launcher to show
        self.departed: dict[str, list[str]] = {}
        self.trace = trace
        self._number = 0

    def turn(self, ended: Ended) -> None:
        """Record a turn that has ended, in the histograms."""
        self.turns[ended.gpu] += 1
        self.lengths[ended.gpu].observe((ended.end_ns - ended.start_ns) / 1e9)
        self.waits[ended.gpu].observe(ended.waited_ns / 1e9)
        if self.trace is not None:
            self.trace.turn(ended)

    def decided(self, text: str) -> None:
        """Record a decision about tenants as one sentence."""
        self._number += 1
        self.decisions.append((self._number, time.time(), text))

    def warned(self, tenant: Tenant, text: str) -> None:
        """Record a warning about a tenant for its user and the log."""
        tenant.warn(text)
        LOG.warning(f"tenant {tenant.name}: {text}")

    def fault(self, tenant: Tenant, text: str) -> None:
        """Record a fault of a tenant as a warning and a decision, since the agent acts on it."""
        self.warned(tenant, text)
        self.decided(f"{tenant.name}: {text}")

    def left(self, tenant: Tenant) -> None:
        """Record that a tenant was removed, and keep its warnings for its launcher."""
        self.decided(f"{tenant.name} left")
        self.departed[tenant.name] = list(tenant.warnings)
        if len(self.departed) > MOST_DEPARTED:
            del self.departed[next(iter(self.departed))]
