"""The nodes of a Ray cluster with their GPUs: the actor (`NodeHost`) on each, the loss of nodes, and their replacement.

Ray provides membership, transport and the code on every node; it does not schedule workers. Each actor is called twice
a second, because Ray takes up to half a minute to report a dead node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cotenant.core.errors import WorkError
from cotenant.core.ray_cluster import FailedCallError, LostCallError, RayCluster
from cotenant.serving.worker import WorkerSpec
from cotenant.serving.workers.ray_host import NodeHost

LOG = logging.getLogger(__name__)

PING_S, SILENT_S, AGAIN_S = 0.5, 5.0, 2.0
CONNECT_S, CLOSE_S = 60.0, 5.0
CALLS = 1000  # largest number of concurrent calls of an actor; each worker has at most one batch in flight


class LostNodeError(Exception):
    """Raised if the node that was called is lost, or the GPU has no node."""


@dataclass
class Slot:
    """The numbers of `gpus` GPUs, from `first` on, and the node that has these GPUs now. A node that is lost may be
    replaced by another one."""

    first: int
    gpus: int
    life: int = 0  # number of the present or last connection to a node (see NodeHost)
    id: str = ""  # Ray's id of the node; empty: none has been found
    actor: str = ""  # name of the node's actor; empty: none
    alive: bool = False
    why: str = ""  # why the slot has no node
    # done when the connection to the node is lost; the result is the reason. Every connection has its own future
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def end(self) -> int:
        """The first number after the numbers of the node's GPUs."""
        return self.first + self.gpus


