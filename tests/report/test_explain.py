"""One job's life in words: golden sentences for runs written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sample_records import cluster, hand_record, random_record

from cotenant.core.errors import InputError
from cotenant.core.events import Kind, Reason
from cotenant.core.record.record import Record
from cotenant.report.explain import explain, notable_jobs

JOBS: list[dict[str, Any]] = [
    {"id": "a", "arrival_s": 0.0, "gpus": 4.0, "model": "res50", "tenant": "vc1", "isolated_s": 100.0},
    {"id": "b", "arrival_s": 600.0, "gpus": 8.0, "model": "", "tenant": "", "isolated_s": 3600.0},
]
ROUND = {"gpus_wanted": 0, "gpus_free_whole_nodes": 0, "cpu_milli_held": 0, "memory_mb_held": 0, "running": 1}


def lines(events: list[tuple[Any, ...]], job: str = "a", jobs: list[dict[str, Any]] = JOBS, **more: Any) -> list[str]:
    every_event = more.pop("every_event", False)
    return explain(hand_record(jobs, events, label="fifo + tune", **more), job, every_event).lines()


def run(time_s: float, kind: Kind, reason: Reason, where: list[tuple[int, float]], cpus: float = 12) -> tuple[Any, ...]:
    return (time_s, 0, kind, reason, cpus, 250, 1.0, where)


START = run(300, Kind.START, Reason.IN_ORDER, [(0, 4.0)])
DONE = (7500.0, 0, Kind.FINISH, Reason.DONE)


def test_waits_starts_moves_grows_gives_way_and_finishes() -> None:
    got = lines(
        [
            (0.0, 0, Kind.ARRIVE, Reason.NONE),
            (0.0, 0, Kind.WAIT, Reason.GPUS_FULL),
            START,
            run(900, Kind.MOVE, Reason.REPLACED, [(0, 1.0), (1, 3.0)]),
            (1500.0, 0, Kind.RESIZE, Reason.GOT_IDEAL, 24, 250, 1.5, [(0, 1.0), (1, 3.0)]),
            (2100.0, 0, Kind.PREEMPT, Reason.OUTRANKED),
            (3900.0, 0, Kind.RESUME, Reason.RESERVED, 12, 250, 1.0, [(1, 4.0)]),
            DONE,
        ],
        rounds=[
            ROUND | {"time_s": 0, "gpus_held": 8, "waiting": 3},
            ROUND | {"time_s": 2100, "gpus_held": 7, "waiting": 1},
        ],
    )
    # Waiting: 300 + 1800 = 2100 s = 35 min. Running: 1800 + 3600 = 5400 s = 90 min. Together 7500 s = 125 min = 2.08 h,
    # which is 75 x 100 s.
    assert got == [
        "a under fifo + tune: res50, 4 GPUs, tenant vc1",
        "  0:00:00  arrived",
        "  0:00:00  waited 5 min: every GPU was held by jobs earlier in the order (8 of 8 GPUs held, 3 jobs waiting)",
        "  0:05:00  started on 4 GPUs of node 0 with 12 CPUs and 250 GB, at the speed of a GPU-proportional share",
        "  0:15:00  moved from node 0 to nodes 0 and 1: all jobs were placed again",
        "  0:25:00  kept its GPUs with 24 CPUs instead of 12, at 1.5× the speed of a GPU-proportional share: the "
        "CPU and memory for the job's ideal speed had become free",
        "  0:35:00  lost its GPUs after running 30 min: jobs earlier in the order took the GPUs",
        "  0:35:00  waited 30 min (7 of 8 GPUs held, 1 job waiting)",
        "  1:05:00  ran again on 4 GPUs of node 1 with 12 CPUs and 250 GB, at the speed of a GPU-proportional share: "
        "the job had waited so long that it went first",
        # N = (600 x 1 + 6900 x 2) / 7500 = 1.92. As 4 x 1.92 / 8 < 1, rho equals the slowdown.
        "  2:05:00  finished 2.08 h after its arrival: 35 min waiting and 90 min running (slowdown 75, finish-time "
        "fairness ρ 75)",
    ]


def test_many_moves_are_drawn_together() -> None:
    moves = [run(600 + 60 * i, Kind.MOVE, Reason.REPLACED, [(i % 3, 4.0)], cpus=12 + i % 2) for i in range(14)]
    events = [(0.0, 0, Kind.ARRIVE, Reason.NONE), START, *moves, DONE]
    got = lines(events, cluster_info=cluster(3, 4))
    assert got[3:5] == [
        "  0:05:00  started on 4 GPUs of node 0 with 12 CPUs and 250 GB, at the speed of a GPU-proportional share",
        "  0:10:00  was moved 14 times among nodes 0, 1 and 2 until 0:23:00, with 12 to 13 CPUs: all jobs were "
        "placed again",
    ]
    assert len(got) == 6
    # a line for the title, the arrival, the start, the finish, and each move
    assert len(lines(events, cluster_info=cluster(3, 4), every_event=True)) == 4 + 14


def test_many_turns_are_drawn_together() -> None:
    """Twenty turns of 300 s running and 300 s waiting, then a last run."""
    events: list[tuple[Any, ...]] = [(0.0, 0, Kind.ARRIVE, Reason.NONE)]
    for i in range(20):
        kind = Kind.RESUME if i else Kind.START
        events.append(run(600 * i, kind, Reason.IN_ORDER, [(0, 4.0)]))
        events.append((600.0 * i + 300, 0, Kind.PREEMPT, Reason.OUTRANKED))
    events += [run(12000, Kind.RESUME, Reason.IN_ORDER, [(0, 4.0)]), (12300.0, 0, Kind.FINISH, Reason.DONE)]
    got = lines(events)
    turns = [line for line in got if "took turns" in line]
    # The job waits from its arrival (0 s) and then runs and waits in turn, in 42 periods. The first and the last four
    # are listed. The 34 between, 17 of each kind with 300 s, are summarised from 900 s on.
    assert turns == [
        "  0:15:00  took turns with others until 3:05:00: ran 85 min and waited 85 min, losing its GPUs 17 times: jobs "
        "earlier in the order took the GPUs"
    ]
    assert sum("lost its GPUs" in line for line in got) == 3


def test_waiting_for_several_reasons() -> None:
    got = lines(
        [
            (0.0, 0, Kind.ARRIVE, Reason.NONE),
            (0.0, 0, Kind.WAIT, Reason.GPUS_FULL),
            (60.0, 0, Kind.WAIT, Reason.GANG_TOO_LARGE_NOW),
            (240.0, 0, Kind.WAIT, Reason.NO_CPU_OR_MEMORY),
            START,
            DONE,
        ]
    )
    assert got[2] == (
        "  0:00:00  waited 5 min: for 3 min fewer GPUs were free than the 4 that the job needs, for 60 s every GPU was "
        "held by jobs earlier in the order and for 60 s GPUs were free, but no node with free GPUs had the CPU "
        "and memory for the job"
    )


def test_parts_of_gpus_many_nodes_and_no_placements() -> None:
    part = [{**JOBS[0], "gpus": 0.25}]
    got = lines([run(0, Kind.START, Reason.IN_ORDER, [(1, 0.25)]), DONE], jobs=part)
    speed = "at the speed of a GPU-proportional share"
    assert got[2] == f"  0:00:00  started on 0.25 of a GPU of node 1 with 12 CPUs and 250 GB, {speed}"
    many = [{**JOBS[0], "gpus": 8.0}]
    got = lines(
        [run(0, Kind.START, Reason.IN_ORDER, [(n, 1.0) for n in range(8)]), DONE], jobs=many, cluster_info=cluster(8, 1)
    )
    assert "started on 8 GPUs of 8 nodes with" in got[2]
    got = lines([run(0, Kind.START, Reason.IN_ORDER, []), DONE], placements=False)
    assert got[2] == "  0:00:00  started on 4 GPUs with 12 CPUs and 250 GB, at the speed of a GPU-proportional share"


def test_unfinished_rejected_and_never_seen() -> None:
    later = (5000.0, 1, Kind.ARRIVE, Reason.NONE)
    assert lines([run(0, Kind.START, Reason.IN_ORDER, [(0, 4.0)]), later])[-1] == (
        "  1:23:20  not finished: the record ends 83.3 min after the job's arrival; the job had run 83.3 min by then"
    )
    rejected = lines([(0.0, 0, Kind.ARRIVE, Reason.NONE), (0.0, 0, Kind.REJECT, Reason.NO_GPU_OF_MODEL), later])
    why = "the cluster has no GPU of a model that the job accepts"
    assert rejected[2:] == [f"  0:00:00  rejected: {why}", "  0:00:00  never ran"]
    assert lines([later], job="a")[1:] == [
        "  0:00:00  arrived",
        "  1:23:20  not finished: the record ends 83.3 min after the job's arrival; the job had not run yet",
    ]


def test_why_gpus_were_lost() -> None:
    for reason, why in (
        (Reason.GANG_TOO_LARGE_NOW, "jobs earlier in the order left fewer GPUs than the 4 that the job needs"),
        (Reason.GPUS_FULL, "jobs earlier in the order took every GPU"),
    ):
        got = lines([START, (600.0, 0, Kind.PREEMPT, reason), run(900, Kind.RESUME, Reason.IN_ORDER, [(0, 4.0)]), DONE])
        assert got[3] == f"  0:10:00  lost its GPUs after running 5 min: {why}"


def test_deadlines() -> None:
    for deadline, text in ((7000.0, "deadline missed by 8.33 min"), (8000.0, "deadline met")):
        jobs = [{**JOBS[0], "deadline_s": deadline}]
        assert text in lines([START, DONE], jobs=jobs)[-1]


def test_partition_policies() -> None:
    got = lines(
        [
            (0.0, 0, Kind.PROFILE, Reason.NONE, 0, 0, 0.5, [(0, 1.0)]),
            (30.0, 0, Kind.REPARTITION, Reason.NONE, 0, 0, 0.0, [(0, 1.0)]),
            DONE,
        ]
    )
    assert got[2:4] == ["  0:00:00  began to be measured on 1 GPU of node 0", "  0:00:30  its GPU was repartitioned"]


def test_as_data() -> None:
    record = hand_record(JOBS, [(0.0, 0, Kind.ARRIVE, Reason.NONE), START, DONE], label="fifo + tune")
    data = explain(record, "a").to_dict()
    assert (data["job"], data["run"], data["gpus"], data["model"]) == ("a", "fifo + tune", 4.0, "res50")
    assert (data["jct_s"], data["queueing_s"], data["running_s"], data["slowdown"]) == (7500, 300, 7200, 75)
    assert data["events"][1] == {
        "time_s": 300.0, "kind": "start", "reason": "in_order", "cpus": 12.0, "memory_bytes": 250e9, "speed": 1.0,
        "nodes": [{"node": 0, "gpus": 4.0}],
    }  # fmt: skip
    assert [step["time_s"] for step in data["story"]] == [0.0, 0.0, 300.0, 7500.0]


@pytest.fixture(scope="module")
def drawn() -> Record:
    return random_record(1, jobs=80, nodes=2, gpus=4, rate_per_h=30, boost=3.0)


def test_every_job_of_a_run_has_a_story(drawn: Record) -> None:
    for job in drawn.job("id"):
        story = explain(drawn, str(job))
        times = [step.time_s for step in story.steps]
        assert times == sorted(times)
        assert story.steps[0].text == "arrived"
        assert story.steps[-1].text.startswith("finished")


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        ("job11", "did you mean job-11, job-1 or"),
        ("11", "did you mean job-11?"),
        ("job-7x", "did you mean job-7"),
        ("zebra", "its 80 jobs are named like job-0"),
        ("", "its 80 jobs are named like job-0"),
    ],
)
def test_unknown_jobs_get_near_ones(drawn: Record, job: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        explain(drawn, job)
    assert hint in error.value.message
    assert error.value.field == "JOB"


def test_notable_jobs() -> None:
    """a: 7500 s, of which 300 waiting, isolated 100 s. b: from 600 to 8000 s, 7400 s, all but 400 s waiting."""
    record = hand_record(
        JOBS,
        [
            START,
            DONE,
            (7600.0, 1, Kind.START, Reason.IN_ORDER, 1, 1, 1.0, [(0, 4.0), (1, 4.0)]),
            (8000.0, 1, Kind.FINISH, Reason.DONE),
        ],
    )
    # N of a is (600 + 2 x 6900) / 7500. As g N / G < 1, rho is 75, which is the slowdown.
    assert notable_jobs(record) == [
        ("a", "took longest (2.08 h), was slowed down most (75.0) and was furthest behind an equal share, by ρ (75.0)"),
        ("b", "waited longest (117 min)"),
    ]


def test_a_wait_for_the_next_round_is_told_as_such() -> None:
    """What the cluster held explains nothing before a decision was made."""
    got = lines(
        [(0.0, 0, Kind.ARRIVE, Reason.NONE), run(120, Kind.START, Reason.IN_ORDER, [(0, 4.0)]), DONE],
        rounds=[ROUND | {"time_s": 0, "gpus_held": 2, "waiting": 0}],
    )
    assert got[2] == "  0:00:00  waited 2 min for the next round"
