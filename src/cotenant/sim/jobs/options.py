"""The options of a training simulation, named as on the command line. A test ensures that their defaults equal those of
JobPolicy and EngineOptions, the classes for which they are converted."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from cotenant.core.checked import Numbers, worded
from cotenant.core.errors import InputError
from cotenant.core.units import parse_seconds

Finish = Literal["exact", "lease-end"]
Speeds = Literal["matrix", "two-speed"]
Recorded = Literal["auto", "all", "no-moves"]


class TrainingConfig(Numbers):
    """Policy and engine options of a training simulation, named as on the command line (docs/policies.md).

    Times accept "300s", "5min" or seconds. Created by `training_config` (below), which turns an invalid value into an
    InputError with the option's name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ordering: str = "fifo"
    allotment: str = "tune"
    placement: str = "first-fit"
    speeds: Speeds = "matrix"
    lease: float = Field(default=300.0, gt=0, le=365 * 86400)
    finish: Finish = "exact"
    restart_cost: float = Field(default=0.0, ge=0)
    checkpoint_cost: float = Field(default=0.0, ge=0)
    reserve_after: float = Field(default=math.inf, gt=0)
    # whether running jobs keep their GPUs; None: true if moving a job takes time, false if it does not
    sticky: bool | None = None
    solver_limit: float = Field(default=1.0, gt=0, le=3600)
    queues: tuple[float, ...] = (3600.0, 36000.0)
    gittins_sample: str | None = None
    profiles: str | None = None
    default_profile: str | None = None
    trace_gpu: str | None = None
    record: Recorded = "auto"
    skip_too_large: bool = False
    # (first, end): the record's figures about jobs cover only the jobs whose number is at least `first` and below
    # `end`; jobs are numbered from 0 in order of arrival. None: all jobs.
    measure: tuple[int, int] | None = None

    @field_validator("lease", "restart_cost", "checkpoint_cost", "reserve_after", "solver_limit", mode="before")
    @classmethod
    def _time(cls, value: Any, info: ValidationInfo) -> Any:
        dashed = (info.field_name or "").replace("_", "-")
        return parse_seconds(value, field=dashed) if isinstance(value, str) else value

    @field_validator("queues", mode="before")
    @classmethod
    def _queues(cls, value: Any) -> Any:
        limits = value.split(",") if isinstance(value, str) else value
        if isinstance(limits, list | tuple):
            limits = tuple(parse_seconds(x, field="queues") if isinstance(x, str) else x for x in limits)
            numbers = all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in limits)
            if not limits or not numbers or list(limits) != sorted(set(limits)):
                raise InputError(f"{value!r} is not a list of rising limits, such as 1h,10h", field="queues")
        return limits

    @field_validator("measure", mode="before")
    @classmethod
    def _measure(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        first, _, last = value.partition("-")
        if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            raise InputError(
                f"{value!r} is not FROM-TO; 4000-5000 means jobs 4000 to 4999 by arrival, counted from 0",
                field="measure",
            )
        return int(first), int(last)

    @property
    def is_sticky(self) -> bool:
        """Whether running jobs keep their GPUs: the option `sticky` if it is given, otherwise true if moving a job
        takes time.
        """
        return self.restart_cost + self.checkpoint_cost > 0 if self.sticky is None else self.sticky


def training_config(values: dict[str, Any]) -> TrainingConfig:
    """Return the validated options. Names may be written with dashes. InputError names the field."""
    try:
        return TrainingConfig(**{name.replace("-", "_"): value for name, value in values.items()})
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part).replace("_", "-") for part in problem["loc"])
        given = values.get(field, values.get(field.replace("-", "_"), problem["input"]))
        text = worded({**problem, "input": given}, seconds=field in _TIMES)
        if problem["type"] == "extra_forbidden":
            text = "is not an option"
        raise InputError(text, field=field) from None


_TIMES = ("lease", "restart-cost", "checkpoint-cost", "reserve-after", "solver-limit")
