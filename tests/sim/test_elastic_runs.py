"""Elastic runs on the compiled engine: times worked out by hand, and what must hold of every record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotenant.core.cluster import Cluster, NodeGroup
from cotenant.core.errors import InputError
from cotenant.core.events import Kind
from cotenant.core.gpus import CATALOG
from cotenant.core.metrics.summary import summarise
from cotenant.core.record.record import Record
from cotenant.core.work import Jobs, Trace
from cotenant.policy.elastic.registry import ELASTIC
from cotenant.policy.elastic.view import NONE
from cotenant.profiles.training.elastic import load_elastic
from cotenant.sim.jobs.elastic import ElasticOptions, keeps_gpu, run_elastic

FAST, SLOW = "V100-16GB", "K80"


def profile(folder: Path, beside: Any = None, **models: Any) -> str:
    path = folder / "elastic.json"
    path.write_text(json.dumps({"models": models, "price": {FAST: 2.0, SLOW: 1.0}, "beside": beside or {}}))
    return str(path)


def cluster(*groups: tuple[int, int, str]) -> Cluster:
    return Cluster(tuple(NodeGroup(n, gpus, CATALOG[gpu], 4.0 * gpus, gpus * 10**10) for n, gpus, gpu in groups))


def trace(*jobs: tuple[str, float, float, float]) -> Trace:
    """Rows of model, arrival, GPUs, work."""
    rows = Jobs.build(
        len(jobs), id=[f"j{i}" for i in range(len(jobs))], model=[j[0] for j in jobs], arrival_s=[j[1] for j in jobs],
        gpus=[j[2] for j in jobs], iterations=[j[3] for j in jobs],
    )  # fmt: skip
    return Trace(rows, "test")


def finish_s(record: Record) -> list[float]:
    done = record.events.kind == Kind.FINISH
    times = dict(zip(record.events.job[done].tolist(), record.events.time_s[done].tolist(), strict=True))
    return [times[job] for job in range(record.jobs.height)]


def test_a_profile_may_state_a_restart_of_no_time(tmp_path: Path) -> None:
    name = profile(tmp_path, m={"rate": {FAST: {"1": 1.0}}, "restart_s": 0})
    assert load_elastic(name).models["m"].restart_s == 0



@pytest.mark.parametrize("policy", ["gavel", "sia", "sia-fast", "pollux", "tesserae"])
def test_progress_is_told_in_every_round(tmp_path: Path, policy: str) -> None:
    """A policy may take seconds per round, and the events of a whole small run fit the engine's buffers."""
    name = profile(tmp_path, m={"rate": {FAST: {"1": 1.0}}, "restart_s": 1.0})
    jobs = trace(*(("m", 0.0, 1.0, 25.0 * (k + 1)) for k in range(3)))
    told: list[tuple[int, int]] = []
    options = ElasticOptions(policy, profiles=name, lease_s=10.0)
    _, outcome = run_elastic(jobs, cluster((1, 4, FAST)), options, progress=lambda done, of: told.append((done, of)))
    assert len(told) > outcome.solver["solves"] >= 3  # and once at the end
    assert told == sorted(told)
    assert {done for done, _ in told} == {0, 1, 2, 3}
    assert {of for _, of in told} == {3}


def test_a_job_alone_grows_by_doubling(tmp_path: Path) -> None:
    """1, 2, then 4 GPUs at 1, 1.5 and 2 units a second, rounds of 10 s, restarts of 2 s: 10 and 8 x 1.5 in two rounds,
    the other 28 at 2 a second after 2 s more."""
    name = profile(tmp_path, m={"rate": {FAST: {"1": 1.0, "2": 1.5, "4": 2.0}}, "restart_s": 2.0})
    record, outcome = run_elastic(
        trace(("m", 0.0, 1.0, 50.0)), cluster((1, 4, FAST)), ElasticOptions("sia", profiles=name, lease_s=10.0)
    )
    # r is the useful part of the time if the job restarts now. At age 10 with a restart of 2 s, r = 10/12 and
    # 1.5 x r > 1, so the job grows. At age 20, r = 18/22 and 2 x r > 1.5, so it grows again.
    assert finish_s(record) == pytest.approx([10 + 10 + 2 + 28 / 2])
    assert outcome.solver["worst_gap"] <= 1e-4


