"""The description of a Prometheus metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """A metric: name, kind, help text and names of its labels. `buckets`: upper bounds of a histogram without +Inf, in
    the metric's unit.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
