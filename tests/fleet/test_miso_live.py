"""MISO live on the software GPU: measure under MPS levels, predict, repartition as jobs come and go; curves whole."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import soft_train

from cotenant.bench.harness import Bench
from cotenant.core.events import Kind, Reason
from cotenant.core.metrics.summary import Analysis
from cotenant.fleet.controller.miso import MisoPlanner
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.session import Fleet, FleetOptions

PROGRAM = str(Path(soft_train.__file__))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim and the software GPU")
def test_three_jobs_are_measured_predicted_and_repartitioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of 5, 2 and 8 ms; the second job comes early, the third once the first two have their slices."""
    jobs = {"first": (5000, 1300, 0.0), "second": (2000, 1800, 1.0), "third": (8000, 450, 8.0)}
    planner = MisoPlanner(mechanism="time", measure_s=0.5, restart_s=0.3)
    layouts = set()
    with Bench("soft", {"quota": "50ms", "min_quota": "10ms", "max_quota": "50ms"}) as bench:
        monkeypatch.setenv("COTENANT_SOFTGPU_STATE", bench.environment["COTENANT_SOFTGPU_STATE"])
        options = FleetOptions(
            folder=tmp_path / "fleet", gpu="agent", agents=(str(bench.folder),), lease_s=0.5, planner=planner,
            autostart=False, grace_s=10.0,
        )  # fmt: skip
        with Fleet(options) as fleet:
            for name, (kernel_us, steps, arrival_s) in jobs.items():
                command = (sys.executable, PROGRAM, str(kernel_us), str(steps), str(tmp_path / name))
                fleet.submit(JobSpec(name, command), arrival_s)
            fleet.begin()
            for _ in range(600):
                if fleet.wait(0.1):
                    break
                gpu = next(iter(planner.gpus.values()))
                layouts.add(tuple(sorted(wish.slice[:2] for wish in gpu.wishes().values() if wish.slice)))
            states = {row["name"]: (row["state"], row["failures"]) for row in fleet.queue()}
            record = fleet.record()
    assert states == dict.fromkeys(jobs, ("finished", 0))
    for name, (_, steps, _) in jobs.items():
        curve = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert curve == soft_train.undisturbed(steps)
    assert planner.measurements == 2
    assert any(len(layout) == 2 for layout in layouts)  # layouts for two jobs, then for three
    assert any(len(layout) == 3 for layout in layouts)
    reasons = record.events.reason
    assert (reasons == Reason.MEASURED).sum() >= 6  # at least three levels for each of two jobs
    assert (reasons == Reason.NEW_LAYOUT).sum() >= 5  # layouts for two jobs, then for three
    assert (record.events.kind == Kind.FINISH).sum() == 3
    assert np.isfinite(Analysis(record).jobs.jct_s).all()
