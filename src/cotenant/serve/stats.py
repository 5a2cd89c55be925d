"""What a server counts: plain numbers that the request path can afford, shown as Prometheus metrics and as JSON.

Names, units and formulas: docs/metrics.md.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cotenant.serve.calls import Outcome
from cotenant.serve.requestlog import CsvLog, quoted

LATENCY_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128)
OUTCOMES = tuple(outcome.value for outcome in Outcome)
RECENT = 512  # latencies kept per service for the percentiles of `top`


@dataclass
class Histogram:
    """Counts by bucket; the last one is for what is over all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class ServiceStats:
    """Counts of one service (or application)."""

    def __init__(self, slo_ms: float) -> None:
        self.slo_ms = slo_ms
        self.received = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.latency = Histogram(LATENCY_MS)
        self.batch = Histogram(BATCH)
        self.recent: list[float] = []
        self._at = 0

    def answered(self, latency_ms: float) -> None:
        """Count an answer."""
        self.latency.add(latency_ms)
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
        self.services[service].batch.add(size)

    def worker_died(self) -> None:
        """A worker has gone without being asked to."""
        self.worker_deaths += 1


Sample = tuple[dict[str, str], float]


class Exposition:
    """The server's numbers in Prometheus's text format. `gauges` gives (name, help, samples) of the moment."""

    def __init__(self, stats: Stats, gauges: Callable[[], list[tuple[str, str, list[Sample]]]]) -> None:
        self.stats, self._gauges = stats, gauges

    def collect(self) -> Iterator[Any]:
        """For prometheus_client's registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        requests = CounterMetricFamily(
            "cotenant_serve_requests", "Requests that have ended, by outcome.", labels=["service", "outcome"]
        )
        received = CounterMetricFamily("cotenant_serve_received", "Requests that have arrived.", labels=["service"])
        latency = HistogramMetricFamily(
            "cotenant_serve_latency_seconds", "From arrival to answer, of answered requests.", labels=["service"]
        )
        batches = HistogramMetricFamily("cotenant_serve_batch_size", "Requests per batch.", labels=["service"])
        for name, own in self.stats.services.items():
            received.add_metric([name], own.received)
            for outcome, count in own.outcomes.items():
                requests.add_metric([name, outcome.value], count)
            latency.add_metric([name], _buckets(own.latency, 1e-3), own.latency.total / 1e3)
            batches.add_metric([name], _buckets(own.batch, 1.0), own.batch.total)
        yield from (requests, received, latency, batches)
        counters: tuple[tuple[str, str, int], ...] = (
            ("worker_deaths", "Workers that ended without being asked to.", self.stats.worker_deaths),
            ("replans", "Plans made.", self.stats.replans),
            ("switches", "Plans put in force.", self.stats.switches),
            ("models_loaded", "Models loaded into workers.", self.stats.models_loaded),
        )
        for key, what, total in counters:
            counter = CounterMetricFamily(f"cotenant_serve_{key}", what)
            counter.add_metric([], total)
            yield counter
        for key, what, samples in self._gauges():
            labels = list(samples[0][0]) if samples else []
            gauge = GaugeMetricFamily(f"cotenant_serve_{key}", what, labels=labels)
            for at, value in samples:
                gauge.add_metric([at[label] for label in labels], value)
            yield gauge

    def text(self) -> bytes:
        """The page for /metrics."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


def _buckets(histogram: Histogram, scale: float) -> list[tuple[str, float]]:
    """Cumulative counts as Prometheus wants them."""
    out, seen = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        out.append(("+Inf" if bound == float("inf") else f"{bound * scale:g}", float(seen)))
    return out
