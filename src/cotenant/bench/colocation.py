"""`cotenant bench colocation`: measures latency of latency-sensitive (LS) requests and throughput of best-effort (BE)
work under each scheme, in alternating blocks with the same arrivals."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cotenant.abi.floor import RuleKind, WorkClass
from cotenant.agent.config.kernel_table import compiled
from cotenant.bench.be_loads import KIND
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.bench.shares import COUNT, between
from cotenant.core.errors import InputError
from cotenant.core.metrics.attainment import attainment
from cotenant.core.units import number_or_nan
from cotenant.policy.colocation import SCHEMES, Scheme, scheme_named
from cotenant.profiles.kernels.contention import read_table
from cotenant.profiles.kernels.profile import KernelRow

LEAD_S = 0.15  # best-effort work runs this long before the first arrival and after the last one
BETWEEN_S = 0.33  # estimated overhead of one block (a part of the measurement) in s
RESAMPLES = 200
SLO_QUANTILE = 0.995
LATE_MS = 0.5  # a request that begins this much later than it could have begun shows that the host paused
FILLS_SMS = 1024  # number of SMs that the loads mmN, addN and copyN fill; their grids have several waves on any GPU


@dataclass(frozen=True)
class LsLoad:
    """A latency-sensitive (LS) load such as `resnet50:4:100`: model, batch, arrivals per second."""

    model: str
    batch: int
    rate_rps: float


def parse_ls(text: str) -> LsLoad:
    """Parse MODEL:BATCH:RATE into an LsLoad."""
    parts = text.split(":")
    if len(parts) != 3 or parts[0] != "resnet50" or not parts[1].isdigit() or not 1 <= int(parts[1]) <= 64:
        raise InputError(f"{text!r} is not resnet50:BATCH:RATE, such as resnet50:4:100", field="--ls")
    rate = number_or_nan(parts[2])
    if not 0.1 <= rate <= 1e5:
        raise InputError(f"{parts[2]!r} is not a rate of 0.1 to 100,000 requests a second", field="--ls")
    return LsLoad(parts[0], int(parts[1]), rate)


def parse_be(text: str) -> list[str]:
    """Return the names of best-effort (BE) loads from a comma-separated list. InputError for unknown ones."""
    kinds = text.split(",")
    for kind in kinds:
        if not KIND.match(kind):
            raise InputError(
                f"unknown best-effort load {kind!r}; write mmN, mmzN, addN, copyN, "
                "train-resnet50[:BATCH] or train-transformer[:BATCH]",
                field="--be",
            )
    return kinds


def parse_schemes(text: str) -> list[Scheme]:
    """Return the co-location schemes named in `text`, without duplicates: `all`, or a comma-separated list. InputError
    for anything else.
    """
    if text == "all":
        return list(SCHEMES)
    try:
        return [scheme_named(name) for name in dict.fromkeys(text.split(","))]
    except InputError as error:
        raise InputError(error.message, field="--schemes") from None


@dataclass
class Series:
    """Measurements with one scheme and one best-effort (BE) load: latencies of latency-sensitive (LS) requests and
    rates of BE work, each alone and together (`beside`).
    """

    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    # fraction of the time for which the latency-sensitive service was active when it ran alone
    alone_active: list[float] = field(default_factory=list)
    # units of best-effort work per second while the latency-sensitive service does not run
    alone_rate: list[float] = field(default_factory=list)
    beside_rate: list[float] = field(default_factory=list)
    kernel_ms: float = 0.0
    # ranges of requests, one for each block in which the host never paused
    calm: list[tuple[int, int]] = field(default_factory=list)
    # number of requests that began late because the host paused: without and with best-effort work
    late: list[int] = field(default_factory=lambda: [0, 0])

    def add(
        self, alone: dict[str, Any], native_rate: float, beside: dict[str, Any], rate: float, block_s: float
    ) -> None:
        """Add the results of a block of LS alone and of a block of LS together with BE, which have the same arrivals.
        `native_rate` and `rate`: units of BE work per second without LS and together with it.
        """
        begin = len(self.alone_ms)
        self.alone_ms += alone["latency_ms"]
        self.beside_ms += beside["latency_ms"]
        self.alone_active.append(alone["active_s"] / block_s)
        self.alone_rate.append(native_rate)
        self.beside_rate.append(rate)
        late = [sum(ms > LATE_MS for ms in side["late_ms"]) for side in (alone, beside)]
        self.late = [count + more for count, more in zip(self.late, late, strict=True)]
        if not any(late):
            self.calm.append((begin, len(self.alone_ms)))


def quantile(values: Sequence[float], part: float) -> float:
    """Return the quantile of the values at `part` (0 to 1), interpolated linearly. NaN if there are none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def rate_between(block: dict[str, Any], begin_ns: int, end_ns: int) -> float:
    """Return the units of best-effort (BE) work per second inside [begin, end], interpolated linearly between marks."""
    return between(block, begin_ns, end_ns, COUNT) / ((end_ns - begin_ns) / 1e9)


