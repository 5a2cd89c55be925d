"""Where an LS request's time goes beside best-effort kernels of 0.2 ms or less, by candidate, interleaved."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from colocation_faults import GPU, TOGETHER

from cotenant.bench.colocation import LEAD_S, parse_ls, quantile, rate_between
from cotenant.bench.colocation_rig import Program, Rig
from cotenant.metrics.attainment import attainment

LS = parse_ls("resnet50:4:100")
BLOCK_S = 1.0
STAGES = ("submit", "first", "rest", "other")
PAUSE_MS = 1.0  # a host that stood still for so long, alone or beside
Found = dict[str, Any]

AS_BEFORE = {"interval_ns": 100_000, "lead_ns": 20_000, "check_ns": 0, "stretch": 1.0}
CANDIDATES: dict[str, dict[str, Any]] = {
    "as before": AS_BEFORE,
    "few events": AS_BEFORE | {"check_ns": 400_000},
    "lead 10": {},  # the default
    "lead 5": {"lead_ns": 5_000},
    "lead 0": {"lead_ns": 0},
}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, largest and number."""
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values), "n": len(values)}


class Blocks:
    """What one candidate saw, block by block."""

    def __init__(self) -> None:
        self.latency_ms: list[list[float]] = []
        self.stages_ms: list[list[list[float]]] = []
        self.be: list[float] = []
        self.active: list[float] = []

    def add(self, seen: dict[str, Any], rate: float) -> None:
        """One block."""
        self.latency_ms.append(seen["latency_ms"])
        service = seen["service_ms"]
        self.stages_ms.append([[*s, ms - s[1] - s[2]] for s, ms in zip(seen["stages_ms"], service, strict=True)])
        self.be.append(rate)
        self.active.append(seen["active_s"] / BLOCK_S)

    def stage(self, index: int) -> list[float]:
        """One stage of every request."""
        return [request[index] for block in self.stages_ms for request in block]


def over(alone: list[list[float]], beside: list[list[float]], part: float) -> dict[str, Any]:
    """Quantile beside over alone, with a 95 % interval that resamples blocks: both saw the same arrivals."""
    draw = random.Random(0)

    def ratio(picked: Sequence[int]) -> float:
        both = [quantile([ms for i in picked for ms in side[i]], part) for side in (beside, alone)]
        return both[0] / both[1]

    count = len(alone)
    found = [ratio([draw.randrange(count) for _ in range(count)]) for _ in range(300)]
    by_block = [quantile(b, part) / quantile(a, part) for a, b in zip(alone, beside, strict=True)]
    return {
        "ratio": ratio(range(count)),
        "ci95": [quantile(found, 0.025), quantile(found, 0.975)],
        "median_of_blocks": quantile(by_block, 0.5),
    }


def without_pauses(alone: Blocks, beside: Blocks) -> tuple[list[list[float]], list[list[float]]]:
    """Both sides without the requests during which the host stood still, alone or beside: not the GPU's doing."""
    usual = quantile(alone.stage(3), 0.5)
    kept: tuple[list[list[float]], list[list[float]]] = ([], [])
    for a_ms, b_ms, a_stages, b_stages in zip(
        alone.latency_ms, beside.latency_ms, alone.stages_ms, beside.stages_ms, strict=True
    ):
        calm = [max(a[3], b[3]) < usual + PAUSE_MS for a, b in zip(a_stages, b_stages, strict=True)]
        kept[0].append([ms for ms, keep in zip(a_ms, calm, strict=True) if keep])
        kept[1].append([ms for ms, keep in zip(b_ms, calm, strict=True) if keep])
    return kept


