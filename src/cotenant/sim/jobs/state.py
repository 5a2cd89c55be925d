"""The state of a simulated run as arrays, and the buffers for its events."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cotenant.policy.jobs.arrays import ENTRY, Allocation, Array, Demand, make_allocation
from cotenant.policy.jobs.ordering import Context
from cotenant.policy.jobs.rounds import Choice, Scratch, make_scratch

EVENT_ROOM = 1 << 16
ROUND_ROOM = 1 << 14

# the indices of the counters in the array `counters`
(C_PHASE, C_TICK, C_ACTIVE, C_NEXT, C_EMIT, C_FINISHED, C_TOLD, C_EVENTS, C_NODES, C_ROUNDS, C_RUNNING, C_FRESH,
 C_SAME, C_DECISIONS, C_STALLED, C_IDLE, C_MORE) = range(17)  # fmt: skip

# the simulator's state of a job; policies do not read it
PROGRESS = np.dtype([
    ("iteration_s", "f8"),  # seconds per iteration with the job's current resources
    ("finish_s", "f8"),  # time at which the job ended; NaN while it has not
    ("debt_s", "f8"),  # time for restarts and checkpoints that the job must still spend before it does work
    ("resume_s", "f8"),  # time that is lost when a job which ran before starts again or moves (checkpoint and restart)
    ("started", "?"),  # whether the job has run before
    ("told_waiting", "?"),
    # What the previous decision granted to the job: its `old_count` entries in Run.old_entry (each is its part on one
    # node), beginning at `old_first`, and its level of CPU and memory.
    ("old_first", "i8"),
    ("old_count", "i8"),
    ("old_level", "i8"),
])  # fmt: skip

# the columns of the record's table of events; node_end: end of the event's nodes in the buffer of nodes
EVENT = np.dtype([
    ("time_s", "f8"), ("job", "i8"), ("kind", "i8"), ("reason", "i8"), ("cpu_milli", "i8"), ("memory_mb", "i8"),
    ("speed", "f8"), ("node_end", "i8"),
])  # fmt: skip
EVENT_NODE = np.dtype([("node", "i8"), ("gpus", "f8")])
ROUND = np.dtype([
    ("time_s", "f8"), ("running", "i8"), ("waiting", "i8"), ("gpus_held", "f8"), ("gpus_wanted", "f8"),
    ("gpus_free_whole_nodes", "f8"), ("cpu_milli_held", "i8"), ("memory_mb_held", "i8"),
])  # fmt: skip


class Options(NamedTuple):
    """Options of the compiled event loop. Times are in seconds."""

    lease_s: float
    exact_finish: bool  #: a job ends as soon as its work is done, not at the end of its lease
    whole_iterations: bool  #: a lease credits whole iterations only, as the public Synergy simulator does
    record_moves: bool
    idle_limit: int  #: a run is aborted after this many rounds without any work except restarts
    moves_matter: bool  # whether moves are recorded, cost time or may change the speed
    # a run ends when jobs wait on an idle cluster for more than this many successive rounds after the last arrival
    patience: int = 0


class Run(NamedTuple):
    """The part of a simulated run's state that changes during the run, besides `World.jobs`. There are J jobs and E
    entries of allocations.
    """

    job: Array  #: PROGRESS[J]
    order: Array  # i8[J]: unfinished jobs, in the order of the last decision
    previous_order: Array  #: i8[J]
    sort_scratch: Array  #: i8[2J]
    old_entry: Array  # ENTRY[E]: the entries (jobs' parts on nodes) of the previous decision
    ended: Array  # i8[J]: jobs that finished in the last lease (round), in the order of their finish times
    counters: Array  #: i8[17]
    wanted_gpus: Array  # f8[1]: number of GPUs that unfinished jobs request


class Buffers(NamedTuple):
    """Buffers for the events and rounds that are not yet written to the record."""

    event: Array  #: EVENT[...]
    node: Array  #: EVENT_NODE[...]
    round: Array  #: ROUND[...]


class World(NamedTuple):
    """All arrays of the compiled event loop (kernel.py)."""

    jobs: Array  #: policy.arrays.JOB[J]
    run: Run
    alloc: Allocation
    demand: Demand
    nodes: Array  #: policy.arrays.NODE[N]
    choice: Choice
    context: Context
    options: Options
    scratch: Scratch
    out: Buffers


def make_progress(jobs: int) -> Array:
    """Return PROGRESS[jobs] for jobs that have not arrived yet."""
    progress = np.zeros(jobs, PROGRESS)
    progress["finish_s"] = np.nan
    progress["old_level"] = -1
    return progress


def make_run(jobs: int, entries: int) -> Run:
    """Return the initial value of the state that changes during a run."""
    return Run(
        job=make_progress(jobs),
        order=np.zeros(jobs, np.int64),
        previous_order=np.zeros(jobs, np.int64),
        sort_scratch=np.zeros(2 * jobs, np.int64),
        old_entry=np.zeros(entries, ENTRY),
        ended=np.zeros(jobs, np.int64),
        counters=np.zeros(C_MORE + 1, np.int64),
        wanted_gpus=np.zeros(1),
    )


def make_world(jobs: Array, demand: Demand, nodes: Array, choice: Choice, context: Context, options: Options) -> World:
    """Return all arrays of a simulated run, before its start."""
    j = len(jobs)
    alloc = make_allocation(demand, nodes, j)
    e = len(alloc.entry)
    out = Buffers(
        event=np.zeros(EVENT_ROOM, EVENT),
        node=np.zeros(max(4 * EVENT_ROOM, 2 * e), EVENT_NODE),
        round=np.zeros(ROUND_ROOM, ROUND),
    )
    return World(jobs, make_run(j, e), alloc, demand, nodes, choice, context, options, make_scratch(alloc), out)
