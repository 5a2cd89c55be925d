"""Co-location of latency-sensitive (LS) and best-effort (BE) work on a real GPU, with agent and shim; writes JSON.

    PYTHONPATH=src python bench/gpu/colocation.py OUT.json [STEP,STEP...]

CUDA_VISIBLE_DEVICES names the GPU's UUID (or `soft`). Steps are independent; each has a time limit of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from colocation_faults import GPU, TOGETHER, failure, faults
from colocation_held import HELD_STEPS
from colocation_host import HOST_STEPS
from colocation_orion import ORION_STEPS
from colocation_parts import green, kernels, l2_window, pages
from colocation_tail import TAIL_STEPS, spread

from cotenant.agent.gate.client import Floor, join_floor
from cotenant.bench.colocation import (
    LsLoad,
    Plan,
    Series,
    ls_block,
    measure,
    native_block,
    pair_block,
    parse_ls,
    parse_schemes,
    quantile,
    rate_between,
    summary,
)
from cotenant.bench.colocation_budget import Budget
from cotenant.bench.colocation_budget import measure as budget_of
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program

LS = "resnet50:4:100"
SHORT = ["mm4096", "mm2048", "add256", "train-resnet50:96", "train-transformer:48"]
LONG = ["mm8192", "copy2048"]
MIB = 1 << 20
REQUESTS = int(os.environ.get("LOAD_REQUESTS", 1600))  # enough to distinguish an attainment of 99 % from 99.5 %
# results; steps fill it as they get figures, so that a step that is interrupted keeps what it has
Found = dict[str, Any]


def plan(kinds: list[str], schemes: str, **more: Any) -> Plan:
    return Plan(parse_ls(LS), kinds, parse_schemes(schemes), progress=lambda text: print(text, flush=True), **more)


def floor_reaction(found: Found) -> None:
    """Measure the reaction time of the LS gate. After the LS-activity flag is set: time to the last BE launch that
    still passes (host-gated), or to the end of the last BE kernel (device-gated). After it is cleared: time to the next
    launch or kernel."""
    with Rig(GPU, together=TOGETHER) as rig:
        be = rig.be(below=True).wait_ready()
        floor = join_floor(rig.bench.folder, rig.uuid)
        for kind in ("mm2048", "mm4096", "add64"):
            rig.scheme("mps-plus")
            one_ms = be.ask(f"load {kind}", 60)["unit_ms"]
            for way, order, changes in (("host", "times", {"run_ahead": "never"}), ("device", "ends", {})):
                rig.scheme("tidal", **changes)
                found[f"{kind}, {way}"] = reaction(floor, be, order) | {"kernel_us": one_ms * 1e3}
        cost = []
        for _ in range(2000):
            began = time.perf_counter_ns()
            floor.raise_()
            floor.lower()
            cost.append((time.perf_counter_ns() - began) / 1e3)
        found |= {"raise_and_lower_us": spread(cost), "warnings": rig.tenants()["be"]["warnings"]}
        floor.close()


def reaction(floor: Floor, be: Program, order: str) -> dict[str, Any]:
    """Set the LS-activity flag for 3 ms a hundred times, and compare with the times of BE's launches or kernels."""
    be.tell(f"{order} 3")
    time.sleep(0.3)
    raised, lowered = [], []
    for _ in range(100):
        time.sleep(random.uniform(0.006, 0.012))
        raised.append(time.monotonic_ns())
        floor.raise_()
        time.sleep(0.003)
        lowered.append(time.monotonic_ns())
        floor.lower()
    times = be.answer(60)["times_ns"]
    react, back = [], []
    for up, down in zip(raised, lowered, strict=True):
        went = [at for at in times if up <= at < down]
        react.append((max(went) - up) / 1e3 if went else 0.0)
        after = next((at for at in times if at >= down), None)
        if after is not None:
            back.append((after - down) / 1e3)
    return {"reaction_us": spread(react), "resume_us": spread(back), "count": len(times)}


def be_bound(found: Found) -> None:
    """For several in-flight budgets: the rate of BE alone under the gate relative to native, and the latencies of LS
    with that BE work."""
    with Rig(GPU, together=TOGETHER) as rig:
        ls, be, native = rig.ls(), rig.be(below=True), rig.be_native()
        for program in (ls, be, native):
            program.wait_ready()
        rig.join(ls)
        mine = plan([], "tidal", block_s=1.2)
        alone = ls_block(ls, mine, 1, raises=False)
        for kind in ("mm2048", "mm4096", "mm8192", "add256", "add64"):
            rig.scheme("mps-plus")
            one_ms = native.ask(f"load {kind}", 60)["unit_ms"]
            be.ask(f"load {kind}", 60)
            rows: list[dict[str, Any]] = []
            found[kind] = {"kernel_ms": one_ms, "rows": rows}
            for in_flight_us in (0, 50, 100, 200, 400):
                if in_flight_us:
                    rig.scheme("tidal", in_flight_us=in_flight_us)
                rate = block_rate(be, 0.5)
                seen, beside = pair_block(ls, be, mine, 1)
                rows.append(
                    {
                        "in_flight_us": in_flight_us,
                        "be_alone_over_native": rate / block_rate(native, 0.4),
                        "be_beside": beside,
                        "ls_p50_over_alone": ratio(seen, alone, 0.5),
                        "ls_p99_over_alone": ratio(seen, alone, 0.99),
                    }
                )


