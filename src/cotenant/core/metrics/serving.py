"""Metrics of served requests, computed from the request table. Formulas are in docs/metrics.md."""

from __future__ import annotations

from typing import Any

import numpy as np

OUTCOMES = ("pending", "ok", "late", "dropped", "full")


def request_metrics(latency_ms: np.ndarray, outcome: np.ndarray) -> dict[str, Any]:
    """Return the metrics of a service by their keys. The arrays have one element per request: its latency in ms, and
    the code of its outcome.

    Outcomes: 1 ok, 2 late, 3 dropped as late, 4 refused by a full queue, 0 unanswered (failed). Percentiles are over
    answered requests, including late ones; dropped and failed requests lower the attainment.
    """
    sent = len(outcome)
    counts = np.bincount(outcome.astype(np.int64), minlength=5)
    answered = latency_ms[(outcome == 1) | (outcome == 2)]
    p50, p95, p99 = np.percentile(answered, (50, 95, 99)) if len(answered) else (None, None, None)
    return {
        "sent": sent,
        "ok": int(counts[1]),
        "late": int(counts[2]),
        "dropped": int(counts[3] + counts[4]),
        "failed": int(counts[0]),
        "p50_ms": None if p50 is None else float(p50),
        "p95_ms": None if p95 is None else float(p95),
        "p99_ms": None if p99 is None else float(p99),
        "slo_attainment": float(counts[1] / sent) if sent else None,
    }