def test_speed_follows_the_phases(tmp_path: Path) -> None:
    """Noise 0: a batch of 8 has half the efficiency of 4; noise without end: the same. So two GPUs help only later."""
    steps = {FAST: {"1": [[4], [1.0], [0.0]], "2": [[4], [1.0], [0.0]]}}
    name = profile(tmp_path, m={"batch": [4, 8], "noise": [1e-9, 1e12], "steps": steps, "work": 80.0})
    model = load_elastic(name).models["m"]
    assert model.rate[FAST][1] == pytest.approx([4.0, 4.0])
    assert model.rate[FAST][2] == pytest.approx([4.0, 8.0])
    record, _ = run_elastic(
        trace(("m", 0.0, 1.0, 80.0)), cluster((1, 2, FAST)), ElasticOptions("sia", profiles=name, lease_s=5.0)
    )
    # 20 units in each of two rounds on one GPU, because a restart would gain nothing; then 40 units at 8 a second.
    assert finish_s(record) == pytest.approx([10 + 5])


def test_gavel_gives_the_fast_model_to_whom_it_helps(tmp_path: Path) -> None:
    name = profile(
        tmp_path, a={"rate": {FAST: {"1": 4.0}, SLOW: {"1": 1.0}}}, b={"rate": {FAST: {"1": 3.0}, SLOW: {"1": 2.0}}}
    )
    record, _ = run_elastic(
        trace(("a", 0.0, 1.0, 400.0), ("b", 0.0, 1.0, 200.0)), cluster((1, 1, FAST), (1, 1, SLOW)),
        ElasticOptions("gavel-cost", profiles=name, lease_s=10.0),
    )  # fmt: skip
    # Per price, the fast model is worth 4/2 for a and 1/1 for b, the slow model 3/2 and 2/1.
    assert finish_s(record) == pytest.approx([100.0, 100.0])


def test_a_gang_apart_runs_at_the_measured_part(tmp_path: Path) -> None:
    """Two nodes with one free GPU each: the gang spans them and keeps 40 % of its speed."""
    name = profile(
        tmp_path, gang={"rate": {FAST: {"2": 2.0}}, "apart": {FAST: {"2": 0.8}}}, one={"rate": {FAST: {"1": 1.0}}}
    )
    singles = (("one", 0.0, 1.0, work) for work in (1000.0, 10.0, 1000.0))
    jobs = trace(*singles, ("gang", 20.0, 2.0, 16.0))
    record, _ = run_elastic(jobs, cluster((2, 2, FAST)), ElasticOptions("gavel", profiles=name, lease_s=10.0))
    # The single-GPU jobs keep their GPUs, one on each node, because the gang finds room beside them.
    assert finish_s(record)[3] == pytest.approx(20 + 16 / 0.8)


