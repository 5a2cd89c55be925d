"""The live page (HTML) and the metrics of the agent, served over HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from cotenant.agent.audit.processes import ONLY_ITS_OWN
from cotenant.agent.config.files import InForce
from cotenant.agent.control.rows import Rows
from cotenant.agent.shims.server import ShimServer
from cotenant.agent.tenants.registry import Registry
from cotenant.agent.turns.history import History
from cotenant.core.units import sms_text
from cotenant.observability import metrics as names
from cotenant.observability.exposition import Exposition
from cotenant.observability.feed import PAUSE_EVERY, Feed, Row
from cotenant.observability.http import LiveServer, is_loopback, parse_address

LOG = logging.getLogger(__name__)

MOST_TENANTS = 2000  # largest number of tenants that have metrics of their own


class LivePage:
    """Serves the live page and the metrics at one HTTP port."""

    def __init__(
        self,
        rows: Rows,
        registry: Registry,
        history: History,
        server: ShimServer,
        in_force: InForce,
    ) -> None:
        self.node_name = socket.gethostname()
        self._rows, self._registry, self._history, self._server = rows, registry, history, server
        self._in_force = in_force
        self._started_unix_s = time.time()
        self._port: LiveServer | None = None

    async def listen(self, address: str | None, token: str | None) -> None:
        """Open the HTTP port of the live page and the metrics, if the agent's options name one. Raises WorkError on
        failure.
        """
        if address is None:
            return
        host, port = parse_address(address, "--http")
        if not is_loopback(host) and token is None:
            LOG.warning(f"{address} can be reached from other machines without a token: anyone can read the page")
        self._port = LiveServer(host, port, Feed(self.rows), self.exposition, token)
        await self._port.start()
        LOG.info(f"live page and metrics at {self._port.url}")

    async def close(self) -> None:
        """Close the HTTP port of the live page and the metrics."""
        if self._port is not None:
            await self._port.close()

    async def rows(self) -> AsyncIterator[Row]:
        """Rows of the live page. The iterator is asynchronous, so that the agent can grant turns between the rows of
        two tenants.
        """
        agent = {"name": self.node_name, "kind": "agent", "address": str(self._rows.folder)}
        yield "sources", "agent", agent | {"ok": True, "note": self._in_force.fault}
        for uuid in self._registry.gpus:
            gpu = self._rows.gpu(uuid)
            yield (
                "gpus",
                uuid,
                {
                    "node": self.node_name,
                    "index": gpu["index"],
                    "model": gpu["name"],
                    "memory_bytes": gpu["memory_bytes"],
                    "memory_used_bytes": gpu["memory_charged_bytes"],
                    "holder": gpu["holder"],
                    "promised": gpu["promised"],
                },
            )
        for tenant in list(self._registry.tenants.values()):
            row = self._rows.tenant(tenant)
            for share in row["gpus"]:
                yield "shares", f"{row['name']} {share['uuid']}", _share(row, share)
                # the feed sends only rows that have changed. The minutes of the last hour change once a minute, but the
                # share changes each time it is read, so the minutes have a row of their own.
                if share["hour"]:
                    yield "hours", f"{row['name']} {share['uuid']}", {"minutes": share["hour"]}
            for number, text in enumerate(row["warnings"]):
                about = {"source": self.node_name, "about": row["name"], "text": text}
                yield "warnings", f"{row['name']} {number}", about
        for other in self._rows.unseen.neighbours.rows():
            about = {"source": self.node_name, "about": "another agent", "text": other["text"]}
            yield "warnings", f"agent {other['pid']} {other['folder']}", about
        for one in self._rows.unseen.now:
            limit = ONLY_ITS_OWN if one.agent else "no limit applies to it"
            text = f"process {one.process.pid} ({one.program}) uses {one.gpu} {one.how}: {limit}"
            about = {"source": self.node_name, "about": one.tenant or "no tenant", "text": text}
            yield "warnings", f"unseen {one.process.pid} {one.gpu}", about
        for number, at_s, text in self._history.decisions:
            yield "decisions", str(number), {"time_s": round(at_s, 3), "source": self.node_name, "text": text}

    async def exposition(self) -> str:
        """The agent's metrics as text."""
        out, history, server = Exposition(), self._history, self._server
        out.declare(names.AGENT)
        for uuid in self._registry.gpus:
            gpu = self._rows.gpu(uuid)
            out.add(names.GPU_INFO, 1, gpu=uuid, index=str(gpu["index"]), model=gpu["name"])
            out.add(names.GPU_MEMORY, gpu["memory_bytes"], gpu=uuid)
            out.add(names.GPU_CHARGED, gpu["memory_charged_bytes"], gpu=uuid)
            out.add(names.GPU_PROMISED, gpu["promised"], gpu=uuid)
            unseen = [row for row in self._rows.unseen.now if row.gpu == uuid]
            of_tenants = sum(bool(row.tenant) for row in unseen)
            out.add(names.GPU_UNSEEN, of_tenants, gpu=uuid, whose="tenant")
            out.add(names.GPU_UNSEEN, len(unseen) - of_tenants, gpu=uuid, whose="other")
            out.add(names.AGENT_TURNS, history.turns[uuid], gpu=uuid)
            out.histogram(names.TURN_SECONDS, history.lengths[uuid], gpu=uuid)
            out.histogram(names.TURN_WAIT, history.waits[uuid], gpu=uuid)
            out.histogram(names.AGENT_SWITCH_DELAY, self._rows.slices.lateness.delays(uuid), gpu=uuid)
        tenants = list(self._registry.tenants.values())
        out.add(names.AGENT_START, self._started_unix_s)
        out.add(names.AGENT_TENANTS, len(tenants))
        out.add(names.AGENT_UNLISTED, max(0, len(tenants) - MOST_TENANTS))
        out.add(names.AGENT_PROCESSES, len(server.sessions))
        out.add(names.AGENT_REFUSED, server.refused_connections)
        out.add(names.AGENT_CONFIG_FAULT, 1 if self._in_force.fault else 0)
        for number, tenant in enumerate(tenants[:MOST_TENANTS]):
            _tenant(out, self._rows.tenant(tenant))
            if number % PAUSE_EVERY == 0:
                await asyncio.sleep(0)
        return out.text()


