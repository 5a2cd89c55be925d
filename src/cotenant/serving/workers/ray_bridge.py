"""The process that calls Ray for a server: `python -m cotenant.serving.workers.ray_bridge FD`, started by on_ray.py.

It is separate, because Ray ends a process a minute after its cluster's head has died, and needs hundreds of megabytes.
Ray provides membership, transport and the code on every node; it does not schedule workers. The bridge calls the actor
of each node twice a second, because Ray takes up to half a minute to report a dead node.

Messages are pickled, on a socket. `(number, gpu, method, arguments)` is a call on that GPU's node; the answer is
`(number, answer)`, or None if the node is lost. The bridge also sends `("gpus" | "died" | "lost", ...)`; "gpus" comes
twice a second, as a heartbeat. The server sends None before it closes the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from cotenant.core import logs
from cotenant.serving.worker import WorkerSpec
from cotenant.serving.workers.ray_host import NodeHost

LOG = logging.getLogger("cotenant.serving.workers.ray_bridge")  # run with -m

PING_S, SILENT_S, AGAIN_S = 0.5, 5.0, 2.0
CONNECT_S, CLOSE_S = 60.0, 5.0
CALLS = 1000  # concurrent calls of an actor; each worker has at most one batch in flight


@dataclass(frozen=True)
class Settings:
    """Settings of a bridge: the cluster, the GPUs, and what workers need. `per_node`: GPUs per node; 0: spread
    evenly."""

    address: str
    gpus: int
    per_node: int
    mechanism: str
    timed: bool
    load_limit_s: float


class LostNodeError(Exception):
    """Raised if the node that was called is lost, or no node has the GPU."""


@dataclass
class Slot:
    """The GPUs of a node, from number `first` on, with the node's machine id and actor. A node that was lost and found
    again starts a new `life`; `lost` is completed with the reason when the present life ends."""

    first: int
    gpus: int
    life: int = 0
    id: str = ""
    actor: Any = None
    alive: bool = False
    why: str = ""  # reason why the slot has no node
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Bridge:
    """Passes a server's calls to the actors on the nodes of a Ray cluster."""

    def __init__(self, ray: Any, settings: Settings, connection: Connection) -> None:
        self.ray, self.settings, self.connection = ray, settings, connection
        self.slots: list[Slot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._placing = asyncio.Lock()

    async def serve(self) -> None:
        """Connect to the nodes, report their GPUs, and execute calls until the server closes the socket."""
        living = await self._living()
        if not living:
            self.connection.send(f"the Ray cluster at {self.settings.address} has no nodes")
            return
        per_node = self.settings.per_node or -(-self.settings.gpus // len(living))
        for first in range(0, self.settings.gpus, per_node):
            self.slots.append(Slot(first, min(per_node, self.settings.gpus - first)))
        await asyncio.gather(*(self._mend(slot, CONNECT_S) for slot in self.slots))
        if not any(slot.alive for slot in self.slots):
            self.connection.send(f"no node of the Ray cluster runs its actor: {self.slots[0].why}")
            return
        self.connection.send((per_node, self._gpus()))
        watchers = [asyncio.create_task(self._watch(slot)) for slot in self.slots]
        loop, hung_up = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while (message := self.connection.recv()) is not None:
                    loop.call_soon_threadsafe(self._take, *message)
            loop.call_soon_threadsafe(hung_up.set)

        threading.Thread(target=read, name="server", daemon=True).start()
        while not hung_up.is_set():
            self._say()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hung_up.wait(), PING_S)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*(self._end(slot) for slot in self.slots))

    def _gpus(self) -> tuple[int, ...]:
        return tuple(g for s in self.slots if s.alive for g in range(s.first, s.first + s.gpus))

    def _say(self) -> None:
        self._send("gpus", self._gpus())

    def _send(self, *message: Any) -> None:
        # the server has closed the socket: the thread that reads from it notices that
        with contextlib.suppress(OSError):
            self.connection.send(message)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _take(self, number: int, gpu: int, method: str, arguments: tuple[Any, ...]) -> None:
        slot = next(s for s in self.slots if s.first <= gpu < s.first + s.gpus)
        local = (replace(a, gpu=a.gpu - slot.first) if isinstance(a, WorkerSpec) else a for a in arguments)
        task = asyncio.create_task(self._answer(number, slot, method, tuple(local)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, slot: Slot, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._send(number, await self._call(slot, method, *arguments))
        except LostNodeError:
            self._send(number, None)  # after "lost"
        except self.ray.exceptions.RayTaskError as error:  # an error in the actor's code: the node is alive
            LOG.error("node %s: %s failed: %s", slot.id[:8], method, _first_line(error.cause))
            self._send(number, None)

    async def _call(self, slot: Slot, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Call the node of a slot. LostNodeError if the node is lost or does not answer in time."""
        if not slot.alive:
            raise LostNodeError
        lost = slot.lost
        task = asyncio.ensure_future(_result(getattr(slot.actor, method).remote(slot.life, *arguments)))
        await asyncio.wait({task, lost}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            if not lost.done():
                self._lost(slot, f"the node has not answered for {within_s:g} s")
            raise LostNodeError
        try:
            return task.result()
        except self.ray.exceptions.RayTaskError:
            raise
        except Exception as error:  # an error of Ray: the node or its actor is gone
            if not lost.done():
                self._lost(slot, _first_line(error))
            raise LostNodeError from None

    # -- membership ------------------------------------------------------------------------------------------------

    async def _living(self) -> list[str]:
        nodes = await asyncio.to_thread(self.ray.nodes)
        return sorted(node["NodeID"] for node in nodes if node["Alive"])

    async def _watch(self, slot: Slot) -> None:
        """Call a node periodically. If it is lost, look for it or for another node."""
        while True:
            if slot.alive:
                with contextlib.suppress(LostNodeError):
                    for name, why in (await self._call(slot, "ping", within_s=SILENT_S)).items():
                        self._send("died", name, why)
            elif await self._mend(slot, SILENT_S):
                LOG.info("node %s has GPUs %d to %d", slot.id[:8], slot.first, slot.first + slot.gpus - 1)
                self._say()
            await asyncio.sleep(PING_S if slot.alive else AGAIN_S)

    def _lost(self, slot: Slot, why: str) -> None:
        """Mark a node as lost: its GPUs cannot be used, and its workers count as dead."""
        slot.alive = False
        LOG.warning("node %s is lost: %s", slot.id[:8], why)
        self._say()
        self._send("lost", (slot.first, slot.first + slot.gpus), f"was on node {slot.id[:8]}, which is lost")
        slot.lost.set_result(why)

    async def _mend(self, slot: Slot, within_s: float) -> bool:
        """Find a node for a slot: the previous one if it answers again, after its old workers were ended; a new one if
        Ray reports the previous one as dead."""
        try:
            async with self._placing:
                living = await asyncio.wait_for(self._living(), CLOSE_S)
                if slot.id not in living:
                    slot.actor, taken = None, {other.id for other in self.slots if other is not slot}
                    slot.id = next((node for node in living if node not in taken), "")
                if not slot.id:
                    raise LostNodeError("no node of the cluster is left for them")
                if slot.actor is None:
                    slot.actor = await asyncio.wait_for(asyncio.to_thread(self._place, slot), CLOSE_S)
            slot.life += 1
            await asyncio.wait_for(_result(slot.actor.begin.remote(slot.life)), within_s)
        except Exception as error:  # the node may be dead, or only Ray's head may be down: running workers continue
            errors = self.ray.exceptions
            if isinstance(error, errors.RayActorError) and not isinstance(error, errors.ActorUnavailableError):
                slot.actor = None  # the old actor has ended
            why = (str(error) and _first_line(error)) or "the node does not answer"
            if why != slot.why:
                LOG.warning("GPUs %d to %d have no node: %s", slot.first, slot.first + slot.gpus - 1, why)
            slot.why = why
            return False
        slot.alive, slot.why, slot.lost = True, "", asyncio.get_running_loop().create_future()
        return True

    def _place(self, slot: Slot) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        settings = self.settings
        host = self.ray.remote(NodeHost).options(
            num_cpus=0, num_gpus=0, max_concurrency=CALLS, max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.id, soft=False),
        )  # fmt: skip
        return host.remote(settings.mechanism, slot.gpus, settings.timed, settings.load_limit_s)

    async def _end(self, slot: Slot) -> None:
        if slot.actor is None:
            return
        if slot.alive:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_result(slot.actor.close.remote()), CLOSE_S)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.to_thread(self.ray.kill, slot.actor), CLOSE_S)


async def _result(reference: Awaitable[Any]) -> Any:
    return await reference


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def main() -> None:
    """Serve one server until it closes the socket."""
    logs.configure()
    connection: Connection = Connection(int(sys.argv[1]))
    settings: Settings = connection.recv()
    import ray

    try:
        ray.init(address=settings.address, log_to_driver=False, configure_logging=False, namespace="cotenant")
    except Exception as error:
        connection.send(f"cannot reach Ray at {settings.address}: {_first_line(error)}")
        return
    # signals often go to the whole process group, but the server must drain before it closes the socket
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(ray, settings, connection))


async def _serve(ray: Any, settings: Settings, connection: Connection) -> None:
    await Bridge(ray, settings, connection).serve()


if __name__ == "__main__":
    main()
