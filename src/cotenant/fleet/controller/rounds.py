"""The state of the cluster after a decision, as a row of a record's rounds."""

from __future__ import annotations

from typing import Any

from cotenant.fleet.controller.planners import FleetPlan, View


def round_row(view: View, plan: FleetPlan, decide_s: float) -> tuple[Any, ...]:
    """Columns of record.schema.ROUNDS in order, then the duration of the decision in s and whether it was early."""
    held: dict[str, float] = {}
    cpus, memory = 0.0, 0
    running = dict(plan.assign)
    if view.early:  # an early plan only starts jobs, so running jobs that it does not name keep their resources
        running |= {job.id: job.attempt.assignment for job in view.jobs if job.attempt is not None}
    for assignment in running.values():
        cpus += assignment.cpus
        memory += assignment.memory_bytes
        for node, gpus in assignment.gpus_by_node():
            held[node] = held.get(node, 0.0) + gpus
    free = sum(len(node.gpus) for node in view.nodes if node.name not in held)
    return (
        view.now_s,
        len(running),
        len(view.jobs) - len(running),
        round(sum(held.values()), 6),
        sum(job.spec.gpus for job in view.jobs),
        float(free),
        round(cpus * 1000),
        memory // 10**6,
        decide_s,
        int(view.early),
    )
