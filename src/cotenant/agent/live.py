"""The agent's part of the live page and of the metrics."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from cotenant.observability import metrics as names
from cotenant.observability.exposition import Exposition, Histogram
from cotenant.observability.feed import PAUSE_EVERY, Feed, Row
from cotenant.observability.http import LiveServer, is_loopback, parse_address
from cotenant.policy.shares import Ended

if TYPE_CHECKING:
    from cotenant.agent.config.files import TenantSpec
    from cotenant.agent.daemon import Agent

MOST_TENANTS = 2000  # exported one by one
MOST_DECISIONS = 50


class Live:
    """What page and metrics need beside the agent's own state: histograms of turns, last decisions, and the port."""

    def __init__(self, agent: Agent) -> None:
        gpus = [gpu.uuid for gpu in agent.gpus]
        self.agent = agent
        self.node_name = socket.gethostname()
        self.started_unix_s = time.time()
        self.turns = dict.fromkeys(gpus, 0)
        self.lengths = {gpu: Histogram(names.TURN_SECONDS.buckets) for gpu in gpus}
        self.waits = {gpu: Histogram(names.TURN_WAIT.buckets) for gpu in gpus}
        self.decisions: deque[tuple[int, float, str]] = deque(maxlen=MOST_DECISIONS)
        self._number = 0
        self._server: LiveServer | None = None

    async def listen(self) -> None:
        """Open the port, if one was asked for. WorkError where that fails."""
        options = self.agent.options
        if options.http is None:
            return
        host, port = parse_address(options.http, "--http")
        if not is_loopback(host) and options.http_token is None:
            self.agent.log(f"{options.http} is reached from other machines, and anybody may read the page there")
        feed = Feed(lambda: rows(self.agent))
        self._server = LiveServer(host, port, feed, lambda: exposition(self.agent), options.http_token)
        await self._server.start()
        self.agent.log(f"live page and metrics at {self._server.url}")

    async def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            await self._server.close()

    def turn(self, ended: Ended) -> None:
        """A turn is over."""
        self.turns[ended.gpu] += 1
        self.lengths[ended.gpu].observe((ended.end_ns - ended.start_ns) / 1e9)
        self.waits[ended.gpu].observe(ended.waited_ns / 1e9)

    def decided(self, text: str) -> None:
        """Something about tenants was decided: one sentence for people."""
        self._number += 1
        self.decisions.append((self._number, time.time(), text))


def promise(spec: TenantSpec) -> str:
    """What a tenant was promised, in words."""
    memory = "" if spec.memory_bytes is None else f", memory {spec.memory_bytes / 2**30:.1f} GiB"
    return f"request {spec.request:.0%}, limit {spec.limit:.0%}{memory}, by {spec.mechanism}"


async def rows(agent: Agent) -> AsyncIterator[Row]:
    """Rows of the live page; pauses between tenants, because turns are handed out by the same thread."""
    operations = agent.operations
    yield "sources", "agent", {"name": agent.live.node_name, "kind": "agent", "address": str(agent.folder), "ok": True,
                               "note": agent.config_fault}  # fmt: skip
    for uuid in agent.registry.gpus:
        gpu = operations.gpu_row(uuid)
        yield (
            "gpus",
            uuid,
            {
                "node": agent.live.node_name,
                "index": gpu["index"],
                "model": gpu["name"],
                "memory_bytes": gpu["memory_bytes"],
                "memory_used_bytes": gpu["memory_charged_bytes"],
                "holder": gpu["holder"],
                "promised": gpu["promised"],
            },
        )
    for tenant in list(agent.registry.tenants.values()):
        row = operations.tenant_row(tenant)
        for share in row["gpus"]:
            yield "shares", f"{row['name']} {share['uuid']}", _share(row, share)
        for number, text in enumerate(row["warnings"]):
            about = {"source": agent.live.node_name, "about": row["name"], "text": text}
            yield "warnings", f"{row['name']} {number}", about
    for number, at_s, text in agent.live.decisions:
        yield "decisions", str(number), {"time_s": round(at_s, 3), "source": agent.live.node_name, "text": text}


