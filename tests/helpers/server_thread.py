"""A server that runs in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cotenant.core.serving import ServingPlan
from cotenant.policy.serving.packing.specs import DEFAULT_PLANNER
from cotenant.serving.server import Options, Server, build, new_loop
from cotenant.serving.worker import WorkerFactory


class Running:
    """A server that runs in a thread of this process."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.loop = server, loop
        self.http_url, self.grpc_address = server.http_url, server.grpc_address

    def status(self) -> dict[str, Any]:
        """The answer of GET /cotenant/status."""
        found: dict[str, Any] = self.call(self.server.status)
        return found

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the server's thread and return its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


@contextlib.contextmanager
def running(
    services: str | Path | Mapping[str, Any], *, http: str | None = "127.0.0.1:0", grpc: str | None = None,
    plan: ServingPlan | None = None, log: Path | None = None, gpus_log: Path | None = None,
    workers: WorkerFactory | None = None, profile: str | Path | None = None, planner: str = DEFAULT_PLANNER,
    drain_s: float = 5.0, colocation: str | None = None, agent: Path | None = None,
) -> Iterator[Running]:  # fmt: skip
    """A server in a thread of its own, for tests and experiments; stopped when the block ends."""
    options = Options(http, grpc, plan, planner, log, gpus_log, colocation, agent)
    server = build(services, options, profile=profile, factory=workers)
    loop = new_loop()
    started: list[BaseException | None] = []
    ready = threading.Event()
    finish = asyncio.Event()

    async def life() -> None:
        try:
            await server.start()
            started.append(None)
        except BaseException as error:
            started.append(error)
            return
        finally:
            ready.set()
        await finish.wait()
        await server.stop(drain_s)

    thread = threading.Thread(target=loop.run_until_complete, args=(life(),), name="cotenant-serve", daemon=True)
    thread.start()
    ready.wait()
    if started[0] is not None:
        thread.join(10)
        loop.close()
        raise started[0]
    try:
        yield Running(server, loop)
    finally:
        loop.call_soon_threadsafe(finish.set)
        thread.join(drain_s + 30)
        if not thread.is_alive():
            loop.close()
