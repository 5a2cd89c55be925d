"""Converts the log of a run of a partition policy into a record, in the schema of all runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from cotenant.core.cluster import Cluster
from cotenant.core.events import Kind
from cotenant.core.mig import Geometry
from cotenant.core.record.record import Record, cluster_info, jobs_table
from cotenant.core.record.schema import RunInfo
from cotenant.core.record.writer import RecordWriter
from cotenant.core.work import Trace
from cotenant.policy.mig.decide import PartitionRules
from cotenant.sim.mig.engine import PartitionEngine
from cotenant.sim.mig.state import Entry

HOLDS = (Kind.START, Kind.RESUME, Kind.MOVE, Kind.RESIZE, Kind.PROFILE, Kind.REPARTITION)


def write_record(
    trace: Trace,
    cluster: Cluster,
    rules: PartitionRules,
    geo: Geometry,
    work_s: np.ndarray,
    launch_s: np.ndarray,
    engine: PartitionEngine,
    out: Path | None,
    label: str | None,
    seed: int,
    more_options: Mapping[str, object] | None = None,
) -> Record:
    """Write the record of a finished run of a partition policy, or keep it in memory."""
    options = asdict(rules) | {"layout": geo.format(rules.layout) if rules.layout else None}
    info = RunInfo(
        label=label or (f"static {options['layout']}" if rules.layout else rules.policy),
        seed=seed,
        options=options | {"gpu_geometry": geo.gpu, "double_memory": "1g+" in geo.kinds, **(more_options or {})},
        trace={"source": trace.source, "jobs": len(trace.jobs), "left_out": trace.left_out, "remarks": trace.remarks},
        cluster=cluster_info(cluster),
    )
    alone = work_s + launch_s
    with RecordWriter(out, info, jobs_table(trace.jobs, isolated_s=alone, ideal_s=alone)) as writer:
        _events(writer, cluster, engine)
        _rounds(writer, cluster, engine)
        return writer.close()


def _per_gpu(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """Return CPU (thousandths of a core) and memory (MB) for each GPU, by node."""
    groups = [g for g in cluster.groups if g.gpus for _ in range(g.count)]
    cpus = np.array([g.cpus * 1000 / g.gpus for g in groups])
    return cpus, np.array([g.memory_bytes / 1e6 / g.gpus for g in groups])


def _held(entry: Entry, nodes: list[int]) -> list[tuple[int, float]]:
    """Return (node, number of GPUs held there) for an entry of the log."""
    if entry.kind not in HOLDS or not entry.gpus:
        return []
    each = entry.share / len(entry.gpus)
    on: dict[int, float] = {}
    for gpu in entry.gpus:
        on[nodes[gpu]] = on.get(nodes[gpu], 0.0) + each
    return sorted(on.items())


def _events(writer: RecordWriter, cluster: Cluster, engine: PartitionEngine) -> None:
    cpus, memory = _per_gpu(cluster)
    held = [_held(e, engine.data.nodes) for e in engine.log]
    flat = [pair for pairs in held for pair in pairs]
    writer.append_events(
        time_s=[e.time_s for e in engine.log],
        job=[e.job for e in engine.log],
        kind=[int(e.kind) for e in engine.log],
        reason=[int(e.reason) for e in engine.log],
        cpu_milli=[int(sum(cpus[n] * g for n, g in pairs)) for pairs in held],
        memory_mb=[int(sum(memory[n] * g for n, g in pairs)) for pairs in held],
        speed=[e.speed for e in engine.log],
        node_offset=np.concatenate(([0], np.cumsum([len(p) for p in held]))),
        node_ids=[n for n, _ in flat],
        node_gpus=[g for _, g in flat],
    )


def _rounds(writer: RecordWriter, cluster: Cluster, engine: PartitionEngine) -> None:
    """Write one row for each time at which a decision was made."""
    cpus, memory = _per_gpu(cluster)
    sizes = [g.gpus for g in cluster.groups if g.gpus for _ in range(g.count)]
    wanted = engine.data.gpus
    now: dict[int, list[tuple[int, float]]] = {}
    users = [0] * len(sizes)
    present = 0.0
    waiting = 0
    free = sum(sizes)
    gpus = cpu = mem = 0.0
    rows: list[tuple[float, ...]] = []
    for i, e in enumerate(engine.log):
        before, after = now.get(e.job, []), _held(e, engine.data.nodes)
        if e.kind is Kind.ARRIVE:
            present += wanted[e.job]
        elif e.kind is Kind.FINISH:
            present -= wanted[e.job]
        waiting += (e.kind in (Kind.ARRIVE, Kind.PREEMPT)) - (e.kind in (Kind.START, Kind.RESUME))
        for pairs, sign in ((before, -1), (after, 1)):
            for n, g in pairs:
                gpus, cpu, mem = gpus + sign * g, cpu + sign * g * cpus[n], mem + sign * g * memory[n]
                was = users[n]
                users[n] += sign
                free += sizes[n] * ((users[n] == 0) - (was == 0))
        if after:
            now[e.job] = after
        else:
            now.pop(e.job, None)
        if i + 1 == len(engine.log) or engine.log[i + 1].time_s > e.time_s:
            rows.append((e.time_s, len(now), waiting, max(gpus, 0.0), present, free, max(cpu, 0.0), max(mem, 0.0)))
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    names = (
        "time_s",
        "running",
        "waiting",
        "gpus_held",
        "gpus_wanted",
        "gpus_free_whole_nodes",
        "cpu_milli_held",
        "memory_mb_held",
    )
    writer.append_rounds(**dict(zip(names, columns, strict=True)))
