"""Runs of many jobs in little memory: how many are loaded at once changes nothing but what is held."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
from engine_cases import PROFILES, crowded_case

from cotenant.core.record.schema import EVENTS_FILE, JOBS_FILE, ROUNDS_FILE, RUN_FILE
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions, run_training
from cotenant.sim.jobs.window import Window
from cotenant.workloads.jobs.generate import Workload, generate

FILES = (RUN_FILE, JOBS_FILE, EVENTS_FILE, ROUNDS_FILE)
POLICIES = (
    JobPolicy("fifo", "tune"),
    JobPolicy("las", "proportional", "consolidate", sticky=True),
    JobPolicy("gittins", "greedy", "spread", reserve_after_s=900.0),
    JobPolicy("srtf", "optimal", solver_limit_s=60.0),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label())
@pytest.mark.parametrize("at_once", [1, 7])
def test_the_record_is_the_same_however_many_jobs_are_loaded_at_once(
    policy: JobPolicy, at_once: int, tmp_path: Path
) -> None:
    cluster, trace = crowded_case(3)
    whole = EngineOptions(restart_cost_s=30.0)
    run_training(trace, cluster, PROFILES, policy, whole, out=tmp_path / "whole")
    pieces = dataclasses.replace(whole, jobs_at_once=at_once)
    run_training(trace, cluster, PROFILES, policy, pieces, out=tmp_path / "pieces")
    for name in FILES:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()


def test_the_kernel_holds_the_unfinished_jobs_and_the_next_to_arrive(tmp_path: Path) -> None:
    """4,000 jobs at load 0.5 on 64 GPUs: far fewer are unfinished at any time than there are."""
    profiles = load_profiles()
    cluster = crowded_case(0)[0]
    drawn = Workload(4000, load=0.5, cluster_gpus=cluster.total_gpus, gpu_mix="1:100")
    trace = generate(drawn, profiles.classes, profiles.iteration_s).trace
    windows: list[Window] = []
    held: list[int] = []
    advance = Window.advance

    def watched(window: Window) -> None:
        advance(window)
        windows.append(window)
        held.append(len(window.rows))

    with mock.patch.object(Window, "advance", watched):
        record, _ = run_training(trace, cluster, profiles, JobPolicy(), EngineOptions(jobs_at_once=100))
    assert len(held) == 39
    most = int((record.rounds["running"] + record.rounds["waiting"]).max())
    assert max(held) <= most + 100
    assert windows[-1].finished == windows[-1].jobs == 4000
