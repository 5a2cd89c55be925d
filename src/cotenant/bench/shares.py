"""`cotenant bench shares`: compare each tenant's GPU time with its granted share, relative to a native run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any

from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.bench.harness import Bench, Program, rate

WARM_S = 1.0
WINDOW_S = 10.0
STEP_S = 0.1
# A block is one timed run of a workload. In its result, "marks" are intermediate counts: (time in ns, work done so far,
# GPU time so far in ns). These are the indices of the last two.
COUNT, BUSY = 1, 2


def granted_shares(requests: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Return the shares that tenants are entitled to while all are busy: their requests, and the rest of the GPU up to
    the limits.

    Water filling: the level L with sum(min(limit, max(request, L))) = 1; the limits if their sum is at most 1.
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
    """Run one tenant per request/limit pair for `seconds`; report granted and measured shares, in fractions of a
    native run.

    `got` is the share of GPU time. A GPU that idles half of the time clocks higher, so units of work would overstate
    the share of a limited tenant. `got_work` is the share of work, `total_over_solo` its sum.
    """
    specs = [
        check_spec(TenantSpec(f"tenant{index}", request, limit))
        for index, (request, limit) in enumerate(zip(requests, limits, strict=True))
    ]
    settings: dict[str, Any] = {
        "quota": f"{quota_ms}ms",
        "min_quota": f"{min(quota_ms, 20.0)}ms",
        "max_quota": f"{quota_ms}ms",
        "discipline": discipline,
    }
    if work_in_flight_ms is not None:
        settings["work_in_flight"] = f"{work_in_flight_ms}ms"
    with Bench(gpus, settings, kernel_ns=round(kernel_ms * 1e6)) as bench:
        native = bench.native("busy")
        native.wait_ready()
        block_s = solo_block_s or max(0.5, seconds / 16)
        native.block(min(WARM_S, 2 * block_s))
        native_blocks = _solo(native, block_s)
        tenants = [bench.tenant("busy", spec) for spec in specs]
        for tenant in tenants:
            tenant.wait_ready()
        for tenant in tenants:
            tenant.begin(seconds + 2 * WARM_S)
        blocks = [tenant.result() for tenant in tenants]
        turns = [row["gpus"][0]["turns"] for row in bench.tenants()]
        for tenant in tenants:
            tenant.close()
        native_blocks += _solo(native, block_s)
        rates = [rate(block) for block in native_blocks]
        solo = median(rates)
        start_ns = max(block["begin_ns"] for block in blocks) + WARM_S * 1e9
        end_ns = start_ns + seconds * 1e9
        busy = median([block["busy_ns"] / (block["end_ns"] - block["begin_ns"]) for block in native_blocks])
        got = [between(block, start_ns, end_ns, BUSY) / (seconds * 1e9) / busy for block in blocks]
        got_work = [between(block, start_ns, end_ns, COUNT) / seconds / solo for block in blocks]
        granted = granted_shares(requests, limits)
        return {
            "gpu": native.gpu,
            "granted": granted,
            "got": got,
            "solo_rate": solo,
            "total_over_solo": sum(got_work),
            "worst_window_error": worst_window_error(blocks, granted, busy, start_ns, end_ns),
            "got_work": got_work,
            "window_s": min(WINDOW_S, seconds),
            "solo_drift": median(rates[4:]) / median(rates[:4]),
            "turns": turns,
            "quota_ms": quota_ms,
            "workload": f"busy ({bench.backend})",
        }


def _solo(native: Program, block_s: float) -> list[dict[str, Any]]:
    """Run the native program for four blocks. The median of all such blocks is the baseline."""
    blocks = []
    for _ in range(4):
        native.begin(block_s)
        blocks.append(native.result())
    return blocks


def between(block: dict[str, Any], start_ns: float, end_ns: float, what: int) -> float:
    """Return the work (COUNT) or GPU time in ns (BUSY) of a block between two times, interpolated linearly between
    marks.
    """
    return _until(block, end_ns, what) - _until(block, start_ns, what)


def _until(block: dict[str, Any], at_ns: float, what: int) -> float:
    first = (block["begin_ns"], 0, 0)
    last = (block["end_ns"], block["count"], block.get("busy_ns", 0))
    if at_ns <= first[0]:
        return 0.0
    for left, right in itertools.pairwise([first, *block["marks"], last]):
        if at_ns <= right[0]:
            part = (at_ns - left[0]) / max(1, right[0] - left[0])
            return float(left[what] + (right[what] - left[what]) * part)
    return float(last[what])


def worst_window_error(
    blocks: Sequence[dict[str, Any]], granted: Sequence[float], busy: float, start_ns: float, end_ns: float
) -> float:
    """Return the largest |measured - granted| of any tenant in any window of 10 s (the whole run, if it is shorter).

    `busy` is the fraction of time that a native run keeps the GPU busy.
    """
    window_ns = min(WINDOW_S * 1e9, end_ns - start_ns)
    worst = 0.0
    at_ns = start_ns
    while at_ns + window_ns <= end_ns + 1:
        for block, share in zip(blocks, granted, strict=True):
            got = between(block, at_ns, at_ns + window_ns, BUSY) / window_ns / busy
            worst = max(worst, abs(got - share))
        at_ns += STEP_S * 1e9
    return worst
