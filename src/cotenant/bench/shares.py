"""`cotenant bench shares`: does each tenant get what it was granted? Measured in work done, against a native run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cotenant.bench.harness import Bench, Workload
from cotenant.bench.overhead import median
from cotenant.node.config import TenantSpec, check_spec

WARM_S = 1.0
WINDOW_S = 10.0
STEP_S = 0.1


def granted_shares(requests: Sequence[float], limits: Sequence[float]) -> list[float]:
    """What request/limit promises tenants that always ask: requests, and what is left by least use, up to the limits.

    Water filling: the level L with sum(min(limit, max(request, L))) = 1, or every limit when they do not fill the GPU.
    """
    if sum(limits) <= 1.0:
        return list(limits)
    low, high = 0.0, 1.0
    for _ in range(60):
        level = (low + high) / 2
        total = sum(min(limit, max(request, level)) for request, limit in zip(requests, limits, strict=True))
        low, high = (level, high) if total < 1.0 else (low, level)
    return [min(limit, max(request, high)) for request, limit in zip(requests, limits, strict=True)]


def measure(
    requests: Sequence[float],
    limits: Sequence[float],
    seconds: float,
    *,
    gpus: str = "soft",
    quota_ms: float = 100.0,
    kernel_ms: float = 1.6,
    discipline: str = "request-limit",
    work_in_flight_ms: float | None = None,
    solo_block_s: float | None = None,
) -> dict[str, Any]:
    """Run one tenant per request/limit pair for `seconds` and report granted and got, in fractions of a native run."""
    specs = [
        check_spec(TenantSpec(f"tenant{index}", request, limit))
        for index, (request, limit) in enumerate(zip(requests, limits, strict=True))
    ]
    settings: dict[str, Any] = {
        "quota": quota_ms / 1e3,
        "min_quota": min(quota_ms, 20.0) / 1e3,
        "max_quota": quota_ms / 1e3,
        "discipline": discipline,
    }
    if work_in_flight_ms is not None:
        settings["work_in_flight"] = work_in_flight_ms / 1e3
    with Bench(gpus, settings, kernel_ns=round(kernel_ms * 1e6)) as bench:
        native = bench.native("busy")
        native.wait_ready()
        block_s = solo_block_s or max(0.5, seconds / 16)
        native.block(min(WARM_S, 2 * block_s))
        before = _solo(native, block_s)
        tenants = [bench.tenant("busy", spec) for spec in specs]
        for tenant in tenants:
            tenant.wait_ready()
        for tenant in tenants:
            tenant.begin(seconds + 2 * WARM_S)
        blocks = [tenant.result() for tenant in tenants]
        turns = [row["gpus"][0]["turns"] for row in bench.tenants()]
        for tenant in tenants:
            tenant.close()
        after = _solo(native, block_s)
        solo = median([*before, *after])
        start_ns = max(block["begin_ns"] for block in blocks) + WARM_S * 1e9
        end_ns = start_ns + seconds * 1e9
        got = [work_between(block, start_ns, end_ns) / seconds / solo for block in blocks]
        granted = granted_shares(requests, limits)
        return {
            "gpu": native.gpu,
            "granted": granted,
            "got": got,
            "solo_rate": solo,
            "total_over_solo": sum(got),
            "worst_window_error": worst_window_error(blocks, granted, solo, start_ns, end_ns),
            "window_s": min(WINDOW_S, seconds),
            "solo_drift": median(after) / median(before),
            "turns": turns,
            "quota_ms": quota_ms,
            "workload": f"busy ({bench.backend})",
        }


def _solo(native: Workload, block_s: float) -> list[float]:
    """Rates of a native run in four blocks; the median of all of them is the baseline."""
    return [native.block(block_s) for _ in range(4)]


def work_between(block: dict[str, Any], start_ns: float, end_ns: float) -> float:
    """Units of work a block had done between two moments; marks are joined by straight lines."""
    return work_until(block, end_ns) - work_until(block, start_ns)


def work_until(block: dict[str, Any], at_ns: float) -> float:
    """Units of work a block had done at a moment."""
    points = [(block["begin_ns"], 0), *block["marks"], (block["end_ns"], block["count"])]
    if at_ns <= points[0][0]:
        return 0.0
    for (left_ns, left), (right_ns, right) in itertools.pairwise(points):
        if at_ns <= right_ns:
            return float(left + (right - left) * (at_ns - left_ns) / max(1, right_ns - left_ns))
    return float(block["count"])


def worst_window_error(
    blocks: Sequence[dict[str, Any]], granted: Sequence[float], solo: float, start_ns: float, end_ns: float
) -> float:
    """Largest |got - granted| of any tenant over any window of 10 s (or the whole run, if shorter)."""
    window_ns = min(WINDOW_S * 1e9, end_ns - start_ns)
    worst = 0.0
    at_ns = start_ns
    while at_ns + window_ns <= end_ns + 1:
        for block, share in zip(blocks, granted, strict=True):
            got = work_between(block, at_ns, at_ns + window_ns) / (window_ns / 1e9) / solo
            worst = max(worst, abs(got - share))
        at_ns += STEP_S * 1e9
    return worst
