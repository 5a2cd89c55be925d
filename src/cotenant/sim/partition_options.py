"""Options of the partition policies, as the command line and sweep files name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cotenant.core.errors import InputError
from cotenant.core.units import parse_seconds

SHARED = ("placement", "default_profile")  # options of ordinary job policies that partition policies have, too
MOST_MPS_JOBS = 48  # largest number of processes that MPS serves on one GPU


@dataclass(frozen=True)
class PartitionOptions:
    """The options of a partition policy as the user wrote them; `policy` is None if no partition policy was requested.
    """

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

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> PartitionOptions:
        """Read the options from a file, whose values are texts, numbers and booleans."""
        made: dict[str, Any] = {}
        for name, value in values.items():
            if name in ("no_overheads", "profile_sole", "double_memory"):
                if not isinstance(value, bool):
                    raise InputError(f"{value!r} is neither true nor false", field=name)
                made[name] = value
            elif name == "mps_jobs":
                if not isinstance(value, int) or not 1 <= value <= MOST_MPS_JOBS:
                    raise InputError(f"{value!r} is not a whole number from 1 to {MOST_MPS_JOBS}", field=name)
                made[name] = value
            else:
                made[name] = str(value)
        return cls(**made)

    def given(self) -> list[str]:
        """Return the names of the partition options that were given, except `policy`."""
        plain = PartitionOptions()
        return [n for n in self.__dataclass_fields__ if n != "policy" and getattr(self, n) != getattr(plain, n)]

    def rules(self, placement: str | None) -> dict[str, Any]:
        """Return the fields of PartitionRules other than policy and layout."""
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
