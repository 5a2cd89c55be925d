"""Compares designs of the copy queue by changing settings while the same programs run.

A round measures every design once, in changing order, relative to the rate of a native program in that round.
Results are medians over rounds with a 95 % interval.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from cases import Keep, each, failure

from cotenant.agent.config.files import TenantSpec
from cotenant.bench.harness import Bench, Program
from cotenant.bench.pcie import SOFT_LINK_MBPS, percentile, settings_for, slow_soft_link, specs_for
from cotenant.bench.shares import COUNT, between

GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0]
SOFT = GPU == "soft"
UNIT = 1 << 20 if SOFT else 8 << 20  # sizes in the designs below are multiples of this one
COPY = 8 << 20 if SOFT else 64 << 20
WITHIN_S = 3.0
WARM_S, BLOCK_S = (0.15, 0.4) if SOFT else (0.08, 0.25)


def design(chunk: float = 1, period: float = 8) -> dict[str, Any]:
    """Settings; sizes in units (8 MiB on a card)."""
    return {"chunk_bytes": int(chunk * UNIT), "period_bytes": int(period * UNIT)}


CHUNKED: dict[str, dict[str, Any]] = {
    "default": design(),
    "chunk 4 MiB": design(0.5, 4),
    "chunk 16 MiB": design(2, 16),
}
ALONE = tuple(CHUNKED)  # the designs whose settings make a difference for a tenant that is alone
ONE_BY_ONE: dict[str, dict[str, Any]] = {name: CHUNKED[name] for name in ("default", "chunk 4 MiB")}
BESIDE: dict[str, dict[str, Any]] = {
    "default": design(),
    "chunk 4 MiB": design(0.5, 4),
}


def median_with_interval(values: Sequence[float]) -> list[float]:
    """Median and its 95 % interval by order statistics (binomial), which is wide for few values."""
    ordered, count = sorted(values), len(values)
    if count == 0:
        return [math.nan] * 3
    below, rank = 0.0, 0
    while rank < count // 2 and (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    low = max(0, rank - 1)
    return [statistics.median(ordered), ordered[low], ordered[count - 1 - low]]


class Settings:
    """The agent's configuration file, rewritten while it runs."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.file, self.log = bench.folder / "agent.json", bench.folder / "agent.log"

    def take(self, copies: dict[str, Any]) -> None:
        before = self.log.read_text(errors="replace").count("configuration applied")
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(self.bench.settings | {"copies": copies}))
        fresh.rename(self.file)
        until = time.monotonic() + WITHIN_S
        while self.log.read_text(errors="replace").count("configuration applied") == before:
            if time.monotonic() > until:
                raise RuntimeError(f"the agent did not take {copies}: {self.log.read_text()[-500:]}")
            time.sleep(0.01)


def together(workloads: Sequence[Program], seconds: float, warm: float) -> list[float]:
    """Bytes per second of each tenant in the middle of a block in which all tenants copy."""
    for workload in workloads:
        workload.begin(seconds + 2 * warm)
    blocks = [workload.result() for workload in workloads]
    start_ns = max(block["begin_ns"] for block in blocks) + warm * 1e9
    end_ns = min(min(block["end_ns"] for block in blocks) - warm * 0.5e9, start_ns + seconds * 1e9)
    span_s = max(1e-3, (end_ns - start_ns) / 1e9)
    return [between(block, start_ns, end_ns, COUNT) / span_s for block in blocks]


def program(direction: str, memory: str, mode: str, size: int, *period_ms: float) -> list[str]:
    return ["cotenant.bench.copying", direction, memory, mode, str(size), *map(str, period_ms)]


def rounds_of(
    designs: dict[str, dict[str, Any]],
    settings: Settings,
    seconds: float,
    measure: Callable[[str], None],
    table: Callable[[int], dict[str, Any]],
    keep: Keep,
) -> dict[str, Any]:
    """Measure every design in every round, for about that long. `table` builds the result, which is stored after each
    design. A design whose settings the agent refuses is left out from then on."""
    until, count, shuffle = time.monotonic() + seconds, 0, random.Random(7)
    refused: dict[str, Any] = {}
    found: dict[str, Any] = {}
    while time.monotonic() < until and count < 24 and len(refused) < len(designs):
        order = [name for name in designs if name not in refused]
        shuffle.shuffle(order)
        for name in order:
            try:
                settings.take(designs[name])
            except Exception as error:  # a failed design must not prevent the others
                refused[name] = failure(error)
                continue
            measure(name)
            found = table(count) | ({"refused": refused} if refused else {})
            keep(found)
        count += 1
    return found | {"rounds": count}


