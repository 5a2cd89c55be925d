"""The controller in virtual time: seeded faults of every kind, and what must hold whatever happens.

The controller, its store and its planner are the real ones; nodes keep the promises of NodeJobs (fake_fleet.py).
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from fake_fleet import Killed
from fleet_setting import Setting, drill, work
from heard import heard

from cotenant.core.errors import WorkError
from cotenant.core.events import Kind, Reason
from cotenant.fleet.store.database import StoreError
from cotenant.policy.jobs.choice import JobPolicy
from cotenant.report.story import LOST


def test_jobs_run_in_order_and_finish_once(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    ids = setting.submit(*(work(f"j{i}", 2.0, gpus=2.0) for i in range(4)))
    setting.run(12)
    assert [setting.state(job) for job in ids] == ["finished"] * 4
    assert sorted(setting.world.finished) == ids
    assert setting.world.starts == [f"{job}.0" for job in ids]
    assert setting.events("j0") == [Kind.ARRIVE, Kind.START, Kind.FINISH]
    assert setting.events("j3") == [Kind.ARRIVE, Kind.WAIT, Kind.START, Kind.FINISH]


def test_leases_are_extended_without_a_restart_when_nothing_changed(tmp_path: Path) -> None:
    setting = Setting(tmp_path, keep_s=3.0)
    setting.submit(*(work(f"j{i}", 20.0) for i in range(4)))
    setting.run(22)
    assert len(setting.world.starts) == 4
    assert sorted(setting.world.finished) == ["j0", "j1", "j2", "j3"]


def test_without_early_rounds_gpus_change_hands_at_multiples_of_the_lease_only(tmp_path: Path) -> None:
    setting = Setting(tmp_path, early=False, lease_s=5.0)
    setting.submit(work("a", 2.0, gpus=2.0), work("b", 2.0, gpus=2.0), work("c", 1.0), arrivals=[0.0, 0.0, 1.0])
    setting.run(12)
    rows = setting.controller.store.rows("SELECT time_s FROM events WHERE kind IN (1, 2) ORDER BY number")
    starts = [row[0] for row in rows]
    assert starts == pytest.approx([0.0, 0.0, 5.0], abs=0.35)
    assert all(row[0] % 5.0 == 0 for row in setting.controller.store.rows("SELECT time_s FROM rounds"))


def test_between_rounds_nobody_loses_gpus(tmp_path: Path) -> None:
    """An early plan only starts jobs: the next round comes after 1000 s."""
    setting = Setting(tmp_path, policy=JobPolicy("srtf", "proportional", sticky=True), lease_s=1000.0)
    setting.submit(work("long", 500.0, gpus=4.0))
    setting.run(2)
    setting.submit(work("short", 1.0, gpus=1.0))
    setting.run(8)
    assert setting.events("long") == [Kind.ARRIVE, Kind.START]
    assert setting.state("short") == "waiting"
    assert setting.world.starts == ["long.0", "long.0"]  # one process on each of the two nodes


def test_a_crashed_job_frees_its_gpus_at_once_and_is_retried(tmp_path: Path) -> None:
    setting = Setting(tmp_path, early=False, lease_s=1000.0)
    setting.submit(work("bad", 1.0, 3, gpus=4.0, retries=1), work("next", 1.0, gpus=4.0))
    setting.run(8)
    assert setting.state("bad") == "failed"
    assert setting.state("next") == "finished"  # long before the next round
    assert sorted({s for s in setting.world.starts if s.startswith("bad")}) == ["bad.0", "bad.1"]
    assert setting.events("bad")[-3:] == [Kind.RESUME, Kind.PREEMPT, Kind.REJECT]


def test_preemption_saves_and_resumes(tmp_path: Path) -> None:
    setting = Setting(tmp_path, policy=JobPolicy("srtf", "proportional", sticky=True), lease_s=2.0)
    setting.submit(work("long", 30.0, gpus=4.0))
    setting.run(5)
    setting.submit(work("short", 1.0, gpus=4.0))
    setting.run(4)
    assert setting.state("short") == "finished"
    assert setting.world.saved["long"] > 3.0
    setting.run(32)
    assert setting.state("long") == "finished"
    assert setting.events("long") == [Kind.ARRIVE, Kind.START, Kind.PREEMPT, Kind.RESUME, Kind.FINISH]


def test_a_job_that_ignores_its_lease_is_killed_after_its_grace(tmp_path: Path) -> None:
    setting = Setting(tmp_path, policy=JobPolicy("srtf", "proportional", sticky=True))
    setting.submit(work("deaf", 30.0, gpus=4.0, attached=False, env={"STUBBORN": "1"}))
    setting.run(3)
    setting.submit(work("short", 1.0, gpus=4.0))
    setting.run(7)
    assert setting.state("short") == "finished"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"env": {"STUBBORN": "1"}, "attached": False}, "was killed; work since its last checkpoint is lost"),
        ({"attached": False}, "ended by the signal .*; work since its last checkpoint is lost"),
        ({}, "jobs earlier in the order took the GPUs"),
    ],
    ids=["deaf", "without a handler", "saves itself"],
)
def test_it_is_told_when_work_is_lost(tmp_path: Path, form: dict[str, Any], said: str) -> None:
    setting = Setting(tmp_path, policy=JobPolicy("srtf", "proportional", sticky=True))
    setting.submit(work("long", 30.0, gpus=4.0, **form))
    setting.run(3)
    setting.submit(work("short", 1.0, gpus=4.0))
    setting.run(7)
    store = setting.controller.store
    query = "SELECT reason FROM events JOIN jobs ON jobs.row = events.job WHERE id='long' AND kind=?"
    ((reason,),) = store.rows(query, (int(Kind.PREEMPT),))
    assert re.search(said, LOST[Reason(reason)])


def test_cancelled_jobs_leave_and_do_not_come_back(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.submit(work("runs", 50.0, gpus=4.0), work("waits", 50.0))
    setting.run(1)
    assert setting.controller.cancel("waits") == "cancelled"
    assert setting.controller.cancel("runs") == "stopping"
    setting.run(3)
    assert (setting.state("runs"), setting.state("waits")) == ("cancelled", "cancelled")
    assert not setting.world.running()


def test_a_lost_node_is_waited_for_as_long_as_its_leases_then_its_jobs_start_elsewhere(tmp_path: Path) -> None:
    setting = Setting(tmp_path, keep_s=6.0)
    setting.submit(work("a", 40.0, gpus=2.0))
    setting.run(2)
    node = setting.controller.table.jobs["a"].attempt.nodes[0]  # type: ignore[union-attr]
    setting.world.unreachable.add(node)
    setting.run(4)
    assert setting.world.starts == ["a.0"]  # the node is cut off, but the job may still run there, and does
    assert len(setting.world.running()) == 1
    setting.run(8)
    assert setting.world.starts == ["a.0", "a.1"]
    ((where, attempt),) = setting.world.running()
    assert where != node
    assert attempt.done_s > 4.0  # it continued from its checkpoint
    setting.world.unreachable.clear()
    setting.run(45)
    assert setting.state("a") == "finished"
    assert setting.world.finished == ["a"]


def test_a_job_started_between_two_extensions_has_its_lease_counted_too(tmp_path: Path) -> None:
    """Else a silent node's job would be started elsewhere while it still runs there (World.check would see it)."""
    setting = Setting(tmp_path, keep_s=16.0, lease_s=50.0)
    setting.submit(work("first", 60.0))
    setting.run(3.5)  # the lease was extended at the start and must be extended again at 4 s
    setting.submit(work("second", 60.0))
    setting.run(0.4)
    setting.world.unreachable.add("node-0")
    setting.run(26)
    assert setting.world.starts == ["first.0", "second.0", "first.1", "second.1"]