class RayNodes:
    """The nodes of one connection to a Ray cluster; used from one event loop. If a node is lost, `lost` is called with
    its first GPU, the number after its last GPU, and the reason. If a worker dies, `died` is called with its name and
    the reason."""

    def __init__(
        self,
        cluster: RayCluster,
        host: tuple[str, bool, float],
        lost: Callable[[int, int, str], None],
        died: Callable[[str, str], None],
    ) -> None:
        """`host`: the arguments of each NodeHost except `gpus`. These are the mechanism; whether all models are timed
        (timed models only sleep, and need no GPU); and the time limit in seconds for loading models."""
        self._cluster, self._host, self._tell_lost, self._tell_died = cluster, host, lost, died
        self._slots: list[Slot] = []
        self._names = itertools.count()
        self._placing = asyncio.Lock()

    async def begin(self, address: str, gpus: int, per_node: int) -> int:
        """Start an actor on each node; returns the number of GPUs per node. If `per_node` is 0, the GPUs are spread
        evenly over the nodes. WorkError if Ray does not answer, or no node runs its actor.
        """
        try:
            living = await self._living()
        except LostCallError as error:
            raise WorkError(f"Ray at {address}: {error}") from None
        if not living:
            raise WorkError(f"the Ray cluster at {address} has no nodes")
        per_node = per_node or -(-gpus // len(living))
        self._slots = [Slot(first, min(per_node, gpus - first)) for first in range(0, gpus, per_node)]
        await asyncio.gather(*(self._mend(slot, CONNECT_S) for slot in self._slots))
        if not any(slot.alive for slot in self._slots):
            raise WorkError(f"no node of the Ray cluster runs its actor: {self._slots[0].why}")
        return per_node

    def gpus(self) -> list[int]:
        """Return the numbers of the GPUs whose nodes answer. May be called from any thread."""
        alive = [slot for slot in self._slots if slot.alive]
        return [] if self._cluster.lost.is_set() else [gpu for s in alive for gpu in range(s.first, s.end)]

    async def ask(self, gpu: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the actor on the node that has a GPU, and return the method's result; None if the node is
        lost or the method failed."""
        slot = next(s for s in self._slots if s.first <= gpu < s.end)
        local = (replace(a, gpu=a.gpu - slot.first) if isinstance(a, WorkerSpec) else a for a in arguments)
        try:
            return await self._call(slot, method, *local)
        except LostNodeError:
            return None
        except FailedCallError as error:  # the error comes from the actor's code, so the node is alive
            LOG.error("node %s: %s failed: %s", slot.id[:8], method, error)
            return None

    async def _call(self, slot: Slot, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Call a method of the actor on a slot's node. LostNodeError if the node is lost or does not answer in time."""
        if not slot.alive:
            raise LostNodeError
        lost = slot.lost
        answer = asyncio.wrap_future(self._cluster.call(slot.actor, method, slot.life, *arguments))
        await asyncio.wait({answer, lost}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            if not lost.done():
                self._lost(slot, f"it has not answered for {within_s:g} s")
            raise LostNodeError
        try:
            return answer.result()
        except LostCallError as error:
            if not lost.done():
                self._lost(slot, str(error))
            raise LostNodeError from None

    # -- membership ------------------------------------------------------------------------------------------------

    async def _living(self) -> list[str]:
        return sorted(node["NodeID"] for node in await asyncio.wrap_future(self._cluster.nodes()))

    async def watch(self, ended: asyncio.Event) -> None:
        """Watch the nodes until the connection or the server ends."""
        watchers = [asyncio.create_task(self._watch(slot)) for slot in self._slots]
        while not ended.is_set() and not self._cluster.lost.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), PING_S)
        for watcher in watchers:
            watcher.cancel()

    async def _watch(self, slot: Slot) -> None:
        """Ping a node periodically. If the node is lost, look for it or for another node."""
        while True:
            if slot.alive:
                with contextlib.suppress(LostNodeError, FailedCallError):
                    for name, why in (await self._call(slot, "ping", within_s=SILENT_S)).items():
                        self._tell_died(name, why)
            elif await self._mend(slot, SILENT_S):
                LOG.info("node %s has GPUs %d to %d", slot.id[:8], slot.first, slot.end - 1)
            await asyncio.sleep(PING_S if slot.alive else AGAIN_S)

    def _lost(self, slot: Slot, why: str) -> None:
        """Mark a node as lost: its GPUs cannot be used, and its workers count as dead."""
        slot.alive = False
        LOG.warning("node %s is lost: %s", slot.id[:8], why)
        where = "a Ray cluster that" if self._cluster.lost.is_set() else f"node {slot.id[:8]}, which"
        self._tell_lost(slot.first, slot.end, f"was on {where} is lost")
        slot.lost.set_result(why)

    async def _mend(self, slot: Slot, within_s: float) -> bool:
        """Connect a slot to a node: to the slot's previous node while Ray lists it as living, otherwise to one that no
        other slot has. The node's old workers are ended. Returns whether the node answered in time."""
        try:
            async with self._placing:
                living = await asyncio.wait_for(self._living(), within_s)
                if slot.id not in living:
                    slot.actor, taken = "", {other.id for other in self._slots if other is not slot}
                    slot.id = next((node for node in living if node not in taken), "")
                if not slot.id:
                    raise LostNodeError("no node of the cluster is left for them")
                if not slot.actor:
                    slot.actor = await asyncio.wait_for(self._place(slot), within_s)
            slot.life += 1
            await asyncio.wait_for(
                asyncio.wrap_future(self._cluster.call(slot.actor, "begin", slot.life)), within_s
            )
        except (LostNodeError, LostCallError, FailedCallError, TimeoutError) as error:
            # The error does not prove that the node is dead: perhaps only the head node of the Ray cluster does not
            # answer, and the workers continue to run
            if isinstance(error, LostCallError) and error.dead:
                slot.actor = ""  # the old actor on the node has ended
            why = str(error) or "the cluster or the node does not answer"
            if why != slot.why:
                LOG.warning("GPUs %d to %d have no node: %s", slot.first, slot.end - 1, why)
            slot.why = why
            return False
        slot.alive, slot.why, slot.lost = True, "", asyncio.get_running_loop().create_future()
        return True

    async def _place(self, slot: Slot) -> str:
        name = f"host-{next(self._names)}"
        mechanism, timed, load_limit_s = self._host
        arguments = (mechanism, slot.gpus, timed, load_limit_s)
        await asyncio.wrap_future(self._cluster.actor(name, NodeHost, arguments, slot.id, max_concurrency=CALLS))
        return name

    async def end(self) -> None:
        """End the actors with their workers, then the connection."""
        await asyncio.gather(*(self._end(slot) for slot in self._slots if slot.actor))
        await asyncio.to_thread(self._cluster.close, 3 * CLOSE_S)

    async def _end(self, slot: Slot) -> None:
        steps = (lambda: self._cluster.call(slot.actor, "close"), lambda: self._cluster.kill(slot.actor))
        for step in steps if slot.alive else steps[1:]:
            with contextlib.suppress(LostCallError, FailedCallError, TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(step()), CLOSE_S)