def _share(row: dict[str, Any], share: dict[str, Any]) -> dict[str, Any]:
    """Round a share to the precision at which it is displayed, so that an idle tenant's row does not change."""
    return {
        "gpu": share["uuid"],
        "tenant": row["name"],
        "kind": "tenant",
        "mechanism": row["mechanism"],
        "granted": row["request"],
        "limit": row["limit"],
        "got": None if share["got"] is None else round(share["got"], 3),
        "short_s": round(share["short_s"]) or None,
        "memory_bytes": share["memory_used_bytes"],
        "memory_limit_bytes": share["memory_limit_bytes"],
        "memory_by": None if share["memory_limit_bytes"] is None else share["memory_by"],
        "sms": sms_text(share["sms"]) or None,
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
    """Describe in words where a swappable tenant's contents are."""
    if where is None or not where["movable_bytes"]:
        return None
    there = where["resident_bytes"] / where["movable_bytes"]
    return "resident" if there == 1 else "moved off" if there == 0 else f"{there:.0%} on the GPU"


def _tenant(out: Exposition, row: dict[str, Any]) -> None:
    name = row["name"]
    out.add(names.TENANT_REQUEST, row["request"], tenant=name)
    out.add(names.TENANT_LIMIT, row["limit"], tenant=name)
    out.add(names.TENANT_HOST, row["host_pinned_bytes"], tenant=name)
    out.add(names.TENANT_LAUNCHES, row["launches"], tenant=name)
    out.add(names.TENANT_LAUNCH_WAIT, row["gate_wait_s"], tenant=name)
    out.add(names.TENANT_WARNINGS, row["warning_count"], tenant=name)
    out.add(names.TENANT_NOT_ENFORCED, 1 if row["not_enforced"] else 0, tenant=name)
    caps = {share["memory_limit_bytes"] for share in row["gpus"] if share["memory_limit_bytes"] is not None}
    for cap in caps:
        out.add(names.TENANT_MEMORY_LIMIT, cap, tenant=name)
    for share in row["gpus"]:
        gpu = share["uuid"]
        if share["got"] is not None:
            out.add(names.TENANT_SHARE, share["got"], tenant=name, gpu=gpu)
            out.add(names.TENANT_SHORT, share["short_s"], tenant=name, gpu=gpu)
        out.add(names.TENANT_MEMORY, share["memory_used_bytes"], tenant=name, gpu=gpu)
        out.add(names.TENANT_HELD, share["held_s"], tenant=name, gpu=gpu)
        out.add(names.TENANT_WAIT, share["waited_s"], tenant=name, gpu=gpu)
        out.add(names.TENANT_OVERRUN, share["overrun_s"], tenant=name, gpu=gpu)
        out.add(names.TENANT_TURNS, share["turns"], tenant=name, gpu=gpu)
