"""What a job must pass to be taken in, and what becomes of files it named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotenant.core.errors import InputError, WorkError
from cotenant.fleet.controller.intake import admit
from cotenant.fleet.controller.planners import JobPlanner, View
from cotenant.fleet.controller.profiles import ProfileBook
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import pretend_nodes
from cotenant.fleet.state import Job
from cotenant.policy.jobs.choice import JobPolicy

NODES = pretend_nodes(1, 2, "A100-40GB", 40 << 30, 6.0, 125 * 10**9)
PROFILE = {"cpus_per_gpu": [1, 2, 4], "memory_gb_per_gpu": [10],
           "models": {"mine": {"iteration_s": 0.5, "throughput": [[0.5], [1.0], [2.0]]}}}  # fmt: skip


def planner() -> JobPlanner:
    return JobPlanner(JobPolicy(sticky=True), ProfileBook())


def admitted(*specs: JobSpec, folder: Path, beside: tuple[Job, ...] = ()) -> list[JobSpec]:
    return admit(specs, beside, planner(), NODES, folder, 0.0)


def test_two_jobs_never_have_one_folder(tmp_path: Path) -> None:
    def spec(name: str, job_dir: Path | None) -> JobSpec:
        return JobSpec(name, ("true",), job_dir=None if job_dir is None else str(job_dir))

    (tmp_path / "other").symlink_to(tmp_path / "mine")
    mine = Job(0, "first", spec("first", tmp_path / "mine"), 0.0)
    with pytest.raises(InputError, match="is the folder of job first, which has not ended") as caught:
        admitted(spec("second", tmp_path / "other"), folder=tmp_path, beside=(mine,))
    assert caught.value.field == "job_dir"
    with pytest.raises(InputError, match="is the folder of another of these jobs"):
        admitted(spec("a", tmp_path / "new"), spec("b", tmp_path / "new"), folder=tmp_path)
    taken = admitted(spec("a", tmp_path / "new"), spec("b", None), spec("c", None), folder=tmp_path, beside=(mine,))
    assert len(taken) == 3


def test_a_profile_file_may_be_removed_or_rewritten_once_its_job_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(PROFILE))
    first, second = admitted(*[JobSpec("a", ("true",), profile=str(file))] * 2, folder=tmp_path)
    assert first == second
    file.write_text(json.dumps(PROFILE | {"cpus_per_gpu": [1, 2, 3]}))
    (changed,) = admitted(JobSpec("a", ("true",), profile=str(file)), folder=tmp_path)
    assert changed.profile != first.profile
    file.unlink()
    plan = planner().plan(View(0.0, NODES, (Job(0, "a", first, 0.0, arrived=True),)))
    assert plan.assign["a"].cpus == 4.0  # as the file was when the job was submitted
    with pytest.raises(InputError, match="cannot read it"):
        admitted(JobSpec("a", ("true",), profile=str(file)), folder=tmp_path)


def test_a_copy_that_cannot_be_written_refuses_the_job(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(PROFILE))
    (tmp_path / "profiles").touch()
    with pytest.raises(WorkError, match="cannot be written"):
        admitted(JobSpec("a", ("true",), profile=str(file)), folder=tmp_path)


def test_a_profile_that_is_gone_holds_up_nobody(tmp_path: Path) -> None:
    lost = JobSpec("lost", ("true",), profile=str(tmp_path / "gone.json"))
    renamed = JobSpec("renamed", ("true",), model="no-longer-there")
    mine = planner()
    assert mine.fault() == ""
    jobs = tuple(Job(row, spec.name, spec, 0.0, arrived=True) for row, spec in enumerate((lost, renamed)))
    plan = mine.plan(View(0.0, NODES, jobs))
    assert sorted(plan.assign) == ["lost", "renamed"]
    assert plan.assign["lost"].cpus == 3.0  # the proportional share, as for a job without a profile
    assert "gone.json: cannot be read" in mine.fault()
    assert "'no-longer-there' has no profile" in mine.fault()
