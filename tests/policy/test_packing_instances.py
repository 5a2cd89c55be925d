"""Plans of GPUs that are cut into MIG instances, processes in them, parts of their SMs and turns."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.mig import geometry, maximal_multisets, place
from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing import adjust
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.instances import gpu_layouts
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.specs import PLANNERS
from cotenant.policy.serving.packing.tables import Gpus, Rules, build_tables, new_state
from cotenant.profiles.serving.latency import Interference, ModelProfile, Partition, ServingProfile
from cotenant.profiles.serving.latency_files import load_profile, parse_profile, profile_to_dict
from cotenant.sim.serving.engine import Scenario, run
from cotenant.workloads.requests.arrivals import Arrivals

A100 = load_profile("A100-80GB")
PLANNER = PLANNERS["gpulet-interference"]
MIG_GPUS = ("A30", "A100-80GB", "H100-80GB", "H200")


def mig_profile(gpu: str, *, double_memory: bool = True, processes: int = 1, memory: int = 10**6) -> ServingProfile:
    """A GPU's instances (by SMs where they are published) with one model on each, and processes in them."""
    geo = geometry(gpu, double_memory=double_memory)
    sms = {k: p.sms or p.compute for k, p in geo.profiles.items()}
    whole = max(sms.values())
    sizes = [Partition(sms[k] / whole, k, p.memory_slots) for k, p in geo.profiles.items()]
    sizes += [p.cut(f"{p.label}x{n}", 1 / n, n) for p in sizes for n in range(2, processes + 1)]
    latency = {p.label: tuple((b, (2 + b / p.fraction / 4)) for b in (1, 2, 4, 8, 16)) for p in sizes}
    models = {m: ModelProfile(m, 1, {k: tuple((b, ms * f) for b, ms in v) for k, v in latency.items()})
              for m, f in (("light", 1.0), ("heavy", 2.5))}  # fmt: skip
    return ServingProfile(
        gpu, "made up", memory, tuple(sorted(sizes)), models, max_gpulets=7 * processes, slots=geo.memory_slots
    )


def legal(plan: ServingPlan, profile: ServingProfile) -> None:
    """No instance overlaps another, all start where MIG lets them, and compute slices suffice: apart from the code."""
    geo = geometry(profile.gpu, double_memory=True)
    for gpu in {let.gpu for let in plan.gpulets}:
        found = {(x.instance, profile.partition(x.partition).instance) for x in plan.gpulets if x.gpu == gpu}
        taken = [start + i for start, kind in found for i in range(geo.profiles[kind].memory_slots)]
        assert len(set(taken)) == len(taken)
        assert max(taken) < geo.memory_slots
        assert all(start in geo.profiles[kind].starts for start, kind in found)
        assert sum(geo.profiles[kind].compute for _, kind in found) <= geo.compute_slices


@pytest.mark.parametrize(
    ("gpu", "double"), [("A30", False), ("A100-80GB", False), ("A100-80GB", True), ("H100-80GB", True)]
)
def test_layouts_are_those_of_mig(gpu: str, double: bool) -> None:
    profile = mig_profile(gpu, double_memory=double)
    T = build_tables(Gpus.uniform(profile, 1), [Service("s", "light", 1.0, 1e4)], Rules())
    names = {int(T.size["kind"][0, p]): x.instance for p, x in enumerate(profile.partitions)}
    mine = [Counter({names[k]: n for k, n in x.items()}) for x in gpu_layouts(T, 0)]
    theirs = [Counter(m) for m in maximal_multisets(geometry(gpu, double_memory=double))]
    # A placed layout may be maximal although instances of the same kinds, placed elsewhere, would leave room for one
    # more.
    assert all(x in theirs for x in mine)
    assert all(any(m <= x for x in mine) for m in theirs)


@pytest.mark.parametrize("gpu", MIG_GPUS)
def test_what_fits_is_what_mig_allows(gpu: str) -> None:
    """Every set of up to four kinds: the compiled test of room against the enumeration of places."""
    profile = mig_profile(gpu)
    geo = geometry(gpu, double_memory=True)
    T = build_tables(Gpus.uniform(profile, 1), [Service("s", "light", 1.0, 1e4)], Rules())
    labels = [p.label for p in profile.partitions]
    for n in range(1, 5):
        for chosen in combinations_with_replacement(geo.kinds, n):
            state = new_state(1, 7, 3)
            for j, kind in enumerate(chosen):
                row = state[0, j]
                row["part"], row["inst"], row["count"], row["rate"][0] = labels.index(kind), j, 1, 0.01
            assert bool(adjust.settle_all(T, state)) == (place(geo, chosen) is not None), chosen


