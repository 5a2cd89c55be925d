"""Live metrics of the webhook and the device plugin, and a plain HTTP port for them."""

from __future__ import annotations

import http.server
import threading
from abc import ABC, abstractmethod
from collections import Counter

from cotenant.core.errors import WorkError
from cotenant.observability.exposition import CONTENT_TYPE, Exposition, Histogram
from cotenant.observability.metrics import (
    ALLOCATIONS,
    BOUND,
    DEVICES,
    ESCAPED,
    PLUGIN,
    REGISTRATIONS,
    REVIEW_BUCKETS_S,
    REVIEW_SECONDS,
    REVIEWS,
    UNBOUND,
)

OUTCOMES = ("injected", "unchanged", "denied", "failed", "rejected")


class Exposed(ABC):
    """Base class of metrics that several threads may update while they are read."""

    content_type = CONTENT_TYPE

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @abstractmethod
    def text(self) -> str:
        """The exposition in Prometheus' text format."""

    def listen(self, host: str, port: int) -> http.server.ThreadingHTTPServer:
        """Serve the metrics on a port of their own, in a thread. Raises WorkError if the port is taken."""
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] in ("/metrics", "/healthz")
                body = page.text().encode() if found else b"metrics are at /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", page.content_type if found else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Requests for the metrics are not logged."""

        try:
            server = http.server.ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise WorkError(f"cannot listen on {host} port {port} for metrics: {error.strerror or error}") from None
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        return server


class WebhookMetrics(Exposed):
    """Metrics of the webhook: reviews by outcome, and how long they took."""

    def __init__(self) -> None:
        super().__init__()
        self._reviews: Counter[str] = Counter()
        self._seconds = Histogram(REVIEW_BUCKETS_S)

    def review(self, outcome: str, seconds: float) -> None:
        """Record that a review was answered."""
        with self.lock:
            self._reviews[outcome] += 1
            self._seconds.observe(seconds)

    def text(self) -> str:
        page = Exposition()
        with self.lock:
            for outcome in OUTCOMES:
                page.add(REVIEWS, self._reviews[outcome], outcome=outcome)
            page.histogram(REVIEW_SECONDS, self._seconds)
        return page.text()


class PluginMetrics(Exposed):
    """Metrics of the device plugin: units by resource and health, allocations, registrations, bound containers."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: dict[str, tuple[int, int]] = {}
        self._allocations: Counter[tuple[str, str]] = Counter()
        self._registrations: Counter[str] = Counter()
        self.bound = self.unbound = self.escaped = 0

    def devices(self, resource: str, healthy: int, unhealthy: int) -> None:
        """Record how many devices of a resource were reported to the kubelet as healthy, and as unhealthy."""
        with self.lock:
            self._devices[resource] = healthy, unhealthy
            self._registrations.setdefault(resource, 0)
            for outcome in ("granted", "refused"):
                self._allocations.setdefault((resource, outcome), 0)

    def allocation(self, resource: str, outcome: str) -> None:
        """Record that a container was granted or refused devices."""
        with self.lock:
            self._allocations[resource, outcome] += 1

    def registration(self, resource: str) -> None:
        """Record a registration with the kubelet."""
        with self.lock:
            self._registrations[resource] += 1

    def text(self) -> str:
        page = Exposition()
        page.declare(PLUGIN)
        with self.lock:
            for resource, counts in self._devices.items():
                for health, count in zip(("healthy", "unhealthy"), counts, strict=True):
                    page.add(DEVICES, count, resource=resource, health=health)
            for (resource, outcome), count in self._allocations.items():
                page.add(ALLOCATIONS, count, resource=resource, outcome=outcome)
            for resource, count in self._registrations.items():
                page.add(REGISTRATIONS, count, resource=resource)
            page.add(BOUND, self.bound)
            page.add(UNBOUND, self.unbound)
            page.add(ESCAPED, self.escaped)
        return page.text()
