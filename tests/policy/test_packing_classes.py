"""Plans that keep classes apart: no gpulet is shared by a latency-sensitive and a best-effort service."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InputError
from cotenant.core.serving import Gpulet, Seat, Service, ServingPlan
from cotenant.policy.serving.packing.check import problems
from cotenant.policy.serving.packing.planners import Packer
from cotenant.policy.serving.packing.replan import renamed
from cotenant.policy.serving.packing.specs import KEPT_APART, PLANNERS
from cotenant.policy.serving.packing.tables import Gpus
from cotenant.profiles.serving.latency_files import load_profile
from cotenant.serving.config.planning import build_problem
from cotenant.serving.config.services import parse_services, with_scheme
from cotenant.serving.planning.planner import Ask, Planner
from cotenant.sim.serving.verify import plan_verified
from cotenant.workloads.requests.scenarios import SLO_MS

PROFILE = load_profile("RTX2080Ti")
MODELS = ("lenet1", "lenet2", "googlenet", "mnasnet1_0")


def services(best_effort: frozenset[str]) -> list[Service]:
    return [Service(m, m, 50.0, 4 * SLO_MS.get(m, 20.0), latency_sensitive=m not in best_effort) for m in MODELS]


@cache
def packer(planner: str, best_effort: frozenset[str], gpus: int, apart: bool = True) -> Packer:
    spec = PLANNERS[planner]
    profile = replace(PROFILE, models={m: PROFILE.models[m.replace("lenet2", "lenet1")] for m in MODELS})
    return Packer(spec.apart() if apart else spec, Gpus.uniform(profile, gpus), services(best_effort))


def mixed(plan: ServingPlan, best_effort: frozenset[str]) -> list[str]:
    """Gpulets that hold services of both classes."""
    classes = {let.name: {seat.service in best_effort for seat in let.seats} for let in plan.gpulets}
    return [name for name, found in classes.items() if len(found) > 1]


best_effort_st = st.sampled_from([frozenset({"lenet2"}), frozenset({"googlenet", "lenet1"}), frozenset({"mnasnet1_0"})])
rates_st = st.lists(st.floats(1.0, 300.0), min_size=4, max_size=4)


@settings(max_examples=40, deadline=None)
@given(planner=st.sampled_from(list(PLANNERS)), best_effort=best_effort_st, gpus=st.integers(1, 3), rates=rates_st)
def test_no_gpulet_holds_both_classes(planner: str, best_effort: frozenset[str], gpus: int, rates: list[float]) -> None:
    p = packer(planner, best_effort, gpus)
    plan = p.plan(rates)
    assert mixed(plan, best_effort) == []
    if plan.feasible or planner not in ("greedy", "gpulet"):
        wanted = [replace(s, rate_rps=r) for s, r in zip(p.services, rates, strict=True)]
        assert problems(plan, wanted, p.gpus) == []
    if KEPT_APART in plan.notes:
        assert not plan.feasible
        assert packer(planner, best_effort, gpus, apart=False).plan(rates).feasible


@settings(max_examples=20, deadline=None)
@given(
    planner=st.sampled_from(["temporal", "gpulet-interference"]), best_effort=best_effort_st,
    before=rates_st, after=rates_st,
)  # fmt: skip
def test_a_replan_takes_a_shared_gpulet_apart(
    planner: str, best_effort: frozenset[str], before: list[float], after: list[float]
) -> None:
    """The plan in force may mix (made without a scheme, or by hand); the next one does not."""
    old = packer(planner, best_effort, 3, apart=False).plan(before)
    p = packer(planner, best_effort, 3)
    new = renamed(p.plan(after, start=old), old, p.gpus)
    assert mixed(new, best_effort) == []
    wanted = [replace(s, rate_rps=r) for s, r in zip(p.services, after, strict=True)]
    assert problems(new, wanted, p.gpus) == []


def test_a_replan_leaves_the_latency_sensitive_service_where_it_is() -> None:
    best_effort = frozenset({"lenet1"})
    p = packer("gpulet-interference", best_effort, 2)
    seats = (Seat("lenet1", "lenet1", 1, 10.0), Seat("lenet2", "lenet2", 1, 10.0))
    rest = (Seat("googlenet", "googlenet", 1, 5.0), Seat("mnasnet1_0", "mnasnet1_0", 1, 5.0))
    lets = (Gpulet(0, PROFILE.gpu, "50%", 50.0, 0, 20.0, seats), Gpulet(1, PROFILE.gpu, "100%", 100.0, 0, 60.0, rest))
    new = p.plan([10.0, 10.0, 5.0, 5.0], start=ServingPlan("by hand", 2, lets))
    assert new.feasible
    at = {seat.service: (let.gpu, let.partition) for let in new.gpulets for seat in let.seats}
    assert at["lenet2"] == (0, "50%")
    assert at["googlenet"] == at["mnasnet1_0"] == (1, "100%")
    assert at["lenet1"][0] == 0  # in the half that was free, in a separate gpulet
    assert mixed(new, best_effort) == []


def test_verified_plans_are_verified_apart_too() -> None:
    best_effort = frozenset({"googlenet"})
    p = packer("gpulet-interference", best_effort, 2)
    assert mixed(packer("gpulet-interference", best_effort, 2, apart=False).plan(), best_effort)
    found = plan_verified(p, {PROFILE.gpu: p.gpus.profiles[0]}, 1.2, 0.99)
    assert found.holds(0.99)
    assert mixed(found.plan, best_effort) == []


def test_what_only_the_rule_leaves_out_is_said() -> None:
    """One whole GPU, two small services: in turns they fit, apart they do not."""
    both = [Service("chat", "lenet1", 20.0, 100.0), Service("night", "googlenet", 5.0, 500.0, latency_sensitive=False)]
    spec, gpus = PLANNERS["temporal"], Gpus.uniform(PROFILE, 1)
    assert Packer(spec, gpus, both).plan().feasible
    apart = Packer(spec.apart(), gpus, both)
    plan = apart.plan()
    assert [x.service for x in plan.left_out] == ["night"]
    assert plan.notes == (KEPT_APART,)
    # This rate is too high with and without the rule, so the note about the rule must not appear.
    assert apart.plan([1e5, 1e5]).notes == ()
    assert Packer(spec.apart(), Gpus.uniform(PROFILE, 2), both).plan().feasible


FILE = {
    "gpus": {"count": 1, "model": "RTX2080Ti"},
    "services": [
        {"name": "chat", "model": "lenet1", "rate_rps": 20, "slo_ms": 100},
        {"name": "night", "model": "googlenet", "rate_rps": 5, "slo_ms": 500, "class": "best-effort"},
    ],
}


@pytest.mark.parametrize(
    ("content", "option", "apart"),
    [
        (FILE, None, False),
        (FILE, "tidal", True),
        (FILE | {"colocation": "orion"}, None, True),
        (FILE | {"colocation": "orion"}, "none", False),
    ],
)
def test_server_and_plans_take_the_rule_from_file_or_option(
    content: dict[str, object], option: str | None, apart: bool
) -> None:
    problem = build_problem(with_scheme(parse_services(content), option))
    assert problem.planner().rules.apart is apart
    plan = Planner(problem, "gpulet-interference").answer(Ask({"chat": 20.0, "night": 5.0}, (0,), 1, verify=False))
    assert plan.feasible
    assert len(plan.gpulets) == (2 if apart else 1)


def test_a_scheme_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="unknown co-location scheme 'tidel'"):
        parse_services(FILE | {"colocation": "tidel"})