def test_two_jobs_share_a_gpu_at_the_measured_speeds(tmp_path: Path) -> None:
    """One GPU, rounds of 10 s, one unit a second alone: b comes at 10 s and is packed beside a, 60 and 70 % as fast."""
    name = profile(
        tmp_path, {FAST: {"models": ["a", "b"], "fraction": [[0, 0.6], [0.7, 0]]}},
        a={"rate": {FAST: {"1": 1.0}}}, b={"rate": {FAST: {"1": 1.0}}},
    )  # fmt: skip
    record, outcome = run_elastic(
        trace(("a", 0.0, 1.0, 52.0), ("b", 10.0, 1.0, 60.0)), cluster((1, 1, FAST)),
        ElasticOptions("tesserae", profiles=name, lease_s=10.0, restart_s=5.0),
    )  # fmt: skip
    assert outcome.solver["pairs"] == 7
    # a: 10 s alone and 42 / 0.6 = 70 s together. b: 49 units until 80 s, then 11 alone, without a restart.
    assert finish_s(record) == pytest.approx([80.0, 91.0])
    held = record.rounds["gpus_held"].to_list()
    assert held == pytest.approx([1.0] * len(held))
    assert summarise(record)["moves"] == 0
    alone, _ = run_elastic(
        trace(("a", 0.0, 1.0, 52.0), ("b", 10.0, 1.0, 60.0)), cluster((1, 1, FAST)),
        ElasticOptions("tesserae-alone", profiles=name, lease_s=10.0, restart_s=5.0),
    )  # fmt: skip
    assert finish_s(alone) == pytest.approx([52.0, 60.0 + 60.0])


def test_of_two_that_part_the_host_keeps_the_gpu() -> None:
    same, none = np.ones(4, np.bool_), [NONE] * 4
    # Job 1 was the second on the GPU of job 0. The four cases: it now goes alone; it stays; it becomes the second on
    # the GPU of job 2; job 0 leaves.
    assert keeps_gpu(same, np.array([NONE, 0, NONE, NONE]), np.array(none)).tolist() == [True, False, True, True]
    stay = np.array([NONE, 0, NONE, NONE])
    assert keeps_gpu(same, stay, stay).tolist() == [True] * 4
    assert keeps_gpu(same, stay, np.array([NONE, 2, NONE, NONE])).tolist() == [True, False, True, True]
    gone = np.array([False, True, True, True])
    assert keeps_gpu(gone, stay, np.array(none)).tolist() == [False, True, True, True]
    assert keeps_gpu(gone, stay, stay).tolist() == [False, False, True, True]


def test_slowdown_refers_to_the_clusters_gpu(tmp_path: Path) -> None:
    """100 s on the trace's GPU are 400 s on the cluster's, alone: a slowdown of 1."""
    name = profile(tmp_path, m={"rate": {FAST: {"1": 4.0}, SLOW: {"1": 1.0}}})
    jobs = trace(("m", 0.0, 1.0, np.nan))
    jobs.jobs.duration_s[:] = 100.0
    for groups in (cluster((1, 1, SLOW)), cluster((1, 1, SLOW), (1, 1, FAST))):
        options = ElasticOptions("sia", profiles=name, trace_gpu=FAST, lease_s=10.0, restart_s=0.0)
        record, _ = run_elastic(jobs, groups, options)
        assert record.job("isolated_s").tolist() == pytest.approx([400.0])
        summary = summarise(record)
        assert summary["slowdown"]["mean"] == pytest.approx(1.0 if len(groups.groups) == 1 else 0.25)


def test_a_job_can_use_the_cpu_of_every_gpu_that_it_grows_to(tmp_path: Path) -> None:
    name = profile(tmp_path, m={"rate": {FAST: {"1": 1.0, "2": 2.0, "4": 4.0}}})
    options = ElasticOptions("sia", profiles=name, lease_s=10.0, restart_s=0.0)
    record, _ = run_elastic(trace(("m", 0.0, 1.0, 190.0)), cluster((1, 4, FAST)), options)
    summary = summarise(record)
    # a quarter of the node for 10 s, half of it for 10 s, then all of it for 40 s
    assert summary["utilisation"]["gpu"] == pytest.approx((0.25 * 10 + 0.5 * 10 + 40) / 60)
    assert summary["utilisation"]["cpu"] == pytest.approx(summary["utilisation"]["gpu"])
    assert summary["utilisation"]["memory"] == pytest.approx(summary["utilisation"]["gpu"])


