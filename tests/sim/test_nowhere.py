"""Runs that can get nowhere end with a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.core.errors import WorkError
from cotenant.core.work import Jobs, Trace
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.profiles.training.tables import load_profiles
from cotenant.sim.jobs.engine import EngineOptions, run_training
from cotenant.workloads.clusters.forms import parse_cluster


def _two_jobs_on_one_gpu() -> Trace:
    jobs = Jobs.build(
        2, id=["a", "b"], arrival_s=np.zeros(2), gpus=np.ones(2), duration_s=np.full(2, 5000.0), model=["res50"] * 2
    )
    return Trace(jobs, "two jobs")


@pytest.mark.parametrize("cost_s", [300.0, 700.0])
def test_restarts_longer_than_turns(cost_s: float) -> None:
    options = EngineOptions(restart_cost_s=cost_s)
    with pytest.raises(WorkError, match="no job made progress"):
        run_training(_two_jobs_on_one_gpu(), parse_cluster("1x1"), load_profiles(), JobPolicy("las"), options)


def test_long_restarts_are_fine_where_jobs_keep_their_turn() -> None:
    options = EngineOptions(restart_cost_s=7000.0)
    record, _ = run_training(
        _two_jobs_on_one_gpu(), parse_cluster("1x1"), load_profiles(), JobPolicy("fifo", sticky=True), options
    )
    assert record.events.time_s[-1] == pytest.approx(2 * 5000, abs=301)  # neither job was restarted
