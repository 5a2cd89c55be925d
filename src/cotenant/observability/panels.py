"""Graphs and rules as plain data, and the expressions they are made of."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.observability.metric import Metric


@dataclass(frozen=True)
class Panel:
    """One graph: lines of (expression, legend); `unit` as Grafana names it."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    says: str = ""


@dataclass(frozen=True)
class Alert:
    """One rule: fires when the expression has held for `hold`."""

    name: str
    expr: str
    hold: str
    severity: str
    summary: str


def rate(metric: Metric, by: str = "", window: str = "$__rate_interval") -> str:
    """Growth per second of a counter, summed by labels."""
    inner = f"rate({metric.name}[{window}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, metric: Metric, by: str, window: str = "$__rate_interval") -> str:
    """A quantile of a histogram, by labels."""
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({metric.name}_bucket[{window}])))"
