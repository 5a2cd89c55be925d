"""Request admission: checks that a service is ready and the request valid, and puts its items into the queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cotenant.serving.dispatch.calls import Call, Kind, Outcome, Refusal, Reply, Withdraw
from cotenant.serving.dispatch.lets import Loaded
from cotenant.serving.dispatch.pool import Pool
from cotenant.serving.dispatch.stats import Stats
from cotenant.serving.protocol.items import check_inputs, split
from cotenant.serving.protocol.oip import InferRequest
from cotenant.serving.protocol.tensors import TensorError

MOST_ROWS = 1024


class Admission:
    """Admits requests to the queues of services. `state`: returns why a service is not ready, or "" if it is ready.
    `concurrency`: largest number of items at once, by service."""

    def __init__(
        self, pool: Pool, stats: Stats, state: Callable[[str], str], concurrency: Mapping[str, int] | None = None
    ) -> None:
        self.pool, self.stats = pool, stats
        self._state = state
        self._concurrency = dict(concurrency or {})

    def full(self, name: str) -> None:
        """Count a request that was refused before its items came into the queue."""
        if name in self.stats.services:
            self.stats.services[name].received += 1
            self.stats.unit(name, self.pool.now_ms(), 0.0, 0, "", 0.0, Outcome.FULL, 0.0)

    def ready(self, name: str, version: str = "") -> Loaded:
        """The loaded model of a service. Raises Refusal if the service is unknown or not ready, or if its model has
        another version than the requested one."""
        loaded = self.pool.loaded.get(name)
        if loaded is None or self._state(name):
            if name not in self.pool.service:
                raise Refusal(Kind.UNKNOWN, f"there is no model {name[:200]!r}")
            raise Refusal(Kind.UNAVAILABLE, f"model {name!r} is not ready: {self._state(name) or 'loading'}", 1.0)
        if version and version != loaded.version:
            raise Refusal(
                Kind.UNKNOWN, f"model {name!r} has no version {version[:50]!r}; the served version is {loaded.version}"
            )
        return loaded

    def submit(self, request: InferRequest, reply: Reply, deadline_ms: float | None = None) -> Withdraw:
        """Put a request into the queue of a service (or of a stage of an application), item by item."""
        name = request.model
        loaded = self.ready(name, request.version)
        try:
            inputs, rows = check_inputs(request.inputs, loaded.info)
        except TensorError as error:
            raise Refusal(Kind.WRONG, str(error)) from None
        if request.outputs is not None:
            known = {spec.name for spec in loaded.info.outputs}
            unknown = next((x for x in request.outputs if x not in known), None)
            if unknown is not None:
                raise Refusal(Kind.WRONG, f"model {name!r} has no output {unknown[:200]!r}; it has {', '.join(known)}")
        most = min(MOST_ROWS, self.pool.service[name].max_queue)
        if rows > most:
            raise Refusal(Kind.WRONG, f"a request may have at most {most} items, not {rows}")
        limit = self._concurrency.get(name)
        if limit is not None and self.pool.in_flight[name] + rows > limit:
            self.full(name)
            what = f"{name} already processes {self.pool.in_flight[name]} items; its limit is {limit}"
            raise Refusal(Kind.FULL, what, self.pool.retry_s(name))
        self.stats.services[name].received += rows
        call = Call(request, name, loaded.version, rows, reply)
        if not loaded.info.batchable:
            call.unstacked = True
        if request.timeout_ms is not None:
            deadline_ms = request.timeout_ms
        offer = self.pool.offer
        for row, tensors in enumerate(split(inputs, rows, loaded.info.batchable)):
            # if one item of a request is refused, the whole request fails, so its other items need not run
            if call.done:
                break
            offer(call, tensors, row, deadline_ms)
        return partial(self.pool.withdraw, call)
