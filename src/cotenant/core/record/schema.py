"""The schema of a run's record, the same for simulated and real runs.

A record is a folder:

    run.json         the run (RunInfo): policy, cluster, trace, seed, options, schema version; no wall times
    jobs.parquet     one row per job, row i is job index i of the events
    events.parquet   what happened to jobs, in time order; equal times in the order decided
    rounds.parquet   one row per decision: what the cluster looked like after it

Times are seconds from the start of the trace.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import polars as pl

RUN_FILE = "run.json"
JOBS_FILE = "jobs.parquet"
EVENTS_FILE = "events.parquet"
ROUNDS_FILE = "rounds.parquet"
SCHEMA_VERSION = 1

JOBS: dict[str, pl.DataType] = {
    "id": pl.String(),
    "arrival_s": pl.Float64(),
    "gpus": pl.Float64(),
    "model": pl.String(),
    "tenant": pl.String(),
    "priority": pl.Int64(),
    "isolated_s": pl.Float64(),  # run time alone at the GPU-proportional share on the reference GPU
    "ideal_s": pl.Float64(),  # run time alone with ideal CPU and memory
    "ideal_cpus": pl.Float64(),  # total cores that the job can use
    "ideal_memory_bytes": pl.Float64(),
    "deadline_s": pl.Float64(),
}

EVENTS: dict[str, pl.DataType] = {
    "time_s": pl.Float64(),
    "job": pl.Int32(),  # row of jobs.parquet
    "kind": pl.Int8(),  # model.events.Kind
    "reason": pl.Int8(),  # model.events.Reason
    "cpu_milli": pl.Int64(),  # thousandths of a core held from now on, over all nodes; 0 when not running
    "memory_mb": pl.Int64(),  # 10^6 bytes held from now on, over all nodes
    "speed": pl.Float64(),  # speed relative to the proportional share on the reference GPU; 0 when not running
    # nodes on which the job runs from now on; null if the record has no placements, empty when not running
    "nodes": pl.List(pl.Int32()),
    "node_gpus": pl.List(pl.Float32()),  # GPUs held on each of those nodes
}

ROUNDS: dict[str, pl.DataType] = {
    "time_s": pl.Float64(),
    "running": pl.Int32(),  # jobs
    "waiting": pl.Int32(),  # jobs
    "gpus_held": pl.Float64(),
    "gpus_wanted": pl.Float64(),  # GPUs that running and waiting jobs want
    "gpus_free_whole_nodes": pl.Float64(),  # free GPUs on nodes without jobs
    "cpu_milli_held": pl.Int64(),
    "memory_mb_held": pl.Int64(),
}


@dataclass
class RunInfo:
    """Description of a run, stored as run.json. Depends only on input and seed."""

    label: str  #: short name for tables and legends, such as "fifo + tune"
    kind: str = "training"  #: training | serving
    executor: str = "sim"  #: sim | node | fleet
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  #: policy and engine options by their command-line names
    trace: dict[str, Any] = field(default_factory=dict)  #: source, kept, left_out, remarks
    #: keys: description, nodes, gpus, cpus, memory_bytes, node_gpus
    cluster: dict[str, Any] = field(default_factory=dict)
    placements: bool = True  #: False: events have no nodes, and moves are not recorded
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """The run's description as a plain dictionary for JSON."""
        return asdict(self)
