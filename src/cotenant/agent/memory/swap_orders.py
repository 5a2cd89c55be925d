"""Orders to the shim in tenants' processes to evict or restore their memory, with progress and result."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cotenant.abi.protocol import MessageType, MoveFlag, Status
from cotenant.agent.ipc import wire
from cotenant.agent.tenants.tenant import Session, Tenant

EVERYTHING = 1 << 62
# bytes per second; a process that swaps more slowly than this is treated as one that does not answer
SLOWEST_BPS = 0.2e9


@dataclass
class MoveEnd:
    """Result of an order to a process to swap memory. `status` None: the process has ended or does not answer."""

    status: int | None
    moved_bytes: int = 0
    elapsed_ns: int = 0  # time from the order to the end of the move, measured in the process
    mapping_ns: int = 0  # part of elapsed_ns in which the process mapped and unmapped memory
    copying_ns: int = 0  # part of elapsed_ns in which the process waited for copies
    handed_bytes: int = 0  # part of moved_bytes that was passed to or from another process on the device

    @classmethod
    def told(cls, status: int, values: dict[str, Any]) -> MoveEnd:
        """Convert the values of a MOVE_DONE message."""
        names = ("elapsed_ns", "mapping_ns", "copying_ns", "handed_bytes")
        return cls(status, values["bytes"], *(values[name] for name in names))


@dataclass
class MoveCount:
    """Totals of a tenant's evictions and restores."""

    moves_out: int = 0
    moves_in: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    seconds: float = 0.0
    mapping_ns: int = 0  # time that the tenant's processes took to map and unmap memory
    copying_ns: int = 0  # time that the tenant's processes waited for copies
    handed_bytes: int = 0  # bytes of device memory that were passed to or from another process
    elapsed_ns: int = 0  # time that the tenant's processes took for all orders

    def add_out(self, end: MoveEnd) -> None:
        """Add an eviction to the totals."""
        self.moves_out += bool(end.moved_bytes)
        self.out_bytes += end.moved_bytes
        self._add(end)

    def add_in(self, end: MoveEnd) -> None:
        """Add a restore to the totals."""
        self.moves_in += bool(end.moved_bytes)
        self.in_bytes += end.moved_bytes
        self._add(end)

    def add_whole(self, size: int, *, out: bool, seconds: float = 0.0) -> None:
        """Count an eviction (`out`) or restore of whole processes by the driver's checkpoint; `size` in bytes."""
        if out:
            self.moves_out += 1
            self.out_bytes += size
        else:
            self.moves_in += 1
            self.in_bytes += size
        self.seconds += seconds

    def parts_s(self) -> dict[str, float]:
        """Return how many seconds the tenant's processes took for orders: in all, for mapping memory, and waiting for
        copies.
        """
        return {
            "process_s": self.elapsed_ns / 1e9,
            "mapping_s": self.mapping_ns / 1e9,
            "copying_s": self.copying_ns / 1e9,
        }

    def _add(self, end: MoveEnd) -> None:
        self.mapping_ns += end.mapping_ns
        self.copying_ns += end.copying_ns
        self.handed_bytes += end.handed_bytes
        self.elapsed_ns += end.elapsed_ns


class SwapOrders:
    """Sends orders about memory to processes, and keeps the orders that are not done yet."""

    def __init__(self, answer_s: Callable[[], float]) -> None:
        # a process that has sent no message for this long is treated as one that does not answer
        self._answer_s = answer_s
        # Outside the range of the shim's own sequence numbers, and different from those of a previous agent: a process
        # may report to this agent that it has carried out an order of the previous one.
        self._numbers = itertools.count((1 << 62) + time.monotonic_ns())
        self._open: dict[int, tuple[Session, asyncio.Future[MoveEnd], Callable[[int], None]]] = {}

    async def give(
        self,
        session: Session,
        slot: int,
        kind: MessageType,
        values: dict[str, int],
        expected_bytes: int,
        on_progress: Callable[[int], None],
        hand: int = -1,
    ) -> MoveEnd:
        """Order a process to evict (MOVE_OUT) or restore (MOVE_IN) memory, and wait for the result. `on_progress` is
        called with the bytes moved so far. `hand`: descriptor of the process's end of a HandleTransfer.
        """
        number = next(self._numbers)
        future: asyncio.Future[MoveEnd] = asyncio.get_running_loop().create_future()
        self._open[number] = (session, future, on_progress)
        session.send(wire.pack(kind, values, sequence=number, slot=slot), hand)
        try:
            return await asyncio.wait_for(future, self._answer_s() + expected_bytes / SLOWEST_BPS)
        except TimeoutError:
            return MoveEnd(None)
        finally:
            self._open.pop(number, None)

    def progress(self, session: Session, number: int, moved_bytes: int) -> None:
        """Handle a process's message that reports the bytes moved so far (MOVE_PROGRESS)."""
        if number in self._open and self._open[number][0] is session:
            self._open[number][2](moved_bytes)

    def done(self, session: Session, number: int, end: MoveEnd) -> None:
        """Handle a process's message that an order is done (MOVE_DONE). After a restart of the agent or a timeout, no
        order waits for the message.
        """
        if number in self._open and self._open[number][0] is session:
            _, future, on_progress = self._open.pop(number)
            on_progress(end.moved_bytes)
            if not future.done():
                future.set_result(end)

    def gone(self, session: Session) -> None:
        """End all orders to a process that has ended, since no result of them will come."""
        for number, (giver, future, _) in list(self._open.items()):
            if giver is session:
                del self._open[number]
                if not future.done():
                    future.set_result(MoveEnd(None))


