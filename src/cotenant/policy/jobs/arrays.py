"""The arrays that compiled policies read and write: a snapshot of jobs and cluster in the form that kernels take.

Amounts are integers, so that decisions are equal on every machine: CPU in thousandths of a core, memory in 10^6 bytes,
fractions of a GPU in thousandths. There are J jobs, T demand types (jobs with the same needs share one), L levels of
allotment (amounts of CPU and memory), K kinds of node and N nodes.

The arrays hold records, so that kernels have few arguments: the time to compile a kernel grows with the number of
arrays that pass through its calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Constants that kernels use have numpy types, because numba would compile a function again for every plain number.
ONE: Any = np.int64(1)
NONE: Any = np.int64(-1)

# Levels of allotment: how much CPU and memory a job gets. The optimal allotment chooses among the levels from GRID on.
PROPORTIONAL: Any = np.int64(0)
IDEAL: Any = np.int64(1)
DOWN: Any = np.int64(2)
GRID: Any = np.int64(3)

# value that stands for the level of a job that does not run
NOT_RUNNING: Any = np.int64(-1)

# what jobs of one demand type need, apart from CPU and memory
TYPE = np.dtype([
    ("gpus", "i8"),  # number of whole GPUs that the job needs; 1 for a job on a fraction of a GPU
    ("part_milli", "i8"),  # thousandths of one GPU that the job needs; 0: it needs whole GPUs
    ("multi_node_factor", "f8"),  # fraction of its speed that a job keeps when it runs on several nodes
    ("key_s", "f8"),  # seconds per iteration that the ordering assumes
    # seconds per iteration of a job that runs alone, with its proportional share, on the reference GPU
    ("isolated_s", "f8"),
    ("dominant", "f8"),  # the largest of the shares of the cluster's GPUs, CPU and memory that the ideal demand takes
    ("size", "f8"),  # the sum of the shares of the cluster's GPUs, CPU and memory that the ideal demand takes
    ("can_shrink", "?"),  # whether, on some kind of node, the ideal demand needs more CPU or memory than level DOWN
])  # fmt: skip

# CPU, memory and time per iteration at one level on one kind of node; amounts are per GPU, or in total for a job on a
# fraction of a GPU
AMOUNT = np.dtype([("cpu", "i8"), ("memory", "i8"), ("iteration_s", "f8")])

NODE = np.dtype([("gpus", "i8"), ("cpu", "i8"), ("memory", "i8"), ("kind", "i8")])

# what orderings read and decisions write for each job
JOB = np.dtype([
    ("type", "i8"),
    ("priority", "i8"),
    ("arrival_s", "f8"),
    ("total", "f8"),  # number of training iterations of the whole job
    ("done", "f8"),  # number of training iterations that the job has done
    ("attained_s", "f8"),  # seconds for which the job has run
    ("last_run_s", "f8"),  # end of the job's last lease; its arrival if it has not run
    ("rank", "i8"),  # position of the job when the jobs were last ordered
    ("key", "f8"),
    # whether the job's ordering key may have changed since the jobs were last ordered, so that it must be computed
    # again
    ("dirty", "?"),
    ("reserved", "?"),  # whether the job started by a reservation, and keeps its GPUs until it ends
    ("wanted", "i8"),  # level of CPU and memory that the optimal allotment chose for the job
    ("reason", "i8"),  # why the job got no GPUs in the last decision (core.events.Reason)
])  # fmt: skip

# where a job runs: `count` consecutive entries, beginning at `first`
GRANT = np.dtype([("first", "i8"), ("count", "i8"), ("level", "i8")])

FREE = np.dtype([
    ("free_gpus", "i8"),  # number of GPUs of which no job holds any part
    ("free_cpu", "i8"),
    ("free_memory", "i8"),
    ("head", "i8"),  # index of the node's newest entry in the table of jobs' parts; -1: the node has none
])  # fmt: skip

ENTRY = np.dtype([
    ("node", "i8"),
    ("gpus", "i8"),
    ("job", "i8"),
    ("next", "i8"),  # index of the next older entry of the same node
    ("slot", "i8"),  # index of the GPU, for a job on a fraction of one; -1 for whole GPUs
])  # fmt: skip


class Demand(NamedTuple):
    """What each demand type needs, and how fast it runs at each level of CPU and memory."""

    type: Array  #: TYPE[T]
    allowed: Array  # bool[T, K]: whether the type accepts the GPUs of this kind of node
    amount: Array  #: AMOUNT[L, T, K]


class Allocation(NamedTuple):
    """Where all jobs run, and what is free."""

    node: Array  #: FREE[N]
    entry: Array  #: ENTRY[E]
    job: Array  #: GRANT[J]
    slots: Array  # i8[N, S]: free thousandths of each GPU that is used in fractions; -1: the slot is not in use
    used: Array  # i8[2]: number of entries of `entry` in use, and number of free GPUs on all nodes
    free_kind: Array  # i8[K]: number of free GPUs on each kind of node
    # i8[L, T]: the first node on which a job of (level, type) may fit: no earlier node does. Valid as long as no job
    # releases anything
    pointer: Array
    bucket: Array  # u8[max GPUs + 1, words]: for each number of free GPUs, a bit set of the nodes with that number


def make_allocation(demand: Demand, nodes: Array, jobs: int) -> Allocation:
    """Return an allocation without jobs, whose arrays have the right size for the cluster; `placement.clear`
    initialises it.
    """
    parts = demand.type["part_milli"][demand.type["part_milli"] > 0]
    tenants_per_gpu = max(1, 1000 // int(parts.min())) if len(parts) else 1
    n, most = len(nodes), int(nodes["gpus"].max())
    levels, types, kinds = demand.amount.shape
    grants = np.zeros(jobs, GRANT)
    grants["level"] = NOT_RUNNING
    return Allocation(
        node=np.zeros(n, FREE),
        entry=np.zeros(int(nodes["gpus"].sum()) * tenants_per_gpu + 1, ENTRY),
        job=grants,
        slots=np.full((n, most if len(parts) else 1), -1, np.int64),
        used=np.zeros(2, np.int64),
        free_kind=np.zeros(kinds, np.int64),
        pointer=np.zeros((levels, types), np.int64),
        bucket=np.zeros((most + 1, (n + 63) // 64), np.uint64),
    )