def sharing(
    direction: str, designs: dict[str, dict[str, Any]], seconds: float, mode: str, size: int, keep: Keep
) -> dict[str, Any]:
    """Measure two tenants at 1:3 together, and the second one alone while the first is idle."""
    copy = program(direction, "pinned", mode, size)
    rows: dict[str, dict[str, list[float]]] = {
        name: {"share of weight 3": [], "together over native": [], "alone over native": []} for name in designs
    }
    natives: list[float] = []

    def table(rounds: int) -> dict[str, Any]:
        found = {
            name: {key: median_with_interval(values) for key, values in row.items() if values}
            for name, row in rows.items()
        }
        return {"rounds": rounds, "native GB/s": [n / 1e9 for n in median_with_interval(natives)], "designs": found}

    with slow_soft_link(GPU, SOFT_LINK_MBPS), Bench(GPU, settings_for(GPU, None, None, "stream")) as bench:
        native = bench.native("copy", program=copy)
        native.wait_ready()
        tenants = [bench.tenant("copy", spec, program=copy) for spec in specs_for([1, 3], "mps")]
        for tenant in tenants:
            tenant.wait_ready()

        def once(name: str) -> None:
            link = together([native], BLOCK_S, WARM_S / 2)[0]
            natives.append(link)
            rates = together(tenants, BLOCK_S, WARM_S)
            row = rows[name]
            row["share of weight 3"].append(rates[1] / sum(rates))
            row["together over native"].append(sum(rates) / link)
            if name in ALONE:
                time.sleep(0.25)  # after 0.2 s without copies, a tenant no longer counts as copying
                row["alone over native"].append(together(tenants[1:], BLOCK_S, WARM_S)[0] / link)

        return rounds_of(designs, Settings(bench), seconds, once, table, keep)


def beside(direction: str, designs: dict[str, dict[str, Any]], seconds: float, keep: Keep) -> dict[str, Any]:
    """Measure the 1 MiB copies of a latency-sensitive tenant, alone and with a best-effort tenant that saturates the
    link."""
    period_ms = 40.0 if SOFT else 2.0
    alone_us: dict[str, list[float]] = {name: [] for name in designs}
    beside_us: dict[str, list[float]] = {name: [] for name in designs}
    rows: dict[str, dict[str, list[float]]] = {
        name: {"p99 beside, us": [], "wait at p99, chunks": [], "BE over native": []} for name in designs
    }
    part = 0.5 if SOFT else 0.3

    def table(rounds: int) -> dict[str, Any]:
        found = {
            name: {key: median_with_interval(values) for key, values in row.items()}
            | {
                "copies": len(beside_us[name]),
                "alone p50, p99 us": [percentile(alone_us[name], 0.5), percentile(alone_us[name], 0.99)],
                "beside p50, p99, p99.9, most us": [percentile(beside_us[name], p) for p in (0.5, 0.99, 0.999, 1.0)],
            }
            for name, row in rows.items()
            if beside_us[name]
        }
        return {"rounds": rounds, "designs": found}

    with slow_soft_link(GPU, SOFT_LINK_MBPS), Bench(GPU, settings_for(GPU, None, None, "stream")) as bench:
        copy = program(direction, "pinned", "async", COPY)
        native = bench.native("copy", program=copy)
        native.wait_ready()
        ls_spec = TenantSpec("ls", latency_sensitive=True, copy_weight=1.0, mechanism="mps")
        be_spec = TenantSpec("be", best_effort=True, copy_weight=1.0, mechanism="mps")
        ls = bench.tenant("copy", ls_spec, program=program(direction, "pinned", "sync", 1 << 20, period_ms))
        be = bench.tenant("copy", be_spec, program=copy)
        ls.wait_ready()
        be.wait_ready()

        def once(name: str) -> None:
            link = together([native], BLOCK_S / 2, WARM_S / 2)[0]
            ls.begin(part)
            alone = ls.result()["latencies_us"]
            be.begin(part + 3 * WARM_S)
            time.sleep(WARM_S)
            ls.begin(part)
            with_be = ls.result()["latencies_us"]
            block = be.result()
            alone_us[name] += alone
            beside_us[name] += with_be
            chunk_us = designs[name]["chunk"] / link * 1e6
            rows[name]["p99 beside, us"].append(percentile(with_be, 0.99))
            rows[name]["wait at p99, chunks"].append(
                (percentile(with_be, 0.99) - statistics.median(alone)) / chunk_us if alone else math.nan
            )
            moved = between(block, block["begin_ns"] + WARM_S * 1e9, block["end_ns"] - WARM_S * 1e9, COUNT)
            span_s = (block["end_ns"] - block["begin_ns"]) / 1e9 - 2 * WARM_S
            rows[name]["BE over native"].append(moved / span_s / link)

        return rounds_of(designs, Settings(bench), seconds, once, table, keep)


