"""Writes metrics in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """A metric: name, kind, help text and names of its labels. `buckets`: upper bounds of a histogram without +Inf, in
    the metric's unit.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Histogram:
    """A histogram of a metric for one combination of labels: counts by bucket. `observe` takes O(log buckets) time."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value, in the unit of the histogram's metric."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Exposition:
    """Collects samples and writes them as text, grouped by metric."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[Metric, list[str]]] = {}

    def declare(self, metrics: Iterable[Metric]) -> None:
        """Declare metrics: they appear in this order with their help, even without samples."""
        for metric in metrics:
            self._lines(metric)

    def add(self, metric: Metric, value: float, **labels: str) -> None:
        """Add one sample of a metric. Raises ValueError if `labels` are not exactly those of the metric."""
        if tuple(labels) != metric.labels:
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
        self._lines(metric).append(f"{metric.name}{_labels(labels)} {_number(value)}")

    def histogram(self, metric: Metric, found: Histogram, **labels: str) -> None:
        """Add a histogram: cumulative buckets, sum and count. Raises ValueError for wrong labels, as `add` does."""
        if tuple(labels) != metric.labels:
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
        lines, inner = self._lines(metric), _labels(labels)
        # a page may have thousands of histograms, so the texts that their buckets share are made once
        begin = f'{metric.name}_bucket{inner[:-1] + "," if inner else "{"}le="'
        counts = list(accumulate(found.counts))
        lines += [f'{begin}{bound}"}} {count}' for bound, count in zip(_bounds(found.bounds), counts, strict=True)]
        lines.append(f"{metric.name}_sum{inner} {_number(found.sum)}")
        lines.append(f"{metric.name}_count{inner} {counts[-1]}")

    def text(self) -> str:
        """Return all metrics as text in Prometheus's format."""
        parts = []
        for metric, lines in self._families.values():
            parts.append(
                f"# HELP {metric.name} {_escape(metric.help, quotes=False)}\n# TYPE {metric.name} {metric.kind}\n"
            )
            parts.extend(line + "\n" for line in lines)
        return "".join(parts)

    def _lines(self, metric: Metric) -> list[str]:
        return self._families.setdefault(metric.name, (metric, []))[1]


@lru_cache(maxsize=64)
def _bounds(bounds: tuple[float, ...]) -> list[str]:
    return [_number(bound) for bound in (*bounds, math.inf)]


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
