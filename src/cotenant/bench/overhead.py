"""`cotenant bench overhead`: one tenant alone against the same program without the shim, in interleaved pairs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from cotenant.bench.harness import Bench, Workload
from cotenant.bench.workload import KINDS
from cotenant.node.config import TenantSpec


def measure(
    *,
    gpus: str = "soft",
    workloads: Sequence[str] = KINDS,
    pairs: int = 30,
    block_s: float = 0.2,
    processes: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Ratios tenant / native of work per second, per workload: median with its 95 % interval.

    `processes` times a native program and a tenant are started, all of them first, because that takes longest; then,
    one after another, they run `pairs` pairs of blocks of `block_s` seconds. Both launch from one core, in turn: which
    core a process lands on decides more than the shim. With several processes the sample is their medians, because a
    program may also be lucky in its place in memory.
    """
    rows: dict[str, Any] = {}
    gpu = ""
    core = max(os.sched_getaffinity(0))
    with Bench(gpus, {}) as bench:
        for kind in workloads:
            started = [
                (
                    bench.native(kind, core=core),
                    bench.tenant(kind, TenantSpec(f"bench-{kind}-{number}"), core=core),
                )
                for number in range(processes)
            ]
            for native, tenant in started:
                native.wait_ready()
                tenant.wait_ready()
                gpu = native.gpu
            found = [interleaved(native, tenant, pairs, block_s) for native, tenant in started]
            for native, tenant in started:
                native.close()
                tenant.close()
            rows[kind] = summary(found[0]) if processes == 1 else summary_of_processes(found)
            progress(f"{kind}: {rows[kind]['ratio']:.4f}")
    return {
        "gpu": gpu,
        "pairs": pairs,
        "block_s": block_s,
        "processes": processes,
        "backend": bench.backend,
        "workloads": rows,
    }


def interleaved(native: Workload, tenant: Workload, pairs: int, block_s: float) -> list[tuple[float, float]]:
    """Rates (native, tenant) of `pairs` pairs of blocks, per second."""
    found = []
    for index in range(pairs):
        # which of the two goes first changes, so that a drift of the machine falls on both
        order = [native, tenant] if index % 2 == 0 else [tenant, native]
        rates = {id(which): which.block(block_s) for which in order}
        found.append((rates[id(native)], rates[id(tenant)]))
    return found


def summary_of_processes(found: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Like `summary`, of the medians of each pair of processes."""
    each = [summary(pairs) for pairs in found]
    ratios = sorted(row["ratio"] for row in each)
    low, high = median_interval(len(ratios))
    return summary([pair for pairs in found for pair in pairs]) | {
        "ratio": median(ratios),
        "ratio_ci95": [ratios[low], ratios[high]],
        "by_process": [row["ratio"] for row in each],
    }


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Median ratio of (native, tenant) pairs, with the interval that holds the true median with 95 %."""
    ratios = sorted(tenant / native for native, tenant in pairs)
    low, high = median_interval(len(ratios))
    return {
        "ratio": median(ratios),
        "ratio_ci95": [ratios[low], ratios[high]],
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "native_rate": median([native for native, _ in pairs]),
        "tenant_rate": median([tenant for _, tenant in pairs]),
    }


def median(values: Sequence[float]) -> float:
    """Middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_interval(count: int) -> tuple[int, int]:
    """Indices of the order statistics that enclose the median with at least 95 % (binomial; the ends if too few)."""
    tail, low = 0.0, 0
    for k in range(count // 2):
        tail += math.comb(count, k) / 2**count
        if tail > 0.025:
            break
        low = k
    return low, count - 1 - low
