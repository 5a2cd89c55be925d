"""Measures the stages of an LS request's time with best-effort kernels of at most 0.2 ms, for several configurations
(candidates)."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from card_watch import Watch, throttled
from colocation_faults import GPU, TOGETHER

from cotenant.bench.colocation import LEAD_S, parse_ls, quantile, rate_between
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.core.metrics.attainment import attainment

LS = parse_ls("resnet50:4:100")
BLOCK_S = 1.5
# duration of a native block: of single kernels, and of training, whose steps are counted as a whole
NATIVE_S, NATIVE_STEPS_S = 0.5, 1.0
STAGES = ("late", "other", "first", "rest")
RESAMPLES = 300
ARRIVALS = 20_000  # number of arrivals in a stream whose queue is computed from measured times
Found = dict[str, Any]

CANDIDATES: dict[str, dict[str, Any]] = {
    "now": {},  # the default settings
    "clock 92": {"duty_cycle": 0.5, "clock": 0.92},
    "clock 92, zeros": {"duty_cycle": 0.5, "clock": 0.92},
}
ZEROS = ", zeros"  # marks a variant with the same kernels on zeros, which take less power


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, maximum and number of values."""
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values), "n": len(values)}


def mean(values: Sequence[float]) -> float:
    """Mean."""
    return sum(values) / len(values)


class Blocks:
    """Measurements of one candidate, block by block. Stages of a request in ms: late (waiting before it began although
    no other request was in front of it), other (time of the host before and after the GPU), first (kernels that wait
    for the BE work that was in flight), rest."""

    def __init__(self) -> None:
        self.latency_ms: list[list[float]] = []
        self.stages_ms: list[list[list[float]]] = []
        self.be: list[float] = []
        self.active: list[float] = []
        self.card: list[dict[str, float]] = []

    def add(self, seen: dict[str, Any], rate: float, card: dict[str, float]) -> None:
        """One block."""
        self.latency_ms.append(seen["latency_ms"])
        rows = zip(seen["late_ms"], seen["stages_ms"], seen["service_ms"], strict=True)
        self.stages_ms.append([[late, ms - s[1] - s[2], s[1], s[2]] for late, s, ms in rows])
        self.be.append(rate)
        self.active.append(seen["active_s"] / BLOCK_S)
        self.card.append(card)

    def stage(self, index: int) -> list[float]:
        """One stage of every request."""
        return [request[index] for block in self.stages_ms for request in block]

    def clock_mhz(self) -> float:
        """Median of the SM clock over blocks; 0 if it cannot be read."""
        return quantile([card.get("sm_mhz", 0.0) for card in self.card], 0.5)

    def raw_us(self) -> list[list[list[int]]]:
        """For each block and request: latency and stages."""
        both = zip(self.latency_ms, self.stages_ms, strict=True)
        return [[[round(ms * 1e3) for ms in (lat, *s)] for lat, s in zip(*one, strict=True)] for one in both]


def over(alone: list[list[float]], beside: list[list[float]], part: float) -> dict[str, Any]:
    """Ratio of a quantile with BE to that alone, with a 95 % interval that resamples blocks. Both have the same
    arrivals."""
    draw = random.Random(0)

    def ratio(picked: Sequence[int]) -> float:
        both = [quantile([ms for i in picked for ms in side[i]], part) for side in (beside, alone)]
        return both[0] / both[1]

    count = len(alone)
    found = [ratio([draw.randrange(count) for _ in range(count)]) for _ in range(RESAMPLES)]
    return {"ratio": ratio(range(count)), "ci95": [quantile(found, 0.025), quantile(found, 0.975)]}


def queued(served_ms: Sequence[float], seed: int) -> list[float]:
    """Latencies of a long Poisson stream of requests whose service times are drawn from the measured ones. A request
    waits for max(0, wait + service time of the previous request - gap between both), Lindley 1952. The p99 of these
    latencies does not depend on the chance of the measured arrivals."""
    draw = random.Random(seed)
    wait = 0.0
    found = []
    for _ in range(ARRIVALS):
        served = draw.choice(served_ms)
        found.append(wait + served)
        wait = max(0.0, wait + served - draw.expovariate(LS.rate_rps) * 1e3)
    return found


