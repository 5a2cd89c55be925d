"""The fleet's live port: jobs with reasons, nodes, metrics that Prometheus's tool accepts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from cotenant.fleet.jobs import JobSpec
from cotenant.fleet.session import Fleet, FleetOptions


def look(url: str, path: str) -> str:
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return str(answer.read().decode())


def test_jobs_and_reasons(tmp_path: Path) -> None:
    """One node of two GPUs: a job of two runs, the next waits because the GPUs are full; both are on the page."""
    options = FleetOptions(tmp_path / "fleet", nodes=1, gpus_per_node=2, lease_s=0.5, grace_s=1.0, http="127.0.0.1:0")
    with Fleet(options) as fleet:
        assert fleet.live is not None
        for name in ("first", "second"):
            fleet.submit(JobSpec(name=name, command=("sleep", "600"), gpus=2))
        url = fleet.live.url

        def settled() -> dict[str, Any] | None:
            found: dict[str, Any] = json.loads(look(url, "/state.json"))
            seen = {row["name"]: (row["state"], row["reason"]) for row in found["jobs"]}
            wanted = {"first": ("running", ""), "second": ("waiting", "earlier jobs hold all GPUs")}
            return found if seen == wanted else None

        state = wait_for(settled, what="one runs and one waits")
        jobs = {row["name"]: row for row in state["jobs"]}
        assert jobs["first"]["place"] == "node-0: 2"
        assert {row["tenant"] for row in state["shares"]} == {jobs["first"]["key"]}
        assert sorted(row["gpu"] for row in state["shares"]) == sorted(row["key"] for row in state["gpus"])
        assert any(row["text"].startswith("first started") for row in state["decisions"])
        # Neither job reports progress. One has started, so its progress is unknown; the other one has not begun.
        wait_for(lambda: {row["name"]: row["done"] for row in fleet.queue()} == {"first": None, "second": 0.0})
        progress = {row["name"]: row["progress"] for row in json.loads(look(fleet.live.url, "/state.json"))["jobs"]}
        assert progress == {"first": None, "second": 0.0}
        text = look(fleet.live.url, "/metrics")
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert samples["cotenant_fleet_wait_seconds_count"] == "1"  # only the first job has run
        assert samples['cotenant_fleet_wait_seconds_bucket{le="+Inf"}'] == "1"
        assert float(samples["cotenant_fleet_wait_seconds_sum"]) >= 0
        assert samples["cotenant_fleet_decision_seconds_count"] == samples["cotenant_fleet_rounds_total"]
        assert float(samples["cotenant_fleet_decision_seconds_sum"]) > 0
        states = {name: count for name, count in samples.items() if name.startswith("cotenant_fleet_jobs{")}
        assert states == {
            f'cotenant_fleet_jobs{{state="{state}"}}': count
            for state, count in {
                "waiting": "1", "starting": "0", "running": "1", "stopping": "0", "parked": "0", "ended": "0",
            }.items()
        }  # fmt: skip
        assert 'cotenant_fleet_gpus_held{node="node-0"} 2' in text
    with pytest.raises(OSError, match="refused"):
        look(url, "/healthz")


def test_a_taken_port_is_one_sentence(call: Callable[..., Any], tmp_path: Path) -> None:
    code, _, said = call("fleet", "up", "--fleet", tmp_path, "--executor", "local", "--http", "nowhere")
    assert code == 2
    assert "is not an address HOST:PORT" in said
