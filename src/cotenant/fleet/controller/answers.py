"""Descriptions of the fleet as plain data, as --json prints them: status, queue, one job."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any, Protocol

from cotenant.core.errors import InputError
from cotenant.core.events import Kind, Reason
from cotenant.fleet.controller.apply import log_path
from cotenant.fleet.controller.clock import FleetClock
from cotenant.fleet.controller.counts import Counts
from cotenant.fleet.controller.job_table import JobTable
from cotenant.fleet.jobs import spec_from_dict
from cotenant.fleet.nodes import NodeSpec
from cotenant.fleet.state import STOPPING, Job
from cotenant.fleet.store.jobs import Store

MOST_LISTED = 100_000
NOT_DECIDED = "waits for the next scheduling round"


class Fleet(Protocol):
    """The part of the controller from which the descriptions of the fleet are made. Only the controller's thread may
    use it.
    """

    table: JobTable
    store: Store
    clock: FleetClock
    counts: Counts
    epoch: int
    nodes: dict[str, NodeSpec]
    known: dict[str, NodeSpec]

    def describe(self) -> dict[str, Any]:
        """The folder, executor and policy of this fleet, and the lengths of its scheduling rounds and leases, as plain
        data."""

    def faults(self) -> list[str]:
        """What is wrong with the fleet now, a sentence for each fault."""


def status(fleet: Fleet) -> dict[str, Any]:
    """Describe the controller, its nodes and what runs on them."""
    table = fleet.table
    held: dict[str, float] = {}
    jobs_on: dict[str, int] = {}
    for job in table.running():
        assert job.attempt is not None
        for node, gpus in job.attempt.assignment.gpus_by_node():
            held[node] = held.get(node, 0.0) + gpus
            jobs_on[node] = jobs_on.get(node, 0) + 1
    return {
        **fleet.describe(),
        "epoch": fleet.epoch,
        "time_s": fleet.clock.now_s(),
        "jobs": {
            "queued": sum(1 for j in table.jobs.values() if j.attempt is None),
            "running": sum(1 for j in table.jobs.values() if j.attempt is not None),
            **table.over,
        },
        "rounds": fleet.counts.rounds,
        "last_decision_s": fleet.counts.last_decision_s,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "faults": fleet.faults(),
        "nodes": [
            {
                "name": name,
                "reachable": name in fleet.nodes,
                "gpus": len(node.gpus),
                "gpu_model": node.gpus[0].model if node.gpus else None,
                "gpus_held": round(held.get(name, 0.0), 3),
                "cpus": node.cpus,
                "memory_bytes": node.memory_bytes,
                "jobs": jobs_on.get(name, 0),
                "agent": node.agent,
            }
            for name, node in sorted(fleet.known.items(), key=lambda item: item[0])
        ],
    }


def queue(fleet: Fleet, *, everything: bool = False) -> list[dict[str, Any]]:
    """Unfinished jobs: the running ones, then the waiting ones by arrival. `everything`: finished jobs, too."""
    now_s = fleet.clock.now_s()
    jobs = sorted(fleet.table.jobs.values(), key=lambda j: (j.attempt is None, j.arrival_s, j.row))
    rows = [job_row(job, now_s) for job in jobs[:MOST_LISTED]]
    if everything:
        found = fleet.store.rows(
            "SELECT id, spec, arrival_s, state, n, failures, done, attained_s, first_start_s, finished_s, exit, row"
            " FROM jobs WHERE state IN ('finished', 'failed', 'cancelled') ORDER BY finished_s DESC LIMIT ?",
            (MOST_LISTED,),
        )
        for id_, spec, arrival_s, state, n, failures, done, attained_s, start_s, end_s, exit_, row in found:
            job = Job(row, id_, spec_from_dict(json.loads(spec)), arrival_s, state, n, failures, 0, done, attained_s)
            job.first_start_s, job.finished_s = start_s, end_s
            job.exit = None if exit_ is None else json.loads(exit_)
            rows.append(job_row(job, now_s))
    return rows


def job_row(job: Job, now_s: float) -> dict[str, Any]:
    """One job."""
    attempt, spec = job.attempt, job.spec
    progress = (attempt.progress or {}) if attempt is not None else {}
    end_s = job.finished_s
    return {
        "id": job.id,
        "name": spec.name,
        "state": _state(job),
        "why": _why(job),
        "command": list(spec.command),
        "gpus": spec.gpus,
        "slice": spec.slice,
        "model": spec.model,
        "tenant": spec.tenant,
        "priority": spec.priority,
        "arrival_s": job.arrival_s,
        "waited_s": max(0.0, (end_s if end_s is not None else now_s) - job.arrival_s - job.attained_s),
        "ran_s": job.attained_s,
        "finished_s": end_s,
        "jct_s": None if end_s is None else end_s - job.arrival_s,
        "done": _done(job),
        "step": progress.get("step"),
        "attempts": job.n,
        "failures": job.failures,
        "retries": spec.retries,
        "exit_code": None if job.exit is None else job.exit.get("code"),
        "oom": None if job.exit is None else bool(job.exit.get("oom")),
        "error": "" if job.exit is None else _error(job),
        "cpus": None if attempt is None else attempt.assignment.cpus,
        "memory_bytes": None if attempt is None else attempt.assignment.memory_bytes,
        "nodes": [] if attempt is None else [{"node": n, "gpus": g} for n, g in attempt.assignment.gpus_by_node()],
        "gpu_ids": [] if attempt is None else [g.instance or g.uuid for p in attempt.assignment.places for g in p.gpus],
    }


def _state(job: Job) -> str:
    """Return a job's state in one word. While the job has an attempt (a run of its processes), this is the attempt's
    phase, such as running, stopping or parked.
    """
    if job.attempt is None:
        return job.state if job.arrived or job.finished_s is not None else "to come"
    return "cancelling" if job.cancel and job.attempt.phase == STOPPING else job.attempt.phase


def _done(job: Job) -> float | None:
    """Fraction of the job's work that is done; None if the job ran without reporting progress and its length is
    unknown."""
    progress = None if job.attempt is None else job.attempt.progress
    if job.done == 0 and job.attained_s > 0 and job.isolated_s is None and progress is None:
        return None
    return round(job.done, 6)


def _why(job: Job) -> str:
    """Return the reason for which a job waits, in words."""
    if job.attempt is not None or not job.arrived or job.finished_s is not None:
        return ""
    return Reason(job.told).name.lower().replace("_", " ") if job.told >= 0 else NOT_DECIDED


def _error(job: Job) -> str:
    """Return what went wrong with the job last, in a few words."""
    exit_ = job.exit or {}
    code = int(exit_.get("code", 0))
    if exit_.get("oom"):
        return "exceeded its memory limit"
    if exit_.get("error"):
        return str(exit_["error"])
    if code == 0 or exit_.get("asked"):
        return ""
    return f"killed by signal {code - 128}" if 128 < code < 160 else f"exit code {code}"


def log_place(fleet: Fleet, folder: Path, job_id: str, attempt: int | None, rank: int) -> dict[str, Any]:
    """Return where a log of the job is: its path, the node to read it from, the number of the attempt that wrote it,
    and whether it may still grow.
    """
    found = fleet.store.rows("SELECT row, id, spec, arrival_s, n, state FROM jobs WHERE id=?", (job_id,))
    if not found:
        raise InputError(f"there is no job {job_id!r}", field="ID")
    row, id_, spec, arrival_s, n, state = found[0]
    live = fleet.table.jobs.get(job_id)
    job = live or Job(row, id_, spec_from_dict(json.loads(spec)), arrival_s, state)
    last = (live.n if live is not None else n) - 1
    number = last if attempt is None else attempt
    if attempt is not None and not 0 <= attempt <= last:
        raise InputError(f"job {job_id} has {last + 1} attempts, counted from 0", field="attempt")
    placed = fleet.store.rows("SELECT assignment FROM attempts WHERE job=? AND n=?", (row, max(0, number)))
    nodes = [p["node"] for p in json.loads(placed[0][0])["places"]] if placed else []
    return {
        "path": log_path(folder, job, max(0, number), rank),
        "node": nodes[0] if nodes else "",
        "attempt": number,
        "open": live is not None,
        "attempt_open": live is not None and ((live.attempt is not None and live.attempt.n == number) or number < 0),
    }


def story(fleet: Fleet, job_id: str) -> dict[str, Any]:
    """Describe a job with all its events."""
    found = fleet.store.rows("SELECT row FROM jobs WHERE id=?", (job_id,))
    if not found:
        raise InputError(f"there is no job {job_id!r}", field="ID")
    row = found[0][0]
    events = fleet.store.rows(
        "SELECT time_s, kind, reason, cpu_milli, memory_mb, speed, places FROM events WHERE job=? ORDER BY number",
        (row,),
    )
    live = [r for r in queue(fleet, everything=True) if r["id"] == job_id]
    return {
        "job": live[0] if live else None,
        "events": [
            {"time_s": t, "kind": Kind(k).name.lower(), "reason": Reason(r).name.lower(), "cpus": c / 1000,
             "memory_bytes": m * 10**6, "speed": s, "nodes": json.loads(p) if p else []}
            for t, k, r, c, m, s, p in events
        ],
        "asked_unix_s": time.time(),
    }  # fmt: skip
