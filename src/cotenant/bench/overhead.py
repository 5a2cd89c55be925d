"""`cotenant bench overhead`: compare a lone tenant with the same program without the shim, in interleaved blocks."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cotenant.agent.config.files import TenantSpec
from cotenant.bench.harness import Bench, Program
from cotenant.bench.workload import KINDS

# several tenants are connected, but only one works at a time; that tenant must count as alone at once, not after the
# usual delay
ALONE = {"alone_after": "0s"}
LEAD_IN_S = 0.5  # time in s before a measurement, in which the turn of the previously measured tenant ends
# this fraction of the steps, the slowest ones, is ignored, because other work of the machine slowed them down
TRIMMED = 0.1


class Block(NamedTuple):
    """One block of a workload: units of work per second, and the duration of each step."""

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
    """Return the ratio tenant / native of work per second for each workload: the median with its 95 % interval.

    For each workload, `processes` native programs and as many tenants are started first, because that takes longest.
    Each native program is compared with one tenant: the two run `pairs` blocks of `block_s` seconds each, in
    alternation, and each pair of blocks gives one ratio. Both programs launch from the same core, one at a time, and
    all other processes of the benchmark avoid it, because the choice of the core changes a program's speed more than
    the shim does. If `processes` is above 1, median and interval are those of the median ratios of the compared
    programs, because memory layout differs between processes, too.
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
    """Reserve a core for threads that launch work; yield its number. This process and its children avoid the core and
    its SMT siblings, if other cores are left.
    """
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


def interleaved(sides: Sequence[Program], rounds: int, block_s: float) -> list[list[Block]]:
    """Run `rounds` blocks of each workload, alternating. Returns the blocks of each workload."""
    found: list[list[Block]] = [[] for _ in sides]
    for index in range(rounds):
        # the order of the workloads alternates, so that a slow change of the machine affects all sides equally
        order = range(len(sides)) if index % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            sides[side].begin(block_s, "steps")
            done = sides[side].result()
            seconds = (done["end_ns"] - done["begin_ns"]) / 1e9
            found[side].append(Block(done["count"] / seconds, done["steps_ns"]))
    return found


def trimmed_ns(blocks: Sequence[Block]) -> float:
    """Return the mean duration of a step in ns over all blocks, without the slowest tenth of the steps."""
    steps = sorted(step for block in blocks for step in block.steps_ns)
    kept = steps[: max(1, round(len(steps) * (1 - TRIMMED)))]
    return sum(kept) / len(kept)


def summary_of_processes(found: Sequence[Sequence[Sequence[Block]]]) -> dict[str, Any]:
    """Summarise as `summary` does, but with one ratio for each native program and its tenant: the median over their
    blocks.
    """
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
    """Compare the blocks of a native program with those of a tenant. Each ratio is the tenant's speed divided by the
    native program's. "ratio" is the median over pairs of blocks of the rate of work, with its 95 % confidence interval.
    "ratio_trimmed" compares mean step times without the slowest tenth of each program's steps, so it does not show a
    cost that affects fewer than a tenth of the steps.
    """
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
    """Return the median of the values and its 95 % confidence interval."""
    ordered = sorted(values)
    low, high = median_interval(len(ordered))
    return median(ordered), [ordered[low], ordered[high]]


def median_interval(count: int) -> tuple[int, int]:
    """Return the indices of the order statistics that bound the median with at least 95 % confidence (binomial); of the
    smallest and the largest if there are too few values.
    """
    tail, low = 0.0, 0
    for k in range(count // 2):
        tail += math.comb(count, k) / 2**count
        if tail > 0.025:
            break
        low = k
    return low, count - 1 - low
