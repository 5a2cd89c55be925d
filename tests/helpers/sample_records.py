"""Records for tests, either written by hand or drawn from a small round-based scheduler that does not use the
engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from cotenant.core.events import Kind, Reason
from cotenant.core.record.record import Record, jobs_table
from cotenant.core.record.schema import RunInfo
from cotenant.core.record.writer import RecordWriter
from cotenant.core.work import Jobs

MODELS = ("res50", "alexnet", "transformer", "lstm", "m5")
IDEAL_CPUS = {"res50": 4.0, "alexnet": 12.0, "transformer": 1.0, "lstm": 1.0, "m5": 6.0}


def cluster(nodes: int, gpus: int, cpus: float = 24.0, memory_gb: float = 500.0) -> dict[str, Any]:
    return {
        "source": f"{nodes}x{gpus}",
        "description": f"{nodes} x {gpus} A100-40GB, {cpus:g} CPUs, {memory_gb:g} GB",
        "nodes": nodes,
        "gpus": nodes * gpus,
        "cpus": nodes * cpus,
        "memory_bytes": int(nodes * memory_gb * 1e9),
        "gpu_models": ["A100-40GB"],
        "node_gpus": [gpus] * nodes,
    }


def hand_record(
    jobs: list[dict[str, Any]],
    events: list[tuple[Any, ...]],
    *,
    rounds: list[dict[str, Any]] = (),  # type: ignore[assignment]
    cluster_info: dict[str, Any] | None = None,
    path: Path | None = None,
    placements: bool = True,
    label: str = "by hand",
    **info: Any,
) -> Record:
    """A record written by hand. jobs: dicts of schema.JOBS columns, of which missing ones are filled. events: (time_s,
    job, Kind, Reason, cores, GB, speed, [(node, gpus), ...]); values missing at the end are 0 or empty.
    """
    columns = {key: [job[key] for job in jobs] for key in jobs[0]}
    profile = {k: columns.pop(k) for k in ("isolated_s", "ideal_s", "ideal_cpus", "ideal_memory_bytes") if k in columns}
    table = jobs_table(Jobs.build(len(jobs), **columns), **{k: np.asarray(v, dtype=float) for k, v in profile.items()})
    run = RunInfo(label, cluster=cluster_info or cluster(2, 4), placements=placements, **info)
    with RecordWriter(path, run, table) as writer:
        for event in events:
            time_s, job, kind, reason, cores, gb, speed, where = (*event, *(0, 0, 0.0, [])[len(event) - 4 :])
            nodes = {
                "node_offset": [0, len(where)],
                "node_ids": [n for n, _ in where],
                "node_gpus": [g for _, g in where],
            }
            writer.append_events(
                time_s=[time_s], job=[job], kind=[kind], reason=[reason],
                cpu_milli=[round(cores * 1000)], memory_mb=[round(gb * 1000)], speed=[speed],
                **(nodes if placements else {}),
            )  # fmt: skip
        for row in rounds:
            writer.append_rounds(**{name: [value] for name, value in row.items()})
        return writer.close()


class _Rounds:
    """First-fit in arrival order every `lease` seconds; some jobs are preempted, moved or resized at random."""

    def __init__(self, rng: np.random.Generator, table: pl.DataFrame, nodes: int, gpus: int, boost: float) -> None:
        self.rng, self.gpus, self.boost = rng, gpus, boost
        self.free = np.full(nodes, gpus)
        self.table = table.to_dicts()
        self.left = [job["isolated_s"] for job in self.table]
        self.where: dict[int, list[tuple[int, float]]] = {}
        self.speed: dict[int, float] = {}
        self.cpus: dict[int, float] = {}
        self.total_cpus = 24.0 * nodes
        self.rows: list[tuple[Any, ...]] = []
        self.started: set[int] = set()
        self.waiting: list[int] = []

    def place(self, job: int) -> list[tuple[int, float]] | None:
        need, found = int(self.table[job]["gpus"]), []
        for node in np.flatnonzero(self.free):
            take = min(need, int(self.free[node]))
            found.append((int(node), float(take)))
            need -= take
            if not need:
                return found
        return None

    def hold(self, job: int, now: float, kind: Kind, reason: Reason) -> None:
        spec = self.table[job]
        share = 3.0 * spec["gpus"]
        free = self.total_cpus - sum(self.cpus.values()) + self.cpus.get(job, 0.0)
        cpus = min(spec["ideal_cpus"], share * self.rng.choice([1.0, self.boost]), free)
        self.cpus[job] = cpus
        self.speed[job] = max(0.5, min(3.0, cpus / share)) if spec["ideal_cpus"] > share else 1.0
        row = (now, job, kind, reason, cpus, 20.0 * spec["gpus"], self.speed[job], self.where[job])
        self.rows.append(row)

    def drop(self, job: int, now: float, kind: Kind, reason: Reason) -> None:
        for node, gpus in self.where.pop(job):
            self.free[node] += int(gpus)
        del self.cpus[job]
        self.rows.append((now, job, kind, reason, 0.0, 0.0, 0.0, []))

    def decide(self, now: float) -> None:
        for job in list(self.where):
            draw = self.rng.random()
            if draw < 0.01 and self.waiting:
                self.drop(job, now, Kind.PREEMPT, Reason.OUTRANKED)
                self.waiting.append(job)
            elif draw < 0.03:
                self.hold(job, now, Kind.RESIZE, Reason.GAVE_WAY)
        still = []
        for job in self.waiting:
            place = self.place(job)
            if place is None:
                reason = Reason.GPUS_FULL if not self.free.any() else Reason.GANG_TOO_LARGE_NOW
                if job not in self.started and self.rng.random() < 0.2:
                    self.rows.append((now, job, Kind.WAIT, reason, 0.0, 0.0, 0.0, []))
                still.append(job)
                continue
            for node, gpus in place:
                self.free[node] -= int(gpus)
            self.where[job] = place
            self.hold(job, now, Kind.RESUME if job in self.started else Kind.START, Reason.IN_ORDER)
            self.started.add(job)
        self.waiting = still

    def finish_until(self, now: float, lease: float) -> None:
        for job in list(self.where):
            self.left[job] -= lease * self.speed[job]
            if self.left[job] <= 1e-9:
                self.drop(job, now, Kind.FINISH, Reason.DONE)


def random_record(
    seed: int,
    *,
    jobs: int = 60,
    nodes: int = 4,
    gpus: int = 4,
    rate_per_h: float = 12.0,
    boost: float = 1.0,
    lease: float = 300.0,
    label: str = "fifo + proportional",
    path: Path | None = None,
    options: dict[str, Any] | None = None,
) -> Record:
    """A run of `jobs` jobs; `boost` > 1 gives CPU-hungry jobs more cores, so the run gets faster."""
    rng = np.random.default_rng(seed)
    model = rng.choice(MODELS, jobs)
    count = rng.choice([1, 2, 4, 8], jobs, p=[0.7, 0.1, 0.15, 0.05]).astype(float)
    count = np.minimum(count, nodes * gpus)
    duration = 60 * 10 ** rng.uniform(1.0, 2.7, jobs)
    work = Jobs.build(
        jobs,
        id=[f"job-{i}" for i in range(jobs)],
        arrival_s=np.cumsum(rng.exponential(3600 / rate_per_h, jobs)),
        gpus=count,
        duration_s=duration,
        model=model,
    )
    cpus = count * np.array([IDEAL_CPUS[m] for m in model])
    table = jobs_table(
        work, isolated_s=duration, ideal_s=duration / 2, ideal_cpus=cpus, ideal_memory_bytes=count * 60e9
    )
    engine = _Rounds(rng, table, nodes, gpus, boost)
    info = RunInfo(
        label,
        seed=seed,
        options=options or {},
        trace={"source": f"drawn with seed {seed}", "kept": jobs},
        cluster=cluster(nodes, gpus),
    )
    with RecordWriter(path, info, table) as writer:
        _run(engine, writer, work.arrival_s, lease, nodes, gpus)
        return writer.close()


def _run(engine: _Rounds, writer: RecordWriter, arrival_s: np.ndarray, lease: float, nodes: int, gpus: int) -> None:
    known, now, rounds = 0, 0.0, []
    while known < len(arrival_s) or engine.waiting or engine.where:
        now += lease
        while known < len(arrival_s) and arrival_s[known] <= now:
            engine.rows.append((float(arrival_s[known]), known, Kind.ARRIVE, Reason.NONE, 0.0, 0.0, 0.0, []))
            engine.waiting.append(known)
            known += 1
        engine.finish_until(now, lease)
        engine.decide(now)
        wanted = sum(engine.table[j]["gpus"] for j in [*engine.waiting, *engine.where])
        held = float(nodes * gpus - engine.free.sum())
        whole = float(gpus * (engine.free == gpus).sum())
        rounds.append((now, len(engine.where), len(engine.waiting), held, wanted, whole, 0, 0))
    rows = engine.rows
    offset = np.concatenate(([0], np.cumsum([len(r[7]) for r in rows])))
    writer.append_events(
        time_s=[r[0] for r in rows], job=[r[1] for r in rows], kind=[r[2] for r in rows],
        reason=[r[3] for r in rows], cpu_milli=[round(r[4] * 1000) for r in rows],
        memory_mb=[round(r[5] * 1000) for r in rows], speed=[r[6] for r in rows],
        node_offset=offset, node_ids=[n for r in rows for n, _ in r[7]], node_gpus=[g for r in rows for _, g in r[7]],
    )  # fmt: skip
    names = (
        "time_s", "running", "waiting", "gpus_held", "gpus_wanted", "gpus_free_whole_nodes", "cpu_milli_held",
        "memory_mb_held",
    )  # fmt: skip
    writer.append_rounds(**{name: [r[i] for r in rounds] for i, name in enumerate(names)})