@cache
def packer(gpu: str, processes: int, count: int, slo: float) -> Packer:
    services = [
        Service("a", "light", 1.0, slo),
        Service("b", "heavy", 1.0, 3 * slo),
        Service("c", "light", 1.0, 2 * slo),
    ]
    return Packer(PLANNER, Gpus.uniform(mig_profile(gpu, processes=processes), count), services, time_limit_s=60)


@settings(max_examples=25, deadline=None)
@given(
    gpu=st.sampled_from(MIG_GPUS), processes=st.integers(1, 3), count=st.integers(1, 3),
    slo=st.sampled_from([40.0, 90.0]), rates=st.lists(st.floats(1.0, 900.0), min_size=3, max_size=3),
)  # fmt: skip
def test_what_is_claimed_holds(gpu: str, processes: int, count: int, slo: float, rates: list[float]) -> None:
    p = packer(gpu, processes, count, slo)
    plan = p.plan(rates)
    wanted = [replace(s, rate_rps=r) for s, r in zip(p.services, rates, strict=True)]
    assert problems(plan, wanted, p.gpus) == []
    legal(plan, p.gpus.profiles[0])
    if plan.feasible:
        assert p.bound(np.array(rates)) >= 1 - 1e-6
        again = p.plan(rates, start=plan)  # planning from an existing plan must find its instances in the same places
        assert problems(again, wanted, p.gpus) == []
    for (g, _, label), n in Counter((x.gpu, x.instance, x.partition) for x in plan.gpulets).items():
        assert n == p.gpus.profile_of(g).partition(label).processes


def best_of(profile: ServingProfile, service: Service, kind: str) -> float:
    """Requests/s of one instance of a kind that one service has to itself, over sizes, processes and batches."""
    found = [0.0]
    for size in profile.partitions:
        for b in range(1, profile.max_batch(service.model, size.label) + 1):
            ms = profile.effective_ms(service.model, b, size.label)
            if size.instance == kind and 2 * ms <= service.slo_ms:
                found.append(size.processes * b * 1000 / ms)
    return max(found)


def fewest_by_hand(profile: ServingProfile, services: list[Service], most: int) -> int | None:
    """GPUs that services need when none shares an instance, by trying all layouts and all ways to give them out."""
    geo = geometry(profile.gpu, double_memory=False)
    kinds = geo.kinds
    caps = [[best_of(profile, s, k) for k in kinds] for s in services]
    for gpus in range(1, most + 1):
        for layouts in combinations_with_replacement(maximal_multisets(geo), gpus):
            have = [sum(m.count(k) for m in layouts) for k in kinds]
            for first in product(*(range(n + 1) for n in have)):
                rest = [n - x for n, x in zip(have, first, strict=True)]
                if all(
                    sum(c * n for c, n in zip(cap, given, strict=True)) >= s.rate_rps
                    for s, cap, given in zip(services, caps, (first, rest), strict=True)
                ):
                    return gpus
    return None


@settings(max_examples=25, deadline=None)
@given(
    processes=st.integers(1, 2), first=st.floats(1.0, 500.0), second=st.floats(1.0, 400.0),
    slo=st.sampled_from([25.0, 60.0]),
)  # fmt: skip
def test_fewest_gpus_as_by_hand(processes: int, first: float, second: float, slo: float) -> None:
    """Two services, one a gpulet, on up to three A30: the integer program finds as few as trying everything."""
    profile = mig_profile("A30", processes=processes)
    services = [Service("a", "light", first, slo), Service("b", "heavy", second, 4 * slo)]
    alone = replace(PLANNER, rules=replace(PLANNER.rules, seats=1))
    plan, shared = (
        Packer(spec, Gpus.uniform(profile, 3), services, time_limit_s=60).plan() for spec in (alone, PLANNER)
    )
    least = fewest_by_hand(profile, services, 3)
    if least is None:
        assert not plan.feasible
    else:
        assert plan.feasible
        assert plan.gpus_used == least
        assert shared.feasible
        assert shared.gpus_used <= least


