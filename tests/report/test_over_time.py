"""Attainment over the run, in the pages of load tests and simulations: what a run of few requests shows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.report.distributions import WINDOWS, Windows
from cotenant.report.embed import asset

STAND_INS = """
const element = { textContent: DATA_TEXT, replaceChildren() {}, addEventListener() {}, dataset: {}, style: {} };
globalThis.document = { getElementById: () => element, documentElement: element };
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
globalThis.matchMedia = () => ({ matches: false });
globalThis.addEventListener = () => {};
globalThis.innerWidth = 1200;
const drawn = {};
globalThis.Plotly = { react: (id, traces) => { drawn[id] = traces; } };
"""


@given(st.lists(st.floats(0.0, 100.0), max_size=1000), st.integers(1, 4))
def test_a_run_of_few_requests_has_few_windows(at: list[float], curves: int) -> None:
    times, which = np.array(at), np.arange(len(at)) % curves
    windows = Windows(times, 100.0)
    least, most = WINDOWS
    assert least <= len(windows.middles) <= most
    assert len(windows.middles) in WINDOWS or len(at) >= 5 * len(windows.middles)
    for curve in range(curves):
        mine = which == curve
        shares = windows.attainment(mine, np.ones(len(at), bool))
        assert len(shares) == len(windows.middles)
        assert any(share is not None for share in shares) == mine.any()


def drawn(script: str, data: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    """Return the traces of the chart over time that a page's script draws."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    file = tmp_path / "page.js"
    stands = STAND_INS.replace("DATA_TEXT", json.dumps(json.dumps(data)))
    file.write_text("\n".join((stands, asset(script), "console.log(JSON.stringify(drawn.time));")))
    done = subprocess.run([node, str(file)], check=True, timeout=60, capture_output=True, text=True)
    return list(json.loads(done.stdout))


@pytest.mark.parametrize(("script", "key"), [("llm.js", "models"), ("serving.js", "services")])
def test_a_window_without_neighbours_is_drawn(script: str, key: str, tmp_path: Path) -> None:
    curves = [[1, None, 0.5, None], [None, 1, 1, None], [None, None, None, 0]]
    empty = {"x": [], "y": [], "promise": None}
    rows = [
        {"name": str(n), "attainment": y, "ttft": empty, "tpot": empty, "latency_ms": [], "share": [], "slo_ms": None}
        for n, y in enumerate(curves)
    ]
    data = {key: rows, "windows_s": [1, 2, 3, 4], "stays": [], "gpulets": []}
    traces = drawn(script, data, tmp_path)
    assert [trace["y"] for trace in traces] == curves
    assert all("markers" in trace["mode"] for trace in traces)
    assert [[n for n, size in enumerate(trace["marker"]["size"]) if size] for trace in traces] == [[0, 2], [], [3]]
