"""Parked jobs: their processes stay alive, and their memory is off the GPU while others run there."""

from __future__ import annotations

from pathlib import Path

from fleet_setting import Setting, work

from cotenant.core.events import Kind
from cotenant.policy.jobs.choice import JobPolicy


def test_a_job_that_cannot_save_itself_is_parked_where_its_node_can(tmp_path: Path) -> None:
    setting = Setting(tmp_path, policy=JobPolicy("srtf", "proportional", sticky=True), parks=True)
    setting.submit(work("long", 12.0, gpus=2.0, attached=False), work("other", 12.0, gpus=2.0, attached=False))
    setting.run(4.5)
    setting.submit(work("short", 2.0, gpus=4.0))
    setting.run(3)
    assert {job.id: job.attempt.phase for job in setting.controller.table.running() if job.attempt} == {
        "long": "parked", "other": "parked", "short": "running",
    }  # fmt: skip
    setting.run(12)
    assert sorted(setting.world.finished) == ["long", "other", "short"]
    assert setting.world.starts == ["long.0", "other.0", "short.0", "short.0"]  # "long" is a gang over both nodes
    assert setting.events("long") == [Kind.ARRIVE, Kind.START, Kind.PREEMPT, Kind.RESUME, Kind.FINISH]


def test_a_parked_job_goes_on_between_rounds_when_its_gpus_are_free(tmp_path: Path) -> None:
    setting = Setting(tmp_path, policy=JobPolicy("srtf", "proportional", sticky=True), parks=True, lease_s=20.0)
    setting.submit(work("long", 60.0, gpus=4.0, attached=False))
    setting.run(15)
    setting.submit(work("short", 3.0, gpus=4.0))
    setting.run(7)  # the round at 20 s
    jobs = setting.controller.table.jobs
    assert jobs["long"].attempt is not None
    assert (jobs["long"].attempt.phase, jobs["short"].state) == ("parked", "running")
    setting.run(8)
    assert setting.world.finished == ["short"]
    assert jobs["long"].attempt.phase == "running"


def test_a_parked_job_holds_no_gpu_when_one_of_its_nodes_is_lost(tmp_path: Path) -> None:
    setting = Setting(tmp_path, policy=JobPolicy("srtf", "proportional", sticky=True), parks=True)
    setting.submit(work("long", 30.0, gpus=4.0, attached=False))
    setting.run(4.5)
    setting.submit(work("short", 8.0, gpus=2.0))
    setting.run(3)
    jobs = setting.controller.table.jobs
    attempts = {name: job.attempt for name, job in jobs.items() if job.attempt is not None}
    assert (attempts["long"].phase, attempts["short"].phase) == ("parked", "running")
    setting.world.unreachable |= set(attempts["long"].nodes) - set(attempts["short"].nodes)
    setting.run(5)
    assert jobs["short"].attempt is attempts["short"]
    assert attempts["short"].phase == "running"
