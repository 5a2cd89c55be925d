"""Numbers as people read them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import cotenant.report
from cotenant.report.text import (
    clock_text,
    column_texts,
    figures,
    join_words,
    metric_text,
    plural,
    share_text,
    time_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (float("nan"), "–"), (0, "0 s"), (0.35, "350 ms"), (0.00123, "1.23 ms"), (42, "42 s"),
        (119.9, "120 s"), (120, "2 min"), (312, "5.2 min"), (7199, "120 min"), (7200, "2 h"), (48240, "13.4 h"),
        (172800, "2 d"), (208224, "2.41 d"), (86400 * 1340, "1,340 d"), (-300, "-5 min"), (0.9996, "1 s"),
    ],
)  # fmt: skip
def test_times(seconds: float | None, text: str) -> None:
    assert time_text(seconds) == text


def test_columns_keep_trailing_zeros() -> None:
    assert [metric_text(v, "s") for v in (57600, 57240, 36000 * 4)] == ["16.0 h", "15.9 h", "40.0 h"]
    assert metric_text(7.2, "ratio") == "7.20"
    assert metric_text(0.65661, "share") == "65.7 %"
    assert metric_text(12345, "count") == "12,345"
    assert [metric_text(None, unit) for unit in ("s", "ratio", "share", "count")] == ["–"] * 4


def test_times_of_one_column_share_a_unit() -> None:
    """84.2 min, 2.15 h, 6.45 h, 10.1 h: the median is in hours, so all are."""
    assert column_texts([5052, 7740, 23220, 36360], "s") == ["1.40 h", "2.15 h", "6.45 h", "10.1 h"]
    assert column_texts([170640, 196128, None], "s") == ["1.98 d", "2.27 d", "–"]
    assert column_texts([0.001, 0.002, 0.5], "s") == ["1.00 ms", "2.00 ms", "500 ms"]
    # The median is 109 min, but then the largest would be 1,390 min, which has four digits. So the unit is h.
    assert column_texts([145, 6540, 83400], "s") == ["0.0403 h", "1.82 h", "23.2 h"]
    assert column_texts([8225, 10000, 172800], "s") == ["2.28 h", "2.78 h", "48.0 h"]
    assert column_texts([8225, 400000, 500000], "s") == ["2.28 h", "111 h", "139 h"]  # not 0.0952 d
    assert column_texts([None], "s") == ["–"]
    assert column_texts([0.5, None], "share") == ["50.0 %", "–"]


def test_figures() -> None:
    assert [figures(v) for v in (0, 1.5, 0.01234, 134.4, 1340.2, 99.96, -2.0)] == [
        "0", "1.5", "0.0123", "134", "1,340", "100", "-2",
    ]  # fmt: skip


def test_clock() -> None:
    assert [clock_text(t) for t in (0, 300, 48000, 86400 + 5430, 659.717)] == [
        "0:00:00", "0:05:00", "13:20:00", "1 d 01:30:30", "0:10:59",
    ]  # fmt: skip


def test_words() -> None:
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c"], "or") == "a, b or c"
    assert [plural(n, "GPU") for n in (1, 2, 0.25, 1234)] == ["1 GPU", "2 GPUs", "0.25 GPUs", "1,234 GPUs"]
    assert share_text(0) == "0.0 %"


def test_the_page_formats_times_as_python_does() -> None:
    """The page's script has its own formatter; the two must agree."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    script = (Path(cotenant.report.__file__).parent / "assets" / "base.js").read_text()
    body = script[script.index("function figures") : script.index("const shareText")]
    values = [0, 0.00123, 0.35, 0.9996, 1.5, 42, 119.9, 120, 312.4, 7199, 7200, 48240, 99999, 172800, 208224, 1.16e8]
    code = f"{body}\nconsole.log(JSON.stringify({json.dumps(values)}.map(timeText)))"
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [time_text(value, trim=False) for value in values]
    assert time_text(0.9996, trim=False) == "1.00 s"
    assert time_text(10800, trim=False) == "3.00 h"