class HandleTransfer:
    """Passes device memory by handle from evicted processes to restored ones. With their orders, evicted processes get
    one end of a socket pair, and restored processes the other end.

    Otherwise the driver would clear the memory before it is used again, and would use the copy engine for that, which
    the swap needs.
    """

    def __init__(self) -> None:
        giver, taker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._giver, self._taker = giver, taker

    @property
    def giver(self) -> int:
        """Descriptor of the socket pair's end for evicted processes (MOVE_OUT)."""
        return self._giver.fileno()

    @property
    def taker(self) -> int:
        """Descriptor of the socket pair's end for restored processes (MOVE_IN)."""
        return self._taker.fileno()

    def all_taken(self) -> None:
        """End the transfer because all processes are restored. Memory that was sent but not received is freed, even if
        a stopped process still has the receiving end open.
        """
        if self._taker.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._taker.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            while (left := socket.recv_fds(self._taker, 64, 4, socket.MSG_DONTWAIT))[0]:
                for memory in left[1]:
                    os.close(memory)
        self._taker.close()

    def close(self) -> None:
        """Close both ends of the socket pair."""
        self._giver.close()
        self.all_taken()


def bytes_owner(tenant: Tenant) -> tuple[object, ...]:
    """Key of the owner of a tenant's data. Memory is passed uncleared only between tenants with equal keys.

    The key has the user of the tenant and the users of its processes, since a changed configuration may give a tenant
    with running processes to another user. Tenants of pods belong to one user, so their key also has the namespace of
    the pod, with which the tenant's name begins.
    """
    in_pod = tenant.owner is not None and tenant.owner.kind == "pod"
    namespace = tenant.name.partition("/")[0] if in_pod else ""
    return (namespace, tenant.uid, *sorted({session.peer.uid for session in tenant.sessions}))


class Flow:
    """Space on a GPU that becomes free while victims are evicted, for the processes that are restored meanwhile, one
    after the other.
    """

    def __init__(self, free_bytes: int, hand: HandleTransfer | None = None) -> None:
        self.hand = hand
        self._room = max(0, free_bytes)
        self._used = 0  # bytes of GPU memory of the processes that have been restored completely
        self._now: tuple[Session, int] | None = None
        self._over = False  # true: no more victims will be evicted
        self._failed = False

    def freed(self, size: int) -> None:
        """Report that more bytes have become free on the GPU."""
        self._room += size
        self._tell()

    def end(self, complete: bool) -> None:
        """Report that evictions have ended. If they were not `complete`, the restore in progress stops."""
        self._over, self._failed = True, not complete
        self._tell()

    @property
    def allowed(self) -> int:
        """Total bytes that the process being restored may have on the GPU so far."""
        return EVERYTHING if self._over and not self._failed else max(0, self._room - self._used)

    async def admit(self, orders: SwapOrders, session: Session, slot: int, evicted_bytes: int) -> MoveEnd:
        """Restore the evicted memory of a process, as space becomes free."""
        self._now = (session, slot)
        hand = self.hand.taker if self.hand is not None else -1
        done = asyncio.ensure_future(
            orders.give(
                session, slot, MessageType.MOVE_IN, {"bytes": self.allowed}, evicted_bytes, lambda moved: None, hand
            )
        )
        if self._failed:
            self._tell()
        end = await done
        self._now = None
        self._used += end.moved_bytes
        return end

    def _tell(self) -> None:
        if self._now is None:
            return
        session, slot = self._now
        flags = MoveFlag.STOP if self._failed else 0
        session.send(wire.pack(MessageType.MOVE_ALLOW, {"bytes": self.allowed, "flags": flags}, slot=slot))


def moved_well(end: MoveEnd) -> bool:
    """Return whether the process carried out the order to move memory."""
    return end.status == Status.OK
