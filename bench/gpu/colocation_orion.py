"""Measures Orion with a profile of every kernel, as its authors use it, and tidal with device copies that are split."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from colocation_faults import GPU, TOGETHER
from colocation_held import MECHANISM

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.config.kernel_table import compiled, most_class
from cotenant.bench.colocation import (
    FILLS_SMS,
    Plan,
    Series,
    ls_block,
    native_block,
    pair_block,
    parse_ls,
    parse_schemes,
    quantile,
    summary,
)
from cotenant.bench.colocation_rig import Rig
from cotenant.bench.harness import Program
from cotenant.bench.kernel_profile import measure as profile_kernels
from cotenant.profiles.kernels.profile import CLASS_NAMES, KernelRow

Found = dict[str, Any]
SOURCE = sys.path[0]
BACKEND = "driver" if GPU == "soft" else "torch"
KINDS = ("add256", "mm2048", "train-transformer", "copy2048")
ROUNDS = int(os.environ.get("ORION_ROUNDS", 3))
# Orion's in-flight budget as a fraction of the duration of a request that runs alone (Strati et al., EuroSys 2024)
DUR_PART = 0.025
FEW = (
    "ls_p50_over_alone",
    "ls_p99_over_alone",
    "ls_p99_over_alone_ci95",
    "ls_added_p99_ms",
    "slo_attainment",
    "be_over_left",
    "requests",
)


def profiled(module: str, arguments: str, said: str) -> list[KernelRow]:
    """Kernels that one of the benchmark programs launches with these arguments and this input."""
    program = f"printf '{said}' | PYTHONPATH={SOURCE} exec {sys.executable} -m cotenant.bench.{module} {arguments}"
    rows = profile_kernels(GPU, ["sh", "-c", program], timeout_s=60)["kernels"]
    return [
        KernelRow(
            row["name"],
            (*row["grid"], *row["block"]),
            row["duration_ns"],
            row["sms"],
            CLASS_NAMES.index(row["work_class"]),
            row["count"],
        )
        for row in rows
    ]


def shares(rows: list[KernelRow]) -> dict[str, float]:
    """Fraction of time by work class."""
    total = sum(row.total_ns for row in rows)
    return {
        name: sum(row.total_ns for row in rows if row.work_class == kind) / total
        for kind, name in enumerate(CLASS_NAMES)
        if kind
    }


class Row:
    """One configuration: the LS client, the BE program, and the co-location settings."""

    def __init__(self, ls: Program, be: Program, scheme: str, **changes: Any) -> None:
        self.ls, self.be, self.scheme, self.changes = ls, be, scheme, changes


def orion(found: Found) -> None:
    """Measure the scheme orion with its defaults, with a profile, and with 2.5 % of a request in flight; and the scheme
    tidal."""
    loads = "".join(f"load {kind}\\nrun 0.2\\n" for kind in KINDS)
    be_rows = profiled("be_loads", BACKEND, loads)
    found["be"] = {"kernels": len(be_rows), "time": shares(be_rows)}
    shown = "compute"
    # on the software GPU, the service is a graph from its first launch on, so its kernels cannot be profiled
    if GPU != "soft":
        ls_rows = profiled("ls_client", f"{BACKEND} 4", "run 1 100 0 0 0\\n")
        shown = most_class(ls_rows)
        found["ls"] = {"kernels": len(ls_rows), "time": shares(ls_rows), "shows": shown}
    with Rig(GPU, together=TOGETHER, pinned=True) as rig:
        plain, classed, native = rig.ls("ls"), rig.ls("ls-classed"), rig.be_native()
        wide = rig.be("be-wide", below=True, work_sms=FILLS_SMS)
        known = rig.be("be-known", below=True, kernels=compiled(be_rows))
        free = rig.be("be", below=True)
        for program in (plain, classed, native, wide, known, free):
            program.wait_ready()
        rig.join(plain)
        rig.join(classed, shown)
        mine = Plan(parse_ls("resnet50:4:100"), [], parse_schemes("tidal"), block_s=0.8)
        service_ms = quantile(ls_block(classed, mine, 1, raises=False)["service_ms"], 0.5)
        found["dur_us"] = dur_us = max(1.0, DUR_PART * service_ms * 1e3)
        for kind in KINDS:
            rig.scheme("mps-plus")
            for program in (native, wide, known, free):
                program.ask(f"load {kind}", 60)
            rows = {
                "as the table": Row(plain, free if kind.startswith("train-") else wide, "orion"),
                "by profile": Row(classed, known, "orion"),
                "by profile, 2.5 %": Row(classed, known, "orion", in_flight_us=round(dur_us)),
                "copies pass": Row(plain, free, "orion"),  # Orion has no profiles of copies, so copies do not wait
                "tidal": Row(plain, free, "tidal"),
            }
            found[kind] = compare(rig, rows, native, mine)


def compare(rig: Rig, rows: dict[str, Row], native: Program, mine: Plan) -> dict[str, Any]:
    """Alternate blocks of all configurations; each round begins with another one. Each is compared with its own service
    alone."""
    series = {name: Series() for name in rows}
    names = list(rows)
    for number in range(ROUNDS):
        alone = {program: ls_block(program, mine, number, raises=False) for program in {r.ls for r in rows.values()}}
        native_rate = native_block(native, 0.3)
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            row = rows[name]
            rig.scheme(row.scheme, **row.changes)
            seen, rate = pair_block(row.ls, row.be, mine, number)
            series[name].add(alone[row.ls], native_rate, seen, rate, mine.block_s)
    results = {name: {key: summary(one)[key] for key in FEW} for name, one in series.items()}
    for name, result in results.items():
        print(name, {key: value for key, value in result.items() if key != "requests"}, flush=True)
    return results


def copies_cut(found: Found) -> None:
    """Measure the scheme tidal with device copies of 2 GiB: whole, and split as for a tenant with a copy weight."""
    for name, weight in (("whole", None), ("in pieces", 1.0)):
        with Rig(GPU, together=TOGETHER, pinned=True) as rig:
            ls, native = rig.ls(), rig.be_native()
            spec = TenantSpec("be", priority=-1, mechanism=MECHANISM, best_effort=True, copy_weight=weight)
            be = rig.tenant(spec, ["cotenant.bench.be_loads", rig.bench.backend])
            for program in (ls, native, be):
                program.wait_ready()
            rig.join(ls)
            rig.scheme("mps-plus")
            native.ask("load copy2048", 60)
            be.ask("load copy2048", 60)
            mine = Plan(parse_ls("resnet50:4:100"), [], parse_schemes("tidal"), block_s=0.8)
            found[name] = compare(rig, {"tidal": Row(ls, be, "tidal")}, native, mine)["tidal"]
            found[name]["copies"] = rig.tenants()["be"].get("copies")


ORION_STEPS: dict[str, tuple[Callable[[Found], None], int]] = {
    "orion": (orion, 290),
    "copies_cut": (copies_cut, 80),
}
