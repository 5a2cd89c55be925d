"""The server's metrics, and the rows about the server on the live page (pages.py)."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cotenant.observability import metrics as names
from cotenant.observability.exposition import Exposition
from cotenant.observability.feed import Row
from cotenant.serving.dispatch.calls import Outcome

if TYPE_CHECKING:
    from cotenant.serving.dispatch.lets import Let
    from cotenant.serving.gateway.management import Api

WINDOW_MS = 10_000.0


def exposition(api: Api, doors: Mapping[str, tuple[int, int]]) -> str:
    """The metrics page for Prometheus; `doors`: open and refused connections by endpoint."""
    out = Exposition()
    out.declare(names.SERVER)
    stats, pool, plan = api.stats, api.pool, api.pool.plan
    for name, own in stats.services.items():
        out.add(names.SERVER_RECEIVED, own.received, service=name)
        for outcome, count in own.outcomes.items():
            out.add(names.SERVER_REQUESTS, count, service=name, outcome=outcome.value)
        out.histogram(names.SERVER_SECONDS, own.latency, service=name)
        out.histogram(names.SERVER_BATCH, own.batch, service=name)
        out.add(names.SERVER_SLO, own.slo_ms / 1e3, service=name)
    for name in pool.service:
        out.add(names.SERVER_WAITING, pool.waiting(name), service=name)
        out.add(names.SERVER_READY, 0 if api.crew.why_not(name) else 1, service=name)
    for name, rate in api.replanner.measured.items():
        out.add(names.SERVER_RATE, rate, service=name)
    for name, capacity in plan.capacities().items():
        out.add(names.SERVER_CAPACITY, capacity, service=name)
    for let in pool.lets:
        out.add(names.SERVER_BUSY, let.busy_ms / 1e3, gpu=str(let.spec.gpu), gpulet=let.spec.name)
    out.add(names.SERVER_GPUS_USED, plan.gpus_used)
    out.add(names.SERVER_GPUS_HELD, api.replanner.held)
    out.add(names.SERVER_OPEN, api.gateway.open)
    for door, (connected, refused) in doors.items():
        out.add(names.SERVER_CONNECTIONS, connected, door=door)
        out.add(names.SERVER_REFUSED, refused, door=door)
    out.add(names.SERVER_REPLANS, stats.replans)
    out.add(names.SERVER_SWITCHES, stats.switches)
    out.add(names.SERVER_LOADS, stats.models_loaded)
    out.add(names.SERVER_DEATHS, stats.worker_deaths)
    return out.text()


class Got:
    """Measures which share of a GPU each gpulet (a part of a GPU that one worker serves) used during about the last
    WINDOW_MS.
    """

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Let, deque[tuple[float, float]]] = WeakKeyDictionary()

    def share(self, let: Let, now_ms: float) -> float | None:
        """Return the fraction of the window in which the gpulet was busy, multiplied by the gpulet's size: 0..1 of its
        GPU. None at the first call.
        """
        busy_ms = let.busy_ms + (now_ms - let.started_ms if let.job is not None else 0.0)
        seen = self._seen.setdefault(let, deque())
        while seen and now_ms - seen[0][0] > WINDOW_MS:
            seen.popleft()
        seen.append((now_ms, busy_ms))
        from_ms, before_ms = seen[0]
        if now_ms <= from_ms:
            return None
        return round(let.spec.percent / 100 * (busy_ms - before_ms) / (now_ms - from_ms), 3)


async def rows(api: Api, address: str, got: Got) -> AsyncIterator[Row]:
    """Rows of the live page (fields: observability/feed.py)."""
    status = api.status()
    node = socket.gethostname()
    yield "sources", "server", {
        "name": f"{node} serve", "kind": "server", "address": address, "ok": True, "note": api.not_ready(),
    }  # fmt: skip
    for gpu in sorted({let["gpu"] for let in status["gpulets"]}):
        mine = [let for let in api.pool.lets if let.spec.gpu == gpu]
        yield "gpus", f"server-{gpu}", {
            "node": node, "index": gpu, "model": mine[0].spec.gpu_model if mine else "",
            "promised": sum(let.spec.percent for let in mine) / 100,
        }  # fmt: skip
    for let in api.pool.lets:
        batches = sorted({seat.batch for seat in let.spec.seats})
        yield "shares", f"gpulet-{let.spec.name}", {
            "gpu": f"server-{let.spec.gpu}", "tenant": ", ".join(seat.service for seat in let.spec.seats),
            "kind": "service", "note": f"batches of {' or '.join(map(str, batches))}",
            "mechanism": api.crew.config.deployment.mechanism, "granted": let.spec.percent / 100,
            "limit": let.spec.percent / 100, "got": got.share(let, api.pool.now_ms()), "holding": let.job is not None,
            "state": "serving" if let.worker is not None else "starting",
        }  # fmt: skip
    for service in status["services"]:
        own = api.stats.services[service["name"]]
        counts = own.outcomes
        ended = sum(counts.values())
        yield "services", service["name"], {
            "rate_rps": service["rate_rps"], "slo_ms": service["slo_ms"], "p50_ms": service["p50_ms"],
            "p99_ms": service["p99_ms"], "attainment": counts[Outcome.OK] / ended if ended else None,
            "dropped": counts[Outcome.DROPPED] + counts[Outcome.FULL], "failed": counts[Outcome.FAILED],
            "queue": service["waiting"], "part_of": service["part_of"], "state": service["not_ready"] or "ready",
            "places": ", ".join(
                f"{let.spec.percent:g}% of GPU {let.spec.gpu}" for let in api.pool.lets if service["name"] in let.seats
            ),
        }  # fmt: skip
    for number, at, text in api.decisions.rows:
        yield "decisions", f"server-{number}", {"time_s": at, "source": "server", "text": text}
    if status["note"]:
        yield "warnings", "server-plan", {"source": "server", "about": "plan", "text": status["note"]}
