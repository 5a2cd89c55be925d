"""Options of the partition policies, declared once; trace_options.py shows how a command takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.cli.trace_options import _with

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


@dataclass(frozen=True)
class PartitionOptions:
    """The options as the user wrote them; `policy` is None if no partition policy was requested."""

    policy: str | None = None
    layout: str | None = None
    against: str | None = None
    objective: str | None = None
    no_overheads: bool = False
    disturb: str | None = None
    horizon: str | None = None
    profile_after: str | None = None
    profile_time: str | None = None
    profile_sole: bool = False
    reconfigure_time: str | None = None
    checkpoint_time: str | None = None
    mps_jobs: int = 3
    double_memory: bool | None = None

    def given(self) -> list[str]:
        """Names of the options that were given, except `policy`."""
        plain = PartitionOptions()
        return [n for n in self.__dataclass_fields__ if n != "policy" and getattr(self, n) != getattr(plain, n)]

    def rules(self, placement: str | None) -> dict[str, Any]:
        """Fields of PartitionRules other than policy and layout."""
        from cotenant.core.units import parse_seconds

        fields: dict[str, Any] = {
            "overheads": not self.no_overheads,
            "profile_sole": self.profile_sole,
            "mps_jobs": self.mps_jobs,
        }
        for name, text in (("objective", self.objective), ("disturb", self.disturb), ("placement", placement)):
            if text is not None:
                fields[name] = text
        for name, text, option in (
            ("horizon_s", self.horizon, "horizon"),
            ("profile_after_s", self.profile_after, "profile-after"),
            ("profile_s", self.profile_time, "profile-time"),
            ("reconfigure_s", self.reconfigure_time, "reconfigure-time"),
            ("checkpoint_s", self.checkpoint_time, "checkpoint-time"),
        ):
            if text is not None:
                fields[name] = parse_seconds(text, field=option)
        return fields


def takes_partition_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds every partition option to a command, which receives them as `partition_options:
    PartitionOptions`.
    """
    return _with(command, PARTITION_OPTIONS, "partition_options", PartitionOptions)