def _share(row: dict[str, Any], share: dict[str, Any]) -> dict[str, Any]:
    """Rounded to what the page shows, so that a quiet tenant's row does not change."""
    return {
        "gpu": share["uuid"],
        "tenant": row["name"],
        "kind": "tenant",
        "mechanism": row["mechanism"],
        "granted": row["request"],
        "limit": row["limit"],
        "got": None if share["got"] is None else round(share["got"], 3),
        "memory_bytes": share["memory_used_bytes"],
        "memory_limit_bytes": share["memory_limit_bytes"],
        "state": row["state"],
        "residency": _residency(share.get("residency")),
        "holding": share["holding"],
        "waiting": share["waiting"],
        "class": None if row["class"] == "normal" else row["class"],
        "floor": share["floor"] or None,
        "waited_s": round(share["waited_s"] or row["gate_wait_s"], 1),
        "turns": share["turns"],
        "note": row["holder"]["name"] if isinstance(row.get("holder"), dict) and "name" in row["holder"] else None,
    }


def _residency(where: dict[str, Any] | None) -> str | None:
    """Where the contents of a tenant that may be moved are."""
    if where is None or not where["movable_bytes"]:
        return None
    there = where["resident_bytes"] / where["movable_bytes"]
    return "resident" if there == 1 else "moved off" if there == 0 else f"{there:.0%} on the GPU"


async def exposition(agent: Agent) -> str:
    """The agent's metrics as text."""
    out = Exposition()
    out.declare(names.AGENT)
    for uuid in agent.registry.gpus:
        gpu = agent.operations.gpu_row(uuid)
        out.add(names.GPU_INFO, 1, gpu=uuid, index=str(gpu["index"]), model=gpu["name"])
        out.add(names.GPU_MEMORY, gpu["memory_bytes"], gpu=uuid)
        out.add(names.GPU_CHARGED, gpu["memory_charged_bytes"], gpu=uuid)
        out.add(names.GPU_PROMISED, gpu["promised"], gpu=uuid)
        out.add(names.AGENT_TURNS, agent.live.turns[uuid], gpu=uuid)
        out.histogram(names.TURN_SECONDS, agent.live.lengths[uuid], gpu=uuid)
        out.histogram(names.TURN_WAIT, agent.live.waits[uuid], gpu=uuid)
    tenants = list(agent.registry.tenants.values())
    out.add(names.AGENT_START, agent.live.started_unix_s)
    out.add(names.AGENT_TENANTS, len(tenants))
    out.add(names.AGENT_UNLISTED, max(0, len(tenants) - MOST_TENANTS))
    out.add(names.AGENT_PROCESSES, len(agent.server.sessions))
    out.add(names.AGENT_REFUSED, agent.server.refused_connections)
    out.add(names.AGENT_CONFIG_FAULT, 1 if agent.config_fault else 0)
    for number, tenant in enumerate(tenants[:MOST_TENANTS]):
        _tenant(out, agent.operations.tenant_row(tenant))
        if number % PAUSE_EVERY == 0:
            await asyncio.sleep(0)
    return out.text()


def _tenant(out: Exposition, row: dict[str, Any]) -> None:
    name = row["name"]
    out.add(names.TENANT_REQUEST, row["request"], tenant=name)
    out.add(names.TENANT_LIMIT, row["limit"], tenant=name)
    out.add(names.TENANT_HOST, row["host_pinned_bytes"], tenant=name)
    out.add(names.TENANT_LAUNCHES, row["launches"], tenant=name)
    out.add(names.TENANT_LAUNCH_WAIT, row["gate_wait_s"], tenant=name)
    out.add(names.TENANT_WARNINGS, row["warning_count"], tenant=name)
    caps = {share["memory_limit_bytes"] for share in row["gpus"] if share["memory_limit_bytes"] is not None}
    for cap in caps:
        out.add(names.TENANT_MEMORY_LIMIT, cap, tenant=name)
    for share in row["gpus"]:
        gpu = share["uuid"]
        if share["got"] is not None:
            out.add(names.TENANT_SHARE, share["got"], tenant=name, gpu=gpu)
        out.add(names.TENANT_MEMORY, share["memory_used_bytes"], tenant=name, gpu=gpu)
        out.add(names.TENANT_HELD, share["held_s"], tenant=name, gpu=gpu)
        out.add(names.TENANT_WAIT, share["waited_s"], tenant=name, gpu=gpu)
        out.add(names.TENANT_OVERRUN, share["overrun_s"], tenant=name, gpu=gpu)
        out.add(names.TENANT_TURNS, share["turns"], tenant=name, gpu=gpu)