def report(alone: Blocks, native: list[float], beside: Blocks) -> dict[str, Any]:
    """One candidate against alone."""
    left = 1 - quantile(alone.active, 0.5)
    parts = {name: spread(beside.stage(i)) for i, name in enumerate(STAGES)}
    added = {name: quantile(beside.stage(i), 0.5) - quantile(alone.stage(i), 0.5) for i, name in enumerate(STAGES)}
    waits = [max(0.0, ms - quantile(alone.stage(1), 0.5)) for ms in beside.stage(1)]
    of_left = sorted(b / n / left for b, n in zip(beside.be, native, strict=True))
    slo_ms = quantile([ms for block in alone.latency_ms for ms in block], 0.995)
    share, interval = attainment([ms for block in beside.latency_ms for ms in block], slo_ms)
    return {
        "slo_attainment": {"slo_ms": slo_ms, "share": share, "ci95": interval},
        "p50": over(alone.latency_ms, beside.latency_ms, 0.5),
        "p99": over(alone.latency_ms, beside.latency_ms, 0.99),
        "p99_without_pauses": over(*without_pauses(alone, beside), 0.99),
        "stages_ms": parts,
        "added_p50_ms": added,
        "waited_for_be_ms": spread(waits) | {"mean": sum(waits) / len(waits)},
        "be_of_left": {"median": quantile(of_left, 0.5), "low": quantile(of_left, 0.1), "high": quantile(of_left, 0.9)},
        "latency_us": [round(ms * 1e3) for block in beside.latency_ms for ms in block],
    }


def block(ls: Program, seed: int, raises: bool, be: Program | None) -> tuple[dict[str, Any], float]:
    """One block of requests, beside BE or alone."""
    if be is not None:
        be.tell(f"run {BLOCK_S + 2 * LEAD_S}")
        time.sleep(LEAD_S)
    seen = ls.ask(f"run {BLOCK_S} {LS.rate_rps} {seed} {int(raises)} 0 1", BLOCK_S * 20 + 30)
    if be is None:
        return seen, 0.0
    work = be.answer(BLOCK_S * 20 + 60)
    return seen, rate_between(work, seen["begin_ns"], min(seen["end_ns"], work["end_ns"]))


class Stand:
    """The programs of one measurement: LS, BE under the shim on all and on a part of the SMs, held on the device."""

    def __init__(self, rig: Rig, held: bool, capped: bool) -> None:
        self.rig = rig
        self.ls, self.native, self.be = rig.ls(), rig.be_native(), rig.be(below=True)
        self.capped = rig.be("be-94", sms=0.94, below=True) if capped else None
        self.programs = [self.ls, self.native, self.be, *([self.capped] if self.capped else [])]
        self.held: tuple[Program, Program] | None = None
        if held:
            with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as word:
                word.write(bytes(4096))
            self.word = Path(word.name)
            os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)
            rig.bench.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
            other = rig.ls("ls-word")
            holder = rig._native("be-held", ["device_hold", rig.bench.backend, str(self.word)], 1.0)
            self.held = (other, holder)
            self.programs += [other, holder]
        for program in self.programs:
            program.wait_ready()
        rig.join(self.ls)
        if self.held:
            self.held[0].ask(f"word {self.word}")

    def load(self, kind: str) -> None:
        """Set the load up in every BE program."""
        self.rig.scheme("mps-plus")
        for program in (self.native, self.be, self.capped, self.held[1] if self.held else None):
            if program is not None:
                program.ask(f"load {kind}", 60)

    def run(self, name: str, seed: int) -> tuple[dict[str, Any], float]:
        """One block of a candidate."""
        if name == "held on the device":
            assert self.held is not None
            return block(self.held[0], seed, True, self.held[1])
        if name == "be on 94 % of the SMs":
            self.rig.scheme("tidal")
            return block(self.ls, seed, True, self.capped)
        self.rig.scheme("tidal", **CANDIDATES[name])
        return block(self.ls, seed, True, self.be)


