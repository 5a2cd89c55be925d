"""`cotenant bench overhead`: one tenant alone against the same program without the shim, in interleaved pairs."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cotenant.agent.config.files import TenantSpec
from cotenant.bench.harness import Bench, Workload
from cotenant.bench.workload import KINDS

# One tenant of several works at a time, and is to be alone at once although the others have worked before it.
ALONE = {"alone_after": "0s"}
LEAD_IN_S = 0.5  # the turn's first deadline passes, and is not the last one's
TRIMMED = 0.1  # of the steps, the slowest, which a busy machine makes


class Block(NamedTuple):
    """One block of a workload: units of work per second, and how long its steps took."""

    rate: float
    steps_ns: list[int]


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
    one after another, they run `pairs` pairs of blocks of `block_s` seconds. Both launch from one core, in turn, and
    everything else keeps off it: which core a process lands on decides more than the shim. With several processes the
    sample is their medians, because a program may also be lucky in its place in memory.
    """
    rows: dict[str, Any] = {}
    gpu = ""
    with core_of_its_own() as core, Bench(gpus, ALONE) as bench:
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
            found = []
            for native, tenant in started:
                tenant.block(LEAD_IN_S)
                found.append(interleaved([native, tenant], pairs, block_s))
            for native, tenant in started:
                native.close()
                tenant.close()
            rows[kind] = summary(*found[0]) if processes == 1 else summary_of_processes(found)
            progress(f"{kind}: {rows[kind]['ratio']:.4f}")
    return {
        "gpu": gpu,
        "pairs": pairs,
        "block_s": block_s,
        "processes": processes,
        "backend": bench.backend,
        "workloads": rows,
    }


@contextlib.contextmanager
def core_of_its_own() -> Iterator[int]:
    """A core for the threads that launch; this process and whatever it starts keep off it, and off its other half
    where a core runs two threads, as far as there are others."""
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    siblings = {core}
    if listed.exists():
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed.read_text()):
            siblings |= set(range(int(first), int(last or first) + 1))
    os.sched_setaffinity(0, allowed - siblings or allowed - {core} or allowed)
    try:
        yield core
    finally:
        os.sched_setaffinity(0, allowed)


def interleaved(sides: Sequence[Workload], rounds: int, block_s: float) -> list[list[Block]]:
    """Blocks of each side, `rounds` of them, in turn."""
    found: list[list[Block]] = [[] for _ in sides]
    for index in range(rounds):
        # who goes first changes, so that a drift of the machine falls on all
        order = range(len(sides)) if index % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            sides[side].begin(block_s, "steps")
            done = sides[side].result()
            seconds = (done["end_ns"] - done["begin_ns"]) / 1e9
            found[side].append(Block(done["count"] / seconds, done["steps_ns"]))
    return found


def trimmed_ns(blocks: Sequence[Block]) -> float:
    """Mean time of a step, without the slowest tenth of all."""
    steps = sorted(step for block in blocks for step in block.steps_ns)
    kept = steps[: max(1, round(len(steps) * (1 - TRIMMED)))]
    return sum(kept) / len(kept)


def summary_of_processes(found: Sequence[Sequence[Sequence[Block]]]) -> dict[str, Any]:
    """Like `summary`, of the medians of each pair of processes."""
    each = [summary(native, tenant) for native, tenant in found]
    natives = [block for native, _ in found for block in native]
    tenants = [block for _, tenant in found for block in tenant]
    ratio, interval = with_interval([row["ratio"] for row in each])
    trimmed, trimmed_interval = with_interval([row["ratio_trimmed"] for row in each])
    return summary(natives, tenants) | {
        "ratio": ratio,
        "ratio_ci95": interval,
        "ratio_trimmed": trimmed,
        "ratio_trimmed_ci95": trimmed_interval,
        "by_process": [row["ratio"] for row in each],
        "by_process_trimmed": [row["ratio_trimmed"] for row in each],
    }


def summary(native: Sequence[Block], tenant: Sequence[Block]) -> dict[str, Any]:
    """Median ratio of pairs of blocks, with the interval that holds the true median with 95 %; and the ratio of the
    steps' times without the slowest tenth of each side, which knows nothing of what falls on fewer steps than that."""
    ratios = [t.rate / n.rate for n, t in zip(native, tenant, strict=True)]
    ratio, interval = with_interval(ratios)
    return {
        "ratio": ratio,
        "ratio_ci95": interval,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratio_trimmed": trimmed_ns(native) / trimmed_ns(tenant),
        "native_rate": median([block.rate for block in native]),
        "tenant_rate": median([block.rate for block in tenant]),
    }


def with_interval(values: Sequence[float]) -> tuple[float, list[float]]:
    """The median, and what encloses the true one with 95 %."""
    ordered = sorted(values)
    low, high = median_interval(len(ordered))
    return median(ordered), [ordered[low], ordered[high]]


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
