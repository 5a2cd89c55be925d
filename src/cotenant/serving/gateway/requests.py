"""One request, whatever it came by: what it is for, whether it may go on, its items, its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cotenant.serving.dispatch.apps import Applications
from cotenant.serving.dispatch.calls import Call, Kind, Outcome, Refusal, Reply, check_inputs, split
from cotenant.serving.dispatch.pool import Loaded, Pool
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.protocol.oip import InferAnswer, InferRequest

MOST_ROWS = 1024


@dataclass(frozen=True)
class Limits:
    """What a server takes: requests in it at once, of all services and per service."""

    in_flight: int = 10_000
    concurrency: Mapping[str, int] | None = None


class Gateway:
    """Checks requests and hands them on. `state` says why a service that is known is not ready, "" when it is."""

    def __init__(
        self, pool: Pool, stats: Stats, limits: Limits, applications: Applications, state: Callable[[str], str]
    ) -> None:
        self.pool, self.stats, self.limits, self.applications = pool, stats, limits, applications
        self._state = state
        self._concurrency = dict(limits.concurrency or {})
        self.draining = False
        self.open = 0

    def infer(self, request: InferRequest, reply: Reply) -> None:
        """Serve a request: `reply` gets the answer or the refusal, once, now or later."""
        self.open += 1

        def counted(answer: InferAnswer | Refusal) -> None:
            self.open -= 1
            reply(answer)

        try:
            if self.draining:
                raise Refusal(Kind.UNAVAILABLE, "the server is shutting down", 1.0)
            self._room(request)
            if request.model in self.applications.names:
                self.applications.begin(request, counted)
            else:
                self.submit(request, counted)
        except Refusal as refusal:
            counted(refusal)

    def _room(self, request: InferRequest) -> None:
        """Refuse beyond the server's limit; the lower a request's priority, the earlier."""
        service = self.pool.service.get(request.model)
        priority = request.priority or (service.priority if service is not None else 0)
        most = self.limits.in_flight
        if self.open > (most if priority > 0 else most * 9 // 10 if priority == 0 else most // 2):
            self.full(request.model)
            raise Refusal(Kind.FULL, f"the server has {self.open} requests already", 0.5)

    def full(self, name: str) -> None:
        """Count a request that never got into a queue."""
        if name in self.stats.services:
            self.stats.services[name].received += 1
            self.stats.unit(name, self.pool.now_ms(), 0.0, 0, "", 0.0, Outcome.FULL, 0.0)

    def ready(self, name: str, version: str = "") -> Loaded:
        """What is loaded for a service; Refusal when it is unknown, not ready, or of another version."""
        loaded = self.pool.loaded.get(name)
        if loaded is None or self._state(name):
            if name not in self.pool.service:
                raise Refusal(Kind.UNKNOWN, f"there is no model {name[:200]!r}")
            raise Refusal(Kind.UNAVAILABLE, f"model {name!r} is not ready: {self._state(name) or 'loading'}", 1.0)
        if version and version != loaded.version:
            raise Refusal(Kind.UNKNOWN, f"model {name!r} has no version {version[:50]!r}; {loaded.version} is served")
        return loaded

    def submit(self, request: InferRequest, reply: Reply, deadline_ms: float | None = None) -> None:
        """A request to a service (or a stage of an application) joins its queue, item by item."""
        name = request.model
        loaded = self.ready(name, request.version)
        inputs, rows = check_inputs(request.inputs, loaded.info.inputs, loaded.info.batchable)
        if request.outputs is not None:
            known = {spec.name for spec in loaded.info.outputs}
            unknown = next((x for x in request.outputs if x not in known), None)
            if unknown is not None:
                raise Refusal(Kind.WRONG, f"model {name!r} has no output {unknown[:200]!r}; it has {', '.join(known)}")
        most = min(MOST_ROWS, self.pool.service[name].max_queue)
        if rows > most:
            raise Refusal(Kind.WRONG, f"a request of {rows} items; {most} is the most")
        limit = self._concurrency.get(name)
        if limit is not None and self.pool.in_flight[name] + rows > limit:
            self.full(name)
            what = f"{name} has {self.pool.in_flight[name]} requests already"
            raise Refusal(Kind.FULL, what, self.pool.retry_s(name))
        self.stats.services[name].received += rows
        call = Call(request, name, loaded.version, rows, reply)
        if not loaded.info.batchable:
            call.unstacked = True
        if request.timeout_ms is not None:
            deadline_ms = request.timeout_ms
        offer = self.pool.offer
        for row, tensors in enumerate(split(inputs, rows, loaded.info.batchable)):
            if call.done:  # an item was refused: the rest need not be run
                break
            offer(call, tensors, row, deadline_ms)
