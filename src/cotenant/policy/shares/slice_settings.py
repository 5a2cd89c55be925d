"""Settings of shares by the hardware's time slices, and the slices of tenants beside a latency-sensitive one."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.policy.shares.account import MS_NS, SECOND_NS

TINY_US = 1  # slice of best-effort tenants, which must yield at once to a latency-sensitive one
# slice of best-effort tenants that hold back launches and have only short kernels in flight: these end within it, so
# the GPU has nothing to return to between two requests; whatever is longer is preempted
BRIEF_US = 300


@dataclass(frozen=True)
class SliceSettings:
    """Properties of the hardware, and limits of overheads. Nanoseconds; measured on an H100 (docs/decisions/0125)."""

    switch_ns: int = 220_000
    longest_ns: int = 100 * MS_NS  # slices up to this length are exact
    shortest_ns: int = 200_000
    switching: float = 0.01  # largest fraction of the time lost to switches between tenants that always have work
    window_ns: int = 2 * SECOND_NS  # length of the window in which a tenant gets its share
    poll_ns: int = 50 * MS_NS  # time between two readings of what tenants have had
    # largest fraction of its share that a tenant may lose because the window ends within a period of the timetable
    edge: float = 0.006
    step_ns: int = 200 * MS_NS  # time between two corrections
    first_step_ns: int = 50 * MS_NS  # time from when a tenant has begun to work to the first correction
    first_period_ns: int = 12 * MS_NS  # sum of all slices until then, with enough runs to see whether queues run empty
    # length of a timetable's period; beside a latency-sensitive tenant, of each other tenant's part of it
    period_ns: int = 100 * MS_NS
    turn_ns: int = 5 * MS_NS  # shortest turn of a timetable; a tenant with less has a turn in some periods only
    yields_per_s: float = 5.0  # with more runs per second that end for lack of work, slices do not give the share