def test_an_instance_is_cut_into_sms_and_turns() -> None:
    """A 2g instance in two halves that slow each other down, beside a 1g that two services share in turns."""
    whole = (Partition(2 / 7, "2g", 2), Partition(1 / 7, "1g", 1))
    half = whole[0].cut("2g/50%", 0.5)
    latency = {"2g/50%": ((1, 10.0), (4, 20.0)), "1g": ((1, 15.0), (4, 40.0))}
    model = ModelProfile("m", 10, latency, (), ((1, 0.5), (4, 0.5)), ((1, 0.0), (4, 0.0)))
    profile = ServingProfile(
        "A100-80GB", "made up", 800, tuple(sorted((*whole, half))), {"m": model}, Interference(0.0, 1.0, 0.0, 0.0, 1.0),
        max_gpulets=7, slots=8,
    )  # fmt: skip
    services = [Service(n, "m", r, 200.0) for n, r in (("a", 600.0), ("b", 30.0), ("c", 30.0))]
    gpus = Gpus.uniform(profile, 2)
    plan = Packer(PLANNER, gpus, services, time_limit_s=60).plan()
    assert plan.feasible
    assert problems(plan, services, gpus) == []
    legal(plan, profile)
    halves = [x for x in plan.gpulets if x.partition == "2g/50%"]
    together = Counter((x.gpu, x.instance) for x in halves)
    assert max(together.values()) == 2
    slowed = next(x for x in halves if together[x.gpu, x.instance] == 2)
    # A neighbour that has half of the instance and uses half of the cache adds 25 % to the latency. Other instances add
    # nothing.
    assert slowed.duty_ms == pytest.approx(25.0)
    result = run(plan, Scenario(services, 30.0, {"": Arrivals("constant")}), {profile.gpu: profile})
    assert all(r["slo_attainment"] == 1.0 for r in result.summary()["services"].values())  # type: ignore[attr-defined]


def test_a_gpu_is_cut_by_mig_or_by_sms_alone() -> None:
    """One profile with both: a GPU in either mode, whichever serves more."""
    sizes = (Partition(0.5, "50%"), Partition(1 / 7, "1g", 1))
    small, large = ModelProfile("s", 1, {"1g": ((1, 10.0),)}), ModelProfile("l", 1, {"50%": ((1, 10.0),)})
    profile = ServingProfile("A100-80GB", "x", 800, sizes, {"s": small, "l": large}, max_gpulets=7, slots=8)
    services = [Service("s", "s", 600.0, 40.0), Service("l", "l", 150.0, 40.0)]
    for count in (1, 2):
        gpus = Gpus.uniform(profile, count)
        plan = Packer(PLANNER, gpus, services, time_limit_s=60).plan()
        assert plan.feasible == (count == 2)
        assert problems(plan, services, gpus) == []
    both = (*plan.gpulets, Gpulet(0, profile.gpu, "50%", 50.0, 9, 10.0, (Seat("l", "l", 1, 1.0),)))
    both = (*both, Gpulet(0, profile.gpu, "1g", 14.0, 8, 10.0, (Seat("s", "s", 1, 1.0),), 5))
    assert any("both MIG instances and partitions" in x for x in problems(replace(plan, gpulets=both), services, gpus))


def test_memory_is_the_instances_own() -> None:
    """Two processes of 60 MB do not fit the eighth of 800 MB that a 1g instance has, one does."""
    one = Partition(1 / 7, "1g", 1)
    latency = {"1g": ((1, 10.0),), "1gx2": ((1, 10.0),)}
    profile = ServingProfile(
        "A100-80GB", "x", 800, tuple(sorted((one, one.cut("1gx2", 0.5, 2)))), {"m": ModelProfile("m", 60, latency)},
        max_gpulets=14, slots=8,
    )  # fmt: skip
    services = [Service("s", "m", 150.0, 40.0)]
    for memory, instances in ((60, 2), (40, 1)):
        p = Packer(PLANNER, Gpus.uniform(profile, 1), [replace(services[0], memory_bytes=memory)], time_limit_s=60)
        plan = p.plan()
        assert plan.feasible
        assert len({x.instance for x in plan.gpulets}) == instances
        assert problems(plan, p.services, p.gpus) == []
    wide = replace(plan, gpulets=tuple(x for x in plan.gpulets))
    assert problems(wide, [replace(services[0], memory_bytes=60)], p.gpus)


