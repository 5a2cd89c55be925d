"""Agent, keeper and tenants killed at random: no tenant stays off its GPU for more than a second, nothing leaks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time

import pytest
from test_slices import Node, longest_gap_s, node
from waiting import wait_for

from cotenant.bench.harness import Program

__all__ = ["node"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")]
KILLS, SEED = 200, 17
ROUND = 10  # kills between two checks


def another(node: Node, name: str, kind: str) -> Program:
    """A tenant that works until it is killed."""
    if kind == "service":
        workload = node.service(5, 1, name)
        workload.tell("1000000")
        return workload
    workload = node.add(name, best_effort=True) if kind == "best-effort" else node.add(name, limit=0.4)
    workload.begin(3600)
    return workload


@pytest.mark.timed
@pytest.mark.timeout(1500)
def test_random_kills(node: Node) -> None:
    """A limited tenant is watched all the time; others come, and agent, keeper or another tenant is killed."""
    draw = random.Random(SEED)
    watched = node.add("watched", limit=0.5)
    others: list[Program] = []
    for round_ in range(KILLS // ROUND):
        watched.begin(ROUND * 0.9)
        for kill in range(ROUND):
            if len(others) < 2:
                kind = draw.choice(["best-effort", "service", "limited"])
                others.append(another(node, f"other{round_}.{kill}", kind))
            time.sleep(draw.uniform(0.05, 0.6))
            victim = draw.choice(["agent", "keeper", "tenant", "tenant"])
            if victim == "agent":
                assert node.agent is not None
                node.agent.kill()
                node.agent.wait()
                node.restart()
            elif victim == "keeper":
                for pid in node.keepers():
                    os.kill(pid, signal.SIGKILL)
            else:
                others[0].process.kill()
                others.pop(0).process.wait()
        assert longest_gap_s(watched.result()) < 1.0 + 0.2, f"seed {SEED}, round {round_}"
    for other in others:
        other.process.kill()
        other.process.wait()
    for client in node.clients:
        client.close()
    wait_for(lambda: [row["name"] for row in node.tenants()] == ["watched"])
    wait_for(lambda: len(node.keepers()) == 1, what="one keeper, and none left behind")
