"""A worker dies while the node's agent is gone or hangs: others are answered, and it is made when that is back."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from heard import heard
from serve_setup import deployment, infer, plan
from server_thread import running
from waiting import stays, wait_for

from cotenant.bench.harness import Bench, with_source


def worker_of(name: str, bench: Bench) -> int:
    row = next(row for row in bench.tenants() if f"-{name}-" in row["name"])
    return int(row["root_pid"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_without_an_agent_is_made_when_there_is_one(how: signal.Signals, tmp_path: Path) -> None:
    services = deployment([{"name": "a", "slo_ms": 1000}, {"name": "b", "slo_ms": 60_000}], tmp_path)
    with (
        Bench("soft", {}) as bench,
        heard() as said,
        running(services, plan=plan({"a": 1}, {"b": 1}), colocation="tidal", agent=bench.folder) as made,
    ):
        for name in ("a", "b"):  # both workers have joined the gate page
            wait_for(lambda: infer(made.http_url, name)[0] == 200)  # noqa: B023 - called in this round
        agent, pid = bench.agent, worker_of("a", bench)
        assert agent is not None
        agent.send_signal(how)
        if how is signal.SIGKILL:
            agent.wait()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), what="the gateway has reaped the worker")
        stays(lambda: infer(made.http_url, "b")[0] == 200, 0.5, "the gateway does not wait for the agent")
        assert infer(made.http_url, "a")[0] == 503
        if how is signal.SIGKILL:
            wait_for(lambda: any("0/50%/0 waits for its worker: no agent answers at" in line for line in said))
            with_agent = with_source(bench.environment)
            bench.agent = subprocess.Popen(agent.args, stderr=bench.log, stdout=bench.log, env=with_agent)
        else:
            agent.send_signal(signal.SIGCONT)
        wait_for(lambda: infer(made.http_url, "a")[0] == 200)
        assert worker_of("a", bench) != pid
