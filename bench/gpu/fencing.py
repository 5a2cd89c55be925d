"""Measures the overhead of a tenant that is alone, and which part of it comes from the shim's fences; used by
loading.py.

A native program and a tenant launch in turn from one core. Before each block the agent switches the tenant's fences on
or off (COTENANT_SLOT_UNFENCED). So the cost of fences is measured within one process, and only ratios to native depend
on the memory layout of the two processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))
sys.path.insert(0, str(HERE.parent / "shim"))

from fake_agent import UNFENCED, FakeAgent  # noqa: E402
from runs import SOFT, Run  # noqa: E402

from cotenant.bench.overhead import median_interval  # noqa: E402

BLOCK_S = 0.08
SETTLE_S = 0.02  # a change of the flags takes effect at the next interval of launches
WAYS = {"none": UNFENCED, "default": 0}  # way -> flags of the tenant's slot on the shared page
FENCES = 168  # offset of the number of fences in a slot


class Pair:
    """A native program, and a tenant with a private agent."""

    def __init__(self, folder: Path, kind: str, number: int) -> None:
        self.agent = FakeAgent(folder / f"{kind}{number}.sock", inflight_ns=4_000_000)
        core = str(max(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "cotenant.bench.workload", kind, "driver" if SOFT else "torch"]
        extra = {"COTENANT_BENCH_CORE": core, "PYTHONPATH": str(HERE.parent.parent / "src")}
        self.native = Run(command, None, **extra)
        self.tenant = Run(command, self.agent.path, **extra)

    def wait_ready(self) -> None:
        for run in (self.native, self.tenant):
            assert run.process.stdout is not None
            line = run.process.stdout.readline()
            assert line.startswith("ready"), line + str(run.finish(1))

    def block(self, side: str) -> float:
        """Units of work per second of one block."""
        run = self.native if side == "native" else self.tenant
        if side != "native":
            self.agent.clients[0].flags(1 | WAYS[side])
        self.run(run, SETTLE_S)
        return self.run(run, BLOCK_S)

    @staticmethod
    def run(run: Run, seconds: float) -> float:
        assert run.process.stdin is not None
        assert run.process.stdout is not None
        run.process.stdin.write(f"run {seconds}\n")
        run.process.stdin.flush()
        done = json.loads(run.process.stdout.readline())
        return float(done["count"] / (done["end_ns"] - done["begin_ns"]) * 1e9)

    def close(self) -> None:
        for run in (self.native, self.tenant):
            run.finish(20)
        self.agent.close()


@contextlib.contextmanager
def started(kind: str, processes: int) -> Iterator[list[Pair]]:
    """Set up all pairs at the same time, because setting up takes longest."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [Pair(Path(folder), kind, number) for number in range(processes)]
        try:
            for pair in pairs:
                pair.wait_ready()
            yield pairs
        finally:
            for pair in pairs:
                pair.close()


def rounds_of(pair: Pair, rounds: int) -> dict[str, list[float]]:
    """Rates of each side. The order rotates and changes direction, so that drift of the machine affects all sides
    alike."""
    sides = ["native", *WAYS]
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        order = sides[number % len(sides) :] + sides[: number % len(sides)]
        for side in order if number % 2 else order[::-1]:
            rates[side].append(pair.block(side))
    return rates


def summary(ratios: list[float]) -> dict[str, Any]:
    """Median with its 95 % confidence interval; for fewer than six values the range."""
    low, high = median_interval(len(ratios))
    ordered = sorted(ratios)
    return {"median": round(statistics.median(ordered), 4), "ci95": [round(ordered[low], 4), round(ordered[high], 4)]}


def ratios(rates: dict[str, list[float]], side: str, to: str) -> list[float]:
    return [a / b for a, b in zip(rates[side], rates[to], strict=True)]


def parts(kind: str, processes: int, rounds: int) -> dict[str, Any]:
    """Ratios of a tenant with fences, and without, to native (sample: the median of each process), and of the tenant
    with fences to the one without (sample: all rounds)."""
    with started(kind, processes) as pairs:
        found = [rounds_of(pair, rounds) for pair in pairs]
        fences = [pair.agent.clients[0].slot(0, FENCES).value for pair in pairs]
    return {
        "over_native": {
            side: summary([statistics.median(ratios(rates, side, "native")) for rates in found]) for side in WAYS
        },
        "default_over_none": summary([ratio for rates in found for ratio in ratios(rates, "default", "none")]),
        "by_process": [round(statistics.median(ratios(rates, "default", "none")), 4) for rates in found],
        "native_rate": round(statistics.median(rate for rates in found for rate in rates["native"]), 1),
        "fences": fences,
    }
