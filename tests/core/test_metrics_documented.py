"""Every metric stands in docs/metrics.md, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

from cotenant.core.metrics.registry import METRICS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_every_metric_has_its_row() -> None:
    text = DOCUMENT.read_text()
    rows = set(re.findall(r"^\| `([a-z0-9_.]+)` \|", text, flags=re.MULTILINE))
    missing = sorted(set(METRICS) - rows)
    assert not missing, f"docs/metrics.md has no row for {missing}"


def test_the_document_says_which_way_is_better_as_the_code_does() -> None:
    for line in DOCUMENT.read_text().splitlines():
        match = re.match(r"^\| `([a-z0-9_.]+)` \|.*\| (\w*) ?\|$", line)
        if match and match.group(1) in METRICS:
            assert METRICS[match.group(1)].better == (match.group(2) or "neither"), line
