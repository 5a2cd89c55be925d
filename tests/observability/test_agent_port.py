"""The agent's live port: what it tells of tenants, to Prometheus's own tools and to the page's feed."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import stays, wait_for

from cotenant.agent.gate.client import join_floor
from cotenant.observability.metrics import AGENT

TENANTS = [
    {"name": "notebooks", "request": 0.2, "limit": 0.5, "memory": "2GiB"},
    {"name": "team/vision", "request": 0.3, "memory": "4GiB"},
]


def test_state_and_metrics_tell_the_same(live_agent: Callable[..., Any]) -> None:
    agent = live_agent(tenants=TENANTS)
    state = json.loads(agent.get("/state.json"))
    shares = {row["tenant"]: row for row in state["shares"]}
    assert shares["notebooks"]["granted"] == 0.2
    assert shares["notebooks"]["limit"] == 0.5
    assert shares["notebooks"]["memory_limit_bytes"] == 2 << 30
    assert shares["notebooks"]["memory_by"] == "shim"
    assert [row["promised"] for row in state["gpus"]] == [0.5]
    assert any("notebooks admitted: request 20%, limit 50%" in row["text"] for row in state["decisions"])
    assert not any("by auto" in row["text"] for row in state["decisions"]), "the mechanism that was chosen is told"
    text = agent.get("/metrics")
    assert 'cotenant_tenant_request_ratio{tenant="notebooks"} 0.2' in text
    assert 'cotenant_tenant_request_ratio{tenant="team/vision"} 0.3' in text
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} == {m.name for m in AGENT}


def test_a_restart_decides_nothing_about_tenants_that_stay_as_they_are(live_agent: Callable[..., Any]) -> None:
    agent = live_agent(tenants=TENANTS)
    agent.close()
    again = type(agent)(agent.folder, {"tenants": TENANTS})
    try:
        texts = [row["text"] for row in json.loads(again.get("/state.json"))["decisions"]]
    finally:
        again.close()
    assert any(text.startswith("notebooks admitted") for text in texts)
    assert not [text for text in texts if "changed" in text]


def test_a_change_is_in_the_feed(live_agent: Callable[..., Any]) -> None:
    agent = live_agent(tenants=TENANTS)
    with urllib.request.urlopen(agent.url + "/events", timeout=60) as events:
        while not events.readline().startswith(b"data: "):
            pass
        done = agent.cotenant("set", "notebooks", "--limit", "80%")
        assert done.returncode == 0, done.stderr
        assert any(line.startswith(b"data: ") and b'"limit":0.8' in line for line in events)


def test_who_is_held_off_by_latency_sensitive_work_is_told(live_agent: Callable[..., Any]) -> None:
    """Its class, that it is held off now, and how long its launches have waited, which under mps are no turns."""
    train_spec = {"name": "train", "best_effort": True, "mechanism": "mps"}
    # With run-ahead, kernels wait on the device, and no time is counted for launches that wait on the host.
    on_the_host = {"scheme": "tidal", "run_ahead": "never", "heartbeat_timeout_ms": 60_000}
    agent = live_agent(tenants=[train_spec], colocation=on_the_host)

    def share() -> dict[str, Any]:
        (row,) = json.loads(agent.get("/state.json"))["shares"]
        return dict(row)

    floor = join_floor(agent.folder, json.loads(agent.get("/state.json"))["gpus"][0]["key"])
    run = [sys.executable, "-m", "cotenant.cli.main", "run", "--name", "train", "--"]
    train = subprocess.Popen(
        [*run, sys.executable, "-m", "cotenant.bench.workload", "busy"], env=agent.environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert train.stdin is not None
        assert train.stdout is not None
        assert train.stdout.readline().startswith("ready")
        assert (share()["class"], share()["floor"]) == ("best-effort", None)

        def held_off_a_while() -> bool:
            """The program may have been given its processor late, so that it waited for less time or none."""
            floor.raise_()
            train.stdin.write("run 0.1\n")
            train.stdin.flush()
            stays(lambda: share()["floor"] == "held off")
            floor.lower()
            assert train.stdout.readline().startswith('{"count"')
            assert share()["floor"] is None
            return float(share()["waited_s"]) >= 0.2

        wait_for(held_off_a_while)
        (line,) = (e for e in agent.get("/metrics").splitlines() if e.startswith("cotenant_tenant_launch_wait"))
        assert float(line.split()[-1]) >= 0.2
    finally:
        train.communicate(timeout=60)
        floor.close()


def test_two_agents_on_one_dashboard(live_agent: Callable[..., Any]) -> None:
    """One of them ends: its rows stay and it is shown as not reached."""
    first, second = live_agent(tenants=TENANTS[:1]), live_agent(tenants=TENANTS[1:])
    command = [sys.executable, "-m", "cotenant.cli.main", "dashboard", first.url, second.url, "--http", ":0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]

        def state() -> dict[str, Any]:
            with urllib.request.urlopen(url + "/state.json", timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
                return found

        wait_for(lambda: [row["ok"] for row in state()["sources"]] == [True, True])
        both = state()
        assert {row["tenant"] for row in both["shares"]} == {"notebooks", "team/vision"}
        assert {row["key"] for row in both["gpus"]} == {row["gpu"] for row in both["shares"]}
        second.close()
        wait_for(lambda: sorted(row["ok"] for row in state()["sources"]) == [False, True])
        assert len(state()["shares"]) == 2
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["agent", "--gpus", "soft", "--http", "nowhere"], "is not an address HOST:PORT\n"),
        (["agent", "--gpus", "soft", "--http", "9400"], "HOST:PORT; write :9400 for this machine only"),
        (["agent", "--gpus", "soft", "--http", ":0", "--http-token", "/does/not/exist"], "cannot be read"),
        (["dashboard", "ftp://a:1"], "is not the address of a live page"),
        (["dashboard", "localhost"], "is not the address of a live page"),
    ],
)
def test_bad_input(
    arguments: list[str], says: str, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTENANT_SOFTGPU_STATE", str(tmp_path / "state"))
    code, _, said = call(*arguments, *(["--dir", str(tmp_path)] if arguments[0] == "agent" else []))
    assert code == 2
    assert says in said
    assert len(said.strip().splitlines()) == 1
