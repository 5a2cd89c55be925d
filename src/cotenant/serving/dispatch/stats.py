"""Counters of a server, cheap enough for the request path, and its request log.

Names, units and formulas: docs/metrics.md; presentation: live_rows.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from cotenant.observability.exposition import Histogram
from cotenant.observability.metrics import SERVER_BATCH, SERVER_SECONDS
from cotenant.serving.dispatch.calls import Outcome
from cotenant.serving.dispatch.requestlog import CsvLog, quoted

RECENT = 512  # number of latest latencies of a service from which the percentiles in `cotenant top` are computed
PARTS = ("compute_input", "compute_infer", "compute_output")


class Duration:
    """Count and total duration of events of one kind."""

    __slots__ = ("count", "ms")

    def __init__(self) -> None:
        self.count, self.ms = 0, 0.0

    def add(self, ms: float) -> None:
        """Add one event of this duration."""
        self.count += 1
        self.ms += ms

    def shown(self) -> dict[str, int]:
        """Return the number of events and their total time, as the protocol's statistics extension writes them."""
        return {"count": self.count, "ns": round(self.ms * 1e6)}


class Requests:
    """Statistics of a service for the statistics extension: of its requests (not their items), and of its batches by
    size. As in Triton, a batch's time counts for each request that it answers.
    """

    def __init__(self) -> None:
        self.times = {name: Duration() for name in ("success", "fail", "queue", *PARTS)}
        self.batches: dict[int, dict[str, Duration]] = {}
        self.items = self.executions = 0
        self.last_s = 0.0

    def answered(self, took_ms: float, queued_ms: float, parts_ms: Sequence[float]) -> None:
        """Count an answered request of the service."""
        self.last_s = time.time()
        for name, ms in zip(("success", "queue", *PARTS), (took_ms, queued_ms, *parts_ms), strict=True):
            self.times[name].add(ms)

    def batch(self, size: int, parts_ms: Sequence[float]) -> None:
        """Count a batch of the service by its size."""
        self.items += size
        self.executions += 1
        known = self.batches.get(size)
        if known is None:
            known = self.batches[size] = {name: Duration() for name in PARTS}
        for name, ms in zip(PARTS, parts_ms, strict=True):
            known[name].add(ms)

    def shown(self) -> dict[str, object]:
        """Return the statistics of the service as the protocol's statistics extension writes them."""
        nothing = Duration().shown()  # the server has no response cache, so these durations are 0
        return {
            "last_inference": round(self.last_s * 1e3), "inference_count": self.items,
            "execution_count": self.executions,
            "inference_stats": {name: one.shown() for name, one in self.times.items()}
            | {"cache_hit": nothing, "cache_miss": nothing},
            "batch_stats": [
                {"batch_size": size} | {name: one.shown() for name, one in parts.items()}
                for size, parts in sorted(self.batches.items())
            ],
        }  # fmt: skip


class ServiceStats:
    """Counters of one service (or application)."""

    def __init__(self, slo_ms: float) -> None:
        self.slo_ms = slo_ms
        self.received = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.latency = Histogram(SERVER_SECONDS.buckets)
        self.batch = Histogram(SERVER_BATCH.buckets)
        self.requests = Requests()
        self.recent: deque[float] = deque(maxlen=RECENT)

    def answered(self, latency_ms: float) -> None:
        """Count an answer and its latency."""
        self.latency.observe(latency_ms / 1e3)
        self.recent.append(latency_ms)

    def percentile(self, q: float) -> float | None:
        """Return a percentile of the latencies of recent answers, in ms."""
        if not self.recent:
            return None
        ordered = sorted(self.recent)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Stats:
    """All counters of a server, and its request log."""

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
        """Add a request that has ended to the counters of its service."""
        own = self.services[service]
        own.outcomes[outcome] += 1
        if outcome is Outcome.OK or outcome is Outcome.LATE:
            own.answered(latency_ms)
        if self.log is not None:
            self.log.add(
                f"{self._cells[service]},{arrived_ms / 1e3:.6f},{queued_ms:.4f},{batch},{gpulet},{executed_ms:.4f},"
                f"{outcome.value}\n"
            )

    def batch(self, service: str, size: int, parts_ms: Sequence[float]) -> None:
        """Count a batch; `parts_ms`: input transfer, execution, output transfer."""
        own = self.services[service]
        own.batch.observe(size)
        own.requests.batch(size, parts_ms)
