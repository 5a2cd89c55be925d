"""The trace for Perfetto: every GPU-second of the run, on lanes that do not overlap."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_records import cluster, hand_record, random_record

from cotenant.core.errors import InputError
from cotenant.core.events import Kind, Reason
from cotenant.core.metrics.summary import Analysis
from cotenant.report.perfetto import Lanes, lane_name, write_perfetto

JOBS = [
    {"id": name, "arrival_s": 0.0, "gpus": gpus, "model": "lstm"} for name, gpus in (("a", 2.0), ("b", 1.0), ("c", 2.0))
]


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_by_hand(tmp_path: Path) -> None:
    """Node 0 has 2 GPUs, node 1 too. a holds both of node 0; b one of node 1. At 10 they change places, and c starts
    on what a left; nothing is drawn twice."""
    record = hand_record(
        JOBS,
        [
            (0.0, 0, Kind.START, Reason.IN_ORDER, 6, 125, 1.0, [(0, 2.0)]),
            (0.0, 1, Kind.START, Reason.IN_ORDER, 3, 62, 1.0, [(1, 1.0)]),
            (5.0, 1, Kind.RESIZE, Reason.GOT_IDEAL, 6, 62, 1.5, [(1, 1.0)]),
            (10.0, 0, Kind.MOVE, Reason.REPLACED, 6, 125, 1.0, [(0, 1.0), (1, 1.0)]),
            (10.0, 1, Kind.MOVE, Reason.REPLACED, 6, 62, 1.5, [(0, 1.0)]),
            (20.0, 0, Kind.PREEMPT, Reason.OUTRANKED),
            (20.0, 2, Kind.START, Reason.IN_ORDER, 6, 125, 1.0, [(1, 2.0)]),
            (30.0, 1, Kind.FINISH, Reason.DONE),
            (40.0, 2, Kind.FINISH, Reason.DONE),
        ],
        cluster_info=cluster(2, 2),
    )
    written = write_perfetto(record, tmp_path / "trace.json")
    got = [
        (s["name"], s["pid"] - 2, s["tid"], s["ts"] / 1e6, (s["ts"] + s["dur"]) / 1e6)
        for s in slices(tmp_path / "trace.json")
    ]
    assert written == len(got)
    assert sorted(got) == [
        ("a", 0, 0, 0, 10), ("a", 0, 0, 10, 20), ("a", 0, 1000, 0, 10), ("a", 1, 0, 10, 20),
        ("b", 0, 1000, 10, 30), ("b", 1, 0, 0, 10),
        ("c", 1, 0, 20, 40), ("c", 1, 1000, 20, 40),
    ]  # fmt: skip
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names[2, 1000] == "GPU 1"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), jobs=st.integers(1, 25), gpus=st.integers(1, 4))
def test_every_gpu_second_is_drawn_once(tmp_path: Path, seed: int, jobs: int, gpus: int) -> None:
    record = random_record(seed, jobs=jobs, nodes=3, gpus=gpus)
    write_perfetto(record, tmp_path / "trace.json")
    drawn: dict[str, float] = defaultdict(float)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for s in slices(tmp_path / "trace.json"):
        drawn[s["name"]] += s["dur"] / 1e6
        assert s["tid"] // Lanes.PER_GPU < gpus
        lanes[s["pid"], s["tid"]].append((s["ts"], s["ts"] + s["dur"]))
    running, count = Analysis(record).jobs.running_s, record.job("gpus")
    for i, name in enumerate(record.job("id")):
        assert drawn[str(name)] == pytest.approx(running[i] * count[i], abs=1e-3)
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_parts_of_a_gpu_share_it() -> None:
    lanes = Lanes(2)
    half, third, rest = lanes.take(0.5), lanes.take(0.5), lanes.take(0.75)
    assert (half, third, rest) == ([1], [2], [1001])
    assert lanes.take(1.0) == [2000]  # one more GPU than the node has is shown, so that no slice is lost
    lanes.give(half)
    assert lanes.take(0.25) == [1]
    lanes.give([1])
    lanes.give(third)
    assert lanes.take(1.0) == [0]
    assert [lane_name(n) for n in (0, 3002)] == ["GPU 0", "GPU 3 part 2"]


def test_without_placements_there_is_nothing_to_draw(tmp_path: Path) -> None:
    record = hand_record(JOBS, [(0.0, 0, Kind.ARRIVE, Reason.NONE)], placements=False)
    with pytest.raises(InputError, match=r"recorded without placements.*run it again with --record all"):
        write_perfetto(record, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
