"""Data of a tenant and of its connected processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cotenant.abi.protocol import NO_SLOT, MessageType, MoveFlag, Status
from cotenant.agent.config.files import TenantSpec
from cotenant.agent.ipc import wire
from cotenant.agent.ipc.page import Page
from cotenant.agent.mechanisms.base import Enforcement
from cotenant.agent.processes import Peer, ProcessKey
from cotenant.agent.tenants.places import Owner
from cotenant.devices.base import Gpu
from cotenant.policy.shares import Share

MAX_UNSENT = 256  # most messages buffered for a process that does not read


class ControlGroup(NamedTuple):
    """The control group with a tenant's memory limit. `made`: created by the agent, which removes it."""

    path: Path
    made: bool


@dataclass(eq=False)
class Tenant:
    """One tenant: promise, placement, processes, history."""

    spec: TenantSpec
    gpus: tuple[Gpu, ...]
    token: str
    uid: int
    enforcement: Enforcement
    declared: bool = False
    owner: Owner | None = None  # the pod or job to which the tenant belongs, whatever its processes do
    root: ProcessKey | None = None
    left_behind: bool = False  # its program has ended; others of its process group or with its token may run
    group: int | None = None
    orphans: frozenset[ProcessKey] = frozenset()
    launching: bool = False  # registered by a launcher that has not started the program yet
    created_ns: int = 0
    timeout_s: float | None = None
    sessions: list[Session] = field(default_factory=list)
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    warning_count: int = 0
    not_enforced: dict[str, int] = field(default_factory=dict)  # deviation from its share -> start time in ns
    launches_gone: int = 0  # launches of processes that have ended
    waited_gone_ns: int = 0
    held: ControlGroup | None = None  # group in which kernel or driver limits its memory
    held_not: str = ""  # why they do not, although they could

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.spec.name

    @property
    def pids(self) -> set[int]:
        """Its processes on the GPU and its program, since a worker that only sleeps has no session."""
        return {s.peer.pid for s in self.sessions} | ({self.root.pid} if self.root else set())

    def slots_on(self, gpu: str) -> list[tuple[Session, int]]:
        """Its processes that have attached a GPU, each with its slot of the page."""
        return [(s, slot) for s in self.sessions for slot, attached in s.slots.items() if attached == gpu]

    def environment(self, *, below: bool) -> dict[str, str]:
        """Environment of a program started now. `below`: the scheme runs best-effort work at lower priority, unless the
        tenant's priority says otherwise.
        """
        lower = below and self.spec.best_effort and self.spec.priority == 0
        return self.enforcement.environment | (self.enforcement.below if lower else {})

    def share(self) -> Share:
        """Its promise as the broker's Share."""
        gang = tuple(g.uuid for g in self.gpus) if len(self.gpus) > 1 else ()
        spec = self.spec
        return Share(spec.request, spec.limit, spec.priority, spec.weight, gang)

    def cap_bytes(self, gpu: Gpu) -> int | None:
        """Its memory limit on a GPU: as promised; for swappable tenants at most the GPU's size."""
        movable = self.spec.oversubscribe != "none"
        return gpu.memory_bytes if self.spec.memory_bytes is None and movable else self.spec.memory_bytes

    @property
    def kept_bytes(self) -> int | None:
        """Memory of its GPUs kept free for it: a latency-sensitive tenant's memory is always available."""
        return self.spec.memory_bytes if self.spec.latency_sensitive else None

    def warn(self, text: str) -> None:
        """Store a warning for ps, top and the launcher."""
        self.warning_count += 1
        if text not in self.warnings:
            self.warnings.append(text)