def from_service(alone: Blocks, beside: Blocks, skip_late: bool) -> dict[str, Any]:
    """Ratio of p99 with BE to that alone, for long streams with the same arrivals. The interval resamples blocks.
    `skip_late`: leave out delays of the host."""
    draw = random.Random(1)
    ratios = []
    count = len(alone.stages_ms)
    for resample in range(8):
        picked = [draw.randrange(count) for _ in range(count)] if resample else list(range(count))
        p99 = []
        for side in (alone, beside):
            served = [sum(s[1 if skip_late else 0 :]) for i in picked for s in side.stages_ms[i]]
            p99.append(quantile(queued(served, resample), 0.99))
        ratios.append(p99[1] / p99[0])
    return {"ratio": ratios[0], "low": min(ratios), "high": max(ratios)}


def report(alone: Blocks, native: list[float], beside: Blocks) -> dict[str, Any]:
    """Compare one candidate with LS alone."""
    left = 1 - quantile(alone.active, 0.5)
    of_left = sorted(b / n / left for b, n in zip(beside.be, native, strict=True))
    slo_ms = quantile([ms for block in alone.latency_ms for ms in block], 0.995)
    share, interval = attainment([ms for block in beside.latency_ms for ms in block], slo_ms)
    alone_mean, beside_mean = (
        [mean(side.stage(i)) for i in range(len(STAGES))] for side in (alone, beside)
    )  # means can be added up, unlike percentiles
    return {
        "slo_attainment": {"slo_ms": slo_ms, "share": share, "ci95": interval},
        "p50": over(alone.latency_ms, beside.latency_ms, 0.5),
        "p99": over(alone.latency_ms, beside.latency_ms, 0.99),
        "p99_from_service": from_service(alone, beside, False),
        "p99_from_service_not_late": from_service(alone, beside, True),
        "stages_ms": {name: spread(beside.stage(i)) for i, name in enumerate(STAGES)},
        "rest_over_alone": quantile(beside.stage(3), 0.5) / quantile(alone.stage(3), 0.5),
        "added_mean_ms": dict(zip(STAGES, (b - a for a, b in zip(alone_mean, beside_mean, strict=True)), strict=True)),
        "sm_mhz": beside.clock_mhz(),
        "sm_mhz_over_alone": beside.clock_mhz() / max(1.0, alone.clock_mhz()),
        "card": beside.card[-1],
        "be_of_left": {"median": quantile(of_left, 0.5), "low": quantile(of_left, 0.1), "high": quantile(of_left, 0.9)},
        "raw_us": beside.raw_us(),
    }


def block(ls: Program, seed: int, raises: bool, be: Program | None) -> tuple[dict[str, Any], float, dict[str, float]]:
    """Run one block of requests, beside BE or alone."""
    if be is not None:
        be.tell(f"run {BLOCK_S + 2 * LEAD_S}")
        time.sleep(LEAD_S)
    with Watch(GPU) as card:
        seen = ls.ask(f"run {BLOCK_S} {LS.rate_rps} {seed} {int(raises)} 0 1", BLOCK_S * 20 + 30)
    if be is None:
        return seen, 0.0, card.medians()
    work = be.answer(BLOCK_S * 20 + 60)
    rate = rate_between(work, seen["begin_ns"], min(seen["end_ns"], work["end_ns"]))
    return seen, rate, card.medians()


class Stand:
    """The programs of one measurement: LS, BE without the shim, BE with it, and another BE tenant that multiplies
    zeros."""

    def __init__(self, rig: Rig, zeros: bool = False) -> None:
        self.rig = rig
        self.ls, self.native, self.be = rig.ls(), rig.be_native(), rig.be(below=True)
        self.zeros = rig.be("be-zeros", below=True) if zeros else None
        for program in (self.ls, self.native, self.be, self.zeros):
            if program is not None:
                program.wait_ready()
        rig.join(self.ls)

    def load(self, kind: str) -> None:
        """Set up the load in every BE program."""
        self.native_s = NATIVE_STEPS_S if kind.startswith("train-") else NATIVE_S
        self.rig.scheme("mps-plus")
        self.native.ask(f"load {kind}", 60)
        self.be.ask(f"load {kind}", 60)
        if self.zeros is not None:
            self.zeros.ask(f"load {kind.replace('mm', 'mmz')}", 60)

    def run(self, name: str, seed: int) -> tuple[dict[str, Any], float, dict[str, float]]:
        """Run one block with a candidate's settings."""
        self.rig.scheme("tidal", **CANDIDATES.get(name, {}))
        return block(self.ls, seed, True, self.zeros if name.endswith(ZEROS) else self.be)

    def alone(self) -> tuple[float, dict[str, Any]]:
        """Measure BE without the shim and without LS. It runs for some time before it counts, as long as it does beside
        LS, because a card at its power limit is faster at first."""
        with Watch(GPU) as card:
            work = self.native.ask(f"run {self.native_s + LEAD_S}", 60)
        begin = work["begin_ns"]
        at = [begin, *(begin + round(ms * 1e6) for ms in (50, 100, 150, 400)), work["end_ns"]]
        by_time = [rate_between(work, a, b) for a, b in itertools.pairwise(at)]
        rate = rate_between(work, begin + round(LEAD_S * 1e9), work["end_ns"])
        return rate, {"rate_0_50_100_150_400_ms": by_time} | card.medians()