def test_a_start_that_arrives_when_the_job_runs_elsewhere_starts_nothing(tmp_path: Path) -> None:
    setting = Setting(tmp_path, keep_s=4.0)
    setting.executor.lag, setting.executor.soon = 1.0, 0.0
    # without a port request, which a gang of several processes would send first
    setting.submit(work("a", 30.0, gpus=2.0, processes="node"))
    setting.run(0.3)
    node = setting.world.late[0][0]
    setting.world.unreachable.add(node)
    setting.executor.lag = 0.0
    setting.run(10)
    assert [where for where, _ in setting.world.running()] != [node]
    setting.world.unreachable.clear()
    setting.executor.soon = 1.0  # the old order arrives first (World.check would notice a second run)
    setting.run(40)
    assert setting.world.starts == ["a.1"]
    assert setting.world.finished == ["a"]


def test_a_controller_on_another_machine_goes_on_with_jobs_and_time(tmp_path: Path) -> None:
    setting = Setting(tmp_path, keep_s=6.0)
    setting.submit(work("a", 2.0), work("b", 12.0))
    setting.run(1.5)
    before_s = setting.controller.clock.now_s()
    setting.kill_controller()
    setting.world.advance(3.0)
    setting.boot()
    setting.move(-3600.0)
    assert setting.controller.clock.now_s() >= before_s - setting.settings["lease_s"]
    setting.run(12)
    assert setting.world.starts == ["a.0", "b.0"]
    assert sorted(setting.world.finished) == ["a", "b"]
    rows = setting.controller.store.rows("SELECT time_s FROM events ORDER BY number")
    assert rows == sorted(rows)


