"""A run's record in memory: columns as numpy arrays, placements as flat node lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cotenant.core.cluster import Cluster
from cotenant.core.record.schema import JOBS, RunInfo
from cotenant.core.work import Jobs

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Placements:
    """Where jobs ran: event i holds the nodes nodes[offset[i]:offset[i+1]], with the GPUs held on each in a parallel
    array.
    """

    offset: NDArray[np.int64]  #: length events + 1
    nodes: NDArray[np.int32]
    gpus: NDArray[np.float32]

    def at(self, event: int) -> list[tuple[int, float]]:
        """Return (node, GPUs held there) of one event, in recorded order."""
        low, high = int(self.offset[event]), int(self.offset[event + 1])
        return [(int(n), float(g)) for n, g in zip(self.nodes[low:high], self.gpus[low:high], strict=True)]

    def gpus_held(self) -> Floats:
        """Return the number of GPUs that the job of each event holds after it, over all nodes."""
        sums = np.concatenate(([0.0], np.cumsum(self.gpus, dtype=np.float64)))
        # Differences of a long cumulative sum have rounding errors. Recorded shares are multiples of a millionth of a
        # GPU, so rounding removes the errors.
        return np.asarray(np.round(sums[self.offset[1:]] - sums[self.offset[:-1]], 6))


@dataclass(frozen=True)
class Events:
    """Events of jobs, n rows in time order; the columns are those of schema.EVENTS without the node lists."""

    time_s: Floats
    job: NDArray[np.int32]
    kind: NDArray[np.int8]
    reason: NDArray[np.int8]
    cpu_milli: NDArray[np.int64]
    memory_mb: NDArray[np.int64]
    speed: Floats

    def __len__(self) -> int:
        return len(self.time_s)


@dataclass
class Record:
    """The record of one run: its description, jobs, events and rounds.

    `path` is the folder it was read from, None if the run was never written. Node lists are loaded on first use, since
    most metrics do not need them.
    """

    info: RunInfo
    jobs: pl.DataFrame  #: columns of schema.JOBS
    events: Events
    rounds: pl.DataFrame  #: columns of schema.ROUNDS
    path: Path | None = None
    load_placements: Callable[[], Placements | None] = field(default=lambda: None, repr=False)

    @cached_property
    def placements(self) -> Placements | None:
        """Return where jobs ran, or None if the record has no placements."""
        return self.load_placements()

    def job(self, column: str) -> NDArray[Any]:
        """Return a column of the jobs table, one value per job."""
        return self.jobs[column].to_numpy()

    @property
    def end_s(self) -> float:
        """Return the time of the last event or round, seconds from the start of the trace; 0 for an empty record."""
        ends = [float(times[-1]) for times in (self.events.time_s, self.rounds["time_s"].to_numpy()) if len(times)]
        return max(ends, default=0.0)


def jobs_table(
    jobs: Jobs,
    *,
    isolated_s: Floats | None = None,
    ideal_s: Floats | None = None,
    ideal_cpus: Floats | None = None,
    ideal_memory_bytes: Floats | None = None,
) -> pl.DataFrame:
    """Make the jobs table of a record, from a trace's jobs and their profiles.

    Arrays have the length of `jobs`. `isolated_s` defaults to the trace's durations; `ideal_s` to `isolated_s`; ideal
    CPU (cores) and memory (bytes) to the job's demands. NaN means unknown.
    """
    alone = np.asarray(jobs.duration_s if isolated_s is None else isolated_s, dtype=np.float64)
    columns: dict[str, Any] = {
        "id": jobs.id.astype(str),
        "arrival_s": jobs.arrival_s,
        "gpus": jobs.gpus,
        "model": jobs.model.astype(str),
        "tenant": jobs.tenant.astype(str),
        "priority": jobs.priority,
        "isolated_s": alone,
        "ideal_s": alone if ideal_s is None else ideal_s,
        "ideal_cpus": jobs.cpus if ideal_cpus is None else ideal_cpus,
        "ideal_memory_bytes": jobs.memory_bytes if ideal_memory_bytes is None else ideal_memory_bytes,
        "deadline_s": jobs.deadline_s,
    }
    return pl.DataFrame(columns, schema=JOBS)


def cluster_info(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as stored in a record: totals, and the GPUs of each node that has any, with their model as an
    index into `gpu_models`, in the order of node ids.
    """
    return {
        "description": cluster.describe(),
        "nodes": cluster.total_nodes,
        "gpus": cluster.total_gpus,
        "cpus": cluster.total_cpus,
        "memory_bytes": cluster.total_memory_bytes,
        "gpu_models": list(cluster.gpu_models),
        "gpus_by_model": [
            sum(g.count * g.gpus for g in cluster.groups if g.gpu.name == name) for name in cluster.gpu_models
        ],
        "node_gpus": [g.gpus for g in cluster.groups if g.gpus for _ in range(g.count)],
        "node_models": [cluster.gpu_models.index(g.gpu.name) for g in cluster.groups if g.gpus for _ in range(g.count)],
    }
