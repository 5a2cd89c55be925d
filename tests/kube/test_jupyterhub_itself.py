"""The shipped JupyterHub example under a real hub and proxy: other users than the agent's choose their shares."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub as hubs
import pytest
from hub import LONG_S, Browser, Hub
from kube_node import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(hubs.missing()), reason=hubs.missing()),
]

ADA, BEA = "ada@uni.edu", "bea"
RANGES = "request: 0%..50%, limit: 50%..100%, memory: 1GiB..8GiB"
TENANTS = f"""
tenants:
  - {{name: jupyter/ada_40uni.edu, user: 65534, {RANGES}}}
  - {{name: jupyter/ada_40uni.edu/second, user: 65534, {RANGES}}}
  - {{name: jupyter/bea, user: 65533, request: 0%..20%, limit: 50%, memory: 1GiB..8GiB}}
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Two users on one machine."""
    folder = Path(tempfile.mkdtemp(prefix="cothub-"))
    found = Hub(folder, {ADA: 65534, BEA: 65533}, TENANTS)
    yield found
    found.close()
    shutil.rmtree(folder, ignore_errors=True)


def share(hub: Hub, name: str) -> tuple[float, float, int, bool]:
    row: dict[str, Any] = hub.tenant(name)
    return row["request"], row["limit"], row["gpus"][0]["memory_limit_bytes"] >> 30, row["root_pid"] is not None


def test_users_choose_in_the_spawn_form(hub: Hub) -> None:
    ada, bea = Browser(hub, ADA), Browser(hub, BEA)
    assert '<option value="large">' in ada.get("/hub/spawn")
    ada.post("/hub/spawn", share="small")
    wait_for(lambda: hub.servers(ADA).get(""), LONG_S, "a server")
    assert share(hub, "jupyter/ada_40uni.edu") == (0.12, 0.5, 8, True)
    refused = "may have a request of 0 % to 20 %, not 50 %"
    answer = bea.post("/hub/spawn", share="large")
    assert refused in answer or "spawn-pending" in answer, "a slow hub answers before the agent has"
    wait_for(lambda: refused in bea.get("/hub/spawn-pending/bea"), LONG_S)
    assert share(hub, "jupyter/bea") == (0.0, 0.5, 1, False)
    bea.post("/hub/spawn", share="small")
    wait_for(lambda: hub.servers(BEA).get(""), LONG_S, "the limit of this choice is the one that is declared")
    assert share(hub, "jupyter/bea") == (0.12, 0.5, 8, True)
    hub.api("POST", f"/users/{ADA}/servers/second", {"share": "small"})
    wait_for(lambda: hub.servers(ADA).get("second"), LONG_S)
    hub.api("DELETE", f"/users/{ADA}/server")
    wait_for(lambda: share(hub, "jupyter/ada_40uni.edu") == (0.0, 0.5, 1, False), LONG_S)
    assert share(hub, "jupyter/ada_40uni.edu/second") == (0.12, 0.5, 8, True)
