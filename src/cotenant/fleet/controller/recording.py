"""Exports a fleet's store as a record, in the same schema as simulated runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cotenant.core.cluster import Cluster
from cotenant.core.errors import InputError, WorkError
from cotenant.core.record.record import Record, cluster_info, jobs_table
from cotenant.core.record.schema import ROUNDS, RunInfo
from cotenant.core.record.writer import RecordWriter
from cotenant.core.work import Jobs
from cotenant.fleet.controller.planners import cluster_of, jobs_of, reference_share
from cotenant.fleet.controller.profiles import ProfileBook
from cotenant.fleet.jobs import spec_from_dict
from cotenant.fleet.nodes import NodeSpec, by_number, node_from_dict
from cotenant.fleet.state import Job
from cotenant.fleet.store.jobs import Store
from cotenant.policy.jobs.arrays import IDEAL
from cotenant.policy.jobs.demand import build_workload
from cotenant.profiles.training.tables import load_profiles

Bools = npt.NDArray[np.bool_]


def record_of(folder: Path, out: Path | None = None, profiles: ProfileBook | None = None) -> Record:
    """Return the record of the fleet up to now, in memory or written to `out`, whether or not the fleet runs. Raises
    WorkError if `folder` is not that of a fleet, or if the fleet had no nodes yet.
    """
    store = Store(folder, read_only=True)
    try:
        return _record(store, out, profiles)
    finally:
        store.close()


def error_of(folder: Path, job: str) -> str:
    """What ended a job's last attempt, in the words of `cotenant queue`; empty if nothing went wrong."""
    store = Store(folder, read_only=True)
    try:
        found = store.rows("SELECT exit FROM jobs WHERE id=?", (job,))
    finally:
        store.close()
    return str(json.loads(found[0][0]).get("error") or "") if found and found[0][0] else ""


def _record(store: Store, out: Path | None, profiles: ProfileBook | None) -> Record:
    run = json.loads(store.meta("run") or "{}")
    nodes = [_undivided(node_from_dict(n)) for n in run.get("nodes", [])]
    nodes.sort(key=lambda n: by_number(n.name))
    if not nodes:
        raise WorkError("this fleet had no nodes yet")
    jobs = [
        Job(row, id_, spec_from_dict(json.loads(spec)), arrival_s)
        for row, id_, spec, arrival_s in store.rows("SELECT row, id, spec, arrival_s FROM jobs ORDER BY row")
    ]
    book = profiles or ProfileBook(load_profiles(run.get("profiles")), run.get("default_profile"))
    cluster = cluster_of(nodes)
    arrays = jobs_of(jobs, book)
    stated = np.array([j.spec.duration_s is not None or j.spec.iterations is not None for j in jobs], dtype=bool)
    described = run.get("policy", {})
    info = RunInfo(
        label=described.get("label", "fleet"),
        executor="fleet",
        options={k: v for k, v in described.items() if k != "label"} | {"lease_s": run.get("lease_s")},
        trace={"source": "fleet", "jobs": len(jobs), "left_out": {}, "remarks": []},
        cluster=cluster_info(cluster) | {"node_names": [n.name for n in nodes]},
    )
    index = {node.name: i for i, node in enumerate(nodes)}
    with RecordWriter(out, info, _table(arrays, cluster, book, nodes, stated)) as writer:
        _events(store, writer, index)
        rounds = store.rows(f"SELECT {', '.join(ROUNDS)} FROM rounds ORDER BY time_s")
        if rounds:
            columns = list(zip(*rounds, strict=True))
            writer.append_rounds(**dict(zip(ROUNDS, columns, strict=True)))
        return writer.close()


def _undivided(node: NodeSpec) -> NodeSpec:
    """The node with whole GPUs: a record counts a MIG instance as a part of its GPU."""
    return dataclasses.replace(node, gpus=tuple(dataclasses.replace(gpu, instances=()) for gpu in node.gpus))


def _events(store: Store, writer: RecordWriter, index: dict[str, int]) -> None:
    """Write all events of the fleet's jobs to the record in order of time; events of one time keep their order."""
    rows = store.rows(
        "SELECT time_s, job, kind, reason, cpu_milli, memory_mb, speed, places FROM events ORDER BY time_s, number"
    )
    if not rows:
        return
    offsets, ids, gpus = [0], [], []
    for row in rows:
        for name, count in json.loads(row[7]) if row[7] else ():
            ids.append(index.get(name, 0))
            gpus.append(count)
        offsets.append(len(ids))
    names = ("time_s", "job", "kind", "reason", "cpu_milli", "memory_mb", "speed")
    columns: dict[str, Any] = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    writer.append_events(
        **columns,
        node_offset=np.array(offsets),
        node_ids=np.array(ids, dtype=np.int32),
        node_gpus=np.array(gpus, dtype=np.float32),
    )


def _table(arrays: Jobs, cluster: Cluster, book: ProfileBook, nodes: list[NodeSpec], stated: Bools) -> Any:
    """Build the record's table of jobs, with each job's ideal CPU and memory by its profile. Jobs that state a duration
    or iterations (`stated`) also get their run times alone by the profile. If a job no longer fits the cluster, the
    table has nothing from profiles.
    """
    try:
        work = build_workload(arrays, book.merged(reference_share(nodes)), cluster)
    except (InputError, ValueError):
        return jobs_table(arrays)
    demand, types = work.demand, work.type
    rows, reference = np.arange(len(demand.type)), np.argmax(demand.allowed, axis=1)
    ideal = demand.amount[IDEAL, rows, reference]
    return jobs_table(
        arrays,
        isolated_s=np.where(stated, demand.type["isolated_s"][types] * work.iterations, np.nan),
        ideal_s=np.where(stated, ideal["iteration_s"][types] * work.iterations, np.nan),
        ideal_cpus=(ideal["cpu"] * demand.type["gpus"])[types] / 1000.0,
        ideal_memory_bytes=(ideal["memory"] * demand.type["gpus"])[types] * 1e6,
    )