def summary(series: Series) -> dict[str, Any]:
    """Return the figures of one scheme and BE load, as described in docs/commands.md."""
    slo_ms = quantile(series.alone_ms, SLO_QUANTILE)
    p99, alone_p99 = quantile(series.beside_ms, 0.99), quantile(series.alone_ms, 0.99)
    left = 1.0 - median(series.alone_active)
    be_over_alone = median(series.beside_rate) / median(series.alone_rate)
    in_time, in_time_ci95 = attainment(series.beside_ms, slo_ms)
    be_ratios = sorted(b / a for a, b in zip(series.alone_rate, series.beside_rate, strict=True))
    calm = [
        [ms for begin, end in series.calm for ms in side[begin:end]] for side in (series.alone_ms, series.beside_ms)
    ]
    return {
        "ls_p50_ms": quantile(series.beside_ms, 0.5),
        "ls_p99_ms": p99,
        "ls_alone_p50_ms": quantile(series.alone_ms, 0.5),
        "ls_alone_p99_ms": alone_p99,
        "ls_p99_over_alone": p99 / alone_p99,
        "ls_p99_over_alone_ci95": p99_interval(series.alone_ms, series.beside_ms),
        "ls_p50_over_alone": quantile(series.beside_ms, 0.5) / quantile(series.alone_ms, 0.5),
        "ls_added_p99_ms": p99 - alone_p99,
        "be_over_alone": be_over_alone,
        "be_over_alone_range": [be_ratios[0], be_ratios[-1]],
        "be_over_left": be_over_alone / left,
        "ls_active": 1.0 - left,
        "slo_ms": slo_ms,
        "slo_attainment": in_time,
        "slo_attainment_ci95": in_time_ci95,
        "be_kernel_ms": series.kernel_ms,
        "requests": len(series.beside_ms),
        "late_requests": series.late,
        "calm_requests": len(calm[1]),
        "ls_p99_over_alone_calm": quantile(calm[1], 0.99) / quantile(calm[0], 0.99) if calm[1] else None,
    }


def said(scheme: str, kind: str, row: dict[str, Any]) -> str:
    """Return one line of text that reports the figures of one scheme and load as progress."""
    return (
        f"{scheme} beside {kind}: LS p99 {row['ls_p99_over_alone']:.3f} times that of LS alone, BE gets "
        f"{row['be_over_left']:.1%} of the time that LS leaves"
    )


def p99_interval(alone_ms: Sequence[float], beside_ms: Sequence[float], seed: int = 0) -> list[float]:
    """Return the 95 % confidence interval of p99 beside best-effort work / p99 alone. The bootstrap resamples requests,
    each with its latency alone and its latency beside the work.
    """
    count = min(len(alone_ms), len(beside_ms))
    draw = random.Random(seed)
    ratios = []
    for _ in range(RESAMPLES):
        picked = [draw.randrange(count) for _ in range(count)]
        ratios.append(quantile([beside_ms[i] for i in picked], 0.99) / quantile([alone_ms[i] for i in picked], 0.99))
    return [quantile(ratios, 0.025), quantile(ratios, 0.975)]


