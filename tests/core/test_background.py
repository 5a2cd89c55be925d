"""Functions that block, in threads beside an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from cotenant.core.background import in_daemon_thread


def test_results_and_exceptions_come_back() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def play() -> None:
        assert await in_daemon_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(ValueError, match="no"):
            await in_daemon_thread(fail)

    asyncio.run(play())


def test_a_process_ends_although_a_function_never_returns() -> None:
    program = """
import asyncio, threading
from cotenant.core.background import in_daemon_thread
async def main():
    task = asyncio.create_task(in_daemon_thread(threading.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
