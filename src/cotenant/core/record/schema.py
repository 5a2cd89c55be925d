"""The schema of a run's record, the same for simulated and real runs.

A record is a folder:

    run.json         the run (RunInfo): policy, cluster, trace, seed, options, schema version; no wall times
    jobs.parquet     one row per job, row i is job index i of the events
    events.parquet   what happened to jobs, in time order; events of the same time in the order of the decisions
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
    # run time if the job ran alone, with CPU and memory in proportion to its GPUs, on the reference GPU: the GPU model
    # to which the trace's times refer
    "isolated_s": pl.Float64(),
    "ideal_s": pl.Float64(),  # run time if the job ran alone, with as much CPU and memory as it can use
    "ideal_cpus": pl.Float64(),  # number of cores that the whole job can use
    "ideal_memory_bytes": pl.Float64(),
    "deadline_s": pl.Float64(),
}

EVENTS: dict[str, pl.DataType] = {
    "time_s": pl.Float64(),
    "job": pl.Int32(),  # row of jobs.parquet
    "kind": pl.Int8(),  # value of core.events.Kind
    "reason": pl.Int8(),  # value of core.events.Reason
    # thousandths of a core that the job holds from now on, over all nodes; 0 if it does not run
    "cpu_milli": pl.Int64(),
    # memory that the job holds from now on, in 10^6 bytes, over all nodes; 0 if it does not run
    "memory_mb": pl.Int64(),
    # speed relative to that with CPU and memory in proportion to the job's GPUs, on the reference GPU; 0 if the job
    # does not run
    "speed": pl.Float64(),
    # nodes on which the job runs from now on; null if the record has no placements, empty when not running
    "nodes": pl.List(pl.Int32()),
    "node_gpus": pl.List(pl.Float32()),  # number of GPUs that the job holds on each of those nodes
}

ROUNDS: dict[str, pl.DataType] = {
    "time_s": pl.Float64(),
    "running": pl.Int32(),  # number of running jobs after the decision
    "waiting": pl.Int32(),  # number of waiting jobs after the decision
    "gpus_held": pl.Float64(),
    "gpus_wanted": pl.Float64(),  # number of GPUs that all running and waiting jobs together want
    "gpus_free_whole_nodes": pl.Float64(),  # number of free GPUs on nodes without jobs
    "cpu_milli_held": pl.Int64(),
    "memory_mb_held": pl.Int64(),
}


@dataclass
class RunInfo:
    """Description of a run, stored as run.json. It depends only on the run's input and seed."""

    label: str  #: short name for tables and legends, such as "fifo + tune"
    kind: str = "training"  #: training | serving
    executor: str = "sim"  #: what ran the jobs: sim (simulator) | node | fleet
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  #: policy and engine options by their command-line names
    #: description of the trace, with the keys source, kept, left_out, remarks
    trace: dict[str, Any] = field(default_factory=dict)
    #: description of the cluster, with the keys description, nodes, gpus, cpus, memory_bytes, node_gpus
    cluster: dict[str, Any] = field(default_factory=dict)
    placements: bool = True  #: whether events have nodes; if False, moves are not recorded
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return the run's description as a plain dictionary for JSON."""
        return asdict(self)
