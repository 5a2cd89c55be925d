"""One real controller over 1,000 simulated nodes of 8 GPUs: seconds per decision, seconds per step, memory.

    .venv/bin/python -m pytest -q -s bench/test_fleet_nodes.py

The controller, its store on disk and its planner are the product's; nodes are simulated in the same process, in virtual
time (tests/helpers/fake_fleet.py), so the memory printed includes them. Baseline of the same run: 100 nodes.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

MOST_DECISION_S = 2.0
MOST_BYTES = 1 << 30
ROUNDS, LEASE_S = 6, 60.0
GANGS = {"mixed": (1, 1, 1, 1, 2, 2, 4, 8, 8, 16), "single": (1,)}


def make(nodes: int, ordering: str, folder: Path) -> tuple[Any, Any, list[float]]:
    """Create a controller with simulated nodes. Returns it, the nodes' World, and a list that gets the CPU time of each
    decision."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from fake_fleet import FakeExecutor, World

    from cotenant.fleet.controller.controller import Controller, ControllerOptions
    from cotenant.fleet.controller.planners import JobPlanner
    from cotenant.fleet.controller.profiles import ProfileBook
    from cotenant.fleet.nodes import pretend_nodes
    from cotenant.policy.jobs.choice import JobPolicy

    cpu_s: list[float] = []

    class Quiet(World):
        """A World with steps of seconds and without checks, since this file measures time; tests check."""

        def advance(self, seconds: float) -> None:
            self.now_ns += round(seconds * 1e9)
            for node, here in self.attempts.items():
                for attempt in here.values():
                    self._pass(node, attempt, seconds)

        def check(self) -> None:
            return

    class Timed(JobPlanner):
        """A planner that records the CPU time of each decision, which other work of the machine does not lengthen."""

        def plan(self, view: Any) -> Any:
            began = time.thread_time()
            found = super().plan(view)
            cpu_s.append(time.thread_time() - began)
            return found

    world = Quiet(pretend_nodes(nodes, 8, "A100-40GB", 40 << 30, 24.0, 500 * 10**9), 1)
    planner = Timed(JobPolicy(ordering, "tune", sticky=True), ProfileBook(), LEASE_S)
    planner.warm_up()
    options = ControllerOptions(folder, LEASE_S, 120.0, 30.0, monotonic_ns=lambda: world.now_ns)
    controller = Controller(options, FakeExecutor(world), planner)
    controller.begin()
    return controller, world, cpu_s


def run(nodes: int, waiting: int, ordering: str, gangs: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Fill the nodes, then run ROUNDS rounds in which jobs end and a hundred arrive."""
    from cotenant.fleet.jobs import JobSpec

    draw = random.Random(7)
    models = ("res18", "gnmt", "transformer", "")
    controller, world, cpu_s = make(nodes, ordering, folder)

    def job(i: int) -> Any:
        seconds = draw.choice((200.0, 600.0, 3600.0, 7200.0, 36000.0))
        return JobSpec(f"j{i}", ("work", str(seconds), "0"), gpus=float(draw.choice(gangs)), duration_s=seconds,
                       model=draw.choice(models), env={"ATTACHED": "1"})  # fmt: skip

    width = sum(gangs) / len(gangs)
    count = round(nodes * 8 / width) + waiting
    began = time.perf_counter()
    controller.submit([job(i) for i in range(count)])
    submitted_s = time.perf_counter() - began
    steps: list[float] = []
    decisions: list[float] = []

    def until(end_s: float) -> None:
        while controller.clock.now_s() < end_s:
            rounds = controller.counts.rounds
            began = time.perf_counter()
            controller.step()
            steps.append(time.perf_counter() - began)
            if controller.counts.rounds > rounds:
                decisions.append(controller.counts.last_decision_s)
            world.advance(2.0)

    until(LEASE_S * (3 if width > 1 else 6))  # 64 jobs start in each step of the controller
    first, filled_steps = decisions[0], len(steps)
    decisions.clear()
    cpu_s.clear()
    for k in range(ROUNDS):
        controller.submit([job(count + k * 100 + i) for i in range(100)])
        until(controller.clock.now_s() + LEASE_S)
    gpus = sum(len(p.gpus) for j in controller.table.running() for p in j.attempt.assignment.places)
    return {
        "nodes": nodes, "ordering": ordering, "waiting": len(controller.table.waiting()),
        "running": len(controller.table.running()),
        "gpus_held": gpus, "first_s": first, "decide_median_s": sorted(decisions)[len(decisions) // 2],
        "decide_most_s": max(decisions), "decide_cpu_s": max(cpu_s),
        "step_median_s": sorted(steps[filled_steps:])[len(steps[filled_steps:]) // 2],
        "step_most_s": max(steps), "submit_s": submitted_s,
        "memory_mib": int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024,  # type: ignore
    }  # fmt: skip


def _measure(nodes: int, waiting: int, ordering: str, jobs: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, str(nodes), str(waiting), ordering, jobs],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{found['ordering']} + tune, {found['nodes']:,} nodes of 8 GPUs, {found['running']:,} jobs running on "
        f"{found['gpus_held']:,} GPUs, {found['waiting']:,} waiting: a decision takes {found['decide_median_s']:.3f} s "
        f"(most {found['decide_most_s']:.3f}, the first {found['first_s']:.3f}; at most "
        f"{found['decide_cpu_s']:.3f} s of a processor), a step {found['step_median_s']:.3f} s "
        f"(most {found['step_most_s']:.3f}), {found['memory_mib']:.0f} MiB with the simulated nodes"
    )
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ordering", "jobs"), [("srtf", "mixed"), ("las", "mixed"), ("fifo", "single")])
def test_a_thousand_nodes_of_eight_gpus(ordering: str, jobs: str) -> None:
    print()
    _measure(100, 1_000, ordering, jobs)
    large = _measure(1_000, 10_000, ordering, jobs)
    assert large["decide_cpu_s"] < MOST_DECISION_S
    assert large["memory_mib"] * 2**20 < MOST_BYTES


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], GANGS[sys.argv[4]], Path(place))))
