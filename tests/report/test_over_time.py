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


def drawn(script: str, data: dict[str, Any], tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the traces that a page's script draws, by chart."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    file = tmp_path / "page.js"
    stands = STAND_INS.replace("DATA_TEXT", json.dumps(json.dumps(data)))
    file.write_text("\n".join((stands, asset(script), "console.log(JSON.stringify(drawn));")))
    done = subprocess.run([node, str(file)], check=True, timeout=60, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(("script", "key"), [("llm.js", "models"), ("serving.js", "services")])
def test_a_window_without_neighbours_is_drawn(script: str, key: str, tmp_path: Path) -> None:
    curves = [[1, None, 0.5, None], [None, 1, 1, None], [None, None, None, 0]]
    empty = {"x": [], "y": [], "promise": None}
    rows = [
        {"name": str(n), "attainment": y, "ttft": empty, "tpot": empty, "latency_ms": [], "share": [], "slo_ms": None}
        for n, y in enumerate(curves)
    ]
    data = {key: rows, "windows_s": [1, 2, 3, 4], "stays": [], "gpulets": []}
    traces = drawn(script, data, tmp_path)["time"]
    assert [trace["y"] for trace in traces] == curves
    assert all("markers" in trace["mode"] for trace in traces)
    assert [[n for n, size in enumerate(trace["marker"]["size"]) if size] for trace in traces] == [[0, 2], [], [3]]


@pytest.mark.parametrize(
    ("script", "key", "charts"), [("llm.js", "models", ("ttft", "tpot")), ("serving.js", "services", ("latency",))]
)
def test_a_distribution_of_one_value_is_drawn(script: str, key: str, charts: tuple[str, ...], tmp_path: Path) -> None:
    one: dict[str, Any] = {"x": [7], "y": [1], "promise": None}
    row = {"name": "a", "attainment": [1], "ttft": one, "tpot": one, "latency_ms": [7], "share": [1], "slo_ms": None}
    traces = drawn(script, {key: [row], "windows_s": [1], "stays": [], "gpulets": []}, tmp_path)
    assert [(traces[chart][0]["x"], traces[chart][0]["y"]) for chart in charts] == [([7, 7], [0, 1])] * len(charts)
