"""The arrays that compiled policies read and write: a snapshot in the form of kernels' arguments.

Amounts are integers so that decisions are equal on every machine: CPU in thousandths of a core, memory in 10^6 bytes,
fractions of a GPU in thousandths. J jobs, T demand types (jobs with the same needs share one), L levels of allotment, K
kinds of node, N nodes.

Arrays hold records (one dtype per noun), so that kernels have few arguments: the time to compile a kernel grows with
the number of arrays that pass through its calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Constants used in kernels have numpy types: numba would compile a function again for every plain number.
ONE: Any = np.int64(1)
NONE: Any = np.int64(-1)

# levels of allotment; from GRID on: the points that the optimal allotment chooses among
PROPORTIONAL: Any = np.int64(0)
IDEAL: Any = np.int64(1)
DOWN: Any = np.int64(2)
GRID: Any = np.int64(3)

# a job's level while it does not run
NOT_RUNNING: Any = np.int64(-1)

# what a job of a demand type needs, independent of its grant
TYPE = np.dtype([
    ("gpus", "i8"),  # whole GPUs (1 for a job on part of a GPU)
    ("part_milli", "i8"),  # thousandths of one GPU; 0: whole GPUs
    ("multi_node_factor", "f8"),  # speed kept when spread over nodes
    ("key_s", "f8"),  # seconds per iteration that the ordering assumes
    ("isolated_s", "f8"),  # seconds per iteration alone at the proportional share on the reference GPU
    ("dominant", "f8"),  # largest share of the cluster over GPU, CPU and memory, at ideal demand
    ("size", "f8"),  # sum of those shares
    ("can_shrink", "?"),  # its ideal demand exceeds DOWN on some axis of some kind of node
])  # fmt: skip

# amounts at one level on one kind of node: per GPU (for a job on a fraction of a GPU: in total)
AMOUNT = np.dtype([("cpu", "i8"), ("memory", "i8"), ("iteration_s", "f8")])

NODE = np.dtype([("gpus", "i8"), ("cpu", "i8"), ("memory", "i8"), ("kind", "i8")])

# per-job state that orderings read and decisions write
JOB = np.dtype([
    ("type", "i8"),
    ("priority", "i8"),
    ("arrival_s", "f8"),
    ("total", "f8"),  # iterations in all
    ("done", "f8"),  # iterations done
    ("attained_s", "f8"),  # seconds that it has run
    ("last_run_s", "f8"),  # end of its last lease, or its arrival if it has not run
    ("rank", "i8"),  # its key when the jobs were last ordered
    ("key", "f8"),
    ("dirty", "?"),  # whether its key may have changed since
    ("reserved", "?"),  # it started by a reservation and keeps its GPUs until it ends
    ("wanted", "i8"),  # level that the optimal allotment chose
    ("reason", "i8"),  # why it got no share in the last decision (core.events.Reason)
])  # fmt: skip

# where a job runs: its entries are contiguous from `first`
GRANT = np.dtype([("first", "i8"), ("count", "i8"), ("level", "i8")])

FREE = np.dtype([
    ("free_gpus", "i8"),  # number of GPUs of which no job holds any part
    ("free_cpu", "i8"),
    ("free_memory", "i8"),
    ("head", "i8"),  # newest entry on the node, -1 none
])  # fmt: skip

ENTRY = np.dtype([
    ("node", "i8"),
    ("gpus", "i8"),
    ("job", "i8"),
    ("next", "i8"),  # next older entry on the same node
    ("slot", "i8"),  # slot of a part of a GPU, -1 for whole GPUs
])  # fmt: skip


class Demand(NamedTuple):
    """What each demand type takes and how fast it goes."""

    type: Array  #: TYPE[T]
    allowed: Array  #: bool[T, K] kinds of node whose GPUs it accepts
    amount: Array  #: AMOUNT[L, T, K]


class Allocation(NamedTuple):
    """The grants of all jobs."""

    node: Array  #: FREE[N]
    entry: Array  #: ENTRY[E]
    job: Array  #: GRANT[J]
    slots: Array  #: i8[N, S] free thousandths of GPUs held in parts; -1: slot not in use
    used: Array  #: i8[2] entries used; GPUs free over all nodes
    free_kind: Array  #: i8[K] GPUs free by kind of node
    pointer: Array  #: i8[L, T] no node before this one fits (level, type); valid while nothing is released
    bucket: Array  #: u8[max GPUs + 1, words] for each number of free GPUs a bit set of nodes


def make_allocation(demand: Demand, nodes: Array, jobs: int) -> Allocation:
    """An empty allocation sized for the cluster; filled by `placement.clear`."""
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
