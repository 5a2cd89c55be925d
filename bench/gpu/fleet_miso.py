"""Runs MISO on one GPU, for bench/gpu/fleet.py: the whole fleet and its agent, with MPS percentages as slices."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stand_ins import without_compiler

from cotenant.bench.harness import Bench

KINDS = {"first": "text", "second": "conv", "third": "small"}
ARRIVAL_S = {"first": 0.0, "second": 11.0, "third": 12.0}  # the third waits until the first two have been measured
LIMIT_S = 210.0


def miso_live(folder: Path, gpus: str, soft: bool, references: dict[str, list[Any]], program: str) -> dict[str, Any]:
    """Run three jobs, which are measured and get slices. Then one is cancelled, and the others get its part of the GPU.
    `references`: curves of undisturbed runs by name. Returns the phases with every job's pace in each."""
    without_compiler()
    from cotenant.fleet.controller.miso import MisoPlanner
    from cotenant.fleet.jobs import JobSpec
    from cotenant.fleet.session import Fleet, FleetOptions

    planner = MisoPlanner(mechanism="time" if soft else "mps", measure_s=4.0, restart_s=8.0)
    source = str(Path(__file__).resolve().parents[2] / "src")
    phases: list[dict[str, Any]] = []
    speeds: dict[str, Any] = {}
    with Bench(gpus, {}) as bench:
        if soft:
            os.environ["COTENANT_SOFTGPU_STATE"] = bench.environment["COTENANT_SOFTGPU_STATE"]
        options = FleetOptions(
            folder=folder / "fleet", gpu="agent", agents=(str(bench.folder),), lease_s=1.0, planner=planner,
            autostart=False, grace_s=20.0,
        )  # fmt: skip
        with Fleet(options) as fleet:
            ids = {}
            for name, kind in KINDS.items():
                command = (sys.executable, program, "small" if soft else kind, "1000000", str(folder / name))
                spec = JobSpec(name, command, env={"PYTHONPATH": source, "PYTHONUNBUFFERED": "1"})
                ids[name] = fleet.submit(spec, ARRIVAL_S[name])
            fleet.begin()
            began = time.monotonic()
            watch(fleet, planner, phases, lambda: steady(phases, 3, 14.0), began)
            speeds = {job: [round(float(x), 4) for x in row] for job, row in planner._speeds.items()}
            fleet.cancel(ids["first"])
            watch(fleet, planner, phases, lambda: steady(phases, 2, 20.0), began)
            queue = [{key: row[key] for key in ("name", "state", "attempts", "failures", "error", "exit_code")}
                     for row in fleet.queue()]  # fmt: skip
            for name in ("second", "third"):
                fleet.cancel(ids[name])
            fleet.wait(30.0)
        geometry = next(iter(planner._gpus.values())).geo
    curves = {name: lines(folder / name) for name in KINDS}
    add_paces(phases, curves, references)
    return {
        "phases": phases, "predicted_speed_by_kind": speeds, "kinds": list(geometry.kinds), "queue": queue,
        "measurements": planner.measurements, "repartitions": planner.repartitions,
        "curves": {name: whole(curve, references[name]) for name, curve in curves.items()},
    }  # fmt: skip


def watch(fleet: Any, planner: Any, phases: list[dict[str, Any]], done: Callable[[], bool], began: float) -> None:
    """Record every change of the jobs' intended slices until `done`."""
    while time.monotonic() - began < LIMIT_S and not done():
        time.sleep(0.25)
        gpu = next(iter(planner._gpus.values()), None)
        wishes = (
            {}
            if gpu is None
            else {
                job: {"limit": w.limit, "slice": w.slice, "measuring": w.measuring} for job, w in gpu.wishes().items()
            }
        )
        if not phases or phases[-1]["jobs"] != wishes:
            phases.append({"since": time.monotonic(), "jobs": wishes})


def steady(phases: list[dict[str, Any]], jobs: int, seconds: float) -> bool:
    """Whether that many jobs have had their slices for that long."""
    last = phases[-1] if phases else {"jobs": {}}
    sliced = [job for job, wish in last["jobs"].items() if wish["slice"] is not None]
    return len(sliced) == jobs == len(last["jobs"]) and time.monotonic() - last["since"] > seconds


def lines(path: Path) -> list[Any]:
    import json

    text = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in text if line.endswith("]")]


def add_paces(phases: list[dict[str, Any]], curves: dict[str, list[Any]], references: dict[str, list[Any]]) -> None:
    """Add to every phase each job's median seconds per step, without the first second, and its speed relative to
    running alone."""
    ends = [phase["since"] for phase in phases[1:]] + [float("inf")]
    zero = phases[0]["since"] if phases else 0.0
    for phase, end in zip(phases, ends, strict=True):
        for name, wish in phase["jobs"].items():
            curve = next((curves[known] for known in curves if name.startswith(known)), [])
            inside = [line for line in curve if phase["since"] + 1.0 < line[2] - line[3] and line[2] < end]
            first = inside[0][2] if inside else 0.0
            taken = [line[3] for line in inside if line[2] > first + 1.0]
            alone = pace(references[next(known for known in references if name.startswith(known))])
            if len(taken) > 5:
                wish["step_s"] = statistics.median(taken)
                wish["speed_of_alone"] = alone / wish["step_s"]
        phase["since"] = round(phase["since"] - zero, 2)


def pace(curve: list[Any]) -> float:
    """Median seconds per step, without the first steps."""
    return statistics.median(line[3] for line in curve[20:])


def whole(curve: list[Any], reference: list[Any]) -> dict[str, Any]:
    """Whether the curve has every step once, with the losses of an undisturbed run."""
    steps = [line[0] for line in curve]
    known = {line[0]: line[1] for line in reference}
    alike = all(known.get(line[0], line[1]) == line[1] for line in curve)
    gaps = [later for earlier, later in itertools.pairwise(steps) if later != earlier + 1]
    return {"steps": len(steps), "unbroken": not gaps, "gaps": gaps[:5], "bit_identical_as_far_as_known": alike,
            "known": len(known)}  # fmt: skip