def test_a_node_that_comes_back_in_time_kept_its_job(tmp_path: Path) -> None:
    setting = Setting(tmp_path, keep_s=10.0)
    setting.submit(work("a", 12.0))
    setting.run(2)
    setting.world.unreachable |= {"node-0", "node-1"}
    setting.run(3)
    setting.world.unreachable.clear()
    setting.run(15)
    assert setting.world.starts == ["a.0"]
    assert setting.state("a") == "finished"


def test_a_gang_over_two_nodes_starts_and_ends_as_one(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.submit(work("gang", 30.0, gpus=4.0, retries=0))
    setting.run(1)
    assert {node for node, _ in setting.world.running()} == {"node-0", "node-1"}
    ranks = sorted(r["rank"] for _, a in setting.world.running() for r in a.order["ranks"])
    assert ranks == [0, 1, 2, 3]
    envs = [r["environment"] for _, a in setting.world.running() for r in a.order["ranks"]]
    assert {(e["MASTER_PORT"], e["WORLD_SIZE"]) for e in envs} == {("12345", "4")}
    setting.world.kill_runner("node-1", "gang.0")
    setting.run(1.5)
    assert setting.events("gang")[-2:] != [Kind.ARRIVE, Kind.START]
    setting.run(3)
    # a lost process is not a failed one, so the job needs no retry for it
    assert setting.world.starts.count("gang.1") == 2
    setting.run(40)
    assert setting.state("gang") == "finished"


def test_a_gang_waits_for_the_port_of_a_node_that_does_not_answer(tmp_path: Path) -> None:
    """Half of a link: orders and leases go through, the answer with the port does not."""
    setting = Setting(tmp_path)
    exchange, lost = setting.executor.exchange, []

    def deaf(epoch: int, orders: Any) -> Any:
        if any(order["do"] == "port" for wanted in orders.values() for order in wanted) and len(lost) < 5:
            lost.append(orders)
            return dict.fromkeys(orders)
        return exchange(epoch, orders)

    setting.executor.exchange = deaf  # type: ignore[method-assign]
    setting.submit(work("gang", 2.0, gpus=4.0, retries=0))
    setting.run(1)
    assert len(lost) == 5
    envs = [r["environment"] for _, a in setting.world.running() for r in a.order["ranks"]]
    assert {e["MASTER_PORT"] for e in envs} == {"12345"}
    setting.run(4)
    assert (setting.state("gang"), setting.world.starts) == ("finished", ["gang.0", "gang.0"])


def test_a_full_disk_stops_nothing_that_runs_and_takes_nothing_in(tmp_path: Path) -> None:
    setting = Setting(tmp_path, keep_s=4.0)
    setting.submit(work("a", 15.0))
    setting.run(1)

    def full(*_: Any) -> None:
        if not setting.controller.store._db.connection.in_transaction:
            return  # no write is pending
        setting.controller.store.rollback()
        raise StoreError("cannot be written: database or disk is full")

    commit = setting.controller.store.commit
    setting.controller.store.commit = full  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        setting.submit(work("b", 1.0))
    with heard() as said:
        setting.run(20)  # longer than any lease and than the job
    assert setting.world.starts == ["a.0"]
    assert setting.world.finished == ["a"]
    assert len(said) == 1
    setting.controller.store.commit = commit  # type: ignore[method-assign]
    setting.run(2)
    assert setting.state("a") == "finished"
    assert setting.submit(work("b", 1.0)) == ["b"]
    setting.run(3)
    assert setting.state("b") == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7, 19, 101])
