"""What a server counts: plain numbers that the request path can afford, and its request log.

Names, units and formulas: docs/metrics.md; how they are shown: live_rows.py.
"""

from __future__ import annotations

import time

from cotenant.observability.exposition import Histogram
from cotenant.observability.metrics import SERVER_BATCH, SERVER_SECONDS
from cotenant.serving.dispatch.calls import Outcome
from cotenant.serving.dispatch.requestlog import CsvLog, quoted

RECENT = 512  # latencies kept per service for the percentiles of `top`


class ServiceStats:
    """Counts of one service (or application)."""

    def __init__(self, slo_ms: float) -> None:
        self.slo_ms = slo_ms
        self.received = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.latency = Histogram(SERVER_SECONDS.buckets)
        self.batch = Histogram(SERVER_BATCH.buckets)
        self.recent: list[float] = []
        self._at = 0

    def answered(self, latency_ms: float) -> None:
        """Count an answer."""
        self.latency.observe(latency_ms / 1e3)
        if len(self.recent) < RECENT:
            self.recent.append(latency_ms)
        else:
            self.recent[self._at] = latency_ms
            self._at = (self._at + 1) % RECENT

    def percentile(self, q: float) -> float | None:
        """Of the latest answers, ms."""
        if not self.recent:
            return None
        ordered = sorted(self.recent)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Stats:
    """All counts of a server, and its request log."""

    def __init__(self, slos_ms: dict[str, float], log: CsvLog | None = None) -> None:
        self.services = {name: ServiceStats(slo) for name, slo in slos_ms.items()}
        self._cells = {name: quoted(name) for name in slos_ms}
        self.log = log
        self.began = time.monotonic()
        self.worker_deaths = self.replans = self.switches = self.models_loaded = 0

    def unit(
        self, service: str, arrived_ms: float, queued_ms: float, batch: int, gpulet: str, executed_ms: float,
        outcome: Outcome, latency_ms: float,
    ) -> None:  # fmt: skip
        """A request of a service has ended."""
        own = self.services[service]
        own.outcomes[outcome] += 1
        if outcome is Outcome.OK or outcome is Outcome.LATE:
            own.answered(latency_ms)
        if self.log is not None:
            self.log.add(
                f"{self._cells[service]},{arrived_ms / 1e3:.6f},{queued_ms:.4f},{batch},{gpulet},{executed_ms:.4f},"
                f"{outcome.value}\n"
            )

    def batch(self, service: str, size: int, executed_ms: float) -> None:
        """A batch has been run."""
        self.services[service].batch.observe(size)

    def worker_died(self) -> None:
        """A worker has gone without being asked to."""
        self.worker_deaths += 1
