"""Input and output of a job policy as plain data: a Snapshot of jobs and cluster, and the Plan that is decided from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.core.cluster import Cluster
from cotenant.core.events import Reason
from cotenant.core.extras import needs
from cotenant.core.work import Jobs

with needs("sim"):
    import numpy as np
    from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Grant:
    """A job's share of the cluster: on node `nodes[i]` it holds `node_gpus[i]` GPUs (below 1: a fraction of one GPU),
    `node_cpus[i]` cores and `node_memory[i]` bytes.

    `level`: number that selects the amounts of CPU and memory, as policy/jobs/allotment.py describes; `speed`: relative
    to the job's speed with CPU and memory in proportion to its GPUs, on the GPU model to which the trace's times refer;
    `reserved`: whether a reservation started the job; `slot`: GPU that a fraction is of, -1 for whole GPUs.
    """

    job: str
    nodes: tuple[int, ...]
    node_gpus: tuple[float, ...]
    node_cpus: tuple[float, ...]
    node_memory: tuple[int, ...]
    level: int
    speed: float
    reserved: bool = False
    slot: int = -1


@dataclass(frozen=True)
class Snapshot:
    """Cluster and unfinished jobs at one moment; jobs are ordered by arrival.

    Arrays with one element per job: `done`: fraction of the work done, 0..1; `attained_s`: run time so far in seconds;
    `last_run_s`: time at which the job last ran (its arrival if it never ran). `running`: grants of the running jobs.
    `pinned`: ids of running jobs that must keep their GPUs. `held`: what is not to be planned, such as the resources of
    jobs on a node that does not answer; parts of GPUs in grants of their own. A job of `jobs` that is named there keeps
    them, and gets no grant in the plan.
    """

    cluster: Cluster
    jobs: Jobs
    done: Floats
    attained_s: Floats
    last_run_s: Floats
    running: tuple[Grant, ...] = ()
    pinned: frozenset[str] = frozenset()
    held: tuple[Grant, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The complete decision of a job policy: which jobs run with which grants, which stop, and why the others wait."""

    grants: tuple[Grant, ...]
    preempt: tuple[str, ...]
    waiting: dict[str, Reason] = field(default_factory=dict)
