"""The page of a serving run."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from cotenant.core.serving import Application, Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.applications import stages
from cotenant.profiles.serving.latency import ModelProfile, Partition, ServingProfile
from cotenant.report.serving import build_page, in_time, page_data
from cotenant.sim.serving.engine import Scenario, ServingResult, run
from cotenant.workloads.requests.arrivals import Arrivals

PROFILE = ServingProfile("X", "x", 9, (Partition(1.0, "100%"),), {"m": ModelProfile("m", 1, {"100%": ((1, 10.0),)})})


@pytest.fixture
def result() -> ServingResult:
    """A request each 20 ms, 10 ms a batch of one; a service without a gpulet; one is named to break the page."""
    services = [Service("<b>&a", "m", 50.0, 15.0), Service("lost", "m", 5.0, 15.0, max_queue=1)]
    plan = ServingPlan("p", 1, (Gpulet(0, "X", "100%", 100.0, 0, 10.0, (Seat("<b>&a", "m", 1, 50.0),)),))
    return run(plan, Scenario(services, 6.0, {"": Arrivals("constant")}), {"X": PROFILE})


def test_curves_by_hand(result: ServingResult) -> None:
    data = page_data(result)
    served, lost = data["services"]
    assert set(served["latency_ms"]) == {10.0}
    assert served["share"][-1] == 1.0
    assert served["attainment"] == [1.0] * 60
    assert lost["latency_ms"] == []
    assert set(lost["attainment"]) == {0.0, None}
    assert data["gpulets"][0]["busy"] == pytest.approx(0.5, abs=0.01)


def test_page_is_whole_and_safe(result: ServingResult) -> None:
    page = build_page(result)
    assert "{{" not in page.split("<script>")[0]
    assert "<b>&a" not in page
    assert "&lt;b&gt;&amp;a" in page
    assert "lost answered only 0.00% of its requests in time" in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["services"][0]["name"] == "<b>&a"
    assert "https://" not in page.split('id="data"')[0]


def test_a_service_is_said_to_be_in_time_by_no_more_than_it_was() -> None:
    assert in_time("a", 1.0) == "Every request was answered in time."
    assert in_time("a", 0.99999) == "Every service answered at least 99.99% of its requests in time."
    assert in_time("a", 0.98) == "a answered only 98.00% of its requests in time."


def test_a_stage_is_timed_from_its_applications_arrival() -> None:
    """Two stages of 10 ms one after the other on gpulets of their own: done 10 and 20 ms after the arrival."""
    app = Application("app", {"m": ("n",)}, 10.0, 30.0)
    profile = replace(PROFILE, models={name: replace(PROFILE.models["m"], name=name) for name in "mn"})
    found = stages(app, profile)
    names = [stage.service.name for stage in found]
    lets = [Gpulet(i, "X", "100%", 100.0, 0, 10.0, (Seat(name, name[-1], 1, 10.0),)) for i, name in enumerate(names)]
    plan = ServingPlan("p", 2, tuple(lets))
    data = page_data(run(plan, Scenario([], 6.0, {"": Arrivals("constant")}, [(app, found)]), {"X": profile}))
    first, second = data["services"]
    assert (first["slo_ms"], second["slo_ms"]) == pytest.approx((15.0, 30.0))
    assert first["latency_ms"] == pytest.approx([10.0] * len(first["latency_ms"]))
    assert second["latency_ms"] == pytest.approx([20.0] * len(second["latency_ms"]))


def test_every_gpulet_is_told_below_the_bars(result: ServingResult) -> None:
    """Bars of a narrow window have no room for words: the page has a list of them, filled from the same data."""
    page = build_page(result)
    assert '<ul id="lets"' in page
    assert "listLets();" in page


def test_table_and_chart_judge_a_stage_by_the_same_deadline() -> None:
    """A busy application: what the chart has within one SLO is what the table calls in time, stage by stage."""
    app = Application("app", {"m": ("n",)}, 60.0, 90.0)
    profile = replace(PROFILE, models={name: replace(PROFILE.models["m"], name=name) for name in "mn"})
    found = stages(app, profile)
    names = [stage.service.name for stage in found]
    lets = [Gpulet(i, "X", "100%", 100.0, 0, 10.0, (Seat(name, name[-1], 1, 10.0),)) for i, name in enumerate(names)]
    plan = ServingPlan("p", 2, tuple(lets))
    done = run(plan, Scenario([], 20.0, {"": Arrivals("poisson")}, [(app, found)], seed=3), {"X": profile})
    curves, rows = page_data(done)["services"], done.summary()["services"]
    assert any(0.5 < rows[name]["slo_attainment"] < 0.999 for name in names)
    for curve in curves:
        within = [y for x, y in zip(curve["latency_ms"], curve["share"], strict=True) if x <= curve["slo_ms"]]
        # within 0.01, because the curve is drawn from at most 200 points
        assert within[-1] == pytest.approx(rows[curve["name"]]["slo_attainment"], abs=0.01)
