"""Background tasks of the agent that fail, and a file that changes before the first of them runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from agent_harness import declare

from cotenant.agent.daemon import Agent, AgentOptions
from cotenant.agent.lifecycle.lasting import lasting
from cotenant.devices.base import Gpu


def test_work_that_fails_is_logged_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    attempts = 0

    async def work() -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise KeyError("row 7")

    with caplog.at_level(logging.ERROR):
        asyncio.run(lasting(work, again_s=0.0))
    assert attempts == 4
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_work_that_is_stopped_ends() -> None:
    async def stopped() -> None:
        task = asyncio.create_task(lasting(lambda: asyncio.sleep(600)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())


def test_a_file_written_while_the_agent_starts_is_not_missed(tmp_path: Path) -> None:
    source = declare(tmp_path, "tenants: []\n")
    agent = Agent(AgentOptions(tmp_path, source, gpus=(Gpu("GPU-1", "soft", 1 << 34, 0, kind="soft"),)))
    declare(tmp_path, "tenants:\n  - name: ada\n")
    assert agent._file is not None
    assert [agent._file.changed() for _ in range(2)] == [False, True]
