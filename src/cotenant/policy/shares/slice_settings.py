"""Settings for sharing a GPU by the hardware's time slices, and the time slices of tenants beside a latency-sensitive
one.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.policy.shares.account import MS_NS, SECOND_NS

TINY_US = 1  # time slice of best-effort tenants, which must give way at once to a latency-sensitive tenant
# Time slice of best-effort tenants that hold back launches and have only short kernels in flight. These kernels end
# within one slice, so the GPU need not run these tenants again while it serves latency-sensitive requests. Longer
# kernels are preempted.
BRIEF_US = 300


@dataclass(frozen=True)
class SliceSettings:
    """Properties of the hardware's time slices, and limits of their overheads. Times are nanoseconds; measured on an
    H100 (docs/decisions/0125).
    """

    switch_ns: int = 220_000
    # longest time slice that is set: up to this length, the hardware's slices last exactly as long as was set
    longest_ns: int = 100 * MS_NS
    shortest_ns: int = 200_000
    # largest fraction of the time that may be lost by switches between tenants that always have work
    switching: float = 0.01
    window_ns: int = 2 * SECOND_NS  # a tenant gets its share within a window of this length
    poll_ns: int = 50 * MS_NS  # time between two readings of the GPU time that tenants have used
    # largest fraction of its share that a tenant may lose because the window ends in the middle of a period of the
    # timetable
    edge: float = 0.006
    step_ns: int = 200 * MS_NS  # time between two corrections of the tenants' time slices
    first_step_ns: int = 50 * MS_NS  # time from when a tenant begins to work until the first correction of the slices
    # Sum of all tenants' slices until the first correction. It is so short that each tenant has many runs before the
    # correction. (A run is a time in which the GPU runs one tenant without a switch.) They show whether the tenant's
    # queue runs empty.
    first_period_ns: int = 12 * MS_NS
    # Length of a period of the timetable, in which tenants run one at a time. Beside a latency-sensitive tenant, the
    # period is longer: this value for each of the other tenants that compete for the GPU.
    period_ns: int = 100 * MS_NS
    # shortest turn of a tenant in a timetable; a tenant whose share is shorter has a turn only in some periods
    turn_ns: int = 5 * MS_NS
    # if more than this many runs of a tenant per second end because its queue is empty, and it gets less than its
    # share, tenants are run one at a time
    yields_per_s: float = 5.0