def compare(found: Found, stand: Stand, kind: str, names: list[str], seconds: float) -> None:
    """Alternate blocks until the time is over; each round begins with another candidate. Results are saved after each
    round."""
    stand.load(kind)
    ends = time.monotonic() + seconds
    alone, native, natively = Blocks(), [], []
    seen = {name: Blocks() for name in names}
    rounds = 0
    before = throttled()
    while rounds == 0 or time.monotonic() < ends:
        alone.add(*block(stand.ls, rounds, False, None))
        rate, details = stand.alone()
        native.append(rate)
        natively.append(details)
        turn = rounds % len(names)
        for name in (*names[turn:], *names[:turn]):
            seen[name].add(*stand.run(name, rounds))
        rounds += 1
        found[kind] = {"rounds": rounds, "alone": {n: spread(alone.stage(i)) for i, n in enumerate(STAGES)}}
    row = found[kind]
    row["host_throttled_us"] = throttled() - before
    row["alone"] |= {"latency_ms": spread([ms for b in alone.latency_ms for ms in b]), "sm_mhz": alone.clock_mhz()}
    row["alone"] |= {"card": alone.card[-1], "raw_us": alone.raw_us()}
    row["native"] = {"rate": quantile(native, 0.5), "blocks": natively}
    for name in names:
        row[name] = report(alone, native, seen[name])
        print(said(kind, name, row[name]), flush=True)


def said(kind: str, name: str, row: dict[str, Any]) -> str:
    """One line."""
    added = ", ".join(f"{stage} {ms:+.3f}" for stage, ms in row["added_mean_ms"].items())
    return (
        f"{kind} {name}: p50 {row['p50']['ratio']:.3f}, p99 {row['p99']['ratio']:.3f} {row['p99']['ci95']}, from "
        f"service times {row['p99_from_service']['ratio']:.3f} (not late "
        f"{row['p99_from_service_not_late']['ratio']:.3f}), rest {row['rest_over_alone']:.3f}, clock "
        f"{row['sm_mhz']:.0f} MHz {row['sm_mhz_over_alone']:.3f}, added mean ms: {added}, "
        f"BE {row['be_of_left']['median']:.3f}"
    )


def seconds_of(default: float) -> float:
    """Length of a step, shortened by an environment variable to test it on the software GPU."""
    return float(os.environ.get("TAIL_SECONDS", default))


def tidal_tail(found: Found) -> None:
    """Measure every candidate, and the GPU's clock, with products of 0.2 ms, the hardest case."""
    with Rig(GPU, together=TOGETHER) as rig:
        compare(found, Stand(rig, zeros=True), "mm4096", list(CANDIDATES)[1:], seconds_of(85))


def tail_short(found: Found) -> None:
    """Measure the former and the current settings with shorter kernels and training."""
    with Rig(GPU, together=TOGETHER) as rig:
        stand = Stand(rig)
        for kind in ("mm2048", "add256", "train-resnet50", "train-transformer"):
            compare(found, stand, kind, ["as before", "now"], seconds_of(32))


def stretch(found: Found) -> None:
    """Measure host-bound training for several values of the largest budget scale."""
    CANDIDATES.update({f"stretch {n:g}": {"stretch": n} for n in (8.0, 16.0)})
    with Rig(GPU, together=TOGETHER) as rig:
        stand = Stand(rig)
        for kind in ("train-resnet50", "train-transformer"):
            compare(found, stand, kind, ["now", "stretch 8", "stretch 16"], seconds_of(68))


def event_cost(found: Found) -> None:
    """Measure launches per second with an event, or with a stream memory wait, between two short kernels."""
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


TAIL_STEPS: dict[str, tuple[Callable[[Found], None], int]] = {
    "tidal_tail": (tidal_tail, 125),
    "tail_short": (tail_short, 190),
    "stretch": (stretch, 190),
    "event_cost": (event_cost, 40),
}
