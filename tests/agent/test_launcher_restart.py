"""`cotenant run` while the agent is being restarted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from agent_harness import AgentProcess
from waiting import WITHIN_S, wait_for

from cotenant.agent.config.files import TenantSpec
from cotenant.agent.tenants import launcher
from cotenant.agent.tenants.launcher import Launch, run
from cotenant.core.errors import WorkError

WAITS = "waiting up to"


@pytest.mark.parametrize("killed", [True, False])
def test_run_waits_for_an_agent_that_is_restarted(
    agent: AgentProcess, killed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "AGENT_BACK_S", WITHIN_S)
    agent.kill() if killed else agent.close()

    def restart() -> None:
        wait_for(lambda: WAITS in caplog.text)
        agent.start()

    starter = threading.Thread(target=restart)
    starter.start()
    try:
        assert run(Launch(agent.folder, TenantSpec("a"), ["sh", "-c", 'exit ${COTENANT_TOKEN:+7}'])) == 7
    finally:
        starter.join()
    assert caplog.text.count(WAITS) == 1


def test_run_waits_no_longer_than_it_says(
    agent: AgentProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "AGENT_BACK_S", 0.2)
    agent.kill()
    with pytest.raises(WorkError, match="no agent answers"):
        run(Launch(agent.folder, TenantSpec("a"), ["true"]))
    assert "waiting up to 0.2 s for its restart" in caplog.text


def test_run_does_not_wait_where_no_agent_was_lately(agent: AgentProcess, caplog: pytest.LogCaptureFixture) -> None:
    agent.close()
    os.utime(agent.folder / "state.json", (0, 0))
    for folder in (agent.folder, Path("/nowhere")):
        with pytest.raises(WorkError, match="no agent answers"):
            run(Launch(folder, TenantSpec("a"), ["true"]))
    assert WAITS not in caplog.text