def compare(found: Found, stand: Stand, kind: str, names: list[str], seconds: float) -> None:
    """Blocks in turn until the time is over, another candidate first each time; what was seen is written after each."""
    stand.load(kind)
    ends = time.monotonic() + seconds
    alone, native = Blocks(), []
    seen = {name: Blocks() for name in names}
    rounds = 0
    while rounds == 0 or time.monotonic() < ends:
        alone.add(*block(stand.ls, rounds, False, None))
        own = stand.native.ask("run 0.3", 60)
        native.append(rate_between(own, own["begin_ns"], own["end_ns"]))
        turn = rounds % len(names)
        for name in (*names[turn:], *names[:turn]):
            seen[name].add(*stand.run(name, rounds))
        rounds += 1
        found[kind] = {"rounds": rounds, "alone": {n: spread(alone.stage(i)) for i, n in enumerate(STAGES)}}
        found[kind]["alone"]["latency_ms"] = spread([ms for b in alone.latency_ms for ms in b])
        found[kind]["native_rate"] = quantile(native, 0.5)
    for name in names:
        found[kind][name] = report(alone, native, seen[name])
        p99, be = found[kind][name]["p99"], found[kind][name]["be_of_left"]
        wait = found[kind][name]["waited_for_be_ms"]
        print(
            f"{kind} {name}: p99 {p99['ratio']:.3f} {p99['ci95']}, waited {wait['mean']:.3f} ms, BE {be['median']:.3f}",
            flush=True,
        )


def seconds_of(default: float) -> float:
    """Shorter where the environment says so: to try a step on the software GPU."""
    return float(os.environ.get("TAIL_SECONDS", default))


def tidal_tail(found: Found) -> None:
    """Beside products of 0.2 ms, the hardest: every candidate."""
    found["yield_us"] = yields()
    with Rig(GPU, together=TOGETHER) as rig:
        stand = Stand(rig, held=True, capped=TOGETHER)
        more = ["held on the device", *(["be on 94 % of the SMs"] if TOGETHER else [])]
        try:
            compare(found, stand, "mm4096", [*CANDIDATES, *more], seconds_of(190))
        finally:
            stand.word.unlink(missing_ok=True)


def tail_short(found: Found) -> None:
    """Beside shorter kernels and training: as it was and as it is."""
    with Rig(GPU, together=TOGETHER) as rig:
        stand = Stand(rig, held=False, capped=False)
        for kind in ("mm2048", "add256", "train-resnet50", "train-transformer"):
            compare(found, stand, kind, ["as before", "lead 10"], seconds_of(32))


def stretch(found: Found) -> None:
    """Training that its host holds back: how far the bound may grow."""
    CANDIDATES.update({f"stretch {n:g}": {"stretch": n} for n in (1.0, 4.0, 10.0)})
    with Rig(GPU, together=TOGETHER) as rig:
        stand = Stand(rig, held=False, capped=False)
        for kind in ("train-resnet50", "train-transformer"):
            compare(found, stand, kind, ["as before", "stretch 1", "stretch 4", "stretch 10"], seconds_of(45))


def event_cost(found: Found) -> None:
    """Launches per second with an event, or a wait for a word, between two short kernels."""
    with Rig(GPU, together=TOGETHER) as rig, tempfile.NamedTemporaryFile(dir="/dev/shm") as word:
        word.write(bytes(4096))
        word.flush()
        rig.bench.environment["PYTHONPATH"] = str(Path(__file__).resolve().parent)
        program = rig._native("cost", ["device_hold", rig.bench.backend, word.name], 1.0).wait_ready()
        for kind in ("mm2048", "mm4096"):
            rates = program.ask(f"cost {kind} 0.15", 90)
            bare = quantile(rates["nothing"], 0.5)
            found[kind] = {name: quantile(values, 0.5) for name, values in rates.items()}
            found[kind]["added_us"] = {name: 1e6 / quantile(values, 0.5) - 1e6 / bare for name, values in rates.items()}


def yields() -> dict[str, float]:
    """How long giving up the processor takes here, us."""
    costs = []
    for _ in range(2000):
        began = time.perf_counter_ns()
        os.sched_yield()
        costs.append((time.perf_counter_ns() - began) / 1e3)
    return spread(costs)


TAIL_STEPS: dict[str, tuple[Callable[[Found], None], int]] = {
    "tidal_tail": (tidal_tail, 240),
    "tail_short": (tail_short, 190),
    "stretch": (stretch, 150),
    "event_cost": (event_cost, 45),
}