def mixed(seconds: float, keep: Keep) -> dict[str, Any]:
    """Measure a tenant with pinned and one with pageable memory, of the same weight: each alone, then together,
    relative to the native rates."""
    programs = {
        kind: program("h2d", kind, "sync" if kind == "pageable" else "async", COPY) for kind in ("pinned", "pageable")
    }
    rows: dict[str, list[float]] = {f"{kind} {when}": [] for kind in programs for when in ("alone", "together")}
    natives: dict[str, list[float]] = {kind: [] for kind in programs}

    def table(rounds: int) -> dict[str, Any]:
        return {
            "rounds": rounds,
            "native GB/s": {kind: median_with_interval(values)[0] / 1e9 for kind, values in natives.items()},
            "over native": {key: median_with_interval(values) for key, values in rows.items()},
        }

    with slow_soft_link(GPU, SOFT_LINK_MBPS), Bench(GPU, settings_for(GPU, None, None, "stream")) as bench:
        native = {kind: bench.native("copy", program=one) for kind, one in programs.items()}
        tenants = {
            kind: bench.tenant("copy", TenantSpec(kind, copy_weight=1.0, mechanism="mps"), program=one)
            for kind, one in programs.items()
        }
        for workload in (*native.values(), *tenants.values()):
            workload.wait_ready()
        until, count = time.monotonic() + seconds, 0
        while time.monotonic() < until and count < 12:
            for kind in programs:
                natives[kind].append(together([native[kind]], BLOCK_S, WARM_S)[0])
                rows[f"{kind} alone"].append(together([tenants[kind]], BLOCK_S, 0.25 + WARM_S)[0] / natives[kind][-1])
            rates = together(list(tenants.values()), 2 * BLOCK_S, WARM_S)
            for kind, rate in zip(tenants, rates, strict=True):
                rows[f"{kind} together"].append(rate / natives[kind][-1])
            count += 1
            keep(table(count))
    return table(count)


def designs(keep: Keep) -> dict[str, Any]:
    """Compare designs in both directions, with fewer designs for copies to the host."""
    few = {name: CHUNKED[name] for name in ("default", "no larger pieces alone", "lead 40 us")}
    cases = {
        "h2d": lambda part: sharing("h2d", CHUNKED, 70.0, "async", COPY, part),
        "d2h": lambda part: sharing("d2h", few, 25.0, "async", COPY, part),
    }
    return each(cases, keep, 110.0)


def designs_one_by_one(keep: Keep) -> dict[str, Any]:
    """Compare designs with programs that make one copy at a time: of eight chunks and of two."""

    def case(size: int) -> Callable[[Keep], dict[str, Any]]:
        return lambda part: sharing("h2d", ONE_BY_ONE, 14.0, "sync", size, part)

    return each({f"{size >> 20} MiB": case(size) for size in (COPY, COPY // 4)}, keep, 50.0)


def designs_beside(keep: Keep) -> dict[str, Any]:
    """Compare designs for a latency-sensitive tenant's copies in either direction."""

    def case(direction: str) -> Callable[[Keep], dict[str, Any]]:
        return lambda part: beside(direction, BESIDE, 22.0, part)

    return each({direction: case(direction) for direction in ("h2d", "d2h")}, keep, 50.0)


def designs_mixed(keep: Keep) -> dict[str, Any]:
    """Compare designs for a tenant with pinned and one with pageable memory."""
    return each({"h2d": lambda part: mixed(10.0, part)}, keep, 30.0)