def test_drawn_drills(tmp_path: Path, seed: int) -> None:
    drill(tmp_path, seed)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_killed_no_job_is_lost_or_runs_twice(tmp_path: Path, seed: int) -> None:
    """Controllers killed at every boundary, nodes cut off, orders that arrive late, runners killed."""
    draw = random.Random(1000 + seed)
    policy = JobPolicy(draw.choice(("fifo", "srtf", "las")), draw.choice(("tune", "proportional")), sticky=True)
    setting = Setting(
        tmp_path,
        seed=seed,
        policy=policy,
        kill=0.02,
        lag=0.05,
        keep_s=draw.choice((4.0, 10.0)),
        early=draw.random() < 0.5,
        parks=draw.random() < 0.5,
    )
    setting.world.stuck = 0.2
    specs = [
        work(f"j{i}", draw.choice((1.0, 3.0, 6.0)), gpus=float(draw.choice((1, 1, 2, 4))),
             attached=draw.random() < 0.7)
        for i in range(8)
    ]  # fmt: skip
    submitted: list[str] = []
    for spec in specs:
        try:
            submitted += setting.submit(spec)
        except Killed:  # If the job was stored before the crash it must run, otherwise it must not.
            setting.kill_controller()
            while True:
                try:
                    setting.boot()
                    break
                except Killed:
                    continue
            submitted = [row[0] for row in setting.controller.store.rows("SELECT id FROM jobs ORDER BY row")]
    for _ in range(6):
        setting.run(draw.choice((0.5, 2.0, 4.0)))
        fault = draw.random()
        if fault < 0.4:
            setting.world.unreachable = {draw.choice(("node-0", "node-1"))}
        elif fault < 0.6 and setting.world.running():
            node, attempt = draw.choice(setting.world.running())
            setting.world.kill_runner(node, attempt.order["attempt"])
        else:
            setting.world.unreachable = set()
    setting.world.unreachable = set()
    setting.kill, setting.executor.kill, setting.executor.lag = 0.0, 0.0, 0.0
    setting.run(90, step_s=0.2)
    assert submitted
    assert {job: setting.state(job) for job in submitted} == dict.fromkeys(submitted, "finished")
    assert not setting.world.running()
    assert sorted(set(setting.world.finished)) == sorted(submitted)
    for job in submitted:
        kinds = setting.events(job)
        assert kinds[0] == Kind.ARRIVE
        assert kinds.count(Kind.FINISH) == 1
        assert kinds[-1] == Kind.FINISH
        held = [k for k in kinds if k in (Kind.START, Kind.RESUME, Kind.PREEMPT, Kind.FINISH)]
        assert held[0::2] == [Kind.START] + [Kind.RESUME] * (len(held) // 2 - 1)


def test_time_does_not_follow_the_date_and_outlives_the_controller(tmp_path: Path) -> None:
    from cotenant.fleet.controller.clock import FleetClock
    from cotenant.fleet.store.jobs import Store

    store, ticks = Store(tmp_path), [10**9]
    clock = FleetClock(store, lambda: ticks[0], "boot 1")
    assert clock.now_s() == 0.0
    clock.begin()
    ticks[0] += 5 * 10**9
    assert clock.now_s() == 5.0
    clock.save()
    store.commit()
    ticks[0] += 2 * 10**9
    assert FleetClock(store, lambda: ticks[0], "boot 1").now_s() == 7.0
    rebooted = FleetClock(store, lambda: 3 * 10**9, "boot 2")
    assert rebooted.now_s() == 5.0
    assert not rebooted.runs
    rebooted.begin()
    assert rebooted.now_s() == 5.0


def test_a_policy_that_fails_stops_nobody(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.submit(work("a", 6.0))
    setting.run(2)

    def fails(_: Any) -> Any:
        raise IndexError("a fault of the policy")

    setting.controller.planner.plan = fails  # type: ignore[method-assign]
    setting.submit(work("b", 1.0))
    with heard() as said:
        setting.run(6)
    assert setting.world.finished == ["a"]
    assert setting.controller.planner_fault.startswith("planner failed: a fault of the policy")
    assert len(said) == 1
    setting.controller.close()
    with pytest.raises(WorkError, match="has ended"):
        setting.controller.call(lambda: None)
