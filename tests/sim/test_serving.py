"""The serving simulator: runs worked out by hand, conservation, agreement with the plan and the live dispatcher."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.serving import APPLICATIONS, Application, Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.dispatch import Dispatcher, Start
from cotenant.policy.serving.packing.applications import stages
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import PLANNERS
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import Interference, ModelProfile, Partition, ServingProfile
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.sim.serving.engine import Scenario, ServingResult, run
from cotenant.sim.serving.verify import plan_verified
from cotenant.workloads.requests.arrivals import Arrivals, parse_arrivals
from cotenant.workloads.requests.scenarios import SLO_MS

CURVE = tuple((b, 10.0 + 2.0 * b) for b in range(1, 9))
WHOLE = (Partition(0.5, "50%"), Partition(1.0, "100%"))
MODEL = ModelProfile("m", 1, {"50%": CURVE, "100%": CURVE}, (), ((1, 0.5), (8, 0.5)), ((1, 0.0), (8, 0.0)))
PROFILES = {"X": ServingProfile("X", "made up", 100, WHOLE, {"m": MODEL})}
REAL = load_profile("RTX2080Ti")


def let(gpu: int, slot: int, label: str, batches: Mapping[str, int]) -> Gpulet:
    duty = sum(10.0 + 2.0 * b for b in batches.values())
    seats = tuple(Seat(n, "m", b, 1.0) for n, b in batches.items())
    return Gpulet(gpu, "X", label, float(label[:-1]), slot, duty, seats)


def simple(rate: float, slo: float, batch: int, process: str, duration: float = 1.0, **more: object) -> ServingResult:
    service = Service("a", "m", rate, slo)
    plan = ServingPlan("p", 1, (let(0, 0, "100%", {"a": batch}),))
    return run(plan, Scenario([service], duration, {"": parse_arrivals(process)}, **more), PROFILES)  # type: ignore[arg-type]


def keys(result: ServingResult, name: str = "a") -> dict[str, float]:
    found = result.summary()["services"]
    assert isinstance(found, dict)
    return found[name]


def test_equal_gaps_by_hand() -> None:
    """One request each 20 ms and 12 ms for one: nobody waits."""
    row = keys(simple(50.0, 30.0, 4, "constant"))
    assert (row["sent"], row["ok"], row["p50_ms"], row["p99_ms"]) == (50, 50, 12.0, 12.0)


def test_batches_form_by_hand() -> None:
    """One request each 5 ms from 0: the first runs until 12, then those of 5 and 10 until 26, then 15, 20, 25 ..."""
    rows = simple(200.0, 1000.0, 8, "constant", 0.03).requests
    assert list(rows["batch"]) == [1, 2, 2, 3, 3, 3]
    assert list(rows["started"]) == [0, 12, 12, 26, 26, 26]
    assert list(rows["finished"]) == [12, 26, 26, 42, 42, 42]


def test_overload_drops_and_keeps_the_rest_in_time() -> None:
    row = keys(simple(1000.0, 40.0, 4, "constant", 10.0))
    # batches of 4 take 18 ms, so at most 222 requests/s
    assert row["ok"] == pytest.approx(2222, rel=0.01)
    assert row["late"] == 0
    assert row["ok"] + row["dropped"] == row["sent"] == 10_000


def test_closed_loop_by_hand() -> None:
    """Three clients on batches of at most 2. A gpulet goes on before clients hear of it: one, two, one, two ... run."""
    row = keys(simple(1.0, 1000.0, 2, "closed:3", 10.0))
    assert row["sent"] == pytest.approx(3 * 10_000 / (12 + 14), abs=4)
    assert row["dropped"] == 0


def test_interference_by_hand() -> None:
    """l2 of 0.5 on half a GPU presses 0.25 * 2: batches of one take 15 ms instead of 10 beside a neighbour."""
    flat = ModelProfile("m", 1, {"50%": ((1, 10.0),)}, (), ((1, 0.5),), ((1, 0.0),))
    profile = ServingProfile("X", "x", 9, WHOLE[:1], {"m": flat}, Interference(0.0, 2.0, 0.0, 0.0, 1.0))
    two = [Service("a", "m", 20.0, 100.0), Service("b", "m", 0.001, 100.0)]
    plan = ServingPlan("p", 1, (let(0, 0, "50%", {"a": 1}), let(0, 1, "50%", {"b": 1})))
    took = {}
    for mode in ("planned", "running"):
        found = run(plan, Scenario(two, 1.0, {"": Arrivals("constant")}, interference=mode), {"X": profile})
        mine = found.requests[found.requests["svc"] == 0]
        took[mode] = mine["finished"] - mine["started"]
    assert took["planned"] == pytest.approx([15.0] * 20)
    # b runs from 0 to 10 only. So the first batch of a may start beside b, and all others run alone.
    assert took["running"][1:] == pytest.approx([10.0] * 19)


def test_application_by_hand() -> None:
    """A chain with a fork and a join: 12 ms a stage, so 36 ms in all, on gpulets of their own."""
    app = Application("app", {"m": ("m2", "m3"), "m2": ("m4",), "m3": ("m4",)}, 5.0, 120.0)
    models = {n: replace(MODEL, name=n) for n in ("m", "m2", "m3", "m4")}
    profile = replace(PROFILES["X"], models=models)
    found = stages(app, profile)
    assert [s.service.slo_ms for s in found] == [40.0, 40.0, 40.0, 40.0]
    assert [s.deadline_ms for s in found] == [40.0, 80.0, 80.0, 120.0]
    lets = tuple(
        Gpulet(i, "X", "100%", 100.0, 0, 12.0, (Seat(s.service.name, s.service.model, 1, 5.0),))
        for i, s in enumerate(found)
    )
    scenario = Scenario([], 2.0, {"": Arrivals("constant")}, [(app, found)])
    result = run(ServingPlan("p", 4, lets), scenario, {"X": profile})
    whole = result.instances["finished"] - result.instances["arrived"]
    assert whole == pytest.approx([36.0] * 10)
    assert len(result.requests) == 40
    apps = result.summary()["applications"]
    assert isinstance(apps, dict)
    assert apps["app"]["slo_attainment"] == 1.0


def test_a_dropped_stage_fails_the_application() -> None:
    app = Application("app", {"m": ("m2",)}, 500.0, 60.0)
    profile = replace(PROFILES["X"], models={n: replace(MODEL, name=n) for n in ("m", "m2")})
    found = stages(app, profile)
    lets = tuple(
        Gpulet(i, "X", "100%", 100.0, 0, 12.0, (Seat(s.service.name, s.service.model, 1, 5.0),))
        for i, s in enumerate(found)
    )
    scenario = Scenario([], 2.0, {"": Arrivals("poisson")}, [(app, found)])
    result = run(ServingPlan("p", 2, lets), scenario, {"X": profile})
    assert (result.instances["outcome"] != 0).all()
    done = result.instances["outcome"] == 1
    assert 0.1 < done.mean() < 0.3  # one stage serves 83 of the 500 requests/s
    assert (result.instances["finished"] - result.instances["arrived"])[done].max() <= 60.0


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(5, 400), slo=st.floats(14, 200), batches=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    process=st.sampled_from(["poisson", "gamma:3", "closed:5", "mmpp:1,0.2;5,0.1"]), hold=st.sampled_from([0.0, 0.7]),
    sensitive=st.booleans(), seed=st.integers(0, 3),
)  # fmt: skip
def test_every_request_ends_once_and_gpulets_run_one_batch_at_a_time(
    rate: float, slo: float, batches: tuple[int, int], process: str, hold: float, sensitive: bool, seed: int
) -> None:
    two = [Service("a", "m", rate, slo, latency_sensitive=sensitive), Service("b", "m", rate / 2, slo * 2)]
    plan = ServingPlan("p", 2, (let(0, 0, "50%", dict(zip("ab", batches, strict=True))), let(0, 1, "50%", {"a": 2})))
    scenario = Scenario(two, 2.0, {"": parse_arrivals(process)}, seed=seed, hold=hold)
    result = run(plan, scenario, PROFILES)
    rows = result.requests
    assert (rows["outcome"] > 0).all()
    ran = rows["let"] >= 0
    assert (ran == np.isin(rows["outcome"], (1, 2))).all()
    assert (rows["started"][ran] >= rows["arrived"][ran]).all()
    late = rows["finished"] > rows["deadline"] + 1e-6
    assert (rows["outcome"][ran & late] == 2).all()
    assert not (ran & late & (rows["svc"] == 0) & (not sensitive)).any()
    for i in (0, 1):
        mine = rows[rows["let"] == i]
        spans = np.unique(np.stack([mine["started"], mine["finished"], mine["svc"]], axis=1), axis=0)
        assert (spans[1:, 0] >= spans[:-1, 1] - 1e-9).all(), "two batches at once on one gpulet"
        for start, end, svc in spans:
            batch = mine[(mine["started"] == start) & (mine["svc"] == svc)]
            assert len(batch) == batch["batch"][0]
            assert end - start == pytest.approx(10.0 + 2.0 * len(batch))
    again = run(plan, scenario, PROFILES)
    assert again.requests.tobytes() == rows.tobytes()


def test_the_loop_does_what_the_live_dispatcher_does() -> None:
    """The same arrivals through the Dispatcher object under a plain event loop give the same batches."""
    two = [Service("a", "m", 150.0, 60.0), Service("b", "m", 80.0, 90.0)]
    plan = ServingPlan("p", 2, (let(0, 0, "50%", {"a": 3, "b": 4}), let(0, 1, "50%", {"a": 2})))
    result = run(plan, Scenario(two, 5.0, {"": Arrivals("poisson")}, seed=7), PROFILES)
    d = Dispatcher(plan, two, PROFILES)
    events: list[tuple[float, int, int, str]] = [
        (float(r["arrived"]), 0, n, "ab"[r["svc"]]) for n, r in enumerate(result.requests)
    ]
    heapq.heapify(events)
    batches = []
    while events:
        now, kind, n, name = heapq.heappop(events)
        found = d.request(name, now)[1] if kind == 0 else d.done(n, now)
        for x in found:
            if isinstance(x, Start):
                batches.append((now, x.gpulet, x.service, len(x.requests)))
                heapq.heappush(events, (now + x.expected_ms, 1, x.gpulet, ""))
    rows = result.requests[result.requests["let"] >= 0]
    simulated = {(float(r["started"]), int(r["let"]), "ab"[r["svc"]], int(r["batch"])) for r in rows}
    assert simulated == set(batches)


@pytest.mark.parametrize("seed", [1, 2])
def test_verified_plans_hold_under_poisson_arrivals(seed: int) -> None:
    """Services planned with headroom keep 99 % under requests that the planner never saw."""
    rates = {"lenet1": 200, "googlenet": 150, "resnet50": 150, "ssd-mobilenetv1": 100, "bert": 80}
    services = [Service(n, n, rate, SLO_MS[n]) for n, rate in rates.items()]
    packer = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(REAL, 6), services)
    found = plan_verified(packer, {REAL.gpu: REAL}, 1.2, 0.99, seed=seed)
    assert found.holds(0.99)
    result = run(found.plan, Scenario(services, 120.0, {"": Arrivals("poisson")}, seed=1000 + seed), {REAL.gpu: REAL})
    for s in services:
        assert keys(result, s.name)["slo_attainment"] >= 0.99, s.name


def test_the_public_applications_are_planned_and_hold() -> None:
    apps = [Application(n, APPLICATIONS[n], 40.0, slo) for n, slo in (("game", 108.0), ("traffic", 400.0))]
    staged = [(app, stages(app, REAL)) for app in apps]
    services = [s.service for _, found in staged for s in found]
    assert len(services) == 10
    packer = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(REAL, 6), services)
    found = plan_verified(packer, {REAL.gpu: REAL}, 1.2, 0.99, staged)
    assert found.plan.feasible
    result = run(found.plan, Scenario([], 60.0, {"": Arrivals("poisson")}, staged, seed=9), {REAL.gpu: REAL})
    rows = result.summary()["applications"]
    assert isinstance(rows, dict)
    assert rows["traffic"]["slo_attainment"] >= 0.99
    assert rows["game"]["slo_attainment"] >= 0.99


def test_tables_have_the_agreed_columns() -> None:
    result = simple(100.0, 40.0, 2, "poisson")
    assert result.table().columns == ["service", "received_s", "queued_ms", "batch", "gpulet", "executed_ms", "outcome"]
    client = result.client_table()
    assert client.columns == [
        "service", "scheduled_s", "sent_s", "finished_s", "inference_ms", "total_ms", "outcome",
    ]  # fmt: skip
    ok = client.filter(client["outcome"] == "ok")
    assert ((ok["finished_s"] - ok["sent_s"]) * 1000 - ok["total_ms"]).abs().max() < 1e-6


def test_wrong_scenarios() -> None:
    with pytest.raises(InputError, match="interference"):
        simple(1.0, 40.0, 1, "poisson", interference="none")
    with pytest.raises(InputError, match="duration"):
        simple(1.0, 40.0, 1, "poisson", 0.0)
