"""Options of the partition policies, declared once; trace_options.py shows how a command takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.added_options import with_options
from cotenant.sim.partition_options import PartitionOptions

if TYPE_CHECKING:
    from collections.abc import Callable

PANEL = "Partition or elastic policy (replaces ordering, allotment and placement)"
Text = str | None


def _option(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=PANEL, **more)


PARTITION_OPTIONS: dict[str, tuple[Any, Any]] = {
    "policy": (Annotated[Text, _option("--policy", help="whole, static, mps, miso, gavel, sia, ...")], None),
    "layout": (Annotated[Text, _option("--layout", help="Policy static: MIG layout 3,2,2, or best.")], None),
    "against": (
        Annotated[Text, _option("--against", help="Also simulate these policies and compare: whole,static or all.")],
        None,
    ),
    "objective": (Annotated[Text, _option("--objective", help="Objective: slowdown (default) or throughput.")], None),
    "no_overheads": (
        Annotated[bool, _option("--no-overheads", help="Assume that moves and measurements take no time.")],
        False,
    ),
    "disturb": (
        Annotated[Text, _option("--disturb", help="Jobs that restart at a new layout: moved (default) or all.")],
        None,
    ),
    "horizon": (
        Annotated[
            Text, _option("--horizon", help="Move a job only if that pays off within this time (default: 300s).")
        ],
        None,
    ),
    "profile_after": (
        Annotated[
            Text,
            _option("--profile-after", help="Policy miso: run time after which a job is measured (default: 120s)."),
        ],
        None,
    ),
    "profile_time": (
        Annotated[Text, _option("--profile-time", help="Policy miso: duration of a measurement (default: 30s).")],
        None,
    ),
    "profile_sole": (
        Annotated[bool, _option("--profile-sole", help="Policy miso: also measure each job alone.")],
        False,
    ),
    "reconfigure_time": (
        Annotated[Text, _option("--reconfigure-time", help="Time that changing a layout takes (default: 4s).")],
        None,
    ),
    "checkpoint_time": (
        Annotated[Text, _option("--checkpoint-time", help="Time that saving a moved job takes (default: 0s).")],
        None,
    ),
    "mps_jobs": (Annotated[int, _option("--mps-jobs", help="Policy mps: jobs per GPU.", min=1, max=48)], 3),
    "double_memory": (
        Annotated[
            bool | None,
            _option("--double-memory/--no-double-memory", help="With or without the double-memory 1g profile."),
        ],
        None,
    ),
}


def takes_partition_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds every partition option to a command, which receives them as `partition_options:
    PartitionOptions`.
    """
    return with_options(command, PARTITION_OPTIONS, "partition_options", PartitionOptions)
