"""Workers on several machines: one Ray actor per node, which takes no Ray resources and starts processes there.

Ray gives membership, transport and the code on every node; it places nothing. Whether a node lives is asked of its
actor twice a second, since Ray itself takes up to half a minute to say that one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.core.extras import needs
from cotenant.serving.protocol.tensors import ModelInfo, Tensor
from cotenant.serving.worker import Job, LoadError, Result, Worker, WorkerListener, WorkerSpec
from cotenant.serving.workers.local import LOAD_LIMIT_S, LocalWorkers

LOG = logging.getLogger(__name__)

PING_S, SILENT_S = 0.5, 3.0
CONNECT_S = 60.0
CALLS = 1000  # of one actor at a time; each worker has at most one batch


class NodeHost:
    """Runs inside the actor of a node: local workers by name, called from afar."""

    def __init__(self, mechanism: str, gpus: int, timed: bool, load_limit_s: float) -> None:
        self._factory = LocalWorkers(mechanism, gpus, timed=timed, load_limit_s=load_limit_s)
        self._workers: dict[str, Worker] = {}
        self._answers: dict[str, asyncio.Future[Result | str]] = {}
        self._dead: dict[str, str] = {}

    async def ping(self) -> dict[str, str]:
        """Workers that have died since the last time, and why."""
        dead, self._dead = self._dead, {}
        return dead

    async def start(self, spec: WorkerSpec) -> tuple[int | None, dict[str, ModelInfo] | tuple[str, str]]:
        """Start a worker: its process and what it found, or the service and the reason of a failure."""
        worker = self._factory.create(spec, self)
        self._workers[spec.name] = worker
        try:
            found = await worker.start()
        except LoadError as error:
            self._workers.pop(spec.name, None)
            return None, (error.service, error.why)
        return worker.pid, found

    async def run(self, name: str, job: Job) -> Result | str:
        """A batch's result, or why the worker died over it."""
        worker = self._workers.get(name)
        if worker is None:
            return "is not there any more"
        future: asyncio.Future[Result | str] = asyncio.get_running_loop().create_future()
        self._answers[name] = future
        worker.submit(job)
        return await future

    async def stop(self, name: str, grace_s: float) -> None:
        """End a worker after its batch."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            await worker.stop(grace_s)

    async def kill(self, name: str) -> None:
        """End a worker now."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.kill()

    async def close(self) -> None:
        """End every worker."""
        await asyncio.gather(*(w.stop(1.0) for w in self._workers.values()))
        self._workers.clear()
        await self._factory.close()

    def finished(self, worker: Worker, job: Job, result: Result) -> None:
        """See WorkerListener."""
        future = self._answers.pop(worker.spec.name, None)
        if future is not None and not future.done():
            future.set_result(result)

    def died(self, worker: Worker, why: str) -> None:
        """See WorkerListener."""
        name = worker.spec.name
        self._workers.pop(name, None)
        future = self._answers.pop(name, None)
        if future is not None and not future.done():
            future.set_result(why)
        else:
            self._dead[name] = why


@dataclass
class Node:
    """A machine of the Ray cluster: its id, its actor, the first of its GPU numbers, and when it last answered."""

    id: str
    actor: Any
    first: int
    heard_s: float
    alive: bool = True


