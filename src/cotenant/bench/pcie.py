"""`cotenant bench pcie`: shares of the PCIe link between tenants that copy at the same time, and delays of copies.

One run first measures each tenant alone, and then all tenants together. After that it measures the 1 MiB copies of a
latency-sensitive tenant, alone and together with a best-effort tenant that saturates the link (not with `--no-ls`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from cotenant.agent.config.files import TenantSpec, check_spec
from cotenant.agent.mechanisms import registry as mechanisms
from cotenant.agent.mechanisms.base import Use
from cotenant.bench.harness import Bench, Program, rate
from cotenant.bench.shares import COUNT, between
from cotenant.core.errors import InputError
from cotenant.devices.registry import device_named
from cotenant.policy.copies import CopySettings

WARM_S = 0.3
LS_BYTES = 1 << 20
LS_PERIOD_MS = 2.0
SOFT_LS_PERIOD_MS = 40.0
# The software GPU copies within host memory. Its link is set to this low rate, so that the speed of copies depends on
# the scheduling of the link, not on the speed of memcpy.
SOFT_LINK_MBPS = 150
SOFT_CHUNK, SOFT_COPY = 1 << 20, 8 << 20
# The software GPU copies pageable memory at 28.5 % of the link's rate. Chunks of such copies are smaller, because a
# chunk must take less time than `wait_lapse_ns` (20 ms): that long after its last request for a chunk, a tenant's queue
# of copies no longer counts as waiting.
SOFT_PAGEABLE_CHUNK, SOFT_PAGEABLE_COPY = 256 << 10, 2 << 20
COPY = 64 << 20


def specs_for(weights: Sequence[float], mechanism: str) -> list[TenantSpec]:
    """Return the tenants of a measurement of the PCIe link, one for each weight."""
    return [
        check_spec(TenantSpec(f"copy{index}", copy_weight=weight, mechanism=mechanism))
        for index, weight in enumerate(weights)
    ]


def parse_weights(text: str) -> list[float]:
    """Parse the weights of the tenants from text such as "1,3". InputError for anything else."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{text!r} is not a list of weights such as 1,3", field="--weights") from None
    if not 1 <= len(found) <= 16 or not all(0.001 <= weight <= 1000.0 for weight in found):
        raise InputError("give 1 to 16 weights between 0.001 and 1000", field="--weights")
    return found


def percentile(values: Sequence[float], part: float) -> float:
    """Nearest-rank percentile; `part` 0..1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


@contextmanager
def slow_soft_link(bench_gpus: str, mbps: int) -> Any:
    """Limit the software GPU's link to `mbps` MB/s for agents and programs that are started inside the `with` block."""
    import os

    before = os.environ.get("COTENANT_SOFTGPU_LINK_MBPS")
    simulated = device_named(bench_gpus).simulated
    if simulated and before is None:
        os.environ["COTENANT_SOFTGPU_LINK_MBPS"] = str(mbps)
    try:
        yield
    finally:
        if simulated and before is None:
            del os.environ["COTENANT_SOFTGPU_LINK_MBPS"]


def settings_for(gpus: str, chunk_bytes: int | None, period_bytes: int | None) -> dict[str, Any]:
    """Return the agent's settings for one measurement. Tenants' turns on the GPU are long, so that they have little
    effect on the link.
    """
    copies: dict[str, Any] = {}
    simulated = device_named(gpus).simulated
    if chunk_bytes or simulated:
        copies["chunk_bytes"] = chunk_bytes or SOFT_CHUNK
    if period_bytes or simulated:
        copies["period_bytes"] = period_bytes or 4 * (chunk_bytes or SOFT_CHUNK)
    return {"copies": copies or {}, "quota": "250ms", "min_quota": "100ms", "max_quota": "1s"}


def together(workloads: Sequence[Program], seconds: float) -> list[float]:
    """Return the bytes per second of each workload while all copy. The measured interval excludes the beginning and the
    end of the blocks.
    """
    for workload in workloads:
        workload.begin(seconds + 2 * WARM_S)
    blocks = [workload.result() for workload in workloads]
    start_ns = max(block["begin_ns"] for block in blocks) + WARM_S * 1e9
    end_ns = min(min(block["end_ns"] for block in blocks), start_ns + seconds * 1e9)
    span_s = max(1e-9, (end_ns - start_ns) / 1e9)
    return [between(block, start_ns, end_ns, COUNT) / span_s for block in blocks]