def host_bound(found: Found) -> None:
    """For several in-flight budgets: the rates of host-bound BE programs, which show the gain from launching ahead."""
    with Rig(GPU, together=TOGETHER) as rig:
        ls, be, native = rig.ls(), rig.be(below=True), rig.be_native()
        for program in (ls, be, native):
            program.wait_ready()
        rig.join(ls)
        mine = plan([], "tidal", block_s=1.2)
        for kind in ("train-resnet50", "train-transformer"):
            rig.scheme("mps-plus")
            native.ask(f"load {kind}", 60)
            be.ask(f"load {kind}", 60)
            rows: list[dict[str, Any]] = []
            found[kind] = rows
            alone = ls_block(ls, mine, 1, raises=False)
            for in_flight_us in (0, 100, 200, 400, 1000):
                if in_flight_us:
                    rig.scheme("tidal", in_flight_us=in_flight_us)
                rate, own = block_rate(be, 0.6), block_rate(native, 0.6)
                seen, beside = pair_block(ls, be, mine, 1)
                rows.append(
                    {
                        "in_flight_us": in_flight_us,
                        "be_alone_over_native": rate / own,
                        "be_beside_over_native": beside / own,
                        "ls_p50_over_alone": ratio(seen, alone, 0.5),
                        "ls_p99_over_alone": ratio(seen, alone, 0.99),
                        "tenant": {k: v for k, v in rig.tenants()["be"].items() if k.endswith("_s") or k == "launches"},
                    }
                )


def block_rate(program: Program, seconds: float) -> float:
    block = program.ask(f"run {seconds}", seconds + 60)
    return rate_between(block, block["begin_ns"], block["end_ns"])


def ratio(seen: dict[str, Any], alone: dict[str, Any], part: float) -> float:
    return quantile(seen["latency_ms"], part) / quantile(alone["latency_ms"], part)


def schemes(found: Found) -> None:
    """Measure all schemes with short and long BE kernels."""
    kinds = [kind for kind in (*SHORT, *LONG) if kind != "mm2048"]
    measure(GPU, plan(kinds, "all", rounds=2, block_s=0.8), found)


def tidal(found: Found) -> None:
    """Measure the scheme tidal with enough requests for an attainment of 99 %. The step `training` has training
    loads."""
    measure(GPU, plan(["mm4096", "mm2048", "add256"], "tidal", rounds=8, block_s=2.0), found)


def tidal_long(found: Found) -> None:
    """Measure the scheme tidal with long BE kernels: a request may have to wait for one of them."""
    measure(GPU, plan(LONG, "tidal", rounds=4, block_s=2.0), found)


def loads(found: Found) -> None:
    """Measure LS at 30, 50 and 70 % of its capacity."""
    with Rig(GPU, together=TOGETHER) as rig:
        ls, be, native = rig.ls(), rig.be(below=True), rig.be_native()
        for program in (ls, be, native):
            program.wait_ready()
        rig.join(ls)
        service_ms = quantile(ls_block(ls, plan([], "tidal", block_s=1.0), 1, raises=False)["service_ms"], 0.5)
        found["service_ms"] = service_ms
        for kind in ("mm4096", "mm2048"):
            rig.scheme("mps-plus")
            native.ask(f"load {kind}", 60)
            be.ask(f"load {kind}", 60)
            rig.scheme("tidal")
            for load in (0.3, 0.5, 0.7):
                rate_rps = load / service_ms * 1e3
                mine = plan([], "tidal", block_s=REQUESTS / 3 / rate_rps)
                mine.ls = LsLoad("resnet50", 4, rate_rps)
                found[f"{kind} at {load:.0%}"] = rounds(ls, be, native, mine, 3)


def rounds(ls: Program, be: Program, native: Program, mine: Plan, count: int) -> dict[str, Any]:
    """Alternate blocks of LS alone and beside BE."""
    series = Series()
    for seed in range(count):
        alone = ls_block(ls, mine, seed, raises=False)
        native_rate = native_block(native, 0.3)
        seen, rate = pair_block(ls, be, mine, seed)
        series.add(alone, native_rate, seen, rate, mine.block_s)
    return summary(series)


