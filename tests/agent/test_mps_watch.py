"""The end of an MPS server is noticed within a second, and told once."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import pytest

from cotenant.agent.mechanisms.mps_watch import MpsWatch
from cotenant.serving.worker import WorkerSpec
from cotenant.serving.workers.engine import Engine


class Daemon:
    """As much of Mps as the watch looks at: a daemon whose server is any process."""

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
    server = subprocess.Popen(["sleep", "60"])
    died: list[str] = []
    daemon = Daemon(server.pid)

    async def run() -> None:
        looking = asyncio.create_task(watch(daemon, died).run())
        await asyncio.sleep(0.9)
        assert not died
        assert daemon.asked == 1  # after the first query the kernel reports when the server ends
        server.kill()
        server.wait()
        daemon.answer = None
        while not died:
            await asyncio.sleep(0.02)
        looking.cancel()

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


def test_a_worker_whose_device_is_lost_knows_it() -> None:
    class Model:
        info: Any = None
        broken = False

        def lost(self) -> bool:
            return self.broken

    engine = Engine(WorkerSpec("w", 0, "X", "100%", 1.0, "mps", ()))
    model = Model()
    engine._models["a"] = model
    assert not engine.lost()
    model.broken = True
    assert engine.lost()