@pytest.mark.parametrize("policy", list(ELASTIC))
def test_every_job_ends_and_no_gpu_is_held_twice(policy: str) -> None:
    entry = ELASTIC[policy]
    profiles = load_elastic(entry.profiles)
    rng = np.random.default_rng(7)
    if entry.rigid:
        groups = cluster((3, 4, FAST), (2, 4, "P100"), (2, 4, SLOW))
        names = [n for n, m in profiles.models.items() if 4 in m.rate[FAST] and 4 in m.rate[SLOW]]
    elif policy == "pollux":
        groups, names = cluster((6, 4, "T4")), ["cifar10", "bert", "deepspeech2"]
    else:
        groups = cluster((3, 4, "T4"), (1, 8, "RTX2080Ti"), (1, 8, "A100-40GB"))
        names = ["cifar10", "bert", "deepspeech2"]
    n = 40
    rows = Jobs.build(
        n, id=[f"j{i}" for i in range(n)], model=[names[i] for i in rng.integers(0, len(names), n)],
        arrival_s=np.sort(rng.uniform(0, 4000, n)), gpus=rng.choice([1.0, 2.0, 4.0], n),
        duration_s=rng.uniform(100, 4000, n), priority=rng.integers(0, 2, n),
    )  # fmt: skip
    record, outcome = run_elastic(Trace(rows, "test"), groups, ElasticOptions(policy, restart_s=20.0))
    summary = summarise(record)
    assert summary["jobs_completed"] == n
    assert 0 < summary["allocation"]["gpu"] <= 1 + 1e-9
    assert outcome.solver.get("worst_gap", 0.0) <= 0.25
    held_most = float((record.rounds["gpus_held"]).max())
    assert held_most <= groups.total_gpus
    nodes_never_overfull(record, [g.gpus for g in groups.groups for _ in range(g.count)])


def nodes_never_overfull(record: Record, nodes: list[int]) -> None:
    where = record.placements
    assert where is not None
    held: dict[int, dict[int, float]] = {}
    for i, job in enumerate(record.events.job.tolist()):
        held[job] = dict(where.at(i))
        end = i + 1 == len(record.events.job) or record.events.time_s[i + 1] > record.events.time_s[i]
        if end:
            total = np.zeros(len(nodes))
            for mine in held.values():
                for node, part in mine.items():
                    total[node] += part
            assert (total <= np.array(nodes) + 1e-6).all()


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    name = profile(tmp_path, m={"rate": {FAST: {"1": 1.0, "2": 2.0}}})
    with pytest.raises(InputError, match=r"asks for 3 GPUs; its model 'm' was measured on 1, 2 GPUs"):
        run_elastic(trace(("m", 0.0, 3.0, 1.0)), cluster((1, 4, FAST)), ElasticOptions("gavel", profiles=name))
    single = profile(tmp_path, m={"rate": {FAST: {"1": 1.0}}})
    with pytest.raises(InputError, match=r"was measured on 1 GPU$"):
        run_elastic(trace(("m", 0.0, 3.0, 1.0)), cluster((1, 4, FAST)), ElasticOptions("gavel", profiles=single))
    name = profile(tmp_path, m={"rate": {FAST: {"1": 1.0, "2": 2.0}}})
    with pytest.raises(InputError, match=r"model 'x' of job j0 has no elastic profile; known: m"):
        run_elastic(trace(("x", 0.0, 1.0, 1.0)), cluster((1, 4, FAST)), ElasticOptions("sia", profiles=name))
    with pytest.raises(InputError, match=r"know none of the cluster's GPU models \(A30\)"):
        run_elastic(trace(("m", 0.0, 1.0, 1.0)), cluster((1, 4, "A30")), ElasticOptions("sia", profiles=name))
    with pytest.raises(InputError, match=r"unknown policy 'siam'"):
        run_elastic(trace(("m", 0.0, 1.0, 1.0)), cluster((1, 4, FAST)), ElasticOptions("siam", profiles=name))
