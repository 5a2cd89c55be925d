"""Jobs as tenants of a GPU agent: shares of one GPU, and parking for a job that cannot save itself (software GPU)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.agent.ipc.client import ControlClient
from cotenant.core.errors import WorkError
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.session import Fleet, FleetOptions
from cotenant.policy.jobs.choice import JobPolicy

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim")
JOB = str(Path(__file__).with_name("gpu_job.py"))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An agent over one software GPU; its folder."""
    folder = Path(tempfile.mkdtemp(prefix="cot"))  # the path of a socket must be short
    for name, value in (("STATE", str(folder / "softgpu")), ("MEMORY", str(2 << 30)), ("COUNT", "1")):
        monkeypatch.setenv(f"COTENANT_SOFTGPU_{name}", value)
    settings = {"quota": "50ms", "min_quota": "20ms", "max_quota": "50ms", "context_reserve": "256MiB"}
    (folder / "agent.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "cotenant.agent", "--dir", str(folder), "--gpus", "soft"]
    with open(folder / "agent.log", "wb") as log:
        process = subprocess.Popen([*command, "--config", str(folder / "agent.json")], stdout=log, stderr=log)
    try:
        wait_for(lambda: _answers(folder), what="the agent")
        yield folder
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _answers(folder: Path) -> bool:
    with contextlib.suppress(WorkError):
        ControlClient(folder).close()
        return True
    return False


def _fleet(agent: Path, tmp_path: Path, ordering: str) -> Fleet:
    return Fleet(
        FleetOptions(
            folder=tmp_path / "fleet", gpu="agent", agents=(str(agent),), lease_s=1.0, keep_s=60.0, grace_s=5.0,
            policy=JobPolicy(ordering, "proportional", sticky=True),
        )
    )  # fmt: skip


def _job(name: str, seconds: float, **more: Any) -> JobSpec:
    # A tenth of a core for each job, so that only the GPU is scarce.
    return JobSpec(name, (sys.executable, JOB, str(seconds)), duration_s=seconds, cpus=0.1, workdir=os.getcwd(), **more)


def test_a_job_that_cannot_save_itself_is_parked_and_goes_on_where_it_was(agent: Path, tmp_path: Path) -> None:
    with _fleet(agent, tmp_path, "srtf") as fleet:
        fleet.submit(_job("long", 4.0))
        log = tmp_path / "fleet" / "jobs" / "long" / "log-0-0.txt"
        wait_for(lambda: log.exists() and "pid" in log.read_text(), what="the long job")
        # A job that the controller still considers to be starting would be stopped instead of parked.
        wait_for(lambda: fleet.job("long")["state"] == "running")
        fleet.submit(_job("short", 0.5))
        wait_for(lambda: fleet.job("long")["state"] == "parked", what="long is parked")
        with ControlClient(agent) as client:
            states = {t["name"]: t["state"] for t in client.call("list")["tenants"]}
        assert states["job-long.0"] == "parked"
        assert fleet.wait(240)
        long, short = fleet.job("long"), fleet.job("short")
        record = fleet.record()
    assert (long["state"], short["state"]) == ("finished", "finished")
    assert long["attempts"] == 1  # the same processes ran from the start to the end
    assert log.read_text().splitlines()[-1] == "intact"
    assert short["finished_s"] < long["finished_s"]
    kinds = [int(kind) for kind, job in zip(record.events.kind, record.events.job, strict=True) if job == 0]
    assert kinds == [0, 1, 5, 2, 6]  # the codes of arrive, start, preempt, resume, finish


def test_shares_of_one_gpu_are_tenants_with_that_share(agent: Path, tmp_path: Path) -> None:
    with _fleet(agent, tmp_path, "fifo") as fleet:
        ids = [fleet.submit(_job(f"half{i}", 1.5, gpus=0.5)) for i in range(3)]
        with ControlClient(agent) as client:

            def beside_each_other() -> list[dict[str, Any]]:
                rows: list[dict[str, Any]] = client.call("list")["tenants"]
                third = fleet.job("half2")["state"]
                two = sorted(t["name"] for t in rows) == ["job-half0.0", "job-half1.0"] and third == "waiting"
                return rows if two and {t["state"] for t in rows} == {"running"} else []

            tenants = wait_for(beside_each_other, what="two run and the third waits")
        assert {(t["request"], t["limit"], t["mechanism"]) for t in tenants} == {(0.5, 0.5, "time")}
        assert fleet.wait(240)
        assert [fleet.job(job)["state"] for job in ids] == ["finished"] * 3


def test_an_agent_that_is_away_costs_no_retry(agent: Path, tmp_path: Path) -> None:
    """The job is tried again until its agent answers."""
    with _fleet(agent, tmp_path, "fifo") as fleet:
        hidden = agent / "hidden.sock"
        (agent / "control.sock").rename(hidden)
        fleet.submit(_job("patient", 0.2))
        wait_for(lambda: fleet.job("patient")["attempts"] >= 2, what="a second try")
        wait_for(lambda: "no agent answers" in fleet.job("patient")["error"])
        hidden.rename(agent / "control.sock")
        assert fleet.wait(240)
        assert (fleet.job("patient")["state"], fleet.job("patient")["failures"]) == ("finished", 0)