def measure(
    weights: Sequence[float],
    *,
    gpus: str = "soft",
    seconds: float = 4.0,
    direction: str = "h2d",
    memory: str = "pinned",
    mode: str = "async",
    size: int | None = None,
    chunk_bytes: int | None = None,
    period_bytes: int | None = None,
    ls: bool = True,
    mechanism: str | None = None,
    progress: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Measure each tenant's share of the link, their total rate, and the delay of latency-sensitive (LS) copies.

    `shares` are the tenants' fractions of the bytes moved while all of them copied. `total_over_link` is the tenants'
    total rate divided by the rate of a native program, which is measured before and after the tenants copy.
    `ls_copy_wait_chunks` is a delay: the 99th percentile of an LS copy's latency while a best-effort tenant saturates
    the link, less the median latency without that tenant. Its unit is the time that one chunk takes on the link.
    """
    simulated = device_named(gpus).simulated
    if simulated and memory == "pageable":
        size, chunk_bytes = size or SOFT_PAGEABLE_COPY, chunk_bytes or SOFT_PAGEABLE_CHUNK
    size = size or (SOFT_COPY if simulated else COPY)
    # all tenants must run at the same time, whereas under the mechanism `time` a tenant copies only in its turns
    mechanism = mechanism or mechanisms.choose(Use.TENANT, concurrent=True)
    program = ["cotenant.bench.copying", direction, memory, mode, str(size)]
    settings = settings_for(gpus, chunk_bytes, period_bytes)
    with slow_soft_link(gpus, SOFT_LINK_MBPS), Bench(gpus, settings) as bench:
        native = bench.native("copy", program=program)
        native.wait_ready()
        native_before = native.block(max(0.5, seconds / 4))
        progress(f"native {native_before / 1e9:.2f} GB/s")
        tenants = [bench.tenant("copy", spec, program=program) for spec in specs_for(weights, mechanism)]
        for tenant in tenants:
            tenant.wait_ready()
        alone = [tenant.block(max(0.5, seconds / 4)) for tenant in tenants]
        rates = together(tenants, seconds)
        rows = {row["name"]: row["gpus"][0]["copies"] for row in bench.tenants()}
        for tenant in tenants:
            tenant.close()
        native_after = native.block(max(0.5, seconds / 4))
        native.close()
        link = statistics.mean([native_before, native_after])
        total = sum(rates)
        result: dict[str, Any] = {
            "gpu": native.gpu,
            "weights": list(weights),
            "shares": [one / total for one in rates] if total else [0.0 for _ in rates],
            "total_over_link": total / link,
            "ls_copy_wait_chunks": None,
            "native_bytes_per_s": link,
            "native_drift": native_after / native_before,
            "alone_over_native": [one / link for one in alone],
            "direction": direction,
            "memory": memory,
            "mode": mode,
            "copy_bytes": size,
            "chunk_bytes": settings["copies"].get("chunk_bytes", CopySettings.chunk_bytes),
            "queues": rows,
        }
        if ls:
            result |= measure_ls(bench, direction, size, link, result["chunk_bytes"], seconds, mechanism)
    return result


def measure_ls(
    bench: Bench, direction: str, size: int, link: float, chunk_bytes: int, seconds: float, mechanism: str
) -> dict[str, Any]:
    """Measure the delays of a latency-sensitive (LS) tenant's synchronous 1 MiB copies, from alternating blocks alone
    and with a best-effort tenant.
    """
    period_ms = SOFT_LS_PERIOD_MS if bench.device.simulated else LS_PERIOD_MS
    ls_program = ["cotenant.bench.copying", direction, "pinned", "sync", str(LS_BYTES), str(period_ms)]
    be_program = ["cotenant.bench.copying", direction, "pinned", "async", str(size)]
    ls_spec = check_spec(TenantSpec("ls", latency_sensitive=True, copy_weight=1.0, mechanism=mechanism))
    be_spec = check_spec(TenantSpec("be", best_effort=True, copy_weight=1.0, mechanism=mechanism))
    ls, be = bench.tenant("copy", ls_spec, program=ls_program), bench.tenant("copy", be_spec, program=be_program)
    ls.wait_ready()
    be.wait_ready()
    alone: list[float] = []
    beside: list[float] = []
    be_rates: list[float] = []
    for _ in range(3):
        part = max(0.4, seconds / 6)
        ls.begin(part)
        alone += ls.result()["latencies_us"]
        be.begin(part + 2 * WARM_S / 3)
        ls.begin(part)
        beside += ls.result()["latencies_us"]
        be_rates.append(rate(be.result()))
    ls.close()
    be.close()
    chunk_us = chunk_bytes / link * 1e6
    waits = [(latency - statistics.median(alone)) / chunk_us for latency in beside]
    return {
        "ls_copy_wait_chunks": max(0.0, percentile(waits, 0.99)),
        "ls_copy_wait_chunks_median": percentile(waits, 0.5),
        "ls_copy_wait_chunks_max": max(waits),
        "ls_alone_us": {"p50": percentile(alone, 0.5), "p99": percentile(alone, 0.99), "copies": len(alone)},
        "ls_beside_us": {"p50": percentile(beside, 0.5), "p99": percentile(beside, 0.99), "copies": len(beside)},
        "chunk_us": chunk_us,
        "be_over_link_beside_ls": statistics.mean(be_rates) / link,
    }
