"""Workers on several machines, through a Ray cluster. The calls to Ray are in another process (ray_bridge.py), which
may end with its cluster and is restarted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.core.extras import require
from cotenant.serving.protocol.tensors import ModelInfo, Tensor
from cotenant.serving.worker import Job, LoadError, UnavailableError, Worker, WorkerListener, WorkerSpec
from cotenant.serving.workers.local import LOAD_LIMIT_S
from cotenant.serving.workers.ray_bridge import CLOSE_S, CONNECT_S, PING_S, SILENT_S, Settings

LOG = logging.getLogger(__name__)

BRIDGE = "cotenant.serving.workers.ray_bridge"
HELLO_S = 3 * CONNECT_S  # time for Ray to find its cluster, and for every node to start an actor
BRIDGE_SILENT_S = 20.0  # the bridge sends a heartbeat twice a second
AGAIN_S = 2.0
END_S = 3 * CLOSE_S


class RayWorker:
    """A worker on another machine. See Worker."""

    def __init__(self, spec: WorkerSpec, listener: WorkerListener, owner: RayWorkers) -> None:
        self.spec = spec
        self.pid: int | None = None
        self._listener, self._owner = listener, owner
        self._started = self._stopping = self._dead = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> dict[str, ModelInfo]:
        """See Worker."""
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
        """See Worker."""
        units = [[Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in unit] for unit in job.units]
        self._spawn(self._run(job, replace(job, units=units)))

    async def _run(self, job: Job, sent: Job) -> None:
        # the node sets the time of submission, because clocks of machines differ
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
        """See Worker."""
        self._stopping = True
        self._owner.running.pop(self.spec.name, None)
        if not self._dead:
            with contextlib.suppress(TimeoutError):
                asked = self._owner.ask(self.spec.gpu, "stop", self.spec.name, grace_s)
                await asyncio.wait_for(asked, grace_s + SILENT_S)

    def kill(self) -> None:
        """See Worker."""
        self._spawn(self._kill())

    async def _kill(self) -> None:
        await self._owner.ask(self.spec.gpu, "kill", self.spec.name)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RayWorkers:
    """A WorkerFactory for a Ray cluster. GPU k of the plan is on node k // per_node. A new node gets the GPU numbers of
    a node that Ray has reported as dead."""

    def __init__(
        self, address: str, mechanism: str, gpus: int, *, timed: bool = False, load_limit_s: float = LOAD_LIMIT_S
    ) -> None:
        """Join the cluster at `address` ("auto": the one of this machine) and start an actor on each node. WorkError if
        it cannot be reached, MissingExtraError if Ray is not installed."""
        require("ray", "ray")
        self._settings = Settings(address, gpus, 0, mechanism, timed, load_limit_s)
        self.running: dict[str, RayWorker] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._usable: tuple[int, ...] = ()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._orders: queue.SimpleQueue[Any] | None = None  # None: no bridge process runs
        self._closing = threading.Event()
        self._process, connection = self._connect()
        self._thread = threading.Thread(target=self._keep, args=(connection,), name="cotenant-ray", daemon=True)
        self._thread.start()

    # -- WorkerFactory ---------------------------------------------------------------------------------------------

    def gpus(self) -> Sequence[int]:
        """See WorkerFactory."""
        return list(self._usable)

    def create(self, spec: WorkerSpec, listener: WorkerListener) -> Worker:
        """See WorkerFactory."""
        return RayWorker(spec, listener, self)

    async def close(self) -> None:
        """End the actors with their workers, and then the connection to Ray."""
        self._closing.set()
        if self._orders is not None:
            self._orders.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- the bridge ------------------------------------------------------------------------------------------------

    async def ask(self, gpu: int, method: str, *arguments: Any) -> Any:
        """Call the node of a GPU. Returns None if the node is lost."""
        self._loop = asyncio.get_running_loop()
        orders = self._orders  # another thread removes the entry when the bridge ends
        if orders is None:
            return None
        number = next(self._numbers)
        future = self._asked[number] = self._loop.create_future()
        orders.put((number, gpu, method, arguments))
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def _connect(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Start a bridge and wait until it has reached the cluster. WorkError if it does not."""
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", BRIDGE, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            ours.send(self._settings)
            deadline = time.monotonic() + HELLO_S
            while not ours.poll(PING_S) and time.monotonic() < deadline and not self._closing.is_set():
                pass
            hello = ours.recv() if ours.poll() else f"Ray at {self._settings.address} does not answer"
        except (EOFError, OSError):
            hello = f"Ray at {self._settings.address} ended the process that was to reach it"
        if isinstance(hello, str):
            ours.close()
            process.kill()
            process.wait()
            raise WorkError(hello)
        per_node, self._usable = hello
        self._settings = replace(self._settings, per_node=per_node)
        self._orders = queue.SimpleQueue()
        threading.Thread(target=_write, args=(ours, self._orders), name="cotenant-ray-orders", daemon=True).start()
        return process, ours

    def _keep(self, connection: Connection) -> None:
        """Thread that reads the bridge's messages, and starts another bridge when it ends."""
        while True:
            try:
                while connection.poll(BRIDGE_SILENT_S):
                    self._tell(self._heard, *connection.recv())
                LOG.warning("the process that speaks Ray hangs; it is started again")
            except (EOFError, OSError):
                pass
            self._end_bridge(connection)
            lost = threading.Event()
            self._tell(self._bridge_lost, lost)
            while not (lost.wait(PING_S) or self._closing.is_set()):
                pass  # calls to the next bridge must not be reported as lost when this bridge ends
            said = ""
            while not self._closing.wait(AGAIN_S):
                try:
                    self._process, connection = self._connect()
                    LOG.info("Ray at %s is reached again", self._settings.address)
                    break
                except WorkError as error:
                    if str(error) != said:
                        LOG.warning("%s; trying on", error)
                    said = str(error)
            else:
                return

    def _end_bridge(self, connection: Connection) -> None:
        orders, self._orders, self._usable = self._orders, None, ()
        if orders is not None:
            orders.put(None)
        try:
            self._process.wait(END_S if self._closing.is_set() else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        connection.close()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the server's event loop, because it changes the server's objects."""
        loop = self._loop
        if loop is None:
            function(*arguments)
            return
        with contextlib.suppress(RuntimeError):  # the event loop has ended, so the message is not needed
            loop.call_soon_threadsafe(function, *arguments)

    def _heard(self, what: int | str, *values: Any) -> None:
        if isinstance(what, int):
            future = self._asked.pop(what, None)
            if future is not None and not future.done():
                future.set_result(values[0])
        elif what == "gpus":
            self._usable = values[0]
        elif what == "lost":
            (first, end), why = values
            for worker in [w for w in self.running.values() if first <= w.spec.gpu < end]:
                worker.gone(why)
        elif (dead := self.running.get(values[0])) is not None:
            dead.gone(values[1])

    def _bridge_lost(self, done: threading.Event) -> None:
        self._usable = ()  # a last message of the old bridge may have set this after the bridge's end
        if not self._closing.is_set():
            LOG.warning("Ray at %s is lost: none of its GPUs can be used", self._settings.address)
        for future in [f for f in self._asked.values() if not f.done()]:
            future.set_result(None)
        for worker in list(self.running.values()):
            worker.gone("was on a Ray cluster that is lost")
        done.set()


def _write(connection: Connection, orders: queue.SimpleQueue[Any]) -> None:
    """Write to the bridge in a thread, so that a bridge that hangs does not block the server."""
    with contextlib.suppress(OSError, ValueError):
        order = ()
        while order is not None:
            order = orders.get()
            connection.send(order)


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
