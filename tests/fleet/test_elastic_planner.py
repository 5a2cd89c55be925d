"""Elastic policies in the fleet: who gets which GPUs, what is refused, faults, and a job that is resized for real."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fleet_setting import Setting, work
from hypothesis import given, settings
from hypothesis import strategies as st
from soft_train import undisturbed
from waiting import wait_for

from cotenant.core.errors import InputError
from cotenant.core.events import Kind, Reason
from cotenant.fleet.controller.elastic import ElasticPlanner
from cotenant.fleet.controller.planners import View
from cotenant.fleet.executors.local import LocalExecutor
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import NodeGpu, NodeSpec
from cotenant.fleet.session import Fleet, FleetOptions
from cotenant.fleet.state import UP, Assignment, Attempt, Job
from cotenant.native.libraries import SOFT_DRIVER, library_path
from cotenant.policy.elastic.registry import ELASTIC

FAST, SLOW = "V100-16GB", "K80"
MODELS = {
    "grows": {"rate": {FAST: {"1": 1.0, "2": 1.9, "4": 2.3}, SLOW: {"1": 0.2, "2": 0.39}}},
    "stays": {"rate": {FAST: {"1": 1.0}}},
    "fast": {"rate": {FAST: {"1": 4.0}, SLOW: {"1": 1.0}}},
    "slow": {"rate": {FAST: {"1": 3.0}, SLOW: {"1": 2.0}}},
    "wide": {"rate": {FAST: {"2": 1.0, "4": 1.8}}},
}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profiles") / "elastic.json"
    path.write_text(json.dumps({"models": MODELS, "price": {FAST: 2.0, SLOW: 1.0}}))
    return str(path)


def nodes(*kinds: tuple[int, str]) -> tuple[NodeSpec, ...]:
    """A node of so many GPUs of each model."""
    return tuple(
        NodeSpec(f"node-{i}", 4.0 * n, n * 10**10, tuple(NodeGpu(f"n{i}-{k}", gpu, 1 << 34) for k in range(n)))
        for i, (n, gpu) in enumerate(kinds)
    )


def job(row: int, model: str, gpus: float = 1.0, **more: Any) -> Job:
    found = Job(row, f"j{row}", JobSpec(f"j{row}", ("true",), gpus, model=model, iterations=1000.0, **more), 0.0)
    found.arrived = True
    return found


def holding(row: int, model: str, held: Assignment, **more: Any) -> Job:
    found = job(row, model, **more)
    found.attempt, found.n = Attempt(0, held, UP, started_s=0.0), 1
    return found


def shares(assignment: Assignment) -> list[str]:
    return [share.uuid for place in assignment.places for share in place.gpus]


def test_a_job_alone_doubles_each_round_and_halves_when_another_comes(profiles: str) -> None:
    planner, here = ElasticPlanner("sia", profiles), nodes((4, FAST))
    only = job(0, "grows")
    sizes = []
    for at_s in (0.0, 60.0, 120.0, 180.0):
        held = planner.plan(View(at_s, here, (only,))).assign["j0"]
        sizes.append(len(shares(held)))
        only = holding(0, "grows", held)
    assert sizes == [1, 2, 4, 4]
    plan = planner.plan(View(240.0, here, (only, job(1, "stays"))))
    assert [len(shares(plan.assign[name])) for name in ("j0", "j1")] == [2, 1]
    assert plan.assign["j0"].speed == pytest.approx(1.9)
    assert (plan.assign["j0"].cpus, plan.assign["j0"].memory_bytes) == (8.0, 2 * 10**10)


def test_gpu_models_go_to_whom_they_help(profiles: str) -> None:
    plan = ElasticPlanner("gavel-cost", profiles).plan(
        View(0.0, nodes((1, SLOW), (1, FAST)), (job(0, "slow"), job(1, "fast")))
    )
    # Per price, the fast model is worth 4/2 for j0 and 1/1 for j1, the slow model 3/2 and 2/1.
    assert {name: shares(a) for name, a in plan.assign.items()} == {"j0": ["n0-0"], "j1": ["n1-0"]}


def test_a_gang_is_on_the_fullest_node_that_holds_it_else_on_few(profiles: str) -> None:
    planner, here = ElasticPlanner("gavel", profiles), nodes((4, FAST), (3, FAST), (2, FAST))
    plan = planner.plan(View(0.0, here, (job(0, "grows", 4.0), job(1, "grows", 2.0), job(2, "grows", 1.0))))
    at = {name: [p.node for p in a.places] for name, a in plan.assign.items()}
    assert at == {"j0": ["node-0"], "j1": ["node-2"], "j2": ["node-1"]}
    wide = planner.plan(View(0.0, nodes((2, FAST), (1, FAST), (1, FAST)), (job(3, "grows", 4.0),)))
    assert sorted(p.node for p in wide.assign["j3"].places) == ["node-0", "node-1", "node-2"]


def test_between_rounds_and_for_pinned_jobs_nothing_is_taken_away(profiles: str) -> None:
    planner, here = ElasticPlanner("sia", profiles), nodes((4, FAST))
    first = planner.plan(View(0.0, here, (job(0, "grows"),)))
    running = holding(0, "grows", first.assign["j0"])
    early = planner.plan(View(10.0, here, (running, job(1, "stays")), early=True))
    assert early.assign["j0"] is first.assign["j0"]
    assert not set(shares(early.assign["j1"])) & set(shares(early.assign["j0"]))
    pinned = planner.plan(View(60.0, here, (running, job(1, "stays")), pinned=frozenset(["j0"])))
    assert pinned.assign["j0"] is first.assign["j0"]


def test_the_batch_of_the_best_goodput_goes_with_the_gpus(tmp_path: Path) -> None:
    """Noise without end: twice the batch is twice the progress, so the largest batch is the best one."""
    steps = {FAST: {"1": [[4, 8], [1.0, 1.5], [0.0, 0.0]], "2": [[4, 8], [1.0, 1.5], [0.0, 0.0]]}}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"models": {"m": {"batch": [4, 16], "noise": [1e12], "steps": steps, "work": 80.0}}}))
    planner, here = ElasticPlanner("sia"), nodes((2, FAST))
    one = planner.plan(View(0.0, here, (job(0, "", profile=str(path)),))).assign["j0"]
    two = planner.plan(View(60.0, here, (holding(0, "", one, profile=str(path)),))).assign["j0"]
    # one GPU processes 16 examples in two passes of 8, which takes as long as two batches of 8
    assert [(len(shares(a)), a.batch) for a in (one, two)] == [(1, one.batch), (2, 16)]
    assert one.batch in (8, 16)


@pytest.mark.parametrize(
    ("policy", "model", "gpus", "field"),
    [("sia", "unheard-of", 1.0, "model"), ("sia", "grows", 0.5, "gpus"), ("gavel", "grows", 3.0, "gpus"),
     ("gavel", "stays", 2.0, "gpus")],
)  # fmt: skip
def test_what_can_never_run_is_refused(profiles: str, policy: str, model: str, gpus: float, field: str) -> None:
    with pytest.raises(InputError) as caught:
        ElasticPlanner(policy, profiles).check(job(0, model, gpus), nodes((4, FAST)))
    assert caught.value.field == field


def test_a_policy_that_packs_is_refused() -> None:
    with pytest.raises(InputError, match="packs two jobs on a GPU"):
        ElasticPlanner("tesserae")


def test_a_model_without_a_price_does_not_stop_a_policy_that_needs_prices(tmp_path: Path) -> None:
    path = tmp_path / "elastic.json"
    path.write_text(json.dumps({"models": MODELS, "price": {FAST: 2.0}}))
    planner, here, only = ElasticPlanner("gavel-cost", str(path)), nodes((1, FAST), (1, SLOW)), job(0, "stays")
    planner.check(only, here)
    assert shares(planner.plan(View(0.0, here, (only,))).assign["j0"]) == ["n0-0"]
    assert next(iter(planner.policy.known.values())).tolist() == [[0.0, 1.0]]  # type: ignore[attr-defined]  # K80, V100


def test_gavel_divides_the_gpus_that_are_there_now(profiles: str) -> None:
    """Each of two equal jobs gets half of the time of one GPU, and all of its time once a second GPU is there."""
    planner, jobs = ElasticPlanner("gavel", profiles), (job(0, "stays"), job(1, "stays"))
    found = []
    for gpus in (1, 2):
        planner.plan(View(60.0 * gpus, nodes((gpus, FAST)), jobs))
        found.append(next(iter(planner.policy.known.values())).tolist())  # type: ignore[attr-defined]
    assert found == [[[0.5]], [[1.0]]]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(sorted(n for n, e in ELASTIC.items() if not e.packs)))
def test_every_plan_holds(profiles: str, seed: int, policy: str) -> None:
    """Drawn jobs and nodes over six rounds, in some of which a node is away: no GPU twice, only measured
    configurations, one GPU model a job, GPUs kept where all jobs keep their configurations, and a job
    without GPUs has a reason."""
    draw = random.Random(seed)
    kinds = [(draw.randint(1, 4), draw.choice((FAST, SLOW))) for _ in range(3)]
    here, planner = nodes(*kinds), ElasticPlanner(policy, profiles)
    room = Counter(gpu.model for node in here for gpu in node.gpus)
    drawn = [job(i, draw.choice(list(MODELS)), draw.choice((1.0, 1.0, 2.0, 4.0)), priority=draw.randint(0, 1))
             for i in range(draw.randint(1, 8))]  # fmt: skip
    jobs = []
    for one in drawn:
        try:
            planner.check(one, here)
        except InputError:
            continue
        jobs.append(one)
    model_of = {gpu.uuid: gpu.model for node in here for gpu in node.gpus}
    for tick in range(6):
        there = here if draw.random() < 0.7 else tuple(draw.sample(here, 2))
        if policy == "pollux":  # one GPU model at a time
            there = tuple(node for node in there if node.gpus[0].model == there[0].gpus[0].model)
        plan = planner.plan(View(60.0 * tick, there, tuple(jobs), early=draw.random() < 0.3))
        held = [uuid for a in plan.assign.values() for uuid in shares(a)]
        assert len(held) == len(set(held)) <= sum(room.values())
        assert set(plan.assign) | set(plan.waiting) == {j.id for j in jobs}
        assert not set(plan.assign) & set(plan.waiting)
        for one in jobs:
            if one.id in plan.assign:
                by_model = Counter(model_of[uuid] for uuid in shares(plan.assign[one.id]))
                ((gpu, count),) = by_model.items()
                assert str(count) in MODELS[one.spec.model]["rate"][gpu]
                assert count == one.spec.gpus or not ELASTIC[policy].rigid
        sizes = {j.id: len(shares(j.attempt.assignment)) for j in jobs if j.attempt is not None}
        if {name: len(shares(a)) for name, a in plan.assign.items()} == sizes:
            models = {j.id: {model_of[u] for u in shares(j.attempt.assignment)} for j in jobs if j.attempt is not None}
            up = {gpu.uuid for node in there for gpu in node.gpus}
            stay = all(up.issuperset(shares(j.attempt.assignment)) for j in jobs if j.attempt is not None)
            if stay and all({model_of[u] for u in shares(a)} == models[name] for name, a in plan.assign.items()):
                assert all(plan.assign[j.id] is j.attempt.assignment for j in jobs if j.attempt is not None)
        jobs = [
            holding(j.row, j.spec.model, plan.assign[j.id], gpus=j.spec.gpus, priority=j.spec.priority)
            if j.id in plan.assign else job(j.row, j.spec.model, j.spec.gpus, priority=j.spec.priority)
            for j in jobs if draw.random() < 0.9
        ]  # fmt: skip
        for one in jobs:
            one.done = draw.random()


@pytest.mark.parametrize("seed", range(4))
def test_elastic_jobs_end_once_whatever_is_killed(tmp_path: Path, profiles: str, seed: int) -> None:
    """The controller is killed at any exchange or commit while jobs grow and shrink."""
    here = nodes((4, FAST), (2, FAST))
    setting = Setting(tmp_path, seed=seed, nodes=here, kill=0.01, planner=lambda: ElasticPlanner("sia", profiles))
    kill, setting.kill, setting.executor.kill = setting.kill, 0.0, 0.0
    ids = setting.submit(*(work(f"j{i}", 8.0 + i, model="grows") for i in range(5)))
    setting.kill = setting.executor.kill = kill
    setting.run(60.0)
    setting.kill = setting.executor.kill = 0.0
    setting.run(120.0, step_s=0.2)
    assert {name: setting.state(name) for name in ids} == dict.fromkeys(ids, "finished")
    assert sorted(setting.world.finished) == sorted(ids)
    moved = [setting.events(name).count(Kind.START) + setting.events(name).count(Kind.RESUME) for name in ids]
    assert max(moved) > 1  # at least one job was resized
    setting.kill_controller()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the software GPU")
def test_a_live_job_is_resized_through_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it gets four GPUs; a second job takes some of them; its curve is that of a job that was never stopped. With
    noise 8 the least batch per GPU is best: 4 x 12 / 12 on one against 8 x 12 / 16."""
    steps = {FAST: {str(n): [[4, 8], [4.0, 7.0], [0.0, 0.0]] for n in (1, 2, 4)}}
    profile = tmp_path / "speeds.json"
    profile.write_text(json.dumps({"models": {"m": {"batch": [4, 32], "noise": [8.0], "steps": steps}}}))
    here = nodes((4, FAST))
    monkeypatch.setenv("COTENANT_BENCH_LIBRARY", str(library_path(SOFT_DRIVER)))

    def spec(name: str, count: int) -> JobSpec:
        program = str(Path(__file__).with_name("elastic_job.py"))
        env = {"COTENANT_SOFTGPU_STATE": str(tmp_path / f"{name}.gpu")}
        command = (sys.executable, program, "8000", str(count), str(tmp_path / name))
        return JobSpec(name, command, model="m", profile=str(profile), iterations=1e6, env=env, processes="node")

    options = FleetOptions(folder=tmp_path / "fleet", lease_s=2.0, grace_s=20.0, planner=ElasticPlanner("pollux"))
    with Fleet(options, LocalExecutor(options.folder, here)) as fleet:
        fleet.submit(spec("first", 5000))
        lines = lambda: (tmp_path / "first").read_text().splitlines() if (tmp_path / "first").exists() else []  # noqa: E731
        wait_for(lambda: any(json.loads(line)[2] == 4 for line in lines()), what="it has four GPUs")
        fleet.submit(spec("second", 300))
        assert fleet.wait(240)
        rows = {row["name"]: row for row in fleet.queue()}
        record = fleet.record()
    assert {name: (row["state"], row["failures"]) for name, row in rows.items()} == {
        "first": ("finished", 0), "second": ("finished", 0),
    }  # fmt: skip
    curve = [json.loads(line) for line in (tmp_path / "first").read_text().splitlines()]
    assert [point[:2] for point in curve] == undisturbed(5000)  # each step exactly once, as in an undisturbed run
    widths = [point[2] for point in curve]
    assert set(widths) <= {1, 2, 4}
    # the width changes at least once; at which steps depends on how fast the programs start
    assert len(set(widths)) > 1
    assert all(batch == 4 * width for _, _, width, batch, _ in curve)
    held = record.rounds["gpus_held"].to_list()
    assert max(held) <= 4
    assert (record.events.reason == Reason.REPLACED).sum() >= 1
