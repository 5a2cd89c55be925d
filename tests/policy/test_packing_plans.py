"""Serving planners: what they claim holds, feasibility is monotone, bounds are bounds."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.exact import rate_factor
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.replan import disruption, fewest_gpus, moves, renamed
from cotenant.policy.serving.packing.specs import PLANNERS, find_planner
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency import Interference, ModelProfile, Partition, ServingProfile
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.workloads.requests.scenarios import SLO_MS

PROFILE = load_profile("RTX2080Ti")
MIXES = (("vgg16", "googlenet", "lenet1"), ("resnet50", "bert"), ("ssd-mobilenetv1", "mnasnet1_0", "densenet161"))
SEARCHING = ("temporal", "gpulet-interference")


def services(models: tuple[str, ...], rate: float = 100.0) -> list[Service]:
    return [Service(m, m, rate, SLO_MS[m]) for m in models]


@cache
def packer(planner: str, mix: int, gpus: int) -> Packer:
    return Packer(PLANNERS[planner], Gpus.uniform(PROFILE, gpus), services(MIXES[mix]))


rates_st = st.lists(st.floats(1.0, 900.0), min_size=3, max_size=3)


@settings(max_examples=40, deadline=None)
@given(planner=st.sampled_from(list(PLANNERS)), mix=st.integers(0, 2), gpus=st.integers(1, 4), rates=rates_st)
def test_what_is_claimed_holds(planner: str, mix: int, gpus: int, rates: list[float]) -> None:
    p = packer(planner, mix, gpus)
    plan = p.plan(rates[: len(p.services)])
    wanted = [replace(s, rate_rps=r) for s, r in zip(p.services, rates, strict=False)]
    if planner not in ("greedy", "gpulet", "usher") or plan.feasible:
        # a plan that leaves out some services must still be valid for the rest
        assert problems(plan, wanted, p.gpus) == []
    if plan.feasible:
        assert all(plan.headroom()[s.name] >= 1 - 1e-6 for s in wanted)
        assert p.bound(np.array([s.rate_rps for s in wanted])) >= 1 - 1e-9
    else:
        assert all(x.reason for x in plan.left_out)


@settings(max_examples=40, deadline=None)
@given(
    planner=st.sampled_from(SEARCHING), mix=st.integers(0, 2), gpus=st.integers(1, 4), rates=rates_st,
    less=st.floats(0.05, 0.999),
)  # fmt: skip
def test_feasibility_is_monotone_along_a_ray(
    planner: str, mix: int, gpus: int, rates: list[float], less: float
) -> None:
    p = packer(planner, mix, gpus)
    # binary fractions, so that both vectors have exactly the same direction
    unit = np.round(np.array(rates[: len(p.services)]) / 900 * 64 + 1)
    factor = p.bound(unit) * 0.9
    if p.plan(unit * factor).feasible:
        assert p.plan(unit * factor * less).feasible


@settings(max_examples=20, deadline=None)
@given(mix=st.integers(0, 2), rates=rates_st)
def test_usher_gives_every_batch_the_sms_that_it_can_use(mix: int, rates: list[float]) -> None:
    """One model per gpulet, at most 5 % slower than on all SMs; never fewer GPUs than gpulets of any size need."""
    few, any_size = packer("usher", mix, 6), packer("gpulet", mix, 6)
    plan = few.plan(rates[: len(few.services)])
    for let in plan.gpulets:
        (seat,) = let.seats
        on_all = PROFILE.latency_ms(seat.model, seat.batch, "100%")
        assert PROFILE.latency_ms(seat.model, seat.batch, let.partition) <= 1.05 * on_all
    unit = np.array(rates[: len(few.services)])
    assert few.bound(unit) <= any_size.bound(unit) * (1 + 1e-9)


def test_a_bound_below_one_is_never_claimed() -> None:
    p = packer("gpulet-interference", 0, 2)
    rates = np.array([300.0, 300.0, 300.0])
    limit = p.bound(rates)
    assert p.table is not None
    assert rate_factor(p.table, rates, np.array([2])) <= limit + 1e-9
    for factor in (1.0, 1.2, 2.0):
        plan = p.plan(rates * limit * factor * 1.001)
        assert not plan.feasible
        assert plan.proven_infeasible


def test_bound_of_one_model_by_hand() -> None:
    """One model with one batch: half GPUs give 100/s each beside each other, whole ones 150/s."""
    model = ModelProfile("m", 1, {"50%": ((1, 10.0),), "100%": ((1, 20 / 3),)})
    profile = ServingProfile("X", "made up", 100, (Partition(0.5, "50%"), Partition(1.0, "100%")), {"m": model})
    p = Packer(PLANNERS["exact"], Gpus.uniform(profile, 3), [Service("s", "m", 1.0, 40.0)])
    assert p.bound(np.array([1.0])) == pytest.approx(600.0)
    assert p.plan([599.9]).feasible
    assert p.plan([599.9]).gpus_used == 3
    assert p.plan([200.0]).gpus_used <= 2
    over = p.plan([601.0])
    assert over.proven_infeasible
    assert over.bound == pytest.approx(600 / 601)


def test_interference_by_hand() -> None:
    """Beside itself each half is slowed to 1.25: 80/s each; at an SLO of 24 ms that no longer holds (2 x 12.5 ms)."""
    model = ModelProfile("m", 1, {"50%": ((1, 10.0),)}, (), ((1, 0.5),), ((1, 0.0),))
    halves = (Partition(0.5, "50%"),)
    profile = ServingProfile("X", "x", 100, halves, {"m": model}, Interference(0.0, 1.0, 0.0, 0.0, 1.0))
    for slo, most in ((26.0, 160.0), (24.0, 100.0)):
        p = Packer(PLANNERS["exact"], Gpus.uniform(profile, 1), [Service("s", "m", 1.0, slo)])
        assert p.plan([most * 0.999]).feasible
        assert not p.plan([most * 1.001]).feasible


def test_gpulets_share_in_turns() -> None:
    """Three services of 10/s, 10 ms a batch, on one GPU that may hold one gpulet: one cycle of 30 ms serves all."""
    model = ModelProfile("m", 1, {"100%": ((1, 10.0), (2, 11.0))})
    profile = ServingProfile("X", "x", 100, (Partition(1.0, "100%"),), {"m": model}, max_gpulets=1)
    three = [Service(n, "m", 10.0, 70.0) for n in "abc"]
    for planner in ("temporal", "gpulet-interference", "exact"):
        plan = Packer(PLANNERS[planner], Gpus.uniform(profile, 1), three).plan()
        assert plan.feasible
        assert {s.service for s in plan.gpulets[0].seats} == {"a", "b", "c"}
    # with SLOs of 50 ms, two cycles of the others' batches and the service's own do not fit
    tight = [replace(s, slo_ms=50.0) for s in three]
    assert not Packer(PLANNERS["temporal"], Gpus.uniform(profile, 1), tight).plan().feasible


def test_memory_is_a_limit() -> None:
    model = ModelProfile("m", 60, {"50%": ((1, 10.0),)})
    profile = ServingProfile("X", "x", 100, (Partition(0.5, "50%"),), {"m": model}, per_gpulet_bytes=10)
    two = [Service(n, "m", 50.0, 40.0) for n in "ab"]
    plan = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(profile, 1), two).plan()
    assert not plan.feasible
    assert len(plan.gpulets) == 1
    assert Packer(PLANNERS["gpulet-interference"], Gpus.uniform(profile, 2), two).plan().feasible


def test_network_is_a_limit() -> None:
    model = ModelProfile("m", 1, {"100%": ((1, 1.0),)})
    profile = ServingProfile("X", "x", 100, (Partition(1.0, "100%"),), {"m": model}, network_bps=8000.0)
    one = [Service("a", "m", 90.0, 40.0, input_bytes=10.0)]  # 100 requests/s fill the network link
    assert Packer(PLANNERS["temporal"], Gpus.uniform(profile, 1), one).plan([99.0]).feasible
    assert not Packer(PLANNERS["temporal"], Gpus.uniform(profile, 1), one).plan([101.0]).feasible


def test_many_gpulets_and_mig_slots() -> None:
    """Seven 1g instances, but the memory has eight slots of which a 3g takes four."""
    points = ((1, 10.0),)
    model = ModelProfile("m", 1, {"1g": points, "3g": ((1, 4.0),)})
    sizes = (Partition(1 / 7, "1g", 1), Partition(3 / 7, "3g", 4))
    profile = ServingProfile("X", "x", 800, sizes, {"m": model}, max_gpulets=7, slots=8)
    p = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(profile, 1), [Service("s", "m", 1.0, 40.0)])
    plan = p.plan([690.0])
    assert plan.feasible
    assert problems(plan, [replace(p.services[0], rate_rps=690.0)], p.gpus) == []
    assert not p.plan([710.0]).feasible


def test_types_of_gpu_are_told_apart() -> None:
    slow = ModelProfile("m", 1, {"100%": ((1, 30.0),)})
    fast = ModelProfile("m", 1, {"100%": ((1, 10.0),)})
    whole = (Partition(1.0, "100%"),)
    kinds = (ServingProfile("S", "x", 9, whole, {"m": slow}), ServingProfile("F", "x", 9, whole, {"m": fast}))
    gpus = Gpus(kinds, (0, 1))
    p = Packer(PLANNERS["exact"], gpus, [Service("s", "m", 1.0, 40.0)])
    plan = p.plan([99.0])  # the slow GPU model cannot meet an SLO of 40 ms
    assert [let.gpu_model for let in plan.gpulets] == ["F"]
    assert not p.plan([101.0]).feasible


def test_types_of_gpu_with_few_and_many_partitions_are_planned_together_without_a_warning() -> None:
    one = ModelProfile("m", 1, {"100%": ((1, 10.0),)})
    two = ModelProfile("m", 1, {"50%": ((1, 16.0),), "100%": ((1, 10.0),)})
    sizes = (Partition(0.5, "50%"), Partition(1.0, "100%"))
    kinds = (ServingProfile("W", "x", 9, sizes[1:], {"m": one}), ServingProfile("H", "x", 9, sizes, {"m": two}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Packer(PLANNERS["greedy"], Gpus(kinds, (0, 1)), [Service("s", "m", 1.0, 40.0)]).plan([150.0]).feasible


def test_priority_is_served_first() -> None:
    first = [replace(s, priority=int(s.model == "vgg16"), rate_rps=400.0) for s in services(MIXES[0])]
    plan = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(PROFILE, 1), first).plan()
    assert not plan.feasible
    capacity = plan.capacities()
    assert capacity["vgg16"] > 0
    assert sum(capacity.values()) == capacity["vgg16"] + capacity["lenet1"] + capacity["googlenet"]


def test_fewest_gpus_is_enough_and_not_more() -> None:
    spec = PLANNERS["gpulet-interference"]
    rates = [200.0, 200.0, 200.0]
    plan = fewest_gpus(spec, Gpus.uniform(PROFILE, 8), services(MIXES[0]), rates)
    assert plan.feasible
    fewer = Packer(spec, Gpus.uniform(PROFILE, plan.gpus_used - 1), services(MIXES[0]))
    assert not fewer.plan(rates).feasible


def test_replanning_moves_little() -> None:
    p = packer("gpulet-interference", 0, 4)
    old = p.plan([100.0, 100.0, 100.0])
    same = renamed(p.plan([98.0, 101.0, 99.0], start=old), old, p.gpus)
    assert same.feasible
    assert disruption(moves(old, same)) == 0
    more = renamed(p.plan([100.0, 250.0, 100.0], start=old), old, p.gpus)
    assert more.feasible
    wanted = [replace(s, rate_rps=r) for s, r in zip(p.services, (100.0, 250.0, 100.0), strict=True)]
    assert problems(more, wanted, p.gpus) == []
    assert 0 < disruption(moves(old, more)) <= 4
    kept = {(g.gpu, g.partition, g.seats[0].service) for g in old.gpulets}
    assert kept <= {(g.gpu, g.partition, g.seats[0].service) for g in more.gpulets}


def test_moves_are_listed_by_hand() -> None:
    def let(gpu: int, part: str, *names: str, batch: int = 1) -> Gpulet:
        return Gpulet(gpu, "X", part, float(part[:-1]), 0, 5.0, tuple(Seat(n, n, batch, 1.0) for n in names))

    old = ServingPlan("p", 2, (let(0, "50%", "a"), let(0, "50%", "b"), let(1, "100%", "c")))
    new = ServingPlan("p", 2, (let(0, "50%", "b", "d"), let(0, "50%", "a", batch=2), let(1, "40%", "c")))
    found = [(m.kind, m.gpu, m.service) for m in moves(old, new)]
    assert sorted(found, key=str) == sorted(
        [("load", 0, "d"), ("rebatch", 0, None), ("remove", 1, None), ("create", 1, None), ("load", 1, "c")], key=str
    )


def test_plan_as_json_and_back() -> None:
    plan = packer("gpulet-interference", 1, 3).plan([50.0, 50.0])
    assert ServingPlan.from_dict(plan.to_dict()) == plan
    with pytest.raises(InputError, match="not a plan"):
        ServingPlan.from_dict({"planner": "x"})
    with pytest.raises(InputError, match=r"gpulets\.0\.gpu: not a plan: 'x' is not a whole number"):
        ServingPlan.from_dict({**plan.to_dict(), "gpulets": [{**plan.to_dict()["gpulets"][0], "gpu": "x"}]})


@pytest.mark.parametrize(
    ("service", "says"),
    [
        (Service("s", "resnet50", 10.0, 5.0), "below .* the fastest"),
        (Service("s", "nope", 10.0, 50.0), "absent from the RTX2080Ti profile"),
    ],
)
def test_impossible_services(service: Service, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Packer(PLANNERS["exact"], Gpus.uniform(PROFILE, 4), [service])


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(InputError, match="positive finite"):
        Service("s", "resnet50", rate, 100.0)


def test_unknown_planner() -> None:
    with pytest.raises(InputError, match="known: temporal, greedy"):
        find_planner("best")


def test_an_infeasible_rate_gets_the_whole_gpu() -> None:
    """Half a GPU serves 100/s, a whole one 150/s; beside a neighbour, requests are slower than the SLO allows."""
    model = ModelProfile("m", 1, {"50%": ((1, 10.0),), "100%": ((1, 20 / 3),)}, l2=((1, 0.5),), dram=((1, 0.5),))
    profile = ServingProfile(
        "X", "made up", 100, (Partition(0.5, "50%"), Partition(1.0, "100%")), {"m": model},
        interference=Interference(0.0, 4.0, 0.0, 0.0, 1.0),
    )  # fmt: skip
    p = Packer(PLANNERS["gpulet-interference"], Gpus.uniform(profile, 1), [Service("s", "m", 1.0, 20.1)])
    plan = p.plan([400.0])
    assert [g.partition for g in plan.gpulets] == ["100%"]
    assert plan.left_out[0].missing_rps == pytest.approx(250.0, rel=0.02)
    assert plan.proven_infeasible
