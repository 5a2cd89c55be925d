"""Simulated nodes and jobs for the planner of MISO. Jobs follow a plan at once and make steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from cotenant.fleet.controller.miso import MisoPlanner
from cotenant.fleet.controller.miso_gpu import Wish
from cotenant.fleet.controller.planners import FleetPlan, View
from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.nodes import NodeGpu, NodeSpec
from cotenant.fleet.state import Attempt, Job

# relative speed on 7g, 4g, 3g, 2g and 1g
SPEEDS = {"flat": [1.0, 0.98, 0.97, 0.9, 0.8], "steep": [1.0, 0.6, 0.5, 0.3, 0.15]}


class Predicts:
    """A predictor for jobs of two kinds, flat and steep, which it recognizes by their latencies."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def predict_speeds(self, latencies: np.ndarray, geo: Any) -> np.ndarray:
        self.seen.append(latencies[0])
        # A job whose latency more than doubles from 100 to 14 % is steep.
        rows = [SPEEDS["steep"] if column[2] > 2 * column[0] else SPEEDS["flat"] for column in latencies[0].T]
        return np.array([rows])


class World:
    """Nodes of one GPU each, and jobs that follow a plan at once and make steps at their own pace. `away`: the names of
    nodes that do not answer, with whose jobs nothing happens."""

    def __init__(self, nodes: int = 1, *, models: tuple[str, ...] = ("A100-40GB",), **options: Any) -> None:
        self.predictor = Predicts()
        self.planner = MisoPlanner(model=self.predictor, measure_s=4.0, **options)  # type: ignore[arg-type]
        gpu = [NodeGpu(f"gpu-{i}", models[i % len(models)], 40 << 30, "nvidia") for i in range(nodes)]
        self.nodes = tuple(NodeSpec(f"node-{i}", 8.0, 64 << 30, (gpu[i],)) for i in range(nodes))
        self.away: set[str] = set()
        self.jobs: dict[str, Job] = {}
        self.now_s = 0.0
        self.plan = FleetPlan()

    def submit(self, name: str, kind: str = "flat", **spec: Any) -> None:
        self.jobs[name] = Job(len(self.jobs), name, JobSpec(name, (kind,), **spec), self.now_s)

    def finish(self, name: str) -> None:
        del self.jobs[name]

    def restart(self) -> None:
        """Replace the planner, as when the controller restarts."""
        self.planner = MisoPlanner(model=self.predictor, measure_s=4.0)  # type: ignore[arg-type]

    def here(self) -> list[Job]:
        """The jobs that can be planned: those without an attempt on a node that is away."""
        return [j for j in self.jobs.values() if j.attempt is None or self.away.isdisjoint(j.attempt.nodes)]

    def tick(self, seconds: float = 2.0, *, early: bool = False) -> dict[str, Wish]:
        here, nodes = self.here(), tuple(node for node in self.nodes if node.name not in self.away)
        self.plan = self.planner.plan(View(self.now_s, nodes, tuple(here), early))
        for job in here:
            wanted = self.plan.assign.get(job.id)
            if wanted is None:
                continue
            if job.attempt is None or not job.attempt.assignment.same_gpus(wanted):
                job.attempt = Attempt(job.n, wanted, "running", created_s=self.now_s)
                job.n += 1
        self.now_s += seconds
        for job in here:
            if job.attempt is not None:
                self._step(job, job.attempt, seconds)
        return {job: wish for gpu in self.planner.gpus.values() for job, wish in gpu.wishes().items()}

    def _step(self, job: Job, attempt: Attempt, seconds: float) -> None:
        share = attempt.assignment.places[0].gpus[0]
        limit = share.limit or share.fraction
        pace_s = 0.1 / (limit if job.spec.command[0] == "steep" else 1.0)
        done = (attempt.progress or {}).get("exactly", 0.0) + seconds / pace_s
        # time at which the last whole step ended, when a training loop reports
        told_s = 1e9 + self.now_s - (done - int(done)) * pace_s
        attempt.progress = {"attempt": attempt.n, "step": int(done), "exactly": done, "written_unix_s": told_s}

    def until_sliced(self, ticks: int = 60) -> dict[str, Wish]:
        for _ in range(ticks):
            wishes = self.tick()
            if wishes and all(wish.slice for wish in wishes.values()):
                return wishes
        raise AssertionError(f"no slices after {ticks} ticks: {wishes}")