@dataclass
class Plan:
    """Settings of a co-location measurement. Lengths are in seconds."""

    ls: LsLoad
    kinds: list[str]
    schemes: list[Scheme]
    rounds: int = 5
    block_s: float = 2.0
    copy: bool = False
    changes: dict[str, Any] = field(default_factory=dict)  # co-location settings that replace those of the scheme
    ls_class: str = "unknown"  # the work class that the latency-sensitive service reports to the agent
    be_kernels: str = ""  # compiled profile of the BE loads' kernels; empty: use the facts that `known_work` returns
    progress: Callable[[str], None] = lambda text: None


def expected_s(plan: Plan) -> float:
    """Return the estimated length of a measurement. A round has LS alone, half a block of BE alone, and a block of each
    scheme.
    """
    rounds = 0.0
    for together in (True, False):
        schemes = sum(scheme.together is together for scheme in plan.schemes)
        rounds += ((schemes + 1.5) * plan.block_s + (schemes + 2) * BETWEEN_S) if schemes else 0.0
    return plan.rounds * len(plan.kinds) * rounds


def measure(gpus: str, plan: Plan, result: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measure every scheme with every BE load. Schemes whose processes run concurrently share one agent and its
    programs.

    `result` gets each row when it is measured, so that rows are kept if a later measurement fails.
    """
    result = {} if result is None else result
    result["schemes"] = {scheme.name: {} for scheme in plan.schemes}
    plan.progress(f"about {expected_s(plan) / 60:.1f} min: {plan.rounds} rounds beside {', '.join(plan.kinds)}")
    for together in (True, False):
        schemes = [scheme for scheme in plan.schemes if scheme.together is together]
        if not schemes:
            continue
        with Rig(gpus, together=together, pinned=True) as rig:
            _measure_group(rig, plan, schemes, result)
    return result


@dataclass
class _Cast:
    """The programs that run under one agent: the LS client and the BE tenants of each scheme, and a BE program without
    the shim.
    """

    ls_alone: Program
    native: Program
    ls: dict[str, Program]
    be: dict[tuple[str, bool], Program]  # (scheme, whether the load's kernels fill the GPU) -> best-effort program


def known_work(simulated: bool, fills: bool) -> dict[str, Any]:
    """Return facts about a BE program's kernels that scheme orion gets if there is no profile. On the software GPU: the
    work classes that the simulator uses. On a real GPU: the number of SMs that kernels of mmN, addN and copyN fill.
    """
    if not simulated:
        return {"work_sms": FILLS_SMS if fills else 0}
    sms = FILLS_SMS if fills else read_table().sm_count
    classes = {"timed_compute": WorkClass.COMPUTE, "timed_memory": WorkClass.MEMORY}
    return {"kernels": compiled([KernelRow(name, sms=sms, work_class=kind) for name, kind in classes.items()])}


def _cast(rig: Rig, plan: Plan, schemes: Sequence[Scheme]) -> _Cast:
    """Start the latency-sensitive (LS) clients and the best-effort (BE) programs that the schemes need.

    The fraction of the SMs is fixed when a process starts, and for a BE program also its priority and what scheme orion
    knows about its kernels. So schemes that agree in these share a program.
    """
    alone = rig.ls("ls")
    native = rig.be_native()
    ls_by_sms: dict[float, Program] = {1.0: alone}
    be_by_kind: dict[tuple[float, bool, bool | None], Program] = {}
    be: dict[tuple[str, bool], Program] = {}
    for scheme in schemes:
        if scheme.ls_sms not in ls_by_sms:
            ls_by_sms[scheme.ls_sms] = rig.ls(f"ls-{scheme.name}", sms=scheme.ls_sms)
        for fills in (True, False):
            # only orion needs to know the SMs of kernels; it would not hold back a kernel about which it knows nothing
            asks = scheme.rule is RuleKind.ORION
            key = (scheme.be_sms, scheme.be_below, fills if asks else None)
            if key not in be_by_kind:
                # the scheme must be active before the programs start, because it sets the priority with which
                # best-effort programs start
                rig.scheme(scheme.name)
                name = f"be-{scheme.name}{'-wide' if asks and fills else ''}"
                simulated = rig.bench.device.simulated
                known = {"kernels": plan.be_kernels} if plan.be_kernels else known_work(simulated, fills)
                told: dict[str, Any] = known if asks else {}
                be_by_kind[key] = rig.be(name, sms=scheme.be_sms, below=scheme.be_below, **told)
            be[(scheme.name, fills)] = be_by_kind[key]
    for program in (*ls_by_sms.values(), *be_by_kind.values(), native):
        program.wait_ready()
    for program in ls_by_sms.values():
        rig.join(program, plan.ls_class)
    return _Cast(
        alone,
        native,
        {scheme.name: ls_by_sms[scheme.ls_sms] for scheme in schemes},
        be,
    )


def _measure_group(rig: Rig, plan: Plan, schemes: Sequence[Scheme], result: dict[str, Any]) -> None:
    cast = _cast(rig, plan, schemes)
    result["gpu"] = cast.native.gpu
    result["backend"] = rig.bench.backend
    for kind in plan.kinds:
        rig.scheme("mps-plus")  # under this scheme best-effort work is not held back while loads are set up
        kernel_ms = cast.native.ask(f"load {kind}", 60.0)["unit_ms"]
        fills = not kind.startswith("train-")
        for program in dict.fromkeys(cast.be[(scheme.name, fills)] for scheme in schemes):
            program.ask(f"load {kind}", 60.0)
        series = {scheme.name: Series(kernel_ms=kernel_ms) for scheme in schemes}
        for number in range(plan.rounds):
            _round(rig, plan, cast, schemes, series, number, fills)
        for scheme in schemes:
            row = summary(series[scheme.name])
            result["schemes"][scheme.name][kind] = row
            plan.progress(said(scheme.name, kind, row))


def _round(
    rig: Rig, plan: Plan, cast: _Cast, schemes: Sequence[Scheme], series: dict[str, Series], number: int, fills: bool
) -> None:
    """Measure LS alone, BE alone, then every scheme, with the same arrivals. Each round starts with another scheme."""
    seed = 1000 + number
    alone = ls_block(cast.ls_alone, plan, seed, raises=False)
    native_rate = native_block(cast.native, plan.block_s / 2)
    turn = number % len(schemes)
    for scheme in (*schemes[turn:], *schemes[:turn]):
        rig.scheme(scheme.name, **plan.changes)
        found, rate = pair_block(cast.ls[scheme.name], cast.be[(scheme.name, fills)], plan, seed)
        series[scheme.name].add(alone, native_rate, found, rate, plan.block_s)


def native_block(native: Program, seconds: float) -> float:
    """Return the rate of BE work alone. As in `pair_block`, BE runs for LEAD_S before and after the interval that
    counts: a GPU at its power limit is faster at the beginning, and at the end of a block all units in flight are
    counted at once.
    """
    block = native.ask(f"run {seconds + 2 * LEAD_S}", seconds + 60)
    begin_ns = block["begin_ns"] + round(LEAD_S * 1e9)
    return rate_between(block, begin_ns, begin_ns + round(seconds * 1e9))


def ls_block(ls: Program, plan: Plan, seed: int, *, raises: bool) -> dict[str, Any]:
    """Run one block of LS requests. `raises`: whether the LS client reports its activity to the agent."""
    ls.tell(f"run {plan.block_s} {plan.ls.rate_rps} {seed} {int(raises)} {int(plan.copy)}")
    return ls.answer(plan.block_s * 20 + 30)


def pair_block(ls: Program, be: Program, plan: Plan, seed: int) -> tuple[dict[str, Any], float]:
    """Run one block of LS requests together with BE work. Returns the LS client's measurements, and the rate of BE work
    during the block.
    """
    be.tell(f"run {plan.block_s + 2 * LEAD_S}")
    time.sleep(LEAD_S)
    found = ls_block(ls, plan, seed, raises=True)
    block = be.answer(plan.block_s * 20 + 60)
    return found, rate_between(block, found["begin_ns"], min(found["end_ns"], block["end_ns"]))