@dataclass
class MoveState:
    """Location of one process's memory on one GPU, as last reported. Sizes in bytes."""

    resident: int = 0
    evicted: int = 0
    staying: int = 0  # neither resident nor evicted: memory that other processes have opened, so it never leaves
    backing: int = 0  # host memory available for eviction
    pinned: int = 0
    low: int = 0  # range of host memory with contents
    high: int = 0
    fixed: bool = False

    def take(self, values: dict[str, Any]) -> None:
        """Apply the process's newest report."""
        self.resident, self.evicted = values["resident_bytes"], values["away_bytes"]
        self.staying = values["staying_bytes"]
        self.backing, self.pinned = values["backing_bytes"], values["pinned_bytes"]
        self.low, self.high = values["backing_low"], values["backing_high"]
        self.fixed = bool(values["flags"] & MoveFlag.FIXED)


class Session:
    """One process, at the other end of a socket. `tenant` and `page` are set when HELLO has been accepted."""

    tenant: Tenant
    page: Page

    def __init__(self, connection: socket.socket, peer: Peer, number: int, end: Callable[[Session, str], None]) -> None:
        """`end` is called, with a reason or an empty one, when the connection must be closed."""
        self.socket = connection
        self.peer = peer
        self.number = number
        self.process = ProcessKey(peer.pid, 0)
        self.program = ""
        self.welcome = False
        self.stranger = True
        self.closed = False
        self.slots: dict[int, str] = {}  # slot -> GPU UUID
        self.sms: dict[int, int] = {}  # slot -> SMs that the process sees
        self.asking: set[int] = set()
        self.moves: dict[int, MoveState] = {}  # slot -> location of its swappable memory
        self.granted: dict[int, int] = {}  # slot -> epoch as sent to the process
        self.pidfd: int | None = None
        self.passed: list[int] = []  # descriptors received with the current message
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []

    def send(self, data: bytes, fd: int = -1) -> None:
        """Send without blocking. Messages for a process that does not read are buffered; at 256 it is disconnected.

        `fd` is sent along if that is possible now: the message must make sense without it.
        """
        if self.closed:
            return
        if fd >= 0 and not self._unsent:
            with contextlib.suppress(OSError):
                socket.send_fds(self.socket, [data], [fd])
                return
        if self._unsent:
            self._keep(data)
            return
        try:
            self.socket.send(data)
        except BlockingIOError:
            self._keep(data)
            self._loop.add_writer(self.socket, self._send_rest)
        except OSError:
            self._end_soon("")

    def send_with(self, data: bytes, fd: int) -> None:
        """Send a message with a descriptor. A process that does not read its messages is disconnected."""
        try:
            if self._unsent:
                raise BlockingIOError
            socket.send_fds(self.socket, [data], [fd])
        except BlockingIOError:
            self._end_soon("it asked for a page and reads nothing")
        except OSError:
            self._end_soon("")

    def end(self, why: str) -> None:
        """Close the connection."""
        self._end(self, why)

    def _end_soon(self, why: str) -> None:
        self._loop.call_soon(self._end, self, why)

    def _keep(self, data: bytes) -> None:
        self._unsent.append(data)
        if len(self._unsent) > MAX_UNSENT:
            self._end_soon(f"it left {MAX_UNSENT} messages unread")

    def _send_rest(self) -> None:
        try:
            while self._unsent:
                self.socket.send(self._unsent[0])
                del self._unsent[0]
        except BlockingIOError:
            return
        except OSError:
            self._end(self, "")
            return
        self._loop.remove_writer(self.socket)

    def fail(self, status: Status, text: str, sequence: int = 0, slot: int = NO_SLOT) -> None:
        """Answer with ERROR."""
        self.send(wire.pack_text(MessageType.ERROR, status, text, sequence=sequence, slot=slot))

    def drop_passed(self) -> None:
        """Close descriptors that no part has taken."""
        while self.passed:
            os.close(self.passed.pop())

    def close_fds(self) -> None:
        """Release the descriptors of this connection."""
        self.drop_passed()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.socket.close()
        if self.welcome:
            self.page.release()


def work_kind(spec: TenantSpec) -> str:
    """Class of a tenant: latency-sensitive, best-effort or neither, as text."""
    return "best-effort" if spec.best_effort else "latency-sensitive" if spec.latency_sensitive else "normal"
