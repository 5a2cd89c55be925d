"""Best-effort training next to a service: which fraction of the remaining GPU time the training uses, and where the
rest is lost."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from colocation_faults import GPU, TOGETHER

from cotenant.bench.colocation import (
    Plan,
    ls_block,
    native_block,
    p99_interval,
    pair_block,
    parse_ls,
    parse_schemes,
    quantile,
)
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program

Found = dict[str, Any]
# with the first two batch sizes the GPU limits the speed of training; with the others the host does, and the speed then
# varies by a fifth by itself
FULL, BOUND = ("train-resnet50:96", "train-transformer:48"), ("train-resnet50", "train-transformer")
ROUNDS_FULL = int(os.environ.get("TRAINING_ROUNDS", 8))
ALONE_S, BESIDE_S = 0.4, 0.8
NATIVE, SHIM, GATE, LEFT, BOUNDED = "native", "no gate", "gate", "beside", "beside, not ahead"


class Rounds:
    """Alternate blocks of one load: LS alone, BE alone in three configurations, BE beside LS. Rates are steps/s."""

    def __init__(self, rig: Rig, ls: Program, native: Program, be: Program, ways: Sequence[str]) -> None:
        self.rig, self.ls, self.native, self.be = rig, ls, native, be
        self.plan = Plan(parse_ls("resnet50:4:100"), [], parse_schemes("tidal"), block_s=BESIDE_S)
        self.rates: dict[str, list[float]] = {way: [] for way in ways}
        self.left: list[float] = []  # fraction of the time for which LS work that runs alone leaves the GPU idle
        self.waited: list[float] = []  # fraction of the time for which BE work waited at the gate while LS work ran
        self.alone_ms: list[list[float]] = []
        self.beside_ms: dict[str, list[list[float]]] = {way: [] for way in ways if way in (LEFT, BOUNDED)}

    def run(self, number: int) -> None:
        """Run one round, which begins with another configuration than the previous one."""
        alone = ls_block(self.ls, self.plan, number, raises=False)
        self.left.append(1 - alone["active_s"] / BESIDE_S)
        self.alone_ms.append(alone["latency_ms"])
        ways = list(self.rates)
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            changes = {"run_ahead": "never"} if way == BOUNDED else {}
            self.rig.scheme("mps-plus" if way == SHIM else "tidal", **changes)
            if way in self.beside_ms:
                self.rates[way].append(self._beside(way, number))
            else:
                self.rates[way].append(native_block(self.native if way == NATIVE else self.be, ALONE_S))

    def _beside(self, way: str, number: int) -> float:
        before, began = self._waited_s(), time.monotonic()
        found, rate = pair_block(self.ls, self.be, self.plan, number)
        self.beside_ms[way].append(found["latency_ms"])
        if way == LEFT:
            self.waited.append((self._waited_s() - before) / (time.monotonic() - began))
        return rate

    def _waited_s(self) -> float:
        return float(self.rig.tenants()["be"].get("gate_wait_s", 0.0))

    def report(self) -> dict[str, Any]:
        """Ratios of mean rates with 95 % intervals, p99 of LS, and the rate of every block."""
        pairs = [(SHIM, NATIVE), (GATE, SHIM), *((way, of) for way in self.beside_ms for of in (NATIVE, SHIM))]
        row: dict[str, Any] = {f"{way} over {of}": self._over(way, of) for way, of in pairs}
        alone = [ms for block in self.alone_ms for ms in block]
        for way, blocks in self.beside_ms.items():
            beside = [ms for block in blocks for ms in block]
            row[f"LS {way}"] = {
                "p50": quantile(beside, 0.5) / quantile(alone, 0.5),
                "p99": quantile(beside, 0.99) / quantile(alone, 0.99),
                "p99_ci95": p99_interval(alone, beside),
                "requests": len(beside),
            }
        row |= {"left": statistics.mean(self.left), "waited": statistics.median(self.waited)}
        return row | {"rates": {way: [round(rate, 3) for rate in rates] for way, rates in self.rates.items()}}

    def _over(self, way: str, of: str) -> dict[str, Any]:
        """Ratio of mean rates, relative to the time that LS leaves. The interval is a bootstrap over rounds."""
        left = self.left if way in self.beside_ms else [1.0] * len(self.left)
        rows = list(zip(self.rates[way], self.rates[of], left, strict=True))

        def ratio(drawn: Sequence[tuple[float, float, float]]) -> float:
            mine, other, idle = (sum(column) for column in zip(*drawn, strict=True))
            of_left: float = mine / other / idle * len(drawn)
            return of_left

        draw = random.Random(0)
        drawn = sorted(ratio(draw.choices(rows, k=len(rows))) for _ in range(1000))
        return {"ratio": round(ratio(rows), 4), "ci95": [round(quantile(drawn, q), 4) for q in (0.025, 0.975)]}


def training(found: Found) -> None:
    """Measure training as best-effort work, with programs that the GPU limits and programs that their host limits.

    "no gate over native": the cost of the shim, together with the difference between two processes. "gate over no
    gate": the cost of the limit on work in flight, measured in one process. "beside over no gate": the fraction that
    the program does beside the LS service, relative to the time that LS leaves, also measured in one process. "not
    ahead": the program launches nothing before it may run (ahead 0).
    """
    with Rig(GPU, together=TOGETHER, pinned=True) as rig:
        ls, native, be = rig.ls(), rig.be_native("native"), rig.be(below=True)
        for program in (ls, native, be):
            program.wait_ready()
        rig.join(ls)
        for kinds, ways, count in (
            (FULL, (NATIVE, SHIM, GATE, LEFT, BOUNDED), ROUNDS_FULL),
            (BOUND, (NATIVE, SHIM, GATE, LEFT, BOUNDED), ROUNDS_FULL * 5 // 4),
        ):
            for kind in kinds:
                rig.scheme("mps-plus")
                # loaded one after the other, because each program benchmarks cuDNN's algorithms at its start
                found[kind] = {"step_ms": [program.ask(f"load {kind}", 60)["unit_ms"] for program in (native, be)]}
                rounds = Rounds(rig, ls, native, be, ways)
                for number in range(count):
                    rounds.run(number)
                    found[kind] |= rounds.report()
                print(kind, {k: v for k, v in found[kind].items() if k != "rates"}, flush=True)


HOST_STEPS: dict[str, tuple[Callable[[Found], None], int]] = {"training": (training, 280)}