def two_ls(found: Found) -> None:
    """Measure two LS services of 60 requests a second each together with BE. The baseline is both services without
    BE."""
    with Rig(GPU, together=TOGETHER) as rig:
        pair = [rig.ls("ls1"), rig.ls("ls2")]
        be = rig.be(below=True)
        for program in (*pair, be):
            program.wait_ready()
        for program in pair:
            rig.join(program)
        for kind in ("mm2048", "add256"):
            rig.scheme("mps-plus")
            be.ask(f"load {kind}", 60)
            rig.scheme("tidal")
            seen: dict[bool, list[list[float]]] = {False: [[], []], True: [[], []]}
            for seed in range(5):
                for beside in (False, True):
                    if beside:
                        be.tell("run 2.5")
                        time.sleep(0.15)
                    for index, program in enumerate(pair):
                        program.tell(f"run 2.0 60 {seed * 10 + index} {int(beside)} 0")
                    for index, program in enumerate(pair):
                        seen[beside][index] += program.answer(60)["latency_ms"]
                    if beside:
                        be.answer(60)
            found[kind] = [
                {
                    "alone_p99_ms": quantile(seen[False][i], 0.99),
                    "p99_over_alone": quantile(seen[True][i], 0.99) / quantile(seen[False][i], 0.99),
                    "p50_over_alone": quantile(seen[True][i], 0.5) / quantile(seen[False][i], 0.5),
                }
                for i in range(2)
            ]


def inputs_copied(found: Found) -> None:
    """Measure a service whose requests each copy their input from pinned host memory."""
    measure(GPU, plan(["mm2048", "add256"], "tidal", rounds=3, block_s=2.0, copy=True), found)


def without_mps(found: Found) -> None:
    """Measure the scheme tidal without MPS, while the driver time-slices between the processes."""
    with Rig(GPU, together=False) as rig:
        ls, be, native = rig.ls(), rig.be(), rig.be_native()
        for program in (ls, be, native):
            program.wait_ready()
        rig.join(ls)
        for kind in ("mm2048", "add256", "mm8192", "train-transformer"):
            rig.scheme("mps-plus")
            native.ask(f"load {kind}", 60)
            be.ask(f"load {kind}", 60)
            for name in ("tidal", "mps-plus"):
                rig.scheme(name)
                found[f"{kind} {name}"] = rounds(ls, be, native, plan([], "tidal", block_s=0.8), 2)


def bandwidth_curve(found: Found) -> None:
    """Measure LS with memory-bound BE work, by the SMs of BE and the fraction of time with overlap; then choose the
    budget from these measurements."""
    budget_of(GPU, Budget(parse_ls("resnet50:4:300")), found)


STEPS: dict[str, tuple[Callable[[Found], None], int]] = {
    "floor_reaction": (floor_reaction, 60),
    "be_bound": (be_bound, 75),
    "host_bound": (host_bound, 70),
    "schemes": (schemes, 230),
    "loads": (loads, 110),
    "two_ls": (two_ls, 75),
    "inputs_copied": (inputs_copied, 75),
    "without_mps": (without_mps, 75),
    "faults": (faults, 90),
    "bandwidth_curve": (bandwidth_curve, 50),
    "tidal": (tidal, 190),
    "tidal_long": (tidal_long, 80),
    "green": (green, 40),
    "l2_window": (l2_window, 80),
    "pages": (pages, 30),
    "kernels": (kernels, 110),
    **TAIL_STEPS,
    **HELD_STEPS,
    **HOST_STEPS,
    **ORION_STEPS,
}


class TooLongError(Exception):
    """Raised if a step has exceeded its time limit."""


def _too_long(*_: object) -> None:
    raise TooLongError("the step has exceeded its time limit")


def main() -> None:
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(STEPS)
    if len(sys.argv) < 2 or not set(chosen) <= set(STEPS):
        sys.exit(f"usage: {sys.argv[0]} OUT.json [STEP,STEP...]; steps: {', '.join(STEPS)}")
    out = Path(sys.argv[1])
    found: dict[str, Any] = {}
    with suppress(OSError):
        query = ["nvidia-smi", f"--id={GPU}", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["card"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    signal.signal(signal.SIGALRM, _too_long)
    for name in chosen:
        step, limit_s = STEPS[name]
        began = time.monotonic()
        signal.alarm(limit_s)
        found[name] = {}
        try:
            step(found[name])
        except Exception as error:  # a step that fails must not prevent the others
            found[name] |= failure(error)
        finally:
            signal.alarm(0)
        found[name]["took_s"] = round(time.monotonic() - began, 1)
        print(name, found[name]["took_s"], json.dumps(found[name])[:2500], flush=True)
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
