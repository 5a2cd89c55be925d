"""The text format, by what Prometheus's documentation says of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.observability.exposition import Exposition, Histogram
from cotenant.observability.metrics import Metric, every

GAUGE = Metric("cotenant_test_ratio", "gauge", "A share.\nOr \\ two.", ("tenant",))
HISTOGRAM = Metric("cotenant_test_seconds", "histogram", "Times.", ("gpu",), (0.1, 1.0))
SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)$')


def test_a_histogram_is_cumulative_and_a_bound_belongs_to_its_bucket() -> None:
    found = Histogram(HISTOGRAM.buckets)
    for value in (0.05, 0.1, 0.5, 7.0):
        found.observe(value)
    out = Exposition()
    out.histogram(HISTOGRAM, found, gpu="g")
    assert out.text().splitlines() == [
        "# HELP cotenant_test_seconds Times.",
        "# TYPE cotenant_test_seconds histogram",
        'cotenant_test_seconds_bucket{gpu="g",le="0.1"} 2',
        'cotenant_test_seconds_bucket{gpu="g",le="1"} 3',
        'cotenant_test_seconds_bucket{gpu="g",le="+Inf"} 4',
        'cotenant_test_seconds_sum{gpu="g"} 7.65',
        'cotenant_test_seconds_count{gpu="g"} 4',
    ]


def test_help_is_one_line() -> None:
    out = Exposition()
    out.declare([GAUGE])
    assert out.text() == "# HELP cotenant_test_ratio A share.\\nOr \\\\ two.\n# TYPE cotenant_test_ratio gauge\n"


@given(st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False), max_size=5))
def test_any_label_survives(values: dict[str, float]) -> None:
    """Every sample is one line of the grammar, and undoing the escapes gives the label again."""
    out = Exposition()
    for label, value in values.items():
        out.add(GAUGE, value, tenant=label)
    samples = [line for line in out.text().split("\n") if line and not line.startswith("#")]
    found = {}
    for line in samples:
        match = SAMPLE.match(line)
        assert match is not None, line
        escaped = match[2].removeprefix('tenant="').removesuffix('"')
        label = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], escaped)
        found[label] = float(match[3])
    assert found == values


def test_wrong_labels_are_a_fault() -> None:
    with pytest.raises(ValueError, match="has the labels"):
        Exposition().add(GAUGE, 1.0, gpu="x")


def test_names_follow_the_conventions() -> None:
    """Counters end in _total and nothing else does; a unit is a base unit; no name twice."""
    names = [metric.name for metric in every()]
    assert len(names) == len(set(names))
    for metric in every():
        assert re.fullmatch(r"cotenant_[a-z]+(_[a-z0-9]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(ms|milliseconds|us|percent|mb|gib|minutes)(_|$)", metric.name)
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.help.endswith(".")
