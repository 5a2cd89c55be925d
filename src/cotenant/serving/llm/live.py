"""The state of language models as users see it: the status for `cotenant top`, rows of the live page, metrics."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from cotenant.observability import metrics as names
from cotenant.observability.exposition import Exposition, Histogram
from cotenant.observability.feed import Row
from cotenant.policy.residency import Place
from cotenant.policy.residency.model_rows import AWAY
from cotenant.serving.gateway.pages import Decisions
from cotenant.serving.llm.dispatch import Dispatch
from cotenant.serving.llm.model import Model
from cotenant.serving.llm.plain_host import GpuRoom
from cotenant.serving.llm.stats import percentile_ms

NO_TTFT, NO_TPOT = Histogram(names.MODEL_TTFT.buckets), Histogram(names.MODEL_TPOT.buckets)
NO_ANSWER = Histogram(names.MODEL_ANSWER.buckets)


def model_row(model: Model, gpus: list[GpuRoom]) -> dict[str, Any]:
    """Describe one model as plain data."""
    row, stats, entry = model.row, model.stats, model.entry
    state = "draining" if row.draining and row.place is Place.RESIDENT else row.place.value
    return {
        "name": entry.name, "state": state, "gpu": None if row.place in AWAY else gpus[row.gpu].index,
        "memory_bytes": entry.memory, "gpu_memory_bytes": 0 if row.place in AWAY else entry.memory,
        "class": entry.class_, "priority": entry.priority, "kept": entry.keep > 0,
        "waiting": row.waiting, "open": row.open,
        "ttft_ms": percentile_ms(stats.ttfts, 0.5), "ttft_p99_ms": percentile_ms(stats.ttfts, 0.99),
        "tpot_ms": percentile_ms(stats.tpots, 0.5), "ttft_slo_ms": entry.ttft_ms, "tpot_slo_ms": entry.tpot_ms,
        "answer_ms": percentile_ms(stats.answers, 0.5), "answer_p99_ms": percentile_ms(stats.answers, 0.99),
        "attainment": stats.attainment(entry.ttft_ms / 1e3), "outcomes": dict(stats.outcomes), "failed": stats.failed,
        "retries": stats.retries, "deaths": stats.deaths, "switches": dict(stats.switches),
        "switch_s": {kind: round(seconds, 3) for kind, seconds in stats.seconds.items()},
        "pid": model.program.process.pid if model.program is not None else None,
        "fault": model.fault,
    }  # fmt: skip


def status(dispatch: Dispatch, gpus: list[GpuRoom], started_s: float) -> dict[str, Any]:
    """The answer of GET /cotenant/status."""
    rows = [model_row(model, gpus) for model in dispatch.models.values()]
    return {
        "uptime_s": time.monotonic() - started_s, "in_flight": len(dispatch.tickets), "models": rows,
        "gpus": [{"index": g.index, "memory_bytes": g.memory_bytes, "used_bytes": _used(rows, g.index)} for g in gpus],
    }  # fmt: skip


def _used(rows: list[dict[str, Any]], gpu: int) -> int:
    return sum(int(row["gpu_memory_bytes"]) for row in rows if row["gpu"] == gpu)


def exposition(dispatch: Dispatch, connections: int) -> str:
    """The metrics page for Prometheus."""
    out = Exposition()
    out.declare(names.MODEL)
    for name, model in dispatch.models.items():
        row, stats = model.row, model.stats
        out.add(names.MODEL_STATE, 1, model=name, state=row.place.value)
        out.add(names.MODEL_WAITING, row.waiting, model=name)
        out.add(names.MODEL_OPEN, row.open, model=name)
        for outcome, count in stats.outcomes.items():
            out.add(names.MODEL_REQUESTS, count, model=name, outcome=outcome)
        out.add(names.MODEL_RETRIES, stats.retries, model=name)
        out.histogram(names.MODEL_TTFT, stats.ttft or NO_TTFT, model=name)
        out.histogram(names.MODEL_TPOT, stats.tpot or NO_TPOT, model=name)
        out.histogram(names.MODEL_ANSWER, stats.answer or NO_ANSWER, model=name)
        out.add(names.MODEL_TTFT_SLO, model.entry.ttft_ms / 1e3, model=name)
        out.add(names.MODEL_TPOT_SLO, model.entry.tpot_ms / 1e3, model=name)
        for kind, count in stats.switches.items():
            out.add(names.MODEL_SWITCHES, count, model=name, kind=kind)
        for kind, seconds in stats.seconds.items():
            out.add(names.MODEL_SWITCH_SECONDS, seconds, model=name, kind=kind)
        out.add(names.MODEL_DEATHS, stats.deaths, model=name)
    out.add(names.MODEL_CONNECTIONS, connections)
    return out.text()


async def rows(
    dispatch: Dispatch, gpus: list[GpuRoom], address: str, decisions: Decisions, fault: str
) -> AsyncIterator[Row]:
    """Rows of the live page (fields: observability/feed.py). `fault`: why the agent cannot be reached, or empty."""
    node = socket.gethostname()
    yield "sources", "models", {
        "name": f"{node} serve", "kind": "models", "address": address, "ok": not fault, "note": fault,
    }  # fmt: skip
    shown = [model_row(model, gpus) for model in dispatch.models.values()]
    for gpu in gpus:
        yield "gpus", f"models-{gpu.index}", {
            "node": node, "index": gpu.index, "model": gpu.name, "memory_bytes": gpu.memory_bytes,
            "memory_used_bytes": _used(shown, gpu.index), "granted": False,
        }  # fmt: skip
    for row in shown:
        yield "models", row["name"], {
            "state": row["state"], "gpu": None if row["gpu"] is None else f"models-{row['gpu']}",
            "memory_bytes": row["gpu_memory_bytes"], "queue": row["waiting"], "open": row["open"],
            "ttft_ms": row["ttft_ms"], "ttft_p99_ms": row["ttft_p99_ms"], "ttft_slo_ms": row["ttft_slo_ms"],
            "tpot_ms": row["tpot_ms"], "tpot_slo_ms": row["tpot_slo_ms"], "attainment": row["attainment"],
            "answer_ms": row["answer_ms"], "answer_p99_ms": row["answer_p99_ms"],
            "switches": sum(row["switches"].values()), "switch_s": round(sum(row["switch_s"].values()), 3),
            "failed": row["failed"], "fault": row["fault"],
        }  # fmt: skip
    for number, at, text in decisions.rows:
        yield "decisions", f"models-{number}", {"time_s": at, "source": "models", "text": text}
