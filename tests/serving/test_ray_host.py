"""Workers of a node that its caller loses and finds again, without Ray: calls of several lives at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, cast

import pytest

from cotenant.core.ray_cluster import LostCallError
from cotenant.serving.worker import Job, Worker, WorkerSpec
from cotenant.serving.workers import ray_host
from cotenant.serving.workers.ray_host import NodeHost
from cotenant.serving.workers.ray_nodes import RayNodes


class SlowWorker:
    """A worker that starts when it is let, and answers nothing."""

    def __init__(self, spec: Any, listener: Any) -> None:
        self.spec, self.listener = spec, listener
        self.pid, self.let, self.running = 7, asyncio.Event(), False
        self.stopping: asyncio.Event | None = None  # the end of the program waits for this event, if any

    async def start(self) -> dict[str, Any]:
        await self.let.wait()
        self.running = True
        return {}

    def submit(self, job: Job) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        if self.stopping is not None:
            await self.stopping.wait()
        self.running = False


class Factory:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.made: list[SlowWorker] = []

    def create(self, spec: Any, listener: Any) -> SlowWorker:
        self.made.append(SlowWorker(spec, listener))
        return self.made[-1]


class Spec:
    name = "w"


SPEC = cast(WorkerSpec, Spec())
JOB = cast(Job, None)


def hosted(monkeypatch: pytest.MonkeyPatch) -> tuple[NodeHost, list[SlowWorker]]:
    monkeypatch.setattr(ray_host, "LocalWorkers", Factory)
    host = NodeHost("time", 1, True, 1.0)
    return host, cast(Factory, host._factory).made


async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def working(monkeypatch: pytest.MonkeyPatch) -> tuple[NodeHost, list[SlowWorker]]:
    """A host in its first life, with a worker that has started."""
    host, made = hosted(monkeypatch)
    await host.begin(1)
    start = await begun(host.start(1, SPEC))
    made[0].let.set()
    await start
    return host, made


def test_a_worker_that_starts_while_its_node_is_lost_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        host, made = hosted(monkeypatch)
        await host.begin(1)
        first = await begun(host.start(1, SPEC))
        await host.begin(2)
        second = await begun(host.start(2, SPEC))
        made[0].let.set()
        assert await first == (None, ("", "the node was lost"))
        assert not made[0].running
        made[1].let.set()
        assert await second == (7, {})
        assert made[1].running
        host.died(cast(Worker, made[0]), "late news of the first life")
        assert await host.ping(2) == {}
        await begun(host.run(2, "w", JOB))
        assert "w" in host._answers, "it is still there"

    asyncio.run(play())


def test_calls_of_a_life_that_is_over_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives an actor a thousand calls at a time: one that waits for ever is one less."""

    async def play() -> None:
        host, _ = await working(monkeypatch)
        batch = await begun(host.run(1, "w", JOB))
        await host.begin(2)
        assert await asyncio.wait_for(batch, 5.0) == "has been removed"

    asyncio.run(play())


def test_the_deaths_of_a_new_life_are_not_forgotten_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller did not wait for the end of the last life's workers."""

    async def play() -> None:
        host, made = await working(monkeypatch)
        made[0].stopping = asyncio.Event()
        slow = await begun(host.begin(2))
        await host.begin(3)
        start = await begun(host.start(3, SPEC))
        made[1].let.set()
        await start
        host.died(cast(Worker, made[1]), "killed")
        made[0].stopping.set()
        await slow
        assert await host.ping(3) == {"w": "killed"}

    asyncio.run(play())


class Ray:
    """A cluster of one node, whose actor is a NodeHost without workers."""

    def __init__(self) -> None:
        self.lost = threading.Event()

    def nodes(self) -> Future[list[dict[str, Any]]]:
        return self._answer([{"NodeID": "node"}])

    def actor(self, *_: Any, **__: Any) -> Future[Any]:
        return self._answer(None)

    def call(self, actor: str, method: str, *_: Any) -> Future[Any]:
        return self._answer({} if method == "ping" else None)

    def _answer(self, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.lost.is_set():
            future.set_exception(LostCallError("the connection to Ray has ended"))
        else:
            future.set_result(value)
        return future


def test_gpus_of_a_connection_that_has_ended_cannot_be_used() -> None:
    """No node may be said to be lost yet: the event loop was busy."""

    async def play() -> None:
        ray, lost = Ray(), list[tuple[int, int, str]]()
        nodes = RayNodes(cast(Any, ray), ("mps", True, 9.0), lambda *told: lost.append(told), lambda *_: None)
        assert await nodes.begin("here", 3, 0) == 3
        assert nodes.gpus() == [0, 1, 2]
        assert await nodes.ask(2, "kill", ("w",)) is None
        ray.lost.set()
        assert nodes.gpus() == []
        assert await nodes.ask(2, "stop", ("w", 1.0)) is None
        assert lost == [(0, 3, "was on a Ray cluster that is lost")]
        await asyncio.wait_for(nodes.watch(asyncio.Event()), 20)

    asyncio.run(play())