def test_the_check_refuses_what_mig_does_not_allow() -> None:
    def let(label: str, start: int, slot: int = 0, model: str = "resnet50") -> Gpulet:
        size = A100.partition(label)
        ms = A100.effective_ms(model, 1, label)
        return Gpulet(0, A100.gpu, label, size.percent, slot, ms, (Seat(model, model, 1, 1.0),), start)

    services = [Service("resnet50", "resnet50", 1.0, 500.0), Service("bert", "bert", 1.0, 500.0)]
    gpus = Gpus.uniform(A100, 1)

    def wrong(*lets: Gpulet) -> list[str]:
        plan = ServingPlan("x", 1, lets, rates_rps={"resnet50": 1.0})
        return problems(plan, services[:1] if all(x.seats[0].model != "bert" for x in lets) else services, gpus)

    assert wrong(let("3g", 0), let("3g", 4)) == []
    for lets in (
        (let("3g", 0), let("2g", 2)), (let("4g", 4),), (let("2g", 1),), (let("7g", 0), let("1g", 6)),
        (let("4g", 0), let("2g", 4), let("1g", 6), let("1g", 7)),
    ):  # fmt: skip
        assert any("MIG does not allow" in x for x in wrong(*lets)), lets
    assert any("2 processes of one service" in x for x in wrong(let("2gx2", 0)))
    mixed = (let("2gx2", 0), let("2gx2", 0, 1, "bert"))
    assert any("2 processes of one service" in x for x in wrong(*mixed))


# Services and GPUs of ParvaGPU's public scenarios (SLO/SLO_req_rate.csv and SLO/SLO_latency.csv at commit 5f3de1e).
MODELS = ("bert", "densenet121", "densenet169", "densenet201", "inceptionv3", "mobilenetv2", "resnet101", "resnet152",
          "resnet50", "vgg16", "vgg19")  # fmt: skip
PUBLIC = (
    (1, (19, 353, 0, 0, 460, 677, 0, 0, 829, 0, 354), (6434, 183, 1, 1, 418, 167, 1, 1, 204, 1, 396)),
    (6, (69, 1091, 949, 739, 1576, 2318, 1140, 815, 2195, 1169, 1010),
     (4294, 126, 150, 119, 282, 113, 144, 146, 138, 227, 265)),
    (15, (1264, 3342, 5260, 2269, 5722, 7513, 2811, 2010, 4196, 2659, 2296),
     (6434, 183, 216, 168, 418, 167, 211, 212, 204, 399, 396)),
)  # fmt: skip


@pytest.mark.parametrize(("gpus", "rates", "slos"), PUBLIC)
def test_public_scenarios_take_the_fewest_gpus(gpus: int, rates: tuple[int, ...], slos: tuple[int, ...]) -> None:
    """ParvaGPU's planner needs 2, 7 and 17 under the same rule (latency at most 0.9 times half the SLO)."""
    services = [Service(m, m, float(r), 0.9 * slo) for m, r, slo in zip(MODELS, rates, slos, strict=True) if r]
    p = Packer(PLANNER, Gpus.uniform(A100, gpus + 2), services, time_limit_s=600)
    plan = p.plan()
    assert plan.feasible
    assert plan.gpus_used == gpus
    assert problems(plan, services, p.gpus) == []
    legal(plan, A100)
    assert math.ceil((gpus + 2) / p.bound(np.array([s.rate_rps for s in services])) - 1e-9) == gpus


def test_profile_files_name_parts() -> None:
    assert parse_profile(profile_to_dict(A100), "x") == A100
    content = profile_to_dict(A100)
    content["partitions"]["2g/50%"] = {"of": "2g", "fraction": 0.5}
    read = parse_profile(content, "x")
    part = read.partition("2g/50%")
    assert (part.instance, part.slots, part.share) == ("2g", 2, 0.5)
    assert part.fraction == pytest.approx(1 / 7, rel=1e-4)
    assert parse_profile(profile_to_dict(read), "x") == read
    for bad, why in (
        ({"of": "5g", "processes": 2}, "has no 'of' itself; '5g' is none"),
        ({"of": "2gx2", "processes": 2}, "has no 'of' itself; '2gx2' is none"),
        ({"of": "2g"}, "needs either a fraction of it or a number of processes"),
        ({"of": "2g", "fraction": 0.5, "processes": 2}, "needs either a fraction of it or a number of processes"),
        ({"of": "2g", "fraction": 0.5, "slots": 1}, "needs either a fraction of it or a number of processes"),
        ({"slots": 1}, "needs a fraction of the GPU"),
        ({"fraction": 0.5, "processes": 2}, "needs a fraction of the GPU"),
    ):
        content["partitions"]["odd"] = bad
        with pytest.raises(InputError, match=why):
            parse_profile(content, "x")


def test_planners_that_keep_gpus_whole_take_whole_instances() -> None:
    plan = Packer(PLANNERS["temporal"], Gpus.uniform(A100, 2), [Service("r", "resnet50", 500.0, 200.0)]).plan()
    assert plan.feasible
    assert {x.partition for x in plan.gpulets} == {"7g"}