class RayWorker:
    """A worker on another machine. See Worker."""

    def __init__(self, spec: WorkerSpec, listener: WorkerListener, node: Node, owner: RayWorkers) -> None:
        self.spec, self.node = spec, node
        self.pid: int | None = None
        self._listener, self._owner = listener, owner
        self._stopping = self._dead = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> dict[str, ModelInfo]:
        """See Worker."""
        self._owner.loop = asyncio.get_running_loop()
        local = replace(self.spec, gpu=self.spec.gpu - self.node.first)
        try:
            self.pid, found = await self.node.actor.start.remote(local)
        except Exception as error:  # Ray's own: the node or its actor is gone
            self._owner.lost(self.node)
            raise LoadError("", f"node {self.node.id[:8]} is lost: {_first_line(error)}") from None
        if isinstance(found, tuple):
            raise LoadError(*found)
        self._owner.running.add(self)
        infos: dict[str, ModelInfo] = found
        return infos

    def submit(self, job: Job) -> None:
        """See Worker."""
        units = [[Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in unit] for unit in job.units]
        self._spawn(self._run(job, replace(job, units=units)))

    async def _run(self, job: Job, sent: Job) -> None:
        try:  # when it was submitted is noted there: clocks of machines differ
            result = await self.node.actor.run.remote(self.spec.name, sent)
        except Exception as error:
            self._owner.lost(self.node, _first_line(error))
            return
        if self._dead:
            return
        if isinstance(result, str):
            self.gone(result)
        else:
            self._listener.finished(self, job, result)

    def gone(self, why: str) -> None:
        """The process, or its whole node, is gone: say so once."""
        if self._dead:
            return
        self._dead = True
        self._owner.running.discard(self)
        if not self._stopping:
            self._listener.died(self, why)

    async def stop(self, grace_s: float) -> None:
        """See Worker."""
        self._stopping = True
        self._owner.running.discard(self)
        if self.node.alive and not self._dead:
            with contextlib.suppress(Exception):  # a node that is gone has stopped
                await asyncio.wait_for(_wait(self.node.actor.stop.remote(self.spec.name, grace_s)), grace_s + SILENT_S)

    def kill(self) -> None:
        """See Worker."""
        if self.node.alive:
            self._spawn(self._kill())

    async def _kill(self) -> None:
        with contextlib.suppress(Exception):
            await self.node.actor.kill.remote(self.spec.name)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _wait(reference: Any) -> Any:
    return await reference


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class RayWorkers:
    """A WorkerFactory over a Ray cluster. Plan GPU k is on node k // per_node; a node that joins takes the numbers of
    one that is lost."""

    def __init__(
        self, address: str, mechanism: str, gpus: int, *, timed: bool = False, load_limit_s: float = LOAD_LIMIT_S
    ) -> None:
        """Join the cluster at `address` ("auto" for the one of this machine) and put an actor on each node; WorkError
        when it cannot be reached, MissingExtraError when Ray is not installed."""
        with needs("ray"):
            import ray
        self._ray = ray
        self.count = gpus
        self.loop: asyncio.AbstractEventLoop | None = None
        self.running: set[RayWorker] = set()
        self._host = ray.remote(NodeHost)
        self._arguments = (mechanism, timed, load_limit_s)
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="cotenant")
            except Exception as error:
                raise WorkError(f"cannot reach Ray at {address}: {_first_line(error)}") from None
        living = self._living()
        if not living:
            raise WorkError(f"the Ray cluster at {address} has no nodes")
        self.per_node = -(-gpus // len(living))
        self.nodes: list[Node] = []
        self._closing = threading.Event()
        for i, node_id in enumerate(living[: -(-gpus // self.per_node)]):
            self.nodes.append(self._place(node_id, i * self.per_node))
        self._answered(self.nodes)
        self._watcher = threading.Thread(target=self._watch, name="cotenant-ray", daemon=True)
        self._watcher.start()

    def _living(self) -> list[str]:
        return sorted(n["NodeID"] for n in self._ray.nodes() if n["Alive"])

    def _place(self, node_id: str, first: int) -> Node:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        mechanism, timed, load_limit_s = self._arguments
        gpus = min(self.per_node, self.count - first)
        actor = self._host.options(
            num_cpus=0, num_gpus=0, max_concurrency=CALLS, max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(mechanism, gpus, timed, load_limit_s)  # fmt: skip
        return Node(node_id, actor, first, time.monotonic())

    def _answered(self, nodes: Sequence[Node]) -> None:
        """Wait until actors run, so that the first plan does not wait for Ray's worker processes."""
        try:
            self._ray.get([n.actor.ping.remote() for n in nodes], timeout=CONNECT_S)
        except Exception as error:
            raise WorkError(f"a node of the Ray cluster does not run its actor: {_first_line(error)}") from None
        for node in nodes:
            node.heard_s = time.monotonic()

    def gpus(self) -> Sequence[int]:
        """See WorkerFactory."""
        return [g for n in self.nodes if n.alive for g in range(n.first, min(n.first + self.per_node, self.count))]

    def create(self, spec: WorkerSpec, listener: WorkerListener) -> Worker:
        """See WorkerFactory."""
        node = next(n for n in self.nodes if n.first <= spec.gpu < n.first + self.per_node)
        return RayWorker(spec, listener, node, self)

    def _watch(self) -> None:
        """On a thread of its own: ask every node whether it lives, and look for new ones."""
        while not self._closing.wait(PING_S):
            asked = {node.actor.ping.remote(): node for node in self.nodes if node.alive}
            done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=PING_S) if asked else ([], [])
            for reference in done:
                node = asked[reference]
                try:
                    dead = self._ray.get(reference)
                except Exception as error:
                    self._tell(self.lost, node, _first_line(error))
                    continue
                node.heard_s = time.monotonic()
                for name, why in dead.items():
                    self._tell(self._worker_died, node, name, why)
            for node in self.nodes:
                if node.alive and time.monotonic() - node.heard_s > SILENT_S:
                    self._tell(self.lost, node, f"it has said nothing for {SILENT_S:g} s")
            if any(not n.alive for n in self.nodes):
                self._replace_lost()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call on the server's event loop, whose objects it changes."""
        if self.loop is None or self.loop.is_closed():
            function(*arguments)
        else:
            self.loop.call_soon_threadsafe(function, *arguments)

    def _worker_died(self, node: Node, name: str, why: str) -> None:
        for worker in [w for w in self.running if w.node is node and w.spec.name == name]:
            worker.gone(why)

    def lost(self, node: Node, why: str = "") -> None:
        """A node is gone: its GPU numbers vanish and its workers have died."""
        if not node.alive or self._closing.is_set():
            return
        node.alive = False
        LOG.warning("node %s is lost: %s", node.id[:8], why)
        for worker in [w for w in self.running if w.node is node]:
            worker.gone(f"was on node {node.id[:8]}, which is lost")

    def _replace_lost(self) -> None:
        taken = {n.id for n in self.nodes}
        try:
            fresh = [node_id for node_id in self._living() if node_id not in taken]
        except Exception:  # the cluster's head is away: what runs goes on
            return
        for i, node in enumerate(self.nodes):
            if not node.alive and fresh:
                made = self._place(fresh.pop(0), node.first)
                try:
                    self._answered([made])
                except WorkError:
                    continue
                self.nodes[i] = made
                LOG.info("node %s has joined", made.id[:8])

    async def close(self) -> None:
        """See WorkerFactory: actors end with their workers; the connection to Ray last."""
        self._closing.set()
        await asyncio.to_thread(self._watcher.join, 5.0)
        for node in self.nodes:
            if node.alive:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(_wait(node.actor.close.remote()), 5.0)
            self._ray.kill(node.actor, no_restart=True)
        if self._started_ray:
            await asyncio.to_thread(self._ray.shutdown)


def connect(address: str, services: str, profile: str | None = None) -> RayWorkers:
    """The workers for a services file on the Ray cluster at an address."""
    from cotenant.serving.config.backends import pretends
    from cotenant.serving.config.planning import build_problem
    from cotenant.serving.config.server import read_serving
    from cotenant.serving.config.services import read_services

    deployment = read_services(services)
    config = read_serving(deployment)
    problem = build_problem(deployment, profile)
    timed = all(pretends(entry.backend) for entry in config.models.values())
    return RayWorkers(
        address, deployment.mechanism, len(problem.gpus), timed=timed, load_limit_s=config.entry.load_timeout
    )
