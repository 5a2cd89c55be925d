"""Workers on several machines, through a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from cotenant.core.background import spawn
from cotenant.core.errors import WorkError
from cotenant.core.extras import require
from cotenant.core.ray_cluster import RayCluster
from cotenant.serving.protocol.tensors import ModelInfo, Tensor
from cotenant.serving.worker import Job, LoadError, UnavailableError, Worker, WorkerListener, WorkerSpec
from cotenant.serving.workers.local import LOAD_LIMIT_S
from cotenant.serving.workers.ray_nodes import SILENT_S, RayNodes

LOG = logging.getLogger(__name__)

T = TypeVar("T")
AGAIN_S = 2.0


class RayWorker:
    """A worker on another machine. See Worker."""

    def __init__(self, spec: WorkerSpec, listener: WorkerListener, owner: RayWorkers) -> None:
        self.spec = spec
        self.pid: int | None = None
        self._listener, self._owner = listener, owner
        self._started = self._stopping = self._dead = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> dict[str, ModelInfo]:
        self._owner.running[self.spec.name] = self
        answer = await self._owner.ask(self.spec.gpu, "start", self.spec)
        if answer is None or self._dead:
            self.gone()
            raise UnavailableError(f"the node of GPU {self.spec.gpu} is lost")
        self.pid, found = answer
        if isinstance(found, tuple):
            self.gone()
            raise LoadError(*found)
        self._started = True
        infos: dict[str, ModelInfo] = found
        return infos

    def submit(self, job: Job) -> None:
        units = [[Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in unit] for unit in job.units]
        spawn(self._tasks, self._run(job, replace(job, units=units)))

    async def _run(self, job: Job, sent: Job) -> None:
        # the time of submission is set on the node, because clocks of machines differ
        result = await self._owner.ask(self.spec.gpu, "run", self.spec.name, sent)
        if self._dead:
            return
        if result is None or isinstance(result, str):
            self.gone(result or "was on a node that is lost")
        else:
            self._listener.finished(self, job, result)

    def gone(self, why: str = "") -> None:
        """Report once that the process, or its whole node, is gone."""
        if self._dead:
            return
        self._dead = True
        self._owner.running.pop(self.spec.name, None)
        if self._started and not self._stopping:
            self._listener.died(self, why)

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        self._owner.running.pop(self.spec.name, None)
        if not self._dead:
            with contextlib.suppress(TimeoutError):
                asked = self._owner.ask(self.spec.gpu, "stop", self.spec.name, grace_s)
                await asyncio.wait_for(asked, grace_s + SILENT_S)

    def kill(self) -> None:
        spawn(self._tasks, self._owner.ask(self.spec.gpu, "kill", self.spec.name))


class RayWorkers:
    """A WorkerFactory for a Ray cluster. GPU k of the plan is on node k // per_node. A new node gets the GPU numbers of
    a node that Ray reports as dead. A thread with its own event loop connects to the nodes, watches them and replaces
    lost ones (`RayNodes`)."""

    def __init__(
        self, address: str, mechanism: str, gpus: int, *, timed: bool = False, load_limit_s: float = LOAD_LIMIT_S
    ) -> None:
        """Join the cluster at `address` ("auto": the one of this machine) and start an actor on each node. WorkError if
        it cannot be reached, MissingExtraError if Ray is not installed."""
        require("ray", "ray")
        self.running: dict[str, RayWorker] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeping = asyncio.new_event_loop()
        self._closing = threading.Event()
        self._ended = asyncio.Event()
        self._address, self._gpus = address, gpus
        self._host = (mechanism, timed, load_limit_s)
        self._per_node = 0
        self._nodes: RayNodes | None = None  # None: there is no connection to a Ray cluster
        self._thread = threading.Thread(target=self._keeping.run_forever, name="cotenant-ray", daemon=True)
        self._thread.start()
        try:
            self._nodes = self._there(self._connect()).result()
        except BaseException:
            self._keeping.call_soon_threadsafe(self._keeping.stop)
            raise
        self._kept = self._there(self._keep())

    def _there(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop of the thread that watches the nodes."""
        return asyncio.run_coroutine_threadsafe(work, self._keeping)

    # -- WorkerFactory ---------------------------------------------------------------------------------------------

    def gpus(self) -> Sequence[int]:
        nodes = self._nodes
        return nodes.gpus() if nodes is not None else []

    def create(self, spec: WorkerSpec, listener: WorkerListener) -> Worker:
        return RayWorker(spec, listener, self)

    async def close(self) -> None:
        """See WorkerFactory: the actors end together with their workers, and the connection to Ray is closed last."""
        self._closing.set()
        self._keeping.call_soon_threadsafe(self._ended.set)
        await asyncio.wrap_future(self._kept)
        self._keeping.call_soon_threadsafe(self._keeping.stop)
        await asyncio.to_thread(self._thread.join)

    # -- the nodes -------------------------------------------------------------------------------------------------

    async def ask(self, gpu: int, method: str, *arguments: Any) -> Any:
        """Call a method of the actor (`NodeHost`) on the node that has a GPU, and return the method's result; None if
        the node is lost or the method failed."""
        self._loop = asyncio.get_running_loop()
        nodes = self._nodes
        if nodes is None:
            return None
        return await asyncio.wrap_future(self._there(nodes.ask(gpu, method, arguments)))

    async def _connect(self) -> RayNodes:
        """Connect to the cluster and its nodes. WorkError if none can be reached."""
        cluster = await asyncio.to_thread(RayCluster, self._address, cancelled=self._closing)
        nodes = RayNodes(cluster, self._host, self._lost, self._died)
        try:
            self._per_node = await nodes.begin(self._address, self._gpus, self._per_node)
        except BaseException:
            await asyncio.to_thread(cluster.close)
            raise
        return nodes

    async def _keep(self) -> None:
        """Watch the nodes of the Ray cluster, and connect to the cluster again when the connection has ended."""
        while True:
            nodes = self._nodes
            assert nodes is not None
            await nodes.watch(self._ended)
            self._nodes = None
            if self._ended.is_set():
                await nodes.end()
                return
            LOG.warning("Ray at %s is lost: none of its GPUs can be used", self._address)
            self._lost(0, self._gpus, "was on a Ray cluster that is lost")
            said = ""
            while self._nodes is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), AGAIN_S)
                    return
                try:
                    self._nodes = await self._connect()
                    LOG.info("Ray at %s is reached again", self._address)
                except WorkError as error:
                    if str(error) != said:
                        LOG.warning("%s; trying again", error)
                    said = str(error)

    def _lost(self, first: int, end: int, why: str) -> None:
        """Report that the workers on the GPUs `first` to `end` - 1 have ended."""

        def gone() -> None:
            for worker in [w for w in self.running.values() if first <= w.spec.gpu < end]:
                worker.gone(why)

        self._tell(gone)

    def _died(self, name: str, why: str) -> None:
        def gone() -> None:
            if (worker := self.running.get(name)) is not None:
                worker.gone(why)

        self._tell(gone)

    def _tell(self, function: Callable[[], None]) -> None:
        """Run a function on the server's event loop, because it changes the server's objects."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # if the event loop has ended, the message is not needed any more
                self._loop.call_soon_threadsafe(function)


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
