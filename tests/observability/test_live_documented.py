"""Every live metric has its row in docs/metrics.md, with the kind and labels of the code, and nothing else has one."""

from __future__ import annotations

import re
from pathlib import Path

from cotenant.observability.metrics import every

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_every_live_metric_has_its_row() -> None:
    rows = re.findall(
        r"^\| `(cotenant_[a-z0-9_]+)` \| (\w+) \| ([a-z, _]*) \|", DOCUMENT.read_text(), flags=re.MULTILINE
    )
    documented = {name: (kind, tuple(filter(None, labels.strip().split(", ")))) for name, kind, labels in rows}
    assert documented == {metric.name: (metric.kind, metric.labels) for metric in every()}
