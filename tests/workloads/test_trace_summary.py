"""Numbers of `cotenant trace inspect`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cotenant.core.work import Jobs, Trace
from cotenant.workloads.jobs.registry import read_trace
from cotenant.workloads.jobs.summary import spread, summarise


def trace_of(arrival_s: list[float]) -> Trace:
    n = len(arrival_s)
    jobs = Jobs.build(n, id=[str(k) for k in range(n)], arrival_s=arrival_s, gpus=[1] * n, duration_s=[1] * n)
    return Trace(jobs, "here")


def test_spread_interpolates_linearly_and_survives_nothing() -> None:
    found = spread(np.array([0.0, 10.0, 20.0, 30.0, 40.0]))
    assert found == {"min": 0, "mean": 20, "median": 20, "p90": 36, "p95": 38, "p99": pytest.approx(39.6), "max": 40}
    assert set(spread(np.array([])).values()) == {None}


def test_one_job_and_all_at_once() -> None:
    one = summarise(trace_of([5.0]))
    assert (one["kept"], one["span_s"], one["rate_per_h"], one["interarrival_cv"]) == (1, 0.0, None, None)
    static = summarise(trace_of([0.0, 0.0]))
    assert (static["span_s"], static["rate_per_h"], static["interarrival_cv"]) == (0.0, None, None)


def test_gaps_and_rate() -> None:
    found = summarise(trace_of([0.0, 10.0, 40.0]))
    assert found["rate_per_h"] == 180.0
    assert found["interarrival_cv"] == 0.5  # the gaps are 10 and 30: mean 20, standard deviation 10


def test_a_long_empty_lead_is_remarked_upon(shared: Path) -> None:
    even = [float(k) for k in range(1000)]
    assert summarise(trace_of(even))["remarks"] == []
    lopsided = summarise(trace_of([0.0] + [1e6 + k for k in range(999)]))
    assert "--from 11.6d" in lopsided["remarks"][0]
    openb = summarise(read_trace(f"openb:{shared / 'data/jobs/openb/openb_pod_list_default.csv'}"))
    assert any("99 % of the jobs arrive in the last" in remark for remark in openb["remarks"])
