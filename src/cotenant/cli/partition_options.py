"""Options of the partition policies, declared once; trace_options.py shows how a command takes them."""

from __future__ import annotations

from cotenant.cli.added_options import Command, Options, with_options
from cotenant.sim.partition_options import MOST_MPS_JOBS, PartitionOptions

PANEL = "Partition or elastic policy (replaces ordering, allotment and placement)"
Text = str | None

PARTITION_OPTIONS: Options = {
    "policy": (Text, None, "whole, static, mps, miso, gavel, sia, ..."),
    "layout": (Text, None, "Policy static: MIG layout 3,2,2, or best."),
    "against": (Text, None, "Also simulate these policies and compare: whole,static or all."),
    "objective": (Text, None, "Objective: slowdown (default) or throughput."),
    "no_overheads": (bool, False, "Assume that moves and measurements take no time."),
    "disturb": (Text, None, "Jobs that restart at a new layout: moved (default) or all."),
    "horizon": (Text, None, "Move a job only if that pays off within this time (default: 300s)."),
    "profile_after": (Text, None, "Policy miso: run time after which a job is measured (default: 120s)."),
    "profile_time": (Text, None, "Policy miso: duration of a measurement (default: 30s)."),
    "profile_sole": (bool, False, "Policy miso: also measure each job alone."),
    "reconfigure_time": (Text, None, "Time that changing a layout takes (default: 4s)."),
    "checkpoint_time": (Text, None, "Time that saving a moved job takes (default: 0s)."),
    "mps_jobs": (int, 3, "Policy mps: jobs per GPU.", {"min": 1, "max": MOST_MPS_JOBS}),
    "double_memory": (bool | None, None, "With or without the double-memory 1g profile."),
}


def takes_partition_options(command: Command) -> Command:
    """Decorator that adds every partition option to a command, which receives them as `partition_options:
    PartitionOptions`.
    """
    return with_options(command, {PANEL: PARTITION_OPTIONS}, "partition_options", PartitionOptions)
