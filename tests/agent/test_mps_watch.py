"""The end of an MPS server is noticed, and reported once."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from cotenant.agent.mechanisms.mps_watch import MpsWatch


class Daemon:
    """What the watch needs of Mps: a daemon whose server is any process."""

    def __init__(self, answer: int | None) -> None:
        self.answer, self.here, self.asked = answer, True, 0

    def watched(self) -> tuple[str, ...]:
        return ("GPU-1",) if self.here else ()

    def server(self, uuid: str) -> int | None:
        self.asked += 1
        assert uuid == "GPU-1"
        return self.answer


def watch(daemon: Daemon, died: list[str]) -> MpsWatch:
    return MpsWatch(daemon, died.append)


def test_a_server_that_is_killed_is_noticed() -> None:
    server = subprocess.Popen(["sleep", "600"])
    died: list[str] = []
    daemon = Daemon(server.pid)
    looker = watch(daemon, died)

    async def run() -> None:
        for _ in range(3):
            await looker.look()
        assert (died, daemon.asked) == ([], 1), "a server that is known is not requested again"
        server.kill()
        server.wait()
        daemon.answer = None
        running = asyncio.create_task(looker.run())
        async with asyncio.timeout(60):
            while not died:
                await asyncio.sleep(0.02)
        await looker.look()
        running.cancel()

    asyncio.run(run())
    assert died == ["GPU-1"]


def test_a_daemon_that_was_quit_is_no_fault() -> None:
    server = subprocess.Popen(["sleep", "60"])
    died: list[str] = []
    daemon = Daemon(server.pid)
    looker = watch(daemon, died)
    asyncio.run(looker.look())
    daemon.here = False
    server.kill()
    server.wait()
    asyncio.run(looker.look())
    assert died == []


@pytest.mark.parametrize("answer", [None, 999999999])
def test_no_server_yet_is_no_fault(answer: int | None) -> None:
    died: list[str] = []
    looker = watch(Daemon(answer), died)
    asyncio.run(looker.look())
    asyncio.run(looker.look())
    assert died == []
